"""Exceptions at a chosen line of Milepost, as a signal handler raises them."""

import contextlib
import linecache
import sys
from pathlib import Path

import milepost

SOURCE = str(Path(milepost.__file__).parent)


class Interrupt(BaseException):
    """What the handlers raise: no `except Exception` catches it."""


@contextlib.contextmanager
def interrupted_at(number, after=None):
    """Raise before the `number`-th line of Milepost that this thread runs. Gives a list of the lines that it ran.

    `after`: count from the first line of the function of this name on.
    """
    lines, counting = [], after is None

    def trace(frame, event, _):
        nonlocal counting
        if not frame.f_code.co_filename.startswith(SOURCE):
            return None
        counting = counting or frame.f_code.co_name == after
        # At the end of a `with lock`, no signal handler can run: the next instruction is the one that releases it.
        locks = linecache.getline(frame.f_code.co_filename, frame.f_lineno).rstrip().endswith(("_lock:", "_changed:"))
        if counting and event == "line" and not locks:
            lines.append(frame.f_lineno)
            if len(lines) == number:
                sys.settrace(None)
                raise Interrupt
        return trace

    before = sys.gettrace()
    sys.settrace(trace)
    try:
        yield lines
    finally:
        sys.settrace(before)
