"""A store in this process's memory, for tests and simulations. All ranks that are threads of one process share it."""

import threading
from collections.abc import Iterator

from milepost.errors import AlreadyExists, StorageError
from milepost.store.base import Buffer, check_name


class MemoryStore:
    """Bytes by name in a dict. An object appears whole when it is committed."""

    def __init__(self, url: str = "memory://") -> None:
        self._url = url
        self._lock = threading.Lock()
        self.objects: dict[str, bytes] = {}

    @property
    def url(self) -> str:
        """Where this is, for messages."""
        return self._url

    def create(self, name: str, data: bytes) -> None:
        """Write a small object, whole or not at all. Raises AlreadyExists if the name is taken."""
        check_name(name)
        with self._lock:
            if name in self.objects:
                raise AlreadyExists(f"{self._url}/{name} exists already")
            self.objects[name] = bytes(data)

    def writer(self, name: str) -> "MemoryWriter":
        """Start a new object. Raises AlreadyExists if the name is taken."""
        check_name(name)
        if name in self.objects:
            raise AlreadyExists(f"{self._url}/{name} exists already")
        return MemoryWriter(self, name)

    def reader(self, name: str) -> "MemoryReader":
        """Open an object. Raises FileNotFoundError if there is none."""
        check_name(name)
        with self._lock:
            if name not in self.objects:
                raise FileNotFoundError(f"{self._url}/{name}")
            return MemoryReader(f"{self._url}/{name}", self.objects[name])

    def list(self, prefix: str) -> Iterator[str]:
        """The names that start with `prefix`."""
        with self._lock:
            return iter([name for name in self.objects if name.startswith(prefix)])

    def delete(self, name: str) -> None:
        """Remove an object if it is there."""
        with self._lock:
            self.objects.pop(name, None)


class MemoryWriter:
    """Collects an object, and puts it into its store on `commit`."""

    def __init__(self, store: MemoryStore, name: str) -> None:
        self._store, self._name, self._data = store, name, bytearray()

    def write(self, data: Buffer) -> None:
        """Append all of `data`."""
        self._data += data

    def commit(self) -> None:
        """Put the object under its name."""
        self._store.create(self._name, bytes(self._data))

    def abort(self) -> None:
        """Forget the object."""
        self._data.clear()


class MemoryReader:
    """Reads one object."""

    def __init__(self, url: str, data: bytes) -> None:
        self._url, self._data = url, data

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        return len(self._data)

    def read_into(self, offset: int, target: memoryview) -> None:
        """Fill all of `target` from `offset`."""
        part = self._data[offset : offset + len(target)]
        if len(part) != len(target):
            raise StorageError(f"{self._url} ends before byte {offset + len(target)}")
        target[:] = part

    def close(self) -> None:
        """Nothing to let go of."""
