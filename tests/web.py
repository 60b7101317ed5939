"""A small web server for a folder, on a port of its own: ranges, and the ways in which servers hurt their readers."""

import contextlib
import re
import ssl
import threading
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Self
from urllib.parse import unquote, urlsplit

Fault = Callable[["Handler"], bool]
"""Called before an answer. True: it has answered, or broken the connection, by itself."""


class Web:
    """Serves `folder`. `requests` are the paths that were asked for, in order, each with its range."""

    def __init__(
        self,
        folder: Path,
        *,
        ranges: bool = True,
        page_for_missing: bool = False,
        moved_to: str = "",
        certificate: tuple[Path, Path] | None = None,
    ) -> None:
        self.folder, self.ranges, self.page_for_missing, self.moved_to = folder, ranges, page_for_missing, moved_to
        self.requests: list[str] = []
        self.logins: list[str] = []
        self.faults: list[Fault] = []
        self._server = _Quiet(("127.0.0.1", 0), type("Bound", (Handler,), {"web": self}))
        self._server.daemon_threads = True
        self.url = f"http://127.0.0.1:{self._server.server_port}"
        if certificate is not None:
            context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
            context.load_cert_chain(*certificate)
            self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
            self.url = f"https://localhost:{self._server.server_port}"

    def __enter__(self) -> Self:
        threading.Thread(target=self._server.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def stop(self) -> None:
        """Accept no connections any more."""
        self._server.shutdown()
        self._server.server_close()


class _Quiet(ThreadingHTTPServer):
    def handle_error(self, *_: object) -> None:
        """Clients may leave as they like."""


class Handler(BaseHTTPRequestHandler):
    """Answers GET."""

    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    wbufsize = -1  # an answer in one piece
    web: Web

    def do_GET(self) -> None:
        web = self.web
        web.requests.append(f"{self.path} {self.headers.get('Range', '')}")
        web.logins.append(self.headers.get("Authorization", ""))
        if web.faults and web.faults.pop(0)(self):
            return
        if web.moved_to:
            self.answer(302, b"", Location=f"{web.moved_to}{self.path}")
            return
        path = web.folder / unquote(urlsplit(self.path).path).lstrip("/")
        if not path.is_file():
            status = 200 if web.page_for_missing else 404
            self.answer(status, b"<html>no such page</html>", **{"Content-Type": "text/html"})
            return
        data = path.read_bytes()
        wanted = re.fullmatch(r"bytes=([0-9]+)-([0-9]+)", self.headers.get("Range", ""))
        version = {"ETag": f'"{path.stat().st_mtime_ns}"', "Content-Type": "application/octet-stream"}
        if wanted is None or not web.ranges:
            self.answer(200, data, **version)
        elif int(wanted[1]) >= len(data):
            self.answer(416, b"", **version, **{"Content-Range": f"bytes */{len(data)}"})
        else:
            start, stop = int(wanted[1]), min(int(wanted[2]) + 1, len(data))
            self.answer(206, data[start:stop], **version, **{"Content-Range": f"bytes {start}-{stop - 1}/{len(data)}"})

    def answer(self, status: int, body: bytes, *, sent: int | None = None, **headers: str) -> None:
        """Send an answer; of its body only `sent` bytes, and then cut the connection."""
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        with contextlib.suppress(ConnectionError):
            self.wfile.write(body if sent is None else body[:sent])
        if sent is not None:
            self.close_connection = True

    def log_message(self, *_: object) -> None:
        """Say nothing."""


def busy(handler: Handler) -> bool:
    """503, with a pause that the server asks for."""
    handler.answer(503, b"", **{"Retry-After": "0"})
    return True


def cut(handler: Handler) -> bool:
    """A body that ends too early."""
    handler.answer(206, bytes(100), sent=3, **{"Content-Range": "bytes 0-99/100"})
    return True


def hang_up(handler: Handler) -> bool:
    """No answer at all."""
    handler.close_connection = True
    return True


def other_range(handler: Handler) -> bool:
    """A range that nobody asked for."""
    handler.answer(206, bytes(9), **{"Content-Range": "bytes 1234567-1234575/9999999"})
    return True


def fine(_handler: Handler) -> bool:
    """No fault."""
    return False
