"""A process that saves what the trainer hands to it, with any planner and storage that can be pickled.

One for each rank. They form a process group of their own, so planners and storage may use `torch.distributed` there. A
save that fails leaves the process at work. It ends when the trainer closes the connection or dies, after the save that
it is doing.
"""

import contextlib
import gc
import logging
import os
import pickle
import socket
import subprocess
import sys
import time
import uuid
import weakref
from dataclasses import dataclass, field
from datetime import timedelta
from enum import Enum
from multiprocessing import spawn
from multiprocessing.connection import Connection
from multiprocessing.reduction import recv_handle, send_handle
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from milepost.background.process.messages import pack_error, unpack_error
from milepost.background.process.start import start_process
from milepost.comm import Call, together
from milepost.dcp._engine.calls import comm_of
from milepost.dcp.api import raising_checkpoint_exceptions
from milepost.dcp.state_dict_saver import save
from milepost.errors import WriterDied
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata

_log = logging.getLogger("milepost")
_CALL = Call("saving in", "a process")
_LOOK_S = 0.5
_START_S = 300.0
_STOP_S = 15.0


class ProcessSignal(Enum):
    """What a trainer and its saving process say to each other without more words."""

    INIT_COMPLETE = "init_complete"
    TERMINATE = "terminate"


@dataclass(unsafe_hash=True)
class RequestId:
    """Which save: its place, and an id that no other save has."""

    checkpoint_id: str | os.PathLike[str] | None
    uuid: str = field(init=False, default_factory=lambda: str(uuid.uuid4()))


@dataclass
class ProcessRequest:
    """A save for the process to do."""

    staged_state_dict: dict[str, Any]
    checkpoint_request_id: RequestId
    storage_writer: StorageWriter | None = None
    planner: SavePlanner | None = None
    no_dist: bool = False
    use_collectives: bool = True


@dataclass(frozen=True, slots=True)
class GroupPlace:
    """Where the processes of all ranks meet. `prefix`: under it, in a store that serves others too; None: in their own.

    `collect_by_hand`, `collect`: whether automatic garbage collection is off, and done after each save instead.
    """

    rank: int
    size: int
    address: str
    port: int
    prefix: str | None
    collect_by_hand: bool = False
    collect: bool = True


@dataclass(frozen=True, slots=True)
class _Begin:
    """To the process: the group (None: it works alone), and how to import the trainer's main module."""

    group: GroupPlace | None
    main: dict[str, Any]


@dataclass(frozen=True, slots=True)
class _Handover:
    """To the process: a request follows as a file in memory; or an error, which the other ranks are to hear of."""

    no_dist: bool
    error: bytes


class SaveProcess:
    """The trainer's side of its saving process. Used by one thread at a time. Raises what the process met in starting.

    `group`: where the processes of all ranks meet, which all make together; None for one that works alone.
    """

    def __init__(self, group: GroupPlace | None) -> None:
        if group is not None and not 0 < group.port < 1 << 16:
            raise ValueError(f"the saving processes cannot meet at port {group.port}: ports are 1 to 65535")
        here, there = socket.socketpair(socket.AF_UNIX, socket.SOCK_STREAM)
        with here, there:
            self._process = start_process("milepost.dcp._engine.save_process", "serve", there)
            self._connection = Connection(here.detach())
        self._owner = os.getpid()
        self.close = weakref.finalize(self, _end, self._connection, self._process, self._owner)
        main = {k: v for k, v in spawn.get_preparation_data("milepost-save").items() if k.startswith("init_main")}
        try:
            self._send(_Begin(group, main))
            answer = self._answer(time.monotonic() + _START_S)
        except BaseException:
            self.close()
            raise
        assert answer is ProcessSignal.INIT_COMPLETE

    @property
    def pid(self) -> int:
        """The process."""
        return self._process.pid

    @property
    def is_alive(self) -> bool:
        """Whether it can be given a save. Not so in a fork of the trainer."""
        return self._owner == os.getpid() and self._process.poll() is None and not self._connection.closed

    def begin(self, request: ProcessRequest) -> None:
        """Give a save to the process. What cannot be pickled fails the save, on every rank."""
        try:
            with os.fdopen(os.memfd_create("milepost-request"), "w+b") as file:
                torch.save(request, file)
                file.flush()
                self._send(_Handover(request.no_dist, b""))
                with self._reachable():
                    send_handle(self._connection, file.fileno(), self.pid)
        except WriterDied:
            raise
        except Exception as error:  # noqa: BLE001  # the process raises it, on every rank
            self.refuse(error, request.no_dist)

    def refuse(self, error: BaseException, no_dist: bool) -> None:
        """Have the save fail with this error, on every rank: the others wait for this one there."""
        self._send(_Handover(no_dist, pack_error(error)))

    def outcome(self, wait_s: float) -> Metadata | None:
        """How the save ended; None if it has not after this time. Raises the error of the save, or WriterDied."""
        with self._reachable():
            if not self._connection.poll(wait_s):
                return None
        answer = self._answer(None)
        assert isinstance(answer, Metadata)
        return answer

    def kill(self) -> None:
        """End the process at once: it waits for one that is dead."""
        self._process.kill()
        self.close()

    def _answer(self, deadline: float | None) -> Any:
        with self._reachable():
            while deadline is not None and not self._connection.poll(_LOOK_S):
                if time.monotonic() > deadline:
                    raise WriterDied(f"the saving process {self.pid} has not answered for {_START_S:.0f} s")
            answer = self._connection.recv()
        if isinstance(answer, bytes):
            raise unpack_error(answer)
        return answer

    def _send(self, message: Any) -> None:
        with self._reachable():
            self._connection.send(message)

    @contextlib.contextmanager
    def _reachable(self) -> Any:
        try:
            yield
        except (EOFError, OSError) as error:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(1)
            code = self._process.poll()
            how = f"ended with code {code}" if code is not None else f"cannot be reached ({error})"
            raise WriterDied(
                f"the saving process {self.pid} {how}. Its log is in this job's standard error; was there too little "
                "memory? The next save starts another."
            ) from error


def _end(connection: Connection, process: "subprocess.Popen[bytes]", owner: int) -> None:
    if owner != os.getpid():
        connection.close()
        return
    with contextlib.suppress(OSError):  # said, not only hung up: forks of the trainer may hold the connection open
        connection.send(ProcessSignal.TERMINATE)
    connection.close()
    try:
        process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()


# In the process


class _Server:
    def __init__(self, connection: Connection, trainer: int) -> None:
        self._connection, self._trainer = connection, trainer
        self._main: dict[str, Any] = {}
        self._planner: SavePlanner | None = None
        self._saves = 0

    def run(self) -> None:
        """Take requests until the trainer is gone."""
        begin = self._connection.recv()
        self._main = begin.main
        group: GroupPlace | None = begin.group
        try:
            if group is not None:
                _meet(group)
            self._connection.send(ProcessSignal.INIT_COMPLETE)
        except BaseException as error:  # noqa: BLE001  # sent to the trainer
            self._connection.send(pack_error(error))
            return
        if group is not None and group.collect_by_hand:
            gc.disable()
        while (order := self._next()) is not None:
            self._connection.send(self._done(order))
            if group is not None and group.collect_by_hand and group.collect:
                self._collect()

    def _next(self) -> _Handover | None:
        """The next order; None once the trainer is gone. Forks of the trainer may hold the connection open."""
        with contextlib.suppress(EOFError, OSError):
            while not self._connection.poll(_LOOK_S):
                if os.getppid() != self._trainer:
                    return None
            message = self._connection.recv()
            return message if isinstance(message, _Handover) else None
        return None

    def _done(self, order: _Handover) -> Any:
        """Do a save. Gives its metadata, or its error as bytes."""
        try:
            metadata = self._saved(order)
            pickle.dumps(metadata)
        except BaseException as error:  # noqa: BLE001  # sent to the trainer
            if os.getppid() != self._trainer:
                _log.error("a save failed after its trainer had died: %s", error)
            return pack_error(error)
        return metadata

    def _saved(self, order: _Handover) -> Metadata:
        comm = comm_of(None, order.no_dist)
        with raising_checkpoint_exceptions("save", comm):
            # A step of its own: a rank that has nothing to save does not know which steps the others take.
            request = together(comm, _CALL, "receiving the state", lambda: self._received(order))
        # Kept until the next: what the planner keeps of its plans, it finds again.
        self._planner = request.planner
        return save(
            request.staged_state_dict,
            checkpoint_id=request.checkpoint_request_id.checkpoint_id,
            storage_writer=request.storage_writer,
            planner=request.planner,
            no_dist=request.no_dist,
        )

    def _received(self, order: _Handover) -> ProcessRequest:
        if order.error:
            raise unpack_error(order.error)
        handle = recv_handle(self._connection)
        try:
            request: ProcessRequest = self._unpickled(f"/proc/self/fd/{handle}")
        finally:
            os.close(handle)
        return request

    def _unpickled(self, path: str) -> Any:
        try:
            return torch.load(path, map_location="cpu", mmap=True, weights_only=False)  # from the trainer
        except AttributeError as error:
            if "__main__" not in str(error) or not self._main:
                raise
        main, self._main = self._main, {}
        spawn.prepare(main)  # only now: a script without a guard would train again
        return torch.load(path, map_location="cpu", mmap=True, weights_only=False)

    def _collect(self) -> None:
        gc.collect()
        self._saves += 1
        if self._saves == 1:
            gc.freeze()  # what is kept for the next saves need not be looked at again


def _meet(group: GroupPlace) -> None:
    """Form the process group."""
    limit = timedelta(seconds=_START_S)
    tcp_store: Any = dist.TCPStore  # type: ignore[attr-defined]  # the stubs do not list it
    is_master = group.prefix is None and group.rank == 0
    store = tcp_store(group.address, group.port, is_master=is_master, timeout=limit, wait_for_workers=False)
    if group.prefix is not None:
        store = c10d.PrefixStore(group.prefix, store)
    # For planners and storage that look there, as they would in a rank of the training.
    os.environ.update(RANK=str(group.rank), WORLD_SIZE=str(group.size))
    os.environ.update(MASTER_ADDR=group.address, MASTER_PORT=str(group.port))
    dist.init_process_group("gloo", store=store, rank=group.rank, world_size=group.size)
    dist.barrier()


def serve(handle: int, trainer: int) -> None:
    """Run as the saving process of this trainer."""
    logging.raiseExceptions = False  # standard error may be closed by then
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError, OSError):
        _Server(Connection(handle), trainer).run()
    with contextlib.suppress(OSError):
        sys.stderr.flush()
    os._exit(0)  # the store's threads may wait for peers that are gone
