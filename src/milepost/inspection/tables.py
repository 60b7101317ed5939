"""Comparing the entries of two shard files by their tables of checksums, and by bytes where those do not tell.

A table has a checksum for each block of a file's data, counted from the start of the data. An entry begins and ends
somewhere inside of a block, and then shares that block with its neighbours. So, for two entries of one size that lie at
the same place within a block:

* equal checksums: the bytes are equal (but for a collision of two 64-bit checksums)
* another checksum of a block that holds nothing but this entry: the entry changed
* another checksum of a block that the entry shares: perhaps a neighbour changed. The part is read and compared

Entries that lie differently within their blocks are read and compared. What is read is verified.
"""

import operator
from array import array
from collections import OrderedDict
from collections.abc import Callable

from milepost.core.limits import MIB
from milepost.core.shardfile import Entry
from milepost.data.read import VerifiedFile

_KEPT_BLOCKS = 64
_PIECE_BYTES = 4 * MIB
_LONG = 1_000_000
"""From how many checksums on numpy is quicker, with its import."""


class ChangeTally:
    """What is known of one tensor so far. `changed_bytes`: in blocks that differ. `unsure`: not all was compared."""

    __slots__ = ("changed", "changed_bytes", "unsure")

    def __init__(self) -> None:
        self.changed, self.changed_bytes, self.unsure = False, 0, False

    def add(self, size_bytes: int) -> None:
        """Count bytes that changed."""
        self.changed = True
        self.changed_bytes += size_bytes


class TableComparison:
    """Compares entries of pairs of files. Blocks that were read are kept for a while: entries share them.

    `may_read`: whether data may still be read where the tables do not tell; else what is not known stays so.
    """

    def __init__(self, may_read: Callable[[], bool] = lambda: True) -> None:
        self._may_read = may_read
        self._blocks: OrderedDict[tuple[str, int], bytes] = OrderedDict()

    def compare(self, one: VerifiedFile, first: Entry, other: VerifiedFile, second: Entry, tally: ChangeTally) -> None:
        """Add to `tally` what differs between two entries of one size. Raises CheckpointDamaged for what is read."""
        start, stop = first.data_offsets
        shift, size = second.data_offsets[0] - start, one.block_bytes
        if start == stop:
            return
        if shift % size:
            if self._may_read():
                self._compare_bytes(one, start, stop, other, shift, tally)
            else:
                tally.unsure = True
            return
        low, count = start // size, (stop - 1) // size - start // size + 1
        sums, others = one.checksums[low : low + count], other.checksums[low + shift // size :][:count]
        if sums == others:
            return
        inner = count_differing(sums[1:-1], others[1:-1])
        if inner:
            tally.add(inner * size)
        edges = {i for i in (0, count - 1) if sums[i] != others[i]}
        for whole in (True, False):  # first those that need no reading
            for i in sorted(edges):
                begin, end = max(start, (low + i) * size), min(stop, (low + i + 1) * size)
                if whole is _is_its_own(one, other, (begin, end), shift):
                    self._compare_edge(one, other, (begin, end), shift, tally, read=not whole and not tally.changed)

    def _compare_edge(
        self,
        one: VerifiedFile,
        other: VerifiedFile,
        span: tuple[int, int],
        shift: int,
        tally: ChangeTally,
        *,
        read: bool,
    ) -> None:
        """Count a part in a block that differs, unless it is to be read and turns out equal."""
        begin, end = span
        if read and not self._may_read():
            tally.unsure = True
        elif not read or self._read(one, begin, end) != self._read(other, begin + shift, end + shift):
            tally.add(end - begin)

    def _read(self, file: VerifiedFile, begin: int, end: int) -> bytes:
        """Bytes begin..end of the data, all in one block, verified."""
        block = begin // file.block_bytes
        key, low = (file.where, block), block * file.block_bytes
        if key not in self._blocks:
            self._blocks[key] = file.data(low, min(low + file.block_bytes, file.header.data_bytes))
            while len(self._blocks) > _KEPT_BLOCKS:
                self._blocks.popitem(last=False)
        return self._blocks[key][begin - low : end - low]

    def _compare_bytes(
        self, one: VerifiedFile, start: int, stop: int, other: VerifiedFile, shift: int, tally: ChangeTally
    ) -> None:
        """Read both, piece by piece, and count the blocks of the first that differ."""
        size = one.block_bytes
        at = start
        while at < stop:
            end = min(stop, (at // size) * size + max(_PIECE_BYTES, size))
            mine, theirs = one.data(at, end), other.data(at + shift, end + shift)
            if mine != theirs:
                for low in range(at // size * size, end, size):
                    begin, last = max(low, at) - at, min(low + size, end) - at
                    if mine[begin:last] != theirs[begin:last]:
                        tally.add(last - begin)
            at = end


def count_differing(sums: "array[int]", others: "array[int]") -> int:
    """How many checksums of two tables differ."""
    if sums == others:
        return 0
    if len(sums) < _LONG:
        return sum(map(operator.ne, sums, others))
    import numpy as np  # noqa: PLC0415  # its import takes longer than a short table

    return int(np.count_nonzero(np.frombuffer(sums, np.uint64) != np.frombuffer(others, np.uint64)))


def _is_its_own(one: VerifiedFile, other: VerifiedFile, span: tuple[int, int], shift: int) -> bool:
    """Whether a part of an entry is all of a block, in both files. The last block of a file may be shorter."""
    return _fills(one, *span) and _fills(other, span[0] + shift, span[1] + shift)


def _fills(file: VerifiedFile, begin: int, end: int) -> bool:
    return begin % file.block_bytes == 0 and (end % file.block_bytes == 0 or end == file.header.data_bytes)
