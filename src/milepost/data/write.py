"""Writing: one rank's plan becomes one shard file, in one pass, checksummed on the way.

A store with parts (an object store) gets the file as several objects, each by one request; see `_write_parts`.

The file is cut into blocks of equal size. Each worker takes the next block, gathers its bytes (in its own aligned
memory where the store wants that, else by reference), computes the checksums while the bytes are in the processor's
cache, and writes them. So copying, checksumming and writing of different blocks overlap, and memory is bounded by the
blocks that the workers own.
"""

import ctypes
import threading
from bisect import bisect_right
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

import msgspec
import numpy as np
import torch

from milepost.core.limits import BLOCK_BYTES, KIB, PAGE_BYTES
from milepost.core.manifest import ShardFile, shard_name
from milepost.core.reuse import CELL_BYTES, OLDER, KeptEntry, pack_older
from milepost.core.shardfile import (
    SPAN_BLOCKS,
    FileParts,
    Header,
    NewEntry,
    file_order,
    make_header,
    seal_of,
    slices,
    sums_of,
)
from milepost.data.cells import CellDigests
from milepost.data.collection_pause import CollectionPaused
from milepost.data.device import Moment, gpus_of
from milepost.data.late import BlockFill, EntryData, LateBox, LateTensor
from milepost.data.memory import Block, address_of, copy_bytes, needs_pinned, view_of
from milepost.data.new_files import committed, create_part, is_there, start_file
from milepost.data.tally import TalliedEntry, Tally
from milepost.data.transfer import Meter, Transfer, run_all
from milepost.errors import AlreadyExists, InvalidState
from milepost.store import Store

_BY_REFERENCE = 64 * KIB
"""Shorter pieces are gathered, so that thousands of tensors do not mean thousands of requests."""


class EntryToWrite(msgspec.Struct, frozen=True, gc=False):
    """An entry to write, with its data or the source of it. `live`: the caller waits to change that memory.

    `tensor`: the number of its tensor, under which statistics are collected; -1: none.
    """

    header: NewEntry
    data: EntryData
    live: bool = False
    tensor: int = -1


class Written(msgspec.Struct, frozen=True):
    """What a rank wrote: its file (None where it had nothing to write)."""

    file: ShardFile | None
    data_bytes: int


def write_shard(
    store: Store,
    save_id: str,
    rank: int,
    entries: list[EntryToWrite],
    transfer: Transfer,
    meter: Meter,
    released: Callable[[], None] = lambda: None,
    tally: Tally | None = None,
    kept: Mapping[str, KeptEntry] | None = None,
) -> Written:
    """Write one shard file and make it durable. On any error nothing of it remains.

    Live entries are written first. `released` is called once, from any thread, when they are no longer needed. `tally`
    gets the statistics of what is written. `kept`: the entries of this rank that are in older files (None: the file
    gets no digests, and so can be no base of an incremental save).
    """
    if not entries and not kept:
        released()
        return Written(None, 0)
    entries = sorted(entries, key=lambda e: file_order(e.header.dtype, e.header.size_bytes))
    notes = {"format": "milepost", "save_id": save_id, "rank": str(rank)}
    older, kept_digests = pack_older(kept) if kept else ("", b"")
    if older:
        notes[OLDER] = older
    digests = len(entries) + len(kept) if kept is not None else 0
    data_bytes = sum(e.header.size_bytes for e in entries)
    name, transfer = shard_name(save_id, rank), transfer.to_write(store.traits, data_bytes)
    # A block of the transfer holds whole spans, or, where memory is too tight for one, the file has none.
    span_bytes = SPAN_BLOCKS * BLOCK_BYTES
    spans = transfer.block_bytes >= span_bytes and data_bytes > BLOCK_BYTES
    if spans or digests:
        transfer = transfer.in_units_of(span_bytes if spans else CELL_BYTES)
    try:
        with CollectionPaused():
            head, header = make_header([e.header for e in entries], notes, BLOCK_BYTES, digests, spans=spans)
    except ValueError as error:
        raise InvalidState(f"{store.url}/{shard_name(save_id, rank)} cannot be written: {error}") from None
    meter.expect(data_bytes)
    source = _EntryBytes(entries, header, transfer.block_bytes, tally, kept_digests if digests else None, spans=spans)
    part_bytes = 0
    if store.traits.part_bytes:
        part_bytes = transfer.block_bytes if header.data_bytes > transfer.block_bytes else 0
        parts = FileParts(name, header.header_bytes, header.data_bytes, header.size_bytes, part_bytes)
        table = _write_parts(store, parts, head, source, transfer, meter, released)
    else:
        table = _write_file(store, name, head, source, transfer, meter, released)
    seal = seal_of(head, table)
    file = ShardFile(rank, header.size_bytes, header.header_bytes, seal, part_bytes, digests, spans)
    return Written(file, data_bytes)


def look_through(entries: Sequence[EntryToWrite], transfer: Transfer, tally: Tally, meter: Meter) -> None:
    """Let `tally` see entries as if they were written to a file, where they need not be."""
    entries = sorted(entries, key=lambda e: file_order(e.header.dtype, e.header.size_bytes))
    with CollectionPaused():
        _, header = make_header([e.header for e in entries], {}, BLOCK_BYTES)
    size, total = transfer.block_bytes, header.data_bytes
    source = _EntryBytes(entries, header, size, tally)
    block = Block(min(size, total), source.pinned)
    for start in range(0, total, size):
        tally.add(start, source.bytes_in(start, min(start + size, total), block, by_reference=True))
        meter.check()


def _write_file(
    store: Store,
    name: str,
    head: bytes,
    source: "_EntryBytes",
    transfer: Transfer,
    meter: Meter,
    released: Callable[[], None],
) -> bytes:
    """Write the file in place, as one object, and give the table of its checksums."""
    header = source.header
    transfer = transfer.while_looked_at() if source.tally is not None else transfer
    try:
        with committed(start_file(store, name, header.size_bytes, transfer.direct)) as writer:

            def put(start: int, views: list[memoryview], sums: Callable[[], None]) -> None:
                sums()  # first: then the bytes are in the processor's cache when they are written
                writer.write(header.header_bytes + start, views)

            writer.write(0, [head])
            threads = transfer.threads_to_write(header.data_bytes, source.pieces, cached=not writer.aligned)
            blocks = _Blocks(source, transfer.block_bytes, lambda: not writer.aligned)
            table = blocks.write(put, threads, meter, released)
            writer.write(header.header_bytes + header.data_bytes, [table])
    except AlreadyExists:
        # Nobody else writes this name: the reply to this very commit was lost.
        if not is_there(store, name, header.size_bytes):
            raise
    return table


def _write_parts(
    store: Store,
    parts: FileParts,
    head: bytes,
    source: "_EntryBytes",
    transfer: Transfer,
    meter: Meter,
    released: Callable[[], None],
) -> bytes:
    """Create the parts of the file, several at once, and give the table of its checksums.

    A part is made of views of the tensors themselves, where they lie in one run of memory: nothing is copied.
    """

    def put(start: int, views: list[memoryview], sums: Callable[[], None]) -> None:
        part = parts[start // transfer.block_bytes]
        before = [head] if start == 0 else []
        if len(parts) == 1:  # all data, so its checksums are those of the table
            sums()
            create_part(store, part, [*before, *views, blocks.table()])
        else:
            create_part(store, part, [*before, *views])
            sums()  # last: computing them would keep the other threads from starting their first requests

    threads = transfer.threads_for(source.header.data_bytes, 1, transfer.block_bytes)
    blocks = _Blocks(source, transfer.block_bytes, lambda: True)
    table = blocks.write(put, threads, meter, released, apart=True)
    if len(parts) > 1:
        create_part(store, parts[len(parts) - 1], [table])
    elif not source.header.data_bytes:  # all that this rank has is in older files
        create_part(store, parts[0], [head, table])
    return table


class _Blocks:
    """The data of a file in blocks. Workers gather them, compute their checksums and put them where they belong."""

    def __init__(self, source: "_EntryBytes", size: int, by_reference: Callable[[], bool]) -> None:
        self._source, self._size, self._by_reference = source, size, by_reference
        self._total = source.header.data_bytes
        self._sums = np.zeros(-(-self._total // BLOCK_BYTES), dtype="<u8")
        self._span_bytes = SPAN_BLOCKS * BLOCK_BYTES
        self._spans = np.zeros(-(-self._total // self._span_bytes) if source.spans else 0, dtype="<u8")
        self._free: deque[Block] = deque()

    def write(
        self,
        put: Callable[[int, list[memoryview], Callable[[], None]], None],
        threads: int,
        meter: Meter,
        released: Callable[[], None],
        *,
        apart: bool = False,
    ) -> bytes:
        """Put all blocks and give the table: the checksums of blocks and of spans, and the digests.

        `put` gets the start of a block, its bytes, and a function that computes its checksums. It calls that once,
        before or after it writes.
        """
        starts, live = self._source.starts_of_blocks()
        release = _Countdown(live, released)
        tally = self._source.tally

        def make_worker() -> Callable[["int | _Gathered"], None]:
            self._free.append(Block(min(self._size, self._total), self._source.pinned))

            def write(job: "int | _Gathered") -> None:
                job = job if isinstance(job, _Gathered) else self._gather(job)
                put(job.start, job.views, partial(self._sum, job))
                if tally is not None:  # others write while this thread looks at what it has written
                    tally.add(job.start, job.views)
                meter.add(job.stop - job.start)
                self._free.append(job.block)
                release.count(job.start)

            return write

        # A planner makes late tensors, and may use the same memory for each. So they are copied one after the other, in
        # order (jobs are taken one at a time); only checksums and writes run side by side.
        jobs: Iterator[int | _Gathered] = map(self._gather, starts) if self._source.late else iter(starts)
        if self._total:
            run_all(jobs, make_worker, threads, meter, apart=apart)
        return self.table()

    def table(self) -> bytes:
        """The table, once all blocks are summed."""
        return self._sums.tobytes() + self._spans.tobytes() + self._source.digests()

    def _gather(self, start: int) -> "_Gathered":
        block = self._free.pop()  # each worker adds one, and returns it before it takes the next job
        stop = min(start + self._size, self._total)
        views = self._source.bytes_in(start, stop, block, by_reference=self._by_reference())
        return _Gathered(start, stop, views, block)

    def _sum(self, job: "_Gathered") -> None:
        at = job.start
        for views in slices(job.views, self._span_bytes):  # each is in the processor's cache when it is summed again
            found, first = sums_of(views, BLOCK_BYTES), at // BLOCK_BYTES
            self._sums[first : first + len(found)] = found
            if len(self._spans):
                [self._spans[at // self._span_bytes]] = sums_of(views, self._span_bytes)
            at += self._span_bytes
        if self._source.cells is not None:
            self._source.cells.add(job.start, job.views)


class _Countdown:
    """Calls back, once, when all of `awaited` were counted."""

    def __init__(self, awaited: set[int], then: Callable[[], None]) -> None:
        self._awaited, self._then = awaited, then
        self._lock = threading.Lock()
        if not awaited:
            then()

    def count(self, one: int) -> None:
        with self._lock:
            if one not in self._awaited:
                return
            self._awaited.remove(one)
            if self._awaited:
                return
        self._then()


class _Gathered(msgspec.Struct, frozen=True):
    """The bytes start..stop, some of them in the block."""

    start: int
    stop: int
    views: list[memoryview]
    block: Block


class _Made:
    """A late tensor, made once for all the blocks that it lies in, and dropped after the last of them."""

    def __init__(self, late: LateTensor, blocks: int) -> None:
        self._late, self._left = late, blocks
        self._data: torch.Tensor | None = None

    def take(self) -> torch.Tensor:
        """The tensor, for one block. Blocks with late tensors are gathered one at a time, so there is no lock."""
        data = self._data if self._data is not None else self._late.get()
        self._left -= 1
        self._data = data if self._left > 0 else None
        return data


def _made_for(entry: EntryToWrite, header: Header, block_bytes: int) -> "torch.Tensor | LateBox | _Made":
    if not isinstance(entry.data, LateTensor):
        return entry.data
    start, stop = header.entries[entry.header.name].data_offsets
    return _Made(entry.data, (stop - 1) // block_bytes - start // block_bytes + 1)


def _run_ends(starts: list[int], addresses: list[int], total: int) -> list[int]:
    """For each entry, the end of the run of entries that lie in memory as they will in the file."""
    ends = [*starts[1:], total]
    for i in range(len(starts) - 2, -1, -1):
        if addresses[i] and addresses[i + 1] - addresses[i] == starts[i + 1] - starts[i]:
            ends[i] = ends[i + 1]
    return ends


class _EntryBytes:
    """The data of all entries as one run of bytes."""

    def __init__(
        self,
        entries: list[EntryToWrite],
        header: Header,
        block_bytes: int,
        tally: Tally | None,
        kept_digests: bytes | None = None,
        *,
        spans: bool = False,
    ) -> None:
        """`kept_digests`: those of entries in older files; None if no digests are wanted. `spans`: whether they are."""
        self.header, self._block_bytes, self.tally, self.spans = header, block_bytes, tally, spans
        self._live = [header.entries[entry.header.name].data_offsets for entry in entries if entry.live]
        self.pieces = len(entries)
        self.late = any(isinstance(entry.data, LateTensor) for entry in entries)
        self._starts = [header.entries[entry.header.name].data_offsets[0] for entry in entries]
        self.cells = CellDigests(self._starts, header.data_bytes) if kept_digests is not None else None
        self._kept_digests = kept_digests or b""
        if tally is not None:
            found = zip(self._starts, entries, strict=True)
            tally.begin([TalliedEntry(start, e.header.dtype, e.tensor) for start, e in found], header.data_bytes)
        self._data = [_made_for(entry, header, block_bytes) for entry in entries]
        self._addresses = [address_of(data) if isinstance(data, torch.Tensor) else 0 for data in self._data]
        self._run_ends = _run_ends(self._starts, self._addresses, header.data_bytes)
        self._views: dict[int, memoryview] = {}
        here = [data for data in self._data if isinstance(data, torch.Tensor)]
        # Late tensors come from the device that the job computes on.
        self.pinned = needs_pinned(here) or (self.late and torch.cuda.is_available())
        Moment(gpus_of(here)).wait()  # the threads that copy are not in the stream of the caller

    def digests(self) -> bytes:
        """The digests of all entries, once the cells of all blocks are known; empty if none are wanted."""
        return b"".join(self.cells.result()) + self._kept_digests if self.cells is not None else b""

    def starts_of_blocks(self) -> tuple[list[int], set[int]]:
        """Where blocks start, blocks with live entries first, and the set of those."""
        size = self._block_bytes
        live = {at * size for start, stop in self._live for at in range(start // size, -(-stop // size))}
        rest = [start for start in range(0, self.header.data_bytes, size) if start not in live]
        return [*sorted(live), *rest], live

    def bytes_in(self, start: int, stop: int, block: Block, *, by_reference: bool) -> list[memoryview]:
        """Bytes start..stop, in `block` from its beginning, or partly as views of the tensors themselves."""
        i = bisect_right(self._starts, start) - 1
        address = self._addresses[i] + start - self._starts[i] if self._addresses[i] else 0
        if self._run_ends[i] >= stop and address and (by_reference or address % PAGE_BYTES == 0):
            # All of it lies together, in order, as staged copies do. It is written from there.
            return [memoryview((ctypes.c_char * (stop - start)).from_address(address)).cast("B")]
        views, fill = list[memoryview](), BlockFill(block)
        at = gathered = start  # bytes gathered..at are in the block and not in `views` yet
        while at < stop:
            low = at - self._starts[i]
            high = min(stop - self._starts[i], self._size(i))
            if by_reference and self._addresses[i] and high - low >= _BY_REFERENCE:
                views.append(block.view[gathered - start : at - start])
                views.append(self._view(i)[low:high])
                gathered = at + high - low
            elif self._addresses[i]:
                copy_bytes(block.address + at - start, self._addresses[i] + low, high - low)
            elif high > low:
                data = self._data[i]
                fill.add(data.take() if isinstance(data, _Made) else data, low, high, at - start)
            at += high - low
            i += 1
        fill.finish()
        views.append(block.view[gathered - start : stop - start])
        return [view for view in views if len(view)]

    def _size(self, i: int) -> int:
        end = self._starts[i + 1] if i + 1 < len(self._starts) else self.header.data_bytes
        return end - self._starts[i]

    def _view(self, i: int) -> memoryview:
        if i not in self._views:
            data = self._data[i]
            assert isinstance(data, torch.Tensor)
            self._views[i] = view_of(data)
        return self._views[i]
