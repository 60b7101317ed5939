"""A worker that fills tensors in main memory: read, check, and copy what could not be read into place."""

from itertools import pairwise

from milepost.core.limits import KIB
from milepost.data.memory import Block, copy_bytes, view_of
from milepost.data.pieces import PlacementRun, ReadJob, is_cold
from milepost.data.transfer import Meter

_IN_PLACE = 64 * KIB
"""Shorter pieces go through the block, so that thousands of tensors do not mean thousands of views."""


class Placer:
    """Does jobs with a block of memory of its own."""

    def __init__(self, block: Block, direct: bool, verify: bool, meter: Meter) -> None:
        self._block, self._direct, self._verify, self._meter = block, direct, verify, meter

    def __call__(self, job: ReadJob) -> None:
        """Read one job into its targets. Raises CheckpointDamaged, StateMismatch, StorageError."""
        if self._direct and is_cold(job):
            views = [self._block.view[: job.stop - job.start]]
            job.file.read_cold(job.start, views[0])
            if self._verify:
                job.file.check(job.start, views)
            count = self.copy(job.pieces, job)
        else:
            views, left, count = self._scatter(job)
            job.file.read(job.start, views, verify=self._verify)
            count += self.copy(left, job)
        self._meter.add(count)

    def _scatter(self, job: ReadJob) -> tuple[list[memoryview], list[PlacementRun], int]:
        """Where each byte of a job goes, in order; what must then be copied from the block; how much needs no copy."""
        views: list[memoryview] = []
        left: list[PlacementRun] = []
        at, base, placed = job.start, job.start, 0
        for piece in job.pieces:
            if not piece.address or piece.stop - piece.start < _IN_PLACE:
                left.append(piece)
                continue
            start, stop = max(piece.start, base), min(piece.stop, job.stop)
            views.append(self._block.view[at - base : start - base])
            views.append(view_of(piece.placement.target)[start - piece.start : stop - piece.start])
            at, placed = stop, placed + stop - start
        if views and any(a.stop > b.start for a, b in pairwise(job.pieces)):
            # Two targets want the same bytes, or lie in each other's gaps: all of them come through the block.
            return [self._block.view[: job.stop - base]], job.pieces, 0
        views.append(self._block.view[at - base : job.stop - base])
        return [view for view in views if len(view)], left, placed

    def copy(self, pieces: list[PlacementRun], job: ReadJob) -> int:
        """Copy what a job read of some pieces from the block to their targets. Gives the number of bytes."""
        count, block, (_, first, last, _) = 0, self._block, job
        for start, stop, address, origin, _, _, region in pieces:
            low, high = max(first, start), min(last, stop)
            if address:
                copy_bytes(address + low - start, block.address + low - first, high - low)
                count += high - low
            else:
                assert region is not None
                count += region.fill(block, low - first, low - origin, high - origin)
        return count
