"""Agreeing: the ranks compare digests of their tables. Where they differ, one rank of each kind sends its table."""

import zlib

import msgspec

from milepost.comm import Bytes, Call, Comm, Deferred, Meeting, meet
from milepost.core.agreement import GroupPlan, Overview, Plans, Terms, conclude, group_of, group_ranks, make_plan
from milepost.core.ranks import unpack_ranks
from milepost.core.table import Merged, Table, merge_tables
from milepost.core.wire import Wire
from milepost.data.collection_pause import CollectionPaused
from milepost.errors import RanksDisagree
from milepost.events.operation import phasing
from milepost.saving.describe import Described

_TABLES = Wire.json(Table)
_DESCRIBING = Meeting("describing the state", Bytes(), Wire.json(Terms), "planning")
_AGREEING = Meeting("agreeing on the layout", Bytes(), Wire.json(Terms), "planning")


class _Council:
    """The coordinator's side of an agreement: it groups digests, merges tables, and keeps the overview."""

    def __init__(self, comm: Comm, table: Table | None, share_replicas: bool) -> None:
        self._comm, self._table, self._share_replicas = comm, table, share_replicas
        self._groups: list[tuple[str, bytes]] = []
        self.overview: Overview | None = None
        self.plan: GroupPlan | None = None

    def hear_digests(self, digests: list[bytes]) -> Terms:
        """Equal digests are an agreement; else ask one rank of each group for its table."""
        self._groups = group_ranks(digests)
        if len(self._groups) > 1:
            return Terms(b"", tuple(ranks for ranks, _ in self._groups))
        assert self._table is not None
        return self._conclude([self._table])

    def hear_tables(self, packed: list[bytes]) -> Terms:
        """Merge the tables of all groups. Raises RanksDisagree, with everything that contradicts."""
        return self._conclude(
            [_TABLES.unpack(zlib.decompress(packed[unpack_ranks(ranks)[0]])) for ranks, _ in self._groups]
        )

    @CollectionPaused()
    def _conclude(self, tables: list[Table]) -> Terms:
        merged: Merged = merge_tables(
            [(unpack_ranks(ranks), table) for (ranks, _), table in zip(self._groups, tables, strict=True)]
        )
        if merged.problems:
            raise RanksDisagree("the ranks do not describe one state:\n  " + "\n  ".join(merged.problems[:50]))
        settled = conclude(self._groups, tables, merged, self._comm.size, self._share_replicas)
        self.overview = settled.overview
        groups = settled.terms.groups
        self.plan = settled.plans[groups.index(group_of(self._comm.rank, groups))]
        return settled.terms


def agree(comm: Comm, call: Call, described: Deferred[Described], plans: Plans, share_replicas: bool) -> GroupPlan:
    """The plan of this rank, agreed with all others and kept in `plans`. A deferred error is raised on all ranks."""
    council = _Council(comm, described.result.table if described.result else None, share_replicas)
    terms = meet(comm, call, _DESCRIBING, lambda: described.get().digest, council.hear_digests)
    if not terms.id:
        speakers = {unpack_ranks(group)[0] for group in terms.groups}

        def speak() -> bytes:
            if comm.rank not in speakers:
                return b""
            # The values are left out until the results: they change from save to save, the rest does not.
            return zlib.compress(_TABLES.pack(msgspec.structs.replace(described.get().table, values=())))

        terms = meet(comm, call, _AGREEING, speak, council.hear_tables)
    mine = described.get()
    with phasing("planning"), CollectionPaused():
        plan = council.plan or make_plan(
            terms, group_of(comm.rank, terms.groups), mine.table, comm.size, share_replicas
        )
    plans.keep(mine.digest, comm.size, share_replicas, plan, council.overview)
    return plan
