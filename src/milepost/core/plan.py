"""Plans: who writes what, and what a reader reads from where. Pure, and the same on every rank.

A box that k ranks hold is split into up to k parts of at least a MiB, one for each; a smaller one goes whole to one
of them. Two numbers for each tensor (`parts` and `turn`, in the manifest) say it all, so a reader can work out which
file holds which part without a list of them.
"""

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from milepost.core.box import Box, Shape
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Boxes, Held, Layout
from milepost.core.limits import MIN_PART_BYTES
from milepost.core.manifest import Manifest, Tensor
from milepost.core.shardfile import entry_name
from milepost.core.table import TensorRow


@dataclass(frozen=True, slots=True)
class WriteItem:
    """One entry that a rank writes: `box` of the tensor `key`."""

    key: str
    name: str
    dtype: str
    box: Box


@dataclass(frozen=True, slots=True)
class ReadItem:
    """One region that a rank reads: `box` of the tensor `key`, from the entry `name` (which holds `source`) of a rank's file."""

    key: str
    rank: int
    name: str
    source: Box
    box: Box


def share_out(
    rows: Iterable[TensorRow], layouts: Mapping[str, Layout], world: int, spread: bool = True
) -> tuple[tuple[Tensor, ...], tuple[Layout, ...]]:
    """The manifest's tensors: for each the number of parts and whose turn it is, chosen so that all ranks write about the same.

    With `spread=False` the first holder of each box writes all of it.
    """
    load = np.zeros(world, dtype=np.int64)
    index: dict[Layout, int] = {}
    order = list(rows)
    shared: dict[str, tuple[int, int]] = {}
    for row in sorted(order, key=lambda r: (-math.prod(r.shape) * DTYPES[r.dtype].size_bytes, r.key)):
        layout = layouts[row.key]
        index.setdefault(layout, len(index))
        shared[row.key] = _take_turn(row, layout, load) if spread else (1, 0)
    tensors = tuple(Tensor(r.key, r.dtype, r.shape, index[layouts[r.key]], *shared[r.key], kind=r.kind) for r in order)
    return tensors, tuple(index)


def _take_turn(row: TensorRow, layout: Layout, load: npt.NDArray[np.int64]) -> tuple[int, int]:
    """Choose parts and turn for one tensor, and add what each rank writes of it to `load`."""
    size_bytes = math.prod(row.shape) * DTYPES[row.dtype].size_bytes
    if isinstance(layout, Boxes):
        return _take_turn_boxes(layout, DTYPES[row.dtype].size_bytes, load)
    groups = layout.replicas()
    copies = groups.shape[1]
    box_bytes = -(-size_bytes // groups.shape[0])
    parts = min(copies, max(1, box_bytes // MIN_PART_BYTES))
    turn = int(load[groups].sum(axis=0).argmin()) if parts < copies else 0
    for j in range(parts):
        load[groups[:, (turn + j) % copies]] += box_bytes // parts
    return parts, turn


def _take_turn_boxes(layout: Boxes, item_bytes: int, load: npt.NDArray[np.int64]) -> tuple[int, int]:
    """The same for an explicit list, whose holders already take turns from box to box."""
    largest = max((h.box.elements for h in layout.held), default=0) * item_bytes
    copies = max((len(h.holders) for h in layout.held), default=1)
    parts = min(copies, max(1, largest // MIN_PART_BYTES))
    for held in layout.held:
        for j, part in enumerate(held.box.split(parts)):
            load[held.holders[j % len(held.holders)]] += part.elements * item_bytes
    return parts, 0


def written_by(tensor: Tensor, layout: Layout, rank: int) -> Iterator[WriteItem]:
    """The entries of this tensor that `rank` writes."""
    for piece in layout.pieces(tensor.shape, rank):
        if not piece.box.elements:
            continue
        for held in _exactly(layout, tensor.shape, piece.box):
            for part, writer in parts_of(tensor, held.box, held.holders):
                if writer == rank:
                    yield WriteItem(tensor.key, entry_name(tensor.key, part, tensor.shape), tensor.dtype, part)


def _exactly(layout: Layout, shape: Shape, box: Box) -> Iterator[Held]:
    return (held for held in layout.overlapping(shape, box) if held.box == box)


def parts_of(tensor: Tensor, box: Box, holders: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """The parts of a box, each with the rank that writes it."""
    for j, part in enumerate(box.split(tensor.parts)):
        yield part, holders[(tensor.turn + j) % len(holders)]


def read_plan(manifest: Manifest, tensor: Tensor, region: Box) -> Iterator[ReadItem]:
    """What to read for `region` of a tensor: disjoint boxes that cover it, each from one entry of one file."""
    for held in manifest.layout_of(tensor).overlapping(tensor.shape, region):
        for part, writer in parts_of(tensor, held.box, held.holders):
            wanted = part.intersect(region)
            if wanted is not None:
                name = entry_name(tensor.key, part, tensor.shape)
                yield ReadItem(tensor.key, writer, name, part, wanted)
