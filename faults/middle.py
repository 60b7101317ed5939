"""The process of `faults.proxy.Proxy`: what stands between a client and a server, and breaks what it is told to.

python -m faults.middle HOST:PORT    # reads orders, one JSON object in a line, and answers each in a line
"""

import contextlib
import dataclasses
import json
import random
import socket
import sys
import threading
import time
import urllib.parse
from collections import Counter
from collections.abc import Iterator
from typing import Any

from faults.proxy import FOREVER_S, Rule, Traffic
from faults.wire import Cut, Head, Stream, body_of, kind_of, whole_body

_OF_BODIES = ("cut_request", "flip_request")
_OF_REPLIES = ("cut_reply", "short_reply", "long_reply", "flip_reply")


class LateRequests:
    """Requests that reach the server after their client has given up."""

    def __init__(self) -> None:
        self._lock = threading.Condition()
        self._released = threading.Event()
        self._waiting = 0
        self._statuses: list[int] = []

    def add(self, server: tuple[str, int], head: Head, body: bytearray, seconds: float) -> None:
        """Send this one after a while, or when `release` is called."""
        with self._lock:
            self._waiting += 1
        threading.Thread(target=self._send, args=(server, head, body, seconds, self._released), daemon=True).start()

    def _send(
        self, server: tuple[str, int], head: Head, body: bytearray, seconds: float, released: threading.Event
    ) -> None:
        released.wait(seconds)
        status = 0
        with contextlib.suppress(OSError, Cut):
            stream = Stream(socket.create_connection(server))
            stream.end.sendall(head.text)
            stream.end.sendall(body)
            text = stream.head()
            status = int(Head.parse(text).first.split(" ")[1]) if text else 0
            stream.close()
        with self._lock:
            self._waiting -= 1
            self._statuses.append(status)
            self._lock.notify_all()

    def release(self) -> list[int]:
        """Send all now; their status codes."""
        with self._lock:
            self._released.set()
            self._lock.wait_for(lambda: not self._waiting)
            self._released = threading.Event()
            statuses, self._statuses = self._statuses, []
            return statuses


class Breaker:
    """Decides which request meets which fault, and counts. Shared by the threads of all connections."""

    def __init__(self, server: tuple[str, int]) -> None:
        self.server = server
        self.latency_s = 0.0
        self.healed = threading.Event()
        self.late = LateRequests()
        self._lock = threading.Lock()
        self._random = random.Random(0)
        self._rules: list[Rule] = []
        self._fitted: Counter[int] = Counter()
        self.reset()

    def reset(self) -> None:
        """Count from zero."""
        self.requests: Counter[str] = Counter()
        self.up = self.down = self.matched = self.faults = 0
        self.seen: list[str] = []

    def set_rules(self, rules: list[Rule]) -> None:
        """From now on these."""
        with self._lock:
            self._rules, self._fitted = rules, Counter()
            if rules:
                self.healed = threading.Event()

    def heal(self) -> None:
        """No rules, and no stalled connections."""
        self.set_rules([])
        self.healed.set()

    def seed(self, seed: int) -> None:
        """Begin the sequence of chances."""
        self._random = random.Random(seed)

    def judge(self, head: Head) -> Rule | None:
        """Count a request; the rule that it meets, if any."""
        kind, text = kind_of(head), head.text.decode("latin-1")
        target = urllib.parse.unquote(head.first.split(" ")[1])
        with self._lock:
            self.requests[kind] += 1
            self.seen.append(f"{kind} {target}")
            for number, rule in enumerate(self._rules):
                if rule.kind not in (None, kind) or rule.path not in target or rule.header not in text:
                    continue
                self._fitted[number] += 1
                last = FOREVER_S if rule.times is None else rule.skip + rule.times
                if rule.skip < self._fitted[number] <= last and self._random.random() < rule.chance:
                    self.matched += 1
                    return rule
        return None

    def broke(self) -> None:
        """Count a fault that was really made."""
        with self._lock:
            self.faults += 1

    def count(self, *, up: int = 0, down: int = 0) -> None:
        """Count bytes of bodies."""
        with self._lock:
            self.up += up
            self.down += down

    def bit(self, length: int) -> int:
        """Which bit of a body changes."""
        return self._random.randrange(length * 8)

    def obey(self, order: dict[str, Any]) -> Any:
        """Do what the owner asks, and give the answer."""
        match order.pop("do"):
            case "rules":
                self.set_rules([Rule(**rule) for rule in order["rules"]])
            case "set":
                self.latency_s = order["latency_s"]
                if "seed" in order:
                    self.seed(order["seed"])
            case "heal":
                self.heal()
            case "release":
                return self.late.release()
            case "seen":
                return self.seen
            case "traffic":
                traffic = Traffic(dict(self.requests), self.up, self.down, self.matched, self.faults)
                if order["reset"]:
                    self.reset()
                return dataclasses.asdict(traffic)
        return None


class Connection(threading.Thread):
    """One client's connection, and ours to the server."""

    def __init__(self, end: socket.socket, breaker: Breaker) -> None:
        super().__init__(daemon=True)
        self._client, self._breaker = Stream(end), breaker
        self._server: Stream | None = None

    def run(self) -> None:
        """Pass requests and replies on until an end closes, or a fault closes both."""
        try:
            while (text := self._client.head()) is not None:
                head = Head.parse(text)
                if head.get("expect"):
                    self._client.end.sendall(b"HTTP/1.1 100 Continue\r\n\r\n")
                    head = head.without("expect")
                self._pass_on(head, self._breaker.judge(head))
        except (Cut, OSError):
            pass
        finally:
            self._client.close()
            if self._server:
                self._server.close()

    def _pass_on(self, head: Head, rule: Rule | None) -> None:
        time.sleep(self._breaker.latency_s)
        fault = rule.fault if rule else None
        if fault in _OF_BODIES and not (head.is_chunked or head.length):
            rule = fault = None
        if rule and fault not in _OF_REPLIES:
            self._breaker.broke()
        if rule and fault == "stall":
            self._stall(rule)
        if rule and fault == "answer":
            for piece in body_of(self._client, head):
                self._breaker.count(up=len(piece))
            self._client.end.sendall(_answer(rule))
            return
        if rule and fault in ("cut_request", "flip_request", "late"):
            self._send_broken(head, rule)
        else:
            self._send(head)
        reply = self._reply()
        is_bare = head.first.startswith("HEAD ") or reply.first.split(" ")[1] in ("204", "304")
        if rule and fault in ("lose_reply", "stall_reply"):
            if not is_bare:
                self._drain(reply)
            self._stall(rule) if fault == "stall_reply" else None
            raise Cut
        has_body = reply.is_chunked or reply.length or fault == "long_reply"
        if rule and fault in _OF_REPLIES and has_body and not is_bare:
            self._breaker.broke()
            self._give_broken(reply, rule)
        else:
            self._give(reply, is_bare)
        if reply.get("connection").lower() == "close":
            raise Cut

    def _stall(self, rule: Rule) -> None:
        self._breaker.healed.wait(rule.seconds)
        raise Cut

    # --- to the server

    @property
    def _upstream(self) -> Stream:
        if self._server and self._server.has_ended:
            self._server.close()
            self._server = None
        if not self._server:
            self._server = Stream(socket.create_connection(self._breaker.server))
        return self._server

    def _send(self, head: Head) -> None:
        server = self._upstream
        try:
            server.end.sendall(head.text)
            for piece in body_of(self._client, head):
                server.end.sendall(piece)
                self._breaker.count(up=len(piece))
        except (BrokenPipeError, ConnectionResetError):
            pass  # the server may have answered before it had all

    def _send_broken(self, head: Head, rule: Rule) -> None:
        body = whole_body(self._client, head)
        self._breaker.count(up=len(body))
        head = head.without("transfer-encoding").having("Content-Length", str(len(body)))
        if rule.fault == "late":
            self._breaker.late.add(self._breaker.server, head, body, rule.seconds)
            raise Cut
        if rule.fault == "cut_request":
            self._upstream.end.sendall(head.text)
            self._upstream.end.sendall(body[: len(body) // 2])
            time.sleep(0.02)  # it reaches the server before the end does
            raise Cut
        _flip(body, self._breaker)
        self._upstream.end.sendall(head.text)
        self._upstream.end.sendall(body)

    # --- to the client

    def _reply(self) -> Head:
        assert self._server is not None
        while True:
            text = self._server.head()
            if text is None:
                raise Cut
            head = Head.parse(text)
            if not head.first.split(" ")[1].startswith("1"):
                return head

    def _body(self, reply: Head) -> Iterator[memoryview]:
        assert self._server is not None
        return body_of(self._server, reply, until_end=True)

    def _drain(self, reply: Head) -> None:
        for piece in self._body(reply):
            self._breaker.count(down=len(piece))

    def _give(self, reply: Head, is_bare: bool) -> None:
        self._client.end.sendall(reply.text)
        for piece in () if is_bare else self._body(reply):
            self._client.end.sendall(piece)
            self._breaker.count(down=len(piece))
        if not is_bare and not reply.is_chunked and not reply.get("content-length"):
            raise Cut  # its end is the end of the connection

    def _give_broken(self, reply: Head, rule: Rule) -> None:
        assert self._server is not None
        body = whole_body(self._server, reply, until_end=True)
        self._breaker.count(down=len(body))
        head = reply.without("transfer-encoding")
        sent = body
        match rule.fault:
            case "cut_reply":
                sent = body[: len(body) // 2]
                head = head.having("Content-Length", str(len(body)))
            case "short_reply":
                sent = body[: len(body) // 2]
                head = head.having("Content-Length", str(len(sent)))
            case "long_reply":
                sent = body + b"more" * 16
                head = head.having("Content-Length", str(len(sent)))
            case _:
                _flip(body, self._breaker)
                head = head.having("Content-Length", str(len(body)))
        self._client.end.sendall(head.text)
        self._client.end.sendall(sent)
        if rule.fault == "cut_reply":
            raise Cut


def _flip(body: bytearray, breaker: Breaker) -> None:
    """Change one bit; nothing in an empty body."""
    if body:
        byte, bit = divmod(breaker.bit(len(body)), 8)
        body[byte] ^= 1 << bit


def _answer(rule: Rule) -> bytes:
    body = (
        f"<?xml version='1.0' encoding='UTF-8'?><Error><Code>{rule.code}</Code><Message>by the proxy</Message></Error>"
    )
    again = [] if rule.retry_after_s is None else [("Retry-After", str(rule.retry_after_s))]
    headers = [("Content-Type", "application/xml"), ("x-ms-error-code", rule.code), ("Content-Length", str(len(body)))]
    return Head(f"HTTP/1.1 {rule.status} Refused", (*headers, *again)).text + body.encode()


def main() -> None:
    """Listen on a free port of the loopback interface, and obey until the orders end."""
    host, _, port = sys.argv[1].rpartition(":")
    breaker = Breaker((host, int(port)))
    listener = socket.create_server(("127.0.0.1", 0), backlog=512)

    def accept() -> None:
        while True:
            Connection(listener.accept()[0], breaker).start()

    threading.Thread(target=accept, daemon=True).start()
    for line in sys.stdin:
        order = json.loads(line)
        answer = listener.getsockname()[1] if order["do"] == "port" else breaker.obey(order)
        print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    with contextlib.suppress(BrokenPipeError):  # the owner has ended
        main()
