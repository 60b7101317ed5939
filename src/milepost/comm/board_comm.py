"""Ranks that talk through a board.

Every meeting has a number. Each rank pins its payload to the board; the coordinator collects them, decides, and pins
the outcome, which the others wait for. A waiting rank can always name the ranks that have not arrived: their notes are
missing. If the deadline passes, the coordinator pins that instead, and every rank raises the same error. A rank that
arrives later finds it and raises too. Before the next call all ranks join again; see `channel.py`.

The board is the store that the job was started with, not a process group: control traffic never meets training.
"""

import time
from collections.abc import Callable
from typing import Any

from milepost.comm.base import Phase, mark_told
from milepost.comm.board import Board
from milepost.comm.channel import GRACE_S, Channel, Leaver
from milepost.comm.outcome import GONE, LEFT, Outcome, error_of
from milepost.comm.patience import Patience
from milepost.core.caller import Caller
from milepost.errors import RanksMissing

_PARTING_NOTES = 8
"""In how many meetings the notes of a rank that has left are found. A call that waits has at most five of them."""
_ANNOUNCEMENTS = 32
"""After so many announcements in a row the coordinator waits for all ranks once, and can take them off the board."""
_SHOW_S = 1.0
"""After this time, a rank that waits for an announcement shows where it is."""
_LEAVE_S = 1.0
"""How long a rank that is about to end looks for the others, if they have not met yet."""


class BoardComm:
    """Ranks that talk through a board. `timeout_s` is the longest that any rank waits for the others.

    `channel`: what this rank knows of the place where they meet, to be kept between calls. By default a new one.
    """

    def __init__(
        self,
        board: Board,
        rank: int,
        size: int,
        timeout_s: float,
        index_of: Callable[[int], int | None] | None = None,
        coordinator: int = 0,
        group: Any = None,
        channel: Channel | None = None,
    ) -> None:
        self._root, self._rank, self._size = board, rank, size
        self._channel = channel or Channel(board, rank, size)
        self._index_of, self._coordinator = index_of, coordinator
        self.group, self.timeout_s = group, timeout_s
        self._gave_up = self._is_first = False

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

    @property
    def joined(self) -> bool:
        """Whether the ranks meet where they met before. If not, they join before the next call."""
        return self._channel.joined

    @property
    def _board(self) -> Board:
        return self._channel.board

    @property
    def _decides(self) -> bool:
        return self._rank == self._coordinator

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job; None if it does not take part."""
        if self._index_of is not None:
            return self._index_of(global_rank)
        return global_rank if 0 <= global_rank < self._size else None

    def begin(self, caller: Caller) -> bool:
        """Begin a call of several steps; False within another one."""
        return self._channel.begin(caller)

    def end(self, caller: Caller) -> None:
        """End a call."""
        self._channel.end(caller)

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Bring all payloads to the coordinator and its decision to all. Raises RanksMissing, with ranks and steps."""
        number, early = self._enter(phase)
        self._channel.announcements = 0
        if self._decides:
            outcome = self._collect(number, phase, payload, decide)
            self._conclude(number, outcome)
            return self._heed(outcome, phase)
        return self._heed(self._hear(number, early, phase, payload)[1], phase)

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """The coordinator's note, on every rank."""
        if self._channel.announcements + 1 >= _ANNOUNCEMENTS:
            return self.meet(phase, b"", lambda _: note or b"")
        number, early = self._enter(phase)
        self._channel.announcements += 1
        if self._decides:
            self._pin_outcome(number, Outcome(phase.wire, note or b""))
            return note or b""
        return self._heed(self._hear(number, early, phase)[1], phase)

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """The coordinator's note for this rank, which takes it off the board."""
        number, early = self._enter(phase)
        if self._decides:
            assert notes is not None
            for rank, note in enumerate(notes):
                if rank != self._coordinator:
                    self._board.pin(f"{number}/to/{rank}", note)
            self._pin_outcome(number, Outcome(phase.wire))
            return notes[self._rank]
        number, outcome = self._hear(number, early, phase)
        self._heed(outcome, phase)
        found = self._board.read([f"{number}/to/{self._rank}"], self.timeout_s)[0]
        self._board.remove(f"{number}/to/{self._rank}")
        return found or b""

    def _hear(
        self, number: int, early: Outcome | None, phase: Phase, payload: bytes | None = None
    ) -> tuple[int, Outcome]:
        """On the other ranks: bring the payload, if there is one, and wait for the outcome. Gives its number too.

        If the coordinator left this board, for a rank that had left it, they join again, and the step is taken there.
        """
        while True:
            if payload is not None:
                self._board.pin(f"{number}/{self._rank}", phase.wire + payload)
            outcome = early or self._await(number, phase, announced=payload is None)
            if payload is not None and not outcome.missing:
                self._board.remove(f"{number}/{self._rank}")  # the coordinator has read it
            if not self._is_first or not self._is_over(outcome, phase):
                return number, outcome
            self._channel.part([])
            number, early = self._join(phase)

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Pin this rank's payload and do not wait. A coordinator that leaves decides alone: no other rank collects."""
        if not self._channel.joined:
            self._channel.join(phase, self._coordinator, min(self.timeout_s, _LEAVE_S))
        number = self._board.count(f"count/{self._rank}")
        self._channel.note(number, phase)
        if self._decides:
            # The notes of earlier meetings stay: others may not have read them yet.
            self._pin_outcome(number, Outcome(phase.wire, payload))
        else:
            self._board.pin(f"{number}/{self._rank}", phase.wire + payload)

    def withdraw(self, phase: Phase, payload: bytes) -> None:
        """Leave this payload for the rest of this call, and join again before the next one.

        Before the first step of a call this counts as coming to it: the others are there, or on their way.
        """
        if self._channel.awaited and not self._channel.joined:
            self._channel.join(phase, self._coordinator, min(self.timeout_s, _LEAVE_S))
        if self._channel.joined:
            # This rank may have counted the meeting to come, or not yet: the notes begin with the earlier one.
            number, calls = self._board.count(f"count/{self._rank}", 0), self._channel.calls
            self._channel.show_leaver(Leaver(phase.wire, calls, self._gave_up))
            self._part(Outcome(LEFT, payload, apart=True, calls=calls), number)

    def depart(self, payload: bytes) -> None:
        """Leave this payload for the next call, whatever the call is: this rank has ended.

        It may have ended between counting a meeting and coming to it. So its note is in that one too.
        """
        if self._channel.joined:
            first = self._board.count(f"count/{self._rank}", 0) + int(self._decides)
            self._part(Outcome(GONE, payload, apart=True), first)

    def _part(self, outcome: Outcome, first: int) -> None:
        """Pin an outcome of this rank alone to all meetings, from this one on, that the others may still come to."""
        if first in self._channel.concluded:
            first += 1  # the others have the outcome of that one
        who = "all" if self._decides else str(self._rank)
        note = outcome.pack() if self._decides else outcome.wire + outcome.decision
        names = [f"{number}/{who}" for number in range(first, first + _PARTING_NOTES)]
        for name in names:
            self._board.pin(name, note)
        self._channel.part([*names, *self._litter()])

    def post(self, name: str, note: bytes) -> None:
        """Put up a note for the other ranks to look at; it replaces one of the same name. They have met before."""
        self._board.pin(f"posted/{name}", note)

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """The notes posted under these names, once all are there; None for those not there in time."""
        return self._board.read([f"posted/{name}" for name in names], timeout_s)

    def secondary(self, purpose: str) -> "BoardComm":
        """The same ranks on a board of their own, without the process group."""
        board = self._root.named(f"{purpose}/{self._channel.number_of(purpose)}")
        channel = Channel(board, self._rank, self._size, fresh=False)
        size, timeout_s = self._size, self.timeout_s
        return BoardComm(board, self._rank, size, timeout_s, self._index_of, self._coordinator, channel=channel)

    def close(self) -> None:
        """Take what is left of this channel off the board, on the last rank that comes here."""
        if not self._channel.joined:
            return
        number = self._board.count(f"count/{self._rank}", 0)
        self._board.remove(f"count/{self._rank}")
        if self._board.count("closed") == self._size:
            for old in range(max(number - _ANNOUNCEMENTS, 0), number + 1):
                self._board.remove(f"{old}/all")
            for name in ("joined", "left", "closed"):
                self._board.remove(name)
        self._channel.part([])

    def _enter(self, phase: Phase) -> tuple[int, Outcome | None]:
        """The number of this meeting, and its outcome if that is there already. Joins the others where needed."""
        channel, continues = self._channel, self._channel.enter()
        self._gave_up, self._is_first = False, not continues
        if channel.joined and self._decides and not continues:
            self._look_for_leaver(phase)
        if channel.joined:
            number, early = self._count()
            if early is None or continues or not self._is_over(early, phase):
                channel.note(number, phase)
                return number, early
            channel.part([])
        return self._join(phase)

    def _join(self, phase: Phase) -> tuple[int, Outcome | None]:
        self._is_first = False
        self._channel.join(phase, self._coordinator, self.timeout_s)
        number, early = self._count()
        self._channel.note(number, phase)
        return number, early

    def _look_for_leaver(self, phase: Phase) -> None:
        """On the coordinator, before a call: part from a board that another rank has left.

        Raises RanksMissing if that rank did not wait any longer for this very call.
        """
        leaver = self._channel.leaver()
        if leaver is None:
            return
        over = self._channel.is_newer(leaver.calls)
        if not over and not leaver.gave_up:
            return  # it left this very call, and its note says why
        # The ranks that have not left this board wait there, or will: they find what became of it.
        number, missing = self._board.count(f"count/{self._rank}", 0) + 1, {} if over else {self._rank: ""}
        wire, waited_s = (LEFT, 0.0) if over else (leaver.wire, self.timeout_s)
        self._pin_outcome(number, Outcome(wire, missing=missing, waited_s=waited_s, apart=True, calls=leaver.calls))
        self._channel.part(self._litter())
        if over:
            return
        self._channel.calls = leaver.calls
        if phase.same_call(leaver.wire):
            raise mark_told(
                RanksMissing(
                    f"other ranks did not wait any longer for rank {self._rank} at {phase.text!r} (this rank came too "
                    "late). Make the call again on all ranks; raise `timeout_s` if they are only slow."
                )
            )
        self._channel.calls += 1  # this rank has skipped the call that the others gave up

    def _count(self) -> tuple[int, Outcome | None]:
        number = self._board.count(f"count/{self._rank}")
        note = self._board.read([f"{number}/all"], 0.0)[0] if not self._decides else None
        return number, Outcome.unpack(note) if note is not None else None

    def _is_over(self, early: Outcome, phase: Phase) -> bool:
        """Whether a call begins at a number at which the others, or the coordinator, gave up an earlier call."""
        if not early.apart or (self._rank not in early.missing and early.wire != LEFT):
            return False
        return self._channel.is_newer(early.calls) or (bool(early.missing) and not phase.same_call(early.wire))

    def _collect(self, number: int, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> Outcome:
        others = [rank for rank in range(self._size) if rank != self._coordinator]
        notes = self._patiently({rank: f"{number}/{rank}" for rank in others}, self.timeout_s, Patience(phase))
        missing = {rank: self._last_seen(rank) for rank, note in notes.items() if note is None}
        if missing:
            calls = self._channel.calls
            return Outcome(phase.wire, missing=missing, waited_s=self.timeout_s, apart=True, calls=calls)
        notes[self._coordinator] = phase.wire + payload
        packed = [notes[rank] or b"" for rank in range(self._size)]
        odd = {rank: note[:6] for rank, note in enumerate(packed) if note[:6] not in (phase.wire, GONE, LEFT)}
        if odd:
            return Outcome(phase.wire, odd=odd, apart=True)
        apart = any(note[:6] in (GONE, LEFT) for note in packed)
        return Outcome(phase.wire, decide([note[6:] for note in packed]), apart=apart)

    def _patiently(self, names: dict[int, str], timeout_s: float, patience: Patience) -> dict[int, bytes | None]:
        """The notes of these ranks, once all are there; None for those not there in time."""
        notes: dict[int, bytes | None] = dict.fromkeys(names)
        deadline = time.monotonic() + timeout_s
        while missing := [rank for rank, note in notes.items() if note is None]:
            left_s = max(deadline - time.monotonic(), 0.0)
            some_s = patience.at_most_s(left_s)
            found = self._board.read([names[rank] for rank in missing], some_s)
            notes.update(zip(missing, found, strict=True))
            if some_s >= left_s:
                break
            patience.tell([rank for rank in missing if notes[rank] is None])
        return notes

    def _last_seen(self, rank: int) -> str:
        """The step in which a rank last took part, as far as this call goes."""
        seen = self._channel.phases.get(self._board.count(f"count/{rank}", 0))
        return seen.step if seen else ""

    def _pin_outcome(self, number: int, outcome: Outcome) -> None:
        self._board.pin(f"{number}/all", outcome.pack())
        self._channel.concluded.append(number)

    def _conclude(self, number: int, outcome: Outcome) -> None:
        earlier = list(self._channel.concluded)
        self._pin_outcome(number, outcome)
        if outcome.missing:
            self._channel.give_up(outcome)
            # Also over what was announced in this call, so that a late rank does not take part alone. Not over the end
            # of the call before: a rank that has not read that yet was in time for it.
            for old in set(earlier) & self._channel.phases.keys():
                self._board.pin(f"{old}/all", outcome.pack())
        elif not outcome.apart:
            # Every rank has pinned this number, so every rank has read the numbers before it. The ranks remove their
            # own notes, so that the coordinator's work does not grow with the number of ranks.
            for old in earlier:
                self._board.remove(f"{old}/all")
            self._channel.settled(number)

    def _litter(self) -> list[str]:
        """What this rank, as the coordinator, has on the board."""
        return [*(f"{number}/all" for number in self._channel.concluded), "left", "joined"] if self._decides else []

    def _await(self, number: int, phase: Phase, announced: bool = False) -> Outcome:
        waited_s = self.timeout_s + min(GRACE_S, self.timeout_s)
        shown_s = min(_SHOW_S, waited_s) if announced else waited_s
        awaited, patience = {self._coordinator: f"{number}/all"}, Patience(phase)
        found = self._patiently(awaited, shown_s, patience)[self._coordinator]
        if found is None and announced:
            # A coordinator that waits in another step for a note of this rank finds one, and sees where this rank is.
            self._board.pin(f"{number}/{self._rank}", phase.wire)
            found = self._patiently(awaited, waited_s - shown_s, patience)[self._coordinator]
            self._board.remove(f"{number}/{self._rank}")
        if found is not None:
            return Outcome.unpack(found)
        # The coordinator itself is missing: name the other missing ranks too, if this step needs them.
        others = [rank for rank in range(self._size) if rank not in (self._rank, self._coordinator) and not announced]
        notes = self._board.read([f"{number}/{r}" for r in others], 0.0)
        missing = [self._coordinator, *(r for r, note in zip(others, notes, strict=True) if note is None)]
        self._gave_up = True
        return Outcome(phase.wire, missing={r: self._last_seen(r) for r in missing}, waited_s=waited_s)

    def _heed(self, outcome: Outcome, phase: Phase) -> bytes:
        """Raise what an outcome says, if it is an error. After one that sets the ranks apart, stop counting."""
        error = error_of(outcome, phase, self._rank, self._coordinator)
        if outcome.apart:
            self._channel.part(self._litter(), outcome)
        if error is not None:
            raise error
        return outcome.decision
