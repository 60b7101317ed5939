"""Plans: who writes what, and what a reader reads from where. Pure, and the same on every rank.

A box that k ranks hold is split into up to k parts of at least a MiB, one for each; a smaller one goes whole to one
of them. Two numbers for each tensor in the manifest (`parts` and `turn`) record this, so a reader can work out which
file holds which part without a list.

Where replicas may differ, nothing is split: `keep_one` chooses the replica that is written, one for a whole tensor.
"""

from collections.abc import Iterable, Iterator, Mapping
from operator import mul
from typing import TYPE_CHECKING

import msgspec

from milepost.core.box import Box, strides_of
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.layout import Boxes, Grid, Held, Layout, Whole
from milepost.core.limits import BLOCK_BYTES, KIB, MIN_PART_BYTES
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import pack_ranks, positions, unpack_ranks
from milepost.core.shardfile import entry_name
from milepost.core.table import TensorRow

if TYPE_CHECKING:  # numpy takes as long to import as a whole command of the command line
    import numpy as np
    import numpy.typing as npt

GAP_BYTES = 256 * KIB
"""A gap of at most this size between rows of a strided region is read too: that is faster than another request."""


class PlannedWrite(msgspec.Struct, frozen=True, gc=False):
    """One entry that a rank writes: `box` of the tensor `key`."""

    key: str
    name: str
    dtype: str
    box: Box


class PlannedRead(msgspec.Struct, frozen=True, gc=False):
    """One region that a rank reads: `box` of the tensor `key`, from the entry `name` of a rank's file.

    The entry holds the box `source`.
    """

    key: str
    rank: int
    name: str
    source: Box
    box: Box


def share_out(
    rows: Iterable[TensorRow], layouts: Mapping[str, Layout], world: int, share_replicas: bool = True
) -> tuple[tuple[Tensor, ...], tuple[Layout, ...]]:
    """The manifest's tensors, each with a number of parts and a turn, so that all ranks write about equally much.

    A tensor that is the same as another and cut alike is not written: it gets the parts and turn of the other. With
    `share_replicas=False` one replica writes all of a tensor: see `keep_one`. Takes time in proportion to the tensors,
    and looks at the ranks only once for each layout.
    """
    order = list(rows)
    tied = {r.key: r.same_as for r in order if r.same_as and layouts.get(r.same_as) == layouts[r.key]}
    if share_replicas:
        turns = _take_turns([row for row in order if row.key not in tied], layouts, world)
    else:
        kept = {layout: keep_one(layout) for layout in dict.fromkeys(layouts[row.key] for row in order)}
        turns = {row.key: (1, kept[layouts[row.key]][1]) for row in order}
        layouts = {row.key: kept[layouts[row.key]][0] for row in order}
    index: dict[Layout, int] = {}
    for row in order:
        index.setdefault(layouts[row.key], len(index))
    tensors = []
    for row in order:
        parts, turn = turns[tied.get(row.key, row.key)]
        same_as, layout = tied.get(row.key, ""), index[layouts[row.key]]
        tensors.append(Tensor(row.key, row.dtype, row.shape, layout, parts, turn, row.kind, same_as=same_as))
    return tuple(tensors), tuple(index)


def keep_one(layout: Layout) -> tuple[Layout, int]:
    """The layout and the turn by which one replica writes all of a tensor, never a part of one and a part of another.

    On a mesh that is the replica that the lowest rank belongs to, however the mesh orders its ranks. Boxes that were
    listed one by one say nothing about replicas. There a rank that holds more of the tensor comes before one that
    holds less, and the lower of two before the other: a rank that holds all of it writes all of it.
    """
    if isinstance(layout, Boxes):
        return _keep_one_of_boxes(layout), 0
    groups = layout.replicas()
    return layout, int(groups.argmin()) % groups.shape[1]


def _keep_one_of_boxes(layout: Boxes) -> Boxes:
    """The same boxes, with the rank that writes each first among its holders."""
    sizes: dict[int, int] = {}
    for held in layout.held:
        for rank in held.holders:
            sizes[rank] = sizes.get(rank, 0) + held.box.elements
    return Boxes(
        tuple(
            Held(held.box, pack_ranks(sorted(held.holders, key=lambda rank: (-sizes[rank], rank))))
            for held in layout.held
        )
    )


def _take_turns(rows: list[TensorRow], layouts: Mapping[str, Layout], world: int) -> dict[str, tuple[int, int]]:
    """(parts, turn) for each tensor."""
    import numpy as np  # noqa: PLC0415

    load = np.zeros(world, dtype=np.int64)
    turns: dict[str, tuple[int, int]] = {}
    by_layout: dict[Whole | Grid, list[TensorRow]] = {}
    for row in sorted(rows, key=lambda r: r.key):
        layout = layouts[row.key]
        if isinstance(layout, Boxes):
            turns[row.key] = _take_turn_boxes(layout, DTYPES[row.dtype].size_bytes, load)
        else:
            by_layout.setdefault(layout, []).append(row)
    for layout, members in by_layout.items():
        turns.update(_deal_out(layout.replicas(), members, load))
    return turns


def _deal_out(
    groups: "npt.NDArray[np.int64]", rows: list[TensorRow], load: "npt.NDArray[np.int64]"
) -> dict[str, tuple[int, int]]:
    """(parts, turn) for the tensors of one layout: parts go round the replicas, the largest first.

    Starts with the replica that has the least to write so far, and adds the bytes of each to `load`. In the end no two
    replicas differ by more than the largest part.
    """
    import numpy as np  # noqa: PLC0415

    copies = groups.shape[1]
    if copies == 1:
        load[groups] += sum(size_bytes(r.dtype, r.shape) for r in rows) // len(groups)
        return {row.key: (1, 0) for row in rows}
    shares = []
    for row in rows:
        box_bytes = -(-size_bytes(row.dtype, row.shape) // groups.shape[0])
        parts = min(copies, max(1, box_bytes // MIN_PART_BYTES))
        shares.append((box_bytes // parts, parts, row.key))
    added = np.zeros(copies, dtype=np.int64)
    turn = int(load[groups].sum(axis=0).argmin()) if copies > 1 else 0
    turns = {}
    for part_bytes, parts, key in sorted(shares, key=lambda share: (-share[0], share[2])):
        turns[key] = (parts, turn)
        first = min(parts, copies - turn)
        added[turn : turn + first] += part_bytes
        added[: parts - first] += part_bytes
        turn = (turn + parts) % copies
    load[groups] += added
    return turns


def _take_turn_boxes(layout: Boxes, item_bytes: int, load: "npt.NDArray[np.int64]") -> tuple[int, int]:
    """The same for an explicit list, whose holders already take turns from box to box."""
    largest = max((h.box.elements for h in layout.held), default=0) * item_bytes
    copies = max((len(h.holders) for h in layout.held), default=1)
    parts = min(copies, max(1, largest // MIN_PART_BYTES))
    for held in layout.held:
        for j, part in enumerate(held.box.split(parts)):
            load[held.holders[j % len(held.holders)]] += part.elements * item_bytes
    return parts, 0


def written_by(tensor: Tensor, layout: Layout, rank: int) -> Iterator[PlannedWrite]:
    """The entries of this tensor that `rank` writes."""
    if tensor.same_as:
        return
    for held in layout.held_by(tensor.shape, rank):
        place = positions(held.ranks)
        if tensor.parts == 1:
            if held.box.elements and place[rank] == tensor.turn % len(place):
                name = entry_name(tensor.key, held.box, tensor.shape)
                yield PlannedWrite(tensor.key, name, tensor.dtype, held.box)
            continue
        count = held.box.part_count(tensor.parts)
        for j in range((place[rank] - tensor.turn) % len(place), count, len(place)):
            part = held.box.part(j, tensor.parts)
            yield PlannedWrite(tensor.key, entry_name(tensor.key, part, tensor.shape), tensor.dtype, part)


def parts_of(tensor: Tensor, box: Box, holders: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    """The parts of a box, each with the rank that writes it."""
    if tensor.parts == 1:
        return iter([(box, holders[tensor.turn % len(holders)])] if box.elements else [])
    return _many_parts(tensor, box, holders)


def _many_parts(tensor: Tensor, box: Box, holders: tuple[int, ...]) -> Iterator[tuple[Box, int]]:
    for j, part in enumerate(box.split(tensor.parts)):
        yield part, holders[(tensor.turn + j) % len(holders)]


def read_plan(manifest: Manifest, tensor: Tensor, region: Box) -> list[PlannedRead]:
    """What to read for `region` of a tensor: disjoint boxes that cover it, each from one entry of one file."""
    layout = manifest.layout_of(tensor)
    if tensor.parts == 1 and isinstance(layout, Whole) and region.shape == tensor.shape:
        # The usual case for a checkpoint that one process saved.
        holders = unpack_ranks(layout.ranks)
        name = entry_name(tensor.stored_key, region, tensor.shape)
        return [PlannedRead(tensor.key, holders[tensor.turn % len(holders)], name, region, region)] * (
            0 not in region.shape
        )
    return [
        PlannedRead(tensor.key, writer, entry_name(tensor.stored_key, part, tensor.shape), part, wanted)
        for held in layout.overlapping(tensor.shape, region)
        for part, writer in parts_of(tensor, held.box, held.holders)
        if (wanted := part.intersect(region)) is not None
    ]


def stretches_of(item: PlannedRead, item_bytes: int) -> Iterator[tuple[int, int]]:
    """The ranges of its entry that a read asks for: several only where gaps between them are too wide to be read."""
    if item.box is item.source or item.box == item.source:
        return iter([(0, item.source.elements * item_bytes)])
    box, strides = item.box.within(item.source), strides_of(item.source.shape)
    first = sum(map(mul, box.offset, strides))
    last = first + sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True))
    if (last + 1 - first) * item_bytes <= max(box.elements * item_bytes, GAP_BYTES):
        return iter([(first * item_bytes, (last + 1) * item_bytes)])
    return _stretches(box, strides, item_bytes)


def _stretches(box: Box, strides: tuple[int, ...], item_bytes: int) -> Iterator[tuple[int, int]]:
    dims = [d for d, n in enumerate(box.shape) if n > 1]
    ends = [(n - 1) * s for n, s in zip(box.shape, strides, strict=True)]
    for position, d in enumerate(dims):
        inner = sum(ends[e] for e in dims[position + 1 :]) + 1
        if (strides[d] - inner) * item_bytes > GAP_BYTES:
            for i in range(box.shape[d]):
                yield from _stretches(box.narrow(d, i, 1), strides, item_bytes)
            return
    first = sum(map(mul, box.offset, strides))
    yield first * item_bytes, (first + sum(ends) + 1) * item_bytes


def extra_bytes(item: PlannedRead, item_bytes: int) -> int:
    """About how many bytes a rank reads beside an item, where it reads for itself: gaps, and the rest of blocks.

    As if each entry began with a block, and its neighbours were not read.
    """
    if item.box is item.source or item.box == item.source:
        return 0
    end = item.source.elements * item_bytes
    asked = 0
    for start, stop in stretches_of(item, item_bytes):
        asked += min(-(-stop // BLOCK_BYTES) * BLOCK_BYTES, end) - start // BLOCK_BYTES * BLOCK_BYTES
    return asked - item.box.elements * item_bytes
