"""Stores that count their calls, fail or die at a chosen call, lose replies, or carry requests out late."""

import contextlib
import errno
import threading
from collections.abc import Callable, Collection, Iterator, Sequence
from functools import partial
from typing import Literal, TypeVar, get_args

from milepost.errors import AlreadyExists, CheckpointError, NoReply, StorageError
from milepost.store import Reader, Store, Traits, Writer
from milepost.store.base import Buffer
from milepost.store.siblings import link

T = TypeVar("T")
Request = Literal["create", "writer", "commit", "delete"]
"""The requests that change a store."""


class Crash(BaseException):
    """The process is dead, as far as the store can tell. Not an Exception, so that no handler tidies up after it.

    `CrashingStore` and `UnsyncedStore` raise it; see the example of the first.
    """


class CountingStore:
    """A store that counts the calls that reach another store, and calls `before` and `after` around each.

    The hooks get the number of the call, from 1, and its text, such as "write data/...". They may raise.

    >>> store = milepost.testing.CountingStore(milepost.store.MemoryStore())
    >>> _ = milepost.save({"step": 7}, store)
    >>> store.calls > 0
    True
    """

    def __init__(self, inner: Store) -> None:
        self.inner = inner
        self.calls = 0
        self._lock = threading.Lock()

    def before(self, number: int, call: str) -> None:
        """Called before call `number` reaches the store."""

    def after(self, number: int, call: str) -> None:
        """Called after call `number` has reached the store."""

    def run(self, call: str, action: Callable[[], T]) -> T:
        """Count one call and run it between the hooks."""
        with self._lock:
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

    @property
    def traits(self) -> Traits:
        """Those of the store that is counted."""
        return self.inner.traits

    def create(self, name: str, *data: Buffer) -> None:
        """Counted; see `Store`."""
        self.run(f"create {name}", lambda: self.inner.create(name, *data))

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> Writer:
        """Counted; see `Store`."""
        inner = self.run(f"writer {name}", lambda: self.inner.writer(name, size_bytes, direct=direct))
        return _CountingWriter(self, name, inner)

    def reader(self, name: str, *, size_bytes: int | None = None) -> Reader:
        """Counted; see `Store`."""
        return self.run(f"reader {name}", lambda: self.inner.reader(name, size_bytes=size_bytes))

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """Counted; see `Store`."""
        return self.run(f"list {prefix}", lambda: self.inner.list(prefix, shallow=shallow))

    def delete(self, *names: str, durable: bool = False) -> None:
        """Counted, each name as a call of its own; see `Store`."""
        errors = []
        for name in names:
            try:
                self.run(f"delete {name}", partial(self.inner.delete, name, durable=durable))
            except (CheckpointError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def link(self, name: str, source: Store, source_name: str) -> bool:
        """Counted, where the inner store has second names; see `milepost.store.siblings`."""
        return self.run(f"link {name}", lambda: link(self.inner, name, source, source_name))


class _CountingWriter:
    def __init__(self, store: CountingStore, name: str, inner: Writer) -> None:
        self._store, self._name, self._inner = store, name, inner

    @property
    def aligned(self) -> bool:
        return self._inner.aligned

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        self._store.run(f"write {self._name}", lambda: self._inner.write(offset, views))

    def commit(self) -> None:
        self._store.run(f"commit {self._name}", self._inner.commit)

    def abort(self) -> None:
        self._store.run(f"abort {self._name}", self._inner.abort)


class CrashingStore(CountingStore):
    """A store that dies at call `at`: before the call takes effect, or after it with `after=True`. Later calls die too.

    Dying raises `Crash`, unless `how` does something else: a test of real processes may kill the process.

    >>> inner = milepost.store.MemoryStore()
    >>> _ = milepost.save({"step": 1}, inner)
    >>> try:
    ...     milepost.save({"step": 2}, milepost.testing.CrashingStore(inner, at=3))
    ... except milepost.testing.Crash:
    ...     milepost.open(inner)["step"]
    1
    """

    def __init__(self, inner: Store, at: int, *, after: bool = False, how: Callable[[], None] | None = None) -> None:
        super().__init__(inner)
        self._at, self._after, self._how = at, after, how or _crash

    def before(self, number: int, call: str) -> None:
        """Die if this is the call, or a later one."""
        if number > self._at or (number == self._at and not self._after):
            self._how()

    def after(self, number: int, call: str) -> None:
        """Die if this is the call, and it was to take effect."""
        if number == self._at and self._after:
            self._how()


def _crash() -> None:
    raise Crash


class ReplyLosingStore(CountingStore):
    """A store whose replies are lost, as on a network: of the first request of each kind for each name.

    `requests`: which kinds. `after=True`: the request took effect, and its reply was lost; `after=False`: the request
    itself was lost. `repeats=True`: the store sends it again, as NFS does, and finds its own object there; else the
    caller gets a StorageError (ETIMEDOUT). `lost` counts the losses.

    >>> store = milepost.testing.ReplyLosingStore(milepost.store.MemoryStore(), repeats=True)
    >>> _ = milepost.save({"step": 7}, store)
    >>> milepost.open(store)["step"], store.lost > 0
    (7, True)
    """

    def __init__(
        self,
        inner: Store,
        requests: Collection[Request] = get_args(Request),
        *,
        after: bool = True,
        repeats: bool = False,
    ) -> None:
        super().__init__(inner)
        self.lost = 0
        self._requests, self._after, self._repeats = frozenset(requests), after, repeats
        self._met: set[str] = set()

    def run(self, call: str, action: Callable[[], T]) -> T:
        """Count one call and run it; lose its reply if it is the first of its kind for this name."""
        kind = call.split(" ", 1)[0]
        with self._lock:
            loses = kind in self._requests and call not in self._met
            self._met.add(call)
            self.lost += loses
        if not loses:
            return super().run(call, action)
        if self._after:
            result = super().run(call, action)
            if self._repeats and kind == "delete":
                return result
        elif self._repeats:
            return super().run(call, action)
        if self._repeats:
            raise AlreadyExists(f"{self.url}: {call}: it exists already", errno=errno.EEXIST)
        raise StorageError(f"{self.url}: {call}: no reply", errno=errno.ETIMEDOUT)


class LateStore(CountingStore):
    """A store whose requests can take effect late, as those of an object store can.

    `fate` says what becomes of a request, by its text, such as "create manifest-00000001.json". "late": the caller gets
    NoReply, and the request takes effect when `arrive` is called. "twice": it takes effect at once, and a copy that was
    under way does so again when `arrive` is called. None: it takes effect at once. `waiting` is how many there are.

    >>> store = milepost.testing.LateStore(
    ...     milepost.store.MemoryStore(traits=milepost.store.Traits(is_current=True)),
    ...     lambda call: "late" if call.startswith("create manifest") else None,
    ... )
    >>> try:
    ...     milepost.save({"step": 7}, store)
    ... except milepost.NoReply:
    ...     store.waiting, store.arrive(), milepost.open(store)["step"]
    (1, None, 7)
    """

    def __init__(self, inner: Store, fate: Callable[[str], Literal["late", "twice"] | None]) -> None:
        super().__init__(inner)
        self.fate = fate
        self._under_way: list[Callable[[], None]] = []

    @property
    def waiting(self) -> int:
        """How many requests have not taken effect yet."""
        return len(self._under_way)

    def create(self, name: str, *data: Buffer) -> None:
        """Counted, and late if its fate says so; see `Store`."""
        content = b"".join(data)  # the caller may change its memory before the request arrives
        self._send(f"create {name}", lambda: self.inner.create(name, content))

    def delete(self, *names: str, durable: bool = False) -> None:
        """Counted, each name as a call of its own, and late if its fate says so; see `Store`."""
        errors = []
        for name in names:
            try:
                self._send(f"delete {name}", partial(self.inner.delete, name, durable=durable))
            except (CheckpointError, OSError) as error:
                errors.append(error)
        if errors:
            raise errors[0]

    def _send(self, call: str, action: Callable[[], None]) -> None:
        fate = self.fate(call)
        if fate is not None:
            self._under_way.append(action)
        if fate == "late":
            self.run(call, lambda: None)
            raise NoReply(f"{self.url}: {call}: no reply", errno=errno.ETIMEDOUT)
        self.run(call, action)

    def arrive(self, which: int | None = None) -> None:
        """Let what is under way take effect: all of it, in order, or one by its place. Nobody hears how it ended."""
        arrived = self._under_way[:] if which is None else [self._under_way[which]]
        for action in arrived:
            self._under_way.remove(action)
            with contextlib.suppress(CheckpointError, OSError):
                action()
