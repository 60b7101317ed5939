"""`async_save` by the same saver as `milepost.async_save`, with futures as DCP gives them."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from milepost.background.engine import Background, SaveEngine, SaveWork
from milepost.background.pending import PendingSave
from milepost.background.staging.state_copy import copied_state
from milepost.background.ticket import Ticket
from milepost.comm import TIMEOUT_S, Comm
from milepost.comm.base import Solo
from milepost.dcp._engine.calls import comm_of, save_with
from milepost.dcp._engine.saved_metadata import SavedMetadata, metadata_at
from milepost.dcp._engine.shared import SAVERS, TURNS
from milepost.dcp._storage_utils import storage_setup
from milepost.dcp.api import checkpoint_exception, raising_checkpoint_exceptions
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import place_of
from milepost.planning.records import Metadata
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, route
from milepost.saving.describe import describe
from milepost.saving.options import make_options
from milepost.saving.pipeline import Receipt

_ALONE = Solo()
"""The ranks of a call with `no_dist`; one object, so that all such calls have the same saver."""


class AskedFuture(Future[Metadata]):
    """A future that notes whether its caller asked: an error that was not asked for is raised by the next save."""

    def __init__(self, pending: PendingSave) -> None:
        super().__init__()
        self._pending = pending

    def result(self, timeout: float | None = None) -> Metadata:
        """Wait, and give what was saved, or raise the error."""
        try:
            return super().result(timeout)
        finally:
            self._note()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """Wait, and give the error, or None."""
        try:
            return super().exception(timeout)
        finally:
            self._note()

    def _note(self) -> None:
        if self.done():
            self._pending.mark_told()


def save_in_background(
    ticket: Ticket,
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    process_group: Any,
    no_dist: bool,
    kind: AsyncCheckpointerType,
) -> "Future[Metadata]":
    """Copy the state, and save the copy by a thread or a process. Planners and storage of other kinds use a thread."""
    comm = comm_of(process_group, no_dist)
    background: Background = "process" if kind == AsyncCheckpointerType.PROCESS else "thread"
    saver = SAVERS.get(_ALONE if no_dist else process_group, background, TIMEOUT_S)
    TURNS.wait(storage_writer, planner)
    with raising_checkpoint_exceptions("save", comm):
        if storage_writer is not None or planner is not None:
            saver.join()  # it may use the same storage
        chosen = route(storage_setup(storage_writer, checkpoint_id, reader=False), planner)
        match chosen:
            case NoPlanner():
                pending, look_up = _save_staged(saver, ticket, state_dict, chosen)
            case LocalPlanner() | GlobalPlanner():
                pending, look_up = _save_copied(saver, ticket, state_dict, chosen)
    future = AskedFuture(pending)
    # In this order: what waits for its turn waits for a future that will end.
    pending.add_done_callback(lambda ended: _resolve(future, ended, look_up, comm))
    TURNS.enter(future, storage_writer, planner)
    return future


def _save_staged(
    saver: SaveEngine, ticket: Ticket, state_dict: dict[str, Any], chosen: NoPlanner
) -> tuple[PendingSave, Callable[[Receipt], Metadata]]:
    """The usual path. As in DCP, the lowest rank's is kept where ranks differ. DCP is silent about it; this warns."""
    options = chosen.options(make_options(on_difference="warn", plans=saver.plans))
    store = chosen.writer.store
    work = SaveWork(store, options, lambda comm: describe(state_dict, comm, options.codec, options.metadata))

    def look_up(receipt: Receipt) -> Metadata:
        chosen.note(receipt)
        return SavedMetadata(partial(metadata_at, store, receipt.generation))

    return saver.begin(ticket, work, "host"), look_up


def _save_copied(
    saver: SaveEngine, ticket: Ticket, state_dict: dict[str, Any], chosen: LocalPlanner | GlobalPlanner
) -> tuple[PendingSave, Callable[[Receipt], Metadata]]:
    """Planners and storage of other kinds get a copy of the state."""
    kept: list[Metadata] = []

    def write(copied: Callable[[], Any], comm: Comm) -> Receipt:
        kept.append(save_with(copied, chosen.writer, chosen.planner, comm))
        return Receipt(place_of(chosen.writer), 0, "", comm.size, 0)

    pending = saver.begin_copied(ticket, place_of(chosen.writer), lambda: copied_state(state_dict), write)
    return pending, lambda _: kept[0]


def _resolve(future: AskedFuture, ended: PendingSave, look_up: Callable[[Receipt], Metadata], comm: Comm) -> None:
    if ended.receipt is None:
        assert ended.error is not None
        future.set_exception(checkpoint_exception("save", ended.error, comm))
        return
    try:
        future.set_result(look_up(ended.receipt))
    except BaseException as error:  # noqa: BLE001  # raised where the caller asks
        future.set_exception(checkpoint_exception("save", error, comm))
