"""Statistics of tensors, computed from their bytes while these pass through a save.

docs/decisions/0021-statistics-and-events.md says why it is done in this way. Long tensors are looked at in pieces that
fit into a core's cache: minimum, maximum, sum and sum of squares, in float32 where that is enough, else in float64.
Many short tensors that lie together are looked at by one call. NaN and infinity show in minimum and maximum; only then
are they counted.
"""

import threading
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from milepost.core.dtypes import COMPLEX, DTYPES, INTEGERS
from milepost.core.partial_statistics import PartialStatistics, Rows, new_bins, new_rows
from milepost.core.statistics import Recording
from milepost.data.piece_sums import (
    AS_THEY_ARE,
    EXPONENTS,
    HALVES,
    PIECE,
    Array,
    PieceSums,
    Scratch,
    cut,
    histogram_of,
    sums_of_numbers,
)

_LONG = 1 << 20
"""How many numbers are looked at by one call where they are: fewer calls cost less than what caches give."""
_SHORT = 1 << 13
"""Tensors with fewer numbers are looked at together with their neighbours."""


class TalliedEntry(NamedTuple):
    """An entry of a file: where its bytes begin, its dtype, and the number of its tensor (-1: not looked at)."""

    start: int
    dtype: str
    tensor: int


class Tally:
    """Collects the statistics of what one rank writes. `begin` once, `add` from many threads, then `result`."""

    def __init__(self, recording: Recording = "numbers") -> None:
        self._recording: Recording = recording
        self._spans: Sequence[TalliedEntry] = ()
        self._starts: list[int] = []
        self._tensors = np.zeros(0, np.int64)
        self._run_ends: list[int] = []
        self._rows: list[tuple[int, Rows]] = []
        self._bins: list[Rows] = []
        self._turn = threading.Lock()
        self._scratch: Scratch | None = None

    def begin(self, spans: Sequence[TalliedEntry], end: int) -> None:
        """Say what lies where in the file. `end`: where its data ends. Elements are aligned to their size there."""
        if self._recording == "finite":
            spans = [span._replace(tensor=-1) if span.dtype in INTEGERS else span for span in spans]
        self._spans = spans
        self._starts = [*(span.start for span in spans), end]
        self._tensors = np.array([span.tensor for span in spans], np.int64)
        self._run_ends = _run_ends(spans)

    def add(self, start: int, views: Sequence[memoryview]) -> None:
        """Look at the bytes of one block, which begins at `start`. No element lies in two blocks, or in two views.

        One thread at a time: several would mostly wait for Python's lock, which each takes again after every look at a
        piece, and would keep those from it that write.
        """
        with self._turn, np.errstate(all="ignore"):
            if self._scratch is None:
                self._scratch = Scratch()
            looking = _Looking(self._scratch, self._recording)
            first = start
            for view in views:
                data = np.frombuffer(view, np.uint8)
                for low, high, i, last in self._runs(start, start + len(data)):
                    tensors, counts = self._cuts(low, high, i, last)
                    looking.look(data[low - start : high - start], self._spans[i].dtype, tensors, counts)
                start += len(data)
            self._rows.extend((first, rows) for rows in looking.rows())
            self._bins.extend(looking.bins)

    def result(self) -> PartialStatistics:
        """What was found, by the numbers of tensors. It does not depend on which thread looked at what."""
        rows = [found for _, found in sorted(self._rows, key=lambda one: one[0])]
        return PartialStatistics.sum_of(rows, self._bins)

    def _runs(self, start: int, stop: int) -> Iterator[tuple[int, int, int, int]]:
        """The parts of start..stop with numbers of one type: their limits, and their first and last span."""
        at, i = start, bisect_right(self._starts, start) - 1
        while at < stop:
            end = self._run_ends[i]
            high = min(stop, self._starts[end])
            if self._spans[i].tensor >= 0 and high > at:
                last = end if high == self._starts[end] else bisect_right(self._starts, high - 1)
                yield at, high, i, last
            at, i = high, end

    def _cuts(self, low: int, high: int, first: int, last: int) -> tuple[Array, Array]:
        """The tensors of a run, by their numbers, and how many numbers of each lie there."""
        dtype = self._spans[first].dtype
        size = DTYPES[dtype].size_bytes // (2 if dtype in COMPLEX else 1)
        limits = np.array([low, *self._starts[first + 1 : last], high])
        counts = np.diff(limits) // size
        there = counts > 0
        return self._tensors[first:last][there], counts[there]


def _run_ends(spans: Sequence[TalliedEntry]) -> list[int]:
    """For each span, the number of the first after it that has another dtype, or is not looked at where it is."""
    ends = [len(spans)] * len(spans)
    for i in range(len(spans) - 2, -1, -1):
        one, other = spans[i], spans[i + 1]
        alike = one.dtype == other.dtype and (one.tensor >= 0) == (other.tensor >= 0)
        ends[i] = ends[i + 1] if alike else i + 1
    return ends


class _Looking:
    """The look at one block, by one thread."""

    def __init__(self, scratch: "Scratch", recording: Recording) -> None:
        self._scratch = scratch
        self._histogram, self._only_finite = recording == "histogram", recording == "finite"
        self._found: list[tuple[int, PieceSums]] = []
        self._batches: list[Rows] = []
        self.bins: list[Rows] = []

    def look(self, data: Array, dtype: str, tensors: Array, counts: Array) -> None:
        """Look at numbers of one type that lie together: so many of each of these tensors, one after the other."""
        dtype = COMPLEX.get(dtype, dtype)
        size, ends = DTYPES[dtype].size_bytes, np.cumsum(counts)
        first = at = 0
        for long in [*np.flatnonzero(counts >= _SHORT).tolist(), len(counts)]:
            while first < long:  # several short ones at a time
                last = min(int(np.searchsorted(ends, at + PIECE, side="right")), long)
                stop = int(ends[last - 1])
                self._look_short(data[at * size : stop * size], dtype, tensors[first:last], counts[first:last])
                first, at = last, stop
            if long < len(counts):
                stop = int(ends[long])
                self._look_long(data[at * size : stop * size], dtype, int(tensors[long]))
                first, at = long + 1, stop

    def rows(self) -> Iterator[Rows]:
        """What was found."""
        if self._found:
            columns = zip(*(sums for _, sums in self._found), strict=True)
            yield new_rows([t for t, _ in self._found], **dict(zip(PieceSums._fields, columns, strict=True)))
        yield from self._batches

    def _look_long(self, data: Array, dtype: str, tensor: int) -> None:
        step = _LONG if dtype in HALVES or dtype in AS_THEY_ARE else PIECE
        for piece in cut(data, (PIECE if self._histogram else step) * DTYPES[dtype].size_bytes):
            if self._only_finite and self._scratch.is_finite(piece, dtype):
                continue
            sums = None if self._histogram else self._scratch.sums_of_halves(piece, dtype)
            if sums is None:
                self._look_close(piece, dtype, tensor)
            else:
                self._found.append((tensor, sums))

    def _look_close(self, data: Array, dtype: str, tensor: int) -> None:
        for piece in cut(data, len(data) if dtype in AS_THEY_ARE else PIECE * DTYPES[dtype].size_bytes):
            numbers = self._scratch.widened(piece, dtype, in_order=False)
            self._found.append((tensor, sums_of_numbers(numbers)))
            self._bin(tensor, numbers)

    def _look_short(self, data: Array, dtype: str, tensors: Array, counts: Array) -> None:
        """Look at several short tensors at once."""
        numbers = self._scratch.widened(data, dtype, in_order=True)
        starts = np.cumsum(counts) - counts
        total = np.add.reduceat(numbers, starts)
        if self._only_finite:
            odd = np.flatnonzero(~np.isfinite(total))
            tensors, starts, counts = tensors[odd], starts[odd], counts[odd]
            rows, odd = new_rows(tensors), np.arange(len(odd))
        else:
            rows, odd = self._short_rows(numbers, tensors, starts, total)
        for i in odd:
            rows[i] = (rows["tensor"][i], *sums_of_numbers(numbers[starts[i] : starts[i] + counts[i]]))
        self._batches.append(rows)
        if self._histogram:
            for tensor, count, start in zip(tensors.tolist(), counts, starts, strict=True):
                self._bin(tensor, numbers[start : start + count])

    def _short_rows(self, numbers: Array, tensors: Array, starts: Array, total: Array) -> tuple[Rows, Array]:
        """A row for each, and which of them take a closer look: their squares are more than these numbers can add."""
        low, high = np.minimum.reduceat(numbers, starts), np.maximum.reduceat(numbers, starts)
        squares = np.add.reduceat(np.multiply(numbers, numbers, out=self._scratch.squares(numbers)), starts)
        largest, (least, most) = np.maximum(-low, high), EXPONENTS[numbers.dtype.char]
        fits = ((largest > least) & (largest < most)) | (largest == 0)  # False for NaN
        return new_rows(tensors, min=low, max=high, total=total, squares=squares), np.flatnonzero(~fits)

    def _bin(self, tensor: int, numbers: Array) -> None:
        if self._histogram:
            bins, counts = histogram_of(numbers)
            if len(bins):
                self.bins.append(new_bins(tensor, bins, counts))
