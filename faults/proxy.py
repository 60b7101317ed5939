"""An HTTP/1.1 proxy that breaks things, in front of an object store: `Proxy` runs it in a process of its own.

It sends requests on as they are, the Host header included, so signatures stay valid. It counts requests and bytes,
adds latency, and makes the faults that it is told.

    with Proxy(server.address) as proxy, server.place(proxy.endpoint) as url:
        proxy.set_rules(Rule("lose_reply", "PUT", path="manifest"))
"""

import contextlib
import dataclasses
import json
import subprocess
import threading
from dataclasses import dataclass
from typing import Any, Literal, Self

from faults.processes import command, environment

Kind = Literal["PUT", "GET", "LIST", "DELETE", "HEAD", "POST"]
Fault = Literal[
    "lose_reply",  # the server acts, and its reply never comes: the connection is closed
    "cut_request",  # half of the body reaches the server, and both connections are cut
    "cut_reply",  # half of the reply's body reaches the client, and the connection is cut
    "answer",  # `status` and `code` without asking the server, as a throttling service or an expired token does
    "stall",  # nothing is sent on, and nothing is answered, for `seconds`; then the connection is closed
    "stall_reply",  # the same after the server acted
    "short_reply",  # a reply whose body is shorter, well-formed
    "long_reply",  # a reply whose body is longer, well-formed
    "flip_request",  # one bit of the body that the server gets is another
    "flip_reply",  # one bit of the body that the client gets is another
    "late",  # the connection is closed at once; the request reaches the server `seconds` later, or at `release`
]
FOREVER_S = 1e6


@dataclass(frozen=True, slots=True)
class Rule:
    """Which requests meet which fault.

    A request fits if it is of this `kind` (None: any), its path and query contain `path`, and its headers contain
    `header`. Of those that fit, the first `skip` pass; then `times` of them (None: all) meet the fault, each with this
    `chance`.
    """

    fault: Fault
    kind: Kind | None = None
    path: str = ""
    header: str = ""
    skip: int = 0
    times: int | None = 1
    chance: float = 1.0
    seconds: float = FOREVER_S
    status: int = 503
    code: str = "SlowDown"
    retry_after_s: int | None = None


@dataclass(frozen=True, slots=True)
class Traffic:
    """What has passed: requests by kind, bytes of bodies to the server and back, how many met a rule, and a fault.

    A request that meets a rule may have nothing to break: no bit of an empty body can be another.
    """

    requests: dict[str, int]
    bytes_up: int
    bytes_down: int
    matched: int
    faults: int

    @property
    def total(self) -> int:
        """All requests."""
        return sum(self.requests.values())


class Proxy:
    """A proxy in front of the server at `address`. It is a process of its own, and ends with this one."""

    def __init__(self, address: tuple[str, int], *, latency_s: float = 0.0, seed: int = 0) -> None:
        self._address, self._latency_s, self._seed = address, latency_s, seed

    def __enter__(self) -> Self:
        host, port = self._address
        self._process = subprocess.Popen(
            command("middle", f"{host}:{port}"),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment(),
            start_new_session=True,
        )
        self._lock = threading.Lock()
        self.address = ("127.0.0.1", int(self._ask(do="port")))
        self._ask(do="set", latency_s=self._latency_s, seed=self._seed)
        return self

    def __exit__(self, *exception: object) -> None:
        self._process.kill()
        for pipe in (self._process.stdin, self._process.stdout):
            assert pipe is not None
            with contextlib.suppress(OSError):
                pipe.close()
        self._process.wait()

    @property
    def endpoint(self) -> str:
        """The URL that clients take as endpoint."""
        return "http://{}:{}".format(*self.address)

    def set_rules(self, *rules: Rule) -> None:
        """From now on these rules hold, and no others. Each request meets the first rule that takes it."""
        self._ask(do="rules", rules=[dataclasses.asdict(rule) for rule in rules])

    def set_latency(self, latency_s: float) -> None:
        """Each request waits so long before it is sent on."""
        self._ask(do="set", latency_s=latency_s)

    def heal(self) -> None:
        """No rule holds any more. Stalled connections are closed; late requests still come."""
        self._ask(do="heal")

    def release(self) -> list[int]:
        """Let all late requests reach the server now. Their replies' status codes (0: no reply), when all are done."""
        return self._ask(do="release")

    def traffic(self, *, reset: bool = False) -> Traffic:
        """What has passed since the start or the last reset."""
        return Traffic(**self._ask(do="traffic", reset=reset))

    def seen(self) -> list[str]:
        """The requests since the last reset, in order: kind, path and query."""
        return self._ask(do="seen")

    def _ask(self, **order: Any) -> Any:
        with self._lock:
            assert self._process.stdin is not None
            assert self._process.stdout is not None
            self._process.stdin.write(json.dumps(order).encode() + b"\n")
            self._process.stdin.flush()
            return json.loads(self._process.stdout.readline())
