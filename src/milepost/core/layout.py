"""Layouts: how a tensor is cut into boxes, and which ranks hold each. Pure.

A layout does not depend on the tensor's shape, so a model of a thousand tensors has a handful of layouts.

* `Whole`: every rank listed holds the whole tensor.
* `Grid`: the ranks form a mesh; each mesh axis cuts one tensor dimension, or replicates.
* `Boxes`: an explicit list, for cuts that follow no rule.

All three answer the same questions: which pieces does a rank hold (`pieces`), who else holds them (`held_by`), and
who holds what overlaps a region (`overlapping`). None of the answers takes time that grows with the number of ranks,
except where the answer itself does.
"""

import itertools
import math
from collections.abc import Iterator
from functools import lru_cache
from typing import TYPE_CHECKING

import msgspec

from milepost.core.box import Box, Shape, strides_of
from milepost.core.limits import MAX_BOXES, MAX_DIMS, MAX_RANKS, MAX_STRIDE
from milepost.core.ranks import pack_ranks, positions, unpack_ranks
from milepost.core.spans import Span, Steps, meeting, spans_of
from milepost.core.tiling import find_gap

if TYPE_CHECKING:  # numpy takes as long to import as a whole command of the command line
    import numpy as np
    import numpy.typing as npt


class Piece(msgspec.Struct, frozen=True, gc=False):
    """A box that a rank holds, and where it starts inside that rank's local tensor."""

    box: Box
    at: Shape


class Held(msgspec.Struct, frozen=True, gc=False):
    """A box, and the ranks that each hold all of it (as text, in the order in which they take turns at writing)."""

    box: Box
    ranks: str

    def __post_init__(self) -> None:
        if not unpack_ranks(self.ranks):
            raise ValueError("a box needs a rank that holds it")

    @property
    def holders(self) -> tuple[int, ...]:
        """The ranks as numbers."""
        return unpack_ranks(self.ranks)


class Whole(msgspec.Struct, frozen=True, gc=False, tag="whole", tag_field="kind"):
    """Every one of these ranks holds the whole tensor."""

    ranks: str

    def __post_init__(self) -> None:
        if not unpack_ranks(self.ranks):
            raise ValueError("a tensor needs a rank that holds it")

    def check(self, shape: Shape) -> None:
        """Always passes: any shape can be held whole."""

    def pieces(self, shape: Shape, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds of a tensor of this shape."""
        if rank not in positions(self.ranks):
            return ()
        return (Piece(Box.whole(shape), (0,) * len(shape)),)

    def held_by(self, shape: Shape, rank: int) -> tuple[Held, ...]:
        """The boxes that `rank` holds, each with all its holders."""
        return (Held(Box.whole(shape), self.ranks),) if rank in positions(self.ranks) else ()

    def overlapping(self, shape: Shape, region: Box) -> Iterator[Held]:
        """The boxes that meet `region`, with their holders."""
        box = Box.whole(shape)
        if box.intersect(region) is not None:
            yield Held(box, self.ranks)

    def replicas(self) -> "npt.NDArray[np.int64]":
        """One row for each group of ranks that hold the same; here one row."""
        import numpy as np  # noqa: PLC0415

        return np.asarray([unpack_ranks(self.ranks)], dtype=np.int64)


class Mesh(msgspec.Struct, frozen=True):
    """Ranks arranged in a grid: `ranks` lists them in row-major order."""

    shape: Shape
    ranks: str

    def __post_init__(self) -> None:
        ranks = unpack_ranks(self.ranks)
        if not self.shape or len(self.shape) > MAX_DIMS or any(n < 1 for n in self.shape):
            raise ValueError(f"a mesh cannot have the shape {self.shape}")
        if math.prod(self.shape) != len(ranks) or len(ranks) > MAX_RANKS:
            raise ValueError(f"a mesh of shape {self.shape} needs {math.prod(self.shape)} ranks, not {len(ranks)}")
        if len(set(ranks)) != len(ranks):
            raise ValueError("a rank stands in a mesh only once")

    @classmethod
    def of(cls, shape: Shape, ranks: "tuple[int, ...] | range") -> "Mesh":
        """A mesh of these ranks, in row-major order."""
        return cls(shape, pack_ranks(ranks))

    def coordinate(self, rank: int) -> Shape | None:
        """Where `rank` stands, or None if it is not in the mesh."""
        index = positions(self.ranks).get(rank)
        if index is None:
            return None
        where = []
        for size in reversed(self.shape):
            index, i = divmod(index, size)
            where.append(i)
        return tuple(reversed(where))


class Cut(msgspec.Struct, frozen=True, array_like=True):
    """One mesh axis cuts dimension `dim` into equal chunks, like `torch.chunk`.

    With `stride` s > 1 the dimension is first chunked into s parts, each of them is chunked over the axis, and a rank
    takes its chunk of every part: its piece may be several separate runs.
    """

    dim: int
    stride: int = 1

    def __post_init__(self) -> None:
        if not 0 <= self.dim < MAX_DIMS or not 1 <= self.stride <= MAX_STRIDE:
            raise ValueError(f"dimension {self.dim} cannot be cut with stride {self.stride}")


class Grid(msgspec.Struct, frozen=True, tag="grid", tag_field="kind"):
    """A mesh of ranks; `cuts[i]` says what mesh axis i does: cut a dimension, or (None) replicate.

    Cuts apply from the first axis to the last; an axis that cuts a dimension that was cut before cuts what is left.
    """

    mesh: Mesh
    cuts: tuple[Cut | None, ...]

    def __post_init__(self) -> None:
        if len(self.cuts) != len(self.mesh.shape):
            raise ValueError(f"{len(self.cuts)} cuts do not fit a mesh of {len(self.mesh.shape)} axes")

    @property
    def copies(self) -> bool:
        """Whether several ranks hold the same."""
        return any(cut is None and n > 1 for cut, n in zip(self.cuts, self.mesh.shape, strict=True))

    def check(self, shape: Shape) -> None:
        """Refuse a shape that lacks a dimension which is cut."""
        if any(cut is not None and cut.dim >= len(shape) for cut in self.cuts):
            raise ValueError(f"a tensor of shape {shape} has no dimension that {self.cuts} could cut")
        boxes = 1
        for dim, length in enumerate(shape):
            steps = math.prod(size * stride for size, stride in self._steps(dim))
            boxes *= max(1, min(length, steps))
            boxes = max(boxes, steps)
        if boxes > MAX_BOXES:
            raise ValueError(f"this grid would cut a tensor of shape {shape} into more than {MAX_BOXES} boxes")

    def pieces(self, shape: Shape, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds of a tensor of this shape: several pieces for a strided cut, none for an empty one."""
        coordinate = self.mesh.coordinate(rank)
        return () if coordinate is None else tuple(_pieces_of(self._spans(shape, coordinate)))

    def _spans(self, shape: Shape, coordinate: Shape) -> list[tuple[Span, ...]]:
        """The indices of each dimension that the rank at `coordinate` holds."""
        axes: list[list[int]] = [[] for _ in shape]
        for axis, cut in enumerate(self.cuts):
            if cut is not None:
                axes[cut.dim].append(axis)
        return [
            spans_of(
                length,
                tuple((self.mesh.shape[a], cut.stride) for a in axes[dim] if (cut := self.cuts[a]) is not None),
                tuple(coordinate[a] for a in axes[dim]),
            )
            for dim, length in enumerate(shape)
        ]

    def held_by(self, shape: Shape, rank: int) -> tuple[Held, ...]:
        """The boxes that `rank` holds, each with all its holders: the ranks that differ only along copying axes."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return ()
        ranks = _copies(self.mesh, self.cuts, coordinate)
        return tuple(Held(piece.box, ranks) for piece in self.pieces(shape, rank))

    def local_shape(self, shape: Shape, rank: int) -> Shape | None:
        """The shape of the rank's local tensor, or None if it is not in the mesh."""
        coordinate = self.mesh.coordinate(rank)
        if coordinate is None:
            return None
        return tuple(sum(b - a for a, b in spans) for spans in self._spans(shape, coordinate))

    def overlapping(self, shape: Shape, region: Box) -> Iterator[Held]:
        """The boxes that meet `region`, with their holders; found by arithmetic or bisection in each dimension."""
        if not region.elements:
            return
        found = [
            meeting(length, self._steps(dim), region.offset[dim], region.end[dim]) for dim, length in enumerate(shape)
        ]
        axes = [self._axes(dim) for dim in range(len(shape))]
        for choice in itertools.product(*found):
            where = [0] * len(self.cuts)
            for dim, (_, index) in enumerate(choice):
                for axis, i in zip(axes[dim], index, strict=True):
                    where[axis] = i
            box = Box(tuple(a for (a, _), _ in choice), tuple(b - a for (a, b), _ in choice))
            yield Held(box, _copies(self.mesh, self.cuts, tuple(where)))

    def replicas(self) -> "npt.NDArray[np.int64]":
        """One row for each group of ranks that hold the same boxes; a row's order is the order of its turns."""
        cutting = [axis for axis, cut in enumerate(self.cuts) if cut is not None]
        copying = [axis for axis, cut in enumerate(self.cuts) if cut is None]
        copies = math.prod(self.mesh.shape[axis] for axis in copying)
        return _mesh_array(self.mesh.shape, self.mesh.ranks).transpose(cutting + copying).reshape(-1, copies)

    def _axes(self, dim: int) -> tuple[int, ...]:
        return tuple(axis for axis, cut in enumerate(self.cuts) if cut is not None and cut.dim == dim)

    def _steps(self, dim: int) -> Steps:
        return tuple(
            (self.mesh.shape[axis], cut.stride)
            for axis, cut in enumerate(self.cuts)
            if cut is not None and cut.dim == dim
        )


class Boxes(msgspec.Struct, frozen=True, tag="boxes", tag_field="kind"):
    """An explicit list of boxes and holders, for cuts that follow no rule."""

    held: tuple[Held, ...]

    def check(self, shape: Shape) -> None:
        """Refuse boxes that leave the tensor, overlap, or leave a hole."""
        problem = find_gap([h.box for h in self.held], shape)
        if problem:
            raise ValueError(problem)

    def pieces(self, shape: Shape, rank: int) -> tuple[Piece, ...]:
        """What `rank` holds. Each piece has a local tensor of its own, so it starts at zero there."""
        zero = (0,) * len(shape)
        return tuple(Piece(h.box, zero) for h in self.held if rank in h.holders)

    def held_by(self, shape: Shape, rank: int) -> tuple[Held, ...]:
        """The boxes that `rank` holds, each with all its holders."""
        del shape  # the boxes are explicit
        return tuple(h for h in self.held if rank in h.holders)

    def overlapping(self, shape: Shape, region: Box) -> Iterator[Held]:
        """The boxes that meet `region`, with their holders."""
        del shape
        return (h for h in self.held if h.box.intersect(region) is not None)


Layout = Whole | Grid | Boxes


def stack(grids: list[Grid]) -> Grid | None:
    """One grid for several that cut alike on disjoint meshes of one shape (replicas of each other), or None."""
    first = grids[0]
    if any(g.cuts != first.cuts or g.mesh.shape != first.mesh.shape for g in grids):
        return None
    ranks = [rank for g in grids for rank in unpack_ranks(g.mesh.ranks)]
    if len(set(ranks)) != len(ranks):
        return None
    mesh = Mesh.of((len(grids), *first.mesh.shape), tuple(ranks))
    return Grid(mesh, (None, *first.cuts))


@lru_cache(maxsize=65536)
def _copies(mesh: Mesh, cuts: tuple[Cut | None, ...], coordinate: Shape) -> str:
    """The ranks that hold the same as the one at `coordinate`: all along the copying axes, as text."""
    ranks, first = unpack_ranks(mesh.ranks), 0
    for i, cut, stride in zip(coordinate, cuts, strides_of(mesh.shape), strict=True):
        first += i * stride if cut is not None else 0
    return pack_ranks(ranks[first + further] for further in _along_copies(mesh.shape, cuts))


@lru_cache(maxsize=256)
def _along_copies(shape: Shape, cuts: tuple[Cut | None, ...]) -> tuple[int, ...]:
    """How much further in a mesh's list the ranks stand that differ from one only along copying axes, in order."""
    found = [0]
    for size, cut, stride in zip(shape, cuts, strides_of(shape), strict=True):
        if cut is None:
            found = [start + i * stride for start in found for i in range(size)]
    return tuple(found)


def _pieces_of(spans: list[tuple[Span, ...]]) -> Iterator[Piece]:
    """The product of each dimension's spans, with the position of each in the local tensor."""
    placed = []
    for dim_spans in spans:
        position, row = 0, []
        for a, b in dim_spans:
            row.append((a, b - a, position))
            position += b - a
        placed.append(row)
    for choice in itertools.product(*placed):
        box = Box(tuple(a for a, _, _ in choice), tuple(n for _, n, _ in choice))
        yield Piece(box, tuple(at for _, _, at in choice))


@lru_cache(maxsize=256)
def _mesh_array(shape: Shape, ranks: str) -> "npt.NDArray[np.int64]":
    import numpy as np  # noqa: PLC0415

    array = np.asarray(unpack_ranks(ranks), dtype=np.int64).reshape(shape)
    array.flags.writeable = False
    return array
