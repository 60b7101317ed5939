"""The one place where an error on one rank becomes the same error on all."""

import contextlib
import pickle
import traceback
from collections.abc import Callable, Mapping

import msgspec

from milepost.comm.base import Comm, Phase
from milepost.comm.board import BoardComm
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from milepost.errors import ERRORS, CheckpointError, Failure

_KINDS_SHOWN = 20
_TRACEBACKS = 3
_ORIGINAL_BYTES = 64 << 10


class Report(msgspec.Struct, frozen=True, array_like=True):
    """What a rank brings to a meeting: its payload, or what went wrong."""

    payload: bytes = b""
    failure: Failure | None = None


class Verdict(msgspec.Struct, frozen=True, array_like=True):
    """What the coordinator answers: its decision, or the failures; equal ones are told once, with the ranks that met them."""

    decision: bytes = b""
    failures: tuple[tuple[str, Failure], ...] = ()


# Made once, when the module is imported: two threads that are the first to decode a type can crash msgspec.
_REPORTS = msgspec.msgpack.Decoder(Report)
_VERDICTS = msgspec.msgpack.Decoder(Verdict)


def nothing(payloads: list[bytes]) -> bytes:
    """The decision where all that counts is that every rank came, and well."""
    del payloads
    return b""


def together(
    comm: Comm, phase: Phase, work: Callable[[], bytes], decide: Callable[[list[bytes]], bytes] = nothing
) -> bytes:
    """Run `work` on every rank, `decide` on the coordinator with the results of all, and give its answer to every rank.

    If anything fails on any rank, every rank raises a CheckpointError with the failures of all; where they are of one
    kind, that kind. On the rank itself the original is its cause.
    """
    met: list[BaseException] = []
    try:
        report = Report(payload=work())
    except Exception as error:
        if comm.size == 1:
            raise
        met.append(error)
        report = Report(failure=failure_of(error))
    except BaseException as error:
        # Leaving (Ctrl-C, sys.exit): tell the others, do not wait for them.
        comm.leave(phase, _parting(comm, failure_of(error)))
        raise

    def judge(packed: list[bytes]) -> bytes:
        reports = [_REPORTS.decode(data) for data in packed]
        failures = {rank: r.failure for rank, r in enumerate(reports) if r.failure is not None}
        if failures:
            return msgspec.msgpack.encode(Verdict(failures=_grouped(failures)))
        try:
            return msgspec.msgpack.encode(Verdict(decide([r.payload for r in reports])))
        except BaseException as error:  # noqa: BLE001  # told to the others first, then raised below
            met.append(error)
            return msgspec.msgpack.encode(Verdict(failures=_grouped({comm.rank: failure_of(error)})))

    answer = comm.meet(phase, msgspec.msgpack.encode(report), judge)
    if met and (comm.size == 1 or not isinstance(met[0], Exception)):
        raise met[0]
    return _answered(phase, answer, comm, met[0] if met else None)


def told(comm: Comm, phase: Phase, work: Callable[[], bytes]) -> bytes:
    """Run `work` on the coordinator and give its result to every rank. Waits for nobody but the coordinator."""
    if comm.rank != comm.coordinator:
        return _answered(phase, comm.announce(phase, None), comm, None)
    try:
        verdict = Verdict(work())
    except Exception as error:
        if comm.size == 1:
            raise
        verdict = Verdict(failures=_grouped({comm.rank: failure_of(error)}))
        return _answered(phase, comm.announce(phase, msgspec.msgpack.encode(verdict)), comm, error)
    except BaseException as error:
        comm.leave(phase, _parting(comm, failure_of(error)))
        raise
    return _answered(phase, comm.announce(phase, msgspec.msgpack.encode(verdict)), comm, None)


def depart(comm: BoardComm, error: BaseException) -> None:
    """Say that this rank is gone for good, and why: the next call of the others raises that, whatever it is."""
    comm.depart(_parting(comm, failure_of(error)))


def _parting(comm: Comm, failure: Failure) -> bytes:
    """What a rank that leaves says: to the coordinator a report, and as the coordinator a verdict."""
    if comm.rank == comm.coordinator:
        return msgspec.msgpack.encode(Verdict(failures=_grouped({comm.rank: failure})))
    return msgspec.msgpack.encode(Report(failure=failure))


def _answered(phase: Phase, answer: bytes, comm: Comm, mine: BaseException | None) -> bytes:
    verdict = _VERDICTS.decode(answer)
    if verdict.failures:
        raise combined(phase, verdict.failures, comm.rank) from mine
    return verdict.decision


def failure_of(error: BaseException) -> Failure:
    """An error as a record that can travel."""
    trace = "".join(traceback.format_exception(error))
    return Failure(_plain(type(error).__name__), _plain(_text(error)), _plain(trace[-8000:]), _original(error))


def _text(error: BaseException) -> str:
    """What an error says of itself. One that cannot must still reach the others."""
    try:
        return str(error)
    except Exception as trouble:  # noqa: BLE001
        return f"<it cannot be shown: {type(trouble).__name__}>"


def _plain(text: str) -> str:
    """The text without what has no UTF-8, such as names of files that are none."""
    return text.encode("utf-8", "backslashreplace").decode()


def _original(error: BaseException) -> bytes:
    """The exception and its stack as a pickle, for ranks of the same job; nothing where it is large or has no such form."""
    stack = traceback.extract_tb(error.__traceback__)
    for frame in stack:
        if hasattr(frame, "_code"):  # from Python 3.13 on: bytecode, which cannot be pickled
            object.__setattr__(frame, "_code", None)
    with contextlib.suppress(Exception):
        packed = pickle.dumps((error, stack))
        return packed if len(packed) <= _ORIGINAL_BYTES else b""
    return b""


def _grouped(failures: Mapping[int, Failure]) -> tuple[tuple[str, Failure], ...]:
    """Equal failures once, with their ranks; tracebacks of the first few only: the answer goes to every rank."""
    groups: dict[tuple[str, str], tuple[Failure, list[int]]] = {}
    for rank, failure in failures.items():
        groups.setdefault((failure.kind, failure.message), (failure, []))[1].append(rank)
    result = []
    for i, (failure, ranks) in enumerate(groups.values()):
        kept = failure if i < _TRACEBACKS else Failure(failure.kind, failure.message[:2000])
        result.append((pack_ranks(sorted(ranks)), kept))
    return tuple(result)


def combined(phase: Phase, groups: tuple[tuple[str, Failure], ...], me: int) -> CheckpointError:
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
