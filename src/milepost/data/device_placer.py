"""A worker that fills tensors on GPUs: it reads and checks the next block while the last one is on its way.

It has two blocks of pinned memory and a stream of its own on each GPU. What a block holds of large tensors goes
straight into them. A block with many small tensors, or with parts of rows, goes over as a whole, and the GPU takes it
apart.
"""

import contextlib
from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from milepost.core.limits import MIB
from milepost.data.device import Lane, Mark
from milepost.data.memory import Block, TypedViews
from milepost.data.pieces import PlacementRun, ReadJob, is_cold
from milepost.data.placer import Placer
from milepost.data.transfer import Meter

_FEW = 4
"""So many tensors of one block are copied each by itself. It takes one more copy to do that on the device."""
_BLOCKS = 2
_OWN_SEGMENT_BYTES = 10 * MIB
"""For less, torch takes 20 MiB from the device."""


class DevicePlacer:
    """Does jobs with two blocks of memory of its own. `wait` must be called at the end, also after an error."""

    def __init__(
        self, make_block: Callable[[], Block], lanes: Sequence[Lane], direct: bool, verify: bool, meter: Meter
    ) -> None:
        self._make_block, self._slots = make_block, list[_CopyBlock]()
        self._lanes = {lane.device: _DeviceSide(lane) for lane in lanes}
        self._direct, self._verify, self._meter = direct, verify, meter

    def __call__(self, job: ReadJob) -> None:
        """Read one job, and start its copies. Raises CheckpointDamaged, StateMismatch, StorageError."""
        slot = self._next()
        slot.wait()
        here, there = self._apart(job.pieces)
        if not there:
            Placer(slot.block, self._direct, self._verify, self._meter)(job)
            return
        view = slot.block.view[: job.stop - job.start]
        if self._direct and is_cold(job):
            job.file.read_cold(job.start, view)
            if self._verify:
                job.file.check(job.start, [view])
        else:
            job.file.read(job.start, [view], verify=self._verify)
        count = Placer(slot.block, self._direct, self._verify, self._meter).copy(here, job)
        for device, pieces in there.items():
            count += self._lanes[device].send(pieces, job, slot)
        self._meter.add(count)

    def _next(self) -> "_CopyBlock":
        """The block whose turn it is. The second one is made when it is needed."""
        if len(self._slots) < _BLOCKS:
            self._slots.append(_CopyBlock(self._make_block()))
        else:
            self._slots.reverse()
        return self._slots[-1]

    def _apart(self, pieces: list[PlacementRun]) -> tuple[list[PlacementRun], dict[torch.device, list[PlacementRun]]]:
        """The pieces whose targets are in main memory, and those on each GPU."""
        here: list[PlacementRun] = []
        there: dict[torch.device, list[PlacementRun]] = defaultdict(list)
        for piece in pieces:
            device = piece.placement.target.device
            (there[device] if device in self._lanes else here).append(piece)
        return here, there

    def wait(self) -> None:
        """Return when nothing is on its way any more."""
        with contextlib.ExitStack() as waits:  # for all of them, also if one raises
            for side in self._lanes.values():
                waits.callback(side.lane.wait)


class _CopyBlock:
    """A block, and the copies out of it that may not be done yet."""

    def __init__(self, block: Block) -> None:
        self.block = block
        self.marks: list[Mark] = []

    def wait(self) -> None:
        """Return when the block can be used again."""
        while self.marks:
            self.marks.pop().wait()


class _DeviceSide:
    """The end of a worker on one GPU, with a block there, as soon as one is needed."""

    def __init__(self, lane: Lane) -> None:
        self.lane = lane
        self._block: TypedViews | None = None
        self._has_room = True

    def send(self, pieces: list[PlacementRun], job: ReadJob, slot: _CopyBlock) -> int:
        """Start to copy what a block holds of some tensors into them. Gives the number of bytes."""
        with self.lane.here(), torch.no_grad():
            try:
                return self._send(pieces, job, slot.block)
            finally:
                slot.marks.append(self.lane.mark())

    def _send(self, pieces: list[PlacementRun], job: ReadJob, block: Block) -> int:
        first, last = job.start, job.stop
        whole, others = [], []
        for piece in pieces:
            run = piece.region.run if piece.region is not None else None
            if run is None:
                others.append(piece)
            else:
                low, high = max(first, piece.start), min(last, piece.stop)
                whole.append((run[low - piece.start : high - piece.start], low - first, high - first))
        source: TypedViews = block
        if len(whole) > _FEW or any(piece.region is not None and piece.region.is_exact for piece in others):
            source = self._on_device(block, last - first)
        if whole:
            parts = [source.data[low:high] for _, low, high in whole]
            targets = [target for target, _, _ in whole]
            if len(whole) > _FEW:
                torch._foreach_copy_(targets, parts, non_blocking=True)
            else:
                for target, part in zip(targets, parts, strict=True):
                    target.copy_(part, non_blocking=True)
        count = sum(high - low for _, low, high in whole)
        for piece in others:
            assert piece.region is not None
            low, high = max(first, piece.start), min(last, piece.stop)
            held = source if piece.region.is_exact else block
            count += piece.region.fill(held, low - first, low - piece.origin, high - piece.origin)
        return count

    def _on_device(self, block: Block, size_bytes: int) -> TypedViews:
        """The same bytes on the GPU; the block itself, from which copies take longer, where there is no room."""
        if self._block is None and self._has_room:
            try:
                size = max(len(block.data), _OWN_SEGMENT_BYTES)
                self._block = TypedViews(torch.empty(size, dtype=torch.uint8, device=self.lane.device))
            except torch.OutOfMemoryError:
                self._has_room = False
        if self._block is None:
            return block
        self._block.data[:size_bytes].copy_(block.data[:size_bytes], non_blocking=True)
        return self._block
