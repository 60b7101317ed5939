"""Staging: the state as it is now, copied to where it can be written from while training changes the original.

    host      copy into host memory, and then let the caller go on
    device    copy on the GPU, let the caller go on, and copy from there into host memory
    overlap   let the caller go on at once; until the copy is made it may read the state, and not change it

What does not fit in the memory that is allowed is not copied: it is written first, from where it is.
"""

import logging
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor

from milepost.background.staging.arena import Arena, budget_of
from milepost.background.staging.copying import Copier, Copy, clone_on_devices, room_on
from milepost.background.staging.packing import Packed, Slot, in_place_of, pack
from milepost.core.box import Shape
from milepost.data.device import Moment, gpus_of
from milepost.data.threads import Latch
from milepost.data.write import EntryToWrite
from milepost.events.operation import moved
from milepost.saving.describe import Described, no_callback
from milepost.state.versions import Versions

Way = Literal["auto", "host", "device", "overlap"]
_log = logging.getLogger("milepost")
_SHIFT_BYTES = 64
"""The offset of the first copy in shared memory. That has small pages, and direct I/O from these was slower (1.9
against 2.1 GB/s) than through the huge pages that a writer copies to where memory is not page-aligned."""
_SPARE_BYTES = 256 << 20
_SPARE_PART = 20


class Stager:
    """Keeps what staging needs from one save to the next. Used by one save at a time.

    `shared`: another process can map the memory. `limit_bytes`: the most host memory to use; None: what is free.
    """

    def __init__(self, shared: bool, limit_bytes: int | None) -> None:
        self.arena = Arena(shared)
        self.copier = Copier()
        self.has_cloned = False
        self._limit_bytes = limit_bytes
        self._known: tuple[int, list[Slot]] = (0, [])
        self._places: list[torch.Tensor] = []

    def prewarm(self, described: Described) -> None:
        """Make the memory that a state like this needs."""
        self.reserve(self._pack(described))

    def begin(self, described: Described, way: Way, owned: "Owned | None") -> "Staging":
        """Fix the state as it is now. Copying may happen in another thread."""
        return Staging(self, described, self._pack(described), way, owned)

    def _pack(self, described: Described) -> Packed:
        limit_bytes = budget_of(self._limit_bytes, self.arena.capacity)
        return pack(described, limit_bytes, _SHIFT_BYTES if self.arena.shared else 0)

    def reserve(self, packed: Packed) -> None:
        """Have the memory that this needs. Raises MemoryError or OSError if there is not enough."""
        if packed.size_bytes > self.arena.capacity:
            self._known, self._places = (0, []), []  # they would keep the memory that is about to be freed
        self.arena.reserve(packed.size_bytes, _pins(packed.sources))

    def places(self, packed: Packed) -> list[torch.Tensor]:
        """The memory of each slot, in order. Kept for the next save, which usually has the same slots."""
        slots = [slot for _, slot in packed.sources]
        if (self.arena.version, slots) != self._known:
            self._places = [slot.within(self.arena.data) for slot in slots]
            self._known = self.arena.version, slots
        return self._places

    def free(self) -> None:
        """Give the memory back."""
        self._known, self._places = (0, []), []
        self.arena.free()


class Owned:
    """The memory that only an optimizer changes, in a `step` that waits: its parameters and what it keeps for each.

    Those of a capturable optimizer do not count. Its step can be recorded in a CUDA graph; a replay runs no hook, and
    so does not wait for a copy.
    """

    def __init__(self, optimizers: Iterable[torch.optim.Optimizer]) -> None:
        self._storages: set[int] = set()
        for optimizer in optimizers:
            if any(group.get("capturable") for group in optimizer.param_groups):
                continue
            for group in optimizer.param_groups:
                self._add(group["params"])
            for kept in optimizer.state.values():
                self._add(kept.values() if isinstance(kept, dict) else [])

    def _add(self, values: Iterable[Any]) -> None:
        for value in values:
            if isinstance(value, torch.Tensor):
                local = value.to_local() if isinstance(value, DTensor) else value
                self._storages.add(local.untyped_storage().data_ptr())

    def holds(self, data: torch.Tensor) -> bool:
        """Whether only the optimizers change this tensor."""
        return data.untyped_storage().data_ptr() in self._storages


class Staging:
    """The staging of one save.

    `at_return` is set when the caller may go on, as the way says, `done` when it may change everything.
    """

    def __init__(self, stager: Stager, described: Described, packed: Packed, way: Way, owned: Owned | None) -> None:
        self._stager, self._described, self._packed = stager, described, packed
        self.at_return, self.done = Latch(), Latch()
        on_gpu = [data for data in [*(d for d, _ in packed.sources), *packed.left_out] if _is_on_gpu(data)]
        self.way = _chosen(way, on_gpu, owned, 1 if stager.has_cloned else 2)
        self._clones: dict[int, torch.Tensor] = {}
        if self.way == "device":
            try:
                self._clones = dict(zip(map(id, on_gpu), clone_on_devices(on_gpu), strict=True))
                stager.has_cloned = True
            except torch.OutOfMemoryError:
                self.way = "overlap" if owned else "host"
        self._moment = Moment(gpus_of(on_gpu))
        self._versions = Versions(described.tensors, self._is_read_here())
        self._may_wait = self._rule(owned)
        if self.way != "host" and all(self._may_wait(data) for data, _ in packed.sources) and self._rest_may_wait():
            self._let_return()

    @property
    def unread(self) -> Latch:
        """Set when the state is no longer read: if it was copied on the GPU, long before `done`."""
        return self.at_return if self.way == "device" else self.done

    def _is_read_here(self) -> Callable[[torch.Tensor], bool]:
        """Which tensors are read from where they are: no tensor of the same memory was copied on a GPU."""
        cloned = {slot.offset for data, slot in self._packed.sources if id(data) in self._clones}

        def is_read(data: torch.Tensor) -> bool:
            slot = self._packed.slots.get(id(data))
            return id(data) not in self._clones and (slot is None or slot.offset not in cloned)

        return is_read

    def _let_return(self) -> None:
        """Let the caller go on. From here on it may change all but what is copied later."""
        self.check_unchanged()
        self._versions.keep(self._may_wait)
        self.at_return.set()

    def _rule(self, owned: Owned | None) -> Callable[[torch.Tensor], bool]:
        """Which tensors may be copied after the caller went on."""
        if self.way == "device":
            return lambda data: id(data) in self._clones
        if self.way == "overlap":
            return owned.holds if owned is not None else lambda _: True
        return lambda _: False

    def _reserve(self) -> None:
        arena, packed = self._stager.arena, self._packed
        try:
            self._stager.reserve(packed)
        except (OSError, MemoryError) as error:
            _log.warning("no staging memory (%s): the state is written from where it is, which takes longer", error)
            self._packed = pack(self._described, 0)
            arena.reserve(0, pinned=False)

    def fits(self) -> bool:
        """Whether all of the state gets a place in host memory."""
        return not self._packed.left_out

    def copy(self, check: Callable[[], None] = no_callback) -> None:
        """Copy all that fits. `check` is called now and then, and stops it by raising."""
        check()
        self._reserve()
        now: list[Copy] = []
        later: list[Copy] = []
        for (data, _), target in zip(self._packed.sources, self._stager.places(self._packed), strict=True):
            copy = Copy(self._clones.get(id(data), data), target)
            (later if self._may_wait(data) else now).append(copy)
        self._stager.copier.copy(now, self._moment, check)
        if (later or self._packed.left_out) and self._rest_may_wait() and not self.at_return.is_set():
            self._let_return()
        self._stager.copier.copy(later, self._moment, check)
        if self._packed.left_out:
            self._moment.wait()  # they are written by threads that are not in the stream of the caller
        moved(self._packed.size_bytes)
        self.check_unchanged()
        self._clones = {id(d): self._clones[id(d)] for d in self._packed.left_out if id(d) in self._clones}

    def _rest_may_wait(self) -> bool:
        return all(self._may_wait(data) for data in self._packed.left_out)

    def is_copied(self) -> bool:
        """After `copy`: whether nothing is read from where it is."""
        return all(id(data) in self._clones for data in self._packed.left_out)

    def check_unchanged(self) -> None:
        """Raises InvalidState if the state has changed since the save began. Call it before the state is released."""
        self._versions.check()

    def release(self) -> None:
        """Nothing reads the state any more."""
        self.done.set()
        self.at_return.set()

    def forget(self) -> None:
        """Drop the state: the save has ended, and its error may keep this object."""
        self._packed, self._clones = Packed([], {}, [], 0), {}
        self._described = replace(self._described, tensors={}, private=[])
        self._versions = Versions({})

    def described(self, released: Callable[[], None]) -> Described:
        """The state as it was, to be written: from the copies, and where there are none from the original.

        `released` is called when the originals have been written.
        """
        places = self._stager.places(self._packed)
        made = {slot.offset: place for (_, slot), place in zip(self._packed.sources, places, strict=True)}

        def instead(data: torch.Tensor, dtype: str, shape: Shape) -> Any:
            del dtype, shape
            slot = self._packed.slots.get(id(data))
            return made[slot.offset] if slot is not None else self._clones.get(id(data), data)

        result = in_place_of(self._described, instead)
        live = {id(data) for data in self._packed.left_out if id(data) not in self._clones}
        if not live:
            return result
        tensors = self._described.tensors.items()
        private = zip(result.private, self._described.private, strict=True)
        return replace(
            result,
            live=frozenset(key for key, local in tensors if any(id(part.data) in live for part in local.parts)),
            private=[EntryToWrite(new.header, new.data, id(old.data) in live) for new, old in private],
            released=released,
        )

    def slots(self) -> Described:
        """The same, with slots in place of tensors: for a process that maps the memory. Only where all fits."""
        return in_place_of(
            self._described, lambda data, dtype, shape: self._packed.slots.get(id(data)) or Slot(0, dtype, shape)
        )


def _is_on_gpu(data: torch.Tensor) -> bool:
    return data.is_cuda


def _pins(sources: list[tuple[torch.Tensor, Slot]]) -> bool:
    return torch.cuda.is_available() and any(data.is_cuda for data, _ in sources)


def _chosen(way: Way, on_gpu: list[torch.Tensor], owned: Owned | None, copies: int) -> Way:
    """The way to take: on the GPU if it has room for this many copies, else during the next step if that is safe.

    The first save needs room for two: from then on its copy is part of the peak memory in use, and later saves must
    come to the same answer.
    """
    if way in ("host", "overlap"):
        return way
    need: dict[torch.device, int] = {}
    for data in on_gpu:
        need[data.device] = need.get(data.device, 0) + data.nbytes
    if need and all(
        room_on(device) > copies * size + size // _SPARE_PART + _SPARE_BYTES for device, size in need.items()
    ):
        return "device"
    return "overlap" if owned is not None else "host"
