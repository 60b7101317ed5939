"""Saves in the background: one at a time, by a thread or a process, from copies in memory that is kept."""

import atexit
import logging
import os
import pickle
import threading
import traceback
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, NoReturn, TypeVar

import torch

from milepost.background.pending import PendingSave
from milepost.background.process.client import start
from milepost.background.process.peers import Writers, is_broken
from milepost.background.staging import Owned, Stager, Staging, Way
from milepost.comm import Comm, Phase, together, told
from milepost.core.agreement import Plans
from milepost.data.transfer import check_cancelled
from milepost.errors import InvalidRequest, SaveInFlight, WriterDied
from milepost.saving.describe import Described
from milepost.saving.pipeline import Receipt, SaveOptions, save_state
from milepost.store import Store

_log = logging.getLogger("milepost")
Background = Literal["thread", "process"]
WhenBusy = Literal["wait", "refuse"]
T = TypeVar("T")
_BUSY = b"busy"


@dataclass(frozen=True, slots=True)
class Work:
    """What to save. `describing` is called before the call returns; `then` at the end of the save, on every rank."""

    store: Store
    options: SaveOptions
    describing: Callable[[Comm], Described]
    then: Callable[[Comm], None] | None = None


class BackgroundSaver:
    """Does one save at a time in the background, and keeps for the next what took time to make.

    Every rank makes the same calls. `comm`: the ranks; what happens in the background they discuss aside.
    """

    def __init__(self, comm: Comm, background: Background, limit_bytes: int | None, when_busy: WhenBusy) -> None:
        self._front, self._background, self._when_busy = comm, background, when_busy
        self._comm, self._asking = comm.secondary(), comm.secondary()
        self._stager = Stager(shared=background == "process", limit_bytes=limit_bytes)
        # It takes some seconds to start: so it begins now.
        self._link = start() if background == "process" else None
        self._writers: Writers | None = None
        self._starts = 0
        self._current: PendingSave | None = None
        self._hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._closed = False
        self._process = os.getpid()
        self.plans = Plans()

    def prewarm(self, describing: Callable[[Comm], Described]) -> None:
        """Make the memory that a state needs, and start the process. Every rank calls it, and waits for the others."""
        self.wait()

        def make_memory() -> bytes:
            self._stager.prewarm(describing(self._front))
            return b""

        if self._background == "thread":
            make_memory()
            return
        together(self._comm, Phase("saving in", "the background", "prewarming"), make_memory)
        self._choose_writers("the background")
        self._share(self._started())

    def save(self, work: Work, way: Way = "auto", optimizers: Sequence[torch.optim.Optimizer] = ()) -> PendingSave:
        """Begin a save. Returns when the caller may go on. Raises what an earlier one met and nobody asked for."""
        store = _pickled(work.store) if self._background == "process" else b""
        earlier = self._make_room(work.store.url)
        if earlier is not None:
            self._fail(work.store.url, lambda pending: self._save(pending, work, store, None, earlier))
            raise earlier
        staging: Staging | None = None
        trouble: BaseException | None = None
        try:
            described = work.describing(self._front)
            staging = self._stager.begin(described, way, Owned(optimizers) if optimizers else None)
        except Exception as error:
            if self._front.size == 1:
                raise
            trouble = error  # the others hear of it where they wait, in the background
        work = replace(work, describing=_was_described)  # which would keep the state
        url = work.store.url
        pending = PendingSave(url, staging.done, staging.unread) if staging else PendingSave(url, _set())
        self._hook(optimizers)
        self._run(pending, lambda: self._save(pending, work, store, staging, trouble))
        if staging is not None:
            staging.at_return.wait()
        return pending

    def refuse(self, work: Work, error: BaseException) -> None:
        """Take part in the save that the other ranks begin, in order to fail it with this error. Does not raise it."""
        store = _pickled(work.store) if self._background == "process" else b""
        trouble = self._make_room(work.store.url) or error
        self._fail(work.store.url, lambda pending: self._save(pending, work, store, None, trouble))

    def _fail(self, url: str, take_part: Callable[[PendingSave], Receipt]) -> None:
        """Let the others, who wait in the background, hear of an error that is raised here."""
        if self._front.size > 1:
            pending = PendingSave(url, _set())
            pending.mark_told()
            self._run(pending, lambda: take_part(pending))

    def save_copied(
        self, url: str, copy: Callable[[], T], write: Callable[[Callable[[], T], Comm], Receipt]
    ) -> PendingSave:
        """Begin a save of what planners and storage of other kinds need: `copy` is called now, `write` in a thread."""
        earlier = self._make_room(url)
        if earlier is not None:
            self._fail(url, lambda _: write(_raising(earlier), self._comm))
            raise earlier
        try:
            copied = _giving(copy())
        except Exception as error:
            if self._front.size == 1:
                raise
            copied = _raising(error)
        pending = PendingSave(url, _set())
        self._run(pending, lambda: write(copied, self._comm))
        return pending

    def _run(self, pending: PendingSave, work: Callable[[], Receipt]) -> None:
        todo = [work]  # taken out, so that nothing keeps the state when an error keeps this function's frame

        def run() -> None:
            receipt, failed = None, None
            try:
                receipt = todo.pop()()
            except BaseException as error:  # noqa: BLE001  # it is raised where somebody asks
                failed = error
                _forget_frames(error)
            finally:
                if failed is not None:
                    _failed[:] = [*(one for one in _failed if one.untold_error), pending]
                pending.end(receipt, failed)

        # Not a daemon: the interpreter waits for it before it ends.
        thread = threading.Thread(target=run, name="milepost-save")
        try:
            thread.start()
        except RuntimeError as error:  # a limit, or the interpreter is about to end; other ranks wait for this one
            _log.warning("%s: the save to %s is made in front", error, pending.url)
            run()
        self._current = pending

    def _save(
        self, pending: PendingSave, work: Work, store: bytes, staging: Staging | None, trouble: BaseException | None
    ) -> Receipt:
        options = replace(work.options, cancelled=pending.cancelled)
        try:
            if self._background == "process":
                receipt = self._by_process(pending, work, store, staging, trouble, options)
            else:
                receipt = self._by_thread(self._comm, work.store, staging, trouble, options)
        except BaseException as error:
            if is_broken(error):
                self._stop_writers(broken=True)
            raise
        finally:
            if staging is not None:
                staging.release()
                staging.forget()
        finish(self._comm, work.store.url, work.then)
        return receipt

    def _by_thread(
        self, comm: Comm, store: Store, staging: Staging | None, trouble: BaseException | None, options: SaveOptions
    ) -> Receipt:
        def describing() -> Described:
            if staging is None:
                assert trouble is not None
                raise trouble
            staging.copy()
            staging.settle()
            check_cancelled(options.cancelled)
            return staging.described()

        return save_state(None, store, comm, options, describing)

    def _by_process(
        self,
        pending: PendingSave,
        work: Work,
        store: bytes,
        staging: Staging | None,
        trouble: BaseException | None,
        options: SaveOptions,
    ) -> Receipt:
        if staging is not None and staging.fits():
            try:
                staging.copy()
                check_cancelled(options.cancelled)
            except Exception as error:  # noqa: BLE001  # raised on every rank
                staging, trouble = None, error
        self._choose_writers(work.store.url)
        if staging is None or not staging.fits():  # which it may not have done after all
            # The process could not see what is not copied: so this thread does it, and meets the others where they are.
            return self._by_thread(self._started().comm, work.store, staging, trouble, options)
        if self._writers is None:
            staging.settle()  # to start them takes seconds
        writers = self._started()
        self._share(writers)
        number = writers.hand_over(work.store.url, store, staging.slots(), options)
        staging.settle()  # after that: who dies from here on has a checkpoint
        return writers.outcome(number, options, pending)

    def _share(self, writers: Writers) -> None:
        arena = self._stager.arena
        if writers.shared_version != arena.version:
            writers.share(arena.handle, arena.capacity, arena.version)

    def _started(self) -> Writers:
        """The writing processes, which all ranks start together."""
        if self._writers is None:
            self._starts += 1
            link, self._link = self._link or start(), None
            self._writers = Writers(link, self._comm, self._front.group)
        return self._writers

    def _choose_writers(self, url: str) -> None:
        """Use the processes that the coordinator uses: those that run, or, after it has lost them, new ones."""
        mine = self._starts if self._writers is not None else self._starts + 1
        phase = Phase("saving to", url, "choosing the writing processes")
        try:
            chosen = int(told(self._comm, phase, lambda: str(mine).encode()))
        except BaseException:
            self._stop_writers(broken=True)  # the processes of others may be waiting for this save already
            raise
        if chosen > self._starts:
            self._stop_writers(broken=True)
        elif self._writers is None:
            raise WriterDied(
                "the writing process of this rank died at the end of the last save, which the others may have committed. "
                "They hear of it in this one, and the next starts new processes."
            )

    def _stop_writers(self, broken: bool = False) -> None:
        writers, self._writers = self._writers, None
        if writers is not None:
            writers.close(broken)

    def _make_room(self, url: str) -> BaseException | None:
        """Wait until no save is under way, or refuse, on all ranks alike. Gives what the last one met, if nobody asked."""
        self.check_open()
        last = self._current
        if self._when_busy == "refuse":
            phase = Phase("saving to", url, "asking whether a save is under way")
            answer = told(self._asking, phase, lambda: _BUSY if last is not None and last.under_way else b"")
            if answer == _BUSY:
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
        """Whether this is a copy in a fork: the thread that saves is not there, and the process that writes is another's."""
        return os.getpid() != self._process

    def wait(self) -> None:
        """Return when no save is under way. Raises what the last one met, if nobody has asked."""
        self.check_open()
        error = self.take_error()
        if error is not None:
            raise error

    def take_error(self) -> BaseException | None:
        """Wait until no save is under way. Gives what the last one met, if nobody has asked: now somebody has."""
        if self._current is None or self._forked:
            return None
        self._current.join()
        error = self._current.untold_error
        self._current.mark_told()
        return error

    def join(self) -> None:
        """Return when no save is under way."""
        if self._current is not None and not self._forked:
            self._current.join()

    def close(self) -> None:
        """Wait, let go of memory and process, and raise what the last save met, if nobody has asked. May be called twice."""
        if self._closed:
            return
        error = self.take_error()
        self._closed = True
        if self._forked:
            return
        for handle in self._hooks.values():
            handle.remove()
        self._stop_writers()
        if self._link is not None:
            self._link.close()
        self._stager.free()
        if error is not None:
            raise error

    def _hook(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let these optimizers wait, before each step, until the state may be changed."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(self._wait_unread)

    def _wait_unread(self, *_: Any) -> None:
        # What went wrong is told elsewhere: here it only matters that nobody reads the state any more.
        if self._current is not None and not self._forked:
            self._current.join_reading()


def finish(comm: Comm, url: str, then: Callable[[Comm], None] | None) -> None:
    """Do what comes after a commit, on every rank; what goes wrong on one is raised on all."""
    if then is None:
        return
    call = then

    def work() -> bytes:
        call(comm)
        return b""

    together(comm, Phase("saving to", url, "finishing"), work)


def _forget_frames(error: BaseException | None) -> None:
    """Let go of what the functions held that an error went through: much of the state is among it, and errors are kept."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:  # an error can be among its own causes
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]


def _set() -> threading.Event:
    event = threading.Event()
    event.set()
    return event


def _was_described(_: Comm) -> NoReturn:
    raise AssertionError


def _giving(value: T) -> Callable[[], T]:
    """What gives it once, and then does not keep it."""
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


# Saves that failed. Kept until the interpreter ends, or somebody asked: whoever made them may be gone.
_failed: list[PendingSave] = []


@atexit.register
def _report() -> None:
    """Say at the very end what nobody asked for."""
    for pending in _failed:
        error = pending.untold_error
        if error is not None:
            _log.error("the save to %s failed in the background: %s", pending.url, error, exc_info=error)
