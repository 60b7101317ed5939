"""The storage port: what a store must do to hold checkpoints. Names are relative, with `/` between parts.

A reply can be lost after the request took effect. Then the call raises; or the store repeats the request, and finds its
own object there. So an error never proves that nothing happened, and `AlreadyExists` never proves that somebody else
was first. Whoever gets it looks:

* `create`: whose content has the name? The caller's own: done.
* `writer` and `Writer.commit`: callers use names that nobody else uses. So what is there is their own: after `writer`
  they delete it and start again; after `commit`, an object of the right size is whole.
* `delete`: a name that is gone is success.

`milepost.testing.ReplyLosingStore` makes any store lose its replies.
"""

from collections.abc import Iterator, Sequence
from typing import Protocol, runtime_checkable

from milepost.errors import UnsafeCheckpoint

Buffer = bytes | bytearray | memoryview
CLAIM = ".claim"
"""Suffix of a claim: a writer is about to create the name, on a store that cannot create whole objects exclusively."""


class Writer(Protocol):
    """A new object that is being written. Ranges may come in any order and from several threads at once."""

    @property
    def aligned(self) -> bool:
        """Whether data should be in page-aligned memory: it then goes to the device without another copy."""

    def write(self, offset: int, views: Sequence[Buffer]) -> None:
        """Write all of `views`, one after the other, at `offset`. Raises StorageError when the store refuses."""

    def commit(self) -> None:
        """Return once the object is whole and survives power loss under its name.

        A store whose replies can be lost may raise AlreadyExists though this very call has made the object.
        """

    def abort(self) -> None:
        """Give up: nothing of the object remains. Never raises."""


class Reader(Protocol):
    """An object that is open for reading, from several threads at once. `close` closes it, or its last reference."""

    @property
    def size_bytes(self) -> int:
        """The size of the object."""

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`.

        Raises StorageError where the object is shorter, FileNotFoundError where it was removed meanwhile. (A store may
        also go on reading a removed object.)
        """

    def is_cold(self, offset: int, length: int) -> bool:
        """Whether a range would come from the device, and `read_cold` would be the faster way to get it."""

    def read_cold(self, offset: int, block: memoryview) -> None:
        """Like `read`, into page-aligned memory, from a page-aligned offset."""

    def close(self) -> None:
        """Close the object."""


@runtime_checkable
class Store(Protocol):
    """Bytes by name. Safe to use from several threads and processes at once.

    >>> isinstance(milepost.store.MemoryStore(), milepost.Store)
    True
    """

    @property
    def url(self) -> str:
        """Where this is, for messages."""

    def create(self, name: str, data: bytes) -> None:
        """Write a small object, whole and durable or not at all. Raises AlreadyExists if the name is taken.

        After any other error the name may or may not exist, but that no longer changes. A store whose replies can be
        lost may raise AlreadyExists for an object that this very call made: callers look whose object it is.
        """

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> Writer:
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room.

        `direct=False`: do not bypass the operating system's cache. A store whose replies can be lost may raise
        AlreadyExists for an object that this very call began.
        """

    def reader(self, name: str) -> Reader:
        """Open an object. Raises FileNotFoundError if there is none, UnsafeCheckpoint if it is not a plain object."""

    def list(self, prefix: str) -> Iterator[str]:
        """The names that start with `prefix`, in any order, unfinished objects included."""

    def delete(self, name: str, *, durable: bool = False) -> None:
        """Remove an object if it is there.

        `durable`: return once a power loss can undo no removal and no creation in its folder (that is, of names with
        the same parts up to the last `/`), whoever made it, and whether the object was still there or not.
        """


def check_name(name: str) -> tuple[str, ...]:
    """The parts of a name. Raises UnsafeCheckpoint for a name that could lead out of the store."""
    parts = tuple(name.split("/"))
    if not name or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise UnsafeCheckpoint(f"{name[:200]!r} is not a name inside a checkpoint")
    return parts
