"""A shard file for reading: one object, or several parts that are read as one."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from milepost.core.limits import MIB
from milepost.core.shardfile import FilePart, FileParts
from milepost.errors import CheckpointDamaged, StorageError
from milepost.store import Reader, Store
from milepost.store.base import OneWayReader

MAYBE_REPLACED = "If a newer save replaced this checkpoint, or it was removed, open one again."
_KEPT = 4
"""How many parts of one file stay open: a local copy of a file has as many files as parts."""
_AT_ONCE_BYTES = MIB
"""A file of this size is read by one request, where requests are slow: its header, data and table together."""


def open_parts(store: Store, parts: FileParts) -> Reader:
    """Open a shard file. Raises FileNotFoundError, and CheckpointDamaged where it has another size."""
    if len(parts) > 1:
        return PartsReader(store, parts)
    reader = _sized(store, parts[0])
    return SmallReader(reader) if store.traits.requests and reader.size_bytes <= _AT_ONCE_BYTES else reader


def _sized(store: Store, part: FilePart) -> Reader:
    reader = store.reader(part.name, size_bytes=part.size_bytes)
    if reader.size_bytes != part.size_bytes:
        found = reader.size_bytes
        reader.close()
        raise CheckpointDamaged(f"{store.url}/{part.name} has {found} bytes and was saved with {part.size_bytes}")
    return reader


class SmallReader(OneWayReader):
    """An object that is read as a whole, once."""

    def __init__(self, inner: Reader) -> None:
        self._inner, self.size_bytes = inner, inner.size_bytes
        self._lock = threading.Lock()
        self._data: memoryview | None = None

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`."""
        with self._lock:
            if self._data is None:
                data = memoryview(bytearray(self.size_bytes))
                self._inner.read(0, [data])
                self._data = data
        if offset + sum(map(len, views)) > self.size_bytes:
            self._inner.read(offset, views)  # for its error
        for view in views:
            view[:] = self._data[offset : offset + len(view)]
            offset += len(view)

    def close(self) -> None:
        """Close the object."""
        self._inner.close()


class PartsReader:
    """Several objects, read as one. A part is opened when it is first read from."""

    def __init__(self, store: Store, parts: FileParts) -> None:
        self._store, self._parts = store, parts
        self._where = f"{store.url}/{parts.name}"
        self._lock = threading.Lock()
        self._open: dict[int, Reader] = {}

    @property
    def size_bytes(self) -> int:
        """The size of the file."""
        return self._parts.size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`. Raises CheckpointDamaged for a part that is gone."""
        pending = [view for view in views if len(view)]
        end = offset + sum(map(len, pending))
        if end > self.size_bytes:
            raise StorageError(f"{self._where} ends before byte {end}: it has {self.size_bytes} bytes")
        while pending:
            index = self._parts.at(offset)
            part = self._parts[index]
            taken, pending = _split(pending, part.stop - offset)
            with self._present(part):
                self._reader(index).read(offset - part.start, taken)
            offset += sum(map(len, taken))

    def is_cold(self, offset: int, length: int) -> bool:
        """Whether the part where this range begins would come from the device. Only for a range inside of one part."""
        index = self._parts.at(offset)
        part = self._parts[index]
        if offset + length > part.stop:
            return False
        with self._present(part):
            return self._reader(index).is_cold(offset - part.start, length)

    def read_cold(self, offset: int, block: memoryview) -> None:
        """Like `read`, into page-aligned memory, from a page-aligned offset: headers and parts are whole pages."""
        index = self._parts.at(offset)
        part = self._parts[index]
        if offset + len(block) > part.stop:
            self.read(offset, [block])
            return
        with self._present(part):
            self._reader(index).read_cold(offset - part.start, block)

    def close(self) -> None:
        """Close all parts."""
        with self._lock:
            for reader in self._open.values():
                reader.close()
            self._open.clear()

    @contextlib.contextmanager
    def _present(self, part: FilePart) -> Iterator[None]:
        try:
            yield
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self._store.url}/{part.name} is missing. {MAYBE_REPLACED}") from None

    def _reader(self, index: int) -> Reader:
        with self._lock:
            reader = self._open.pop(index, None)
        if reader is None:
            reader = _sized(self._store, self._parts[index])
        with self._lock:
            self._open[index] = reader
            while len(self._open) > _KEPT:
                # Dropped, not closed: another thread may still read from it. It closes with the last reference.
                self._open.pop(next(iter(self._open)))
        return reader


def _split(views: Sequence[memoryview], size: int) -> tuple[list[memoryview], list[memoryview]]:
    """The first `size` bytes of the views, and the rest."""
    first: list[memoryview] = []
    for i, view in enumerate(views):
        if len(view) > size:
            return [*first, *([view[:size]] if size else [])], [view[size:], *views[i + 1 :]]
        first.append(view)
        size -= len(view)
    return first, []
