"""Reading objects by ranges. Every reply says how long the whole object is, and that is compared."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from milepost.errors import CheckpointDamaged, StorageError
from milepost.store.base import OneWayReader
from milepost.store.cloud.replies import Refusal, Why
from milepost.store.cloud.requests import Asker, BadReply
from milepost.store.stopping import side_by_side

FIRST_BYTES = 256 << 10
"""What the request that opens an object brings of it: all of most manifests."""
COPIED_ALONE = 256 << 10
"""A shorter copy is done before another thread could start."""
RANGE_BYTES = 8 << 20
"""A longer read is cut into several requests."""
AT_ONCE = 8
"""How many requests of one long read are under way at once."""


class CloudReader(OneWayReader):
    """Reads one object. `first` is its beginning, if it was looked at already."""

    def __init__(self, asker: Asker, name: str, size_bytes: int, first: bytes | None = None) -> None:
        self._asker, self._name, self._size_bytes, self._first = asker, name, size_bytes, first
        self._url = f"{asker.place.url}/{name}"

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        return self._size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        """Fill all of `views`, one after the other, from `offset`. A long range is read by several requests at once."""
        targets = [view.cast("B") for view in views if view.nbytes]
        end = offset + sum(map(len, targets))
        if end > self._size_bytes:
            raise StorageError(f"{self._url} ends before byte {end}: it has {self._size_bytes} bytes")
        if self._first is not None and end <= len(self._first):
            fill(targets, 0, memoryview(self._first)[offset:end])
        elif end - offset <= 2 * RANGE_BYTES:
            self._read_range(offset, targets)
        else:
            pieces = list(cut(targets, offset, RANGE_BYTES))
            side_by_side(lambda piece: self._read_range(*piece), pieces, AT_ONCE)

    def close(self) -> None:
        """Forget the beginning that came with opening it."""
        self._first = None

    def _read_range(self, offset: int, targets: Sequence[memoryview]) -> None:
        key = self._asker.place.key(self._name)
        length = sum(map(len, targets))

        def get(client: Any) -> int:
            if not length:
                return int(client.head(key)["size"])
            reply = client.get(key, options={"range": (offset, offset + length)})
            if reply.meta["size"] == self._size_bytes:
                receive(reply, targets, length)
            return int(reply.meta["size"])

        found = self._asker.ask_or({Why.SHORT}, "get", self._name, get, size_bytes=length)
        if isinstance(found, Refusal):
            found = int(self._asker.ask("get", self._name, lambda client: client.head(key)["size"]))
        if found != self._size_bytes:
            raise CheckpointDamaged(f"{self._url} has {found} bytes and should have {self._size_bytes}")


def open_object(asker: Asker, name: str) -> CloudReader:
    """A reader of an object that was looked at. Raises FileNotFoundError if there is none."""
    key = asker.place.key(name)

    def get(client: Any) -> tuple[int, bytes]:
        reply = client.get(key, options={"range": (0, FIRST_BYTES)})
        size = int(reply.meta["size"])
        first = bytearray(min(size, FIRST_BYTES))
        receive(reply, [memoryview(first)], len(first))
        return size, bytes(first)

    found = asker.ask_or({Why.SHORT}, "get", name, get)
    size, first = (0, b"") if isinstance(found, Refusal) else found  # no range of an empty object can be had
    return CloudReader(asker, name, size, first)


def receive(reply: Any, targets: Sequence[memoryview], length: int) -> None:
    """Fill the targets with the body of a reply. Raises BadReply if its length is another."""
    # All of it at once. Chunk by chunk, the threads of a load wait for each other at every chunk: Python's lock.
    data = memoryview(reply.bytes())
    if len(data) > length:
        raise BadReply(f"the reply is longer than the {length} bytes that were asked for")
    if len(data) < length:
        raise BadReply(f"the reply ended after {len(data)} of {length} bytes")
    fill(targets, 0, data)


def fill(targets: Sequence[memoryview], start: int, data: memoryview) -> None:
    """Copy `data` into the targets, one after the other, from byte `start` of them all."""
    for target in targets:
        if start >= len(target):
            start -= len(target)
            continue
        part = data[: len(target) - start]
        copy(part, target[start : start + len(part)])
        data, start = data[len(part) :], 0
        if not len(data):
            return


def copy(source: memoryview, target: memoryview) -> None:
    """Copy between two views of the same length. A long copy lets other threads run."""
    if len(source) < COPIED_ALONE:
        target[:] = source
    else:
        np.copyto(np.frombuffer(target, dtype=np.uint8), np.frombuffer(source, dtype=np.uint8))


def cut(targets: Sequence[memoryview], offset: int, size_bytes: int) -> Iterator[tuple[int, list[memoryview]]]:
    """The targets in pieces of this size: where each begins in the object, and its views."""
    piece: list[memoryview] = []
    room = size_bytes
    for target in targets:
        while len(target):
            part, target = target[:room], target[room:]  # noqa: PLW2901
            piece.append(part)
            room -= len(part)
            if not room:
                yield offset, piece
                offset, piece, room = offset + size_bytes, [], size_bytes
    if piece:
        yield offset, piece
