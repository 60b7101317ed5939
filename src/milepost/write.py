"""Writing: one rank's plan becomes one shard file, in one pass, checksummed on the way."""

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec
import torch
import xxhash

from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.core.manifest import ShardFile, shard_name
from milepost.core.shardfile import NewEntry, make_header, seal_of
from milepost.store import Store, Writer
from milepost.tensors import bytes_of

AT_ONCE_BYTES = 16 * MIB
"""The most that is copied at a time for tensors that are not contiguous in host memory."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An entry to write, with the memory that holds it."""

    header: NewEntry
    data: torch.Tensor


class Written(msgspec.Struct, frozen=True):
    """What a rank wrote: its file (None where it had nothing to write)."""

    file: ShardFile | None
    data_bytes: int


def write_shard(store: Store, save_id: str, rank: int, entries: list[Entry]) -> Written:
    """Write one shard file and make it durable. On any error nothing of it remains."""
    if not entries:
        return Written(None, 0)
    # Wide elements first: then each entry is aligned to its element size without padding, which the format has not.
    entries = sorted(entries, key=lambda e: -e.data.element_size())
    notes = {"format": "milepost", "save_id": save_id, "rank": str(rank)}
    head, header = make_header([e.header for e in entries], notes, BLOCK_BYTES)
    writer = store.writer(shard_name(save_id, rank))
    try:
        writer.write(head)
        table = _write_blocks(writer, entries)
        writer.write(table)
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    seal = seal_of(head, table)
    return Written(ShardFile(rank, header.size_bytes, header.header_bytes, seal), header.data_bytes)


def _write_blocks(writer: Writer, entries: list[Entry]) -> bytes:
    """Write the data and give the table of its checksums."""
    sums: list[int] = []
    hasher, filled = xxhash.xxh3_64(), 0
    for view in _views(entries):
        start = 0
        while start < len(view):
            step = min(BLOCK_BYTES - filled, len(view) - start)
            hasher.update(view[start : start + step])
            start, filled = start + step, filled + step
            if filled == BLOCK_BYTES:
                sums.append(hasher.intdigest())
                hasher, filled = xxhash.xxh3_64(), 0
        writer.write(view)
    if filled:
        sums.append(hasher.intdigest())
    return b"".join(value.to_bytes(8, "little") for value in sums)


def _views(entries: list[Entry]) -> Iterator[memoryview]:
    """All bytes in order; small ones are gathered so that thousands of tensors do not mean thousands of writes."""
    gathered = bytearray()
    for entry in entries:
        for view in bytes_of(entry.data, AT_ONCE_BYTES):
            if len(view) < MIB:
                gathered += view
                if len(gathered) >= MIB:
                    yield memoryview(gathered)
                    gathered = bytearray()
                continue
            if gathered:
                yield memoryview(gathered)
                gathered = bytearray()
            yield view
    if gathered:
        yield memoryview(gathered)
