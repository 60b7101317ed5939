"""Pausing Python's search for cycles while many small objects are made."""

import gc
import os
import sys
import threading
from contextlib import ContextDecorator
from types import TracebackType

from milepost.core.caller import Caller

_lock = threading.Lock()
_pauses: dict[int, Caller] = {}
_was_enabled = False


class CollectionPaused(ContextDecorator):
    """Pauses the automatic cyclic collector of the process, inside a `with` block or a decorated function.

    A plan of tens of thousands of tensors makes hundreds of thousands of objects, none of them in a cycle. Each time
    enough objects are new, the collector would walk through all objects of the process, torch's included, and find
    nothing: that took half of the time. A collector that the program turned off stays off.

    A signal handler that raises can end a pause without `__exit__`. Such pauses end when the next one begins or ends,
    and in `end_lost_pauses`.
    """

    def __init__(self) -> None:
        self._caller: Caller | None = None

    def __enter__(self) -> None:
        global _was_enabled  # noqa: PLW0603  # the collector is global too
        caller = Caller(sys._getframe(1))  # noqa: SLF001  # public, but for its name
        end_lost_pauses()
        with _lock:
            if not _pauses:
                _was_enabled = gc.isenabled()
            _pauses[id(caller)] = caller  # before the collector stops: an interrupt finds a pause that can be ended
            gc.disable()
        self._caller = caller

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._caller is not None:
            self._caller.forget()
            _end(id(self._caller))

    def _recreate_cm(self) -> "CollectionPaused":
        """A pause for each call of a decorated function: several may run at once."""
        return CollectionPaused()


def end_lost_pauses() -> None:
    """End the pauses whose function has ended without a word. Called where a call has been interrupted."""
    for number, caller in list(_pauses.items()):
        if caller.is_lost():
            _end(number)


def _end(number: int) -> None:
    with _lock:
        if _pauses.pop(number, None) is not None and not _pauses and _was_enabled:  # not in a fork: it has none
            gc.enable()


def _end_pauses_in_fork() -> None:
    """The threads that paused the collector are not in the fork (a data loader's, for example), nor is their lock."""
    global _lock  # noqa: PLW0603
    _lock = threading.Lock()
    if _pauses and _was_enabled:
        gc.enable()
    _pauses.clear()


os.register_at_fork(after_in_child=_end_pauses_in_fork)
