"""Where the ranks of a job meet, and how they find each other there.

A channel has a board. The ranks count their meetings on it, each for itself, and as long as all of them make the same
calls, the counts are equal. Two things put an end to that:

* A rank did not come, left in the middle, or made another call. Then the ranks' counts may differ for good.
* The process is a new one, started again in the same job, and the board still has the notes of its predecessor.

In both cases the ranks *join*: they agree on a new board that has nothing on it.

1. Every rank pins a greeting with a number of its own that was never used before.
2. The coordinator invents a name for the new board and pins it as the answer to each greeting. A rank waits for the
   answer to its own greeting, so it cannot take one that was meant for an earlier process or an earlier call.
3. Every rank pins to the new board that it is there. Greetings of processes that are dead are never followed by that.
4. When all ranks are there, the coordinator says so, and the call begins.

Each rank also counts its calls. A rank that was late and comes to a call which the others gave up raises that; it does
not take part in their next one, even if that has the same place: it may hold another state. It raises once for each
call that it missed, at once, while the others wait for it. Then the counts are equal again, and the call of all works.
"""

import secrets
import time
from collections import OrderedDict

import msgspec

from milepost.comm.base import Phase
from milepost.comm.board import Board
from milepost.comm.outcome import Outcome, error_of
from milepost.comm.patience import Patience
from milepost.core.caller import Caller
from milepost.core.wire import Wire
from milepost.version import __version__

GRACE_S = 10.0
"""How much longer than the coordinator the others wait at most, so that its verdict reaches them first."""
_REMEMBERED = 16
_FIRST_LOOK_S, _LAST_LOOK_S = 0.05, 5.0
_GAVE_UP, _JOINED, _LEFT = "gave-up", "joined", "left"


class Presence(msgspec.Struct, frozen=True, array_like=True):
    """What a rank that joins says on the new board: the step that it is at, its calls, and its version of Milepost."""

    wire: bytes
    calls: int
    version: str


class Leaver(msgspec.Struct, frozen=True, array_like=True):
    """A rank that left its call: which step and call that was, and whether it only waited too long."""

    wire: bytes
    calls: int
    gave_up: bool


_PRESENCES = Wire(Presence)
_LEAVERS = Wire(Leaver)


class Channel:
    """One rank's view of the place where all ranks meet.

    `fresh`: nothing was ever on this board, so the ranks need not join before their first call.
    """

    def __init__(self, board: Board, rank: int, size: int, *, fresh: bool = True) -> None:
        self._first, self._rank, self._size = board, rank, size
        self._board = board if fresh else None
        self._has_met = fresh
        self._littered: list[tuple[Board, list[str]]] = []
        self.phases: OrderedDict[int, Phase] = OrderedDict()
        self.calls = 0
        """How many calls this rank has begun, with those that it is known to have missed."""
        self._caller: Caller | None = None
        self._begun = False
        self.announcements = 0
        self.concluded: list[int] = []
        """On the coordinator: the meetings whose outcome is on the board."""
        self._unsettled = False
        self._beside: dict[str, int] = {}

    @property
    def joined(self) -> bool:
        """Whether this rank has a board that it shares with the others."""
        return self._board is not None

    @property
    def board(self) -> Board:
        """The board on which the ranks meet at present."""
        assert self._board is not None, "the ranks have not joined"
        return self._board

    def begin(self, caller: Caller) -> bool:
        """Begin a call, or a call within a call; False for the latter."""
        if self._in_call:
            return self._caller is caller  # who was interrupted here comes again
        self._start(caller)
        return True

    @property
    def _in_call(self) -> bool:
        return self._caller is not None and not self._caller.is_lost()

    def _start(self, caller: Caller | None) -> None:
        # In one go: an interrupt finds a call that has not begun, or one that has.
        self._begun, self._caller, self.calls = False, caller, self.calls + 1
        self.phases.clear()

    def enter(self) -> bool:
        """Come to a step. Whether this rank is in a call of which it has taken a step already."""
        if not self._in_call:
            self._start(None)
        return self._begun

    def end(self, caller: Caller) -> None:
        """End the call that this caller began; one within another ends with that."""
        if self._caller is caller:
            self._caller = None

    @property
    def awaited(self) -> bool:
        """Whether this rank is in a call of which it has not taken a step."""
        return self._in_call and not self._begun

    def note(self, number: int, phase: Phase) -> None:
        """Remember at which step this rank was in a meeting."""
        self._begun = True
        self.phases[number] = phase
        while len(self.phases) > _REMEMBERED:
            self.phases.popitem(last=False)

    def number_of(self, purpose: str) -> int:
        """How many channels beside this one were opened for a purpose, with this one."""
        self._beside[purpose] = self._beside.get(purpose, 0) + 1
        return self._beside[purpose]

    def part(self, litter: list[str], verdict: Outcome | None = None) -> None:
        """Stop counting: this rank joins again before its next call. `litter`: its notes, to be removed then."""
        if self._board is not None:
            self._littered.append((self._board, [*litter, f"count/{self._rank}"]))
        if verdict is not None:
            self.calls = max(self.calls, verdict.calls)
        self._board = None
        self._begun = True  # whatever comes next of this call, it is not its first step

    def show_leaver(self, leaver: Leaver) -> None:
        """Let the coordinator know, before its next call, that this rank has left."""
        self.board.pin(_LEFT, _LEAVERS.pack(leaver))

    def leaver(self) -> Leaver | None:
        """A rank that has left since the ranks joined, if there is one."""
        note = self.board.read([_LEFT], 0.0)[0]
        return _LEAVERS.unpack(note) if note is not None else None

    def give_up(self, verdict: Outcome) -> None:
        """On the coordinator: let ranks that come later know that the others did not wait."""
        self._first.pin(_GAVE_UP, verdict.pack())

    def join(self, phase: Phase, coordinator: int, timeout_s: float) -> None:
        """Meet all ranks on a new board. Raises RanksMissing, or CheckpointError if they are at different calls."""
        self.concluded.clear()
        self.announcements = 0
        if self._rank == coordinator:
            board, verdict = self._gather(phase, timeout_s)
        else:
            board, verdict = self._find(phase, coordinator, timeout_s)
        error = error_of(verdict, phase, self._rank, coordinator)
        if error is not None:
            if self._rank not in verdict.missing:  # else it comes again, until it has made the calls of the others
                self.calls = max(self.calls, verdict.calls)
            raise error
        self._has_met = True
        self._board, self._unsettled = board, True
        self._tidy(coordinator)

    def _tidy(self, coordinator: int) -> None:
        """Remove what this rank left on boards that no rank looks at any more."""
        littered, self._littered = self._littered, []
        for board, names in littered:
            for name in names:
                board.remove(name)
        if self._rank == coordinator:
            self._first.remove(_GAVE_UP)

    def settled(self, number: int) -> None:
        """On the coordinator, after a meeting of all: no rank looks any more at what was there before."""
        if self._unsettled:
            self._unsettled = False
            self.board.remove(_JOINED)
        self.concluded = [number]

    # The coordinator's side.

    def _gather(self, phase: Phase, timeout_s: float) -> tuple[Board, Outcome]:
        name = secrets.token_hex(8)
        board = self._first.named(name)
        answered: dict[int, bytes] = {}
        there = {self._rank: Presence(phase.wire, self.calls, __version__)}
        deadline, pause_s, patience = time.monotonic() + timeout_s, _FIRST_LOOK_S, Patience(phase)
        while absent := [rank for rank in range(self._size) if rank not in there]:
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            patience.tell(absent)
            self._answer(absent, answered, name.encode(), min(pause_s, left_s))
            expected = [rank for rank in absent if rank in answered]
            look_s = max(min(pause_s, deadline - time.monotonic()), 0.0)
            found = zip(expected, board.read([f"here/{rank}" for rank in expected], look_s), strict=True)
            there |= {rank: _PRESENCES.unpack(note) for rank, note in found if note is not None}
            late = self._find_late(there, board, timeout_s)
            if late is not None:
                return board, late
            pause_s = min(2 * pause_s, _LAST_LOOK_S)
        verdict = _verdict(there, self._rank, self._size, timeout_s)
        board.pin(_JOINED, verdict.pack())
        if verdict.missing:
            self.give_up(verdict)
        return board, verdict

    def _find_late(self, there: dict[int, Presence], board: Board, waited_s: float) -> Outcome | None:
        """Send ranks away that come to a call which the others gave up; if this is such a rank, give the verdict on it.

        They come again with their next call, for which the others wait.
        """
        mine = there[self._rank]
        alike = {rank: one for rank, one in there.items() if one.wire == mine.wire}
        if any(one.calls > mine.calls for one in alike.values()):
            return Outcome(mine.wire, missing={self._rank: ""}, waited_s=waited_s, apart=True, calls=mine.calls)
        for rank in [rank for rank, one in alike.items() if one.calls < mine.calls]:
            calls = there.pop(rank).calls
            verdict = Outcome(mine.wire, missing={rank: ""}, waited_s=waited_s, apart=True, calls=calls)
            board.remove(f"here/{rank}")
            board.pin(f"late/{rank}", verdict.pack())
        return None

    def _answer(self, absent: list[int], answered: dict[int, bytes], name: bytes, wait_s: float) -> None:
        """Answer the greetings of these ranks; those of dead processes too, for they look the same."""
        greetings = self._first.read([f"hello/{rank}" for rank in absent], 0.0 if answered else wait_s)
        for rank, greeting in zip(absent, greetings, strict=True):
            if greeting is not None and answered.get(rank) != greeting:
                answered[rank] = greeting
                self._first.pin(_answer_to(greeting), name)

    # The other ranks' side.

    def _find(self, phase: Phase, coordinator: int, timeout_s: float) -> tuple[Board, Outcome]:
        given_up = self._given_up(phase)
        if given_up is not None:
            return self._first, given_up
        greeting = secrets.token_hex(8).encode()
        self._first.pin(f"hello/{self._rank}", greeting)
        try:
            return self._follow(greeting, phase, coordinator, timeout_s)
        finally:
            self._first.remove(f"hello/{self._rank}")
            self._first.remove(_answer_to(greeting))

    def _follow(self, greeting: bytes, phase: Phase, coordinator: int, timeout_s: float) -> tuple[Board, Outcome]:
        """Go to the board that the coordinator names, and wait there for all others."""
        waited_s = timeout_s + min(GRACE_S, timeout_s)
        deadline, board, name = time.monotonic() + waited_s, self._first, b""
        own, pause_s, patience = f"late/{self._rank}", _FIRST_LOOK_S, Patience(phase)
        while (left_s := deadline - time.monotonic()) > 0:
            patience.tell([coordinator])
            answer = self._first.read([_answer_to(greeting)], 0.0 if name else min(left_s, _LAST_LOOK_S))[0]
            if answer is not None and answer != name:
                name = answer
                board = self._first.named(name.decode())
                presence = Presence(phase.wire, self.calls, __version__)
                board.pin(f"here/{self._rank}", _PRESENCES.pack(presence))
            if name:
                look_s = min(left_s, pause_s)
                pause_s = min(2 * pause_s, _LAST_LOOK_S)
                late, note = (board.read([one], wait_s)[0] for one, wait_s in ((own, 0.0), (_JOINED, look_s)))
                if late is not None or note is not None:
                    board.remove(f"here/{self._rank}" if late is None else own)
                    return board, Outcome.unpack(late or note or b"")
        return board, Outcome(phase.wire, missing={coordinator: ""}, waited_s=waited_s, apart=True)

    def _given_up(self, phase: Phase) -> Outcome | None:
        """The verdict of the others on this call, if they gave up on this rank. Calls that it skipped are counted."""
        note = self._first.read([_GAVE_UP], 0.0)[0]
        verdict = Outcome.unpack(note) if note is not None else None
        if verdict is None or self._rank not in verdict.missing or self.is_newer(verdict.calls):
            return None
        if not self._has_met:
            return None  # it may be the verdict on a process that had this rank before
        if phase.same_call(verdict.wire):
            return verdict
        self.calls = verdict.calls + 1
        return None

    def is_newer(self, calls: int) -> bool:
        """Whether the call of this rank comes after that one."""
        return self.calls > calls


def _answer_to(greeting: bytes) -> str:
    return f"welcome/{greeting.decode()}"


def _verdict(there: dict[int, Presence], me: int, size: int, waited_s: float) -> Outcome:
    """What the coordinator says to those who are there: begin; or who is missing, or came for something else."""
    mine, calls = there[me], max(presence.calls for presence in there.values())
    missing = {rank: "" for rank in range(size) if rank not in there}
    if missing:
        return Outcome(mine.wire, missing=missing, waited_s=waited_s, apart=True, calls=mine.calls)
    if len({presence.version for presence in there.values()}) > 1:
        versions = {rank: presence.version for rank, presence in sorted(there.items())}
        return Outcome(mine.wire, versions=versions, apart=True, calls=calls)
    odd = {rank: p.wire for rank, p in there.items() if (p.wire, p.calls) != (mine.wire, mine.calls)}
    return Outcome(mine.wire, odd=odd, apart=bool(odd), calls=calls)
