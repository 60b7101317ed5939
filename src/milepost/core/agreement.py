"""Agreements: what the ranks of a job know of each other's tables, and the plans that follow. Pure.

A rank needs to know only what concerns its own tensors: which ranks have the same table, and how the few tensors that
other tables also hold are cut over all ranks. The coordinator knows everything, because it writes the manifest. Both
plan by the same rule, so no plans are sent.
"""

from collections import Counter, OrderedDict

import msgspec
import xxhash

from milepost.core.division import share_out
from milepost.core.layout import Layout, Whole
from milepost.core.manifest import PerRankValue, Tensor
from milepost.core.option_values import check_values
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.table import Merged, Table, TensorRow
from milepost.core.tree import Node


class SharedTensor(msgspec.Struct, frozen=True):
    """A tensor that ranks with different tables hold, and how it is cut over all of them."""

    row: TensorRow
    layout: Layout


class Terms(msgspec.Struct, frozen=True):
    """What the coordinator sends to every rank: the groups of ranks with equal tables, and the tensors they share."""

    id: bytes
    groups: tuple[str, ...]
    shared: tuple[SharedTensor, ...] = ()


class GroupPlan(msgspec.Struct, frozen=True):
    """What one group of ranks does: its tensors with parts and turns, and their layouts."""

    id: bytes
    group: str
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]


class Overview(msgspec.Struct, frozen=True):
    """The coordinator's part for the manifest: all tensors, layouts, the tree, and the ranks with private values."""

    groups: tuple[str, ...]
    tensors: tuple[Tensor, ...]
    layouts: tuple[Layout, ...]
    tree: tuple[Node, ...]
    per_rank: tuple[PerRankValue, ...]


def agreement_id(groups: list[tuple[str, bytes]], share_replicas: bool) -> bytes:
    """The same exactly when the same ranks hold tables of the same structure, and write by the same rule."""
    return xxhash.xxh3_64(msgspec.msgpack.encode((groups, share_replicas))).digest()


def find_terms(groups: list[tuple[str, bytes]], tables: list[Table], merged: Merged, share_replicas: bool) -> Terms:
    """The terms for these groups of ranks, each of which has one of the tables."""
    shared: tuple[SharedTensor, ...] = ()
    if len(tables) > 1:
        counts = Counter(row.key for table in tables for row in table.tensors)
        shared = tuple(SharedTensor(row, merged.layouts[row.key]) for row in merged.tensors if counts[row.key] > 1)
    return Terms(agreement_id(groups, share_replicas), tuple(ranks for ranks, _ in groups), shared)


class Settled(msgspec.Struct, frozen=True):
    """What the coordinator works out from all tables: the terms, each group's plan, and the overview."""

    terms: Terms
    plans: tuple[GroupPlan, ...]
    overview: Overview


def conclude(
    groups: list[tuple[str, bytes]], tables: list[Table], merged: Merged, world: int, share_replicas: bool
) -> Settled:
    """The agreement of these groups of ranks, whose tables were merged without a problem."""
    terms = find_terms(groups, tables, merged, share_replicas)
    plans = [
        make_plan(terms, group, table, world, share_replicas) for (group, _), table in zip(groups, tables, strict=True)
    ]
    return Settled(terms, tuple(plans), overview(terms, plans, merged))


def make_plan(terms: Terms, group: str, table: Table, world: int, share_replicas: bool) -> GroupPlan:
    """The plan of the ranks in `group`, which have this table."""
    shared = {s.row.key: s for s in terms.shared}
    own = [row for row in table.tensors if row.key not in shared]
    layouts: dict[str, Layout] = {row.key: row.layout or Whole(group) for row in own}
    tensors, found = share_out(own, layouts, world, share_replicas)
    if not shared:
        return GroupPlan(terms.id, group, tensors, found)
    everywhere, cuts = share_out(
        [s.row for s in terms.shared], {key: s.layout for key, s in shared.items()}, world, share_replicas
    )
    index = {layout: i for i, layout in enumerate(dict.fromkeys((*found, *cuts)))}
    mine = {row.key for row in table.tensors}
    renumbered = {t.key: msgspec.structs.replace(t, layout=index[found[t.layout]]) for t in tensors}
    renumbered.update(
        {t.key: msgspec.structs.replace(t, layout=index[cuts[t.layout]]) for t in everywhere if t.key in mine}
    )
    return GroupPlan(terms.id, group, tuple(renumbered[row.key] for row in table.tensors), tuple(index))


def overview(terms: Terms, plans: list[GroupPlan], merged: Merged) -> Overview:
    """Everything, for the manifest: the plans of all groups put together."""
    if len(plans) == 1:
        return Overview(terms.groups, plans[0].tensors, plans[0].layouts, merged.tree, merged.per_rank)
    tensors: dict[str, tuple[Tensor, Layout]] = {}
    for plan in plans:
        for tensor in plan.tensors:
            tensors.setdefault(tensor.key, (tensor, plan.layouts[tensor.layout]))
    index: dict[Layout, int] = {}
    for _, layout in tensors.values():
        index.setdefault(layout, len(index))
    ordered = tuple(msgspec.structs.replace(tensor, layout=index[layout]) for tensor, layout in tensors.values())
    return Overview(terms.groups, ordered, tuple(index), merged.tree, merged.per_rank)


class Plans:
    """Plans of earlier saves: a save of the same structure needs no planning. One object serves a series of saves.

    Keyed by content: a changed shape, dtype, layout, structure or number of ranks is another entry, and states that are
    saved in turn do not evict each other. `size`: how many structures are kept.

    >>> plans = milepost.Plans()
    >>> for step in (1, 2):
    ...     _ = milepost.save({"w": torch.ones(3), "step": step}, "memory://planned", plans=plans)
    >>> len(plans)
    1
    """

    def __init__(self, size: int = 16) -> None:
        check_values({"size": size})
        self._size = size
        self._plans: OrderedDict[tuple[bytes, int, bool], GroupPlan] = OrderedDict()
        self._overviews: OrderedDict[bytes, Overview] = OrderedDict()

    def __len__(self) -> int:
        return len(self._plans)

    def find(self, digest: bytes, world: int, share_replicas: bool) -> GroupPlan | None:
        """The plan that was last agreed on for a table of this digest."""
        plan = self._plans.get((digest, world, share_replicas))
        if plan is not None:
            self._plans.move_to_end((digest, world, share_replicas))
        return plan

    def overview(self, agreement: bytes) -> Overview | None:
        """What the coordinator keeps for an agreement."""
        return self._overviews.get(agreement)

    def keep(
        self, digest: bytes, world: int, share_replicas: bool, plan: GroupPlan, everything: Overview | None
    ) -> None:
        """Remember a plan, and on the coordinator its overview."""
        self._plans[digest, world, share_replicas] = plan
        if everything is not None:
            self._overviews[plan.id] = everything
        while len(self._plans) > self._size:
            self._plans.popitem(last=False)
        while len(self._overviews) > self._size:
            self._overviews.popitem(last=False)


def group_of(rank: int, groups: tuple[str, ...]) -> str:
    """The group that a rank belongs to."""
    return next(group for group in groups if rank in unpack_ranks(group))


def group_ranks(digests: list[bytes]) -> list[tuple[str, bytes]]:
    """The ranks that sent each digest, in order of the lowest."""
    found: dict[bytes, list[int]] = {}
    for rank, digest in enumerate(digests):
        found.setdefault(digest, []).append(rank)
    return [(pack_ranks(ranks), digest) for digest, ranks in found.items()]
