"""What the property tests draw from, how many examples they run, and the brute force that they compare with.

All examples are derived from the tests themselves, so every run draws the same ones. `MILEPOST_EXAMPLES=20` draws
twenty times as many; `./scripts/test --fast` draws a tenth.
"""

import math
import os
from collections.abc import Sequence
from functools import cache
from random import Random

import numpy as np
import numpy.typing as npt
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

from milepost.core.box import Box, Shape
from milepost.core.layout import Boxes, Cut, Grid, Held, Layout, Mesh, Whole
from milepost.core.ranks import pack_ranks, unpack_ranks

_TIMES = float(os.environ.get("MILEPOST_EXAMPLES", "1"))


def examples(count: int) -> settings:
    """Run a property on `count` examples (times MILEPOST_EXAMPLES), the same ones every time."""
    return settings(
        max_examples=max(5, round(count * _TIMES)),
        deadline=None,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow, HealthCheck.data_too_large, HealthCheck.large_base_example],
    )


# ---- what is drawn


def shapes(max_dims: int = 4, max_size: int = 12) -> st.SearchStrategy[Shape]:
    """Shapes of tensors: without dimensions, with sizes of zero and one, and larger ones."""
    return st.lists(st.integers(0, max_size), max_size=max_dims).map(tuple)


@st.composite
def boxes_in(draw: st.DrawFn, shape: Shape, min_size: int = 0) -> Box:
    """Boxes inside a tensor of this shape."""
    offset, sizes = [], []
    for length in shape:
        start = draw(st.integers(0, max(length - min_size, 0)))
        offset.append(start)
        sizes.append(draw(st.integers(min(min_size, length - start), length - start)))
    return Box(tuple(offset), tuple(sizes))


_SHUFFLES = st.integers(0, 999)


@st.composite
def some_of(draw: st.DrawFn, ranks: Sequence[int], count: int | None = None) -> list[int]:
    """Some of these ranks (at least one), or `count` of them: the first ones, or any others in any order."""
    if count is None:
        count = draw(st.integers(1, len(ranks)))
    shuffle = draw(_SHUFFLES)
    return Random(shuffle).sample(ranks, count) if shuffle else list(ranks[:count])


@st.composite
def meshes(draw: st.DrawFn, ranks: Sequence[int], max_axes: int = 3, max_axis: int = 4) -> Mesh:
    """Meshes of some of these ranks: in order or not, with gaps or without."""
    shape: list[int] = []
    for _ in range(draw(st.integers(1, max_axes))):
        shape.append(draw(st.integers(1, max(1, min(max_axis, len(ranks) // math.prod(shape))))))
    return Mesh.of(tuple(shape), tuple(draw(some_of(ranks, math.prod(shape)))))


@cache
def _cuts(dims: int) -> st.SearchStrategy[Cut | None]:
    """What a mesh axis can do to a tensor of `dims` dimensions; plain cuts more often than strided ones."""
    return st.sampled_from([None, *(Cut(dim, stride) for stride in (1, 1, 1, 2, 3, 5) for dim in range(dims))])


@st.composite
def grids(draw: st.DrawFn, shape: Shape, ranks: Sequence[int], max_axes: int = 3) -> Grid:
    """Grids of some of these ranks that can cut a tensor of this shape. Axes may share a dimension, with strides."""
    mesh = draw(meshes(ranks, max_axes))
    return Grid(mesh, tuple(draw(_cuts(len(shape))) for _ in mesh.shape))


@st.composite
def tilings(draw: st.DrawFn, shape: Shape, max_cuts: int = 5) -> list[Box]:
    """Lists of boxes that tile a tensor of this shape, in any order; irregular, as no grid would cut."""
    boxes = [Box.whole(shape)]
    for _ in range(draw(st.integers(0, max_cuts))):
        box = boxes.pop(draw(st.integers(0, len(boxes) - 1)))
        long = [dim for dim, n in enumerate(box.shape) if n > 1]
        if not long:
            boxes.append(box)
            continue
        dim = draw(st.sampled_from(long))
        at = draw(st.integers(1, box.shape[dim] - 1))
        boxes += [box.narrow(dim, 0, at), box.narrow(dim, at, box.shape[dim] - at)]
    return Random(shuffle).sample(boxes, len(boxes)) if (shuffle := draw(_SHUFFLES)) else boxes


@st.composite
def layouts(draw: st.DrawFn, shape: Shape, ranks: Sequence[int]) -> Layout:
    """Layouts of every kind."""
    match draw(st.sampled_from(["grid", "grid", "whole", "boxes"])):
        case "grid":
            return draw(grids(shape, ranks))
        case "whole":
            return Whole(pack_ranks(draw(some_of(ranks))))
        case _:
            solid = [box for box in draw(tilings(shape)) if box.elements]
            return Boxes(tuple(Held(box, pack_ranks(draw(some_of(ranks)))) for box in solid))


# ---- brute force


def numbered(shape: Shape) -> npt.NDArray[np.int64]:
    """A tensor of this shape in which each element is its own number."""
    return np.arange(math.prod(shape)).reshape(shape)


def chunk(array: npt.NDArray[np.int64], parts: int, dim: int) -> list[npt.NDArray[np.int64]]:
    """Exactly `parts` chunks as `torch.chunk` cuts them: all of one size, the last ones shorter or empty."""
    length = array.shape[dim]
    size = -(-length // parts)
    return np.split(array, [min(i * size, length) for i in range(1, parts)], axis=dim)


def local_of(whole: npt.NDArray[np.int64], grid: Grid, rank: int) -> npt.NDArray[np.int64] | None:
    """What `rank` holds of `whole`: one mesh axis after the other takes its chunks. None if it is not in the mesh."""
    places = np.argwhere(np.reshape(unpack_ranks(grid.mesh.ranks), grid.mesh.shape) == rank)
    if not len(places):
        return None
    local = whole
    for cut, size, i in zip(grid.cuts, grid.mesh.shape, places[0], strict=True):
        if cut is not None:
            taken = [chunk(part, size, cut.dim)[i] for part in chunk(local, cut.stride, cut.dim)]
            local = np.concatenate(taken, axis=cut.dim)
    return local


def count_cover(boxes: Sequence[Box], shape: Shape) -> npt.NDArray[np.int64]:
    """How many of the boxes cover each element."""
    counts = np.zeros(shape, dtype=np.int64)
    for box in boxes:
        counts[box.slices] += 1
    return counts
