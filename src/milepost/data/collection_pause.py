"""Pausing Python's search for cycles while many small objects are made."""

import gc
import os
import threading
from contextlib import ContextDecorator
from types import TracebackType

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


class CollectionPaused(ContextDecorator):
    """Pauses the automatic cyclic collector of the process, inside a `with` block or a decorated function.

    A plan of tens of thousands of tensors makes hundreds of thousands of objects, none of them in a cycle. Each time
    enough objects are new, the collector would walk through all objects of the process, torch's included, and find
    nothing: that took half of the time. A collector that the program turned off stays off.
    """

    def __enter__(self) -> None:
        global _pauses, _was_enabled  # noqa: PLW0603  # the collector is global too
        with _lock:
            if _pauses == 0:
                _was_enabled = gc.isenabled()
                gc.disable()
            _pauses += 1

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        global _pauses  # noqa: PLW0603
        with _lock:
            if _pauses > 0:  # not in a fork, which has ended all pauses
                _pauses -= 1
                if _pauses == 0 and _was_enabled:
                    gc.enable()


def _end_pauses_in_fork() -> None:
    """The threads that paused the collector are not in the fork (a data loader's, for example), nor is their lock."""
    global _lock, _pauses  # noqa: PLW0603
    _lock = threading.Lock()
    if _pauses > 0 and _was_enabled:
        gc.enable()
    _pauses = 0


os.register_at_fork(after_in_child=_end_pauses_in_fork)
