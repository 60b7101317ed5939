"""The error that saves and loads of this package raise, on every rank."""

import contextlib
import pickle
import traceback
from collections.abc import Iterator
from typing import Any

from torch.distributed.checkpoint.api import CheckpointException as TheirException

from milepost.comm import Comm
from milepost.core.ranks import show_ranks
from milepost.errors import CheckpointError, Failure

__all__ = ["CheckpointException"]

WRAPPED_EXCEPTION = tuple[BaseException, traceback.StackSummary]


class CheckpointException(CheckpointError, TheirException):
    """Some ranks failed: `failures` maps each of them to the exception that it met and the stack where it was raised.

    An Exception and a `milepost.CheckpointError`, where DCP's is neither. Also one of DCP's, so that programs catch it.
    """

    failures: dict[int, WRAPPED_EXCEPTION] = {}  # type: ignore[assignment]  # noqa: RUF012  # hides torch's property

    def __init__(self, msg: str, failures: dict[int, WRAPPED_EXCEPTION]) -> None:
        super().__init__(msg)
        self.args = (msg, failures)  # what a pickle of it is made from
        self.failures = dict(failures)

    def __str__(self) -> str:
        groups: dict[tuple[str, str], list[int]] = {}
        for rank, (error, stack) in self.failures.items():
            kind = "".join(traceback.format_exception_only(error))
            groups.setdefault(("".join(traceback.format_list(stack or [])), kind), []).append(rank)
        parts = [f"CheckpointException ranks:{self.failures.keys()}\n"]
        for (stack_text, kind), ranks in groups.items():
            who = f"RANK {ranks[0]}" if len(ranks) == 1 else show_ranks(ranks).upper()
            parts.append(f"Traceback (most recent call last): ({who})\n{stack_text}{kind}")
        return "".join(parts)


def wrap_exception(exc: BaseException) -> WRAPPED_EXCEPTION:
    """An exception with the stack where it was raised; both can be pickled if the exception can."""
    stack = traceback.extract_tb(exc.__traceback__)
    for frame in stack:
        if hasattr(frame, "_code"):  # from Python 3.13 on: bytecode, which cannot be pickled
            object.__setattr__(frame, "_code", None)
    return exc, stack


def is_wrapped_exception(obj: Any) -> bool:
    """Whether this is a pair that `wrap_exception` made."""
    if not isinstance(obj, tuple) or len(obj) != 2:
        return False
    return isinstance(obj[0], BaseException) and isinstance(obj[1], traceback.StackSummary)


@contextlib.contextmanager
def raising_checkpoint_exceptions(step: str, comm: Comm) -> Iterator[None]:
    """Raise every error of the block as a CheckpointException, with the error of each rank."""
    try:
        yield
    except CheckpointException:
        raise
    except Exception as error:
        raise checkpoint_exception(step, error, comm) from error


def checkpoint_exception(step: str, error: BaseException, comm: Comm) -> BaseException:
    """An error as a CheckpointException, with what each rank met. Not raised, so that it keeps no frames."""
    if isinstance(error, CheckpointException) or not isinstance(error, Exception):
        return error
    made = CheckpointException(step, _failures(error, comm))
    made.__cause__ = error
    return made


def _failures(error: Exception, comm: Comm) -> dict[int, WRAPPED_EXCEPTION]:
    failures = error.failures if isinstance(error, CheckpointError) else {}
    if not failures:
        return {comm.rank: wrap_exception(error)}
    found = {rank: _unpacked(failure) for rank, failure in failures.items()}
    if comm.rank in found and error.__cause__ is not None:
        found[comm.rank] = wrap_exception(error.__cause__)  # the very object
    return found


def _unpacked(failure: Failure) -> WRAPPED_EXCEPTION:
    """The exception of another rank, or one with the same message if it could not be pickled."""
    with contextlib.suppress(Exception):
        wrapped = pickle.loads(failure.original)  # noqa: S301  # from a rank of this job
        if isinstance(wrapped, tuple) and is_wrapped_exception(wrapped):
            return wrapped
    return CheckpointError(f"{failure.kind}: {failure.message}"), traceback.StackSummary()


_wrap_exception = wrap_exception
_is_wrapped_exception = is_wrapped_exception
