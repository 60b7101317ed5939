"""`async_save` by the same machinery as `milepost.async_save`, with futures as DCP gives them."""

import os
from collections.abc import Callable
from concurrent.futures import Future
from functools import partial
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType

from milepost.background import BackgroundSaver, PendingSave, Work
from milepost.background.async_saving import copied_state
from milepost.comm import Comm
from milepost.dcp._engine.calls import SavedMetadata, comm_of, metadata_at, save_with
from milepost.dcp._engine.turns import enter, wait_for_turn
from milepost.dcp._storage_utils import storage_setup
from milepost.dcp.api import raising_checkpoint_exceptions
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import place_of
from milepost.planning.records import Metadata
from milepost.planning.route import is_plain, noted, options_with
from milepost.planning.torch_adapters import adapted_save_planner, adapted_writer
from milepost.saving.describe import describe
from milepost.saving.pipeline import Receipt, make_options

# One for each group of ranks and kind, made when first used: it keeps memory, and the process.
_savers: dict[tuple[Any, bool, bool], BackgroundSaver] = {}


class AskedFuture(Future[Metadata]):
    """A future that notes whether somebody asked: an error that nobody asked for is raised by the next save."""

    def __init__(self, pending: PendingSave) -> None:
        super().__init__()
        self._pending = pending

    def result(self, timeout: float | None = None) -> Metadata:
        """What was saved, or what went wrong."""
        try:
            return super().result(timeout)
        finally:
            self._note()

    def exception(self, timeout: float | None = None) -> BaseException | None:
        """What went wrong, or None."""
        try:
            return super().exception(timeout)
        finally:
            self._note()

    def _note(self) -> None:
        if self.done():
            self._pending.mark_told()


def save_in_background(
    state_dict: dict[str, Any],
    checkpoint_id: str | os.PathLike[str] | None,
    storage_writer: StorageWriter | None,
    planner: SavePlanner | None,
    process_group: Any,
    no_dist: bool,
    kind: AsyncCheckpointerType,
) -> "Future[Metadata]":
    """Copy the state, and save the copy by a thread or a process. Planners and storage of other kinds work in a thread."""
    comm = comm_of(process_group, no_dist)
    saver = _saver_for(comm, process_group, no_dist, kind)
    wait_for_turn(storage_writer, planner)
    with raising_checkpoint_exceptions("save", comm):
        saver.join()  # it may use the same storage
        writer = adapted_writer(storage_setup(storage_writer, checkpoint_id, reader=False))
        own = adapted_save_planner(planner) or DefaultSavePlanner()
        kept: list[Metadata] = []
        if is_plain(writer, own):
            assert isinstance(own, DefaultSavePlanner)
            # As DCP does: where ranks differ, the lowest counts. It is silent about it, and this warns.
            options = options_with(make_options(on_difference="warn", plans=saver.plans), own, writer)
            work = Work(writer.store, options, lambda c: describe(state_dict, c, options.codec, options.metadata))
            pending = saver.save(work, "host")

            def look_up(receipt: Receipt) -> Metadata:
                noted(writer, receipt)
                return SavedMetadata(partial(metadata_at, writer.store, receipt.generation))

        else:
            write = partial(_write, writer, own, kept)
            pending = saver.save_copied(place_of(writer), lambda: copied_state(state_dict), write)

            def look_up(receipt: Receipt) -> Metadata:
                del receipt
                return kept[0]

    future = AskedFuture(pending)
    enter(future, storage_writer, planner)
    pending.add_done_callback(lambda ended: _resolve(future, ended, look_up, comm))
    return future


def _write(
    writer: StorageWriter, planner: SavePlanner, kept: list[Metadata], copied: Callable[[], Any], comm: Comm
) -> Receipt:
    kept.append(save_with(copied, writer, planner, comm))
    return Receipt(place_of(writer), 0, "", comm.size, 0)


def _resolve(future: AskedFuture, ended: PendingSave, look_up: Callable[[Receipt], Metadata], comm: Comm) -> None:
    try:
        with raising_checkpoint_exceptions("save", comm):
            if ended.error is not None:
                raise ended.error
            assert ended.receipt is not None
            future.set_result(look_up(ended.receipt))
    except BaseException as error:  # noqa: BLE001  # raised where somebody asks
        future.set_exception(error)


def _saver_for(comm: Comm, group: Any, no_dist: bool, kind: AsyncCheckpointerType) -> BackgroundSaver:
    if group is None and not no_dist and dist.is_available() and dist.is_initialized():
        group = dist.group.WORLD
    in_process = kind == AsyncCheckpointerType.PROCESS
    key = (None if no_dist else group, no_dist, in_process)
    if key not in _savers:
        _savers[key] = BackgroundSaver(comm, "process" if in_process else "thread", None, "wait")
    return _savers[key]
