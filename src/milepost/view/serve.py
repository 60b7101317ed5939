"""A live page on this machine: a small web server that answers nobody but the browser that it was made for.

It listens on the loopback address only. Its pages stand under a path that nobody can guess, it refuses other names in
the Host header (which a page elsewhere could let point here), and it has one page and its data, and no files.
"""

import contextlib
import hmac
import json
import secrets
import socket
import threading
import time
from collections.abc import Callable
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from milepost.errors import InvalidRequest
from milepost.view.follow import Followed
from milepost.view.page import data_of, make_page, policy_of
from milepost.view.record import Page

ADDRESS = "127.0.0.1"
_TOKEN_BYTES = 18
_REQUEST_S = 10.0
"""How long a client may take to say what it wants, and to take the answer."""
_MOST_CLIENTS = 32
"""How many are answered at the same time. Others wait in the queue of the system."""
_HEADERS = {
    "Cache-Control": "no-store",
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Connection": "close",
}


class LivePage:
    """What the server tells: the newest page, made when it is asked for. May be used by several threads."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._page: Page | None = None
        self._number, self._trouble = 0, ""
        self._made: dict[str, bytes] = {}

    def set(self, followed: Followed) -> None:
        """Tell from now on what was seen last."""
        with self._lock:
            if followed.number != self._number:
                self._page, self._number, self._made = followed.page, followed.number, {}
            self._trouble = followed.trouble

    def state(self) -> bytes:
        """The number of the newest data, and what is wrong with the place."""
        return json.dumps({"number": self._number, "trouble": self._trouble}).encode()

    def data(self) -> bytes:
        """The newest data, with its number."""
        return self._once("data", lambda page: _data(page, self._number))

    def html(self, path: str) -> bytes:
        """The page itself, which asks for news below `path`."""
        return self._once("html", lambda page: make_page(page, live=path, number=self._number))

    def _once(self, kind: str, make: Callable[[Page], bytes]) -> bytes:
        with self._lock:
            if kind not in self._made:
                assert self._page is not None
                self._made[kind] = make(self._page)
            return self._made[kind]


def _data(page: Page, number: int) -> bytes:
    return json.dumps({"number": number, **{name: text.decode() for name, text in data_of(page).items()}}).encode()


class PageServer(HTTPServer):
    """The server. `url`: where the page is. It answers from `start` to `close`, and no thread is left then."""

    request_queue_size = 64

    def __init__(self, live: LivePage, port: int = 0) -> None:
        self.live, self.token = live, secrets.token_urlsafe(_TOKEN_BYTES)
        self._slots = threading.BoundedSemaphore(_MOST_CLIENTS)
        self._clients: dict[threading.Thread, tuple[socket.socket, float]] = {}
        self._lock = threading.Lock()
        try:
            super().__init__((ADDRESS, port), _PageRequest)
        except OSError as error:
            raise InvalidRequest(f"cannot listen on port {port}: {error.strerror or error}") from None
        self._thread = threading.Thread(target=self.serve_forever, args=(0.1,), name="milepost-view", daemon=True)

    @property
    def url(self) -> str:
        """The address to open."""
        return f"http://{ADDRESS}:{self.server_port}/{self.token}/"

    def start(self) -> None:
        """Answer from now on."""
        self._thread.start()

    def close(self) -> None:
        """Stop at once: whoever is being answered is cut off."""
        self.shutdown()
        self._thread.join()
        self.server_close()
        for thread in self._hang_up_on(since=time.monotonic()):
            thread.join()

    def _hang_up_on(self, since: float) -> list[threading.Thread]:
        """Cut off the clients that came before that, and give their threads."""
        with self._lock:
            clients = {thread: client for thread, (client, came) in self._clients.items() if came <= since}
        for client in clients.values():
            _hang_up(client)
        return list(clients)

    def get_request(self) -> tuple[socket.socket, Any]:
        """The next client; none while too many are being answered."""
        if not self._slots.acquire(timeout=0.5):
            self._hang_up_on(time.monotonic() - _REQUEST_S)
            raise OSError("too many clients")  # the server goes on, and the client waits in the queue
        try:
            return super().get_request()
        except BaseException:
            self._slots.release()
            raise

    def process_request(self, request: Any, client_address: Any) -> None:
        """Answer one client in a thread of its own."""
        thread = threading.Thread(target=self._answer, args=(request, client_address), name="milepost-view-client")
        thread.daemon = True
        with self._lock:
            self._clients[thread] = request, time.monotonic()
        thread.start()

    def _answer(self, request: socket.socket, client_address: Any) -> None:
        try:
            self.finish_request(request, client_address)
        except OSError:
            pass  # the client went away
        finally:
            self.shutdown_request(request)
            with self._lock:
                del self._clients[threading.current_thread()]
            self._slots.release()

    def handle_error(self, request: Any, client_address: Any) -> None:
        """Say nothing: a client that breaks off is no error of the server."""


def _hang_up(client: socket.socket) -> None:
    with contextlib.suppress(OSError):  # it went away
        client.shutdown(socket.SHUT_RDWR)


class _PageRequest(BaseHTTPRequestHandler):
    """One request. Everything but a GET of what is there gets a few words and no more."""

    server: PageServer
    timeout = _REQUEST_S
    server_version, sys_version = "milepost", ""

    def do_GET(self) -> None:
        """The page, its state, or its data."""
        if not self._is_for_us():
            self._refuse(403)
            return
        found = self.path.split("?", 1)[0].encode("utf-8", "surrogateescape")
        root = f"/{self.server.token}/".encode()
        if not hmac.compare_digest(found[: len(root)], root):
            self._refuse(404)
            return
        live = self.server.live
        match found[len(root) :]:
            case b"":
                self._send(200, "text/html; charset=utf-8", live.html(root.decode()), policy_of(live=True))
            case b"state":
                self._send(200, "application/json", live.state())
            case b"data":
                self._send(200, "application/json", live.data())
            case _:
                self._refuse(404)

    def _is_for_us(self) -> bool:
        """Whether the request was meant for this server, and comes from its own page or from the user."""
        port = self.server.server_port
        hosts = {f"{ADDRESS}:{port}", f"localhost:{port}"}
        named = self.headers.get_all("Host") or []
        origins = self.headers.get_all("Origin") or []
        return len(named) == 1 and named[0].lower() in hosts and all(one == f"http://{named[0]}" for one in origins)

    def send_error(self, code: int, message: str | None = None, explain: str | None = None) -> None:
        """Whatever the base class refuses: other methods, broken requests."""
        del message, explain
        self._refuse(code)

    def _refuse(self, code: int) -> None:
        self.close_connection = True
        self._send(code, "text/plain; charset=utf-8", b"no\n")

    def _send(self, code: int, kind: str, body: bytes, policy: str = "default-src 'none'") -> None:
        self.send_response(code)
        policy = f"{policy}; frame-ancestors 'none'"
        about = {"Content-Type": kind, "Content-Length": str(len(body)), "Content-Security-Policy": policy}
        for name, value in {**about, **_HEADERS}.items():
            self.send_header(name, value)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # its name in the base class
        """Say nothing on the terminal."""
