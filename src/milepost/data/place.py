"""The last step of a load: verified bytes go into tensors.

The blocks of a file that are needed form runs; runs are cut into jobs, and workers take them one by one. A job reads
its range in one request, straight into the memory of the tensors where the bytes lie there as in the file, and else
into the worker's own block; checks it while it is in the processor's cache; and copies from the block to the targets.
No block is read twice, and a strided region is cut out of whole blocks instead of being read row by row.
"""

from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from itertools import chain
from operator import itemgetter, mul

import torch

from milepost.core.box import Box, Shape, strides_of
from milepost.core.division import PlannedRead, stretches_of
from milepost.core.dtypes import DTYPES
from milepost.core.limits import PAGE_BYTES
from milepost.data.collection_pause import CollectionPaused
from milepost.data.device import Lane, Moment, gpus_of
from milepost.data.device_placer import DevicePlacer
from milepost.data.memory import Block, address_of, needs_pinned
from milepost.data.pieces import Placement, PlacementRun, ReadJob, Region, copy_box, is_cold
from milepost.data.placer import Placer
from milepost.data.read import MAX_OPEN, Files, VerifiedFile
from milepost.data.transfer import Meter, Transfer, run_all
from milepost.data.transforms import REGISTRY, ExtensionRegistry, restored
from milepost.errors import CheckpointDamaged
from milepost.events.operation import moved
from milepost.state.host_memory import tensor_of_bytes
from milepost.state.tensors import torch_dtype

_FOR_SMALL_TENSORS = 4
_QUIET = Transfer(direct=False)
"""For looking into a checkpoint: its data should be in the page cache for the next look."""


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
    targets = [p.target for found in by_rank.values() for p in found]
    gpus, remote = gpus_of(targets), bool(files.traits.requests)
    transfer = transfer.to_read(files.traits, to_device=bool(gpus))
    # A block of the file is checked as a whole, so it must fit a worker's memory.
    align = files.manifest.block_bytes if verify else PAGE_BYTES
    size = max(transfer.block_bytes // align, 1) * align
    opened = _opened(files, by_rank)
    jobs = (job for number, found in opened for job in _jobs(files.of(number), found, align, size, lossy))

    with torch.inference_mode(mode=False):  # a view that is made in it could not be filled by other threads
        first = next(jobs, None)
    if first is None:
        return
    if not remote and (not transfer.direct or not is_cold(first)):
        transfer = transfer.from_cache(copies=2 if gpus else 1)
    threads = transfer.threads_for(total, count, size)
    if remote:  # small tensors keep Python busy, but a few requests should be under way
        threads = max(threads, min(_FOR_SMALL_TENSORS, transfer.threads_for(total, 1, size)))
    moment, pinned = Moment(gpus), needs_pinned(targets)

    def make_block() -> Block:
        nonlocal pinned
        block = Block(size, pinned)
        pinned = block.is_pinned  # what failed once is not tried, nor warned of, for each block
        return block

    def make_worker() -> Callable[[ReadJob], None]:
        if not gpus:
            return Placer(Block(size), transfer.direct, verify, meter)
        lanes = [Lane(device, moment) for device in gpus]
        return DevicePlacer(make_block, lanes, transfer.direct, verify, meter)

    # Apart: Ctrl-C in this thread must not end the wait for a copy, nor leave it in the stream of a lane.
    run_all(chain([first], jobs), make_worker, threads, meter, apart=remote or bool(gpus), end=_wait_for_copies)
    moved(total)


def _wait_for_copies(worker: Callable[[ReadJob], None]) -> None:
    if isinstance(worker, DevicePlacer):
        worker.wait()


def _opened(files: Files, by_rank: dict[int, list[Placement]]) -> Iterator[tuple[int, list[Placement]]]:
    """The number of each file with the reads from it, with the files opened some ahead."""
    ranks = sorted(by_rank)
    if not files.manifest.older:
        yield from ((rank, by_rank[rank]) for rank in files.in_turn(ranks))
        return
    for at in range(0, len(ranks), MAX_OPEN // 2):  # the header of a rank tells which file holds an entry of it
        by_file: dict[int, list[Placement]] = defaultdict(list)
        for rank in files.in_turn(ranks[at : at + MAX_OPEN // 2]):
            for placement in by_rank[rank]:
                by_file[files.number_of(rank, placement.item.name)].append(placement)
        yield from ((number, by_file[number]) for number in files.in_turn(list(by_file)))


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


def _jobs(file: VerifiedFile, placements: list[Placement], align: int, size: int, lossy: bool) -> Iterator[ReadJob]:
    """The reads of one file, front to back; each starts where a block does."""
    with CollectionPaused():
        pieces = sorted([_piece(file, p, lossy) for p in placements], key=itemgetter(0))
        ranges = [span for piece in pieces for span in ([piece[:2]] if piece.address else _spans(piece))]
    following, active = 0, list[PlacementRun]()
    for low, high in _merged(ranges, align, file.header.data_bytes):
        stop = low
        while stop < high:
            # At multiples of the size, where spans of checksums begin.
            start, stop = stop, min(stop - stop % size + size, high, file.end_of_part(stop))
            active = [piece for piece in active if piece.stop > start]
            while following < len(pieces) and pieces[following].start < stop:
                active.append(pieces[following])
                following += 1
            yield ReadJob(file, start, stop, active)


def _piece(file: VerifiedFile, placement: Placement, lossy: bool) -> PlacementRun:
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
    region = None if address else Region(placement, lossy, in_one_run)
    return PlacementRun(start, stop, address, origin, placement.alone and in_one_run, placement, region)


def _turned(placement: Placement, order: Shape) -> Placement:
    """The same read with the dimensions in the order in which they lie in the file."""

    def turn(box: Box) -> Box:
        return Box(tuple(box.offset[d] for d in order), tuple(box.shape[d] for d in order))

    item, target = placement.item, placement.target.permute(order)
    turned = PlannedRead(item.key, item.rank, item.name, turn(item.source), turn(item.box))
    return Placement(turned, placement.dtype, target, placement.size_bytes, placement.alone, order)


def _spans(piece: PlacementRun) -> Iterator[tuple[int, int]]:
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
