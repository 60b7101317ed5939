"""The digests of entries: of what is about to be written, and of what may not have to be. See `core.reuse`."""

import ctypes
import itertools
from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash

from milepost.core.reuse import CELL_BYTES, cell_count, cuts_between, digest_of_cells
from milepost.data.device import Moment, gpus_of
from milepost.data.late import EntryData, LateBox, LateTensor
from milepost.data.memory import Block, address_of, copy_run, needs_pinned
from milepost.data.transfer import Meter, Transfer, run_all


class CellDigests:
    """Collects the digests of cells while the blocks of a file pass, and makes those of its entries from them."""

    def __init__(self, starts: Sequence[int], end: int) -> None:
        """`starts`: where each entry of the file begins, in their order. `end`: where the last one ends."""
        self._starts, self._end = starts, end
        self._cells: dict[int, bytes] = {}

    def add(self, start: int, views: Sequence[memoryview]) -> None:
        """Look at the bytes of one block, which begins at a cell."""
        stop = start + sum(map(len, views))
        low = bisect_left(self._starts, start)
        inside = self._starts[low : bisect_left(self._starts, stop, low)]
        cuts = cuts_between(start, stop, inside)
        self._cells.update(zip(cuts, _digests_between(views, cuts), strict=False))

    def result(self) -> list[bytes]:
        """The digest of each entry."""
        if not self._starts:
            return []
        ends = [*self._starts[1:], self._end]
        return [
            digest_of_cells([self._cells[at] for at in cuts_between(start, stop, ())[:-1]])
            for start, stop in zip(self._starts, ends, strict=True)
        ]


def _digests_between(views: Sequence[memoryview], cuts: Sequence[int]) -> Iterator[bytes]:
    """The digests of the pieces between cuts of the bytes that the views spell together."""
    first = cuts[0]
    if len(views) == 1:
        [view] = views
        for low, high in itertools.pairwise(cuts):
            yield xxhash.xxh3_128_digest(view[low - first : high - first])
        return
    pending = iter(views)
    view = memoryview(b"")
    for low, high in itertools.pairwise(cuts):
        hasher, left = xxhash.xxh3_128(), high - low
        while left:
            view = view or next(pending)
            hasher.update(view[:left])
            taken = min(left, len(view))
            view, left = view[taken:], left - taken
        yield hasher.digest()


class Sample:
    """Data of an entry that may be equal to what was saved, and how the saved entry lies in its cells."""

    __slots__ = ("_cells", "data", "phase", "size_bytes")

    def __init__(self, data: torch.Tensor, size_bytes: int, phase: int) -> None:
        self.data, self.size_bytes, self.phase = data, size_bytes, phase
        self._cells: list[bytes] = [b""] * cell_count(size_bytes, phase)

    @property
    def digest(self) -> bytes:
        """The digest, after `compute_digests`."""
        return digest_of_cells(self._cells)

    def jobs(self, size_bytes: int) -> Iterator[tuple["Sample", int, int]]:
        """The cells to look at, so many bytes at a time."""
        step = size_bytes // CELL_BYTES
        for first in range(0, len(self._cells), step):
            yield self, first, min(first + step, len(self._cells))

    def look(self, first: int, last: int, block: Block) -> None:
        """Compute the digests of some cells."""
        low, high = self._at(first), self._at(last)
        view = bytes_between(self.data, low, high, block)
        for cell in range(first, last):
            self._cells[cell] = xxhash.xxh3_128_digest(view[self._at(cell) - low : self._at(cell + 1) - low])

    def _at(self, cell: int) -> int:
        """Where a cell begins in the entry."""
        return min(max(cell * CELL_BYTES - self.phase, 0), self.size_bytes)


def bytes_between(data: torch.Tensor, low: int, high: int, block: Block) -> memoryview:
    """Bytes low..high of a tensor, where they are, or copied to a block."""
    address = address_of(data)
    if address:
        return memoryview((ctypes.c_char * (high - low)).from_address(address + low))
    size = data.element_size()
    begin, end = low // size * size, -(-high // size) * size
    copy_run(data, begin, end, block, 0)
    return block.view[low - begin : high - begin]


def compute_digests(samples: Sequence[Sample], transfer: Transfer, meter: Meter) -> None:
    """Compute the digests of all samples, by several threads, in blocks that hold a cell at least."""
    size = transfer.in_units_of(CELL_BYTES).block_bytes
    total = sum(sample.size_bytes for sample in samples)
    tensors = [sample.data for sample in samples]
    pinned = needs_pinned(tensors)
    Moment(gpus_of(tensors)).wait()  # the threads that copy are not in the stream of the caller

    def make_worker() -> Callable[[tuple[Sample, int, int]], None]:
        block = Block(size, pinned)

        def look(job: tuple[Sample, int, int]) -> None:
            sample, first, last = job
            sample.look(first, last, block)
            meter.check()

        return look

    threads = transfer.threads_for(total, len(samples), size) if total else 1
    run_all((job for sample in samples for job in sample.jobs(size)), make_worker, threads, meter)


def can_be_sampled(data: EntryData) -> bool:
    """Whether the data is there: not made, or read from elsewhere, when it is written."""
    return not isinstance(data, (LateTensor, LateBox))
