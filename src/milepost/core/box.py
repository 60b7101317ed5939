"""Boxes: rectangular regions of a tensor. Pure."""

import math
from collections.abc import Iterator
from functools import lru_cache
from operator import add, ge, le, sub

import msgspec

from milepost.core.limits import MAX_DIMS, MAX_ELEMENTS

Shape = tuple[int, ...]


class Box(msgspec.Struct, frozen=True, array_like=True, gc=False):
    """A rectangular region of a tensor, in coordinates of the whole tensor."""

    offset: Shape
    shape: Shape

    def __post_init__(self) -> None:
        if len(self.offset) != len(self.shape):
            raise ValueError(f"a box needs as many offsets as sizes, not {self.offset} and {self.shape}")
        if self.shape and (min(self.offset) < 0 or min(self.shape) < 0):
            raise ValueError(f"a box has no negative numbers: {self.offset}, {self.shape}")

    @classmethod
    def whole(cls, shape: Shape) -> "Box":
        """The box that covers a tensor of this shape."""
        return _whole(shape)

    @property
    def end(self) -> Shape:
        """The first coordinate behind the box, in each dimension."""
        return tuple(map(add, self.offset, self.shape))

    @property
    def elements(self) -> int:
        """How many elements the box holds (1 for a box without dimensions)."""
        return math.prod(self.shape)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The box as an index into an array."""
        return tuple(slice(a, a + n) for a, n in zip(self.offset, self.shape, strict=True))

    @property
    def text(self) -> str:
        """The box as people read it: `[0:128,64:96]`."""
        return "[" + ",".join(f"{a}:{a + n}" for a, n in zip(self.offset, self.shape, strict=True)) + "]"

    def intersect(self, other: "Box") -> "Box | None":
        """The region that both cover, or None where they do not meet."""
        if self == other:
            return self if self.elements else None
        start = tuple(map(max, self.offset, other.offset))
        end = tuple(map(min, self.end, other.end))
        if any(a >= b for a, b in zip(start, end, strict=True)):
            return None
        return Box(start, tuple(b - a for a, b in zip(start, end, strict=True)))

    def contains(self, other: "Box") -> bool:
        """Whether every element of `other` lies in this box."""
        if len(self.shape) != len(other.shape):
            return False
        return all(map(le, self.offset, other.offset)) and all(map(ge, self.end, other.end))

    def within(self, outer: "Box") -> "Box":
        """The same region in coordinates that start at the corner of `outer`."""
        return Box(tuple(map(sub, self.offset, outer.offset)), self.shape)

    def moved(self, by: Shape) -> "Box":
        """The box, moved by so much in each dimension."""
        return Box(tuple(map(add, self.offset, by)), self.shape)

    def split(self, parts: int) -> "tuple[Box, ...]":
        """At most `parts` boxes of nearly equal size that tile this one; none for an empty box.

        Cuts the first dimension that is long enough, so that parts are contiguous where that is possible;
        else the longest.
        """
        return tuple(self.part(j, parts) for j in range(self.part_count(parts)))

    def part_count(self, parts: int) -> int:
        """How many boxes `split` gives."""
        return min(max(parts, 1), max(self.shape, default=1)) if self.elements else 0

    def part(self, j: int, parts: int) -> "Box":
        """The j-th box that `split` gives."""
        count = self.part_count(parts)
        if count == 1:
            return self
        dim = next((d for d, n in enumerate(self.shape) if n >= parts), None)
        dim = self.shape.index(max(self.shape)) if dim is None else dim
        length = self.shape[dim]
        start, stop = length * j // count, length * (j + 1) // count
        return self.narrow(dim, start, stop - start)

    def narrow(self, dim: int, start: int, length: int) -> "Box":
        """The part of the box that begins `start` behind its corner in dimension `dim` and is `length` long there."""
        offset, shape = list(self.offset), list(self.shape)
        offset[dim] += start
        shape[dim] = length
        return Box(tuple(offset), tuple(shape))

    def slabs(self, max_elements: int) -> "Iterator[Box]":
        """Boxes of at most `max_elements` (at least one element) that tile this one, in row-major order."""
        if self.elements == 0:
            return
        if self.elements <= max(max_elements, 1):
            yield self
            return
        dim = next(d for d, n in enumerate(self.shape) if n > 1)
        row = self.elements // self.shape[dim]
        step = max(1, max_elements // row)
        for start in range(0, self.shape[dim], step):
            slab = self.narrow(dim, start, min(step, self.shape[dim] - start))
            yield from slab.slabs(max_elements)


@lru_cache(maxsize=4096)
def _whole(shape: Shape) -> Box:
    return Box((0,) * len(shape), shape)


def boxes_of_run(shape: Shape, start: int, stop: int) -> "Iterator[Box]":
    """The boxes, in row-major order, that elements start..stop of a row-major array form: at most two a dimension."""
    if start >= stop:
        return
    if start == 0 and stop == math.prod(shape):
        yield Box.whole(shape)
        return
    inner = shape[1:]
    row = math.prod(inner)
    first, skipped = divmod(start, row)
    last, over = divmod(stop, row)
    if first == last:
        yield from _in_row(first, boxes_of_run(inner, skipped, over))
        return
    if skipped:
        yield from _in_row(first, boxes_of_run(inner, skipped, row))
        first += 1
    if first < last:
        yield Box((first, *(0,) * len(inner)), (last - first, *inner))
    yield from _in_row(last, boxes_of_run(inner, 0, over))


def _in_row(i: int, boxes: "Iterator[Box]") -> "Iterator[Box]":
    for box in boxes:
        yield Box((i, *box.offset), (1, *box.shape))


def check_shape(shape: Shape) -> None:
    """Refuse a shape that no tensor can have: too many dimensions, negative or absurd sizes."""
    if len(shape) > MAX_DIMS:
        raise ValueError(f"a tensor has at most {MAX_DIMS} dimensions, not {len(shape)}")
    if shape and min(shape) < 0:
        raise ValueError(f"a shape has no negative sizes: {shape}")
    if (math.prod(shape) or math.prod(n for n in shape if n)) > MAX_ELEMENTS:
        raise ValueError(f"shape {shape} has more than 2**60 elements")


def strides_of(shape: Shape) -> Shape:
    """Row-major strides, in elements."""
    strides = [1] * len(shape)
    for d in range(len(shape) - 2, -1, -1):
        strides[d] = strides[d + 1] * shape[d + 1]
    return tuple(strides)
