"""Saves and loads by the planner protocol: every rank plans, the coordinator decides, storage writes or reads.

Plans travel between the ranks of one job as pickles, through the store that the job was started with; nothing of a
checkpoint is ever unpickled.
"""

import inspect
import logging
import pickle
from collections.abc import Callable
from types import NoneType
from typing import Any, NamedTuple, TypeVar

from milepost.comm import Call, Comm, Meeting, calling, meet, operating_on, together
from milepost.core.history import phase_times
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, InvalidRequest
from milepost.events.operation import WAITING, Operation, phasing
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import LoadPlan, Metadata, SavePlan, WriteResult

_log = logging.getLogger("milepost")
T = TypeVar("T")
MakeState = Callable[[], dict[str, Any]]
"""Gives the state. Called in the first step, so that what fails in there, on one rank, reaches all."""


class Pickles:
    """Plans and results as pickles: they hold whatever a planner puts into them, and travel inside one job."""

    def pack(self, value: Any) -> bytes:
        """The value as a pickle."""
        return pickle.dumps(value)

    def unpack(self, data: bytes) -> Any:
        """The value of a pickle from another rank of this job."""
        return pickle.loads(data)  # noqa: S301  # from a rank of this job


_PICKLES = Pickles()
_PLANNING = Meeting("planning", _PICKLES, Wire(NoneType))
_HANDING_OUT = "planning, handing out"
_WRITING = Meeting("writing", _PICKLES, Wire(tuple[int, int]), deciding="committing")
_READING, _APPLYING = "reading", "applying"


class StalePlans(InvalidRequest):
    """Inside a save: ranks refer to kept plans that the coordinator's planner does not have."""


class _Planned(NamedTuple):
    """A plan on its way, with the name of the global plan that what its planner keeps belongs to."""

    plan: SavePlan
    agreement: str


class _RankResults(NamedTuple):
    """What a rank wrote, and the seconds of its phases."""

    results: list[WriteResult]
    times: bytes


def save_planned(state: MakeState, writer: StorageWriter, planner: SavePlanner, comm: Comm) -> Metadata | None:
    """Save by plans. Gives the metadata on the coordinator, None elsewhere. Raises the same error on every rank."""
    try:
        place = place_of(writer)
        with calling(comm, Call("saving to", place)) as call, operating_on(comm, "save", place) as operation:
            try:
                return _save(state, writer, planner, comm, call, operation)
            except CheckpointError as error:
                if not (isinstance(planner, DefaultSavePlanner) and is_of(error, StalePlans)):
                    raise
            planner.forget_plans()
            return _save(state, writer, planner, comm, call, operation)
    except BaseException as error:
        _abort(writer, error)
        raise


def is_of(error: CheckpointError, kind: type[CheckpointError]) -> bool:
    """Whether a rank met an error of this kind. The same on every rank."""
    return isinstance(error, kind) or kind.__name__ in {failure.kind for failure in error.failures.values()}


def _save(
    state: MakeState, writer: StorageWriter, planner: SavePlanner, comm: Comm, call: Call, operation: Operation
) -> Metadata | None:
    made: list[Metadata] = []
    keeps = planner if isinstance(planner, DefaultSavePlanner) else None
    is_coordinator = comm.rank == comm.coordinator

    def plan_here() -> _Planned:
        set_up(planner.set_up_planner, state(), storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
        set_up(writer.set_up_storage_writer, is_coordinator, rank=comm.rank, use_collectives=True)
        plan = planner.create_local_plan()
        if keeps is not None:
            plan = keeps.unless_unchanged(plan)
        return _Planned(writer.prepare_local_plan(plan), keeps.agreement if keeps is not None else "")

    def plan_all(sent: list[_Planned]) -> list[_Planned]:
        local = [one.plan for one in sent]
        if keeps is not None:
            _check_agreement(sent, keeps)
        plans, metadata = planner.create_global_plan(local)
        if keeps is not None:
            plans = keeps.whole_plans(plans, local)
        made.append(metadata)
        return [_Planned(plan, keeps.agreement if keeps else "") for plan in writer.prepare_global_plan(plans)]

    final: _Planned = _deal(comm, call, plan_here, plan_all)

    def write() -> _RankResults:
        plan = planner.finish_plan(final.plan)
        if keeps is not None:
            keeps.agreement = final.agreement
        results = writer.write_data(plan, planner).wait()
        return _RankResults(results, operation.packed_times())

    def finish(brought: list[_RankResults]) -> tuple[int, int]:
        operation.timings = phase_times([one.times for one in brought])
        results = [one.results for one in brought]
        writer.finish(made[0], results)
        return getattr(writer, "generation", 0), sum(one.size_in_bytes for rank in results for one in rank)

    operation.commit(*meet(comm, call, _WRITING, write, finish))
    return made[0] if made else None


def _check_agreement(sent: list[_Planned], planner: DefaultSavePlanner) -> None:
    """Raise StalePlans if a rank says "as before" about a save that this coordinator's planner has no plans of.

    So it is where one planner serves several groups of ranks, or where a program dropped the plans of one rank.
    """
    known = planner.agreement if planner.remembers(len(sent)) else None
    stale = [rank for rank, one in enumerate(sent) if not one.plan.usable and one.agreement != known]
    if stale:
        raise StalePlans(f"ranks {stale} refer to plans of a save that the coordinator's planner does not know")


def load_planned(
    state: MakeState, apply: Callable[[], None], reader: StorageReader, planner: LoadPlanner, comm: Comm
) -> None:
    """Load by plans, into the state, and then `apply`. Raises the same error on every rank."""
    place = place_of(reader)
    with calling(comm, Call("loading", place)) as call, operating_on(comm, "load", place):
        _load(state, apply, reader, planner, comm, call)


def _load(
    state: MakeState, apply: Callable[[], None], reader: StorageReader, planner: LoadPlanner, comm: Comm, call: Call
) -> None:
    is_coordinator = comm.rank == comm.coordinator
    # Where the reader can: all ranks read what the coordinator finds, though a save may replace it meanwhile.
    join = getattr(reader, "open_together", None)
    if callable(join):
        join(comm)

    def plan_here() -> LoadPlan:
        metadata = set_up(reader.read_metadata, rank=comm.rank)
        set_up(planner.set_up_planner, state(), metadata=metadata, is_coordinator=is_coordinator)
        set_up(reader.set_up_storage_reader, metadata, is_coordinator, rank=comm.rank, use_collectives=True)
        return reader.prepare_local_plan(planner.create_local_plan())

    def plan_all(local: list[LoadPlan]) -> list[LoadPlan]:
        return reader.prepare_global_plan(planner.create_global_plan(local))

    def read(plan: LoadPlan) -> None:
        reader.read_data(planner.finish_plan(plan), planner).wait()

    if _plans_alone(planner, reader):
        # As if the plan had travelled: a planner must not find its own objects changed behind its back.
        together(comm, call, _READING, lambda: read(_PICKLES.unpack(_PICKLES.pack(plan_here()))))
    else:
        final: LoadPlan = _deal(comm, call, plan_here, plan_all)
        together(comm, call, _READING, lambda: read(final))
    together(comm, call, _APPLYING, apply)


def _plans_alone(planner: LoadPlanner, reader: StorageReader) -> bool:
    """Whether no rank's reads depend on those of others: then no plans are gathered."""
    return (
        type(planner).create_global_plan is DefaultLoadPlanner.create_global_plan
        and getattr(reader, "needs_global_plan", True) is False
    )


def _deal(comm: Comm, call: Call, work: Callable[[], T], decide: Callable[[list[T]], list[T]]) -> T:
    """Bring what all ranks worked out to the coordinator, and to each rank what the coordinator decided for it."""
    notes: list[bytes] = []

    def keep(local: list[T]) -> None:
        plans = decide(local)
        if len(plans) != comm.size:
            raise InvalidRequest(f"the global plan has plans for {len(plans)} ranks, and there are {comm.size}")
        notes.extend(map(_PICKLES.pack, plans))

    meet(comm, call, _PLANNING, work, keep)
    with phasing(WAITING):
        note = comm.hand_out(call.at(_HANDING_OUT), notes or None)
    dealt: T = _PICKLES.unpack(note)
    return dealt


def set_up(function: Callable[..., Any], *arguments: Any, **options: Any) -> Any:
    """Call with those options that the function takes: storage and planners of older programs take fewer."""
    known = inspect.signature(function).parameters
    everything = any(p.kind is inspect.Parameter.VAR_KEYWORD for p in known.values())
    return function(*arguments, **{name: value for name, value in options.items() if everything or name in known})


def place_of(storage: StorageWriter | StorageReader) -> str:
    """Where a storage layer is, for messages."""
    for name in ("url", "checkpoint_id", "path"):
        found = getattr(storage, name, None)
        if isinstance(found, str) or hasattr(found, "__fspath__"):
            return str(found)
    return type(storage).__name__


def _abort(writer: StorageWriter, error: BaseException) -> None:
    """Let storage remove what it has written. Storage made for torch's classes does not know how."""
    abort = getattr(writer, "abort", None)
    if not callable(abort):
        return
    try:
        abort(error)
    except Exception as trouble:  # noqa: BLE001  # the caller must hear why the save failed
        _log.warning("could not remove what an unfinished save left at %s: %s", place_of(writer), trouble)
