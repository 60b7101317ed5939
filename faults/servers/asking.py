"""One plain HTTP request."""

import http.client
from collections.abc import Mapping
from typing import NamedTuple

_TIMEOUT_S = 30.0


class Answer(NamedTuple):
    """What a server said."""

    status: int
    body: bytes


def ask(
    port: int, method: str, target: str, body: bytes | None = None, headers: Mapping[str, str] | None = None
) -> Answer:
    """Ask a server on this machine. Raises OSError if it does not answer."""
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_TIMEOUT_S)
    try:
        connection.request(method, target, body, dict(headers or {}))
        reply = connection.getresponse()
        return Answer(reply.status, reply.read())
    except http.client.HTTPException as error:
        raise ConnectionError(f"port {port}: {error!r}") from None
    finally:
        connection.close()
