"""A checkpoint that is opened to be compared: its manifest, its files, and how many bytes were read of it."""

import contextlib
import threading
from collections.abc import Iterator, Sequence

from milepost.commit.find import find, parse, told_if_gone
from milepost.core.manifest import Manifest
from milepost.data.read import Files
from milepost.errors import CheckpointNotFound
from milepost.inspection.place import place_at
from milepost.inspection.runs import look_at
from milepost.store import Location, Reader, Store, Traits
from milepost.store.read_only import ReadOnlyStore


class ByteCount:
    """Counts bytes, from several threads."""

    def __init__(self) -> None:
        self._lock, self.total = threading.Lock(), 0

    def add(self, count: int) -> None:
        """Count some more."""
        with self._lock:
            self.total += count


class ComparedSide:
    """One of the two checkpoints."""

    def __init__(self, url: str, files: Files, count: ByteCount, *, ours: bool) -> None:
        self.url, self.files, self.count, self.ours = url, files, count, ours

    @property
    def manifest(self) -> Manifest:
        """Its manifest."""
        return self.files.manifest

    def count_foreign(self, size_bytes: int) -> None:
        """Count what was read of another library's checkpoint, whose files are not counted by themselves."""
        if not self.ours:
            self.count.add(size_bytes)

    @property
    def data_bytes(self) -> int:
        """The size of its tensors and values of ranks."""
        if self.ours:
            return self.manifest.data_bytes
        return sum(tensor.size_bytes for tensor in self.manifest.tensors)


@contextlib.contextmanager
def opened(path: Location) -> Iterator[ComparedSide]:
    """Open a checkpoint. Raises CheckpointNotFound, naming the newest step where the place is a run.

    What is missing inside because a newer save replaced it, or it was removed, is CheckpointNotFound, too.
    """
    store, count = place_at(path), ByteCount()
    try:
        number, data = find(store)
        count.add(len(data))
        files, ours = Files(_CountedStore(store, count), parse(store.url, number, data)), True
    except CheckpointNotFound as error:
        from milepost.formats.read.recognise import recognise  # noqa: PLC0415  # not needed for our own

        foreign = recognise(store)
        if foreign is None:
            raise _advised(store, error) from None
        number, files, ours = 0, foreign.files, False
    try:
        with told_if_gone(store, number, "compared"):
            yield ComparedSide(store.url, files, count, ours=ours)
    finally:
        files.close()


def _advised(store: Store, error: CheckpointNotFound) -> CheckpointNotFound:
    found = look_at(store)
    if found.kind != "run":
        return error
    last = next((step for step in reversed(found.steps) if step.state == "whole"), found.steps[-1])
    return CheckpointNotFound(
        f"{store.url} is a run of {len(found.steps)} steps, not one checkpoint; pass one of them: {last.url}"
    )


class _CountedStore(ReadOnlyStore):
    """Another store, for reading, with a count of the bytes that are read."""

    def __init__(self, inner: Store, count: ByteCount) -> None:
        self.inner, self._count = inner, count

    @property
    def url(self) -> str:
        return self.inner.url

    @property
    def traits(self) -> Traits:
        return self.inner.traits

    def reader(self, name: str, *, size_bytes: int | None = None) -> Reader:
        return _CountedReader(self.inner.reader(name, size_bytes=size_bytes), self._count)

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        return self.inner.list(prefix, shallow=shallow)


class _CountedReader:
    def __init__(self, inner: Reader, count: ByteCount) -> None:
        self._inner, self._count = inner, count

    @property
    def size_bytes(self) -> int:
        return self._inner.size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._count.add(sum(map(len, views)))
        self._inner.read(offset, views)

    def is_cold(self, offset: int, length: int) -> bool:
        return self._inner.is_cold(offset, length)

    def read_cold(self, offset: int, block: memoryview) -> None:
        self._count.add(len(block))
        self._inner.read_cold(offset, block)

    def close(self) -> None:
        self._inner.close()
