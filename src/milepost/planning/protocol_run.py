"""Saves and loads by the planner protocol: every rank plans, the coordinator decides, storage writes or reads.

Plans travel between the ranks of one job as pickles, through the store that the job was started with; nothing of a
checkpoint is ever unpickled.
"""

import inspect
import logging
import pickle
from collections.abc import Callable
from typing import Any

from milepost.comm import Comm, Phase, together
from milepost.errors import CheckpointError, InvalidRequest
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import LoadPlan, Metadata, SavePlan

_log = logging.getLogger("milepost")
MakeState = Callable[[], dict[str, Any]]
"""Gives the state. Called in the first step, so that what fails in there, on one rank, reaches all."""


def save_planned(state: MakeState, writer: StorageWriter, planner: SavePlanner, comm: Comm) -> Metadata | None:
    """Save by plans. Gives the metadata on the coordinator, None elsewhere. Raises the same error on every rank."""
    try:
        return _save(state, writer, planner, comm)
    except Exception as error:
        # Where the coordinator did not answer it may still commit, and then needs what this rank wrote.
        if comm.size == 1 or (isinstance(error, CheckpointError) and error.failures):
            _abort(writer)
        raise


def _save(state: MakeState, writer: StorageWriter, planner: SavePlanner, comm: Comm) -> Metadata | None:
    made: list[Metadata] = []
    place = place_of(writer)
    is_coordinator = comm.rank == comm.coordinator

    def plan_here() -> bytes:
        set_up(planner.set_up_planner, state(), storage_meta=writer.storage_meta(), is_coordinator=is_coordinator)
        set_up(writer.set_up_storage_writer, is_coordinator, rank=comm.rank, use_collectives=True)
        plan = planner.create_local_plan()
        if isinstance(planner, DefaultSavePlanner):
            plan = planner.unless_unchanged(plan)
        return _pack(writer.prepare_local_plan(plan))

    def plan_all(packed: list[bytes]) -> list[bytes]:
        plans, metadata = planner.create_global_plan([_unpack(data) for data in packed])
        made.append(metadata)
        return [_pack(plan) for plan in _as_many(writer.prepare_global_plan(plans), comm)]

    final = _dealt(comm, Phase("saving to", place, "planning"), plan_here, plan_all)

    def write() -> bytes:
        plan: SavePlan = planner.finish_plan(_unpack(final))
        return _pack(writer.write_data(plan, planner).wait())

    def finish(packed: list[bytes]) -> bytes:
        writer.finish(made[0], [_unpack(data) for data in packed])
        return b""

    together(comm, Phase("saving to", place, "writing"), write, finish)
    return made[0] if made else None


def load_planned(
    state: MakeState, apply: Callable[[], None], reader: StorageReader, planner: LoadPlanner, comm: Comm
) -> None:
    """Load by plans, into the state, and then `apply`. Raises the same error on every rank."""
    place = place_of(reader)
    is_coordinator = comm.rank == comm.coordinator
    # Where the reader can: all ranks read what the coordinator finds, though a save may replace it meanwhile.
    join = getattr(reader, "open_together", None)
    if callable(join):
        join(comm)

    def plan_here() -> bytes:
        metadata = set_up(reader.read_metadata, rank=comm.rank)
        set_up(planner.set_up_planner, state(), metadata=metadata, is_coordinator=is_coordinator)
        set_up(reader.set_up_storage_reader, metadata, is_coordinator, rank=comm.rank, use_collectives=True)
        return _pack(reader.prepare_local_plan(planner.create_local_plan()))

    def plan_all(packed: list[bytes]) -> list[bytes]:
        plans = planner.create_global_plan([_unpack(data) for data in packed])
        return [_pack(plan) for plan in _as_many(reader.prepare_global_plan(plans), comm)]

    def read(plan: LoadPlan) -> bytes:
        reader.read_data(planner.finish_plan(plan), planner).wait()
        return b""

    def finish() -> bytes:
        apply()
        return b""

    if _plans_alone(planner, reader):
        together(comm, Phase("loading", place, "reading"), lambda: read(_unpack(plan_here())))
    else:
        final = _dealt(comm, Phase("loading", place, "planning"), plan_here, plan_all)
        together(comm, Phase("loading", place, "reading"), lambda: read(_unpack(final)))
    together(comm, Phase("loading", place, "applying"), finish)


def _plans_alone(planner: LoadPlanner, reader: StorageReader) -> bool:
    """Whether no rank's reads depend on those of others: then nobody gathers plans."""
    return (
        type(planner).create_global_plan is DefaultLoadPlanner.create_global_plan
        and getattr(reader, "needs_global_plan", True) is False
    )


def _pack(plan: Any) -> bytes:
    return pickle.dumps(plan)


def _unpack(data: bytes) -> Any:
    return pickle.loads(data)  # noqa: S301  # from a rank of this job


def _dealt(comm: Comm, phase: Phase, work: Callable[[], bytes], decide: Callable[[list[bytes]], list[bytes]]) -> bytes:
    """Bring what all ranks worked out to the coordinator, and to each rank what the coordinator decided for it."""
    notes: list[bytes] = []

    def keep(packed: list[bytes]) -> bytes:
        notes.extend(decide(packed))
        return b""

    together(comm, phase, work, keep)
    return comm.hand_out(phase._replace(step=f"{phase.step}, handing out"), notes or None)


def _as_many(plans: list[Any], comm: Comm) -> list[Any]:
    if len(plans) != comm.size:
        raise InvalidRequest(f"the global plan has plans for {len(plans)} ranks, and there are {comm.size}")
    return plans


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


def _abort(writer: StorageWriter) -> None:
    """Let storage remove what it has written, if it knows how."""
    abort = getattr(writer, "abort", None)
    if not callable(abort):
        return
    try:
        abort()
    except Exception as error:  # noqa: BLE001  # why the save failed is what the caller has to hear
        _log.warning("could not remove what an unfinished save left at %s: %s", place_of(writer), error)
