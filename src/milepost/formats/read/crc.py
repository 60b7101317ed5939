"""Checks the CRC-32 of records that several threads read in pieces and in any order, as zip archives store them."""

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
    """Checks records as their bytes arrive. A record that is never read as a whole is not checked."""

    def __init__(self) -> None:
        self.known: tuple[list[RangeSum], list[int]] = ([], [])
        self._parts: dict[int, dict[int, tuple[int, int]]] = {}
        self._lock = threading.Lock()

    def add(self, one: RangeSum) -> None:
        """Add a record; one that overlaps another is ignored."""
        with self._lock:
            sums, starts = self.known
            i = bisect_right(starts, one.start)
            before, after = sums[i - 1] if i else None, sums[i] if i < len(sums) else None
            if (before and before.stop > one.start) or (after and after.start < one.stop):
                return
            # New lists, so that a reader keeps the lists that it had before it read.
            self.known = ([*sums[:i], one, *sums[i:]], [*starts[:i], one.start, *starts[i:]])

    def damaged(
        self, start: int, views: Sequence[memoryview], known: tuple[list[RangeSum], list[int]] | None = None
    ) -> Iterator[RangeSum]:
        """The records that these bytes, read from `start`, complete, and whose checksum is wrong.

        `known`: the records to check, where others may have been added while the bytes were read.
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
        """The CRC of a record once all its parts were seen; None before."""
        with self._lock:
            parts = self._parts.setdefault(one.start, {})
            parts[at] = (length, crc)
            if sum(n for n, _ in parts.values()) < one.stop - one.start:
                return None
            del self._parts[one.start]
        end, whole = one.start, 0
        for where in sorted(parts):
            if where != end:
                return None  # the same bytes were read twice, in other pieces
            length, crc = parts[where]
            end, whole = end + length, combine(whole, crc, length)
        return whole if end == one.stop else None


class Cursor:
    """Walks along the bytes that some views hold together."""

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
