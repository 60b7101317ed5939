"""Ending like Ctrl-C where a job is told to end: what a command wrote to try things is removed."""

import contextlib
import signal
import sys
from collections.abc import Iterator


@contextlib.contextmanager
def ending_on_sigterm() -> Iterator[None]:
    """Inside, SIGTERM ends the command as sys.exit does, so that its clean-up runs."""

    def end(number: int, _frame: object) -> None:
        sys.exit(128 + number)

    before = signal.signal(signal.SIGTERM, end)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
