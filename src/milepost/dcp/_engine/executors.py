"""What runs saves of a staged state beside the training: a thread, or a process."""

import abc
import contextlib
import os
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import TYPE_CHECKING, Any, TypeVar

from milepost.background.errand import Errand
from milepost.comm import Comm
from milepost.dcp._engine.calls import comm_of, save_with
from milepost.dcp._engine.shared import TURNS
from milepost.dcp._storage_utils import storage_setup
from milepost.errors import CheckpointError
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata
from milepost.planning.stateful_dict import expand_stateful

if TYPE_CHECKING:
    import torch.distributed as dist

T = TypeVar("T")


class SaveExecutor(abc.ABC):
    """Saves a staged state beside the training."""

    @abc.abstractmethod
    def execute_save(
        self,
        staging_future_or_state_dict: "Future[dict[str, Any]] | dict[str, Any]",
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: "dist.ProcessGroup | None" = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> "Future[Metadata]":
        """Begin to save what was staged, or will be, from every rank. Gives a future of what `save` gives."""


class ThreadExecutor(SaveExecutor):
    """Saves in a thread, after earlier saves that use the same planner or storage."""

    def execute_save(
        self,
        staging_future_or_state_dict: "Future[dict[str, Any]] | dict[str, Any]",
        *,
        checkpoint_id: str | os.PathLike[str] | None = None,
        storage_writer: StorageWriter | None = None,
        planner: SavePlanner | None = None,
        process_group: "dist.ProcessGroup | None" = None,
        no_dist: bool = False,
        use_collectives: bool = True,
    ) -> "Future[Metadata]":
        """Save in a thread. A staging that failed on one rank fails the save on every rank."""
        del use_collectives
        # Apart from the calls in front, which may go on meanwhile.
        comm = comm_of(process_group, no_dist).secondary("executor")
        staged = staging_future_or_state_dict
        work = partial(_save_when_staged, staged, storage_writer, checkpoint_id, planner, comm)
        return in_thread(work, storage_writer, planner)


def in_thread(work: Callable[[], T], *shared: Any) -> "Future[T]":
    """Do the work in a thread, after the saves under way that use one of these objects."""
    future: Future[T] = Future()
    future.set_running_or_notify_cancel()
    before = TURNS.earlier(*shared)

    def run() -> T:
        wait(before)
        return work()

    def end(result: T | None, error: BaseException | None) -> None:
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]  # without an error there is a result

    TURNS.enter(future, *shared)
    Errand(run, end).start("a save")
    return future


def staged_state(staged: Any) -> dict[str, Any]:
    """The state, once it is staged, with stateful objects opened. Raises what the staging raised."""
    return expand_stateful(staged.result() if isinstance(staged, Future) else staged)


def _save_when_staged(staged: Any, storage_writer: Any, checkpoint_id: Any, planner: Any, comm: Comm) -> Metadata:
    try:
        writer = storage_setup(storage_writer, checkpoint_id, reader=False)
        return save_with(partial(staged_state, staged), writer, planner, comm)
    finally:
        with contextlib.suppress(CheckpointError):  # the job's store may be gone
            comm.close()
