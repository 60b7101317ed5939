"""Agreeing: the ranks compare digests of their tables; only where these differ does one rank of each kind send its own."""

import zlib
from collections.abc import Callable

import msgspec

from milepost.comm import Comm, Phase, together
from milepost.core.agreement import GroupPlan, Overview, Plans, Terms, group_of, group_ranks, make_plan, settle
from milepost.core.ranks import unpack_ranks
from milepost.core.table import Merged, Table, merge_tables
from milepost.data.collection_pause import CollectionPaused
from milepost.errors import RanksDisagree
from milepost.saving.describe import Described

# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_TABLES = msgspec.json.Decoder(Table)
_TERMS = msgspec.json.Decoder(Terms)


class _Council:
    """The coordinator's side of an agreement: it groups digests, merges tables, and keeps the overview."""

    def __init__(self, comm: Comm, table: Table | None, spread: bool) -> None:
        self._comm, self._table, self._spread = comm, table, spread
        self._groups: list[tuple[str, bytes]] = []
        self.overview: Overview | None = None
        self.plan: GroupPlan | None = None

    def hear_digests(self, digests: list[bytes]) -> bytes:
        """Equal digests are an agreement; else ask one rank of each group for its table."""
        self._groups = group_ranks(digests)
        if len(self._groups) > 1:
            return msgspec.json.encode(Terms(b"", tuple(ranks for ranks, _ in self._groups)))
        assert self._table is not None
        return self._settle([self._table])

    def hear_tables(self, packed: list[bytes]) -> bytes:
        """Merge the tables of all groups. Raises RanksDisagree, with everything that contradicts."""
        return self._settle(
            [_TABLES.decode(zlib.decompress(packed[unpack_ranks(ranks)[0]])) for ranks, _ in self._groups]
        )

    @CollectionPaused()
    def _settle(self, tables: list[Table]) -> bytes:
        merged: Merged = merge_tables(
            [(unpack_ranks(ranks), table) for (ranks, _), table in zip(self._groups, tables, strict=True)]
        )
        if merged.problems:
            raise RanksDisagree("the ranks do not describe one state:\n  " + "\n  ".join(merged.problems[:50]))
        settled = settle(self._groups, tables, merged, self._comm.size, self._spread)
        self.overview = settled.overview
        groups = settled.terms.groups
        self.plan = settled.plans[groups.index(group_of(self._comm.rank, groups))]
        return msgspec.json.encode(settled.terms)


def agree(
    comm: Comm,
    phase: Callable[[str], Phase],
    described: Described | None,
    trouble: BaseException | None,
    plans: Plans,
    spread: bool,
) -> GroupPlan:
    """The plan of this rank, agreed with all others and kept in `plans`. A rank in trouble raises it here, on all ranks."""
    table = described.table if described else None
    council = _Council(comm, table, spread)

    def greet() -> bytes:
        if trouble is not None:
            raise trouble
        assert described is not None
        return described.digest

    terms = _TERMS.decode(together(comm, phase("describing the state"), greet, council.hear_digests))
    if not terms.id:
        speakers = {unpack_ranks(group)[0] for group in terms.groups}

        def speak() -> bytes:
            # The values stay at home until the results: they change from save to save, the rest does not.
            bare = msgspec.structs.replace(table, values=()) if table else None
            return zlib.compress(msgspec.json.encode(bare)) if comm.rank in speakers else b""

        packed = together(comm, phase("agreeing on the layout"), speak, council.hear_tables)
        terms = _TERMS.decode(packed)
    assert described is not None
    with CollectionPaused():
        plan = council.plan or make_plan(terms, group_of(comm.rank, terms.groups), described.table, comm.size, spread)
    plans.keep(described.digest, comm.size, spread, plan, council.overview)
    return plan
