"""Work that a thread of its own does once, whatever happens to the thread that asked for it."""

import logging
import traceback
from collections.abc import Callable
from typing import Generic, TypeVar

from milepost.data.threads import Crew, Latch

T = TypeVar("T")
_log = logging.getLogger("milepost")


class Errand(Generic[T]):
    """Work to be done once. `ended` is set at its end, after `then` was called with its result or its error.

    Starting it again does no harm: an interrupted thread that does not know whether it started the errand starts it.
    """

    def __init__(
        self, work: Callable[[], T], then: Callable[[T | None, BaseException | None], None] | None = None
    ) -> None:
        # Taken out, so that nothing keeps the state when an error keeps this object.
        self._todo = [(work, then)]
        self.ended = Latch()
        self.result: T | None = None
        self.error: BaseException | None = None

    def start(self, what: str, in_front: Callable[[], None] | None = None) -> None:
        """Do it in a thread, for which the interpreter waits before it ends.

        Without a thread (there is a limit, or the interpreter is about to end) it is done here: other ranks wait for
        this one. `in_front` is called before that.
        """
        if self._todo and not Crew(self._run, "milepost-save").start() and self._todo:
            _log.warning("no thread can be started: %s runs in the foreground", what)
            if in_front is not None:
                in_front()
            self._run()
            if self.error is not None and not isinstance(self.error, Exception):
                raise self.error  # what interrupted it was meant for this thread

    def get(self) -> T:
        """Wait for its end, and give its result. Raises its error."""
        self.ended.wait()
        if self.error is not None:
            raise self.error
        return self.result  # type: ignore[return-value]  # without an error there is a result, which may be None

    def _run(self) -> None:
        try:
            work, then = self._todo.pop()
        except IndexError:
            return  # another thread does it, or did
        try:
            self.result = work()
        except BaseException as error:  # noqa: BLE001  # it is raised where the caller asks
            self.error = error
            _forget_frames(error)
        del work
        try:
            if then is not None:
                then(self.result, self.error)
        finally:
            self.ended.set()


def _forget_frames(error: BaseException | None) -> None:
    """Clear the frames of an error: they hold much of the state, and the error is kept."""
    errors, seen = [error], set[int]()
    while errors:
        one = errors.pop()
        if one is not None and id(one) not in seen:  # an error can be among its own causes
            seen.add(id(one))
            traceback.clear_frames(one.__traceback__)
            errors += [one.__cause__, one.__context__]
