"""`save` and `async_save`."""

import os
import warnings
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, ParamSpec, TypeVar

from torch.distributed.checkpoint.staging import AsyncStager
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType, AsyncSaveResponse

from milepost.comm import Comm
from milepost.dcp._engine.calls import comm_of, save_with
from milepost.dcp._engine.savers import save_in_background
from milepost.dcp._engine.turns import earlier, enter, wait_for_turn
from milepost.dcp._storage_utils import storage_setup
from milepost.dcp.api import CheckpointException
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata
from milepost.planning.route import opened

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
    wait_for_turn(storage_writer, planner)
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

    Atomic and durable in Milepost's format, which is what `checkpoint_id` alone gives. What fails on any rank raises
    CheckpointException on all. `use_collectives=False` changes nothing.
    """
    del use_collectives
    wait_for_turn(storage_writer, planner)
    writer = storage_setup(storage_writer, checkpoint_id, reader=False)
    return save_with(partial(opened, state_dict), writer, planner, comm_of(process_group, no_dist))


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
    through the job's key-value store and not the process group, so training may use that meanwhile, and no CPU backend is
    needed. A save waits for the one before. What went wrong in that, if nobody asked its future, is raised here.
    Planners, storage and stagers of your own work in a thread.
    """
    del use_collectives
    if async_stager is None and not isinstance(storage_writer, AsyncStager):
        return save_in_background(
            state_dict, checkpoint_id, storage_writer, planner, process_group, no_dist, async_checkpointer_type
        )
    comm = comm_of(process_group, no_dist).secondary()
    stager: Any = async_stager
    if stager is None:
        stager = storage_writer
    shared = (storage_writer, planner, async_stager)
    if getattr(stager, "cache_staged_state_dict", True):
        wait_for_turn(*shared)  # it may copy into the memory that an earlier save still writes from
    staged: Any = Future()
    try:
        staged = stager.stage(opened(state_dict))
    except Exception as error:
        # The other ranks hear of it where they wait: in their saves.
        staged.set_exception(error)
        _in_background(partial(_upload, staged, storage_writer, checkpoint_id, planner, comm), shared)
        raise
    uploaded = _in_background(partial(_upload, staged, storage_writer, checkpoint_id, planner, comm), shared)
    if isinstance(staged, Future):
        ready: Future[None] = Future()
        staged.add_done_callback(partial(_pass_on, ready))
        return AsyncSaveResponse(staging_completion=ready, upload_completion=uploaded)  # type: ignore[arg-type]
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return uploaded


def _in_background(save: Callable[[], Metadata], shared: tuple[Any, ...]) -> "Future[Metadata]":
    """Run a save in a thread of its own, after those under way that use one of the same objects."""
    before = earlier(*shared)

    def run() -> Metadata:
        wait(before)
        return save()

    executor = ThreadPoolExecutor(1, thread_name_prefix="milepost-async-save")
    future = executor.submit(run)
    executor.shutdown(wait=False)  # it ends when the save has
    enter(future, *shared)
    return future


def _upload(staged: Any, storage_writer: Any, checkpoint_id: Any, planner: Any, comm: Comm) -> Metadata:
    """Save what was staged. A failure to stage reaches the other ranks as a failure of this one, and is raised here."""
    in_future = isinstance(staged, Future)
    try:
        writer = storage_setup(storage_writer, checkpoint_id, reader=False)
        return save_with(staged.result if in_future else lambda: staged, writer, planner, comm)
    except CheckpointException as error:
        failed = staged.exception() if in_future else None
        raise failed or error from None


def _pass_on(ready: "Future[None]", staged: "Future[Any]") -> None:
    error = staged.exception()
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)


_stateful_to_state_dict = opened


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
    wait_for_turn(storage_writer, planner)
    return save_with(lambda: state_dict, storage_writer, planner, comm_of(process_group, no_dist, coordinator_rank))
