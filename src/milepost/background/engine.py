"""What runs behind an `AsyncSaver`: one save at a time, by a thread or a process, from copies in memory that is kept.

A call of it that begins a save holds a `Ticket`. Whatever ends that call early, also an interrupt at any instruction,
leaves a record here (`_BegunCall`) of what was begun. So the save is withdrawn on all ranks, and the next one works.
"""

import contextlib
import os
import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal, NoReturn, TypeVar, Unpack

import torch
import torch.distributed as dist

from milepost.background.errand import Errand
from milepost.background.pending import PendingSave
from milepost.background.process.messages import pack_store
from milepost.background.process.peers import is_broken
from milepost.background.process.supervisor import WriterSupervisor
from milepost.background.staging import Owned, Stager, Staging, Way
from milepost.background.ticket import Permit, Ticket, granted
from milepost.background.writing import StagedSave, Then, after_commit, write_by_process, write_by_thread
from milepost.comm import (
    TIMEOUT_S,
    Announcement,
    Call,
    Comm,
    Deferred,
    Solo,
    broadcast,
    calling,
    operating_on,
    together,
)
from milepost.comm.distributed import address_for, ranks_of
from milepost.core.agreement import Plans
from milepost.core.option_values import check_values
from milepost.core.wire import Wire
from milepost.data.threads import Latch
from milepost.errors import CheckpointError, InvalidRequest, SaveCancelled, SaveInFlight
from milepost.events.operation import Operation, phasing
from milepost.saving.describe import Described, describe
from milepost.saving.options import SaveKeywords, SaveOptions, make_options, one_of
from milepost.saving.pipeline import Receipt
from milepost.store import Location, Store, store_at

Background = Literal["thread", "process"]
WhenBusy = Literal["wait", "refuse"]
T = TypeVar("T")
WAYS = ("auto", "host", "device", "overlap")
_ASKING = Announcement("asking whether a save is under way", Wire(bool))
_PREWARMING = Call("saving in", "the background")


def check_saver(background: str, stage: str, staging_bytes: int | None, when_busy: str) -> None:
    """Raise InvalidRequest for arguments that an AsyncSaver cannot have."""
    one_of("background", background, ("thread", "process"))
    one_of("when_busy", when_busy, ("wait", "refuse"))
    one_of("stage", stage, WAYS)
    check_values({"staging_bytes": staging_bytes})


@dataclass(frozen=True, slots=True)
class SaveWork:
    """What to save. `describing` is called before the call returns; `then` at the end of the save, on every rank."""

    store: Store
    options: SaveOptions
    describing: Callable[[Comm], Described]
    then: Then | None = None


@dataclass(slots=True)
class _BegunCall:
    """What a call has begun so far. `take_part`: joins the save that the other ranks begin, to fail it."""

    url: str
    take_part: Callable[[BaseException], Any]
    earlier: PendingSave | None = None
    asked: Errand[bool] | None = None
    pending: PendingSave | None = None
    errand: Errand[Any] | None = None


class SaveEngine:
    """Saves in the background, one at a time. For callers inside Milepost; `AsyncSaver` says what the arguments mean.

    Every rank makes one, with the same arguments, and makes the same calls.
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
        self._comm: Comm = ranks.secondary("saving")
        self._asking: Comm = ranks.secondary("asking")
        check_saver(background, stage, staging_bytes, when_busy)
        self._background: Background = background
        self._when_busy: WhenBusy = when_busy
        self.stage: Way = stage
        in_process = background == "process"
        self.stager = Stager(shared=in_process, limit_bytes=staging_bytes)
        self.processes = (
            WriterSupervisor(self._comm, address_for(ranks.group), self.stager.arena) if in_process else None
        )
        self.current: PendingSave | None = None
        self._ticket: Ticket | None = None
        self._hooks: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()
        self._closed = False
        self._freeing = Errand(self._free)
        self._process = os.getpid()
        self.plans = Plans()

    # Beginning a save.

    def begin(
        self,
        ticket: Ticket,
        work: SaveWork,
        way: Way = "auto",
        optimizers: Sequence[torch.optim.Optimizer] = (),
        *,
        refused: BaseException | None = None,
    ) -> PendingSave:
        """Begin a save. Returns when the caller may go on. Raises an earlier error, or `refused`, on all ranks."""
        with operating_on(self._comm, "save", work.store.url) as operation:
            return self._begin(ticket, work, way, optimizers, refused, operation)

    def _begin(
        self,
        ticket: Ticket,
        work: SaveWork,
        way: Way,
        optimizers: Sequence[torch.optim.Optimizer],
        refused: BaseException | None,
        operation: Operation,
    ) -> PendingSave:
        store = b""
        if self._background == "process":
            try:
                store = pack_store(work.store)
            except InvalidRequest as error:
                refused = refused or error
        url, options, then, permit = work.store.url, work.options, work.then, ticket.permit

        def save(permit: Permit, staging: Deferred[Staging]) -> Receipt:
            made = replace(options, cancelled=permit.withdrawn)
            return self._save(StagedSave(permit, work.store, store, made, staging, then))

        entry = self._enter(ticket, url, lambda error: save(granted(), Deferred(None, error)))
        self._make_room(ticket, entry, refused)
        staging: Staging | None = None
        trouble: Exception | None = None
        try:
            with phasing("describing"):
                described = work.describing(self._comm)
            with phasing("staging"):
                staging = self.stager.begin(described, way, Owned(optimizers) if optimizers else None)
        except Exception as error:
            if self._comm.size == 1:
                raise
            trouble = error  # raised on the others in the background, where they wait
        work = replace(work, describing=_was_described)  # which would keep the state
        if staging is None:
            staged = unread = Latch(happened=True)
        else:
            staged, unread = staging.done, staging.unread
        pending = PendingSave(url, permit, staged, unread)
        self._hook(optimizers)
        kept = [Deferred(staging, trouble)]  # taken out, so that nothing else keeps the state
        self._run(ticket, entry, pending, lambda: save(permit, kept.pop()), operation)
        if staging is not None:
            staging.at_return.wait()
            if staging.way == "host" and self.processes is not None:
                ticket.return_after(staging.done)  # when the writing process has it
        return pending

    def begin_copied(
        self,
        ticket: Ticket,
        url: str,
        copy: Callable[[], T],
        write: Callable[[Callable[[], T], Comm], Receipt],
        *,
        refused: BaseException | None = None,
    ) -> PendingSave:
        """Begin a save of a copy: `copy` is called now, `write` in a thread. Raises as `begin` does."""
        with operating_on(self._comm, "save", url) as operation:
            return self._begin_copied(ticket, url, copy, write, refused, operation)

    def _begin_copied(
        self,
        ticket: Ticket,
        url: str,
        copy: Callable[[], T],
        write: Callable[[Callable[[], T], Comm], Receipt],
        refused: BaseException | None,
        operation: Operation,
    ) -> PendingSave:
        entry = self._enter(ticket, url, lambda error: write(_raising(error), self._comm))
        self._make_room(ticket, entry, refused)
        try:
            with phasing("staging"):
                copied = _giving(copy())
        except Exception as error:
            if self._comm.size == 1:
                raise
            copied = _raising(error)

        def save() -> Receipt:
            try:
                ticket.permit.wait()
            except SaveCancelled as error:
                return write(_raising(error), self._comm)
            return write(copied, self._comm)

        pending = PendingSave(url, ticket.permit, Latch(happened=True))
        self._run(ticket, entry, pending, save, operation)
        return pending

    def refuse(self, ticket: Ticket, path: Location, error: BaseException) -> NoReturn:
        """Join the save that the other ranks begin, and fail it with this error on all ranks.

        Raises the error, or that of an earlier save that the caller did not ask for.
        """
        options = make_options()
        self.begin(ticket, SaveWork(store_at(path), options, describing({}, options)), refused=error)
        raise error

    def prewarm(self, ticket: Ticket, state: Any, **options: Unpack[SaveKeywords]) -> None:
        """Make the memory and the process that `state` needs, with all ranks. See `AsyncSaver.prewarm`."""

        def make(described: Deferred[Described]) -> None:
            together(self._comm, _PREWARMING, "prewarming", lambda: self.stager.prewarm(described.get()))
            if self.processes is not None:
                self.processes.prewarm()

        entry = self._enter(ticket, _PREWARMING.place, lambda error: make(Deferred(None, error)))
        entry.earlier = self.current
        earlier = self.take_error()
        try:
            described = Deferred(None if earlier else describing(state, make_options(**options))(self._comm), earlier)
        except Exception as error:  # noqa: BLE001  # raised on all ranks
            described = Deferred(None, error)
        pending = PendingSave(entry.url, ticket.permit, Latch(happened=True))
        pending.mark_told()
        self._run(ticket, entry, pending, lambda: make(described))
        assert entry.errand is not None
        try:
            entry.errand.get()
        except Exception:
            ticket.settle()
            raise

    def _enter(self, ticket: Ticket, url: str, take_part: Callable[[BaseException], Any]) -> "_BegunCall":
        """Note that a call has begun. From here on, whatever ends it, the other ranks hear of it."""
        self.check_open()
        self._settle_lost()
        entry = _BegunCall(url, take_part)
        self._ticket = ticket
        ticket.on_leave(lambda: self._abandon(entry))
        return entry

    def _make_room(self, ticket: Ticket, entry: _BegunCall, refused: BaseException | None) -> None:
        """Wait until no save is under way. Raises, on all ranks, `refused` or an error that nobody asked for."""
        entry.earlier = self.current
        if self._when_busy == "refuse":
            self._ask(entry)
            assert entry.asked is not None
            entry.asked.ended.wait()
            if entry.asked.error is not None or entry.asked.result:
                ticket.settle()
                if entry.asked.error is not None:
                    raise entry.asked.error
                earlier = entry.earlier.url if entry.earlier is not None else "another place"
                raise SaveInFlight(f"the save to {earlier} is under way; wait for it, or save to {entry.url} later")
        wrong = self.take_error() or refused
        if wrong is not None:
            if self._comm.size > 1:
                self._fail(entry, wrong)
            ticket.settle()
            raise wrong

    def _ask(self, entry: _BegunCall) -> None:
        """Ask the coordinator whether a save is under way. In a thread: the others wait for what it says there."""
        last, call = entry.earlier, Call("saving to", entry.url)
        if entry.asked is None:
            entry.asked = Errand(
                lambda: broadcast(self._asking, call, _ASKING, lambda: last is not None and last.under_way)
            )
        entry.asked.start("asking the other ranks")

    def _run(
        self,
        ticket: Ticket,
        entry: _BegunCall,
        pending: PendingSave,
        save: Callable[[], Any],
        operation: Operation | None = None,
    ) -> None:
        if operation is not None:
            ticket.on_return(operation.returned)
            save = partial(operation.work, save)
        entry.pending, entry.errand = pending, Errand(save, pending.end)
        self.current = pending
        if operation is not None:
            operation.handed_over = True  # the errand ends it, also if this call is interrupted from here on
        entry.errand.start(f"the save to {entry.url}", in_front=ticket.permit.grant)

    def _fail(self, entry: _BegunCall, error: BaseException) -> None:
        """Raise this rank's error on the other ranks too, which wait in the background."""
        earlier, asked = entry.earlier, entry.asked

        def take_part() -> Any:
            if asked is not None and asked.get():
                raise error  # the others have not begun either
            if earlier is not None:
                earlier.join()
            return entry.take_part(error)

        pending = PendingSave(entry.url, granted(), Latch(happened=True))
        pending.mark_told()
        # Of this failure, the call itself tells.
        silent = Operation("save", entry.url, self._comm.rank, self._comm.size, decides=False).silenced()
        entry.pending, entry.errand = pending, Errand(partial(silent.work, take_part), pending.end)
        self.current = pending
        entry.errand.start(f"refusing the save to {entry.url}")

    def _abandon(self, entry: _BegunCall) -> None:
        """After an interrupt: let the others hear of it, and return when nobody reads the state.

        May be interrupted again, and is then called again.
        """
        if entry.errand is None:
            if self._comm.size > 1:
                if self._when_busy == "refuse":
                    self._ask(entry)
                self._fail(entry, SaveCancelled(f"the call that began the save to {entry.url} was interrupted"))
            return
        assert entry.pending is not None
        self.current = entry.pending
        entry.pending.mark_told()
        entry.errand.start(f"the save to {entry.url}")
        entry.pending.join_reading()

    def _settle_lost(self) -> None:
        """Withdraw what an earlier call began, if that was interrupted even in its clean-up."""
        ticket = self._ticket
        if ticket is not None and not ticket.settled and ticket.is_lost():
            ticket.leave()

    def _save(self, save: StagedSave) -> Receipt:
        with calling(self._comm, Call("saving to", save.store.url)):
            return self._write(save)

    def _write(self, save: StagedSave) -> Receipt:
        try:
            processes = self.processes
            receipt = write_by_thread(save, self._comm) if processes is None else write_by_process(save, processes)
        except BaseException as error:
            if self.processes is not None and is_broken(error):
                self.processes.stop(broken=error)
            raise
        finally:
            if save.staging.result is not None:
                save.staging.result.release()
                save.staging.result.forget()
        after_commit(self._comm, save.store.url, save.then)
        return receipt

    # The save under way.

    def take_error(self) -> BaseException | None:
        """Wait until no save is under way. Gives the error of the last one, if the caller did not ask for it before."""
        self.join()
        if self.current is None or self._forked:
            return None
        error = self.current.untold_error
        self.current.mark_told()
        return error

    def join(self) -> None:
        """Return when no save is under way, however it ended."""
        if self._forked:
            return
        self._settle_lost()
        if self.current is not None:
            self.current.join()

    @property
    def busy(self) -> bool:
        """Whether a save is under way."""
        return self.current is not None and not self.current.done()

    @property
    def failed(self) -> bool:
        """Whether the last save has failed, and the caller did not ask for its error."""
        return self.current is not None and self.current.untold_error is not None

    def _hook(self, optimizers: Sequence[torch.optim.Optimizer]) -> None:
        """Let these optimizers wait, before each step, until the state may be changed."""
        for optimizer in optimizers:
            if optimizer not in self._hooks:
                self._hooks[optimizer] = optimizer.register_step_pre_hook(_waiting_for(weakref.ref(self)))

    def wait_unread(self) -> None:
        """Return when the state is no longer read. Errors are raised elsewhere."""
        if self.current is not None and not self._forked:
            self.current.join_reading()

    # The end.

    def close(self) -> None:
        """Wait, and give memory and process back. Raises the error of the last save, if nobody asked for it."""
        error = self.take_error()
        self.release()
        if error is not None:
            raise error

    def release(self) -> None:
        """Wait, and give memory and process back. An error that the caller did not ask for stays: `close` raises it."""
        self.join()
        self._closed = True
        if not self._forked:
            self._freeing.start("closing the saver")
            self._freeing.get()

    def _free(self) -> None:
        for handle in list(self._hooks.values()):
            handle.remove()
        if self.processes is not None:
            self.processes.close()
        self.stager.free()
        with contextlib.suppress(CheckpointError):  # the job's store may be gone
            self._comm.close()
            self._asking.close()
        # A closed saver that is still referenced must not keep the job's store, on whose port a new job may begin.
        self._comm = self._asking = Solo()

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


def _waiting_for(engine: "weakref.ref[SaveEngine]") -> Callable[..., None]:
    """A hook that waits until the state is no longer read. It does nothing once the engine is gone."""

    def wait(*_: Any) -> None:
        found = engine()
        if found is not None:
            found.wait_unread()

    return wait


def describing(state: Any, options: SaveOptions) -> Callable[[Comm], Described]:
    """How to describe a state, by these options."""
    return lambda comm: describe(state, comm, options.codec, options.metadata, options.reduce_partial)


def _was_described(_: Comm) -> NoReturn:
    raise AssertionError


def _giving(value: T) -> Callable[[], T]:
    """A function that gives the value once, and then does not keep it."""
    return [value].pop


def _raising(error: BaseException) -> Callable[[], Any]:
    def fail() -> NoReturn:
        raise error

    return fail
