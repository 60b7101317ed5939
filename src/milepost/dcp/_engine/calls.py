"""How every function of this package saves and loads."""

from collections.abc import Callable
from functools import cache, partial
from typing import Any

from milepost.comm import TIMEOUT_S, Announcement, Call, Comm, broadcast, calling, operating_on
from milepost.comm.base import Solo
from milepost.comm.distributed import ranks_of
from milepost.dcp._engine.saved_metadata import SavedMetadata, metadata_at
from milepost.dcp.api import raising_checkpoint_exceptions
from milepost.errors import RanksDisagree
from milepost.planning.local_plan import save_by_local_plans
from milepost.planning.protocol_run import MakeState, Pickles, place_of, save_planned
from milepost.planning.records import Metadata
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, route
from milepost.planning.route_run import load_with_planner
from milepost.saving.options import make_options

_ENDING = Announcement("ending", Pickles())


def comm_of(process_group: Any, no_dist: bool, coordinator_rank: int = 0) -> Comm:
    """The ranks of a call: this process alone with `no_dist`, or where there is no process group."""
    return Solo() if no_dist else ranks_of(process_group, TIMEOUT_S, coordinator_rank)


def save_with(state: MakeState, storage_writer: Any, planner: Any, comm: Comm) -> Metadata:
    """Save with planners and storage of either side. Raises CheckpointException, the same on every rank."""
    state = cache(state)
    with raising_checkpoint_exceptions("save", comm):
        chosen = route(storage_writer, planner)
        place = place_of(chosen.writer)
        with calling(comm, Call("saving to", place)), operating_on(comm, "save", place, wraps=True):
            if isinstance(chosen, GlobalPlanner):
                return _save_by_global_plan(state, chosen, comm)
            return _save_by_local_plans(state, chosen, comm)


def _save_by_local_plans(state: MakeState, chosen: NoPlanner | LocalPlanner, comm: Comm) -> Metadata:
    writer = chosen.writer
    try:
        receipt = save_by_local_plans(state, chosen, comm, make_options())
    except RanksDisagree:
        # DCP takes one rank's and is silent. Written again: the ranks had shared out the writing of what is equal.
        try:
            receipt = save_by_local_plans(state, chosen, comm, make_options(on_difference="warn"))
        except RanksDisagree:
            return _save_of_the_lowest(state, chosen, comm)  # or it says what cannot be saved at all
    if receipt is None:
        return _save_by_global_plan(state, GlobalPlanner(writer, chosen.planner), comm)
    return SavedMetadata(partial(metadata_at, writer.store, receipt.generation))


def _save_of_the_lowest(state: MakeState, chosen: NoPlanner | LocalPlanner, comm: Comm) -> Metadata:
    """Save what ranks have in common from the lowest rank that has it."""
    planner = chosen.planner
    kept, planner.dedup_save_to_lowest_rank = planner.dedup_save_to_lowest_rank, True
    try:
        return _save_by_global_plan(state, GlobalPlanner(chosen.writer, planner), comm)
    finally:
        planner.dedup_save_to_lowest_rank = kept


def _save_by_global_plan(state: MakeState, chosen: GlobalPlanner, comm: Comm) -> Metadata:
    made = save_planned(state, chosen.writer, chosen.planner, comm)
    metadata = broadcast(comm, Call("saving to", place_of(chosen.writer)), _ENDING, lambda: made)
    return metadata if made is None else made


def load_with(
    state: MakeState, storage_reader: Any, planner: Any, comm: Comm, apply: Callable[[], None] = lambda: None
) -> None:
    """Load into the state, and then `apply`. Raises CheckpointException, the same on every rank."""
    with raising_checkpoint_exceptions("load", comm):
        load_with_planner(state, apply, storage_reader, planner, comm)
