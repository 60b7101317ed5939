"""A save that goes on in the background, as its caller sees it."""

import atexit
import logging
from collections import deque
from collections.abc import Callable

from milepost.background.ticket import Permit
from milepost.data.threads import Latch
from milepost.errors import SaveCancelled
from milepost.saving.pipeline import Receipt

_log = logging.getLogger("milepost")


class PendingSave:
    """A save under way. Every rank has one; all of them end with the same receipt, or the same error.

    An error that the caller never asks for is not lost: the next save of the same saver raises it, or its `close`, and
    what is still left at the end of the program is logged there.

    >>> pending = milepost.async_save({"step": 1}, "memory://pending")
    >>> pending.result().generation
    1
    >>> pending.done()
    True
    """

    def __init__(self, url: str, permit: Permit, staged: Latch, unread: Latch | None = None) -> None:
        self.url, self._permit = url, permit
        self._staged, self._unread, self._done = staged, unread or staged, Latch()
        # No lock: a signal handler, or a fork, may come in the middle of anything here.
        self._receipt: Receipt | None = None
        self._error: BaseException | None = None
        self._told = False
        self._callbacks: deque[Callable[[PendingSave], None]] = deque()

    def __repr__(self) -> str:
        how = "staging" if not self.staged() else "writing" if not self.done() else "failed" if self._error else "saved"
        return f"PendingSave({self.url!r}, {how})"

    def staged(self) -> bool:
        """Whether the state may be changed again."""
        return self._staged.is_set()

    def wait_staged(self, timeout_s: float | None = None) -> None:
        """Return when the state may be changed again. Raises the error of a save that has failed, or TimeoutError.

        Interrupted, by Ctrl-C for example, it stops a save that still reads the state, and returns when none does.
        """
        if not self._waits_for(self._staged, timeout_s):
            raise TimeoutError(f"the state is not copied yet, after {timeout_s} s; it is being saved to {self.url}")
        if self.done():
            self._raise_error()

    def done(self) -> bool:
        """Whether the save has ended, with a receipt or with an error."""
        return self._done.is_set()

    def result(self, timeout_s: float | None = None) -> Receipt:
        """Wait, and give the receipt: the checkpoint is committed and survives power loss.

        Raises the error of the save, whichever rank met it, or TimeoutError.
        """
        self._wait_done(timeout_s, "it goes on")
        self._raise_error()
        assert self._receipt is not None
        return self._receipt

    def exception(self, timeout_s: float | None = None) -> BaseException | None:
        """Wait, and give the error of the save, or None if it succeeded. Raises TimeoutError."""
        self._wait_done(timeout_s, "it goes on")
        self.mark_told()
        return self._error

    def cancel(self, timeout_s: float | None = None) -> bool:
        """Stop the save on all ranks, and wait for its end. True if nothing of it remains; False if it was committed.

        One rank is enough; the others raise SaveCancelled. Raises TimeoutError if the save does not end in time, and
        its error if it failed for another reason.
        """
        self._permit.withdraw()
        self._wait_done(timeout_s, "it will")
        if self._error is None:
            return False
        if not _is_cancellation(self._error):
            self._raise_error()
        self.mark_told()
        return True

    def add_done_callback(self, call: Callable[["PendingSave"], None]) -> None:
        """Call this with the save when it has ended, in the thread that saves; at once if it has ended already."""
        self._callbacks.append(call)
        if self.done():
            self._call_back()

    # For the saver that runs it.

    def join_reading(self) -> None:
        """Return when the state is no longer read; a copy of it on its way to host memory does not count.

        Interrupted, it stops a save that still reads the state, and returns when none does.
        """
        self._waits_for(self._unread, None)

    def join(self) -> None:
        """Return when the save has ended."""
        self._done.wait()

    def end(self, receipt: Receipt | None, error: BaseException | None) -> None:
        """Note that the save has ended, with one or the other."""
        self._receipt, self._error = receipt, error
        self._done.set()
        self._staged.set()
        self._unread.set()
        if error is not None and self._permit.withdrawn.is_set() and _is_cancellation(error):
            self._told = True  # who stopped it on this rank knows
        if error is not None:
            # The interpreter keeps it until its end, or until the caller asks: the saver may be gone by then.
            atexit.register(self._report)
            if self.untold_error is None:  # asked for already, or just now
                atexit.unregister(self._report)
        self._call_back()

    def _call_back(self) -> None:
        """Call each callback once, whichever thread comes first."""
        while True:
            try:
                call = self._callbacks.popleft()
            except IndexError:
                return
            try:
                call(self)
            except Exception:  # noqa: BLE001  # the other callbacks must run too
                _log.warning("a callback at the end of the save to %s failed", self.url, exc_info=True)

    def mark_told(self) -> None:
        """Note that the caller knows the error, or will see it raised elsewhere."""
        self._told = True
        if self._error is not None:
            atexit.unregister(self._report)

    @property
    def under_way(self) -> bool:
        """Whether the save has not ended. A rank that joined only to report its failure is not counted."""
        return not self.done() and not self._told and not self._permit.withdrawn.is_set()

    @property
    def error(self) -> BaseException | None:
        """The error, if the save failed. Looking here does not count as asking."""
        return self._error

    @property
    def receipt(self) -> Receipt | None:
        """The receipt, if the save was committed."""
        return self._receipt

    @property
    def untold_error(self) -> BaseException | None:
        """The error, if the save has failed and the caller has not asked."""
        return self._error if self.done() and not self._told else None

    def _waits_for(self, latch: Latch, timeout_s: float | None) -> bool:
        try:
            return latch.wait(timeout_s)
        except BaseException:
            # The caller may change the state next. A save that reads it now must not be committed.
            self._stop_reading()
            raise

    def _stop_reading(self) -> None:
        while not self._unread.is_set():
            try:
                self._permit.withdraw()
                self._unread.wait()
            except BaseException:  # noqa: BLE001, S112  # the first interrupt is raised
                continue

    def _wait_done(self, timeout_s: float | None, outlook: str) -> None:
        if not self._done.wait(timeout_s):
            raise TimeoutError(f"the save to {self.url} has not ended after {timeout_s} s; {outlook}")

    def _raise_error(self) -> None:
        self.mark_told()
        if self._error is not None:
            raise self._error

    def _report(self) -> None:
        """At the end of the interpreter: log the error that the caller never asked for."""
        _log.error("the save to %s failed in the background: %s", self.url, self._error, exc_info=self._error)


def _is_cancellation(error: BaseException) -> bool:
    if isinstance(error, SaveCancelled):
        return True
    failures = getattr(error, "failures", {})
    return bool(failures) and all(failure.kind == SaveCancelled.__name__ for failure in failures.values())
