"""The ranks of a `torch.distributed` job, through the store that the job was started with."""

import contextlib
import os
import socket
import time
import weakref
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

from milepost.comm.base import Comm, Solo
from milepost.comm.board_comm import BoardComm
from milepost.comm.channel import Channel
from milepost.core.option_values import check_values
from milepost.errors import InvalidRequest, RanksMissing

_FIRST_LOOK_S = 0.001
_CONNECT = timedelta(seconds=60)
_PIECE_BYTES = 4 << 20
"""Torch's store closes the connection of a client that sends more than 8 MiB at once."""
_WHOLE, _IN_PIECES = b"\0", b"\1"


class TorchBoard:
    """A board over a c10d store, by a connection of its own where the store offers one.

    All boards of a process that are named by this one share its connection: no call waits inside the store, and the
    server of a large job has to hold the connections of all ranks.
    """

    def __init__(self, store: Any, size: int) -> None:
        self._set_up(store.clone() if hasattr(store, "clone") else store, size, "milepost")

    def _set_up(self, own: Any, size: int, name: str) -> None:
        self._own, self._size, self._name = own, size, name
        # All ranks of a large job look at one server: the more there are, the longer each may pause between looks.
        self._slowest_look_s = min(0.02 + size / 10_000, 1.0)
        self._store = c10d.PrefixStore(name, own)
        self._pieces: dict[str, int] = {}

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board. It replaces a note of the same name."""
        with _reachable():
            if len(note) < _PIECE_BYTES:
                self._set(name, _WHOLE + note)
                return
            starts = range(0, len(note), _PIECE_BYTES)
            self._pieces[name] = max(len(starts), self._pieces.get(name, 0))
            for i, start in enumerate(starts):
                self._set(_piece(name, i), note[start : start + _PIECE_BYTES])
            # Last: a rank that sees this note finds the pieces.
            self._set(name, _IN_PIECES + len(starts).to_bytes(8, "big"))

    def _set(self, name: str, note: bytes) -> None:
        self._store.set(name, note)  # type: ignore[arg-type]  # the stub says str; bytes are taken as they are

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """These notes, once all are there; None for those that are not there in time."""
        with _reachable():
            if not names or self._appear(names, timeout_s):
                found = self._store.multi_get(names) if names else []
                return [self._joined(name, note) for name, note in zip(names, found, strict=True)]
            return [self._joined(name, self._store.get(name)) if self._store.check([name]) else None for name in names]

    def _joined(self, name: str, note: bytes) -> bytes:
        if note[:1] == _WHOLE:
            return bytes(note[1:])
        count = self._pieces[name] = int.from_bytes(note[1:], "big")
        return b"".join(bytes(self._store.get(_piece(name, i))) for i in range(count))

    def _appear(self, names: list[str], timeout_s: float) -> bool:
        """Poll, ever more slowly: a wait inside the store cannot be interrupted, and writes to the log."""
        start = time.monotonic()
        while not self._store.check(names):
            waited = time.monotonic() - start
            if waited >= timeout_s:
                return False
            pause = min(max(_FIRST_LOOK_S, waited / 10), self._slowest_look_s)
            time.sleep(min(pause, timeout_s - waited))
        return True

    def count(self, name: str, step: int = 1) -> int:
        """Add `step` to a counter and return its value; a step of 0 only looks."""
        with _reachable():
            return int(self._store.add(name, step))

    def remove(self, name: str) -> None:
        """Take a note off the board, if it is there."""
        with _reachable():
            self._store.delete_key(name)
            for i in range(self._pieces.pop(name, 0)):
                self._store.delete_key(_piece(name, i))

    def named(self, name: str) -> "TorchBoard":
        """Another board for the same ranks, by its name."""
        board = TorchBoard.__new__(TorchBoard)
        board._set_up(self._own, self._size, f"{self._name}/{name}")  # noqa: SLF001  # of the same class
        return board


def _piece(name: str, i: int) -> str:
    return f"{name}/piece/{i}"


@contextlib.contextmanager
def _reachable() -> Iterator[None]:
    """Turn torch's errors into one that says that the job's store does not answer."""
    try:
        yield
    except (dist.DistError, RuntimeError) as error:
        raise RanksMissing(
            f"the key-value store of the job does not answer, so the other ranks cannot be reached: {error}. "
            "It lives in rank 0 or in the launcher; check whether that process died."
        ) from error


def ranks_of(group: Any, timeout_s: float, coordinator: int = 0) -> Comm:
    """The comm for a process group, a comm, or None: the default group if there is one, else this process alone.

    `coordinator`: the rank, counted in the group, that collects and decides. Raises InvalidRequest for values that
    options of calls cannot have.
    """
    check_values({"timeout_s": timeout_s, "coordinator_rank": coordinator})
    if isinstance(group, (BoardComm, Solo)) or (not isinstance(group, dist.ProcessGroup) and isinstance(group, Comm)):
        return group
    if group is None and not (dist.is_available() and dist.is_initialized()):
        _check_alone()
        return Solo()
    group = dist.group.WORLD if group is None else group
    outside = group is dist.GroupMember.NON_GROUP_MEMBER
    if not isinstance(group, dist.ProcessGroup) and not outside:
        raise InvalidRequest(f"process_group is a torch.distributed.ProcessGroup, a Comm or None, not {group!r}")
    if outside or dist.get_rank(group) < 0:
        raise InvalidRequest("this rank is not in the process group; only its members make the call")
    members = dist.get_process_group_ranks(group)
    if len(members) == 1:
        return _Alone(members[0])
    if not 0 <= coordinator < len(members):
        raise InvalidRequest(f"the rank that decides is one of 0 to {len(members) - 1}, not {coordinator}")
    positions = {rank: i for i, rank in enumerate(members)}
    size, rank = len(members), dist.get_rank(group)
    board, channel = _meeting_place(group, rank, size)
    return BoardComm(board, rank, size, timeout_s, positions.get, coordinator, group, channel)


def _check_alone() -> None:
    """Raise InvalidRequest in a process that was started as one of several, and has not met the others."""
    world = os.environ.get("WORLD_SIZE", "")
    if "RANK" in os.environ and world.isdecimal() and int(world) > 1:
        raise InvalidRequest(
            f"this process was started as rank {os.environ['RANK']} of {world} (RANK and WORLD_SIZE are set), but "
            "torch.distributed.init_process_group was not called, so the ranks would overwrite each other's "
            "checkpoints. Call it first; or pass process_group=milepost.Solo() to save or load in this process alone."
        )


def key_value_store(address: tuple[str, int] | None) -> Any:
    """The key-value store at an address, or a new one in this process, on a port of its own."""
    host, port = address or ("127.0.0.1", 0)
    store: Any = dist.TCPStore  # type: ignore[attr-defined]  # the stubs do not list it
    return store(host, port, is_master=address is None, timeout=_CONNECT, wait_for_workers=False)


def address_for(group: Any) -> str:
    """The address of this machine at which the other ranks of a process group reach it."""
    store: Any = group.get_group_store() if isinstance(group, dist.ProcessGroup) else None
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            probe.connect((getattr(store, "host", "127.0.0.1"), 9))  # chooses the way, and sends nothing
            return str(probe.getsockname()[0])
    except OSError:
        return socket.gethostname()


_places: "weakref.WeakKeyDictionary[dist.ProcessGroup, tuple[TorchBoard, Channel]]" = weakref.WeakKeyDictionary()


def _meeting_place(group: dist.ProcessGroup, rank: int, size: int) -> tuple[TorchBoard, Channel]:
    """Where the ranks of a process group meet, kept as long as the group: connecting takes longer than a call.

    The board may hold notes of processes that had these ranks before, in the same job. So the ranks join first.
    """
    if group not in _places:
        board = TorchBoard(group.get_group_store(), size)
        _places.setdefault(group, (board, Channel(board, rank, size, fresh=False)))
    return _places[group]


class _Alone(Solo):
    """A process group of one rank."""

    def __init__(self, global_rank: int) -> None:
        self._global = global_rank

    def index_of(self, global_rank: int) -> int | None:
        """The only member is rank 0 here."""
        return 0 if global_rank == self._global else None
