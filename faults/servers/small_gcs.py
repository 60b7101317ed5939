"""A small server that speaks as much of Google Cloud Storage as Milepost uses, by obstore's client.

That is the XML API: PUT with `x-goog-if-generation-match: 0`, GET and HEAD with ranges, DELETE, and listings in pages.
It is no emulator, and no proof for the real service: it shows that Milepost's calls mean what we believe they mean.
Objects are kept in memory, so `kill` loses them.
"""

import hashlib
import json
import re
import sys
import threading
import urllib.parse
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from xml.sax.saxutils import escape

from faults.processes import command as module_command
from faults.processes import environment as module_environment
from faults.servers.asking import ask
from faults.servers.object_server import BUCKET, BUCKETS, ObjectServer

TOKEN = "a-token-of-the-tests"
PAGE = 100
"""How many names a listing has. The real service gives 1,000; fewer here, so that tests see pages."""
_RANGE = re.compile(r"bytes=(\d*)-(\d*)")


class SmallGcs(ObjectServer):
    """The server, in a process of its own."""

    scheme = "gs"

    @staticmethod
    def why_not() -> str | None:
        """It can always be started."""
        return None

    @property
    def environment(self) -> dict[str, str]:
        """The environment in which clients find the token."""
        return {"GOOGLE_BEARER_TOKEN": TOKEN}

    @property
    def settings(self) -> dict[str, str]:
        """Nothing more than the endpoint."""
        return {}

    def own_environment(self) -> dict[str, str]:
        """Where it finds this module."""
        return {"PYTHONPATH": module_environment()["PYTHONPATH"]}

    def command(self) -> list[str]:
        """The command that starts it."""
        return module_command("servers.small_gcs", str(self.address[1]))

    def is_ready(self) -> bool:
        """Whether it answers."""
        return ask(self.address[1], "GET", f"/{BUCKET}?prefix=none", None, _AUTHORIZED).status == 200

    def remove(self, prefix: str) -> None:
        """Remove the objects below a prefix."""
        ask(self.address[1], "POST", f"/forget/{prefix}/", None, _AUTHORIZED)


_AUTHORIZED = {"Authorization": f"Bearer {TOKEN}"}


# --- in the process of the server


class Objects:
    """What is stored: (generation, content) by name."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._kept: dict[str, tuple[int, bytes]] = {}
        self._last = 0

    def put(self, name: str, content: bytes, expected: int | None) -> int | None:
        """Store it; the new generation, or None if another one is there than the expected one (0: none)."""
        with self._lock:
            if expected is not None and self._kept.get(name, (0, b""))[0] != expected:
                return None
            self._last += 1
            self._kept[name] = (self._last, content)
            return self._last

    def get(self, name: str) -> tuple[int, bytes] | None:
        """The generation and the content."""
        return self._kept.get(name)

    def delete(self, name: str) -> bool:
        """Whether there was one to remove."""
        with self._lock:
            return self._kept.pop(name, None) is not None

    def forget(self, prefix: str) -> None:
        """Remove all that begin so."""
        with self._lock:
            self._kept = {name: kept for name, kept in self._kept.items() if not name.startswith(prefix)}

    def names(self, prefix: str) -> list[tuple[str, int]]:
        """Those that begin so, in order, with their sizes."""
        with self._lock:
            return sorted((name, len(kept[1])) for name, kept in self._kept.items() if name.startswith(prefix))


class GcsRequest(BaseHTTPRequestHandler):
    """One connection."""

    protocol_version = "HTTP/1.1"
    objects = Objects()
    wbufsize = 1 << 16
    disable_nagle_algorithm = True

    def log_message(self, *arguments: object) -> None:
        """Say nothing: the log is for errors."""

    def _target(self) -> tuple[str, str, dict[str, str]]:
        """Bucket, name, query."""
        path, _, query = self.path.partition("?")
        _, bucket, *name = path.split("/", 2)
        found = dict(urllib.parse.parse_qsl(query, keep_blank_values=True))
        return urllib.parse.unquote(bucket), urllib.parse.unquote(name[0]) if name else "", found

    def _handle(self) -> None:
        length = int(self.headers.get("Content-Length") or 0)
        body = self.rfile.read(length)
        if len(body) < length:  # the client has gone
            self.close_connection = True
            return None
        bucket, name, query = self._target()
        if self.headers.get("Authorization") != _AUTHORIZED["Authorization"]:
            return self._refuse(401, "AuthenticationRequired")
        if self.command == "POST" and bucket == "forget":
            self.objects.forget(name)
            return self._say(204)
        if bucket not in BUCKETS:  # what they hold is the same
            return self._refuse(404, "NoSuchBucket")
        if not name:
            return self._list(query) if self.command == "GET" else self._refuse(405, "MethodNotAllowed")
        act = {"PUT": self._put, "GET": self._get, "HEAD": self._get, "DELETE": self._delete}.get(self.command)
        return act(name, body) if act and not query else self._refuse(400, "InvalidArgument")

    do_GET = do_PUT = do_HEAD = do_DELETE = do_POST = _handle  # noqa: N815

    def _put(self, name: str, body: bytes) -> None:
        expected = self.headers.get("x-goog-if-generation-match")
        generation = self.objects.put(name, body, None if expected is None else int(expected))
        if generation is None:
            return self._refuse(412, "PreconditionFailed")
        return self._say(200, headers=_described(generation, body))

    def _get(self, name: str, _: bytes) -> None:
        kept = self.objects.get(name)
        if kept is None:
            return self._refuse(404, "NoSuchKey")
        generation, content = kept
        headers = _described(generation, content)
        wanted = _RANGE.fullmatch(self.headers.get("Range") or "")
        if not wanted:
            return self._say(200, content, headers)
        first, last = _span(wanted[1], wanted[2], len(content))
        if first >= len(content):
            return self._refuse(416, "InvalidRange")
        headers["Content-Range"] = f"bytes {first}-{last}/{len(content)}"
        return self._say(206, content[first : last + 1], headers)

    def _delete(self, name: str, _: bytes) -> None:
        return self._say(204) if self.objects.delete(name) else self._refuse(404, "NoSuchKey")

    def _list(self, query: dict[str, str]) -> None:
        prefix, delimiter = query.get("prefix", ""), query.get("delimiter", "")
        after = query.get("continuation-token") or query.get("start-after", "")
        entries: dict[str, str] = {}
        for name, size in self.objects.names(prefix):
            inside, cut, _ = name[len(prefix) :].partition(delimiter) if delimiter else ("", "", "")
            top = prefix + inside + cut if cut else name
            if top > after:
                entries[top] = _prefix(top) if cut else _contents(top, size)
        shown = list(entries)[: int(query.get("max-keys") or PAGE)]
        text = "".join(entries[name] for name in shown)
        if len(shown) < len(entries):
            text += f"<IsTruncated>true</IsTruncated><NextContinuationToken>{escape(shown[-1])}</NextContinuationToken>"
        body = f"<?xml version='1.0' encoding='UTF-8'?><ListBucketResult>{text}</ListBucketResult>"
        self._say(200, body.encode(), {"Content-Type": "application/xml"})

    def _refuse(self, status: int, code: str) -> None:
        body = f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{code}</Code><Message>{code}</Message></Error>"
        self._say(status, body.encode(), {"Content-Type": "application/xml"})

    def _say(self, status: int, body: bytes = b"", headers: dict[str, str] | None = None) -> None:
        self.send_response(status)
        for name, value in (headers or {}).items():
            self.send_header(name, value)
        if status != 204:
            self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)


def _described(generation: int, content: bytes) -> dict[str, str]:
    etag = hashlib.md5(content, usedforsecurity=False).hexdigest()
    modified = "Mon, 01 Jan 2024 00:00:00 GMT"
    return {"ETag": f'"{etag}"', "x-goog-generation": str(generation), "Last-Modified": modified}


def _span(first: str, last: str, size: int) -> tuple[int, int]:
    """The first and the last byte of a range: `2-5`, `2-`, or `-5` for the last five."""
    if not first:
        return max(0, size - int(last)), size - 1
    return int(first), min(int(last), size - 1) if last else size - 1


def _contents(name: str, size: int) -> str:
    modified = "2024-01-01T00:00:00.000Z"
    return (
        f"<Contents><Key>{escape(name)}</Key><Size>{size}</Size><LastModified>{modified}</LastModified>"
        f"<ETag>{json.dumps(str(size))}</ETag></Contents>"
    )


def _prefix(name: str) -> str:
    return f"<CommonPrefixes><Prefix>{escape(name)}</Prefix></CommonPrefixes>"


class GcsServer(ThreadingHTTPServer):
    """A thread for each connection."""

    daemon_threads = True
    request_queue_size = 512


def main() -> None:
    """Serve until killed."""
    GcsServer(("127.0.0.1", int(sys.argv[1])), GcsRequest).serve_forever()


if __name__ == "__main__":
    main()
