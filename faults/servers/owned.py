"""A program that this process owns: it ends with its owner, whatever ends the owner."""

import contextlib
import os
import signal
import socket
import subprocess
import time
from collections.abc import Callable, Sequence
from pathlib import Path

START_S = 60.0
END_S = 10.0
_LOG_TAIL_BYTES = 3000
_KEEPER = 'log=$1; shift; "$@" </dev/null >>"$log" 2>&1 & echo $!; exec >&- 2>&-; cat >/dev/null; kill -KILL 0'
"""Starts the program, says its process id, and kills it with all that it has started when the owner's end of the pipe
is closed."""


class NotStarted(Exception):
    """A server did not come up. The message has the end of its log."""


class OwnedProcess:
    """A running program with its log. It is killed by `kill`, or as soon as this process has ended.

    A small shell stands between: its standard input is a pipe that only this process (and its forks) hold open. So
    nothing remains after a SIGKILL of the owner, and it does not matter which thread has started it.
    """

    def __init__(self, command: Sequence[str], log: Path, environment: dict[str, str] | None = None) -> None:
        self.log = log
        self._keeper = subprocess.Popen(
            ["/bin/sh", "-c", _KEEPER, "keeper", str(log), *command],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            env=environment,
            start_new_session=True,  # Ctrl-C on the terminal is for the tests
        )
        assert self._keeper.stdout is not None
        self.pid = int(self._keeper.stdout.readline())
        self._keeper.stdout.close()

    @property
    def is_running(self) -> bool:
        """Whether the program has not ended."""
        try:
            state = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()[0]
        except OSError:
            return False
        return state not in "ZX"

    def kill(self) -> None:
        """`kill -9` of the program and all that it has started; returns once they are gone."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._keeper.pid, signal.SIGKILL)
        assert self._keeper.stdin is not None
        with contextlib.suppress(OSError):
            self._keeper.stdin.close()
        self._keeper.wait(END_S)

    def wait_until(self, is_ready: Callable[[], bool]) -> None:
        """Return once the program is ready. Kills it and raises NotStarted if it ends or takes too long."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and self.is_running:
            if is_ready():
                return
            time.sleep(0.02)
        self.kill()
        raise NotStarted(f"the server did not come up; the end of its log:\n{self.log_tail}")

    @property
    def log_tail(self) -> str:
        """The end of what the program has written."""
        return self.log.read_bytes()[-_LOG_TAIL_BYTES:].decode(errors="replace")


def free_ports(count: int) -> list[int]:
    """Ports of the loopback interface that nobody listens on now."""
    sockets = [socket.socket() for _ in range(count)]
    try:
        for each in sockets:
            each.bind(("127.0.0.1", 0))
        return [each.getsockname()[1] for each in sockets]
    finally:
        for each in sockets:
            each.close()
