"""The save pipeline: describe, agree, write, commit. Every rank runs it; each step succeeds on all ranks or on none.

In the steady state (the same structure as in an earlier save with the same `Plans`) the ranks meet once: the
coordinator announces the aim, every rank writes by the plan that it has, and the results say by which agreement. If a
rank's structure changed, nothing is committed; the ranks agree again and write again.
"""

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import NoneType
from typing import Any, Literal, NoReturn

import msgspec

from milepost.comm import (
    Announcement,
    Bytes,
    Call,
    Comm,
    Deferred,
    Meeting,
    broadcast,
    calling,
    defer,
    mark_told,
    meet,
    operating_on,
)
from milepost.commit.attempt import Aim, Attempt, Contents, take_aim
from milepost.core.agreement import GroupPlan, Overview
from milepost.core.box import Box
from milepost.core.division import written_by
from milepost.core.history import phase_times
from milepost.core.manifest import OlderFile, ShardFile, Value
from milepost.core.partial_statistics import PartialStatistics, Summary, summarise
from milepost.core.ranks import unpack_ranks
from milepost.core.reuse import KeptEntry
from milepost.core.shardfile import NewEntry
from milepost.core.statistics import Health, Recording
from milepost.core.table import merge_values
from milepost.core.wire import Wire
from milepost.data.collection_pause import CollectionPaused
from milepost.data.reuse import NOTHING, Reused
from milepost.data.tally import Tally
from milepost.data.transfer import Meter
from milepost.data.write import EntryToWrite, look_through
from milepost.errors import RanksDisagree
from milepost.events.operation import Operation, phasing
from milepost.saving.agree import agree
from milepost.saving.base import BaseAim, Entries, choose_base, reuse
from milepost.saving.describe import Described, describe, no_callback
from milepost.saving.health import judge
from milepost.saving.options import SaveOptions, make_options
from milepost.saving.replicas import ReplicaCheck, compare
from milepost.state.tensors import find_part
from milepost.state.versions import Versions
from milepost.store import Store

_SHOWN = 50


class Receipt(msgspec.Struct, frozen=True):
    """What a save committed: where, which generation, and how many bytes of tensors all ranks wrote.

    `reused_bytes`: how many more bytes of tensors it has that were not written, because its base has them (`base`).

    >>> receipt = milepost.save({"w": torch.ones(3)}, "memory://receipt")
    >>> receipt.generation, receipt.world, receipt.data_bytes
    (1, 1, 12)

    `health`: what the rule of `healthy` said; None where there is no rule.
    """

    url: str
    generation: int
    save_id: str
    world: int
    data_bytes: int
    health: Health | None = None
    reused_bytes: int = 0


class _Start(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator announces: the aim, the agreement that it has for this structure, and options.

    All ranks follow these options. Ranks that did not would write by another plan, or miss a meeting.
    """

    aim: Aim
    agreement: bytes
    may_differ: bool
    compare_replicas: bool
    statistics: Recording
    incremental: bool
    base: BaseAim | None


class _Result(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings after writing. `values` only from the lowest rank of each group of equal tables."""

    agreement: bytes
    values_digest: bytes
    replicas: dict[bytes, bytes]
    size_bytes: int = 0
    header_bytes: int = 0
    checksum: bytes = b""
    data_bytes: int = 0
    values: bytes = b""
    part_bytes: int = 0
    statistics: bytes = b""
    times: bytes = b""
    digests: int = 0
    spans: bool = False
    older: tuple[OlderFile, ...] = ()


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator decided: committed, or something to clear up first."""

    committed: bool = False
    data_bytes: int = 0
    reused_bytes: int = 0
    replan: bool = False
    values_differ: bool = False
    replicas_differ: tuple[bytes, ...] = ()
    health: Health | None = None

    @property
    def differ(self) -> bool:
        return self.values_differ or bool(self.replicas_differ)


# The steps of a save. Those of `agree` come between the first two.
_STARTING = Announcement("starting", Wire(_Start), "planning")
_WRITING = Meeting("writing", Wire(_Result), Wire(_Answer), deciding="committing")
_COMPARING = Meeting("comparing values", Bytes(), Wire(str), "comparing")
_COMMITTING = Meeting("committing", Wire(NoneType), Wire(_Answer))
_VALUES = Wire.json(tuple[Value, ...])


def save_state(
    state: Any, store: Store, comm: Comm, options: SaveOptions, describing: Callable[[], Described] | None = None
) -> Receipt:
    """Save `state` from all ranks of `comm`. Atomic and durable; raises the same error on every rank, leaving nothing.

    `describing` says what this rank holds, where that is not what `state` shows.
    """
    if describing is None:
        describing = partial(describe, state, comm, options.codec, options.metadata, options.reduce_partial)
    return _Save(store, comm, options, describing).run()


def refuse(store: Store, comm: Comm, error: BaseException) -> NoReturn:
    """Join a save that the other ranks make, and fail it: raises this rank's error on all ranks."""

    def fail() -> Described:
        raise error

    save_state(None, store, comm, make_options(), fail)
    raise error


class _Save:
    """One save on one rank."""

    def __init__(self, store: Store, comm: Comm, options: SaveOptions, describing: Callable[[], Described]) -> None:
        self.store, self.comm, self.options, self.describing = store, comm, options, describing
        self.call = Call("saving to", store.url)
        watcher = options.progress if comm.rank == comm.coordinator else None
        self.meter = Meter("save", store.url, watcher, options.cancelled)
        self.warnings: list[str] = []

    def run(self) -> Receipt:
        with calling(self.comm, self.call), operating_on(self.comm, "save", self.store.url) as operation:
            return self._run(operation)

    def _run(self, operation: Operation) -> Receipt:
        comm, self.operation = self.comm, operation
        with phasing("describing"):
            described = defer(comm, self.describing)
        start = broadcast(comm, self.call, _STARTING, lambda: self._start(described.result))
        on_difference: Literal["error", "warn"] = "warn" if start.may_differ else "error"
        self.options = replace(
            self.options,
            on_difference=on_difference,
            compare_replicas=start.compare_replicas,
            statistics=start.statistics,
        )
        self.incremental, self.base = start.incremental, start.base
        decides = comm.rank == comm.coordinator
        attempt = Attempt(self.store, start.aim, comm.rank, comm.size, decides=decides, keeps=start.base is not None)
        if start.agreement:
            # By the plan of an earlier save. If a rank turns out to have another plan, all ranks write again.
            answer = self._write(attempt, described, self._known_plan(described.result, start.agreement), final=False)
        else:
            answer = self._write(attempt, described, self._agree(described), final=True)
        if answer.replan:
            attempt.discard()
            attempt = attempt.again()
            answer = self._write(attempt, described, self._agree(described), final=True)
        described.get().released()
        self.meter.finish()
        operation.commit(attempt.aim.generation, answer.data_bytes, answer.health, answer.reused_bytes)
        if comm.rank == comm.coordinator and self.warnings:
            # At the very end: where warnings are errors, one must not stop the coordinator while others wait for it.
            warnings.warn("\n".join(self.warnings), RuntimeWarning, stacklevel=5)
        written = answer.data_bytes
        return Receipt(self.store.url, *attempt.aim, comm.size, written, answer.health, answer.reused_bytes)

    def _start(self, described: Described | None) -> _Start:
        """On the coordinator: aim, and say by which agreement all ranks can write, if this structure is known."""
        aim = take_aim(self.store, overwrite=self.options.overwrite)
        plan = self._find_plan(described) if described is not None and not described.is_live else None
        known = plan is not None and self.options.plans.overview(plan.id) is not None
        agreement = plan.id if plan is not None and known else b""
        options = self.options
        return _Start(
            aim,
            agreement,
            options.on_difference == "warn",
            options.compare_replicas,
            options.statistics,
            options.base is not None,
            choose_base(options.base),
        )

    def _find_plan(self, described: Described) -> GroupPlan | None:
        return self.options.plans.find(described.digest, self.comm.size, self.options.share_replicas)

    def _known_plan(self, described: Described | None, agreement: bytes) -> GroupPlan | None:
        """The plan of an earlier save by this agreement; None if this rank has none, or its structure changed.

        None also for live data. A caller waits while that is written, and allows the commit only then. So it is
        written once, after the ranks have agreed.
        """
        plan = self._find_plan(described) if described is not None and not described.is_live else None
        return plan if plan is not None and plan.id == agreement else None

    def _agree(self, described: Deferred[Described]) -> GroupPlan:
        return agree(self.comm, self.call, described, self.options.plans, self.options.share_replicas)

    def _write(
        self, attempt: Attempt, described: Deferred[Described], plan: GroupPlan | None, *, final: bool
    ) -> _Answer:
        """Write, bring the results together, and commit on the coordinator. What is not committed is removed."""
        tensors = described.result.tensors if described.result is not None else {}
        compared = self.options.compare_replicas and self.comm.size > 1
        check = ReplicaCheck(plan, self.comm.rank, tensors, self.options.transfer.memory_bytes if compared else 0)
        commit = _Commit(self.options, plan, attempt, self.meter, self.operation)

        def work() -> _Result:
            mine = described.get()
            if plan is None:
                return _Result(b"", b"", {})
            return self._write_shard(attempt, mine, plan, check, mine.released if final else no_callback)

        try:
            answer = meet(
                self.comm, self.call, _WRITING, work, lambda results: commit.judge(results, described.get().metadata)
            )
            if answer.differ:
                self._tell_differences(described.get(), check, answer)
                answer = meet(
                    self.comm, self.call, _COMMITTING, lambda: None, lambda _: commit.commit(described.get().metadata)
                )
        except BaseException as error:
            attempt.fail(error)
            raise
        return answer

    def _write_shard(
        self,
        attempt: Attempt,
        described: Described,
        plan: GroupPlan,
        check: ReplicaCheck,
        released: Callable[[], None],
    ) -> _Result:
        entries = _entries(plan, described, self.comm.rank)
        # What is live may change once it is written.
        early = self._digests(check) if described.live else {}
        self.meter.check()
        # Live tensors may change as soon as they are written; who released them has looked.
        versions = Versions(described.tensors, lambda _: not described.is_live)
        reused, kept, found = self._reuse(attempt, entries)
        tally = Tally(self.options.statistics) if self.options.statistics else None
        fresh = [entry for entry in entries.entries if entry.header.name not in reused.entries]
        written = attempt.write(fresh, self.options.transfer, self.meter, released, tally, kept)
        versions.check()
        found += [tally.result()] if tally is not None else []
        speaks = self.comm.rank == unpack_ranks(plan.group)[0]
        file = written.file
        return _Result(
            plan.id,
            described.table.values_digest(),
            early if described.live else self._digests(check),
            file.size_bytes if file else 0,
            file.header_bytes if file else 0,
            bytes.fromhex(file.checksum) if file else b"",
            written.data_bytes,
            _VALUES.pack(described.table.values) if speaks else b"",
            file.part_bytes if file else 0,
            _packed_statistics(found, plan, self.comm.size),
            self.operation.packed_times(),
            file.digests if file else 0,
            bool(file and file.spans),
            reused.files,
        )

    def _reuse(
        self, attempt: Attempt, entries: Entries
    ) -> tuple[Reused, dict[str, KeptEntry] | None, list[PartialStatistics]]:
        """What need not be written; as it stands in the file (None: it is no base for others); and its statistics."""
        if not self.incremental:
            return NOTHING, None, []
        options = self.options
        with phasing("comparing"):
            reused = reuse(options.base, self.base, entries, attempt, options.reuse, options.transfer, self.meter)
            same = [entry for entry in entries.entries if entry.header.name in reused.entries]
            if not options.statistics or not same:
                return reused, dict(reused.entries), []
            tally = Tally(options.statistics)
            look_through(same, options.transfer, tally, self.meter)
            return reused, dict(reused.entries), [tally.result()]

    def _digests(self, check: ReplicaCheck) -> dict[bytes, bytes]:
        with phasing("comparing"):
            return check.digests()

    def _tell_differences(self, described: Described, check: ReplicaCheck, answer: _Answer) -> None:
        """Find out, with all ranks, which keys differ where. Raise, or keep it for a warning."""
        values, replicas = "", ""
        if answer.values_differ:
            own = _VALUES.pack(described.table.values)
            values = meet(self.comm, self.call, _COMPARING, lambda: own, _name_unequal)
        if answer.replicas_differ:
            kept = self.options.on_difference == "warn"
            replicas = check.explain(self.comm, self.call, set(answer.replicas_differ), kept=kept)
        if self.options.on_difference == "error":
            raise mark_told(
                RanksDisagree(
                    "\n".join(filter(None, (values, replicas)))
                    + "\nWrap what belongs to a rank in PerRank, synchronise the ranks, or pass "
                    'on_difference="warn" to keep the lowest rank\'s.'
                )
            )
        self.warnings.extend([f"{values}\nThe lowest rank's was saved; PerRank keeps all."] if values else [])
        self.warnings.extend([replicas] if replicas else [])


class _Commit:
    """The coordinator's side of the end of a save: it looks at all results, and commits if everything fits."""

    def __init__(
        self, options: SaveOptions, plan: GroupPlan | None, attempt: Attempt, meter: Meter, operation: Operation
    ) -> None:
        self._options, self._plan, self._attempt, self._meter = options, plan, attempt, meter
        self._operation = operation
        self._results: list[_Result] = []

    def judge(self, results: list[_Result], metadata: Any) -> _Answer:
        """Commit; or say that the ranks wrote by different plans, or hold different values under one key."""
        self._results = results
        everything = self._options.plans.overview(self._plan.id) if self._plan else None
        if self._plan is None or everything is None or any(r.agreement != self._plan.id for r in results):
            return _Answer(replan=True)
        drifted = compare([result.replicas for result in results])
        unequal = not _equal_values(results, everything)
        if drifted or unequal:
            return _Answer(values_differ=unequal, replicas_differ=tuple(drifted))
        return self._publish(everything, metadata)

    def commit(self, metadata: Any) -> _Answer:
        """Commit although the ranks differ, as the caller asked."""
        assert self._plan is not None
        everything = self._options.plans.overview(self._plan.id)
        assert everything is not None
        return self._publish(everything, metadata)

    def _publish(self, everything: Overview, metadata: Any) -> _Answer:
        self._meter.check()
        files = tuple(
            ShardFile(rank, r.size_bytes, r.header_bytes, r.checksum.hex(), r.part_bytes, r.digests, r.spans)
            for rank, r in enumerate(self._results)
            if r.size_bytes
        )
        older = tuple(file for result in self._results for file in result.older)
        found = self._summarise(everything)
        health = judge(self._options.healthy, found)
        timings = self._operation.timings = phase_times([result.times for result in self._results])
        self._attempt.commit(
            Contents(
                metadata,
                everything.layouts,
                everything.tensors,
                everything.tree,
                _values(self._results, everything)[0],
                everything.per_rank,
                files,
                timings,
                found.statistics,
                health,
                older,
            )
        )
        written = sum(result.data_bytes for result in self._results)
        return _Answer(True, written, sum(file.used_bytes for file in older), health=health)

    @CollectionPaused()
    def _summarise(self, everything: Overview) -> Summary:
        if not self._options.statistics:
            return Summary((), 0, 0, ())
        packed = [result.statistics for result in self._results]
        return summarise(packed, everything.tensors, recorded=self._options.statistics != "finite")


@CollectionPaused()
def _entries(plan: GroupPlan, described: Described, rank: int) -> Entries:
    """What this rank writes, with the memory that holds it."""
    boxes: dict[str, tuple[str, Box]] = {}
    planned = []
    for number, tensor in enumerate(plan.tensors):
        numbered = number if tensor.has_statistics else -1
        for item in written_by(tensor, plan.layouts[tensor.layout], rank):
            data = find_part(described.tensors[tensor.key], item.box)
            header = NewEntry(item.name, item.dtype, item.box.shape)
            planned.append(EntryToWrite(header, data, tensor.key in described.live, numbered))
            boxes[item.name] = tensor.key, item.box
    return Entries(planned + described.private, boxes)


def _packed_statistics(found: list[PartialStatistics], plan: GroupPlan, world: int) -> bytes:
    """What a rank sends of the statistics of its entries; empty where none were asked for."""
    if not found:
        return b""
    summed = PartialStatistics.sum_of([one.rows for one in found], [one.bins for one in found])
    return summed.named([tensor.key for tensor in plan.tensors]).pack(world)


def _values(results: list[_Result], everything: Overview) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """The values of all groups, and a line for each key under which groups differ."""
    return merge_values(
        [(unpack_ranks(group), _VALUES.unpack(results[unpack_ranks(group)[0]].values)) for group in everything.groups]
    )


def _equal_values(results: list[_Result], everything: Overview) -> bool:
    """Whether all ranks of each group have the values of its lowest, and groups agree where they share keys."""
    alike = all(
        results[rank].values_digest == results[unpack_ranks(group)[0]].values_digest
        for group in everything.groups
        for rank in unpack_ranks(group)
    )
    return alike and (len(everything.groups) == 1 or not _values(results, everything)[1])


def _name_unequal(packed: list[bytes]) -> str:
    """Which values differ, by key and ranks. Ranks with equal values are looked at once."""
    versions: dict[bytes, list[int]] = {}
    for rank, data in enumerate(packed):
        versions.setdefault(data, []).append(rank)
    groups = [(tuple(ranks), _VALUES.unpack(data)) for data, ranks in versions.items()]
    lines = merge_values(groups)[1]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return "values that should be equal on all ranks are not:\n  " + "\n  ".join([*lines[:_SHOWN], *more])
