"""Tables: what each rank holds, and the one table that all ranks form together. Pure.

In a plain SPMD job all ranks have the same table, and comparing digests is enough. Where they differ (pipeline
stages), one table for each distinct digest is merged with the others; all contradictions are reported at once.
"""

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from functools import cached_property

import msgspec
import xxhash

from milepost.core.box import Box, Shape
from milepost.core.layout import Boxes, Grid, Held, Layout, Whole, stack
from milepost.core.manifest import PerRankValue, TensorKind, Value
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from milepost.core.tree import LEAVES, Node
from milepost.core.tree import merge as merge_trees


class TensorRow(msgspec.Struct, frozen=True, omit_defaults=True, gc=False):
    """One tensor as a rank describes it. `layout` is None for a plain tensor: whole on every rank that has the key.

    `same_as`: the key of an earlier row, where both are one tensor on this rank.

    >>> milepost.testing.TensorRow("w", "float32", (1024, 64), "tensor", milepost.testing.on_mesh((8,), [0])).shape
    (1024, 64)
    """

    key: str
    dtype: str
    shape: Shape
    kind: TensorKind
    layout: Grid | Boxes | None
    same_as: str = ""


Holder = tuple[tuple[int, ...], TensorRow]
"""Ranks that describe a tensor alike, and how they do."""


class Table(msgspec.Struct, frozen=True):
    """All that one rank holds, without the data. `per_rank` lists the keys of rank-private values."""

    tensors: tuple[TensorRow, ...]
    tree: tuple[Node, ...]
    values: tuple[Value, ...]
    per_rank: tuple[str, ...]

    def digest(self) -> bytes:
        """The same for tables of equal structure (all but the values), on every rank and machine."""
        structure = (self.tensors, self.tree, self.per_rank)
        return xxhash.xxh3_128(msgspec.json.encode(structure)).digest()

    def values_digest(self) -> bytes:
        """The same for equal values."""
        return xxhash.xxh3_64(msgspec.json.encode(self.values)).digest()


@dataclass(frozen=True)
class Merged:
    """What all ranks hold together. Where `problems` is not empty, the rest is not valid."""

    tensors: tuple[TensorRow, ...] = ()
    layouts: dict[str, Layout] = field(default_factory=dict)
    tree: tuple[Node, ...] = ()
    values: tuple[Value, ...] = ()
    per_rank: tuple[PerRankValue, ...] = ()
    problems: tuple[str, ...] = ()
    differing: tuple[str, ...] = ()

    @cached_property
    def rows(self) -> dict[str, TensorRow]:
        """The tensors by key."""
        return {row.key: row for row in self.tensors}


def merge_tables(tables: list[tuple[tuple[int, ...], Table]]) -> Merged:
    """One table for all ranks, from the distinct ones and the ranks that have each.

    `problems` lists contradictions (two shapes, two dtypes, overlapping or missing boxes); `differing` lists values
    that are not equal on all ranks, of which the lowest rank's is kept.
    """
    problems: list[str] = []
    held: dict[str, list[Holder]] = {}
    for ranks, table in tables:
        for row in table.tensors:
            held.setdefault(row.key, []).append((ranks, row))
    rows, layouts = [], {}
    merger = LayoutMerger()
    for key, named in held.items():
        holders = _with_boxes(named)
        problem = (len(holders) > 1 and _contradiction(key, holders)) or ""
        if not problem:
            try:
                layouts[key] = merger.merge(holders)
            except ValueError as error:
                problem = f"{key!r}: {error}"
        problems.extend([problem] if problem else [])
        first = holders[0][1]
        tied = all(row.same_as == first.same_as for _, row in holders)
        rows.append(first if tied else msgspec.structs.replace(first, same_as=""))
    values, differing = merge_values([(ranks, table.values) for ranks, table in tables])
    tree: tuple[Node, ...] = ()
    try:
        tree = merge_trees([table.tree for _, table in tables])
        twice = [key for key, count in Counter(node.key for node in tree if node.kind in LEAVES).items() if count > 1]
        problems.extend(f"{key!r} stands at two places of the state; rename one of the keys" for key in twice[:50])
    except ValueError as error:
        problems.append(str(error))
    per_rank = _merge_per_rank(tables)
    return Merged(tuple(rows), layouts, tree, values, per_rank, tuple(problems), differing)


class LayoutMerger:
    """Merges layouts. Tensors that are cut alike on the same ranks are looked at once: models have many of them."""

    def __init__(self) -> None:
        self._known: dict[tuple[object, ...], Whole | Grid | None] = {}
        self._fits: set[tuple[Grid, Shape]] = set()

    def merge(self, holders: list[Holder]) -> Layout:
        """The layout of a tensor on all ranks. Raises ValueError for overlapping or missing boxes and absent ranks."""
        shape = holders[0][1].shape
        # Tables of one merge hold the same tuples of ranks, so their identity stands for them.
        alike = tuple([(id(ranks), row.layout) for ranks, row in holders])
        if alike not in self._known:
            self._known[alike] = _by_rule(holders)
        found = self._known[alike]
        if found is None:
            return _by_list(holders, shape)
        if isinstance(found, Grid) and (found, shape) not in self._fits:
            found.check(shape)
            self._fits.add((found, shape))
        return found


def _by_rule(holders: list[Holder]) -> Whole | Grid | None:
    """The one whole or grid layout that the holders form, or None if they form none."""
    ranks = sorted(rank for group, _ in holders for rank in group)
    distinct = list(dict.fromkeys(row.layout for _, row in holders))
    if distinct == [None]:
        return Whole(pack_ranks(ranks))
    grids = [layout for layout in distinct if isinstance(layout, Grid)]
    if len(grids) != len(distinct):
        return None
    merged = grids[0] if len(grids) == 1 else stack(grids)
    if merged is None:
        return None
    absent = set(unpack_ranks(merged.mesh.ranks)) - set(ranks)
    if absent:
        raise ValueError(f"its mesh includes {show_ranks(absent)}, which did not save it")
    return merged


def _by_list(holders: list[Holder], shape: Shape) -> Boxes:
    """An explicit list of all boxes and holders."""
    boxes = Boxes(tuple(_spell_out(holders, shape)))
    boxes.check(shape)
    ranks = {rank for group, _ in holders for rank in group}
    absent = {rank for held in boxes.held for rank in held.holders} - ranks
    if absent:
        raise ValueError(f"it names {show_ranks(absent)} as a holder, which did not save it")
    return boxes


def _spell_out(holders: list[Holder], shape: Shape) -> Iterable[Held]:
    """Every distinct box with all ranks that hold it; the order of turns starts at another rank for each box."""
    found: dict[Box, set[int]] = {}
    for ranks, row in holders:
        layout: Layout = row.layout or Whole(pack_ranks(ranks))
        members = ranks if not isinstance(layout, Boxes) else [r for h in layout.held for r in h.holders]
        for rank in members:
            for piece in layout.pieces(shape, rank):
                if piece.box.elements:
                    found.setdefault(piece.box, set()).add(rank)
    for i, (box, holding) in enumerate(sorted(found.items(), key=lambda item: (item[0].offset, item[0].shape))):
        order = sorted(holding)
        turn = i % len(order)
        yield Held(box, pack_ranks(order[turn:] + order[:turn]))


def _with_boxes(holders: list[Holder]) -> list[Holder]:
    """Those that hold something, if any do. A tensor that wraps no shards on a rank does not know its dtype there."""
    if len(holders) == 1:
        return holders
    return [one for one in holders if not (isinstance(one[1].layout, Boxes) and not one[1].layout.held)] or holders


def _contradiction(key: str, holders: list[Holder]) -> str | None:
    first = holders[0][1]
    if all((r.dtype, r.shape, r.kind) == (first.dtype, first.shape, first.kind) for _, r in holders[1:]):
        return None
    seen: dict[tuple[str, Shape, str], list[int]] = {}
    for ranks, row in holders:
        seen.setdefault((row.dtype, row.shape, row.kind), []).extend(ranks)
    parts = [f"{kind} {dtype} {shape} on {show_ranks(ranks)}" for (dtype, shape, kind), ranks in seen.items()]
    return f"{key!r} is " + ", but ".join(parts)


def merge_values(
    groups: list[tuple[tuple[int, ...], tuple[Value, ...]]],
) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """The values of all groups of ranks, the lowest rank's where they differ, and a line for each that differs."""
    chosen: dict[str, tuple[Value, bytes]] = {}
    versions: dict[str, dict[bytes, list[int]]] = {}
    for ranks, values in sorted(groups, key=lambda item: min(item[0])):
        for value in values:
            spelled = msgspec.json.encode(value.value)
            chosen.setdefault(value.key, (value, spelled))
            versions.setdefault(value.key, {}).setdefault(spelled, []).extend(ranks)
    differing = []
    for key, seen in versions.items():
        if len(seen) > 1:
            shown = " but ".join(
                f"{_short(spelled)} on {show_ranks(ranks)}" for spelled, ranks in list(seen.items())[:4]
            )
            more = f" and {len(seen) - 4} more" if len(seen) > 4 else ""
            differing.append(f"{key!r} is {shown}{more}")
    return tuple(value for value, _ in chosen.values()), tuple(differing)


def _short(spelled: bytes) -> str:
    text = spelled.decode(errors="replace")
    return text if len(text) <= 60 else f"{text[:56]} …"


def _merge_per_rank(tables: list[tuple[tuple[int, ...], Table]]) -> tuple[PerRankValue, ...]:
    ranks_of: dict[str, list[int]] = {}
    for ranks, table in tables:
        for key in table.per_rank:
            ranks_of.setdefault(key, []).extend(ranks)
    return tuple(PerRankValue(key, pack_ranks(sorted(ranks))) for key, ranks in ranks_of.items())
