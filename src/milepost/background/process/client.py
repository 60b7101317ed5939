"""The trainer's side of its writing process."""

import contextlib
import logging
import socket
import subprocess
import time
import warnings
from collections.abc import Callable, Iterator
from multiprocessing.connection import Connection
from multiprocessing.reduction import send_handle
from typing import Any

from milepost.background.process.messages import (
    Cancel,
    GivenUp,
    HealthAsked,
    HealthTold,
    MeetingPlace,
    Memory,
    Order,
    OrderEnded,
    Ranks,
    Relayed,
    Told,
    unpack_error,
)
from milepost.background.process.start import start_process
from milepost.errors import WriterDied
from milepost.events.records import Event
from milepost.saving.health import verdict_of
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt

_log = logging.getLogger("milepost")
_LOOK_S = 0.1
_START_S = 120.0
_STOP_S = 15.0


class Link:
    """A writing process, and the connection to it. Used by one thread at a time."""

    def __init__(self) -> None:
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        # It needs no GPU, and must not take memory there.
        alone = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
        with here, there:
            self._process = start_process("milepost.background.process.server", "main", there, **alone)
            self._connection = Connection(here.detach())
        self._numbers = 0

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    def meet(self, ranks: Ranks) -> int:
        """Tell the process its rank. Returns the port at which the ranks meet, if that is in this process."""
        self._send(ranks)
        answer = self._receive(time.monotonic() + _START_S)
        if isinstance(answer, OrderEnded):
            raise unpack_error(answer.error)
        assert isinstance(answer, MeetingPlace)
        return answer.port

    def share(self, handle: int, size_bytes: int) -> None:
        """Let the process map this memory in place of the memory it had."""
        self._send(Memory(size_bytes))
        with self._reachable():
            send_handle(self._connection, handle, self._process.pid)

    def hand_over(self, order: Order) -> None:
        """Give the process a save to do. It will do it even if this process dies."""
        self._send(order)

    def next_number(self) -> int:
        """A number for an order."""
        self._numbers += 1
        return self._numbers

    def outcome(self, number: int, options: SaveOptions, relay: Callable[[Event], None]) -> Receipt:
        """Wait for the end of a save, and `relay` its events. Raises the error of the save, or WriterDied."""
        watcher, cancelled, asked = options.progress, options.cancelled, False
        while True:
            if cancelled is not None and cancelled.is_set() and not asked:
                asked = True
                self._send(Cancel(number))
            message = self._receive(None)
            if isinstance(message, Relayed):
                relay(message.event)
            elif isinstance(message, HealthAsked):
                assert callable(options.healthy)
                self._send(HealthTold(message.number, verdict_of(options.healthy, message.check)))
            elif isinstance(message, Told) and watcher is not None:
                try:
                    watcher(message.progress)
                except Exception:  # noqa: BLE001  # as in a Meter: showing the progress must not stop the work
                    _log.warning("the progress callback failed and is not called again", exc_info=True)
                    watcher = None
            elif isinstance(message, OrderEnded) and message.number == number:
                for text in message.warnings:
                    warnings.warn(text, RuntimeWarning, stacklevel=2)
                if message.error:
                    raise unpack_error(message.error)
                assert message.receipt is not None
                return message.receipt

    def close(self, broken: BaseException | None = None) -> None:
        """Wait until the process has ended. `broken`: why; other ranks may wait for the process, and it tells them."""
        with contextlib.suppress(OSError, WriterDied):
            self._send("close" if broken is None else GivenUp(str(broken)))
        self._connection.close()
        try:
            self._process.wait(_STOP_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()

    def _receive(self, deadline: float | None) -> Any:
        """The next message. Without a deadline: None if there is none after a short while."""
        with self._reachable():
            while not self._connection.poll(_LOOK_S):
                if deadline is None:
                    return None
                if time.monotonic() > deadline:
                    raise WriterDied(f"the writing process {self.pid} has not answered for {_START_S:.0f} s")
            return self._connection.recv()

    def _send(self, message: Any) -> None:
        with self._reachable():
            self._connection.send(message)

    @contextlib.contextmanager
    def _reachable(self) -> Iterator[None]:
        try:
            yield
        except (EOFError, OSError) as error:
            code = self._process.poll()
            how = f"ended with code {code}" if code is not None else f"cannot be reached ({error})"
            raise WriterDied(
                f"the writing process {self.pid} {how}. Its log is in this job's standard error; was there too little "
                "memory? The next save starts another."
            ) from error


class Unstarted(Link):
    """Stands for a process that could not be started. Raises when it is asked to meet: there all ranks hear of it."""

    def __init__(self, error: OSError) -> None:
        self._error = error

    def meet(self, ranks: Ranks) -> int:
        """Raises WriterDied."""
        del ranks
        raise WriterDied(f"the writing process could not be started: {self._error}. The next save tries again.")

    def close(self, broken: BaseException | None = None) -> None:
        """Nothing to do."""


def start() -> Link:
    """A new writing process. If it cannot be started, all ranks get the error when it is first used."""
    try:
        return Link()
    except OSError as error:
        return Unstarted(error)
