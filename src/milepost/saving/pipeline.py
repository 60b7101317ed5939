"""The save pipeline: describe, agree, write, commit. Every rank runs it; each step ends with all ranks or with one error.

In the steady state (the same structure as in an earlier save with the same `Plans`) the ranks meet once: the coordinator
announces the goal, every rank writes by the plan that it has, and the results say by which agreement. If a rank's
structure changed, nothing is committed; the ranks agree anew and write again.
"""

import logging
import warnings
from collections.abc import Callable
from datetime import UTC, datetime
from typing import Any, NoReturn

import msgspec

from milepost.comm import Comm, Phase, together, told
from milepost.commit.publish import aim, exists, generations, publish, sweep
from milepost.core.agreement import GroupPlan, Overview
from milepost.core.division import written_by
from milepost.core.manifest import ShardFile, Value, new_manifest, shard_name
from milepost.core.ranks import unpack_ranks
from milepost.core.shardfile import NewEntry
from milepost.core.table import merge_values
from milepost.data.collection_pause import CollectionPaused
from milepost.data.transfer import Meter
from milepost.data.write import EntryToWrite, write_shard
from milepost.errors import CheckpointError, InvalidRequest, NotDurable, RanksDisagree, SaveConflict, StorageError
from milepost.saving.agree import agree
from milepost.saving.describe import Described, describe, nobody_waits
from milepost.saving.options import SaveOptions, make_options
from milepost.saving.replicas import ReplicaCheck, compare
from milepost.state.tensors import find_part
from milepost.store import Store
from milepost.version import __version__

_log = logging.getLogger("milepost")
_SHOWN = 50


class Receipt(msgspec.Struct, frozen=True):
    """What a save committed: where, which generation, and how many bytes of tensors all ranks wrote."""

    url: str
    generation: int
    save_id: str
    world: int
    data_bytes: int


class _Goal(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator announces: what the save aims at, and the agreement that it has for this structure, if any."""

    generation: int
    save_id: str
    agreement: bytes


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


class _Answer(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator decided: committed, or something to clear up first."""

    committed: bool = False
    data_bytes: int = 0
    replan: bool = False
    values_differ: bool = False
    replicas_differ: tuple[bytes, ...] = ()

    @property
    def differ(self) -> bool:
        return self.values_differ or bool(self.replicas_differ)


# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_GOALS = msgspec.msgpack.Decoder(_Goal)
_RESULTS = msgspec.msgpack.Decoder(_Result)
_ANSWERS = msgspec.msgpack.Decoder(_Answer)
_VALUES = msgspec.json.Decoder(tuple[Value, ...])


class _Save:
    """One save on one rank."""

    def __init__(
        self, state: Any, store: Store, comm: Comm, options: SaveOptions, describing: Callable[[], Described] | None
    ) -> None:
        self.state, self.store, self.comm, self.options = state, store, comm, options
        self.describing = describing
        watcher = options.progress if comm.rank == comm.coordinator else None
        self.meter = Meter("save", store.url, watcher, options.cancelled)
        self.warnings: list[str] = []
        self._results: list[_Result] = []
        self._everything: Overview

    def phase(self, step: str) -> Phase:
        return Phase("saving to", self.store.url, step)

    def run(self) -> Receipt:
        comm, plans = self.comm, self.options.plans
        described, trouble = self._describe()
        goal = _GOALS.decode(told(comm, self.phase("starting"), lambda: self._aim(described)))
        plan = None
        if described is not None:
            plan = plans.find(described.digest, comm.size, self.options.spread)
        if not goal.agreement:
            plan = self._agree(described, trouble)
        elif plan is not None and plan.id != goal.agreement:
            plan = None
        # Written by a plan of before: until all ranks have said that they have the same, it may have to be written again.
        answer = self._write(goal, described, plan, trouble, final=not goal.agreement)
        if answer.replan:
            self._discard(goal)
            answer = self._write(goal, described, self._agree(described, trouble), trouble, final=True)
        if described is not None:
            described.released()
        self.meter.finish()
        if comm.rank == comm.coordinator:
            # At the very end: where warnings are errors, one must not take the coordinator away while others wait for it.
            for text in self.warnings:
                warnings.warn(f"{text}\nThe lowest rank's are saved.", RuntimeWarning, stacklevel=4)
        return Receipt(self.store.url, goal.generation, goal.save_id, comm.size, answer.data_bytes)

    def _describe(self) -> tuple[Described | None, BaseException | None]:
        """What this rank holds. A failure is kept for the next meeting, where all ranks hear of it."""
        try:
            options = self.options
            if self.describing is not None:
                return self.describing(), None
            return describe(self.state, self.comm, options.codec, options.metadata, options.reduce_partial), None
        except BaseException as error:  # Ctrl-C too: this rank's next save must not meet the others in this one
            if self.comm.size == 1:
                raise
            return None, error

    def _aim(self, described: Described | None) -> bytes:
        if not self.options.overwrite and exists(self.store):
            raise InvalidRequest(
                f"there is a checkpoint at {self.store.url} already; pass overwrite=True to replace it"
            )
        generation, save_id = aim(self.store)
        plans, plan = self.options.plans, None
        if (
            described is not None and not described.live
        ):  # somebody waits for what is live: rather agree than write twice
            plan = plans.find(described.digest, self.comm.size, self.options.spread)
        known = plan is not None and plans.overview(plan.id) is not None
        return msgspec.msgpack.encode(_Goal(generation, save_id, plan.id if plan and known else b""))

    def _agree(self, described: Described | None, trouble: BaseException | None) -> GroupPlan:
        return agree(self.comm, self.phase, described, trouble, self.options.plans, self.options.spread)

    def _write(
        self,
        goal: _Goal,
        described: Described | None,
        plan: GroupPlan | None,
        trouble: BaseException | None,
        final: bool,
    ) -> _Answer:
        """Write, bring the results together, and commit on the coordinator. What is not committed is removed."""
        check = ReplicaCheck(
            plan,
            self.comm.rank,
            described.tensors if described else {},
            self.options.compare_replicas and self.comm.size > 1,
        )

        def work() -> bytes:
            if trouble is not None:
                raise trouble
            if described is None or plan is None:
                return msgspec.msgpack.encode(_Result(b"", b"", {}))
            return self._write_shard(goal, described, plan, check, described.released if final else nobody_waits)

        def conclude(packed: list[bytes]) -> bytes:
            assert described is not None
            return msgspec.msgpack.encode(self._conclude(goal, described, plan, packed))

        def commit(_: list[bytes]) -> bytes:
            assert described is not None
            return msgspec.msgpack.encode(self._commit(goal, described))

        try:
            packed = together(self.comm, self.phase("writing"), work, conclude)
            answer = _ANSWERS.decode(packed)
            if answer.differ:
                assert described is not None
                self._tell_differences(described, check, answer)
                packed = together(self.comm, self.phase("committing"), bytes, commit)
                answer = _ANSWERS.decode(packed)
        except BaseException as error:
            if self._failed_for_sure(error, goal):
                self._discard(goal)
            raise
        return answer

    def _write_shard(
        self, goal: _Goal, described: Described, plan: GroupPlan, check: ReplicaCheck, released: Callable[[], None]
    ) -> bytes:
        entries = _entries(plan, described, self.comm.rank)
        digests = check.digests() if described.live else {}  # what is live may change once it is written
        try:
            self.meter.check()
            written = write_shard(
                self.store,
                goal.save_id,
                self.comm.rank,
                entries,
                self.options.transfer,
                self.meter,
                released,
            )
        except (OSError, CheckpointError) as error:
            raise self._explained(error, goal) from error
        speaker = self.comm.rank == unpack_ranks(plan.group)[0]
        file = written.file
        return msgspec.msgpack.encode(
            _Result(
                plan.id,
                described.table.values_digest(),
                digests if described.live else check.digests(),
                file.size_bytes if file else 0,
                file.header_bytes if file else 0,
                bytes.fromhex(file.checksum) if file else b"",
                written.data_bytes,
                msgspec.json.encode(described.table.values) if speaker else b"",
            )
        )

    def _explained(self, error: OSError | CheckpointError, goal: _Goal) -> CheckpointError:
        # A job that committed this generation first may have swept our files away: say that, not "no such file".
        if isinstance(error, FileNotFoundError) and next(iter(generations(self.store)), 0) >= goal.generation:
            return SaveConflict(f"another job committed generation {goal.generation} of {self.store.url} first")
        if isinstance(error, CheckpointError):
            return error
        gone = ". Was it removed, renamed or unmounted meanwhile?" if isinstance(error, FileNotFoundError) else ""
        return StorageError(f"cannot write to {self.store.url}: {error}{gone}", errno=error.errno)

    def _conclude(self, goal: _Goal, described: Described, plan: GroupPlan | None, packed: list[bytes]) -> _Answer:
        """On the coordinator: look at all results, and commit if everything fits."""
        results = [_RESULTS.decode(data) for data in packed]
        everything = self.options.plans.overview(plan.id) if plan else None
        if plan is None or everything is None or any(result.agreement != plan.id for result in results):
            return _Answer(replan=True)
        self._results, self._everything = results, everything
        drifted = compare([result.replicas for result in results])
        unequal = not _equal_values(results, everything)
        if drifted or unequal:
            return _Answer(values_differ=unequal, replicas_differ=tuple(drifted))
        return self._commit(goal, described)

    def _commit(self, goal: _Goal, described: Described) -> _Answer:
        """On the coordinator: make the manifest and publish it."""
        self.meter.check()
        results, everything = self._results, self._everything
        values = _values(results, everything)[0]
        files = tuple(
            ShardFile(rank, r.size_bytes, r.header_bytes, r.checksum.hex())
            for rank, r in enumerate(results)
            if r.size_bytes
        )
        manifest = new_manifest(
            goal.generation,
            goal.save_id,
            datetime.now(UTC).isoformat(timespec="seconds"),
            f"milepost {__version__}",
            self.comm.size,
            metadata=described.metadata,
            layouts=everything.layouts,
            tensors=everything.tensors,
            tree=everything.tree,
            values=values,
            per_rank=everything.per_rank,
            files=files,
        )
        publish(self.store, manifest)
        sweep(self.store, manifest)
        return _Answer(True, sum(result.data_bytes for result in results))

    def _tell_differences(self, described: Described, check: ReplicaCheck, answer: _Answer) -> None:
        """Find out, with all ranks, which keys differ where. Raise, or keep it for a warning."""
        texts: list[str] = []
        if answer.values_differ:
            own = msgspec.json.encode(described.table.values)
            packed = together(self.comm, self.phase("comparing values"), lambda: own, _name_unequal)
            texts.append(packed.decode())
        if answer.replicas_differ:
            texts.append(check.explain(self.comm, self.phase("comparing replicas"), set(answer.replicas_differ)))
        if self.options.on_difference == "error":
            raise RanksDisagree(
                "\n".join(texts) + "\nWrap what belongs to a rank in PerRank, synchronise the ranks, or pass "
                'on_difference="warn" to keep the lowest rank\'s.'
            )
        self.warnings.extend(texts)

    def _failed_for_sure(self, error: BaseException, goal: _Goal) -> bool:
        """Whether a commit that raised can no longer happen. If not, the data must stay: a manifest may name it."""
        if isinstance(error, (SaveConflict, RanksDisagree)):
            return True
        failures = getattr(error, "failures", {})
        if self.comm.size > 1 and not failures:
            return False  # the coordinator did not answer; it may still commit
        if isinstance(error, NotDurable) or any(failure.kind == NotDurable.__name__ for failure in failures.values()):
            return False  # a power cut may bring the manifest back
        try:
            return goal.generation not in generations(self.store)
        except (OSError, CheckpointError):
            return False

    def _discard(self, goal: _Goal) -> None:
        try:
            self.store.delete(shard_name(goal.save_id, self.comm.rank))
        except (OSError, CheckpointError) as error:
            _log.warning(
                "could not remove what an unfinished save left at %s; a later save will: %s", self.store.url, error
            )


@CollectionPaused()
def _entries(plan: GroupPlan, described: Described, rank: int) -> list[EntryToWrite]:
    """What this rank writes, with the memory that holds it."""
    planned = [
        EntryToWrite(
            NewEntry(item.name, item.dtype, item.box.shape),
            find_part(described.tensors[tensor.key], item.box),
            tensor.key in described.live,
        )
        for tensor in plan.tensors
        for item in written_by(tensor, plan.layouts[tensor.layout], rank)
    ]
    return planned + described.private


def _values(results: list[_Result], everything: Overview) -> tuple[tuple[Value, ...], tuple[str, ...]]:
    """The values of all groups, and a line for each key under which groups differ."""
    return merge_values(
        [(unpack_ranks(group), _VALUES.decode(results[unpack_ranks(group)[0]].values)) for group in everything.groups]
    )


def _equal_values(results: list[_Result], everything: Overview) -> bool:
    """Whether all ranks of each group have the values of its lowest, and groups agree where they share keys."""
    alike = all(
        results[rank].values_digest == results[unpack_ranks(group)[0]].values_digest
        for group in everything.groups
        for rank in unpack_ranks(group)
    )
    return alike and (len(everything.groups) == 1 or not _values(results, everything)[1])


def _name_unequal(packed: list[bytes]) -> bytes:
    """Which values differ, by key and ranks. Ranks with equal values are looked at once."""
    versions: dict[bytes, list[int]] = {}
    for rank, data in enumerate(packed):
        versions.setdefault(data, []).append(rank)
    groups = [(tuple(ranks), _VALUES.decode(data)) for data, ranks in versions.items()]
    lines = merge_values(groups)[1]
    more = [f"and {len(lines) - _SHOWN} more"] if len(lines) > _SHOWN else []
    return ("values that should be equal on all ranks are not:\n  " + "\n  ".join([*lines[:_SHOWN], *more])).encode()


def save_state(
    state: Any, store: Store, comm: Comm, options: SaveOptions, describing: Callable[[], Described] | None = None
) -> Receipt:
    """Save `state` from all ranks of `comm`. Atomic and durable; raises the same error on every rank, leaving nothing.

    `describing` says what this rank holds, where that is not what `state` shows.
    """
    return _Save(state, store, comm, options, describing).run()


def refuse(store: Store, comm: Comm, error: BaseException) -> NoReturn:
    """Take part in a save, in order to fail: the other ranks make one, and this rank has met an error. Raises it, on all."""

    def fail() -> Described:
        raise error

    save_state(None, store, comm, make_options(), fail)
    raise error
