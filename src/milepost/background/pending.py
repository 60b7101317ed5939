"""A save that goes on in the background, as its caller sees it."""

import logging
import threading
from collections.abc import Callable

from milepost.errors import SaveCancelled
from milepost.saving.pipeline import Receipt

_log = logging.getLogger("milepost")


class PendingSave:
    """A save under way. Every rank has one; all of them end with the same receipt, or the same error.

    An error that nobody asked for is raised by the next save, or by `close`, of whoever made this one.
    """

    def __init__(self, url: str, staged: threading.Event, unread: threading.Event | None = None) -> None:
        self.url = url
        self.cancelled = threading.Event()
        self._staged, self._unread, self._done = staged, unread or staged, threading.Event()
        self._lock = threading.Lock()
        self._receipt: Receipt | None = None
        self._error: BaseException | None = None
        self._told = False
        self._callbacks: list[Callable[[PendingSave], None]] = []

    def __repr__(self) -> str:
        how = "staging" if not self.staged() else "writing" if not self.done() else "failed" if self._error else "saved"
        return f"PendingSave({self.url!r}, {how})"

    def staged(self) -> bool:
        """Whether the state may be changed again."""
        return self._staged.is_set()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the state may be changed again. Raises what went wrong until then, or TimeoutError."""
        if not self._staged.wait(timeout_s):
            raise TimeoutError(f"the state is not copied yet, after {timeout_s} s; it is being saved to {self.url}")
        if self.done():
            self._raise_error()

    def done(self) -> bool:
        """Whether it has ended, well or not."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> Receipt:
        """What was committed, once it is and survives power loss. Raises what went wrong, on any rank, or TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save to {self.url} has not ended after {timeout_s} s; it goes on")
        self._raise_error()
        assert self._receipt is not None
        return self._receipt

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """What went wrong, or None, once it has ended. Raises TimeoutError."""
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save to {self.url} has not ended after {timeout_s} s; it goes on")
        self._told = True
        return self._error

    def cancel(self, timeout_s: float | None = None) -> bool:
        """Stop it, on all ranks, and wait until it has ended. True if nothing of it remains; False if it was committed.

        One rank is enough; the others raise SaveCancelled. Raises TimeoutError if it does not end in time, and what went
        wrong if it failed for another reason.
        """
        self.cancelled.set()
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save to {self.url} has not ended after {timeout_s} s; it will")
        if self._error is None:
            return False
        if not _is_cancellation(self._error):
            self._raise_error()
        self._told = True
        return True

    def add_done_callback(self, call: Callable[["PendingSave"], None]) -> None:
        """Call this, in the background, when it has ended; at once if it has."""
        with self._lock:
            if not self.done():
                self._callbacks.append(call)
                return
        call(self)

    # For whoever runs it.

    def join_reading(self) -> None:
        """Return when nobody reads the state any more; a copy of it on its way to host memory does not count."""
        self._unread.wait()

    def join(self) -> None:
        """Return when it has ended."""
        self._done.wait()

    def end(self, receipt: Receipt | None, error: BaseException | None) -> None:
        """It has ended, with one or the other."""
        self._receipt, self._error = receipt, error
        with self._lock:
            self._done.set()
            self._staged.set()
            self._unread.set()
        for call in self._callbacks:
            try:
                call(self)
            except Exception:  # noqa: BLE001  # the others want to know too
                _log.warning("what should be called at the end of the save to %s failed", self.url, exc_info=True)

    def mark_told(self) -> None:
        """Its error was raised somewhere else."""
        self._told = True

    @property
    def under_way(self) -> bool:
        """Whether it has not ended; what only takes part to fail, and told that already, does not count."""
        return not self.done() and not self._told

    @property
    def error(self) -> BaseException | None:
        """What went wrong, if it did; looking here does not count as asking."""
        return self._error

    @property
    def receipt(self) -> Receipt | None:
        """What was committed, if it was."""
        return self._receipt

    @property
    def untold_error(self) -> BaseException | None:
        """What went wrong, if it has ended and nobody has asked."""
        return self._error if self.done() and not self._told else None

    def _raise_error(self) -> None:
        self._told = True
        if self._error is not None:
            raise self._error


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, SaveCancelled):
        return True
    failures = getattr(error, "failures", {})
    return bool(failures) and all(failure.kind == SaveCancelled.__name__ for failure in failures.values())
