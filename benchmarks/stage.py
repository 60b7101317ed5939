"""One set of ranks: they join, measure saves and loads of states, and leave. Runs in the ranks."""

import os
import time
import warnings
from collections.abc import Callable, Iterable
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist
from contenders import Call, Format, Spec, State
from harness import Measured, Meter, Planned
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

_RENDEZVOUS_S = 120.0


class Stage:
    """The meter of a rank, and the mesh if there are several ranks."""

    def __init__(self, rank: int, world: int, folder: Path, rounds: int) -> None:
        warnings.simplefilter("ignore")  # DCP warns about a missing process group
        self.folder = folder
        self.mesh = _join(rank, world, folder) if world > 1 else None
        self.meter = Meter(rank, world, rounds, self._barrier)

    def _barrier(self) -> None:
        if self.mesh is not None:
            dist.barrier()

    def state(self, specs: list[Spec], dim: int = 0) -> State:
        """A state for these ranks."""
        return State(specs, self.mesh, dim)

    def saves(
        self, name: str, state: State, folder: Path, formats: Iterable[Format], others: dict[str, Planned] | None = None
    ) -> None:
        """Measure every saver of these formats, and `others`, in a folder that is removed afterwards."""
        saved = folder / "saved"
        runs = {who: self._save(call, state, saved) for form in formats for who, call in form.savers.items()}
        self.meter.case(name, state.size_bytes, runs | (others or {}))
        self.meter.barrier()
        self.meter.delete(saved)

    def _save(self, call: Call, state: State, folder: Path) -> Planned:
        def prepare() -> None:
            self._fresh(folder)
            self.meter.settle()
            self.meter.recycle(folder.parent, state.size_bytes)

        return Planned(lambda: call(state, folder), prepare)

    def keep(self, state: State, kept: Path, formats: dict[str, Format]) -> None:
        """Write files of each of these formats into a folder of its name below `kept`."""
        for name, form in formats.items():
            self._fresh(kept / name)
            self.meter.barrier()
            form.writes()(state, kept / name)
        self.meter.barrier()

    def loads(
        self, name: str, state: State, kept: Path, formats: dict[str, Format], *, cold: bool = False,
        finish: Callable[[], Any] = lambda: None, others: dict[str, Planned] | None = None,
    ) -> None:  # fmt: skip
        """Measure every loader of these formats on what `keep` left, and `others`.

        `finish` waits for a device. Its time counts.
        """
        runs = {
            who: self._load(who, call, state, kept / place, cold, finish)
            for place, form in formats.items()
            for who, call in form.loaders.items()
        }
        self.meter.case(name, state.size_bytes, runs | (others or {}))

    def _load(self, who: str, call: Call, state: State, folder: Path, cold: bool, finish: Callable[[], Any]) -> Planned:
        def prepare() -> None:
            state.scribble()
            finish()
            self.find(folder, state.size_bytes, cold)

        def action() -> None:
            call(state, folder)
            finish()

        return Planned(action, prepare, after_first=lambda: state.check(who))

    def find(self, folder: Path, size_bytes: int, cold: bool) -> None:
        """Make the files of a folder warm or cold for a load of `size_bytes` by this rank, and recycle pages."""
        if cold:
            self.meter.chill(folder)
        else:
            self.meter.warm(folder)
        self.meter.recycle(self.folder, size_bytes)

    def _fresh(self, folder: Path) -> None:
        self.meter.barrier()
        self.meter.delete(folder)
        if self.meter.rank == 0:
            folder.mkdir(parents=True)

    def done(self, *finished: Path) -> list[Measured]:
        """Delete the finished folders, leave the process group, and return the results."""
        self.meter.barrier()
        for folder in finished:
            self.meter.delete(folder)
        if self.mesh is not None:
            dist.destroy_process_group()
        return self.meter.results


def _join(rank: int, world: int, folder: Path) -> DeviceMesh:
    """Join the gloo group of this stage. Rank 0 serves a store on a free loopback port, and a file has the port."""
    note, deadline = folder / "port", time.monotonic() + _RENDEZVOUS_S
    limit = timedelta(seconds=_RENDEZVOUS_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=limit)
        Path(f"{note}.new").write_text(str(store.port))
        os.rename(f"{note}.new", note)
    else:
        while not note.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not join")
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(note.read_text()), world, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    dist.barrier()
    if rank == 0:
        note.unlink()
    return init_device_mesh("cpu", (world,))
