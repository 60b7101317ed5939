"""A store inside another: all names under one prefix, so that several checkpoints can share a place."""

from collections.abc import Iterator

from milepost.errors import UnsafeCheckpoint
from milepost.store.base import Buffer, Reader, Store, Traits, Writer, check_name


def innermost(store: Store, name: str) -> tuple[Store, str]:
    """The store that holds an object at last, and the name that it has there."""
    while True:
        if isinstance(store, Within):
            name = f"{store.prefix}/{name}"
        inner: Store | None = getattr(store, "inner", None)  # also of stores that wrap another, as those of tests do
        if inner is None:
            return store, name
        store = inner


class Within:
    """The part of `inner` under `prefix/`. Promises what `inner` promises; nothing outside of the prefix is reached.

    >>> store = milepost.store.MemoryStore()
    >>> _ = milepost.save({"step": 1}, milepost.store.Within(store, "a"))
    >>> list(store.list("a/manifest-"))
    ['a/manifest-00000001.json']
    """

    def __init__(self, inner: Store, prefix: str) -> None:
        check_name(prefix)
        self.inner, self.prefix = inner, prefix

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return f"{self.inner.url.rstrip('/')}/{self.prefix}"

    @property
    def traits(self) -> Traits:
        """Those of the inner store."""
        return self.inner.traits

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole and durable or not at all. Raises AlreadyExists if the name is taken."""
        self.inner.create(self._outer(name), *data)

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> Writer:
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room."""
        return self.inner.writer(self._outer(name), size_bytes, direct=direct)

    def reader(self, name: str, *, size_bytes: int | None = None) -> Reader:
        """Open an object. Raises FileNotFoundError if there is none, UnsafeCheckpoint if it is not a plain object."""
        return self.inner.reader(self._outer(name), size_bytes=size_bytes)

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`, in any order, unfinished objects included."""
        start = len(self.prefix) + 1
        return (name[start:] for name in self.inner.list(f"{self.prefix}/{prefix}", shallow=shallow))

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there; `durable`: return once a power loss cannot bring them back."""
        self.inner.delete(*map(self._outer, names), durable=durable)

    def link(self, name: str, source: Store, source_name: str) -> bool:
        """Give an object of another place a second name here, if the inner store can."""
        linking = getattr(self.inner, "link", None)
        return linking is not None and bool(linking(self._outer(name), source, source_name))

    def parent(self) -> tuple[Store, str]:
        """The inner store, and the name of this place in it."""
        return self.inner, self.prefix

    def _outer(self, name: str) -> str:
        try:
            check_name(name)
        except UnsafeCheckpoint:
            raise UnsafeCheckpoint(f"{name[:200]!r} is not a name inside {self.url}") from None
        return f"{self.prefix}/{name}"
