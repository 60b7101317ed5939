"""The writing process: one for each rank. It maps the trainer's staging memory, and saves what lies there.

It ends when the trainer closes the connection or dies, and not before the saves that were handed to it are done. The ranks'
processes meet at a key-value store of their own, in the lead's process: those of the training may be gone by then.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import queue
import signal
import sys
import threading
import time
import warnings
from dataclasses import replace
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any

import torch

from milepost.background.messages import Cancel, Ended, Meeting, Memory, Order, Ranks, Told, pack_error
from milepost.comm import BoardComm, Comm, Solo, depart
from milepost.comm.distributed import TorchBoard, key_value_store
from milepost.core.agreement import Plans
from milepost.errors import WriterDied
from milepost.saving import Receipt, save_state
from milepost.staging.packing import in_place_of
from milepost.store import Store
from milepost.transfer import Progress

_log = logging.getLogger("milepost")
_NICE = 10
_IOPRIO_LOWEST = 2 << 13 | 7  # best effort, the last to be served of these
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_FAREWELL_S = 10.0
_LOOK_S = 1.0


class Worker:
    """One writing process: takes orders until the trainer is gone."""

    def __init__(self, connection: Connection, trainer: int) -> None:
        self._connection, self._trainer = connection, trainer
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._cancelled: dict[int, threading.Event] = {}
        self._lock = threading.Lock()
        self._comm: Comm = Solo()
        self._server: Any = None
        self._store: Any = None
        self._handle = -1
        self._memory = torch.empty(0, dtype=torch.uint8)
        self._plans = Plans()

    def run(self) -> None:
        """Do what the trainer orders, until it is gone."""
        threading.Thread(target=self._listen, daemon=True).start()
        closed = False
        while (message := self._orders.get()) is not None:
            if message == "close":
                closed = True
            elif isinstance(message, Ranks):
                self._meet(message)
            elif isinstance(message, Memory):
                self._map(message.size_bytes)
            else:
                self._save(message)
        self._leave(closed)

    def _listen(self) -> None:
        """Take messages as they come: a cancellation must be heard in the middle of a save."""
        watched: list[Any] = [self._connection]
        with contextlib.suppress(OSError, AttributeError):
            watched.append(os.pidfd_open(self._trainer))
        try:
            while True:
                ready = wait(watched, _LOOK_S)
                if self._connection in ready:
                    self._take(self._connection.recv())
                elif ready or os.getppid() != self._trainer:
                    break  # it died, and others (its data loaders) may still hold the connection open
        except (EOFError, OSError):
            pass
        self._orders.put(None)

    def _take(self, message: Any) -> None:
        if isinstance(message, Cancel):
            self._event(message.number).set()
            return
        if isinstance(message, Memory):
            self._handle = recv_handle(self._connection)
        self._orders.put(message)

    def _event(self, number: int) -> threading.Event:
        with self._lock:
            return self._cancelled.setdefault(number, threading.Event())

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._lock:  # nobody is there to hear it
            self._connection.send(message)

    def _meet(self, ranks: Ranks) -> None:
        if ranks.size == 1:
            self._comm = Solo()
            self._tell(Meeting(0))
            return
        try:
            if ranks.address is None:
                self._server = key_value_store(None)
                address = "127.0.0.1", self._server.port
            else:
                address = ranks.address
            self._store = key_value_store(address)
            board = TorchBoard(self._store, ranks.size)
            self._comm = BoardComm(board, ranks.rank, ranks.size, ranks.timeout_s, lead=ranks.lead)
            self._tell(Meeting(address[1]))
        except Exception as error:  # noqa: BLE001  # told to the trainer
            self._tell(Ended(-1, None, pack_error(error), ()))

    def _map(self, size_bytes: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(self._handle, size_bytes), dtype=torch.uint8)
        os.close(self._handle)

    def _save(self, order: Order) -> None:
        receipt: Receipt | None = None
        failed = b""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                receipt = self._saved(order)
            except BaseException as error:  # noqa: BLE001  # told to the trainer
                failed = pack_error(error)
                if os.getppid() != self._trainer:
                    _log.error("the save to %s failed after its trainer had died: %s", order.url, error)
        texts = tuple(str(one.message) for one in caught if issubclass(one.category, RuntimeWarning))
        self._tell(Ended(order.number, receipt, failed, texts))

    def _saved(self, order: Order) -> Receipt:
        def tell(progress: Progress) -> None:
            self._tell(Told(progress))

        def in_memory(slot: Any, *_: Any) -> torch.Tensor:
            data: torch.Tensor = slot.within(self._memory)
            return data

        described = in_place_of(order.described, in_memory)
        options = replace(
            order.options,
            plans=self._plans,
            progress=tell if order.tells else None,
            cancelled=self._event(order.number),
        )
        store: Store = pickle.loads(order.store)  # noqa: S301  # from the trainer
        return save_state(None, store, self._comm, options, lambda: described)

    def _leave(self, closed: bool) -> None:
        """End. The others hear of it if they go on; the lead, where they meet, waits a little for them to hear the last word."""
        if not isinstance(self._comm, BoardComm):
            return
        with contextlib.suppress(Exception):
            if not closed:
                depart(self._comm, WriterDied("the trainer of this rank ended before it had handed this save over"))
            left = self._store.add("milepost/left", 1)
            deadline = time.monotonic() + _FAREWELL_S
            while self._server is not None and left < self._comm.size and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._store.add("milepost/left", 0)


def _step_back() -> None:
    """Let everybody else go first."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_LOWEST)


def main(handle: int, trainer: int) -> None:
    """Be the writing process of this trainer."""
    # A launcher that ends the job, or Ctrl-C, means the trainer; this process ends with it, after its work.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    logging.raiseExceptions = False  # nobody may be left to read what is logged
    _step_back()
    torch.set_num_threads(1)
    Worker(Connection(handle), trainer).run()
    sys.stderr.flush()
    # The store's threads have nothing more to say, and may wait for peers that are gone.
    os._exit(0)
