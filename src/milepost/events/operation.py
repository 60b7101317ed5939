"""One save, load, verification or removal on this rank: how long its phases took, and telling listeners about them.

Code that takes part says `with phasing("writing"):`, and nothing is handed down to it: a thread knows the operation
that it works for. Threads that work for others get theirs by `carried`. The times of phases are always kept, since they
go into the manifest. Records are made only if somebody listens.
"""

import os
import sys
import time
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any, TypeVar

import msgspec

from milepost.core.caller import Caller
from milepost.core.history import PhaseTime, pack_times
from milepost.core.statistics import Health
from milepost.events.listeners import LISTENERS
from milepost.events.log_lines import log_committed, log_ended, log_removed, wants_lines
from milepost.events.records import (
    Committed,
    Ended,
    Event,
    Failed,
    Kind,
    PhaseEnded,
    PhaseStarted,
    Removed,
    Retried,
    Skipped,
    Started,
    Waiting,
)

T = TypeVar("T")
WAITING = "waiting"
BLOCKING = "blocking"
_RANKS_NAMED = 100
_TEXT = 2000
_PATIENCE_S = 1.0
"""How long the end of an operation waits until listeners have heard that its call returned."""


class OperationSeed(msgspec.Struct, frozen=True):
    """What another process needs to go on with an operation. `began` is on a clock that all processes share."""

    id: str
    kind: Kind
    url: str
    step: int | None
    parent: str
    began: float
    times: dict[str, float]


class Operation:
    """One operation on one rank. `decides`: whether this rank is the coordinator, which writes the lines of the log."""

    def __init__(self, kind: Kind, url: str, rank: int, world: int, decides: bool, step: int | None = None) -> None:
        self.kind: Kind = kind
        self.url, self.rank, self.world, self.decides, self.step = url, rank, world, decides, step
        self.parent = ""
        self.times: dict[str, float] = {}
        self.moved: dict[str, int] = {}
        self.retries = 0
        self.began = time.perf_counter()
        self.timings: tuple[PhaseTime, ...] = ()
        """The phases of all ranks, once the coordinator has heard them."""
        self.handed_over = False
        self._muted = LISTENERS.thread.hearing  # what a listener does itself is not told to it
        self._silent = self._ended = False
        self._telling_return = False
        self._id = ""

    @property
    def id(self) -> str:
        """What ties its events together."""
        if not self._id:
            self._id = os.urandom(8).hex()
        return self._id

    @property
    def seconds(self) -> float:
        """Since it began."""
        return time.perf_counter() - self.began

    def packed_times(self) -> bytes:
        """The seconds of its phases so far, that of this thread's included, for the coordinator."""
        track = LISTENERS.thread.track
        if track is not None:
            track.flush()
        return pack_times(self.times)

    def silenced(self) -> "Operation":
        """The same without a word: another operation tells of the same call."""
        self._silent = True
        return self

    # What happens.

    def start(self) -> None:
        """Tell that it began."""
        if LISTENERS.heard:
            self.tell(Started)

    def retried(self, request: str, name: str, attempt: int, pause_s: float, reason: str) -> None:
        """Tell that a request is made again."""
        self.retries += 1
        if LISTENERS.heard:
            self.tell(Retried, request=request, name=name, attempt=attempt, pause_s=pause_s, reason=reason[:_TEXT])

    def waits(self, meeting: str, ranks: Sequence[int], since: float, waited_s: float) -> None:
        """Tell which ranks have not come."""
        named = tuple(ranks[:_RANKS_NAMED])
        self.tell(Waiting, meeting=meeting, ranks=named, missing=len(ranks), since=since, waited_s=waited_s)

    def commit(self, generation: int, size_bytes: int, health: Health | None = None, reused_bytes: int = 0) -> None:
        """Tell that the checkpoint exists, and write the lines of the log."""
        is_odd = health is not None and not health.ok
        if LISTENERS.heard or (self.decides and (is_odd or wants_lines())):
            self.tell(
                Committed,
                generation=generation,
                bytes=size_bytes,
                seconds=self.seconds,
                timings=self.timings if self.decides else (),
                health=health,
                reused_bytes=reused_bytes,
            )

    def remove(self, generation: int, size_bytes: int) -> None:
        """Tell that the checkpoint is gone, and write the line of the log."""
        if LISTENERS.heard or wants_lines():
            self.tell(Removed, generation=generation, bytes=size_bytes)

    def skip(self, step: int, reason: str) -> None:
        """Tell that a restore goes on to an older step."""
        if LISTENERS.heard:
            self.tell(Skipped, skipped=step, reason=reason[:_TEXT])

    def returned(self) -> None:
        """The call that began it returns, and it goes on in the background, unless it has failed there already."""
        self._telling_return = True
        try:
            if self._ended:
                return
            seconds = self.note_blocking()
            if LISTENERS.heard:
                now = time.time()
                self.tell(PhaseEnded, phase=BLOCKING, start=now - seconds, end=now, seconds=seconds)
        finally:
            self._telling_return = False

    def note_blocking(self) -> float:
        """Note that the call that began it has taken until now. Gives the seconds."""
        seconds = self.times[BLOCKING] = self.seconds
        return seconds

    def end(self, error: BaseException | None = None) -> None:
        """Tell how it ended, once."""
        if self._ended:
            return
        self._ended = True
        # Not while the thread of the caller tells of its return. Not a lock either: Ctrl-C could leave it locked.
        limit = time.monotonic() + _PATIENCE_S
        while self._telling_return and time.monotonic() < limit:
            time.sleep(0.001)
        if LISTENERS.heard and error is not None:
            ranks = tuple(sorted(getattr(error, "failures", ())))[:_RANKS_NAMED]
            self.tell(Failed, error=type(error).__name__, text=_text(error), ranks=ranks)
        if LISTENERS.heard or (self.decides and wants_lines()):
            moved, phases = sum(self.moved.values()), {name: round(s, 6) for name, s in self.times.items()}
            seconds, ok = self.seconds, error is None
            self.tell(Ended, ok=ok, seconds=seconds, bytes=moved, retries=self.retries, phases=phases)

    def tell(self, record: type[Event], **fields: Any) -> None:
        """Make a record of something that happened now, and give it to those who listen."""
        if self._silent:
            return
        event = record(
            time=time.time(),
            operation=self.id,
            kind=self.kind,
            url=self.url,
            rank=self.rank,
            world=self.world,
            pid=os.getpid(),
            step=self.step,
            parent=self.parent,
            **fields,
        )
        self._pass_on(event)

    def _pass_on(self, event: Event) -> None:
        if self.decides and not LISTENERS.forwards:
            _write_line(event)
        if LISTENERS.heard:
            LISTENERS.emit(event, self._muted)

    # Going on elsewhere.

    def relay(self, event: Event) -> None:
        """Pass on what a process that works for this one tells, and keep its times."""
        if isinstance(event, PhaseEnded):
            self.times[event.phase] = self.times.get(event.phase, 0.0) + event.seconds
            self.moved[event.phase] = self.moved.get(event.phase, 0) + event.bytes
        elif isinstance(event, Retried):
            self.retries += 1
        if not self._silent:
            self._pass_on(event)

    def seed(self) -> OperationSeed:
        """For a process that goes on with it."""
        return OperationSeed(self.id, self.kind, self.url, self.step, self.parent, self.began, dict(self.times))

    @staticmethod
    def grown(seed: OperationSeed, rank: int, world: int, decides: bool) -> "Operation":
        """The operation of another process, here."""
        operation = Operation(seed.kind, seed.url, rank, world, decides, seed.step)
        operation._id, operation.parent, operation.began = seed.id, seed.parent, seed.began
        operation.times.update(seed.times)
        return operation

    def part(self, work: Callable[[], T]) -> T:
        """Do a part of its work in this thread."""
        with _Tracking(self, vacant=True):
            return work()

    def work(self, work: Callable[[], T]) -> T:
        """Do its work in this thread, as one that was handed over, and end it."""
        try:
            result = self.part(work)
        except BaseException as error:
            self.end(error)
            raise
        self.end()
        return result


def _text(error: BaseException) -> str:
    try:
        return str(error)[:_TEXT]
    except Exception as trouble:  # noqa: BLE001
        return f"<its message cannot be shown: {type(trouble).__name__}>"


def _write_line(event: Event) -> None:
    if isinstance(event, Committed):
        log_committed(event)
    elif isinstance(event, Removed):
        log_removed(event)
    elif isinstance(event, Ended):
        log_ended(event)


class Track:
    """Where a thread is in an operation: in which phase, and since when. `vacant`: whether a pipeline may join it."""

    __slots__ = ("_caller", "open", "operation", "outer", "since", "vacant")

    def __init__(self, operation: Operation, vacant: bool, caller: Caller | None, outer: "Track | None") -> None:
        self.operation, self.vacant, self.outer = operation, vacant, outer
        self._caller = caller
        self.open: phasing | None = None
        self.since = 0.0

    def flush(self) -> None:
        """Count the time of the phases that are open so far."""
        now, phase = time.perf_counter(), self.open
        if phase is not None:
            phase.seconds += now - self.since
            self.since = now
        while phase is not None:
            phase.note(self.operation.times)
            phase = phase.outer

    def count(self, size_bytes: int) -> None:
        """Count bytes that were moved in this phase."""
        phase = self.open
        if phase is not None:
            moved = self.operation.moved
            moved[phase.phase] = moved.get(phase.phase, 0) + size_bytes
            phase.bytes += size_bytes

    def is_lost(self) -> bool:
        """Whether the code that it belongs to has ended without a word."""
        return self._caller is not None and self._caller.is_lost()

    def forget(self) -> None:
        """Let go of the frame of that code."""
        if self._caller is not None:
            self._caller.forget()


class _Tracking:
    """Says that this thread works for an operation. Not a generator: see `comm.together`."""

    __slots__ = ("_caller", "_operation", "_track", "_vacant")

    def __init__(self, operation: Operation, *, vacant: bool = False, caller: Caller | None = None) -> None:
        self._operation, self._vacant, self._caller = operation, vacant, caller
        self._track: Track | None = None

    def __enter__(self) -> Track:
        thread = LISTENERS.thread
        track = self._track = Track(self._operation, self._vacant, self._caller, thread.track)
        thread.track = track
        return track

    def __exit__(self, *_: object) -> None:
        track = self._track
        if track is not None:
            LISTENERS.thread.track = track.outer
            track.forget()


class operating:  # noqa: N801  # used as a function
    """Around an operation, on every rank that takes part. It is told when it begins, and how it ended.

    Inside a function that `wraps` an operation of the same kind, this is that operation: so a `Checkpointer` gives the
    step, and the pipeline the rest.
    """

    __slots__ = ("_joined", "_made", "_tracking", "_wraps")

    def __init__(
        self,
        kind: Kind,
        url: str,
        rank: int = 0,
        world: int = 1,
        *,
        decides: bool = True,
        step: int | None = None,
        wraps: bool = False,
    ) -> None:
        outer = _track_of_thread()
        self._joined = outer is not None and outer.vacant and outer.operation.kind == kind
        self._wraps = wraps
        self._tracking: _Tracking | None = None
        if self._joined:
            assert outer is not None
            self._made = outer.operation
            return
        self._made = Operation(kind, url, rank, world, decides, step)
        if outer is not None and LISTENERS.heard:
            self._made.parent = outer.operation.id

    def __enter__(self) -> Operation:
        caller = Caller(sys._getframe(1))  # noqa: SLF001  # public, but for its name
        self._tracking = _Tracking(self._made, vacant=self._wraps, caller=caller)
        self._tracking.__enter__()
        if not self._joined:
            try:
                self._made.start()
            except BaseException as error:  # Ctrl-C in a listener: others may have heard of the beginning
                self.__exit__(type(error), error, None)
                raise
        return self._made

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._tracking is not None
        self._tracking.__exit__()
        if not self._joined and not self._made.handed_over:
            self._made.end(error)


def _track_of_thread() -> Track | None:
    """What this thread works for. Left out are calls that were interrupted so that they could not clean up."""
    thread = LISTENERS.thread
    track: Track | None = thread.track
    while track is not None and track.is_lost():
        track.forget()
        thread.track = track = track.outer
    # A listener is no part of what it hears of.
    return None if track is not None and thread.hearing - track.operation._muted else track  # noqa: SLF001


def current() -> Operation | None:
    """The operation that this thread works for."""
    track: Track | None = LISTENERS.thread.track
    return None if track is None else track.operation


def moved(size_bytes: int) -> None:
    """Count bytes that this thread, or those that it waited for, moved in the phase that it is in."""
    track = LISTENERS.thread.track
    if track is not None:
        track.count(size_bytes)


def carried(work: Callable[..., T]) -> Callable[..., T]:
    """The same work, for the operation of this thread, in whatever thread it is done."""
    operation = current()
    if operation is None:
        return work

    def tracked(*arguments: Any) -> T:
        if current() is operation:
            return work(*arguments)
        with _Tracking(operation):
            return work(*arguments)

    return tracked


class phasing:  # noqa: N801  # used as a function
    """Around a phase of the operation that this thread works for, if there is one.

    The time of a phase inside another counts for the inner one only.
    """

    __slots__ = ("_noted", "_start", "_track", "bytes", "outer", "phase", "seconds")

    def __init__(self, phase: str) -> None:
        self.phase = phase
        self._track: Track | None = None

    def __enter__(self) -> None:
        track: Track | None = LISTENERS.thread.track
        if track is None:
            return
        self.seconds, self.bytes, self._noted, self._start = 0.0, 0, 0.0, 0.0
        if LISTENERS.heard:
            self._start = time.time()
            try:
                track.operation.tell(PhaseStarted, phase=self.phase)
            except BaseException:  # Ctrl-C in a listener: others may have heard of the beginning
                self._tell_end(track.operation)
                raise
        self._track, self.outer = track, track.open
        now = time.perf_counter()
        if self.outer is not None:
            self.outer.seconds += now - track.since
        track.open, track.since = self, now

    def __exit__(self, *_: object) -> None:
        track = self._track
        if track is None:
            return
        now = time.perf_counter()
        self.seconds += now - track.since
        track.open, track.since = self.outer, now
        self.note(track.operation.times)
        if self._start:
            self._tell_end(track.operation)

    def _tell_end(self, operation: Operation) -> None:
        operation.tell(
            PhaseEnded, phase=self.phase, start=self._start, end=time.time(), seconds=self.seconds, bytes=self.bytes
        )

    def note(self, times: dict[str, float]) -> None:
        """Add what was counted since the last time."""
        times[self.phase] = times.get(self.phase, 0.0) + self.seconds - self._noted
        self._noted = self.seconds
