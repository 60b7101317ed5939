"""Records as bytes and back. Pure."""

from collections.abc import Callable
from types import UnionType
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class Wire(Generic[T]):
    """Turns values of one type into bytes and back: `Wire(T)` as msgpack, `Wire.json(T)` as JSON.

    Make each one at the top of a module. msgspec (0.22) can crash when two threads are the first to decode a type, so
    the decoder has to exist before any thread needs it. A `Wire` may be used by many threads at once.

    A union is not a class, so its type has to be spelled out: `_FILE: Wire[ShardFile | None] = Wire(ShardFile | None)`.
    """

    __slots__ = ("_decode", "_encode")

    def __init__(self, kind: type[T] | UnionType, encoding: Any = msgspec.msgpack) -> None:
        self._encode: Callable[[T], bytes] = encoding.Encoder().encode
        self._decode: Callable[[bytes | bytearray | memoryview], T] = encoding.Decoder(kind).decode

    @classmethod
    def json(cls, kind: type[T] | UnionType) -> "Wire[T]":
        """Like `Wire(kind)`, but the bytes are JSON."""
        return cls(kind, msgspec.json)

    def pack(self, value: T) -> bytes:
        """The bytes of a value. Equal values of one type have equal bytes, but for the order of dicts and sets."""
        return self._encode(value)

    def unpack(self, data: bytes | bytearray | memoryview) -> T:
        """The value that the bytes spell. Raises ValueError for bytes that are no such value, however they came about.

        Bytes that nest too deeply raise RecursionError.
        """
        return self._decode(data)
