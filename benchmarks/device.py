"""The cases of data_path.py whose state is in device memory, in one process.

DCP and two limits are measured too. "pinned copy" copies all bytes of the state between the device and pinned host
memory, back to back, and does nothing else. Raw moves as many bytes between pinned host memory and the disk. A save
that overlaps the two perfectly takes as long as the slower one. The pinned memory is one buffer, used again from its
start: the file of raw does not hold the state, and only the loads of Milepost and DCP are compared with what was saved.
"""

from pathlib import Path
from typing import Any

import contenders as c
import raw
import torch
from harness import Measured, Planned
from showing import DCP, DIRECT, MILEPOST, RAW
from stage import Stage

PINNED = "pinned copy"
PINNED_BYTES = 1 << 30
COPY_BYTES = 64 << 20


class Pinned:
    """A pinned buffer in place of host memory as large as the state."""

    def __init__(self, size_bytes: int) -> None:
        self.tensor = torch.empty(min(raw.padded(size_bytes), PINNED_BYTES), dtype=torch.uint8, pin_memory=True)
        self.tensor.fill_(1)
        self.memory = memoryview(self.tensor.numpy())

    def take(self, state: c.State) -> None:
        """Copy all bytes of the state to the host."""
        for window, piece in self._pairs(state):
            window.copy_(piece, non_blocking=True)
        torch.cuda.synchronize()

    def give(self, state: c.State) -> None:
        """Copy as many bytes to the device."""
        for window, piece in self._pairs(state):
            piece.copy_(window, non_blocking=True)
        torch.cuda.synchronize()

    def _pairs(self, state: c.State) -> Any:
        position = 0
        for local in state.locals:
            for piece in local.view(-1).view(torch.uint8).split(COPY_BYTES):
                if position + len(piece) > len(self.tensor):
                    position = 0
                yield self.tensor[position : position + len(piece)], piece
                position += -(-len(piece) // raw.PAGE_BYTES) * raw.PAGE_BYTES


def device_process(rank: int, world: int, folder: Path, plan: Any) -> list[Measured]:
    """Save from the device, then load into it, warm and cold."""
    stage = Stage(rank, world, folder, plan.rounds)
    state = c.State(c.large_specs(plan.size_bytes), device=plan.device)
    pinned = Pinned(state.size_bytes)
    held_before = _pinned_bytes("current")
    formats = {DCP: c.dcp_format(), MILEPOST: c.milepost_format(unverified=True)}
    file_bytes = raw.padded(state.size_bytes)
    direct = raw.direct_works_in(folder, memory=pinned.memory)
    stage.meter.notes.append(f"{plan.device}: {torch.cuda.get_device_name()}")
    if plan.wants("device-save"):
        _saves(stage, plan, state, pinned, [_raw_format(pinned, file_bytes, direct), *formats.values()])
    if plan.wants("device-load-warm", "device-load-cold"):
        stage.keep(state, folder / "kept", {RAW: _raw_format(pinned, file_bytes, direct), **formats})
    for key, cold in (("device-load-warm", False), ("device-load-cold", True)):
        if plan.wants(key):
            others = _limits(stage, state, pinned, file_bytes, cold, direct)
            stage.loads(
                plan.name(key), state, folder / "kept", formats,
                cold=cold, finish=torch.cuda.synchronize, others=others,
            )  # fmt: skip
    _note_pinned(stage, held_before)
    return stage.done(folder / "kept")


def _saves(stage: Stage, plan: Any, state: c.State, pinned: Pinned, formats: list[c.Format]) -> None:
    torch.cuda.synchronize()
    copy = Planned(lambda: pinned.take(state), lambda: None)
    stage.saves(plan.name("device-save"), state, stage.folder, formats, {PINNED: copy})


def _raw_format(pinned: Pinned, file_bytes: int, direct: bool) -> c.Format:
    """Writers only. Reads go into the pinned buffer, and `_limits` measures them."""
    savers: dict[str, c.Call] = {RAW: lambda _, folder: raw.write(folder / "0.bin", pinned.memory, file_bytes)}
    if direct:
        savers[DIRECT] = lambda _, folder: raw.write_direct(folder / "0.bin", pinned.memory, file_bytes)
    return c.Format(savers, {})


def _limits(
    stage: Stage, state: c.State, pinned: Pinned, file_bytes: int, cold: bool, direct: bool
) -> dict[str, Planned]:
    kept = stage.folder / "kept" / RAW

    def prepare() -> None:
        stage.find(kept, state.size_bytes, cold)

    limits = {
        PINNED: Planned(lambda: pinned.give(state), lambda: None),
        RAW: Planned(lambda: raw.read(kept / "0.bin", pinned.memory, file_bytes), prepare),
    }
    if cold and direct:
        limits[DIRECT] = Planned(lambda: raw.read_direct(kept / "0.bin", pinned.memory, file_bytes), prepare)
    return limits


def _note_pinned(stage: Stage, held_before: int) -> None:
    """Resident sizes may not include pinned memory, so torch's own count is noted too."""
    held = _pinned_bytes("peak") - held_before
    stage.meter.notes.append(f"peak of the memory that torch pinned for the contenders: {held / 2**20:.0f} MiB")


def _pinned_bytes(what: str) -> int:
    """Bytes that torch has pinned, now ("current") or at most ("peak"); 0 where torch does not report it."""
    stats = getattr(torch.cuda, "host_memory_stats", dict)()
    return int(stats.get(f"allocated_bytes.{what}", 0))
