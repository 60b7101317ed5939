"""HTTP/1.1 as a proxy needs it: heads that stay as they are, and bodies that pass by."""

import contextlib
import socket
from collections.abc import Iterator
from dataclasses import dataclass

_CHUNK_BYTES = 1 << 20
_HEAD_BYTES = 1 << 18


class Cut(Exception):
    """A connection ended, or has to end."""


class Stream:
    """One end of a connection: heads and bodies, and what came in with them."""

    def __init__(self, end: socket.socket) -> None:
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self.end = end
        self._buffer = memoryview(bytearray(_CHUNK_BYTES))
        self._ahead = b""

    def head(self) -> bytes | None:
        """The next head, with its empty line; None at the end of the connection."""
        while (at := self._ahead.find(b"\r\n\r\n")) < 0:
            more = self.end.recv(1 << 16)
            if not more and not self._ahead:
                return None
            if not more or len(self._ahead) > _HEAD_BYTES:
                raise Cut
            self._ahead += more
        head, self._ahead = self._ahead[: at + 4], self._ahead[at + 4 :]
        return head

    def take(self, most: int) -> memoryview:
        """Between one byte and `most` bytes. They are valid until the next call."""
        if self._ahead:
            taken, self._ahead = self._ahead[:most], self._ahead[most:]
            self._buffer[: len(taken)] = taken
            return self._buffer[: len(taken)]
        count = self.end.recv_into(self._buffer, min(most, len(self._buffer)))
        if not count:
            raise Cut
        return self._buffer[:count]

    def line(self) -> bytes:
        """A line of a chunked body."""
        while (at := self._ahead.find(b"\r\n")) < 0:
            more = self.end.recv(1 << 16)
            if not more:
                raise Cut
            self._ahead += more
        line, self._ahead = self._ahead[: at + 2], self._ahead[at + 2 :]
        return line

    @property
    def has_ended(self) -> bool:
        """Whether the other side has closed an idle connection."""
        try:
            self.end.setblocking(False)
            return self.end.recv(1, socket.MSG_PEEK) == b""
        except BlockingIOError:
            return False
        except OSError:
            return True
        finally:
            with contextlib.suppress(OSError):
                self.end.setblocking(True)

    def close(self) -> None:
        """Close it. What was not read is thrown away."""
        with contextlib.suppress(OSError):
            self.end.shutdown(socket.SHUT_RDWR)
        self.end.close()


@dataclass(frozen=True, slots=True)
class Head:
    """The first line and the headers of a request or a reply."""

    first: str
    headers: tuple[tuple[str, str], ...]

    @classmethod
    def parse(cls, text: bytes) -> "Head":
        """From the bytes of `Stream.head`."""
        first, *lines = text.decode("latin-1").removesuffix("\r\n\r\n").split("\r\n")
        pairs = (line.partition(":") for line in lines)
        return cls(first, tuple((name.strip(), value.strip()) for name, _, value in pairs))

    def get(self, name: str) -> str:
        """The value of a header; empty if there is none."""
        return next((value for known, value in self.headers if known.lower() == name), "")

    def without(self, *names: str) -> "Head":
        """Without these headers."""
        return Head(self.first, tuple(pair for pair in self.headers if pair[0].lower() not in names))

    def having(self, name: str, value: str) -> "Head":
        """With this header, instead of another value of it."""
        return Head(self.first, (*self.without(name.lower()).headers, (name, value)))

    @property
    def text(self) -> bytes:
        """As it is sent."""
        lines = [self.first, *(f"{name}: {value}" for name, value in self.headers)]
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")

    @property
    def is_chunked(self) -> bool:
        """Whether the body comes in chunks, each with its length."""
        return "chunked" in self.get("transfer-encoding").lower()

    @property
    def length(self) -> int:
        """The length of the body, if it is not chunked."""
        return int(self.get("content-length") or 0)


def kind_of(head: Head) -> str:
    """The kind of a request, the same for all services."""
    method, target, _ = head.first.split(" ", 2)
    query = target.partition("?")[2]
    if method == "GET" and any(part.startswith(("list-type=", "comp=list", "prefix=")) for part in query.split("&")):
        return "LIST"
    if method == "POST" and ("comp=batch" in query or query.startswith("delete") or "/batch/" in target):
        return "DELETE"
    return method


def body_of(stream: Stream, head: Head, *, until_end: bool = False) -> Iterator[memoryview]:
    """The body as it is sent, piece by piece. `until_end`: one of unknown length lasts as long as the connection."""
    if head.is_chunked:
        yield from _chunks(stream)
        return
    left = head.length
    if until_end and not head.get("content-length"):
        with contextlib.suppress(Cut):
            while True:
                yield stream.take(_CHUNK_BYTES)
    while left:
        piece = stream.take(left)
        left -= len(piece)
        yield piece


def _chunks(stream: Stream) -> Iterator[memoryview]:
    while True:
        line = stream.line()
        yield memoryview(line)
        left = int(line.partition(b";")[0], 16)
        if not left:
            break
        left += 2
        while left:
            piece = stream.take(left)
            left -= len(piece)
            yield piece
    while True:  # trailers, and the empty line
        line = stream.line()
        yield memoryview(line)
        if line == b"\r\n":
            return


def whole_body(stream: Stream, head: Head, *, until_end: bool = False) -> bytearray:
    """The content of the body, without the lengths of chunks."""
    raw = bytearray()
    for piece in body_of(stream, head, until_end=until_end):
        raw += piece
    if not head.is_chunked:
        return raw
    content, at = bytearray(), 0
    while length := int(raw[at : (end := raw.index(b"\r\n", at))].partition(b";")[0], 16):
        content += raw[end + 2 : end + 2 + length]
        at = end + 2 + length + 2
    return content
