"""A store in this process's memory, for tests and simulations. All ranks that are threads of one process share it."""

import threading
from collections.abc import Iterator, Sequence
from typing import NoReturn

from milepost.errors import AlreadyExists, InvalidRequest, StorageError
from milepost.store.base import FILES, Buffer, OneWayReader, Store, Traits, check_name, top_names
from milepost.store.prefixed import innermost


class MemoryStore:
    """Bytes by name in a dict. An object appears whole when it is committed.

    `traits`: play another kind of store, such as an object store that keeps long files in parts.

    >>> store = milepost.store.MemoryStore()
    >>> _ = milepost.save({"step": 1}, store)
    >>> list(store.list("manifest-"))
    ['manifest-00000001.json']
    """

    def __init__(self, url: str = "memory://", *, traits: Traits = FILES) -> None:
        self._url, self._traits = url, traits
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}

    def __reduce__(self) -> NoReturn:
        """Raises InvalidRequest: another process has other memory."""
        raise InvalidRequest(f"{self._url} is memory of this process, and cannot go to another one; save to a path")

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._url

    @property
    def traits(self) -> Traits:
        """Those that it was made with: by default those of a file system."""
        return self._traits

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole or not at all. Raises AlreadyExists if the name is taken."""
        check_name(name)
        content = b"".join(data)
        with self._lock:
            if name in self.objects:
                raise AlreadyExists(f"{self._url}/{name} exists already")
            self.objects[name] = content

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> "MemoryWriter":
        """Start a new object of this size. Raises AlreadyExists if the name is taken."""
        del direct
        check_name(name)
        if name in self.objects:
            raise AlreadyExists(f"{self._url}/{name} exists already")
        return MemoryWriter(self, name, size_bytes)

    def reader(self, name: str, *, size_bytes: int | None = None) -> "MemoryReader":
        """Open an object. Raises FileNotFoundError if there is none."""
        del size_bytes
        check_name(name)
        with self._lock:
            if name not in self.objects:
                raise FileNotFoundError(f"{self._url}/{name}")
            return MemoryReader(f"{self._url}/{name}", self.objects[name])

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`; `shallow`: up to the next `/`."""
        with self._lock:
            found = iter([name for name in self.objects if name.startswith(prefix)])
        return top_names(found, prefix) if shallow else found

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there."""
        del durable
        with self._lock:
            for name in names:
                self.objects.pop(name, None)

    def link(self, name: str, source: Store, source_name: str) -> bool:
        """Give an object of this or another store in memory a second name here. Not where it plays an object store."""
        held, held_as = innermost(source, source_name)
        found = held.objects.get(held_as) if isinstance(held, MemoryStore) else None
        if found is None or self._traits.is_current:
            return False
        check_name(name)
        with self._lock:
            return self.objects.setdefault(name, found) is found


class MemoryWriter:
    """Collects an object, and puts it into its store on `commit`."""

    aligned = False

    def __init__(self, store: MemoryStore, name: str, size_bytes: int) -> None:
        self._store, self._name, self._data = store, name, bytearray(size_bytes)

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`."""
        for view in views:
            data = memoryview(view).cast("B")
            self._data[offset : offset + len(data)] = data
            offset += len(data)

    def commit(self) -> None:
        """Put the object under its name."""
        self._store.create(self._name, bytes(self._data))

    def abort(self) -> None:
        """Forget the object."""
        self._data.clear()


class MemoryReader(OneWayReader):
    """Reads one object."""

    def __init__(self, url: str, data: bytes) -> None:
        self._url, self._data = url, data

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        return len(self._data)

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`."""
        end = offset + sum(map(len, views))
        if end > len(self._data):
            raise StorageError(f"{self._url} ends before byte {end}")
        for view in views:
            view[:] = self._data[offset : offset + len(view)]
            offset += len(view)

    def close(self) -> None:
        """Nothing to close."""
