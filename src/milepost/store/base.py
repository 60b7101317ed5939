"""The storage port: what a store must do to hold checkpoints. Names are relative, with `/` between parts.

A reply can be lost after the request took effect. Then the call raises; or the store repeats the request, and finds its
own object there. So an error never proves that nothing happened, and `AlreadyExists` never proves that somebody else
was first. Whoever gets it looks:

* `create`: whose content has the name? The caller's own: done. (A part of a shard file has a name that nobody else
  uses, so an object of the right size is the caller's own.)
* `writer` and `Writer.commit`: callers use names that nobody else uses. So what is there is their own: after `writer`
  they delete it and start again; after `commit`, an object of the right size is whole.
* `delete`: a name that is gone is success.

`milepost.testing.ReplyLosingStore` makes any store lose its replies.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from milepost.errors import UnsafeCheckpoint

Buffer = bytes | bytearray | memoryview
CLAIM = ".claim"
"""Suffix of a claim: a writer is about to create the name, on a store that cannot create whole objects exclusively."""


@dataclass(frozen=True, slots=True)
class Traits:
    """What a store is like, for those who plan how to use it. The defaults describe a file system.

    `part_bytes`: an object should not be longer than about this. The data of a longer shard file is stored in parts of
    this size, each by one `create`. 0: a shard file is one object, which `writer` writes in place.
    `range_bytes`: how much one read should ask for. `requests`: how many should be under way at once. 0 leaves both to
    the settings of the transfer.
    `is_current`: a listing shows everything that was created before it began, and nothing that was deleted; and what it
    shows survives power loss. So do S3, Google Cloud Storage and Azure. Without that, names are also tried one by one.

    >>> milepost.store.MemoryStore().traits.part_bytes
    0
    """

    part_bytes: int = 0
    range_bytes: int = 0
    requests: int = 0
    is_current: bool = False


FILES = Traits()
"""The traits of a file system."""


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


class OneWayReader(ABC):
    """The part of a `Reader` that has only one way to read."""

    @abstractmethod
    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """See `Reader`."""

    def is_cold(self, offset: int, length: int) -> bool:
        """Never: no other way would be faster."""
        del offset, length
        return False

    def read_cold(self, offset: int, block: memoryview) -> None:
        """Like `read`."""
        self.read(offset, [block])


@runtime_checkable
class Store(Protocol):
    """Bytes by name. Safe to use from several threads and processes at once.

    >>> isinstance(milepost.store.MemoryStore(), milepost.Store)
    True
    """

    @property
    def url(self) -> str:
        """Where this is, for messages."""

    @property
    def traits(self) -> Traits:
        """What this store is like: `milepost.store.Traits()` for one that is like a file system."""

    def create(self, name: str, *data: Buffer) -> None:
        """Write an object, whole and durable or not at all. Raises AlreadyExists if the name is taken.

        Its content is all of `data`, one after the other: a manifest, or a part of a shard file as `traits` ask for.
        The memory may change as soon as the call has returned.

        Raises NoReply if the request may still take effect, at any time. After any other error the name may or may not
        exist, but that no longer changes. A store whose replies can be lost may raise AlreadyExists for an object that
        this very call made: callers look whose object it is.
        """

    def writer(self, name: str, size_bytes: int, *, direct: bool = True) -> Writer:
        """Start a new object of this size. Raises AlreadyExists for a taken name, StorageError if there is no room.

        `direct=False`: do not bypass the operating system's cache. A store whose replies can be lost may raise
        AlreadyExists for an object that this very call began.
        """

    def reader(self, name: str, *, size_bytes: int | None = None) -> Reader:
        """Open an object. Raises FileNotFoundError if there is none, UnsafeCheckpoint if it is not a plain object.

        `size_bytes`: the size that it should have, if the caller knows it. A store may then leave looking to the first
        read. That read raises FileNotFoundError if there is no object, and CheckpointDamaged if its size is another.
        """

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        """The names that start with `prefix`, in any order, unfinished objects included.

        `shallow`: only up to the next `/` after the prefix. What lies behind it is given once, as a name that ends in
        `/`.
        """

    def delete(self, *names: str, durable: bool = False) -> None:
        """Remove these objects, if they are there. An object that cannot be removed does not keep the others.

        Raises the first error when all were tried. `durable`: return once a power loss can undo no removal and no
        creation in their folders (that is, of names with the same parts up to the last `/`), whoever made it, and
        whether the objects were still there or not.
        """


def top_names(names: Iterator[str], prefix: str) -> Iterator[str]:
    """What a shallow listing gives, from a listing of everything."""
    seen: set[str] = set()
    for name in names:
        inside, slash, _ = name[len(prefix) :].partition("/")
        top = prefix + inside + slash
        if top not in seen:
            seen.add(top)
            yield top


def check_name(name: str) -> tuple[str, ...]:
    """The parts of a name. Raises UnsafeCheckpoint for a name that could lead out of the store."""
    parts = tuple(name.split("/"))
    if not name or any(part in ("", ".", "..") or "\\" in part or "\0" in part for part in parts):
        raise UnsafeCheckpoint(f"{name[:200]!r} is not a name inside a checkpoint")
    return parts
