"""Reading once for all replicas: ranks that want the same boxes each read a share of them, and send it to the others.

Every rank works out the same list of units for each process group whose members hold the same boxes, and who reads
which. The lists are compared before anything is read; if they differ anywhere, every rank reads for itself. Units are
read straight into the reader's own tensors. The exchange begins only when all ranks have read and verified without an
error, so no rank waits for data that will not come, unless a rank dies or stops just then. Hence a deadline.

What arrives is compared with what was sent, by digests that travel outside of the process group: a program that uses
the group in another thread at the same time can mix its own messages with these.
"""

import platform
from collections.abc import Callable, Iterator
from datetime import timedelta
from functools import cache
from pathlib import Path as File
from typing import Any, NamedTuple

import msgspec
import torch
import torch.distributed as dist
import xxhash

from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from milepost.data.memory import as_bits, view_of
from milepost.data.pieces import Placement, placement_of
from milepost.errors import CheckpointError
from milepost.state.tensors import Part, Sharers

_MESSAGE_BYTES = 16 * MIB
"""The most that is sent at once, where the memory of the call allows it."""
_ALIGN = 16
"""Where a tensor may start in a message: aligned for any type."""


class SharedPart(NamedTuple):
    """A part of a tensor that other ranks hold too."""

    saved: Tensor
    part: Part


class _Unit(NamedTuple):
    reader: int
    saved: Tensor
    box: Box
    target: torch.Tensor


class Exchange:
    """What the members of one process group read for each other. `memory_bytes`: the most memory to send it with."""

    def __init__(self, sharers: Sharers, me: int, parts: list[SharedPart], memory_bytes: int) -> None:
        self.sharers = sharers
        self._me = sharers.ranks.index(me)
        self._message_bytes = min(memory_bytes, _MESSAGE_BYTES)
        self._units = list(_units(parts, len(sharers.ranks), self._message_bytes))
        self._memory: Buffers = {}

    @property
    def name(self) -> str:
        """The members and their group, as text: the same on all of them."""
        return f"{pack_ranks(self.sharers.ranks)} {self.sharers.name}"

    @property
    def keys(self) -> set[str]:
        """The saved keys of what is shared."""
        return {unit.saved.key for unit in self._units}

    def digest(self) -> bytes:
        """The same on members that have the same plan."""
        plan = [(u.reader, u.saved.key, u.box, str(u.target.dtype), u.target.device.type) for u in self._units]
        return xxhash.xxh3_64_digest(msgspec.msgpack.encode((self._message_bytes, plan)))

    def own(self, manifest: Manifest) -> Iterator[Placement]:
        """What this rank reads."""
        for unit in self._units:
            if unit.reader == self._me:
                for item in read_plan(manifest, unit.saved, unit.box):
                    target = unit.target[item.box.within(unit.box).slices]
                    yield placement_of(item, unit.saved.dtype, target, alone=True)

    def prepare(self, memory: "Buffers") -> None:
        """Take the memory that the exchange needs, while it can still fail alone. Exchanges share it."""
        self._memory = memory
        for _, units in _messages(self._units, self._message_bytes):
            device = units[0].target.device
            if device not in memory and _as_it_is(units) is None:
                memory[device] = torch.empty(self._message_bytes, dtype=torch.uint8, device=device)

    def run(self, timeout_s: float) -> bytes:
        """Send what this rank has read and receive the rest: a collective. `timeout_s` is for each message.

        Gives a digest of all messages. It is the same on all members, unless something else than what was sent arrived.
        """
        troubles: list[Exception] = []
        seen = _Seen()
        for reader, units in _messages(self._units, self._message_bytes):
            direct = _as_it_is(units)
            message = self._memory[units[0].target.device][: _room(units)] if direct is None else direct
            if direct is None and reader == self._me:
                _attempt(troubles, _pack, units, message)
            self._broadcast(message, reader, timeout_s)
            seen.add(message)
            if direct is None and reader != self._me:
                _attempt(troubles, _unpack, units, message)
        if troubles:
            raise troubles[0]
        return seen.digest()

    def _broadcast(self, message: torch.Tensor, reader: int, timeout_s: float) -> None:
        try:
            work = dist.broadcast(message, group_src=reader, group=self.sharers.group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            read_by = self.sharers.ranks[reader]
            raise CheckpointError(
                f"what rank {read_by} had read did not get through to all: {error}. Pass share_reads=False to let each "
                "rank read for itself"
            ) from error


Buffers = dict[torch.device, torch.Tensor]
"""One message for each device, for tensors that cannot be sent or filled where they are."""


class _Seen:
    """A digest of messages: of all bytes on the CPU; of the sum of the bytes on a device, which sums faster."""

    def __init__(self) -> None:
        self._hasher = xxhash.xxh3_64()
        self._sums: list[torch.Tensor] = []

    def add(self, message: torch.Tensor) -> None:
        if message.is_cpu:
            self._hasher.update(view_of(message))
        else:
            self._sums.append(message.sum(dtype=torch.int64))

    def digest(self) -> bytes:
        self._hasher.update(repr([int(total) for total in self._sums]).encode())
        return self._hasher.digest()


def check_arrival(arrived: list[dict[str, bytes]]) -> None:
    """Raise CheckpointError unless all members of each group have seen the same messages. Pure."""
    digests: dict[str, set[bytes]] = {}
    for theirs in arrived:
        for name, digest in theirs.items():
            digests.setdefault(name, set()).add(digest)
    mixed = [show_ranks(unpack_ranks(name.split(" ")[0])) for name, seen in digests.items() if len(seen) > 1]
    if mixed:
        raise CheckpointError(
            f"what {mixed[0]} sent each other through their process group is not what arrived; the state is partly "
            "filled. Does another thread use the group meanwhile? Pass share_reads=False, and each rank reads for "
            "itself"
        )


def _attempt(
    troubles: list[Exception], action: Callable[[list[_Unit], torch.Tensor], None], units: list[_Unit], message: Any
) -> None:
    """Do it, but stay with the others: they wait for every message of this rank, also for those after an error."""
    try:
        action(units, message)
    except Exception as error:  # noqa: BLE001  # raised when all messages are through
        troubles.append(error)


def agree_to_share(offers: list[dict[str, bytes]]) -> bool:
    """Whether all members of all groups have the same plan. Pure."""
    plans: dict[str, set[bytes]] = {}
    members: dict[str, set[int]] = {}
    for rank, offer in enumerate(offers):
        for name, digest in offer.items():
            plans.setdefault(name, set()).add(digest)
            members.setdefault(name, set()).add(rank)
    return all(
        len(found) == 1 and members[name] == set(unpack_ranks(name.split(" ")[0])) for name, found in plans.items()
    )


def _units(parts: list[SharedPart], readers: int, message_bytes: int) -> Iterator[_Unit]:
    """The parts in pieces that are sent at once, each for the reader that has least so far."""
    load = [0] * readers
    ordered = sorted(parts, key=lambda p: (p.saved.key, p.part.box.offset))
    total = sum(part.box.elements * DTYPES[saved.dtype].size_bytes for saved, part in ordered)
    at_once = min(max(total // (4 * readers), MIB), message_bytes)  # small enough that all readers get about the same
    for saved, part in ordered:
        size = DTYPES[saved.dtype].size_bytes
        for box in part.box.slabs(at_once // max(size, part.data.element_size())):
            reader = load.index(min(load))
            load[reader] += box.elements * size
            yield _Unit(reader, saved, box, part.data[box.within(part.box).slices])


def _messages(units: list[_Unit], message_bytes: int) -> Iterator[tuple[int, list[_Unit]]]:
    """The units that travel together: of one reader, on one kind of device, up to the size of a message."""
    for reader in sorted({unit.reader for unit in units}):
        batch: list[_Unit] = []
        filled = 0
        for unit in (u for u in units if u.reader == reader):
            device = batch[0].target.device if batch else unit.target.device
            if batch and (_aligned(filled) + _bytes(unit) > message_bytes or unit.target.device != device):
                yield reader, batch
                batch, filled = [], 0
            batch.append(unit)
            filled = _aligned(filled) + _bytes(unit)
        if batch:
            yield reader, batch


def _bytes(unit: _Unit) -> int:
    return unit.target.numel() * unit.target.element_size()


def _aligned(at: int) -> int:
    return -(-at // _ALIGN) * _ALIGN


def _starts(units: list[_Unit]) -> list[int]:
    """Where each unit starts in its message, and where the last one ends."""
    starts = [0]
    for unit in units:
        starts[-1] = _aligned(starts[-1])
        starts.append(starts[-1] + _bytes(unit))
    return starts


def _room(units: list[_Unit]) -> int:
    return _starts(units)[-1]


def _as_it_is(units: list[_Unit]) -> torch.Tensor | None:
    """The memory of a single unit, if it can be sent and filled as it is."""
    target = units[0].target
    if len(units) > 1 or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    return target.as_strided((target.numel(),), (1,)).view(torch.uint8)


def _pack(units: list[_Unit], message: torch.Tensor) -> None:
    for target, room in _placed(units, message):
        room.copy_(target)


def _unpack(units: list[_Unit], message: torch.Tensor) -> None:
    for target, room in _placed(units, message):
        target.copy_(room)


def _placed(units: list[_Unit], message: torch.Tensor) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Each unit's memory, and its place in the message, as tensors that torch copies without memory in between."""
    for unit, start in zip(units, _starts(units), strict=False):
        target = unit.target
        if not target.is_conj() and not target.is_neg():  # else torch works it out while it copies
            target = as_bits(target)
        yield target, message[start : start + _bytes(unit)].view(target.dtype).view(target.shape)


@cache
def host_id() -> bytes:
    """Eight bytes that are the same for processes that share a page cache."""
    try:
        text = File("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        text = platform.node()
    return xxhash.xxh3_64_digest(text.encode())
