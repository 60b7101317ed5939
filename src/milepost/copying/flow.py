"""How the bytes of a copy move: in which blocks, by how many threads, with how many requests under way. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass, replace

from milepost.core.limits import BLOCK_BYTES
from milepost.data.transfer import Transfer, limited_transfer
from milepost.store import Traits


@dataclass(frozen=True, slots=True)
class Flow:
    """Each of `threads` has a block of memory, reads it in ranges, `reads` of them at once, checks and writes it."""

    block_bytes: int
    threads: int
    range_bytes: int
    reads: int
    direct: bool


def flow_between(
    source: Traits,
    target: Traits,
    transfer: Transfer | None,
    host_memory_bytes: int,
    files: Sequence[int],
    checked_bytes: int,
) -> Flow:
    """How files with so many bytes of data go from one kind of store to another, within this memory.

    `checked_bytes`: what one checksum covers; blocks hold whole ones. A store that keeps files in parts gets each part
    from one block. Raises InvalidRequest for too little memory.
    """
    longest = max(-(-max(files, default=0) // checked_bytes), 1) * checked_bytes
    if not target.part_bytes:
        moving = limited_transfer(transfer, host_memory_bytes).to_read(source)
        block = min(_whole(moving.block_bytes, checked_bytes), longest)
        return Flow(block, moving.threads_for(sum(files), 1, block), block, 1, moving.direct)
    half = limited_transfer(transfer, max(host_memory_bytes // 2, min(host_memory_bytes, BLOCK_BYTES)))
    writing = half.to_write(replace(target, part_bytes=min(target.part_bytes, longest)), sum(files))
    block = _whole(writing.block_bytes, checked_bytes)
    threads = writing.threads_for(sum(files), 1, block)
    if not source.requests:
        return Flow(block, threads, block, 1, writing.direct)
    reading = half.to_read(source)
    size = _whole(reading.block_bytes, checked_bytes)
    return Flow(block, threads, size, max(1, reading.threads // threads), writing.direct)


def _whole(size_bytes: int, unit: int) -> int:
    """As many whole units as this holds, at least one."""
    return max(size_bytes // unit, 1) * unit
