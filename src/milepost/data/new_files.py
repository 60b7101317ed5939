"""Beginning and ending new files and objects, where the reply to a request can be lost. Knows no torch.

The callers use names that nobody else uses. So what is there under such a name is their own.
"""

import contextlib
from collections.abc import Iterator, Sequence
from typing import TypeVar

from milepost.core.shardfile import FilePart
from milepost.errors import AlreadyExists
from milepost.store import Store, Writer
from milepost.store.base import Buffer

W = TypeVar("W", bound=Writer)


@contextlib.contextmanager
def committed(writer: W) -> Iterator[W]:
    """Commit the file at the end of the block. On any error nothing of it remains, except after AlreadyExists."""
    try:
        yield writer
        writer.commit()
    except AlreadyExists:
        raise  # perhaps by this very commit; the caller looks
    except BaseException:
        writer.abort()
        raise


def start_file(store: Store, name: str, size_bytes: int, direct: bool) -> Writer:
    """Start a file. One of this name can only be our own, by a request whose reply was lost: it has no bytes yet."""
    try:
        return store.writer(name, size_bytes, direct=direct)
    except AlreadyExists:
        store.delete(name)
        return store.writer(name, size_bytes, direct=direct)


def create_part(store: Store, part: FilePart, data: Sequence[Buffer]) -> None:
    """Create one object. One of this name and size can only be our own, by a request whose reply was lost."""
    try:
        store.create(part.name, *data)
    except AlreadyExists:
        if not is_there(store, part.name, part.size_bytes):
            raise


def is_there(store: Store, name: str, size_bytes: int) -> bool:
    """Whether there is an object of this name and size."""
    try:
        with contextlib.closing(store.reader(name)) as reader:
            return reader.size_bytes == size_bytes
    except FileNotFoundError:
        return False
