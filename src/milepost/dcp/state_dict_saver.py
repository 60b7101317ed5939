"""`save` and `async_save`."""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from milepost.background.ticket import Ticket, unless_interrupted
from milepost.dcp._engine.calls import comm_of, save_with
from milepost.dcp._engine.lent import lend
from milepost.dcp._engine.savers import save_in_background
from milepost.dcp._engine.shared import TURNS
from milepost.dcp._engine.staged import save_staged_by
from milepost.dcp._engine.stagers import AsyncStager
from milepost.dcp._storage_utils import storage_setup
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata
from milepost.planning.stateful_dict import expand_stateful

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["AsyncCheckpointerType", "AsyncSaveResponse", "async_save", "save", "save_state_dict"]

P = ParamSpec("P")
R = TypeVar("R")


def taking_storage_second(function: Callable[P, R]) -> Callable[P, R]:
    """The function, which also takes the storage as second argument, as DCP's older programs pass it."""
    names = function.__kwdefaults__ or {}
    name = "storage_writer" if "storage_writer" in names else "storage_reader"

    @wraps(function)
    def taking(*args: P.args, **kwargs: P.kwargs) -> R:
        if len(args) == 2:
            warnings.warn(f"pass {function.__name__}(..., {name}=...) by its name", stacklevel=2)
            kwargs[name] = args[1]
            args = args[:1]  # type: ignore[assignment]
        return function(*args, **kwargs)

    return taking


def save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: "dist.ProcessGroup | None" = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
) -> Metadata:
    """`save` as it was called before, with the rank that decides; stateful objects are not opened."""
    TURNS.wait(storage_writer, planner)
    storage_writer.reset()
    return save_with(lambda: state_dict, storage_writer, planner, comm_of(process_group, no_dist, coordinator_rank))


@taking_storage_second
def save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Save from every rank, or with `no_dist` from this process alone. Gives the metadata, on every rank.

    `checkpoint_id` alone gives Milepost's format: atomic and durable. An error on any rank raises CheckpointException
    on all ranks. `use_collectives=False` changes nothing.
    """
    del use_collectives
    TURNS.wait(storage_writer, planner)
    writer = storage_setup(storage_writer, checkpoint_id, reader=False)
    return save_with(partial(expand_stateful, state_dict), writer, planner, comm_of(process_group, no_dist))


def async_save(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    async_checkpointer_type: AsyncCheckpointerType = AsyncCheckpointerType.THREAD,
    async_stager: AsyncStager | None = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> "Future[Metadata] | AsyncSaveResponse":
    """Copy the state, and save the copy in a thread or a process. Gives a future of what `save` gives, or raises.

    With a stager that copies in the background: both futures, `staging_completion` and `upload_completion`. Ranks meet
    through the job's key-value store and not the process group, so training may use that meanwhile, and no CPU backend
    is needed. A save waits for the one before. If that failed, and its future was never asked, its error is raised
    here. Planners, storage and stagers of your own work in a thread.
    """
    del use_collectives

    def begin(ticket: Ticket) -> "Future[Metadata] | AsyncSaveResponse":
        if async_stager is None and not isinstance(storage_writer, AsyncStager):
            kind = async_checkpointer_type
            return save_in_background(
                ticket, state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, kind
            )
        ranks = comm_of(process_group, no_dist).secondary("staged")
        return save_staged_by(ticket, async_stager, state_dict, storage_writer, checkpoint_id, planner, ranks)

    return unless_interrupted(begin)


_stateful_to_state_dict = expand_stateful


def _save_state_dict(
    state_dict: dict[str, Any],
    storage_writer: StorageWriter,
    process_group: "dist.ProcessGroup | None" = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: SavePlanner | None = None,
    use_collectives: bool = True,
) -> Metadata:
    del use_collectives
    TURNS.wait(storage_writer, planner)
    return save_with(lambda: state_dict, storage_writer, planner, comm_of(process_group, no_dist, coordinator_rank))


lend(__name__)
