"""Pausing Python's search for cycles while many small objects are made."""

import gc
import threading
from contextlib import ContextDecorator
from types import TracebackType

_lock = threading.Lock()
_pauses = 0
_was_enabled = False


class CollectionPaused(ContextDecorator):
    """Between entry and exit (or in the function that it decorates), in any thread, the cyclic collector does not run on its own.

    A plan of tens of thousands of tensors makes hundreds of thousands of objects, none of them in a cycle. Each time
    that enough are new, the collector would walk through all objects of the process, torch's included, and find nothing:
    that took half of the time. A process that has turned the collector off is left as it is.
    """

    def __enter__(self) -> None:
        global _pauses, _was_enabled  # noqa: PLW0603  # so is the collector
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
            _pauses -= 1
            if _pauses == 0 and _was_enabled:
                gc.enable()
