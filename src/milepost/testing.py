"""For tests, yours and ours: ranks as threads, and stores that fail or die at a chosen call."""

import threading
from collections.abc import Callable, Iterator
from typing import TypeVar

from milepost.comm import BoardComm, Comm, MemoryBoard
from milepost.store import Reader, Store, Writer
from milepost.store.base import Buffer

T = TypeVar("T")

__all__ = ["CountingStore", "Crash", "CrashingStore", "run_ranks"]


def run_ranks(world: int, work: Callable[[Comm], T], timeout_s: float = 60.0) -> list[T]:
    """Run `work(comm)` on `world` ranks that are threads of this process, and give their results in order.

    Pass the comm to `save` and `load` as `process_group`. If ranks raise, the first rank's error is raised once all
    have ended; the others are its notes.
    """
    board = MemoryBoard()
    results: dict[int, T] = {}
    errors: dict[int, BaseException] = {}

    def run(rank: int) -> None:
        try:
            results[rank] = work(BoardComm(board, rank, world, timeout_s))
        except BaseException as error:  # noqa: BLE001  # handed to the caller below
            errors[rank] = error

    threads = [threading.Thread(target=run, args=(rank,), name=f"rank-{rank}") for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        first = errors[min(errors)]
        for rank, error in sorted(errors.items()):
            first.add_note(f"rank {rank}: {type(error).__name__}: {error}")
        raise first
    return [results[rank] for rank in range(world)]


class Crash(BaseException):
    """The process is dead, as far as the store can tell. Not an Exception: nothing may tidy up after it."""


class CountingStore:
    """A store that counts the calls that reach another store, and calls `before` and `after` around each.

    The hooks get the number of the call, from 1, and its name, and may raise.
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls = 0

    def before(self, number: int, call: str) -> None:
        """Called before call `number` reaches the store."""

    def after(self, number: int, call: str) -> None:
        """Called after it."""

    def run(self, call: str, action: Callable[[], T]) -> T:
        """Count one call and run it between the hooks."""
        self.calls += 1
        number = self.calls
        self.before(number, call)
        result = action()
        self.after(number, call)
        return result

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self.inner.url

    def create(self, name: str, data: bytes) -> None:
        """Counted; see `Store`."""
        self.run(f"create {name}", lambda: self.inner.create(name, data))

    def writer(self, name: str) -> Writer:
        """Counted; see `Store`."""
        return _CountingWriter(self, name, self.run(f"writer {name}", lambda: self.inner.writer(name)))

    def reader(self, name: str) -> Reader:
        """Counted; see `Store`."""
        return self.run(f"reader {name}", lambda: self.inner.reader(name))

    def list(self, prefix: str) -> Iterator[str]:
        """Counted; see `Store`."""
        return self.run(f"list {prefix}", lambda: self.inner.list(prefix))

    def delete(self, name: str) -> None:
        """Counted; see `Store`."""
        self.run(f"delete {name}", lambda: self.inner.delete(name))


class _CountingWriter:
    def __init__(self, store: CountingStore, name: str, inner: Writer) -> None:
        self._store, self._name, self._inner = store, name, inner

    def write(self, data: Buffer) -> None:
        self._store.run(f"write {self._name}", lambda: self._inner.write(data))

    def commit(self) -> None:
        self._store.run(f"commit {self._name}", self._inner.commit)

    def abort(self) -> None:
        self._store.run(f"abort {self._name}", self._inner.abort)


class CrashingStore(CountingStore):
    """A store that dies at call `at`, before or after it takes effect; every later call dies too.

    `how` is what dying means: by default a `Crash` is raised; a test of real processes may kill the process.
    """

    def __init__(self, inner: Store, at: int, *, after: bool = False, how: Callable[[], None] | None = None) -> None:
        super().__init__(inner)
        self._at, self._after, self._how = at, after, how or _crash

    def before(self, number: int, call: str) -> None:
        """Die here, if this is the call or a later one."""
        if number > self._at or (number == self._at and not self._after):
            self._how()

    def after(self, number: int, call: str) -> None:
        """Die here, if the call was to take effect."""
        if number == self._at and self._after:
            self._how()


def _crash() -> None:
    raise Crash
