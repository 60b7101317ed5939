"""CRC-32 of records that are read in pieces, in any order and by several threads: zip archives have one of each record."""

import threading
import zlib
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from milepost.core.crc import combine


class RangeSum(NamedTuple):
    """The CRC-32 that bytes start..stop should have, and what they are."""

    start: int
    stop: int
    crc: int
    what: str


class Sums:
    """Checks records as their bytes come in. Those that are never read whole cannot be checked."""

    def __init__(self) -> None:
        self.known: tuple[list[RangeSum], list[int]] = ([], [])
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, one: RangeSum) -> None:
        """Know one more record; one that overlaps another is left out."""
        with self._lock:
            sums, starts = self.known
            i = bisect_right(starts, one.start)
            before, after = sums[i - 1] if i else None, sums[i] if i < len(sums) else None
            if (before and before.stop > one.start) or (after and after.start < one.stop):
                return
            # New lists, so that a reader goes on with those that it knew before it read.
            self.known = ([*sums[:i], one, *sums[i:]], [*starts[:i], one.start, *starts[i:]])

    def damaged(
        self, start: int, views: Sequence[memoryview], known: tuple[list[RangeSum], list[int]] | None = None
    ) -> Iterator[RangeSum]:
        """The records that these bytes, which lie at `start`, complete, and whose sum is not the right one.

        `known`: those to look at, where others may have been added while the bytes were read.
        """
        sums, starts = known or self.known
        cursor = Cursor(views)
        at, stop = start, start + sum(map(len, views))
        i = max(bisect_right(starts, start) - 1, 0)
        while i < len(sums) and sums[i].start < stop:
            one = sums[i]
            i += 1
            low, high = max(one.start, at), min(one.stop, stop)
            if low >= high:
                continue
            cursor.take(low - at)
            crc = 0
            for view in cursor.take(high - low):
                crc = zlib.crc32(view, crc)
            at = high
            whole = crc if high - low == one.stop - one.start else self._joined(one, low, high - low, crc)
            if whole is not None and whole != one.crc:
                yield one

    def _joined(self, one: RangeSum, at: int, length: int, crc: int) -> int | None:
        """The sum of a record once all its parts were seen; None before."""
        with self._lock:
            parts = self._parts.setdefault(one.start, {})
            parts[at] = (length, crc)
            if sum(n for n, _ in parts.values()) < one.stop - one.start:
                return None
            del self._parts[one.start]
        end, whole = one.start, 0
        for where in sorted(parts):
            if where != end:
                return None  # the same bytes were read twice, cut in other ways
            length, crc = parts[where]
            end, whole = end + length, combine(whole, crc, length)
        return whole if end == one.stop else None


class Cursor:
    """Goes along the bytes that some views spell together."""

    def __init__(self, views: Sequence[memoryview]) -> None:
        self._views, self._i, self._at = views, 0, 0

    def take(self, count: int) -> list[memoryview]:
        """The next `count` bytes."""
        found: list[memoryview] = []
        while count > 0:
            view = self._views[self._i]
            step = min(count, len(view) - self._at)
            if step:
                found.append(view[self._at : self._at + step])
            self._at += step
            count -= step
            if self._at == len(view):
                self._i, self._at = self._i + 1, 0
        return found
