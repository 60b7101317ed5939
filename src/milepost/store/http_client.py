"""Ranged GETs over HTTP by the standard library: kept connections, redirects, proxies, and another try after a failure.

A request ends with an answer, or with an error that says what the server said. What another try may cure (a connection
that was cut or stalls, 429, 5xx) is tried again, with growing, random pauses, until `PATIENCE_S` have passed in which
no request to this place succeeded.
"""

import base64
import contextlib
import http.client
import logging
import os
import random
import re
import ssl
import threading
import time
import weakref
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from urllib.parse import SplitResult, quote, unquote, urljoin, urlsplit
from urllib.request import getproxies, proxy_bypass

from milepost.core.limits import KIB, MIB
from milepost.errors import CheckpointDamaged, InvalidRequest, StorageError
from milepost.events.operation import current
from milepost.store.stopping import is_stopped

_log = logging.getLogger("milepost")
PATIENCE_S = 60.0
"""How long requests are tried again while none succeeds."""
REFUSED_S = 5.0
"""The same where the server has never answered and refuses connections: nothing listens there."""
TELL_AFTER_S = 3.0
"""When the log says that requests go on failing."""
STALL_S = 30.0
"""How long a connection may be silent."""
_PAUSES_S = (0.1, 10.0)
_MOST_REDIRECTS = 10
_AS_THEY_ARE = "!#$%&'()*+,/:;=?@[]~"
"""Signs that are not quoted in the URL of a redirect: those that URLs are made of."""
_SKIPPED_BYTES = 64 * MIB
"""A server that does not know ranges sends everything: up to this position that is accepted, and read past."""
_AGAIN = {408, 425, 429, 500, 502, 503, 504}
REFUSED = {401, 403, 407}
ABSENT = {404, 410}
_RANGE = re.compile(r"bytes (?:([0-9]{1,18})-([0-9]{1,18})|\*)/([0-9]{1,18})")
_REDIRECTS = {301, 302, 303, 307, 308}
_REST_BYTES = 64 * KIB
"""The rest of an answer that nobody wants is read up to this length: that is faster than another connection."""
_IDLE = 32
"""How many connections are kept for the next request."""
_Origin = tuple[str, str]


@dataclass(frozen=True, slots=True)
class Found:
    """What a server said of an object: its size, how many bytes of the range were read, and which version it is."""

    size_bytes: int
    read_bytes: int
    version: str


class HttpRefusal(StorageError):
    """The server answered, and another try would not change its answer. `status` is the code of HTTP."""

    def __init__(self, message: str, status: int) -> None:
        super().__init__(message)
        self.status = status


class _TryAgain(Exception):
    """A failure that another try may cure; `pause_s` is what the server asked for."""

    def __init__(self, reason: str, pause_s: float = 0.0) -> None:
        super().__init__(reason)
        self.pause_s = pause_s


class HttpClient:
    """Reads ranges of objects by their URLs. Safe to use from several threads, and in a child after a fork."""

    def __init__(
        self, login: str = "", host: str = "", patience_s: float = PATIENCE_S, refused_s: float = REFUSED_S
    ) -> None:
        self._login, self._host = login, host
        self._patience_s, self._refused_s = patience_s, min(refused_s, patience_s)
        self._lock = threading.Lock()
        self._idle: dict[_Origin, list[http.client.HTTPConnection]] = {}
        weakref.finalize(self, _close_all, self._idle)
        self._process = os.getpid()
        self._last_success, self._has_answered = 0.0, False

    def read(self, url: str, shown: str, start: int, views: Sequence[memoryview]) -> Found:
        """Fill the views from byte `start` of an object, as far as it goes. `shown`: its URL for messages.

        Raises FileNotFoundError, HttpRefusal, and StorageError when patience ends.
        """
        began, pause, failures, told = time.monotonic(), _PAUSES_S[0], 0, False
        while True:
            try:
                found = self._attempt(url, shown, start, views)
            except (_TryAgain, OSError, http.client.HTTPException) as error:
                if isinstance(error, (FileNotFoundError, StorageError)):
                    raise
                if _is_final(error):
                    hint = ". Set SSL_CERT_FILE to its authority" if isinstance(error, ssl.SSLError) else ""
                    raise StorageError(f"cannot read {shown}: {error}{hint}") from error
                waited_s = time.monotonic() - max(began, self._last_success)
                patience_s = self._patience_with(error)
                if waited_s >= patience_s or is_stopped():
                    raise StorageError(
                        f"cannot read {shown}: {_say(error)}. Tried again for {waited_s:.0f} s. Is the server up, and "
                        "can this machine reach it?"
                    ) from error
                asked = error.pause_s if isinstance(error, _TryAgain) else 0.0
                wait_s = min(max(pause * random.uniform(0.5, 1.5), asked), self._patience_s)  # noqa: S311  # no secret
                failures += 1
                if not told and waited_s >= TELL_AFTER_S:
                    told = True
                    _log.warning(
                        "no answer from %s for %.0f s: %s. Trying again for up to %.0f s",
                        shown, waited_s, _say(error), patience_s,
                    )  # fmt: skip
                operation = current()
                if operation is not None:
                    operation.retried("get", shown, failures, wait_s, _say(error))
                time.sleep(wait_s)
                pause = min(2 * pause, _PAUSES_S[1])
            else:
                self._last_success = time.monotonic()
                return found

    def _patience_with(self, error: Exception) -> float:
        """How long this failure is borne. A server that has answered comes back; where none did, there may be none."""
        is_refused = isinstance(error, ConnectionRefusedError) and not self._has_answered
        return self._refused_s if is_refused else self._patience_s

    def _attempt(self, url: str, shown: str, start: int, views: Sequence[memoryview]) -> Found:
        wanted = sum(map(len, views))
        headers = {"Range": f"bytes={start}-{start + max(wanted, 1) - 1}", "Accept-Encoding": "identity"}
        for _ in range(_MOST_REDIRECTS):
            parts = urlsplit(url)
            connection, fresh = self._connection(parts)
            answer = None
            try:
                answer = _ask(connection, parts, self._with_login(headers, parts), fresh)
                self._has_answered = True
                target = answer.headers.get("Location", "")
                if answer.status not in _REDIRECTS or not target:
                    return _take(answer, shown, start, views)
                url = _redirected(url, target, shown)
            finally:
                self._keep(connection, answer, parts)
        raise HttpRefusal(f"cannot read {shown}: the server redirects more than {_MOST_REDIRECTS} times", 310)

    def _with_login(self, headers: dict[str, str], parts: SplitResult) -> dict[str, str]:
        """The headers, with name and password only for the host that they were given for."""
        ours = self._login and parts.netloc == self._host
        return {**headers, "Authorization": self._login} if ours else headers

    def _connection(self, parts: SplitResult) -> tuple[http.client.HTTPConnection, bool]:
        """A kept connection, or a new one."""
        with self._lock:
            if self._process != os.getpid():  # the parent's connections are not ours
                self._idle.clear()
                self._process = os.getpid()
            kept = self._idle.get((parts.scheme, parts.netloc))
            if kept:
                return kept.pop(), False
        return _connect(parts), True

    def _keep(
        self, connection: http.client.HTTPConnection, answer: http.client.HTTPResponse | None, parts: SplitResult
    ) -> None:
        """Keep a connection whose answer was read to its end, or nearly so, for the next request."""
        if answer is not None and answer.length is not None and 0 < answer.length <= _REST_BYTES:
            with contextlib.suppress(OSError, http.client.HTTPException):
                answer.read()
        with self._lock:
            kept = self._idle.setdefault((parts.scheme, parts.netloc), [])
            if answer is not None and answer.isclosed() and not answer.will_close and len(kept) < _IDLE:
                kept.append(connection)
                return
        connection.close()


def _close_all(idle: dict[_Origin, list[http.client.HTTPConnection]]) -> None:
    for connection in chain.from_iterable(idle.values()):
        connection.close()


def login_of(parts: SplitResult) -> str:
    """The header for the name and password in a URL; empty where it has none."""
    if parts.username is None:
        return ""
    said = f"{unquote(parts.username)}:{unquote(parts.password or '')}"
    return "Basic " + base64.b64encode(said.encode()).decode()


def _connect(parts: SplitResult) -> http.client.HTTPConnection:
    """A connection to the host of a URL, through the proxy that the environment names for it."""
    host, port = parts.hostname or "", parts.port
    proxy = "" if proxy_bypass(host) else getproxies().get(parts.scheme, "")
    via = urlsplit(proxy if "://" in proxy or not proxy else f"http://{proxy}")
    secure = ssl.create_default_context() if parts.scheme == "https" else None
    if not via.hostname:
        if secure is not None:
            return http.client.HTTPSConnection(host, port, timeout=STALL_S, context=secure)
        return http.client.HTTPConnection(host, port, timeout=STALL_S)
    headers = {"Proxy-Authorization": login_of(via)} if via.username is not None else {}
    if secure is not None:
        connection = http.client.HTTPSConnection(via.hostname, via.port, timeout=STALL_S, context=secure)
        connection.set_tunnel(host, port, headers)
        return connection
    return _PlainProxy(via.hostname, via.port, timeout=STALL_S, headers=headers)


class _PlainProxy(http.client.HTTPConnection):
    """A connection to a proxy that is asked for whole URLs, as for http."""

    def __init__(self, host: str, port: int | None, *, timeout: float, headers: dict[str, str]) -> None:
        super().__init__(host, port, timeout=timeout)
        self.headers = headers


def _ask(
    connection: http.client.HTTPConnection, parts: SplitResult, headers: dict[str, str], fresh: bool
) -> http.client.HTTPResponse:
    """Send a GET. A kept connection that the server has closed meanwhile is opened again, once."""
    target = (parts.path or "/") + (f"?{parts.query}" if parts.query else "")
    if isinstance(connection, _PlainProxy):
        target = f"{parts.scheme}://{parts.netloc}{target}"
        headers = {**headers, **connection.headers, "Host": parts.netloc}
    try:
        connection.request("GET", target, headers=headers)
        return connection.getresponse()
    except (ConnectionError, http.client.RemoteDisconnected):
        if fresh:
            raise
    connection.close()
    connection.request("GET", target, headers=headers)  # connects by itself
    return connection.getresponse()


def _redirected(url: str, target: str, shown: str) -> str:
    try:
        # Some servers do not quote their paths. http.client gives bytes beyond ASCII as Latin-1.
        new = urlsplit(urljoin(url, quote(target, safe=_AS_THEY_ARE, encoding="latin-1")))
        _ = new.port
    except ValueError as error:
        raise HttpRefusal(f"cannot read {shown}: the server redirects to what is no URL: {error}", 310) from None
    if new.scheme != "https" and (new.scheme != "http" or url.startswith("https:")):
        raise HttpRefusal(f"cannot read {shown}: the server redirects to a {new.scheme or 'strange'} URL", 310)
    return new.geturl()


def _take(answer: http.client.HTTPResponse, shown: str, start: int, views: Sequence[memoryview]) -> Found:
    """Check an answer, and read its body into the views."""
    status, wanted = answer.status, sum(map(len, views))
    if status in _AGAIN:
        asked = answer.headers.get("Retry-After", "")
        raise _TryAgain(f"the server answered {status} {answer.reason}", float(asked) if asked.isdecimal() else 0.0)
    if status in ABSENT or answer.headers.get_content_type() == "text/html":
        # A page in place of a file: many servers answer so for names that they do not have.
        raise FileNotFoundError(shown)
    told = _RANGE.fullmatch(answer.headers.get("Content-Range", ""))
    version = answer.headers.get("ETag", "")
    version = "" if version.startswith("W/") else version
    if status == 416 and told is not None:
        return Found(int(told[3]), 0, version)
    if status not in (200, 206):
        hint = ". Does it need a password or a token?" if status in REFUSED else ""
        raise HttpRefusal(f"cannot read {shown}: the server answered {status} {answer.reason}{hint}", status)
    if answer.headers.get("Content-Encoding", "identity") != "identity":
        raise HttpRefusal(f"cannot read {shown}: the server sends it compressed, though that was not asked for", status)
    size = int(told[3]) if status == 206 and told is not None else _whole(answer, shown, start)
    if status == 206 and (told is None or int(told[1] or -1) != start):
        raise _TryAgain("the server sent another range than it was asked for")
    length = min(wanted, max(size - start, 0))
    _fill(answer, views, length)
    return Found(size, length, version)


def _whole(answer: http.client.HTTPResponse, shown: str, start: int) -> int:
    """The size of an object that the server sends from its beginning, which is read up to `start`."""
    if answer.length is None:
        raise HttpRefusal(
            f"cannot read {shown}: the server does not say how long it is; download it first", answer.status
        )
    size = answer.length
    if start > _SKIPPED_BYTES:
        raise HttpRefusal(
            f"cannot read {shown}: the server does not send ranges of files, and this one is too large to be read from "
            "its beginning each time. Download it first, or use a server that knows ranges",
            answer.status,
        )
    skipped = 0
    while skipped < min(start, size):
        piece = len(answer.read(min(start - skipped, MIB)))
        if not piece:
            raise _TryAgain("the connection was cut")
        skipped += piece
    return size


def _fill(answer: http.client.HTTPResponse, views: Sequence[memoryview], length: int) -> None:
    left = length
    for view in views:
        at, stop = 0, min(len(view), left)
        while at < stop:
            read = answer.readinto(view[at:stop])
            if not read:
                raise _TryAgain(f"the connection was cut {left - at} bytes before the end of the answer")
            at += read
        left -= stop


def _is_final(error: Exception) -> bool:
    """Whether no other try can help: a wrong certificate, or a name or URL that cannot be."""
    return isinstance(error, (ssl.SSLCertVerificationError, http.client.InvalidURL))


def _say(error: Exception) -> str:
    return str(error) if isinstance(error, _TryAgain) else f"{type(error).__name__}: {error}"


def split(url: str) -> SplitResult:
    """The parts of a URL. Raises InvalidRequest where it names no host."""
    try:
        parts = urlsplit(url)
        _ = parts.port
    except ValueError as error:
        raise InvalidRequest(f"{url.partition('?')[0]!r} is not a URL: {error}") from None
    if not parts.hostname:
        raise InvalidRequest(f"{url.partition('?')[0]!r} names no host; write https://host/path")
    return parts


def refuse_change(shown: str, known: Found | None, found: Found) -> None:
    """Raise CheckpointDamaged if an object was replaced between two reads of it."""
    if known is not None and (
        known.size_bytes != found.size_bytes or (known.version or found.version) != found.version
    ):
        raise CheckpointDamaged(f"{shown} was replaced while it was read; open it again")
