"""The one place where an error on one rank becomes the same error on all."""

import traceback
from collections.abc import Callable

import msgspec

from milepost.comm.base import Comm
from milepost.core.ranks import show_ranks
from milepost.errors import ERRORS, CheckpointError, Failure


class Outcome(msgspec.Struct, frozen=True):
    """What a rank brings to an exchange: its payload, or what went wrong."""

    payload: bytes = b""
    failure: Failure | None = None


def together(comm: Comm, phase: str, work: Callable[[], bytes]) -> list[bytes]:
    """Run `work` on every rank and give each the results of all.

    If it fails on any rank, every rank raises a CheckpointError with the failures of all; where they are of one kind,
    that kind. On the rank itself the original is its cause.
    """
    mine: Exception | None = None
    try:
        outcome = Outcome(payload=work())
    except Exception as error:
        if comm.size == 1:
            raise
        mine = error
        outcome = Outcome(failure=failure_of(error))
    except BaseException as error:
        # Leaving (Ctrl-C, sys.exit): tell the others, do not wait for them.
        comm.post(phase, msgspec.msgpack.encode(Outcome(failure=failure_of(error))))
        raise
    outcomes = [
        msgspec.msgpack.decode(data, type=Outcome) for data in comm.exchange(phase, msgspec.msgpack.encode(outcome))
    ]
    failures = {rank: outcome.failure for rank, outcome in enumerate(outcomes) if outcome.failure is not None}
    if failures:
        raise combined(phase, failures, comm.rank) from mine
    return [outcome.payload for outcome in outcomes]


def failure_of(error: BaseException) -> Failure:
    """An error as a record that can travel."""
    trace = "".join(traceback.format_exception(error))
    return Failure(type(error).__name__, str(error), trace[-8000:])


def combined(phase: str, failures: dict[int, Failure], me: int) -> CheckpointError:
    """One error for the failures of several ranks. Equal ones are told once."""
    groups: dict[tuple[str, str], list[int]] = {}
    for rank, failure in failures.items():
        groups.setdefault((failure.kind, failure.message), []).append(rank)
    kinds = {failure.kind for failure in failures.values()}
    kind = ERRORS.get(kinds.pop(), CheckpointError) if len(kinds) == 1 else CheckpointError
    lines = []
    for (name, message), ranks in list(groups.items())[:20]:
        prefix = f"{show_ranks(ranks)}: "
        lines.append(prefix + (message if kind is not CheckpointError else f"{name}: {message}"))
    if len(groups) > 20:
        lines.append(f"and {len(groups) - 20} more")
    where = "here" if set(failures) == {me} else f"on {show_ranks(failures)}"
    return kind(f"{phase} failed {where}.\n  " + "\n  ".join(lines), failures)
