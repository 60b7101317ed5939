"""Reading once for all replicas: ranks that want the same boxes each read a share of them, and send it to the others.

Every rank works out the same list of units for each process group whose members hold the same boxes, and who reads
which. The lists are compared before anything is read; if they differ anywhere, every rank reads for itself. Units are
read straight into the reader's own tensors. The exchange begins only when all ranks have read and verified without an
error, so no rank waits for data that will not come, unless a rank dies or stops just then. Hence a deadline.
"""

from collections.abc import Callable, Iterator
from datetime import timedelta
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
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.data.memory import as_bits
from milepost.data.place import Placement, placement_of
from milepost.errors import CheckpointError
from milepost.state.tensors import Part, Sharers

WORTH_BYTES = 64 * MIB
"""Below this size, agreeing on who reads takes longer than reading."""
_MESSAGE_BYTES = 16 * MIB
"""How much is sent at once, and the memory that tensors need which cannot be sent or filled directly."""


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
    """What the members of one process group read for each other."""

    def __init__(self, sharers: Sharers, me: int, parts: list[SharedPart]) -> None:
        self.sharers = sharers
        self._me = sharers.ranks.index(me)
        self._units = list(_units(parts, len(sharers.ranks)))
        self._buffers: dict[torch.device, torch.Tensor] = {}

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
        return xxhash.xxh3_64_digest(msgspec.msgpack.encode(plan))

    def own(self, manifest: Manifest) -> Iterator[Placement]:
        """What this rank reads."""
        for unit in self._units:
            if unit.reader == self._me:
                for item in read_plan(manifest, unit.saved, unit.box):
                    target = unit.target[item.box.within(unit.box).slices]
                    yield placement_of(item, unit.saved.dtype, target, alone=True)

    def prepare(self) -> None:
        """Take the memory that the exchange needs, while it can still fail alone."""
        for device in {unit.target.device for unit in self._units}:
            self._buffers[device] = torch.empty(_MESSAGE_BYTES, dtype=torch.uint8, device=device)

    def run(self, timeout_s: float) -> None:
        """Send what this rank has read and receive the rest: a collective. `timeout_s` is for each message."""
        troubles: list[Exception] = []
        for reader, units in _messages(self._units):
            direct = _as_it_is(units)
            message = self._buffers[units[0].target.device][: sum(map(_bytes, units))] if direct is None else direct
            if direct is None and reader == self._me:
                _attempt(troubles, _pack, units, message)
            self._broadcast(message, reader, timeout_s)
            if direct is None and reader != self._me:
                _attempt(troubles, _unpack, units, message)
        if troubles:
            raise troubles[0]

    def _broadcast(self, message: torch.Tensor, reader: int, timeout_s: float) -> None:
        try:
            work = dist.broadcast(message, group_src=reader, group=self.sharers.group, async_op=True)
            if work is not None:
                work.wait(timedelta(seconds=timeout_s))
        except RuntimeError as error:
            read_by = self.sharers.ranks[reader]
            raise CheckpointError(f"what rank {read_by} had read did not get through to all: {error}") from error


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


def _units(parts: list[SharedPart], readers: int) -> Iterator[_Unit]:
    """The parts in pieces that are sent at once, each for the reader that has least so far."""
    load = [0] * readers
    ordered = sorted(parts, key=lambda p: (p.saved.key, p.part.box.offset))
    total = sum(part.box.elements * DTYPES[saved.dtype].size_bytes for saved, part in ordered)
    at_once = min(max(total // (4 * readers), MIB), _MESSAGE_BYTES)  # small enough that all readers get about the same
    for saved, part in ordered:
        size = DTYPES[saved.dtype].size_bytes
        for box in part.box.slabs(at_once // max(size, part.data.element_size())):
            reader = load.index(min(load))
            load[reader] += box.elements * size
            yield _Unit(reader, saved, box, part.data[box.within(part.box).slices])


def _messages(units: list[_Unit]) -> Iterator[tuple[int, list[_Unit]]]:
    """The units that travel together: of one reader, on one kind of device, up to the size of a message."""
    for reader in sorted({unit.reader for unit in units}):
        batch: list[_Unit] = []
        filled = 0
        for unit in (u for u in units if u.reader == reader):
            device = batch[0].target.device if batch else unit.target.device
            if batch and (filled + _bytes(unit) > _MESSAGE_BYTES or unit.target.device != device):
                yield reader, batch
                batch, filled = [], 0
            batch.append(unit)
            filled += _bytes(unit)
        if batch:
            yield reader, batch


def _bytes(unit: _Unit) -> int:
    return unit.target.numel() * unit.target.element_size()


def _as_it_is(units: list[_Unit]) -> torch.Tensor | None:
    """The memory of a single unit, if it can be sent and filled as it is."""
    target = units[0].target
    if len(units) > 1 or not target.is_contiguous() or target.is_conj() or target.is_neg():
        return None
    return _flat(target)


def _flat(data: torch.Tensor) -> torch.Tensor:
    return data.as_strided((data.numel(),), (1,)).view(torch.uint8)


def _pack(units: list[_Unit], message: torch.Tensor) -> None:
    at = 0
    for unit in units:
        data = unit.target.resolve_conj().resolve_neg().contiguous()
        message[at : at + _bytes(unit)].copy_(_flat(data))
        at += _bytes(unit)


def _unpack(units: list[_Unit], message: torch.Tensor) -> None:
    at = 0
    for unit in units:
        target = unit.target
        part = message[at : at + _bytes(unit)].clone()  # where it is aligned for any type
        if target.is_conj() or target.is_neg():
            target.copy_(part.view(target.dtype).view(target.shape))
        else:
            bits = as_bits(target)
            bits.copy_(part.view(bits.dtype).view(target.shape))
        at += _bytes(unit)
