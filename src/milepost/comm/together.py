"""The one place where an error on one rank becomes the same error on all.

A call that all ranks make (a save, a load) is a sequence of steps. There are three kinds of steps:

* `together`: every rank works; all succeed, or all raise.
* `meet`: every rank works and brings a note; the coordinator decides from all notes, and every rank gets its answer.
* `broadcast`: the coordinator works, and every rank gets its answer.

An error between two steps is kept by `defer` until the next one, where all ranks hear of it.
"""

import contextlib
import pickle
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Generic, Protocol, TypeVar

import msgspec
from msgspec.structs import replace

from milepost.comm.base import Call, Comm, Phase, is_told, mark_told
from milepost.comm.board_comm import BoardComm
from milepost.core.caller import Caller
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from milepost.core.wire import Wire
from milepost.errors import ERRORS, CheckpointError, Failure
from milepost.events.operation import WAITING, operating, phasing
from milepost.events.records import Kind

T = TypeVar("T")
Note = TypeVar("Note")
Answer = TypeVar("Answer")
_KINDS_SHOWN = 20
_TRIES = 1000
_TRACEBACKS = 3
_ORIGINAL_BYTES = 64 << 10


class Packs(Protocol[T]):
    """Makes bytes of a value, and the value of these bytes: `core.wire.Wire` for records, or something of your own."""

    def pack(self, value: T, /) -> bytes:
        """The value as bytes."""

    def unpack(self, data: bytes, /) -> T:
        """The value that `pack` was given."""


class Bytes:
    """Bytes as they are."""

    def pack(self, value: bytes) -> bytes:
        """The bytes."""
        return value

    def unpack(self, data: bytes) -> bytes:
        """The bytes."""
        return data


@dataclass(frozen=True, slots=True)
class Meeting(Generic[Note, Answer]):
    """A step in which every rank brings a note and gets the coordinator's answer. Made when a module is imported.

    `phase`, `deciding`: the phases for which the time of the work and of the decision counts, by default the step.
    """

    step: str
    notes: Packs[Note]
    answers: Packs[Answer]
    phase: str = ""
    deciding: str = ""

    @property
    def phases(self) -> tuple[str, str]:
        """Those of the work and of the decision."""
        work = self.phase or self.step
        return work, self.deciding or work


@dataclass(frozen=True, slots=True)
class Announcement(Generic[Answer]):
    """A step in which every rank gets what the coordinator says. Made when a module is imported.

    `phase`: for which the time of the work counts, by default the step.
    """

    step: str
    answers: Packs[Answer]
    phase: str = ""


class Deferred(Generic[T]):
    """The result of some work, or the error that took its place and waits for the next step."""

    def __init__(self, result: T | None, error: BaseException | None) -> None:
        self.result, self._error = result, error

    def get(self) -> T:
        """The result. Raises the error; called inside the work of a step, it reaches every rank."""
        if self._error is not None:
            raise self._error
        return self.result  # type: ignore[return-value]  # without an error there is a result, which may be None


class _Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings to a meeting: its note, or what went wrong."""

    note: bytes = b""
    failure: Failure | None = None


class _Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers: its decision, or the failures. Equal failures are listed once, with their ranks."""

    decision: bytes = b""
    failures: tuple[tuple[str, Failure], ...] = ()


_REPORTS = Wire(_Report)
_VERDICTS = Wire(_Verdict)


def defer(comm: Comm, work: Callable[[], T]) -> Deferred[T]:
    """Run `work` between two steps. An error is kept for the next step; in a job of one process it is raised at once.

    Ctrl-C is kept too: if this rank left here, its next call would meet the others in this one.
    """
    try:
        return Deferred(work(), None)
    except BaseException as error:
        if comm.size == 1:
            raise
        return Deferred(None, error)


def together(comm: Comm, call: Call, step: str, work: Callable[[], T], phase: str = "") -> T:
    """Run `work` on every rank, and give this rank's result once all ranks have succeeded.

    `phase`: for which the time of the work counts, by default the step.

    If anything fails on any rank, every rank raises a CheckpointError with the failures of all; where they are of one
    kind, that kind. On the rank itself the original is its cause.
    """
    kept: list[T] = []

    def keep() -> bytes:
        kept.append(work())
        return b""

    _meet(comm, call.at(step), keep, lambda _: b"", (phase or step, ""))
    return kept[0]


def meet(
    comm: Comm,
    call: Call,
    meeting: Meeting[Note, Answer],
    work: Callable[[], Note],
    decide: Callable[[list[Note]], Answer],
) -> Answer:
    """Run `work` on every rank, `decide` on the coordinator with the notes of all, and give its answer to every rank.

    Fails as `together` does: what `work` or `decide` raises on any rank is raised on every rank.
    """

    def judge(packed: list[bytes]) -> bytes:
        return meeting.answers.pack(decide([meeting.notes.unpack(note) for note in packed]))

    phase, phases = call.at(meeting.step), meeting.phases
    return meeting.answers.unpack(_meet(comm, phase, lambda: meeting.notes.pack(work()), judge, phases))


def broadcast(comm: Comm, call: Call, announcement: Announcement[Answer], work: Callable[[], Answer]) -> Answer:
    """Run `work` on the coordinator and give its result to every rank. Waits for the coordinator only."""
    phase = call.at(announcement.step)
    if comm.rank != comm.coordinator:
        with _told(comm, phase):
            answer = comm.announce(phase, None)
        return announcement.answers.unpack(_answered(phase, answer, comm, None))
    failed: Exception | None = None
    try:
        with phasing(announcement.phase or announcement.step):
            verdict = _Verdict(announcement.answers.pack(work()))
    except Exception as error:
        if comm.size == 1:
            raise
        failed, verdict = error, _Verdict(failures=_grouped({comm.rank: failure_of(error)}))
    except BaseException as error:
        _leave(comm, phase, error)
        raise
    with _told(comm, phase):
        answer = comm.announce(phase, _VERDICTS.pack(verdict))
    return announcement.answers.unpack(_answered(phase, answer, comm, failed))


def calling(comm: Comm, call: Call) -> contextlib.AbstractContextManager[Call]:
    """Around all steps of a call. If anything but the error of a step ends the call here, the others hear of it.

    Calls may be nested. The inner ones are parts of the outermost, which may go on after an error of theirs.
    """
    return _Calling(comm, call)


def operating_on(comm: Comm, kind: Kind, url: str, *, step: int | None = None, wraps: bool = False) -> operating:
    """Around an operation of these ranks: see `events.operation.operating`."""
    return operating(kind, url, comm.rank, comm.size, decides=comm.rank == comm.coordinator, step=step, wraps=wraps)


class _Calling:
    """What `calling` gives. Not a generator: a signal handler that raises would find many more places to break it."""

    def __init__(self, comm: Comm, call: Call) -> None:
        self._comm, self._call = comm, call
        self._caller: Caller | None = None
        self._inner = False

    def __enter__(self) -> Call:
        try:
            self._caller = Caller(sys._getframe(1))  # noqa: SLF001  # public, but for its name
            self._inner = not self._comm.begin(self._caller)
            return self._call  # in the `try`: from here on `__exit__` is called
        except BaseException as error:
            self._come_and_leave(error)
            raise

    def _come_and_leave(self, error: BaseException) -> None:
        """After an interrupt in `__enter__`: begin all the same, so that the others hear of it, and then end."""
        while self._caller is not None:
            try:
                self._inner = not self._comm.begin(self._caller)
                self._end(error)
                return
            except BaseException:  # noqa: BLE001, S112  # the one that ended the call is raised
                continue

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        self._end(error)

    def _end(self, error: BaseException | None) -> None:
        if self._caller is None:
            return
        if error is not None and not self._inner:
            _tell(self._comm, self._call.at("between two steps"), error)
        self._comm.end(self._caller)
        self._caller.forget()


@contextlib.contextmanager
def _told(comm: Comm, phase: Phase) -> Iterator[None]:
    """Around waiting for others: tell them what leaves this block, unless they know it. Their next step raises it."""
    try:
        if comm.size == 1:
            yield
        else:
            with phasing(WAITING):
                yield
    except BaseException as error:
        _tell(comm, phase, error)
        raise


def _tell(comm: Comm, phase: Phase, error: BaseException) -> None:
    """Tell the others why this rank leaves the call, unless they know it. Interrupts are put off until then."""
    for _ in range(_TRIES):
        try:
            if not is_told(error):
                comm.withdraw(phase, _parting(comm, failure_of(error)))
                mark_told(error)
            return
        except Exception:  # noqa: BLE001  # the board cannot be reached: they will miss this rank
            mark_told(error)
            return
        except BaseException:  # noqa: BLE001, S112  # the one that ended the call is raised
            continue


def _leave(comm: Comm, phase: Phase, error: BaseException) -> None:
    """Leave (Ctrl-C, sys.exit): tell the others, do not wait for them."""
    with contextlib.suppress(Exception):  # as above; and the error itself matters more
        comm.leave(phase, _parting(comm, failure_of(error)))
    mark_told(error)


def depart(comm: BoardComm, error: BaseException) -> None:
    """Report that this rank has ended, and why. The next call of the others raises that, whatever the call is."""
    comm.depart(_parting(comm, failure_of(error)))


def note_parting(comm: Comm, error: BaseException) -> None:
    """Note of an error that left a call whether the ranks lost each other by it, and join before their next call."""
    if isinstance(comm, BoardComm) and not comm.joined:
        with contextlib.suppress(AttributeError):  # an exception with slots
            error.ranks_apart = True  # type: ignore[attr-defined]


def note_bytes(note: bytes) -> int:
    """How many bytes a rank sends for a note of a meeting, without the six that say at which step it is."""
    return len(_REPORTS.pack(_Report(note)))


def answer_bytes(answer: bytes) -> int:
    """How many bytes the coordinator sends for an answer, without the seven that say to which step it belongs."""
    return len(_VERDICTS.pack(_Verdict(answer)))


def _decided(decide: Callable[[list[bytes]], bytes], notes: list[bytes], phase: str) -> bytes:
    if not phase:
        return decide(notes)
    with phasing(phase):
        return decide(notes)


def _meet(
    comm: Comm,
    phase: Phase,
    work: Callable[[], bytes],
    decide: Callable[[list[bytes]], bytes],
    phases: tuple[str, str],
) -> bytes:
    met: list[BaseException] = []
    try:
        with phasing(phases[0]):
            report = _Report(work())
    except Exception as error:
        if comm.size == 1:
            raise
        met.append(error)
        report = _Report(failure=failure_of(error))
    except BaseException as error:
        _leave(comm, phase, error)
        raise

    def judge(packed: list[bytes]) -> bytes:
        reports = [_REPORTS.unpack(data) for data in packed]
        failures = {rank: r.failure for rank, r in enumerate(reports) if r.failure is not None}
        if failures:
            return _VERDICTS.pack(_Verdict(failures=_grouped(failures)))
        try:
            return _VERDICTS.pack(_Verdict(_decided(decide, [r.note for r in reports], phases[1])))
        except BaseException as error:  # noqa: BLE001  # sent to the others first, then raised below
            met.append(error)
            if comm.size > 1 and not isinstance(error, Exception):  # Ctrl-C may come when everything is decided
                leave_undecided(error)
            return _VERDICTS.pack(_Verdict(failures=_grouped({comm.rank: failure_of(error)})))

    with _told(comm, phase):
        answer = comm.meet(phase, _REPORTS.pack(report), judge)
    if met and (comm.size == 1 or not isinstance(met[0], Exception)):
        mark_told(met[0])
        raise met[0]
    return _answered(phase, answer, comm, met[0] if met else None)


def _parting(comm: Comm, failure: Failure) -> bytes:
    """What a rank that leaves says: a report to the coordinator, or, as the coordinator, a verdict."""
    if comm.rank == comm.coordinator:
        return _VERDICTS.pack(_Verdict(failures=_grouped({comm.rank: failure})))
    return _REPORTS.pack(_Report(failure=failure))


def _answered(phase: Phase, answer: bytes, comm: Comm, mine: BaseException | None) -> bytes:
    verdict = _VERDICTS.unpack(answer)
    if verdict.failures:
        error = _combined(phase, verdict.failures, comm.rank)
        mark_told(error)
        raise error from mine
    return verdict.decision


def failure_of(error: BaseException) -> Failure:
    """An error as a record that can travel."""
    trace = "".join(traceback.format_exception(error))
    kind, text, trace = _plain(type(error).__name__), _plain(_text(error)), _plain(trace[-8000:])
    return Failure(kind, text, trace, _original(error), is_undecided(error))


def leave_undecided(error: BaseException) -> None:
    """Mark an error of a decision that may have taken effect all the same. The other ranks learn it: see `Failure`."""
    error.undecided = True  # type: ignore[attr-defined]


def is_undecided(error: BaseException) -> bool:
    """Whether the decision that this error ended may have taken effect, as far as any rank knows."""
    failures: Mapping[int, object] = getattr(error, "failures", {})
    own = getattr(error, "undecided", False) is True
    return own or any(isinstance(one, Failure) and one.undecided for one in failures.values())


def _text(error: BaseException) -> str:
    """The message of an error. An error whose message cannot be made must still reach the others."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001
        return f"<its message cannot be shown: {type(trouble).__name__}>"


def _plain(text: str) -> str:
    """The text without characters that UTF-8 does not have, such as those of undecodable file names."""
    return text.encode("utf-8", "backslashreplace").decode()


def _original(error: BaseException) -> bytes:
    """The exception and its stack as a pickle, for ranks of the same job; empty if it is large or cannot be pickled."""
    stack = traceback.extract_tb(error.__traceback__)
    for frame in stack:
        if hasattr(frame, "_code"):  # from Python 3.13 on: bytecode, which cannot be pickled
            object.__setattr__(frame, "_code", None)
    with contextlib.suppress(Exception):
        packed = pickle.dumps((error, stack))
        return packed if len(packed) <= _ORIGINAL_BYTES else b""
    return b""


def _grouped(failures: Mapping[int, Failure]) -> tuple[tuple[str, Failure], ...]:
    """Equal failures once, with their ranks. Only the first few keep a traceback: the answer goes to every rank."""
    groups: dict[tuple[str, str], tuple[Failure, list[int]]] = {}
    for rank, failure in failures.items():
        groups.setdefault((failure.kind, failure.message), (failure, []))[1].append(rank)
    result = []
    for i, (failure, ranks) in enumerate(groups.values()):
        kept = (
            failure if i < _TRACEBACKS else replace(failure, message=failure.message[:2000], traceback="", original=b"")
        )
        result.append((pack_ranks(sorted(ranks)), kept))
    return tuple(result)


def _combined(phase: Phase, groups: tuple[tuple[str, Failure], ...], me: int) -> CheckpointError:
    """One error for the failures of several ranks."""
    failures = {rank: failure for ranks, failure in groups for rank in unpack_ranks(ranks)}
    kinds = {failure.kind for _, failure in groups}
    kind = ERRORS.get(next(iter(kinds)), CheckpointError) if len(kinds) == 1 else CheckpointError
    lines = []
    for ranks, failure in groups[:_KINDS_SHOWN]:
        name = "" if kind is not CheckpointError else f"{failure.kind}: "
        lines.append(f"{show_ranks(unpack_ranks(ranks))}: {name}{failure.message}")
    if len(groups) > _KINDS_SHOWN:
        lines.append(f"and {len(groups) - _KINDS_SHOWN} more")
    where = "here" if set(failures) == {me} else f"on {show_ranks(failures)}"
    return kind(f"{phase.text} failed {where}.\n  " + "\n  ".join(lines), failures)
