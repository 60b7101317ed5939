"""The last step of a load: verified bytes go into tensors.

The blocks of a file that are needed form runs; runs are cut into jobs, and workers take them one by one. A job reads
its range in one request, straight into the memory of the tensors where the bytes lie there as in the file, and else
into the worker's own block; checks it while it is in the processor's cache; and copies from the block to the targets.
No block is read twice, and a strided region is cut out of whole blocks instead of being read row by row.
"""

import os
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain, pairwise
from operator import add, itemgetter, mul
from typing import NamedTuple

import msgspec
import torch

from milepost.core.box import Box, Shape, boxes_of_run, strides_of
from milepost.core.division import PlannedRead, stretches_of
from milepost.core.dtypes import DTYPES
from milepost.core.limits import KIB, PAGE_BYTES
from milepost.data.collection_pause import CollectionPaused
from milepost.data.conversion import copy_checked
from milepost.data.memory import Block, address_of, as_bits, copy_bytes, needs_pinned, view_of
from milepost.data.read import MAX_OPEN, Files, VerifiedFile
from milepost.data.transfer import Meter, Transfer, run_all
from milepost.data.transforms import REGISTRY, ExtensionRegistry, restored
from milepost.errors import CheckpointDamaged, StateMismatch
from milepost.events.operation import moved
from milepost.state.host_memory import tensor_of_bytes
from milepost.state.tensors import dtype_name, torch_dtype

_IN_PLACE = 64 * KIB
"""Shorter pieces go through the block, so that thousands of tensors do not mean thousands of views."""
_FROM_THE_CACHE = min(4, len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1)
"""How many threads read from the page cache. They keep a CPU busy, and the rest of the work needs Python's lock."""
_FOR_SMALL_TENSORS = 4
_QUIET = Transfer(direct=False)
"""For looking into a checkpoint: its data should be in the page cache for the next look."""


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A planned read, the saved dtype, and the memory that takes the result. `alone`: no other rank reads the same.

    `order`: which dimension of the tensor each dimension of the read is, where they were turned around.
    """

    item: PlannedRead
    dtype: str
    target: torch.Tensor
    size_bytes: int
    alone: bool = False
    order: Shape | None = None

    def index(self, at: Shape) -> Shape:
        """An index in the order of the tensor's own dimensions."""
        return at if self.order is None else tuple(at[self.order.index(d)] for d in range(len(at)))


def placement_of(item: PlannedRead, dtype: str, target: torch.Tensor, alone: bool = False) -> Placement:
    """The read of `item` into `target`."""
    return Placement(item, dtype, target, item.box.elements * DTYPES[dtype].size_bytes, alone)


def place_all(
    files: Files,
    placements: Iterable[Placement],
    transfer: Transfer = _QUIET,
    meter: Meter | None = None,
    *,
    verify: bool = True,
    lossy: bool = True,
    registry: ExtensionRegistry = REGISTRY,
) -> None:
    """Read everything into its targets. Bytes that were transformed are restored by extensions of the registry.

    Raises StateMismatch, unless it may be `lossy`, for a value that the type of its target does not have.
    """
    meter = meter or Meter("load", files.url)
    by_rank: dict[int, list[Placement]] = defaultdict(list)
    total = count = 0
    for placement in placements:
        if placement.item.key in files.transforms:
            _place_restored(files, placement, registry, lossy)
            continue
        count += 1
        by_rank[placement.item.rank].append(placement)
        total += placement.size_bytes
    meter.expect(total)
    transfer, remote = transfer.to_read(files.traits), bool(files.traits.requests)
    # A block of the file is checked as a whole, so it must fit a worker's memory.
    align = files.manifest.block_bytes if verify else PAGE_BYTES
    size = max(transfer.block_bytes // align, 1) * align
    pinned = needs_pinned([p.target for found in by_rank.values() for p in found])
    opened = _opened(files, by_rank)
    jobs = (job for number, found in opened for job in _jobs(files.of(number), found, align, size, lossy))

    first = next(jobs, None)
    if first is None:
        return
    threads = transfer.threads_for(total, count, size)
    if remote:  # small tensors keep Python busy, but a few requests should be under way
        threads = max(threads, min(_FOR_SMALL_TENSORS, transfer.threads_for(total, 1, size)))
    if not remote and (not transfer.direct or not _is_cold(first)):
        threads = min(threads, _FROM_THE_CACHE)

    def make_worker() -> Callable[[_ReadJob], None]:
        return _Placer(Block(size, pinned), transfer.direct, verify, meter)

    run_all(chain([first], jobs), make_worker, threads, meter, apart=remote)
    moved(total)


def _opened(files: Files, by_rank: dict[int, list[Placement]]) -> Iterator[tuple[int, list[Placement]]]:
    """The number of each file with the reads from it, with the files opened some ahead."""
    ranks = sorted(by_rank)
    for at in range(0, len(ranks), MAX_OPEN // 2):
        batch = ranks[at : at + MAX_OPEN // 2]
        files.open_ahead(batch)
        if not files.manifest.older:
            yield from ((rank, by_rank[rank]) for rank in batch)
            continue
        by_file: dict[int, list[Placement]] = defaultdict(list)
        for placement in chain.from_iterable(by_rank[rank] for rank in batch):
            by_file[files.number_of(placement.item.rank, placement.item.name)].append(placement)
        numbers = list(by_file)
        for first in range(0, len(numbers), MAX_OPEN // 2):
            some = numbers[first : first + MAX_OPEN // 2]
            files.open_ahead(some)
            yield from ((number, by_file[number]) for number in some)


def _place_restored(files: Files, placement: Placement, registry: ExtensionRegistry, lossy: bool) -> None:
    """Read a whole entry, undo its transforms, and copy the wanted part of it."""
    item, file = placement.item, files.holding(placement.item.rank, placement.item.name)
    size = item.source.elements * DTYPES[placement.dtype].size_bytes
    what = f"{file.where}: {item.name[:200]!r}"
    data = restored(file.packed(item), files.transforms[item.key], size, what, registry)
    if len(data) != size:
        raise CheckpointDamaged(f"{what} is {len(data)} bytes without its transforms, and should be {size}")
    source = tensor_of_bytes(data).view(torch_dtype(placement.dtype))
    copy_box(placement, source.reshape(item.source.shape)[item.box.within(item.source).slices], lossy=lossy)


def copy_box(placement: Placement, source: torch.Tensor, *, lossy: bool) -> None:
    """Copy the box of a placement, as it was saved, into its target. Raises StateMismatch; see `place_all`."""
    target = placement.target
    same = target.dtype == source.dtype and not target.is_conj() and not target.is_neg()
    with torch.inference_mode(target.is_inference()):  # else torch refuses to change such a tensor
        if same:
            as_bits(target).copy_(as_bits(source))
        else:
            _convert(placement, source, target, placement.item.box.offset, lossy=lossy)


def _convert(placement: Placement, source: torch.Tensor, target: torch.Tensor, offset: Shape, *, lossy: bool) -> None:
    """Copy a box at `offset` of the whole tensor into a target of another type. Raises StateMismatch; see `place_all`.

    The offset is in the order of the dimensions of the placement.
    """
    wanted = dtype_name(target.dtype, placement.item.key)
    if lossy:
        target.copy_(source)
        return
    wrong = copy_checked(source, target, placement.dtype, wanted)
    if wrong is not None:
        at = tuple(a + b for a, b in zip(offset, wrong, strict=True))
        raise StateMismatch(
            f"{placement.item.key!r} was saved as {placement.dtype} and the target is {wanted}, which cannot hold the "
            f"value {source[wrong].item()} at index {placement.index(at)}.\n  The state is partly filled. Give the "
            'target a type that holds every value, or pass convert_dtype="lossy".'
        )


class _Span(NamedTuple):
    """One placement in its file: bytes start..stop span it, and where it lies in one run, `address` is its memory."""

    start: int
    stop: int
    address: int
    origin: int
    alone: bool
    placement: Placement
    region: "_Region | None"


class _ReadJob(NamedTuple):
    """Bytes start..stop of the data of a file, and all that they hold of what is wanted."""

    file: VerifiedFile
    start: int
    stop: int
    pieces: list[_Span]


def _jobs(file: VerifiedFile, placements: list[Placement], align: int, size: int, lossy: bool) -> Iterator[_ReadJob]:
    """The reads of one file, front to back; each starts where a block does."""
    with CollectionPaused():
        pieces = sorted([_piece(file, p, lossy) for p in placements], key=itemgetter(0))
        ranges = [span for piece in pieces for span in ([piece[:2]] if piece.address else _spans(piece))]
    following, active = 0, list[_Span]()
    for low, high in _merged(ranges, align, file.header.data_bytes):
        stop = low
        while stop < high:
            # At multiples of the size, where spans of checksums begin.
            start, stop = stop, min(stop - stop % size + size, high, file.end_of_part(stop))
            active = [piece for piece in active if piece.stop > start]
            while following < len(pieces) and pieces[following].start < stop:
                active.append(pieces[following])
                following += 1
            yield _ReadJob(file, start, stop, active)


def _piece(file: VerifiedFile, placement: Placement, lossy: bool) -> _Span:
    origin, end = file.entry(placement.item, placement.dtype).data_offsets
    order = file.order(placement.item)
    if order is not None:
        placement = _turned(placement, order)
    item, target = placement.item, placement.target
    if item.box is item.source or item.box == item.source:
        start, stop = origin, end
    else:
        size = DTYPES[placement.dtype].size_bytes
        inner, strides = item.box.within(item.source), strides_of(item.source.shape)
        start = origin + sum(map(mul, inner.offset, strides)) * size
        stop = start + (sum((n - 1) * s for n, s in zip(inner.shape, strides, strict=True)) + 1) * size
    in_one_run = stop - start == placement.size_bytes
    address = address_of(target) if in_one_run and target.dtype is torch_dtype(placement.dtype) else 0
    region = None if address else _Region(placement, lossy)
    return _Span(start, stop, address, origin, placement.alone and in_one_run, placement, region)


def _turned(placement: Placement, order: Shape) -> Placement:
    """The same read with the dimensions in the order in which they lie in the file."""

    def turn(box: Box) -> Box:
        return Box(tuple(box.offset[d] for d in order), tuple(box.shape[d] for d in order))

    item, target = placement.item, placement.target.permute(order)
    turned = PlannedRead(item.key, item.rank, item.name, turn(item.source), turn(item.box))
    return Placement(turned, placement.dtype, target, placement.size_bytes, placement.alone, order)


def _spans(piece: _Span) -> Iterator[tuple[int, int]]:
    """The ranges that a piece needs."""
    origin, item_bytes = piece.origin, DTYPES[piece.placement.dtype].size_bytes
    return ((origin + start, origin + stop) for start, stop in stretches_of(piece.placement.item, item_bytes))


def _merged(ranges: list[tuple[int, int]], align: int, end: int) -> Iterator[tuple[int, int]]:
    """The whole blocks that the ranges touch, as runs without gaps."""
    low = high = 0
    for start, stop in sorted(ranges):
        if low <= start and stop <= high:  # as most of many small ones
            continue
        first, last = start // align * align, min(-(-stop // align) * align, end)
        if first > high or low == high:
            if low < high:
                yield low, high
            low, high = first, last
        else:
            high = max(high, last)
    if low < high:
        yield low, high


def _is_cold(job: _ReadJob) -> bool:
    """Whether to read a job past the page cache. Data that other ranks of this machine also read goes through it."""
    alone = all(piece.alone for piece in job.pieces)
    return alone and job.file.reader.is_cold(job.file.header.header_bytes + job.start, job.stop - job.start)


class _Placer:
    """Does jobs with a block of memory of its own."""

    def __init__(self, block: Block, direct: bool, verify: bool, meter: Meter) -> None:
        self._block, self._direct, self._verify, self._meter = block, direct, verify, meter

    def __call__(self, job: _ReadJob) -> None:
        if self._direct and _is_cold(job):
            views = [self._block.view[: job.stop - job.start]]
            job.file.read_cold(job.start, views[0])
            if self._verify:
                job.file.check(job.start, views)
            count = self._copy(job.pieces, job)
        else:
            views, left, count = self._scatter(job)
            job.file.read(job.start, views, verify=self._verify)
            count += self._copy(left, job)
        self._meter.add(count)

    def _scatter(self, job: _ReadJob) -> tuple[list[memoryview], list[_Span], int]:
        """Where each byte of a job goes, in order; what must then be copied from the block; how much needs no copy."""
        views: list[memoryview] = []
        left: list[_Span] = []
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

    def _copy(self, pieces: list[_Span], job: _ReadJob) -> int:
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


class _Region:
    """A region of an entry whose target is strided, on a device, or of another type: filled by copies from a block."""

    def __init__(self, placement: Placement, lossy: bool) -> None:
        item, target = placement.item, placement.target
        self._placement, self._lossy = placement, lossy
        self._dtype = torch_dtype(placement.dtype)
        self._size = DTYPES[placement.dtype].size_bytes
        self._shape, self._strides = item.source.shape, strides_of(item.source.shape)
        self._wanted = item.box.within(item.source)
        same = target.dtype == self._dtype and not target.is_conj() and not target.is_neg()
        # Bit by bit where the types are the same: torch cannot copy all of its types.
        self._target = as_bits(target) if same else target
        self._read_as = self._target.dtype if same else self._dtype
        self._same = same

    def fill(self, block: Block, at: int, start: int, stop: int) -> int:
        """Copy the region's part of bytes start..stop of the entry, which lie at `at` in the block. Gives its size."""
        # Workers are not in the caller's inference mode, and outside of it torch refuses to change such a tensor.
        with torch.inference_mode(self._target.is_inference()):
            return self._fill(block, at, start, stop)

    def _fill(self, block: Block, at: int, start: int, stop: int) -> int:
        count = 0
        first = start // self._size
        source = block.as_type(self._read_as)
        base = source.storage_offset() + at // self._size - first
        for box in boxes_of_run(self._shape, first, stop // self._size):
            part = box.intersect(self._wanted)
            if part is not None:
                offset = base + sum(map(mul, part.offset, self._strides))
                target = self._target[part.within(self._wanted).slices]
                values = source.as_strided(part.shape, self._strides, offset)
                if self._same:
                    target.copy_(values)
                else:
                    where = tuple(map(add, self._placement.item.source.offset, part.offset))
                    _convert(self._placement, values, target, where, lossy=self._lossy)
                count += part.elements
        return count * self._size
