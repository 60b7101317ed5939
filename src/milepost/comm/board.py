"""Ranks that talk through a board: a key-value store that all of them reach.

Every meeting has a number. Each rank pins its payload to the board; the coordinator collects them, decides, and pins
the outcome, which the others wait for. A waiting rank can always name the ranks that have not arrived: their notes are
missing. If the deadline passes, the coordinator pins that instead, and every rank raises the same error. A rank that
arrives later finds it and raises too, and at the next meeting all ranks are in step again.

The board is the store that the job was started with, not a process group: control traffic never meets training.
"""

import threading
import time
from collections import OrderedDict
from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from milepost.comm.base import Phase
from milepost.core.ranks import show_ranks
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, RanksMissing

_GRACE_S = 10.0
"""How much longer than the coordinator the others wait at most, so that its verdict reaches them first."""
_REMEMBERED = 16
_GONE = b"\xff" * 6
"""In place of a call and step: this rank has ended. Fits every meeting."""
_PARTING_NOTES = 8
"""In how many meetings the notes of a rank that is gone are found. A save has at most five, and ends at the first."""


class Board(Protocol):
    """Notes by name, seen by all ranks."""

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board. It replaces a note of the same name."""

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """These notes, once all are there; None for those that are not there in time."""

    def count(self, name: str, step: int = 1) -> int:
        """Add `step` to a counter and return its value; a step of 0 only looks."""

    def remove(self, name: str) -> None:
        """Take a note off the board, if it is there."""

    def named(self, name: str) -> "Board":
        """Another board for the same ranks, by its name."""


class Outcome(msgspec.Struct, frozen=True):
    """What the coordinator pins: its decision; or missing ranks, with the step last seen; or ranks at other calls."""

    wire: bytes
    decision: bytes = b""
    missing: dict[int, str] = {}
    waited_s: float = 0.0
    odd: dict[int, bytes] = {}

    def pack(self) -> bytes:
        """As a note. A decision, by far the most frequent, takes seven bytes more than itself."""
        if self.missing or self.odd:
            return b"!" + _OUTCOMES.pack(self)
        return b"." + self.wire + self.decision

    @staticmethod
    def unpack(note: bytes) -> "Outcome":
        """The outcome that a note holds."""
        if note[:1] == b"!":
            return _OUTCOMES.unpack(note[1:])
        return Outcome(note[1:7], note[7:])


_OUTCOMES = Wire(Outcome)


class BoardComm:
    """Ranks that talk through a board. `timeout_s` is the longest that any rank waits for the others."""

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        timeout_s: float,
        index_of: Callable[[int], int | None] | None = None,
        coordinator: int = 0,
        group: Any = None,
    ) -> None:
        self._board, self._rank, self._size = board, rank, size
        self._index_of, self._coordinator = index_of, coordinator
        self.group, self.timeout_s = group, timeout_s
        self._phases: OrderedDict[int, Phase] = OrderedDict()

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""
        return self._rank

    @property
    def size(self) -> int:
        """How many ranks there are."""
        return self._size

    @property
    def coordinator(self) -> int:
        """The rank that collects and decides."""
        return self._coordinator

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job; None if it does not take part."""
        if self._index_of is not None:
            return self._index_of(global_rank)
        return global_rank if 0 <= global_rank < self._size else None

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Bring all payloads to the coordinator and its decision to all. Raises RanksMissing, with ranks and steps."""
        number, early = self._enter(phase)
        if self._rank != self._coordinator:
            self._board.pin(f"{number}/{self._rank}", phase.wire + payload)
            outcome = early or self._await(number, phase)
            if not outcome.missing:
                self._board.remove(f"{number}/{self._rank}")  # the coordinator has read it
            return self._heed(outcome, phase)
        outcome = self._collect(number, phase, payload, decide)
        self._conclude(number, outcome)
        return self._heed(outcome, phase)

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """The coordinator's note, on every rank."""
        number, early = self._enter(phase)
        if self._rank == self._coordinator:
            self._board.pin(f"{number}/all", Outcome(phase.wire, note or b"").pack())
            return note or b""
        return self._heed(early or self._await(number, phase, announced=True), phase)

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """The coordinator's note for this rank, which takes it off the board."""
        number, early = self._enter(phase)
        if self._rank == self._coordinator:
            assert notes is not None
            for rank, note in enumerate(notes):
                if rank != self._coordinator:
                    self._board.pin(f"{number}/to/{rank}", note)
            self._board.pin(f"{number}/all", Outcome(phase.wire).pack())
            return notes[self._rank]
        self._heed(early or self._await(number, phase, announced=True), phase)
        found = self._board.read([f"{number}/to/{self._rank}"], self.timeout_s)[0]
        self._board.remove(f"{number}/to/{self._rank}")
        return found or b""

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Pin this rank's payload and do not wait. A coordinator that leaves decides alone: no other rank collects."""
        number = self._board.count(f"count/{self._rank}")
        if self._rank == self._coordinator:
            # The notes of earlier meetings stay: others may not have read them yet.
            self._board.pin(f"{number}/all", Outcome(phase.wire, payload).pack())
        else:
            self._board.pin(f"{number}/{self._rank}", phase.wire + payload)

    def post(self, name: str, note: bytes) -> None:
        """Put up a note for the other ranks to look at; it replaces one of the same name."""
        self._board.pin(f"posted/{name}", note)

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """The notes posted under these names, once all are there; None for those not there in time."""
        return self._board.read([f"posted/{name}" for name in names], timeout_s)

    def depart(self, payload: bytes) -> None:
        """Leave this payload for the next call, whatever the call is: this rank has ended."""
        for _ in range(_PARTING_NOTES):
            number = self._board.count(f"count/{self._rank}")
            if self._rank == self._coordinator:
                self._board.pin(f"{number}/all", Outcome(_GONE, payload).pack())
            else:
                self._board.pin(f"{number}/{self._rank}", _GONE + payload)

    def secondary(self) -> "BoardComm":
        """The same ranks on a board of their own, without the process group."""
        board = self._board.named(f"secondary/{self._board.count(f'secondaries/{self._rank}')}")
        return BoardComm(board, self._rank, self._size, self.timeout_s, self._index_of, self._coordinator)

    def _enter(self, phase: Phase) -> tuple[int, Outcome | None]:
        """The number of this meeting, and its outcome if that is there already.

        A rank that skipped an earlier call also skips the meetings that the others gave up on.
        """
        while True:
            number = self._board.count(f"count/{self._rank}")
            note = self._board.read([f"{number}/all"], 0.0)[0] if self._rank != self._coordinator else None
            early = Outcome.unpack(note) if note is not None else None
            if early is None or self._rank not in early.missing or phase.same_call(early.wire):
                break
        self._phases[number] = phase
        while len(self._phases) > _REMEMBERED:
            self._phases.popitem(last=False)
        return number, early

    def _collect(self, number: int, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> Outcome:
        others = [rank for rank in range(self._size) if rank != self._coordinator]
        notes = dict(zip(others, self._board.read([f"{number}/{r}" for r in others], self.timeout_s), strict=True))
        missing = {rank: self._last_seen(rank) for rank, note in notes.items() if note is None}
        if missing:
            return Outcome(phase.wire, missing=missing, waited_s=self.timeout_s)
        notes[self._coordinator] = phase.wire + payload
        packed = [notes[rank] or b"" for rank in range(self._size)]
        odd = {rank: note[:6] for rank, note in enumerate(packed) if note[:6] not in (phase.wire, _GONE)}
        return Outcome(phase.wire, odd=odd) if odd else Outcome(phase.wire, decide([note[6:] for note in packed]))

    def _last_seen(self, rank: int) -> str:
        """The step in which a rank last took part, as far as this call goes."""
        seen = self._phases.get(self._board.count(f"count/{rank}", 0))
        return seen.step if seen else ""

    def _conclude(self, number: int, outcome: Outcome) -> None:
        packed = outcome.pack()
        self._board.pin(f"{number}/all", packed)
        if outcome.missing:
            # Also over what was announced in this call, so that a late rank does not take part alone.
            for earlier in self._phases:
                if earlier < number and self._board.read([f"{earlier}/all"], 0.0)[0] is not None:
                    self._board.pin(f"{earlier}/all", packed)
            return
        # Every rank has pinned this number, so every rank has read the numbers before it. The ranks remove their own
        # notes, so that the coordinator's work does not grow with the number of ranks.
        for old in (number - 1, number - 2):
            self._board.remove(f"{old}/all")

    def _await(self, number: int, phase: Phase, announced: bool = False) -> Outcome:
        waited = self.timeout_s + min(_GRACE_S, self.timeout_s)
        found = self._board.read([f"{number}/all"], waited)[0]
        if found is not None:
            return Outcome.unpack(found)
        # The coordinator itself is missing: name the other missing ranks too, if this step needs them.
        others = [rank for rank in range(self._size) if rank not in (self._rank, self._coordinator) and not announced]
        notes = self._board.read([f"{number}/{r}" for r in others], 0.0)
        missing = [self._coordinator, *(r for r, note in zip(others, notes, strict=True) if note is None)]
        return Outcome(phase.wire, missing={r: self._last_seen(r) for r in missing}, waited_s=waited)

    def _heed(self, outcome: Outcome, phase: Phase) -> bytes:
        if outcome.missing:
            raise RanksMissing(_absent(outcome, phase, self._rank))
        if outcome.odd or outcome.wire not in (phase.wire, _GONE):
            odd = outcome.odd or {self._coordinator: outcome.wire}
            there = ", ".join(
                f"rank {r} is at another {'step of this call' if phase.same_call(wire) else 'call'}"
                for r, wire in list(odd.items())[:5]
                if r != self._rank
            )
            raise CheckpointError(
                f"rank {self._rank} is at {phase.text!r}; {there or f'rank {self._coordinator} is at another call'}. "
                "Do all ranks make the same calls, in the same order, for the same place?"
            )
        return outcome.decision


def _absent(outcome: Outcome, phase: Phase, me: int) -> str:
    late = " (this rank came too late)" if me in outcome.missing else ""
    groups: dict[str, list[int]] = {}
    for rank, step in outcome.missing.items():
        groups.setdefault(step, []).append(rank)
    seen = "; ".join(
        f"{show_ranks(ranks)} {'last seen at ' + repr(step) if step else 'not seen in this call'}"
        for step, ranks in groups.items()
    )
    return (
        f"{show_ranks(outcome.missing)} did not come to {phase.text!r} within {outcome.waited_s:.0f} s{late}: {seen}. "
        "Look at the logs of those ranks; raise `timeout_s` if they are only slow."
    )


class MemoryBoard:
    """A board for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._named: dict[str, MemoryBoard] = {}
        self._changed = threading.Condition()
        self._notes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self.bytes_pinned = 0
        self.bytes_read = 0

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board, in place of one that has the name already."""
        with self._changed:
            self._notes[name] = note
            self.bytes_pinned += len(note)
            self._changed.notify_all()

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """These notes, as soon as all are there; None for those that are not there in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for name in names:
                while name not in self._notes and (wait := deadline - time.monotonic()) > 0:
                    self._changed.wait(wait)
            found = [self._notes.get(name) for name in names]
            self.bytes_read += sum(len(note) for note in found if note is not None)
            return found

    def count(self, name: str, step: int = 1) -> int:
        """Add to a counter (0 just looks) and give its value."""
        with self._changed:
            self._counts[name] = self._counts.get(name, 0) + step
            return self._counts[name]

    def remove(self, name: str) -> None:
        """Take a note off the board, if it is there."""
        with self._changed:
            self._notes.pop(name, None)

    def named(self, name: str) -> "MemoryBoard":
        """The board of this name: another one for the same ranks."""
        with self._changed:
            return self._named.setdefault(name, MemoryBoard())
