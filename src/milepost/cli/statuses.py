"""How a command ends: its exit status, and an error in one line."""

import contextlib
import enum
import os
import re
from collections.abc import Iterable, Iterator

from milepost.core.printable import printable
from milepost.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    StateMismatch,
    StorageError,
    UnsafeCheckpoint,
)

_MAX_LETTERS = 2000
_ENDS = (".", ":", ";", ",", "?", "!")
_KEYWORD = re.compile(r"\b(overwrite|allow_pickle|drop_values)=True\b(?: \(--[a-z-]+\))?")
_GENERATION = re.compile(r"milepost\.store\.AtGeneration\('([^']*)', ([0-9]+)\)")
"""What the library's messages advise to pass in Python, which the command line spells otherwise."""


class Status(enum.IntEnum):
    """The exit statuses; docs/reference/cli.md explains each."""

    FINE = 0
    NO = 1
    USAGE = 2
    NOT_FOUND = 3
    DAMAGED = 4
    STORAGE = 5
    FAULT = 70
    INTERRUPTED = 130
    CLOSED_PIPE = 141


_OF_ERRORS: list[tuple[type[Exception] | tuple[type[Exception], ...], Status]] = [
    (CheckpointNotFound, Status.NOT_FOUND),
    ((CheckpointDamaged, UnsafeCheckpoint), Status.DAMAGED),
    ((InvalidRequest, StateMismatch), Status.USAGE),
    ((CheckpointError, OSError, MemoryError), Status.STORAGE),
]


def status_of(error: BaseException) -> Status:
    """The exit status of a command that this error ended."""
    return next((status for kinds, status in _OF_ERRORS if isinstance(error, kinds)), Status.FAULT)


def worst(statuses: Iterable[Status]) -> Status:
    """The status of a command that did several things: damage first, else the highest."""
    found = set(statuses)
    return Status.DAMAGED if Status.DAMAGED in found else max(found, default=Status.FINE)


def _told_by_system(error: OSError) -> str:
    """What an error of the operating system says: where, what, and what to do. Ours say it themselves."""
    if isinstance(error, CheckpointError) or not error.strerror:
        return str(error)
    from milepost.store.advice import explain  # noqa: PLC0415  # not for --help

    where = "" if isinstance(error.filename, int) else os.fsdecode(error.filename or "")
    return f"{where}: {explain(error)}" if where else explain(error)


def one_line(error: BaseException) -> str:
    """What an error says, in one line that is safe to show on a terminal."""
    text = _told_by_system(error) if isinstance(error, OSError) else str(error)
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    words = " ".join(line if line.endswith(_ENDS) else f"{line};" for line in lines).removesuffix(";")
    words = words.replace("rename={key: None}", "--without KEY").replace("`rename` gives", "--strip gives")
    words = _GENERATION.sub(r"\1@\2", _KEYWORD.sub(lambda found: f"--{found[1].replace('_', '-')}", words))
    line = printable(words or type(error).__name__)
    return line if len(line) <= _MAX_LETTERS else f"{line[:_MAX_LETTERS]}..."


@contextlib.contextmanager
def output_told() -> Iterator[None]:
    """Inside, an error of the system is one of stdout, and says so."""
    try:
        yield
    except BrokenPipeError:
        raise
    except OSError as error:
        raise StorageError(f"cannot write the output: {error.strerror or error}") from error
