"""Saves in the background: one at a time, by a thread or a process, from copies in memory that is kept."""

import contextlib
import logging
import os
import pickle
import threading
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Any, Literal, NoReturn, Self, TypeVar, Unpack

import torch
import torch.distributed as dist

from milepost.background.pending import PendingSave
from milepost.background.process.peers import is_broken
from milepost.background.process.supervisor import WriterSupervisor
from milepost.background.save_thread import run_in_thread
from milepost.background.staging import Owned, Stager, Staging, Way
from milepost.background.writing import StagedSave, Then, after_commit, write_by_process, write_by_thread
from milepost.comm import TIMEOUT_S, Announcement, Call, Comm, Deferred, broadcast, calling, together
from milepost.comm.distributed import address_for, ranks_of
from milepost.core.agreement import Plans
from milepost.core.option_values import check_values
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, InvalidRequest, SaveInFlight
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.protocol_run import place_of
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, ignored_by_save, route
from milepost.planning.route_run import save_with_planner, writer_at
from milepost.saving.describe import Described, describe
from milepost.saving.options import SaveKeywords, SaveOptions, make_options, one_of
from milepost.saving.pipeline import Receipt
from milepost.store import Location, Store, store_at
from milepost.store.location import required

_log = logging.getLogger("milepost")
Background = Literal["thread", "process"]
WhenBusy = Literal["wait", "refuse"]
T = TypeVar("T")
_WAYS = ("auto", "host", "device", "overlap")
_ASKING = Announcement("asking whether a save is under way", Wire(bool))


@dataclass(frozen=True, slots=True)
class SaveWork:
    """What to save. `describing` is called before the call returns; `then` at the end of the save, on every rank."""

    store: Store
    options: SaveOptions
    describing: Callable[[Comm], Described]
    then: Then | None = None


@dataclass(frozen=True, slots=True)
class _SaveCall:
    """A call of `save`, with its options checked. `wrong`: what is wrong with them, to be raised on all ranks."""

    state: Any
    path: Location | None
    options: SaveOptions
    way: Way
    optimizers: Sequence[torch.optim.Optimizer]
    then: Then | None
    wrong: Exception | None


def check_saver(background: str, stage: str, staging_bytes: int | None, when_busy: str) -> None:
    """Raise InvalidRequest for arguments that an AsyncSaver cannot have."""
    one_of("background", background, ("thread", "process"))
    one_of("when_busy", when_busy, ("wait", "refuse"))
    one_of("stage", stage, _WAYS)
    check_values({"staging_bytes": staging_bytes})


class AsyncSaver:
    """Saves in the background, one at a time. Keeps for the next save what takes time to make: memory, and a process.

    Every rank makes one, with the same arguments, and makes the same calls.

    `background`: "thread", or "process": one with low priority that Python's lock does not slow down. It finishes the
    checkpoint even if this process is killed, once `staged()` is true.
    `stage`: how the state is copied. "host": into host memory, before the call returns. "device": on the GPU, and from
    there to host memory in the background. "overlap": the call returns at once, and the copy is made while the next
    forward and backward run. The state must not change before `wait_staged()`. With `optimizer=`, `step` waits by
    itself, and what the optimizer does not own is copied before the call returns. "auto": "device" if the GPU has room
    (for two copies before the first such save, so that later ones find it too), else "overlap" if there is an
    `optimizer=`, else "host".
    `staging_bytes`: the most host memory for copies; by default what is free. What does not fit is written first, from
    where it is, while the caller waits.
    `when_busy`: what a save does while another is under way: "wait", or "refuse" (raise SaveInFlight, on all ranks).
    `process_group`, `timeout_s`: as for `milepost.save`. Nothing in the background uses the process group.

    Raises InvalidRequest for arguments that are wrong.

    >>> with milepost.AsyncSaver() as saver:
    ...     pending = saver.save({"step": 1}, "memory://saver")
    ...     receipt = pending.result()
    >>> milepost.open("memory://saver")["step"]
    1
    """

    def __init__(
        self,
        *,
        background: Background = "thread",
        stage: Way = "auto",
        staging_bytes: int | None = None,
        when_busy: WhenBusy = "wait",
        process_group: "dist.ProcessGroup | Comm | None" = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        ranks = ranks_of(process_group, timeout_s)
        # Separate from foreground calls. The process group is not kept: it may be destroyed before the saver is closed.
        # Before the arguments are checked: if they are wrong on one rank only, its next saver still meets the others'.
        self._comm, self._asking = ranks.secondary("saving"), ranks.secondary("asking")
        check_saver(background, stage, staging_bytes, when_busy)
        self._background: Background = background
        self._when_busy: WhenBusy = when_busy
        self._stage: Way = stage
        in_process = background == "process"
        self._stager = Stager(shared=in_process, limit_bytes=staging_bytes)
        self._processes = (
            WriterSupervisor(self._comm, address_for(ranks.group), self._stager.arena) if in_process else None
        )
        self._current: PendingSave | None = None
        self._hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._closed = False
        self._process = os.getpid()
        self.plans = Plans()

    def save(
        self,
        state: Any,
        path: Location | None = None,
        *,
        stage: Way | None = None,
        optimizer: "torch.optim.Optimizer | Sequence[torch.optim.Optimizer] | None" = None,
        planner: SavePlanner | None = None,
        storage_writer: StorageWriter | None = None,
        then: Then | None = None,
        **options: Unpack[SaveKeywords],
    ) -> PendingSave:
        """Begin to save `state` at `path`, from every rank. Returns when the caller may go on, as `stage` says.

        The state is saved as it is now; later changes do not matter.

        `stage`: for this save. `optimizer`: those that change the state; their `step` waits until it is copied.
        `then`: called on every rank, in the background, after the commit. `options`: those of `milepost.save`.
        `planner`, `storage_writer`: as for `milepost.save`; other kinds than the default ones get a copy of the state
        dict, in a thread.

        Raises the error of an earlier save that the caller did not ask for; then nothing is saved. Raises
        InvalidRequest for a wrong option; the other ranks get it from `result()`. All other errors are in `result()`,
        the same on every rank; in a job of one process, a state that cannot be saved is refused here.
        """
        wrong: Exception | None = None
        try:
            check_values({"then": then, "optimizer": optimizer, "planner": planner, "storage_writer": storage_writer})
            way: Way = self._stage if stage is None else one_of("stage", stage, _WAYS)
            keywords: SaveKeywords = {"plans": self.plans, **options}
            made = make_options(**keywords)
        except Exception as error:  # noqa: BLE001  # raised below, once the other ranks can hear of it
            way, made, wrong = self._stage, make_options(), error
        optimizers = [] if optimizer is None else list(optimizer) if isinstance(optimizer, Sequence) else [optimizer]
        call = _SaveCall(state, path, made, way, optimizers, then, wrong)
        if planner is None and storage_writer is None:
            work = SaveWork(store_at(required(path)), made, _describing(state, made), then)
            return self.begin(work, way, optimizers, refused=wrong)
        return self._save_with(call, planner, storage_writer, options)

    def _save_with(
        self, call: _SaveCall, planner: SavePlanner | None, storage_writer: StorageWriter | None, given: SaveKeywords
    ) -> PendingSave:
        self.check_open()
        writer = storage_writer if storage_writer is not None else writer_at(required(call.path), call.options)
        chosen = route(writer, planner)
        ignored = ignored_by_save(given, chosen, own_writer=storage_writer is not None)
        call = replace(call, wrong=call.wrong or ignored)
        match chosen:
            case NoPlanner():
                chosen.writer.reset(call.path)
                made = chosen.options(call.options)
                work = SaveWork(chosen.writer.store, made, _describing(call.state, made), call.then)
                pending = self.begin(work, call.way, call.optimizers, refused=call.wrong)
                pending.add_done_callback(lambda ended: _note(chosen, ended))
                return pending
            case LocalPlanner() | GlobalPlanner():
                return self._save_planned(call, chosen)

    def _save_planned(self, call: _SaveCall, chosen: LocalPlanner | GlobalPlanner) -> PendingSave:
        from milepost.background.staging.state_copy import copied_state  # noqa: PLC0415  # slow to import

        state, path, options, then = call.state, call.path, call.options, call.then

        def write(copied: Callable[[], Any], comm: Comm) -> Receipt:
            chosen.writer.reset(path)  # type: ignore[arg-type]  # a writer of the caller accepts the caller's paths
            receipt = save_with_planner(copied, chosen, comm, options)
            after_commit(comm, receipt.url, then)
            return receipt

        place = str(path) if path is not None else place_of(chosen.writer)
        return self.begin_copied(place, lambda: copied_state(state), write, refused=call.wrong)

    def refuse(self, path: Location, error: BaseException) -> NoReturn:
        """Join the save that the other ranks begin, and fail it with this error on all ranks.

        Raises the error, or that of an earlier save that the caller did not ask for.
        """
        options = make_options()
        self.begin(SaveWork(store_at(path), options, _describing({}, options)), refused=error)
        raise error

    def prewarm(self, state: Any, **options: Unpack[SaveKeywords]) -> None:
        """Make the memory that `state` needs, and start the process, so that the first save is as fast as later ones.

        Every rank calls it, and waits for the others. `options`: those of `save` that say how to describe a state
        (`types`, `allow_pickle`, `reduce_partial`). Raises the error of any rank on every rank, among these
        InvalidRequest for a wrong option, and the error of an earlier save that the caller did not ask for.
        """
        self.check_open()
        earlier = self.take_error()

        def make_memory() -> None:
            if earlier is not None:
                raise earlier
            self._stager.prewarm(_describing(state, make_options(**options))(self._comm))

        together(self._comm, Call("saving in", "the background"), "prewarming", make_memory)
        if self._processes is not None:
            self._processes.prewarm()

    def wait(self) -> None:
        """Return when no save is under way. Raises the error of the last one, if the caller did not ask for it."""
        self.check_open()
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Wait until no save is under way. Gives the error of the last one, if the caller did not ask for it before."""
        if self._current is None or self._forked:
            return None
        self._current.join()
        error = self._current.untold_error
        self._current.mark_told()
        return error

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        if self._current is not None and not self._forked:
            self._current.join()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self._current is not None and not self._current.done()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, and the caller did not ask for its error."""
        return self._current is not None and self._current.untold_error is not None

    def close(self) -> None:
        """Wait, and give memory and process back. May be called twice; then saves raise InvalidRequest.

        Raises the error of the last save, if the caller did not ask for it.
        """
        error = self.take_error()
        self.release()
        if error is not None:
            raise error

    def release(self) -> None:
        """Wait, and give memory and process back. An error that the caller did not ask for stays: `close` raises it."""
        if self._closed:
            return
        self.join()
        self._closed = True
        if self._forked:
            return
        for handle in self._hooks.values():
            handle.remove()
        if self._processes is not None:
            self._processes.close()
        self._stager.free()
        with contextlib.suppress(CheckpointError):  # the job's store may be gone
            self._comm.close()
            self._asking.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        try:
            self.close()
        except Exception as failed:  # noqa: BLE001  # the error that is on its way must not be hidden
            _log.error("a save in the background failed too: %s", failed, exc_info=failed)

    # For callers inside Milepost that pass a description of the state, or their own function for writing.

    def begin(
        self,
        work: SaveWork,
        way: Way = "auto",
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        refused: BaseException | None = None,
    ) -> PendingSave:
        """Begin a save. Returns when the caller may go on. Raises an earlier error, or `refused`, on all ranks."""
        store = b""
        if self._background == "process":
            try:
                store = _pickled(work.store)
            except InvalidRequest as error:
                refused = refused or error
        wrong = self._make_room(work.store.url) or refused
        if wrong is not None:
            self._fail(work.store.url, lambda pending: self._save(_staged(pending, work, store, Deferred(None, wrong))))
            raise wrong
        staging: Staging | None = None
        trouble: Exception | None = None
        try:
            described = work.describing(self._comm)
            staging = self._stager.begin(described, way, Owned(optimizers) if optimizers else None)
        except Exception as error:
            if self._comm.size == 1:
                raise
            trouble = error  # raised on the others in the background, where they wait
        work = replace(work, describing=_was_described)  # which would keep the state
        url = work.store.url
        pending = PendingSave(url, staging.done, staging.unread) if staging else PendingSave(url, _set())
        self._hook(optimizers)
        self._run(pending, lambda: self._save(_staged(pending, work, store, Deferred(staging, trouble))))
        if staging is not None:
            staging.at_return.wait()
        return pending

    def begin_copied(
        self,
        url: str,
        copy: Callable[[], T],
        write: Callable[[Callable[[], T], Comm], Receipt],
        *,
        refused: BaseException | None = None,
    ) -> PendingSave:
        """Begin a save of a copy: `copy` is called now, `write` in a thread. Raises as `begin` does."""
        wrong = self._make_room(url) or refused
        if wrong is not None:
            self._fail(url, lambda _: write(_raising(wrong), self._comm))
            raise wrong
        try:
            copied = _giving(copy())
        except Exception as error:
            if self._comm.size == 1:
                raise
            copied = _raising(error)
        pending = PendingSave(url, _set())
        self._run(pending, lambda: write(copied, self._comm))
        return pending

    def _fail(self, url: str, take_part: Callable[[PendingSave], Receipt]) -> None:
        """Raise this rank's error on the other ranks too, which wait in the background."""
        if self._comm.size > 1:
            pending = PendingSave(url, _set())
            pending.mark_told()
            self._run(pending, lambda: take_part(pending))

    def _run(self, pending: PendingSave, save: Callable[[], Receipt]) -> None:
        run_in_thread(pending, save)
        self._current = pending

    def _save(self, save: StagedSave) -> Receipt:
        with calling(self._comm, Call("saving to", save.store.url)):
            return self._write(save)

    def _write(self, save: StagedSave) -> Receipt:
        try:
            processes = self._processes
            receipt = write_by_thread(save, self._comm) if processes is None else write_by_process(save, processes)
        except BaseException as error:
            if self._processes is not None and is_broken(error):
                self._processes.stop(broken=error)
            raise
        finally:
            if save.staging.result is not None:
                save.staging.result.release()
                save.staging.result.forget()
        after_commit(self._comm, save.store.url, save.then)
        return receipt

    def _make_room(self, url: str) -> BaseException | None:
        """Wait until no save is under way, or refuse, on all ranks. Gives an error that the caller did not ask for."""
        self.check_open()
        last = self._current
        refuses, call = self._when_busy == "refuse", Call("saving to", url)
        if refuses and broadcast(self._asking, call, _ASKING, lambda: last is not None and last.under_way):
            earlier = last.url if last is not None else "another place"
            raise SaveInFlight(f"the save to {earlier} is under way; wait for it, or save to {url} later")
        return self.take_error()

    def check_open(self) -> None:
        """Raises InvalidRequest after `close`, and in a fork of the process."""
        if self._closed:
            raise InvalidRequest("this saver is closed")
        if self._forked:
            raise InvalidRequest(
                f"this saver belongs to process {self._process}, and this is a fork; make another here"
            )

    @property
    def _forked(self) -> bool:
        """Whether this is a copy in a fork: it has no thread that saves, and the writing process is the parent's."""
        return os.getpid() != self._process

    def _hook(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let these optimizers wait, before each step, until the state may be changed."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._wait_unread)

    def _wait_unread(self, *_: Any) -> None:
        # Errors are raised elsewhere. Here it only matters that the state is no longer read.
        if self._current is not None and not self._forked:
            self._current.join_reading()


def _note(chosen: NoPlanner, ended: PendingSave) -> None:
    if ended.receipt is not None:
        chosen.note(ended.receipt)


def _describing(state: Any, options: SaveOptions) -> Callable[[Comm], Described]:
    return lambda comm: describe(state, comm, options.codec, options.metadata, options.reduce_partial)


def _was_described(_: Comm) -> NoReturn:
    raise AssertionError


def _staged(pending: PendingSave, work: SaveWork, store: bytes, staging: Deferred[Staging]) -> StagedSave:
    options = replace(work.options, cancelled=pending.cancelled)
    return StagedSave(pending, work.store, store, options, staging, work.then)


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _giving(value: T) -> Callable[[], T]:
    """A function that gives the value once, and then does not keep it."""
    return [value].pop


def _raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> NoReturn:
        raise error

    return fail


def _pickled(store: Store) -> bytes:
    try:
        return pickle.dumps(store)
    except Exception as error:
        raise InvalidRequest(
            f"a process cannot save to {store.url}: a {type(store).__name__} belongs to this one ({error}). "
            'Use background="thread".'
        ) from error
