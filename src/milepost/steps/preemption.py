"""Preemption: a signal that arrives on any rank, and one last save of the same step on all ranks.

Each rank has a thread that looks at the job's board now and then. Once a rank is signalled:

1. It posts that. The threads of the others find it.
2. Each rank reports the last step that it passed, and from then on waits before it passes a later one.
3. The coordinator chooses: one more than the latest of those steps. No rank has passed it, so all can still stop there.
4. Every rank hears the choice. Those that wait go on; `reached` is True from that step on.

What a rank waits for in step 2 depends on the threads of the ranks alone, never on training. So ranks that are behind
train on up to that step. A collective that needs a waiting rank is delayed for a moment, but never blocked for good.
"""

import contextlib
import logging
import math
import os
import queue
import signal
import threading
import time
from collections.abc import Callable, Iterable, Mapping
from types import FrameType, TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, runtime_checkable

import msgspec

from milepost.comm import TIMEOUT_S, Call, Comm, Solo, together
from milepost.comm.distributed import ranks_of
from milepost.core.option_values import check_values, items_of
from milepost.core.ranks import show_ranks
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, InvalidRequest, RanksMissing
from milepost.events.listeners import LISTENERS
from milepost.events.operation import Operation
from milepost.events.records import Preempted
from milepost.steps.shelf import checked_step

if TYPE_CHECKING:
    import torch.distributed as dist

_log = logging.getLogger("milepost")
_LOOK_S = 0.5
"""How often a rank looks whether another was signalled."""
_LOOKS_PER_S = 2000
"""How many looks of all ranks together one store server is asked for: large jobs look less often."""
_MARGIN_S = 2.0
"""How much longer than the coordinator the others wait, so that its decision reaches them first."""
_END_S = 10.0
"""How long `close` waits for the thread."""
_SIGNALLED, _DECISION = "signalled", "decision"
_SILENT = "did not report"
_FAILED = "left the guard with an error"
_BEFORE_ALL, _NEVER = -math.inf, math.inf


@runtime_checkable
class Pending(Protocol):
    """A save that is under way."""

    def result(self, timeout_s: float) -> object:
        """Return once it is committed. Raises TimeoutError if that takes longer, and whatever went wrong."""


class PreemptionGuard:
    """Turns SIGTERM on any rank into one last save at the same step on all ranks.

    Make it in the main thread of every rank, after the process group. It takes over the signals at once and gives them
    back when it is closed or its `with` block ends. An earlier Python handler is called too; the default action of a
    signal is not taken. `signals=()` takes over none: this rank then only hears of the others' signals.

    `grace_s`: how long the platform lets a process live after the signal. `timeout_s`: how long the ranks wait for each
    other's report, at most half of the grace period. Reports arrive within about a second, however long a step takes.
    `process_group`: the ranks that stop together, as for `milepost.save`. Their messages go through the job's store,
    never through the process group. Every rank makes the guard, and the first ones wait for the others.

    >>> with milepost.PreemptionGuard(grace_s=60) as guard:
    ...     for step in range(3):
    ...         if guard.reached(step):
    ...             _ = guard.save(lambda: milepost.save({"step": step}, "memory://last"))
    ...             break
    ...     step, guard.preempted
    (2, False)
    """

    def __init__(
        self,
        grace_s: float = 60.0,
        *,
        signals: Iterable[int] = (signal.SIGTERM,),
        process_group: "dist.ProcessGroup | Comm | None" = None,
        timeout_s: float = 30.0,
    ) -> None:
        signals = items_of("signals", signals)
        _check(grace_s, timeout_s, signals)
        comm = ranks_of(process_group, TIMEOUT_S)
        self._grace_s = grace_s
        self._alone, self._tells = comm.size == 1, comm.rank == comm.coordinator
        self._rank, self._world = comm.rank, comm.size
        beside = comm.secondary("preemption")
        # Before any rank posts or looks: notes of an earlier guard, or of a process that is dead, must not count.
        together(beside, Call("making", "a preemption guard"), "starting", lambda: None)
        self._lookout = _Lookout(beside, min(timeout_s, grace_s / 2))
        self._handlers = _Handlers(signals, self._signalled)
        self._entered = self._closed = self._stopped = False
        self.error: Exception | None = None
        """Why the last `save` or `finish` returned False; None if it was only late."""
        if not self._alone:
            self._lookout.start()

    @property
    def preempted(self) -> bool:
        """Whether this rank, or another one that it has heard of, was signalled."""
        return self._lookout.since is not None

    @property
    def seconds_left(self) -> float | None:
        """What is left of the grace period, counted from when this rank was signalled or heard of it; None before."""
        since = self._lookout.since
        return None if since is None else max(0.0, since + self._grace_s - time.monotonic())

    def reached(self, step: int) -> bool:
        """Whether to stop at this step: True at the same step on every rank, and from then on.

        Call it on every rank with the same steps, each higher than the one before. It costs next to nothing until some
        rank is signalled; then it may wait, about a second, until the ranks have agreed. Raises RanksMissing, once, if
        that fails because ranks are dead or the store is gone: a save of all ranks would fail too.
        """
        if self._closed:
            raise InvalidRequest("this guard is closed; make a new one for each run")
        step = checked_step(step)
        stop = self.preempted if self._alone else self._lookout.stops_at(step)
        if stop and not self._stopped:
            self._stopped = True
            if self._tells:
                _log.info("preempted: stopping at step %s with %.1f s left", step, self.seconds_left or 0.0)
            if LISTENERS.heard:
                told = Operation("preempt", "", self._rank, self._world, self._tells, step)
                told.tell(Preempted, seconds_left=self.seconds_left or 0.0)
        return stop

    def save(self, call: Callable[[], object]) -> bool:
        """Run `call`, which saves, and say whether it is committed within the grace period.

        An Exception is logged, kept as `error`, and makes the result False. A call that takes too long is not stopped.
        If `call` returns a save under way, that is waited for, as by `finish`.
        """
        self.error = None
        try:
            given = call()
        except Exception as error:  # noqa: BLE001  # logged and kept
            return self._failed(error)
        if isinstance(given, Pending):
            return self.finish(given)
        if self.seconds_left == 0.0:
            _log.warning("the save took longer than the grace period of %s s, but it is committed", self._grace_s)
            return False
        return True

    def finish(self, pending: Pending) -> bool:
        """Wait for a save under way, as long as the grace period lasts (or would), and say whether it is committed.

        What goes wrong is logged and kept as `error`: TimeoutError if time was short.
        """
        self.error = None
        left = self.seconds_left
        try:
            pending.result(timeout_s=self._grace_s if left is None else left)
        except Exception as error:  # noqa: BLE001  # logged and kept
            return self._failed(error)
        return True

    def _failed(self, error: Exception) -> bool:
        self.error = error
        left = "" if self.seconds_left is None else f", with {self.seconds_left:.1f} s left of the grace period"
        _log.error("the save is not committed%s: %s: %s", left, type(error).__name__, error, exc_info=error)
        return False

    def close(self) -> None:
        """Give the signals back and end the thread. May be called twice."""
        self._close(failed=False)

    def _close(self, failed: bool) -> None:
        if not self._closed:
            # First the signals: none of them may come while the rest is done.
            self._handlers.restore()
            self._closed = True
            self._lookout.end(failed)

    def __enter__(self) -> Self:
        if self._entered or self._closed:
            raise InvalidRequest("a PreemptionGuard is used once; make a new one")
        self._entered = True
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._close(failed=error is not None)

    def _signalled(self) -> None:
        """What the signal handler does."""
        self._lookout.notice()


def _check(grace_s: float, timeout_s: float, signals: tuple[int, ...]) -> None:
    check_values({"grace_s": grace_s, "timeout_s": timeout_s})
    known = signal.valid_signals()
    if any(isinstance(number, bool) or number not in known for number in signals):
        raise InvalidRequest(f"signals are numbers of signals, such as signal.SIGTERM, not {signals!r}")
    if signals and threading.current_thread() is not threading.main_thread():
        raise InvalidRequest("signals can be taken over in the main thread only; make the PreemptionGuard there")


class _Handlers:
    """Signal handlers that call `noticed` and then the Python handler that was there before."""

    def __init__(self, signals: tuple[int, ...], noticed: Callable[[], None]) -> None:
        self._noticed, self._process = noticed, os.getpid()
        self._earlier: dict[int, Any] = {number: signal.getsignal(number) for number in signals}
        try:
            for number in signals:
                signal.signal(number, self._handle)
        except (OSError, ValueError) as error:
            self.restore()
            raise InvalidRequest(f"cannot take over the signals {signals}: {error}") from error

    def _handle(self, number: int, frame: FrameType | None) -> None:
        """Runs between any two steps of the main thread, even within itself: so no locks and no logging."""
        earlier = self._earlier[number]
        if os.getpid() != self._process:
            # A forked child (one that loads data, say) has no thread that listens: it ends as it would without a guard.
            signal.signal(number, _settable(earlier))
            os.kill(os.getpid(), number)
            return
        self._noticed()
        # Python's own for Ctrl-C is a default too, though a function.
        if callable(earlier) and not isinstance(earlier, signal.Handlers) and earlier is not signal.default_int_handler:
            earlier(number, frame)

    def restore(self) -> None:
        """Put back what was there before, but not over a handler that came after."""
        if self._earlier and threading.current_thread() is not threading.main_thread():
            raise InvalidRequest("signals can be given back in the main thread only; close the PreemptionGuard there")
        for number, earlier in self._earlier.items():
            if signal.getsignal(number) == self._handle:
                signal.signal(number, _settable(earlier))


def _settable(handler: Any) -> Any:
    """None stands for a handler that was not installed from Python, which cannot put it back."""
    return signal.SIG_DFL if handler is None else handler


class _StepReport(msgspec.Struct, frozen=True, array_like=True):
    """What a rank says once it knows of the signal, or closes: the last step that it passed."""

    step: int | float
    failed: bool = False


class _StopDecision(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers: the lowest step to stop at; or the ranks that are missing for that, and why."""

    stop_from: int | float
    absent: dict[int, str] = {}


_REPORTS = Wire(_StepReport)
_DECISIONS = Wire(_StopDecision)


def _judge(reports: Mapping[int, _StepReport | None]) -> _StopDecision:
    """The first step that no rank has passed, if all ranks have reported and are well."""
    absent = {rank: _FAILED if report else _SILENT for rank, report in reports.items() if not report or report.failed}
    if absent:
        return _StopDecision(_NEVER, absent)
    return _StopDecision(max(report.step for report in reports.values() if report) + 1)


class _Lookout:
    """The thread of one rank that hears of a signal on any rank, and agrees with the others where to stop.

    Whatever goes wrong in it is raised by the next `stops_at`.
    """

    def __init__(self, comm: Comm, patience_s: float) -> None:
        self.since: float | None = None
        """When this rank was signalled, or heard that another was."""
        self._comm: Comm = comm
        self._patience_s = patience_s
        self._pause_s = max(_LOOK_S, comm.size / _LOOKS_PER_S)
        self._margin_s = _MARGIN_S + 2 * self._pause_s
        # Unlike an Event, this may be put to by a signal handler that interrupts another use of it in the same thread.
        self._wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._changed = threading.Condition()
        # These belong to `_changed`. `_last` does not change any more once `_calm` is over: it has been reported.
        self._calm = True
        self._last: int | float = _BEFORE_ALL
        self._stop_from: int | float | None = None
        self._error: Exception | None = None
        self._ending = self._failed = False
        self._thread = threading.Thread(target=self._run, name="milepost-preemption", daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def notice(self) -> None:
        """Note the time, once, and wake the thread. Takes no lock, and may be interrupted by itself."""
        if self.since is None:
            self.since = time.monotonic()
            self._wake.put(None)

    def stops_at(self, step: int) -> bool:
        """Whether all ranks stop at this step. Waits for the decision, unless this rank has passed the step already."""
        with self._changed:
            if self._calm:
                if step < self._last:
                    raise InvalidRequest(
                        f"step {step} comes after step {self._last}; give `reached` steps that increase"
                    )
                self._last = step
                return False
            if step > self._last:
                self._changed.wait_for(lambda: self._stop_from is not None, self._left_s(2 * self._margin_s))
            error, self._error = self._error, None
            if error is not None:
                raise error
            if self._stop_from is None and step > self._last:
                raise RanksMissing(
                    "the key-value store of the job does not answer, so the ranks cannot agree where to stop"
                )
            return self._stop_from is not None and step >= self._stop_from

    def end(self, failed: bool) -> None:
        """Report to the others and end the thread. `failed`: this rank will not take part in a save."""
        self._failed = failed  # first: the thread reports it as soon as it sees that this rank ends
        self._ending = True
        if self._thread.is_alive():
            self._wake.put(None)
            self._thread.join(_END_S)
        if self._thread.is_alive():
            _log.warning(
                "the thread of the preemption guard still waits for the job's store after %s s; left alone", _END_S
            )
            return
        if self._error is not None:
            _log.warning("the preemption guard could not reach the other ranks: %s", self._error)
        with contextlib.suppress(CheckpointError):  # the job's store may be gone
            self._comm.close()
        self._comm = Solo()  # a closed guard does not keep the job's store

    def _left_s(self, margin_s: float) -> float:
        """How much longer to wait for other ranks: no longer than `patience_s` and a margin from the signal on."""
        return max(0.0, (self.since or 0.0) + self._patience_s + margin_s - time.monotonic())

    def _run(self) -> None:
        stop_from: int | float = _NEVER
        error: Exception | None = None
        try:
            self._watch()
            decision = self._agree()
            stop_from = decision.stop_from
            error = RanksMissing(_missing(decision.absent)) if decision.absent and not self._ending else None
        except Exception as met:  # noqa: BLE001  # raised by the next `stops_at`
            error = met
        with self._changed:
            self._calm, self._stop_from, self._error = False, stop_from, error
            self._changed.notify_all()

    def _watch(self) -> None:
        """Return once this rank is signalled, or hears that another was, or ends."""
        while self.since is None and not self._ending:
            with contextlib.suppress(queue.Empty):
                self._wake.get(timeout=self._pause_s)
                continue
            if self._comm.look([_SIGNALLED], 0.0)[0] is not None:
                self.notice()

    def _agree(self) -> _StopDecision:
        if self.since is not None:
            self._comm.post(_SIGNALLED, b"")
        with self._changed:
            self._calm = False  # from here on `stops_at` lets no later step pass before the decision
            report = _StepReport(self._last, self._failed)
        self._comm.post(_report_of(self._comm.rank), _REPORTS.pack(report))
        return self._decide(report) if self._comm.rank == self._comm.coordinator else self._hear()

    def _decide(self, mine: _StepReport) -> _StopDecision:
        """On the coordinator: hear all, choose, and post it. If it ends before that, it posts that no rank stops."""
        reports: dict[int, _StepReport | None] = dict.fromkeys(range(self._comm.size))
        reports[self._comm.rank] = mine
        while (silent := [r for r in reports if reports[r] is None]) and not self._ending and self._left_s(0.0):
            notes = self._comm.look([_report_of(rank) for rank in silent], min(self._pause_s, self._left_s(0.0)))
            reports |= {r: _REPORTS.unpack(note) for r, note in zip(silent, notes, strict=True) if note is not None}
        decision = _judge(reports)
        if silent and self._ending:
            decision = _StopDecision(_NEVER, {self._comm.rank: _FAILED} if self._failed else {})
        self._comm.post(_DECISION, _DECISIONS.pack(decision))
        return decision

    def _hear(self) -> _StopDecision:
        while not self._ending and (left_s := self._left_s(self._margin_s)):
            note = self._comm.look([_DECISION], min(self._pause_s, left_s))[0]
            if note is not None:
                return _DECISIONS.unpack(note)
        return _StopDecision(_NEVER, {} if self._ending else {self._comm.coordinator: "did not say where to stop"})


def _report_of(rank: int) -> str:
    return f"report/{rank}"


def _missing(absent: Mapping[int, str]) -> str:
    reasons = {why: [rank for rank in absent if absent[rank] == why] for why in absent.values()}
    told = "; ".join(f"{show_ranks(ranks)} {why}" for why, ranks in reasons.items())
    return (
        f"preempted, but the ranks cannot stop at one step: {told}. "
        "A save of all ranks would fail too; look at the logs of those ranks."
    )
