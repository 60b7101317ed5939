"""Writing: one rank's plan becomes one shard file, in one pass, checksummed on the way.

The file is cut into blocks of equal size. Each worker takes the next block, brings its bytes together (in aligned
memory of its own, where the store wants that, or by reference), computes the checksums while they are warm, and writes
it. So copying, checksumming and writing of different blocks overlap, and memory is bounded by what the workers own.
"""

from bisect import bisect_right
from collections.abc import Callable

import msgspec
import numpy as np
import torch

from milepost.core.box import boxes_of_run
from milepost.core.limits import BLOCK_BYTES, KIB
from milepost.core.manifest import ShardFile, shard_name
from milepost.core.shardfile import Header, NewEntry, make_header, seal_of, sums_of
from milepost.memory import Block, address_of, as_bits, copy_bytes, needs_pinned, view_of
from milepost.pause import CollectionPaused
from milepost.store import Store, Writer
from milepost.transfer import Meter, Transfer, run_all

_THROUGH_THE_CACHE = 2
"""So many write to the page cache at once: one file has one lock there, and more threads only spin on it."""
_BY_REFERENCE = 64 * KIB
"""Shorter pieces are gathered, so that thousands of tensors do not mean thousands of requests."""


class Entry(msgspec.Struct, frozen=True, gc=False):
    """An entry to write, with the memory that holds it."""

    header: NewEntry
    data: torch.Tensor


class Written(msgspec.Struct, frozen=True):
    """What a rank wrote: its file (None where it had nothing to write)."""

    file: ShardFile | None
    data_bytes: int


def write_shard(
    store: Store, save_id: str, rank: int, entries: list[Entry], transfer: Transfer, meter: Meter
) -> Written:
    """Write one shard file and make it durable. On any error nothing of it remains."""
    if not entries:
        return Written(None, 0)
    # Wide elements first: then each entry is aligned to its element size without padding, which the format has not.
    entries = sorted(entries, key=lambda e: -e.data.element_size())
    notes = {"format": "milepost", "save_id": save_id, "rank": str(rank)}
    with CollectionPaused():
        head, header = make_header([e.header for e in entries], notes, BLOCK_BYTES)
    meter.expect(header.data_bytes)
    writer = store.writer(shard_name(save_id, rank), header.size_bytes, direct=transfer.direct)
    try:
        writer.write(0, [head])
        table = _write_blocks(writer, _Source(entries, header), transfer, meter)
        writer.write(header.header_bytes + header.data_bytes, [table])
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    seal = seal_of(head, table)
    return Written(ShardFile(rank, header.size_bytes, header.header_bytes, seal), header.data_bytes)


def _write_blocks(writer: Writer, source: "_Source", transfer: Transfer, meter: Meter) -> bytes:
    """Write the data and give the table of its checksums."""
    total, size = source.header.data_bytes, transfer.block_bytes
    sums = np.zeros(-(-total // BLOCK_BYTES), dtype="<u8")

    def make_worker() -> Callable[[int], None]:
        block = Block(min(size, total), source.pinned)

        def write(start: int) -> None:
            stop = min(start + size, total)
            views = source.bytes_in(start, stop, block, by_reference=not writer.aligned)
            found = sums_of(views, BLOCK_BYTES)
            first = start // BLOCK_BYTES
            sums[first : first + len(found)] = found
            writer.write(source.header.header_bytes + start, views)
            meter.add(stop - start)

        return write

    threads = transfer.threads_for(total, source.pieces, size)
    if not writer.aligned:
        threads = min(threads, _THROUGH_THE_CACHE)
    run_all(iter(range(0, total, size)), make_worker, threads, meter)
    return sums.tobytes()


class _Source:
    """The data of all entries as one run of bytes."""

    def __init__(self, entries: list[Entry], header: Header) -> None:
        self.header = header
        self.pinned = needs_pinned([entry.data for entry in entries])
        self.pieces = len(entries)
        self._entries = entries
        self._starts = [header.entries[entry.header.name].data_offsets[0] for entry in entries]
        self._addresses = [address_of(entry.data) for entry in entries]
        self._views: dict[int, memoryview] = {}

    def bytes_in(self, start: int, stop: int, block: Block, *, by_reference: bool) -> list[memoryview]:
        """Bytes start..stop, in `block` from its beginning, or partly as views of the tensors themselves."""
        views: list[memoryview] = []
        at = gathered = start  # what lies between was put into the block and is not in `views` yet
        i = bisect_right(self._starts, start) - 1
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
                self._copy(i, low, high, block, at - start)
            at += high - low
            i += 1
        views.append(block.view[gathered - start : stop - start])
        return [view for view in views if len(view)]

    def _size(self, i: int) -> int:
        end = self._starts[i + 1] if i + 1 < len(self._starts) else self.header.data_bytes
        return end - self._starts[i]

    def _view(self, i: int) -> memoryview:
        if i not in self._views:
            self._views[i] = view_of(self._entries[i].data)
        return self._views[i]

    def _copy(self, i: int, low: int, high: int, block: Block, at: int) -> None:
        """Copy bytes low..high of a tensor that is strided or on a device. Elements are not cut: all is aligned to them."""
        data = self._entries[i].data
        size = data.element_size()
        if data.is_contiguous():
            data = data.view(-1)
        for box in boxes_of_run(tuple(data.shape), low // size, high // size):
            count = box.elements * size
            part = data[box.slices]
            if not part.is_conj() and not part.is_neg():  # else torch works it out while it copies
                part = as_bits(part)
            room = block.as_type(part.dtype)[at // size : (at + count) // size]
            room.view(box.shape).copy_(part)
            at += count
