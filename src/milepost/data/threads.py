"""Waits and thread starts that a signal handler which raises cannot break.

Python runs signal handlers in the main thread, between any two of its instructions. One that raises (Ctrl-C) inside
`threading.Event` or `Thread.start` can leave a lock behind that nobody releases. Then the other side waits for ever.
Nothing here takes a lock in the waiting thread. So a fork cannot inherit a held one either.
"""

import _thread
import queue
import threading
from collections.abc import Callable


class Latch:
    """Something that happens once: a `threading.Event` without `clear` and without a lock."""

    __slots__ = ("_happened", "_waiting")

    def __init__(self, happened: bool = False) -> None:
        self._happened = happened
        self._waiting: list[queue.SimpleQueue[None]] = []

    def set(self) -> None:
        """Let it have happened, and wake all that wait for it. May be called again."""
        self._happened = True
        for one in list(self._waiting):
            one.put(None)

    def is_set(self) -> bool:
        """Whether it has happened."""
        return self._happened

    def wait(self, timeout_s: float | None = None) -> bool:
        """Return when it has happened: True. False if that takes longer than the timeout."""
        if self._happened:
            return True
        wake: queue.SimpleQueue[None] = queue.SimpleQueue()
        self._waiting.append(wake)
        try:
            # Looked at again now that `set` sees this queue: whichever comes second finds the other.
            if not self._happened:
                wake.get(timeout=None if timeout_s is None else max(timeout_s, 0.0))
        except queue.Empty:
            pass
        finally:
            self._waiting.remove(wake)
        return self._happened


class Crew:
    """Threads that do the same work, started and awaited by a thread that signal handlers may interrupt.

    Another thread starts them, in which no signal handler runs. `daemon`: the interpreter does not wait for them when
    it ends.
    """

    def __init__(self, work: Callable[[], None], name: str, count: int = 1, *, daemon: bool = False) -> None:
        self._members = [(Latch(), name, daemon) for _ in range(count)]
        self._work = work
        self._started = Latch()
        self._running: list[Latch] = []
        self._claims: list[object] = []
        """Who comes first decides: a thread that starts them; or None, from a `join` that came before it."""

    def start(self) -> int:
        """Start the threads. Gives how many run: fewer where the system gives no more, or the interpreter is ending."""
        if self._members:
            try:
                _thread.start_new_thread(self._once, ())
            except RuntimeError:
                return 0
            self._started.wait()
        return len(self._running)

    def join(self, timeout_s: float | None = None) -> bool:
        """Return when all have ended: True. False if that takes longer than the timeout."""
        if not self._started.is_set():
            self._claims.append(None)
            if self._claims[0] is None:
                self._started.set()  # nobody has started them, and nobody will
            self._started.wait()  # else `start` was interrupted, and they are being started
        return all(ended.wait(timeout_s) for ended in list(self._running))

    def _once(self) -> None:
        mine = object()
        self._claims.append(mine)
        if self._claims[0] is not mine:
            return
        try:
            self._start_all()
        finally:
            self._started.set()

    def _start_all(self) -> None:
        for ended, name, daemon in self._members:
            thread = threading.Thread(target=self._run, args=(ended,), name=name, daemon=daemon)
            self._running.append(ended)
            try:
                thread.start()
            except RuntimeError:
                self._running.remove(ended)
                return

    def _run(self, ended: Latch) -> None:
        try:
            self._work()
        finally:
            ended.set()


def run_apart(
    work: Callable[[], None], watch: Callable[[], None], keep: Callable[[BaseException], None], every_s: float
) -> None:
    """Run `work` in another thread, where no signal handler runs, and return when it has ended, whatever happens here.

    `watch` is called in this thread every so often. `keep` gets what a signal handler raises in it meanwhile. `work`
    raises nothing. Where the system gives no more threads, this one does the work.
    """
    ended, claims = Latch(), list[object]()

    def once() -> None:
        mine = object()
        claims.append(mine)
        if claims[0] is mine:
            try:
                work()
            finally:
                ended.set()

    while not ended.is_set():
        try:
            # Again after an interruption, which may have come before the thread was there: the first one works.
            if not Crew(once, "milepost", daemon=True).start():
                once()
            while not ended.wait(every_s):
                watch()
        except BaseException as error:  # noqa: BLE001  # the caller's to raise
            keep(error)
