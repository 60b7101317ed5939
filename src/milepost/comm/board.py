"""Ranks that talk through a board: a key-value store that all of them reach.

Every exchange has a number. Each rank pins its payload to the board; the lead collects them, and pins all of them as
one note, which the others wait for. So a wait can always say who has not come: those whose note is missing. If the
deadline passes, the lead pins that instead, and everybody raises the same error. A rank that comes later finds it and
raises too, and the next exchange finds all ranks in step again.

The board is the store that the job was started with, not a process group: control traffic never meets training.
"""

import threading
import time
from collections.abc import Callable
from typing import Protocol

import msgspec

from milepost.core.ranks import show_ranks
from milepost.errors import CheckpointError, RanksMissing

_LEAD = 0
_GRACE_S = 10.0
"""How much longer than the lead the others wait, so that its verdict reaches them first."""


class Board(Protocol):
    """Notes by name, seen by all ranks."""

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board."""

    def read(self, name: str, timeout_s: float) -> bytes | None:
        """The note, as soon as it is there; None if it is not there in time."""

    def count(self, name: str) -> int:
        """Add one to a counter and give its new value."""

    def remove(self, name: str) -> None:
        """Take a note off the board, if it is there."""


class Note(msgspec.Struct, frozen=True):
    """What the lead pins: all payloads, or the ranks that did not come."""

    phase: str
    payloads: tuple[bytes, ...] = ()
    missing: tuple[int, ...] = ()
    waited_s: float = 0.0


class BoardComm:
    """Ranks that talk through a board. `timeout_s` is the longest that any rank waits for the others."""

    def __init__(
        self, board: Board, rank: int, size: int, timeout_s: float, index_of: Callable[[int], int | None] | None = None
    ) -> None:
        self._board, self._rank, self._size, self._timeout_s = board, rank, size, timeout_s
        self._index_of = index_of

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job; None if it does not take part."""
        if self._index_of is not None:
            return self._index_of(global_rank)
        return global_rank if 0 <= global_rank < self._size else None

    def post(self, phase: str, payload: bytes) -> None:
        """Pin this rank's payload and leave."""
        number = self._board.count(f"count/{self._rank}")
        self._pin(number, phase, payload)
        if self._rank == _LEAD:
            # Nobody else collects: pin at once what is known, so that the others need not wait for the deadline.
            note = Note(phase, payloads=(_pack(phase, payload),))
            self._board.pin(f"{number}/all", msgspec.msgpack.encode(note))

    def exchange(self, phase: str, payload: bytes) -> list[bytes]:
        """Give every rank the payloads of all. Raises RanksMissing, naming ranks and phase, when the deadline passes."""
        number = self._enter(phase)
        self._pin(number, phase, payload)
        if self._rank == _LEAD:
            note = self._collect(number, phase)
            self._conclude(number, note)
        else:
            note = self._await(number, phase)
        if note.missing:
            raise RanksMissing(_absent(note, self._rank))
        payloads = []
        for rank, packed in enumerate(note.payloads):
            theirs, data = _unpack(packed)
            if theirs != phase:
                raise CheckpointError(
                    f"rank {rank} is at {theirs!r} while rank {self._rank} is at {phase!r}; "
                    "do all ranks make the same calls in the same order?"
                )
            payloads.append(data)
        return payloads

    def _enter(self, phase: str) -> int:
        """The number of this exchange. A rank that left out an earlier call skips what the others gave up on."""
        while True:
            number = self._board.count(f"count/{self._rank}")
            early = self._board.read(f"{number}/all", 0.0)
            if early is None or self._rank == _LEAD:
                return number
            note = msgspec.msgpack.decode(early, type=Note)
            if self._rank not in note.missing or note.phase == phase:
                return number

    def _pin(self, number: int, phase: str, payload: bytes) -> None:
        self._board.pin(f"{number}/{self._rank}", _pack(phase, payload))

    def _collect(self, number: int, phase: str) -> Note:
        deadline = time.monotonic() + self._timeout_s
        payloads: list[bytes | None] = []
        for rank in range(self._size):
            left = max(deadline - time.monotonic(), 0.0)
            payloads.append(self._board.read(f"{number}/{rank}", left))
        missing = tuple(rank for rank, payload in enumerate(payloads) if payload is None)
        if missing:
            return Note(phase, missing=missing, waited_s=self._timeout_s)
        return Note(phase, payloads=tuple(p for p in payloads if p is not None))

    def _conclude(self, number: int, note: Note) -> None:
        self._board.pin(f"{number}/all", msgspec.msgpack.encode(note))
        if note.missing:
            return
        # Every rank has pinned this number, so it has read the one before: those notes are done with.
        self._board.remove(f"{number - 1}/all")
        for rank in range(self._size):
            self._board.remove(f"{number}/{rank}")

    def _await(self, number: int, phase: str) -> Note:
        waited = self._timeout_s + min(_GRACE_S, self._timeout_s)
        found = self._board.read(f"{number}/all", waited)
        if found is not None:
            return msgspec.msgpack.decode(found, type=Note)
        # The lead itself is gone: say who else had come.
        there = [r for r in range(self._size) if self._board.read(f"{number}/{r}", 0.0) is not None]
        missing = tuple(r for r in range(self._size) if r not in there) or (_LEAD,)
        return Note(phase, missing=missing, waited_s=waited)


def _pack(phase: str, payload: bytes) -> bytes:
    return msgspec.msgpack.encode((phase, payload))


def _unpack(packed: bytes) -> tuple[str, bytes]:
    return msgspec.msgpack.decode(packed, type=tuple[str, bytes])


def _absent(note: Note, me: int) -> str:
    late = " (this rank came too late)" if me in note.missing else ""
    return (
        f"{show_ranks(note.missing)} did not come to {note.phase!r} within {note.waited_s:.0f} s{late}. "
        "Nothing was committed. Look at the logs of those ranks; raise `timeout_s` if they are only slow."
    )


class MemoryBoard:
    """A board for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._notes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board."""
        with self._changed:
            self._notes[name] = note
            self._changed.notify_all()

    def read(self, name: str, timeout_s: float) -> bytes | None:
        """The note, as soon as it is there; None if it is not there in time."""
        with self._changed:
            self._changed.wait_for(lambda: name in self._notes, timeout_s)
            return self._notes.get(name)

    def count(self, name: str) -> int:
        """Add one to a counter and give its new value."""
        with self._changed:
            self._counts[name] = self._counts.get(name, 0) + 1
            return self._counts[name]

    def remove(self, name: str) -> None:
        """Take a note off the board, if it is there."""
        with self._changed:
            self._notes.pop(name, None)
