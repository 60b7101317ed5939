"""`async_save` with a stager: what it copied is saved in a thread of its own."""

import contextlib
from collections.abc import Callable
from concurrent.futures import Future, wait
from functools import partial
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import AsyncSaveResponse

from milepost.background.errand import Errand
from milepost.background.ticket import Permit, Ticket
from milepost.comm import Comm
from milepost.dcp._engine.calls import save_with
from milepost.dcp._engine.shared import TURNS
from milepost.dcp._engine.stagers import AsyncStager
from milepost.dcp._storage_utils import storage_setup
from milepost.dcp.api import CheckpointException
from milepost.errors import CheckpointError, SaveCancelled
from milepost.planning.records import Metadata
from milepost.planning.stateful_dict import expand_stateful


def save_staged_by(
    ticket: Ticket,
    async_stager: AsyncStager | None,
    state_dict: dict[str, Any],
    storage_writer: Any,
    checkpoint_id: Any,
    planner: Any,
    comm: Comm,
) -> "Future[Metadata] | AsyncSaveResponse":
    """Stage with the caller's stager, or with his storage if that is one, and save what it copied in a thread.

    `comm`: the ranks, apart from the calls in front. Raises what the stager raises; the other ranks get it in their
    futures.
    """
    stager: Any = async_stager if async_stager is not None else storage_writer
    shared = (storage_writer, planner, async_stager)
    if getattr(stager, "cache_staged_state_dict", True):
        TURNS.wait(*shared)  # it may copy into the memory that an earlier save still writes from
    staged: Any = Future()
    never = staged

    def upload() -> Metadata:
        return _upload(ticket.permit, staged, storage_writer, checkpoint_id, planner, comm)

    save = _Upload(upload, shared)

    def abandon() -> None:
        """After an interrupt: let the other ranks hear of it, and return when the stager does not read the state."""
        if staged is never and not never.done():
            never.set_exception(SaveCancelled("the call that began this save was interrupted"))
        save.start()
        if isinstance(staged, Future):
            wait([staged])

    ticket.on_leave(abandon)
    try:
        # A stager that sends the state elsewhere stages another than the one to save.
        stage = getattr(stager, "stage_to_save", stager.stage)
        staged = stage(expand_stateful(state_dict))
    except Exception as error:
        # The other ranks hear of it where they wait: in their saves.
        never.set_exception(error)
        save.start()
        ticket.settle()
        raise
    save.start()
    if isinstance(staged, Future):
        ready: Future[None] = Future()
        staged.add_done_callback(partial(_pass_on, ready))
        return AsyncSaveResponse(staging_completion=ready, upload_completion=save.future)  # type: ignore[arg-type]
    if stager.should_synchronize_after_execute:
        stager.synchronize_staging()
    return save.future


class _Upload:
    """A save in a thread of its own, after those under way that use one of the same objects."""

    def __init__(self, save: Callable[[], Metadata], shared: tuple[Any, ...]) -> None:
        self.future: Future[Metadata] = Future()
        self.future.set_running_or_notify_cancel()
        before = TURNS.earlier(*shared)

        def run() -> Metadata:
            wait(before)
            return save()

        self._errand = Errand(run, self._end)
        self._shared = shared

    def start(self) -> None:
        """Start it. Starting it again does no harm."""
        self._errand.start("a save")
        TURNS.enter(self.future, *self._shared)

    def _end(self, metadata: Metadata | None, error: BaseException | None) -> None:
        if metadata is None:
            self.future.set_exception(error)
        else:
            self.future.set_result(metadata)


def _upload(permit: Permit, staged: Any, storage_writer: Any, checkpoint_id: Any, planner: Any, comm: Comm) -> Metadata:
    """Save what was staged. A failure to stage reaches the other ranks as a failure of this one, and is raised here."""
    in_future = isinstance(staged, Future)

    def copied() -> Any:
        made = staged.result() if in_future else staged
        permit.wait()
        return made

    try:
        writer = storage_setup(storage_writer, checkpoint_id, reader=False)
        return save_with(copied, writer, planner, comm)
    except CheckpointException as error:
        failed = staged.exception() if in_future else None
        raise failed or error from None
    finally:
        with contextlib.suppress(CheckpointError):  # the job's store may be gone
            comm.close()


def _pass_on(ready: "Future[None]", staged: "Future[Any]") -> None:
    error = staged.exception()
    if error is None:
        ready.set_result(None)
    else:
        ready.set_exception(error)
