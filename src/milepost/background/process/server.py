"""The writing process: one for each rank. It maps the trainer's staging memory, and saves what lies there.

It ends when the trainer closes the connection or dies, and not before the saves that were handed to it are done. The
processes of all ranks meet at a key-value store of their own, in the coordinator's process: that of the training may be
gone by then.
"""

import contextlib
import ctypes
import logging
import mmap
import os
import pickle
import queue
import socket
import sys
import threading
import time
import warnings
from dataclasses import replace
from functools import partial
from multiprocessing.connection import Connection, wait
from multiprocessing.reduction import recv_handle
from typing import Any, NoReturn, cast

import torch

from milepost.background.process.messages import (
    FINISHED,
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
    pack_error,
)
from milepost.background.staging.packing import in_place_of
from milepost.comm import BoardComm, Comm, Solo, depart, note_parting
from milepost.comm.distributed import TorchBoard, key_value_store
from milepost.core.agreement import Plans
from milepost.data.threads import Latch
from milepost.data.transfer import Progress
from milepost.errors import InvalidRequest, RanksMissing, WriterDied
from milepost.events.listeners import LISTENERS
from milepost.events.operation import Operation
from milepost.saving.health import HealthCheck, all_finite
from milepost.saving.pipeline import Receipt, save_state
from milepost.store import Store

_log = logging.getLogger("milepost")
_NICE = 10
_IOPRIO_LOWEST = 2 << 13 | 7  # best effort, lowest priority
_IOPRIO_SET = {"x86_64": 251, "aarch64": 30}
_FAREWELL_S = 10.0
_LOOK_S = 1.0


class WriterProcess:
    """One writing process. It takes orders until the trainer is gone."""

    def __init__(self, connection: Connection, trainer: int) -> None:
        self._connection, self._trainer = connection, trainer
        self._orders: queue.SimpleQueue[Any] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[HealthTold | None] = queue.SimpleQueue()
        self._cancelled: dict[int, Latch] = {}
        self._lock = threading.Lock()
        self._comm: Comm = Solo()
        self._server: Any = None
        self._store: Any = None
        self._memory = torch.empty(0, dtype=torch.uint8, device="cpu")
        self._plans = Plans()

    def run(self) -> None:
        """Do the trainer's orders until it is gone."""
        LISTENERS.forward_to(lambda event: self._tell(Relayed(event)))
        threading.Thread(target=self._listen, daemon=True).start()
        reason: str | None = "the trainer of this rank ended before it had handed this save over"
        while (message := self._orders.get()) is not None:
            if message == "close":
                reason = None
            elif isinstance(message, GivenUp):
                reason = f"the trainer of this rank gave its writing process up: {message.reason}"
            elif isinstance(message, Ranks):
                self._meet(message)
            elif isinstance(message, Order):
                self._save(message)
            else:
                self._map(*message)
        self._leave(reason)

    def _listen(self) -> None:
        """Take messages as they come: a cancellation arrives in the middle of a save."""
        threading.Thread(target=self._watch, daemon=True).start()
        try:
            while True:
                self._take(self._connection.recv())
        except (EOFError, OSError):
            pass
        finally:
            self._verdicts.put(None)
            self._orders.put(None)

    def _watch(self) -> None:
        """Hang up when the trainer is dead: its data loaders may hold the connection open, and they do not read it.

        What the trainer sent before is still received. Nothing waits for what it did not send.
        """
        watched: list[Any] = []
        with contextlib.suppress(OSError, AttributeError):
            watched.append(os.pidfd_open(self._trainer))
        while os.getppid() == self._trainer and not wait(watched, _LOOK_S):
            pass
        with contextlib.suppress(OSError), socket.socket(fileno=os.dup(self._connection.fileno())) as end:
            end.shutdown(socket.SHUT_RDWR)

    def _take(self, message: Any) -> None:
        if isinstance(message, Cancel):
            self._event(message.number).set()
            return
        if isinstance(message, HealthTold):
            self._verdicts.put(message)
            return
        if isinstance(message, Memory):
            message = recv_handle(self._connection), message.size_bytes
        self._orders.put(message)

    def _event(self, number: int) -> Latch:
        with self._lock:
            return self._cancelled.setdefault(number, Latch())

    def _tell(self, message: Any) -> None:
        with contextlib.suppress(OSError), self._lock:  # the trainer may be gone
            self._connection.send(message)

    def _meet(self, ranks: Ranks) -> None:
        if ranks.size == 1:
            self._comm = Solo()
            self._tell(MeetingPlace(0))
            return
        try:
            if ranks.address is None:
                self._server = key_value_store(None)
                address = "127.0.0.1", self._server.port
            else:
                address = ranks.address
            self._store = key_value_store(address)
            board = TorchBoard(self._store, ranks.size)
            self._comm = BoardComm(board, ranks.rank, ranks.size, ranks.timeout_s, coordinator=ranks.coordinator)
            self._tell(MeetingPlace(address[1]))
        except Exception as error:  # noqa: BLE001  # sent to the trainer
            self._tell(OrderEnded(-1, None, pack_error(error), ()))

    def _map(self, handle: int, size_bytes: int) -> None:
        self._memory = torch.frombuffer(mmap.mmap(handle, size_bytes), dtype=torch.uint8)
        os.close(handle)

    def _save(self, order: Order) -> None:
        receipt: Receipt | None = None
        failed = b""
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            try:
                receipt = self._saved(order)
            except BaseException as error:  # noqa: BLE001  # sent to the trainer
                note_parting(self._comm, error)
                failed = pack_error(error)
                if os.getppid() != self._trainer:
                    _log.error("the save to %s failed after its trainer had died: %s", order.url, error)
        texts = tuple(str(one.message) for one in caught if issubclass(one.category, RuntimeWarning))
        with self._lock:
            self._cancelled.pop(order.number, None)
        self._tell(OrderEnded(order.number, receipt, failed, texts))

    def _saved(self, order: Order) -> Receipt:
        def tell(progress: Progress) -> None:
            self._tell(Told(progress))

        def in_memory(slot: Any, *_: Any) -> torch.Tensor:
            data: torch.Tensor = slot.within(self._memory)
            return data

        options = replace(
            order.options,
            plans=self._plans,
            progress=tell if order.tells else None,
            cancelled=self._event(order.number),
            healthy=partial(self._ask, order.number) if order.has_rule else order.options.healthy,
        )
        store, comm = _store_of(order), self._comm
        operation = Operation.grown(order.operation, comm.rank, comm.size, comm.rank == comm.coordinator)

        def save() -> Receipt:
            return save_state(None, store, comm, options, lambda: in_place_of(order.described, in_memory))

        try:
            return operation.part(save)  # the trainer tells its beginning and its end
        except RanksMissing as error:
            if error.__cause__ is None:
                raise  # some did not come in time
            raise WriterDied(
                f"the writing process of rank {self._comm.coordinator}, where those of all ranks meet, cannot be "
                f"reached ({error.__cause__}). The next save starts others."
            ) from error

    def _ask(self, number: int, check: HealthCheck) -> bool | str:
        """The verdict of the trainer's rule. If the trainer has died, that of the default rule."""
        self._tell(HealthAsked(number, check))
        told = self._verdicts.get()
        if told is None:
            self._verdicts.put(None)  # for the next save
        verdict = told.verdict if told is not None else all_finite(check.nan, check.inf, check.keys)
        return verdict.ok or verdict.reason

    def _leave(self, reason: str | None) -> None:
        """End. Other ranks hear the reason, if there is one. The coordinator's process waits a little for them."""
        if not isinstance(self._comm, BoardComm):
            return
        with contextlib.suppress(Exception):
            if reason is not None:
                depart(self._comm, WriterDied(reason))
            left = self._store.add(FINISHED, 1)
            deadline = time.monotonic() + _FAREWELL_S
            while self._server is not None and left < self._comm.size and time.monotonic() < deadline:
                time.sleep(0.05)
                left = self._store.add(FINISHED, 0)


def _store_of(order: Order) -> Store:
    """The store of an order; one that raises on use, so that all ranks hear of it, if it cannot be made here."""
    try:
        store: Store = pickle.loads(order.store)  # noqa: S301  # from the trainer
        return store
    except Exception as error:  # noqa: BLE001  # raised when it is used
        why = (
            f"the writing process cannot save to {order.url}: it cannot make the store there "
            f"({type(error).__name__}: {error}). Define its class in a module that can be imported, or use "
            'background="thread".'
        )
        return cast("Store", _Unknown(order.url, why))


class _Unknown:
    """A store that this process does not know."""

    def __init__(self, url: str, why: str) -> None:
        self.url, self._why = url, why

    def __getattr__(self, name: str) -> NoReturn:
        raise InvalidRequest(self._why)


def _step_back() -> None:
    """Run with the lowest priority, for the processor and for the disk."""
    with contextlib.suppress(OSError):
        os.nice(_NICE)
    number = _IOPRIO_SET.get(os.uname().machine)
    if number is not None:
        ctypes.CDLL(None).syscall(number, 1, 0, _IOPRIO_LOWEST)


def main(handle: int, trainer: int) -> None:
    """Run as the writing process of this trainer."""
    logging.raiseExceptions = False  # standard error may be closed by then
    _step_back()
    torch.set_num_threads(1)
    WriterProcess(Connection(handle), trainer).run()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    # The store's threads may wait for peers that are gone.
    os._exit(0)
