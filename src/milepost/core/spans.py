"""Spans: how one dimension of a tensor is cut by the axes of a mesh. Pure.

`steps` lists, for each axis that cuts the dimension, its size and its stride, from the first axis to the last.
"""

import itertools
from bisect import bisect_right
from collections.abc import Iterator
from functools import lru_cache

import msgspec

from milepost.core.box import Shape

Span = tuple[int, int]
"""The indices `start <= i < stop` of one dimension."""
Steps = tuple[tuple[int, int], ...]


@lru_cache(maxsize=4096)
def spans_of(length: int, steps: Steps, index: Shape) -> tuple[Span, ...]:
    """The indices that coordinate `index` holds after all cuts of one dimension, in local order."""
    spans: tuple[Span, ...] = ((0, length),) if length else ()
    for (size, stride), i in zip(steps, index, strict=True):
        total = sum(b - a for a, b in spans)
        taken = [span for a, b in _chunks(total, stride) for span in _take(spans, *_shift(_chunk(b - a, size, i), a))]
        spans = tuple(_joined(taken))
    return spans


def meeting(length: int, steps: Steps, start: int, stop: int) -> tuple[tuple[Span, Shape], ...]:
    """The spans of one dimension that meet start..stop, each with the mesh coordinates that hold it."""
    if not steps:
        return (((0, length), ()),)
    if len(steps) > 1 or steps[0][1] > 1:
        return _partition(length, steps).meeting(start, stop)
    size = -(-length // steps[0][0])  # one plain cut: equal chunks
    first, last = start // size, (stop - 1) // size
    return tuple(((i * size, min((i + 1) * size, length)), (i,)) for i in range(first, last + 1))


class _Partition(msgspec.Struct, frozen=True):
    """How one dimension is cut: its spans in order, and the mesh coordinates that hold each."""

    spans: tuple[tuple[Span, Shape], ...]
    starts: tuple[int, ...]

    def meeting(self, start: int, stop: int) -> tuple[tuple[Span, Shape], ...]:
        first = max(bisect_right(self.starts, start) - 1, 0)
        last = bisect_right(self.starts, stop - 1)
        return tuple(s for s in self.spans[first:last] if s[0][1] > start)


@lru_cache(maxsize=1024)
def _partition(length: int, steps: Steps) -> _Partition:
    spans = [
        (span, index)
        for index in itertools.product(*(range(size) for size, _ in steps))
        for span in spans_of(length, steps, index)
    ]
    spans.sort()
    return _Partition(tuple(spans), tuple(span[0] for span, _ in spans))


def _chunk(length: int, parts: int, index: int) -> Span:
    """The indices of chunk `index`, as `torch.chunk` cuts: all chunks equal, the last ones shorter or empty."""
    size = -(-length // parts)
    return min(index * size, length), min((index + 1) * size, length)


def _chunks(length: int, parts: int) -> Iterator[Span]:
    size = -(-length // parts)
    for start in range(0, length, max(size, 1)):
        yield start, min(start + size, length)


def _shift(span: Span, by: int) -> Span:
    return span[0] + by, span[1] + by


def _take(spans: tuple[Span, ...], start: int, stop: int) -> Iterator[Span]:
    """Positions start..stop of the sequence that the spans spell."""
    position = 0
    for a, b in spans:
        low, high = max(start - position, 0), min(stop - position, b - a)
        if low < high:
            yield a + low, a + high
        position += b - a


def _joined(spans: list[Span]) -> Iterator[Span]:
    """The same sequence with neighbours that touch made one."""
    current: Span | None = None
    for a, b in spans:
        if current is not None and current[1] == a:
            current = (current[0], b)
            continue
        if current is not None:
            yield current
        current = (a, b)
    if current is not None:
        yield current
