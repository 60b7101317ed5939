"""The port for the ranks of a job."""

import contextlib
from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar, runtime_checkable

import xxhash

from milepost.core.caller import Caller

TIMEOUT_S = 1800.0
"""The longest that a rank waits for the others, unless the caller says otherwise."""


E = TypeVar("E", bound=BaseException)
_TOLD = "told_to_all_ranks"


def mark_told(error: E) -> E:
    """Note of an error that the other ranks know it, or raise the same for the same reason. Gives the error."""
    with contextlib.suppress(AttributeError):  # an exception with slots
        setattr(error, _TOLD, True)
    return error


def is_told(error: BaseException) -> bool:
    """Whether the other ranks know of an error."""
    return getattr(error, _TOLD, False)


class Call(NamedTuple):
    """A call that all ranks make: what it does, and with which place. `Call("saving to", "runs/a")`."""

    action: str
    place: str

    def at(self, step: str) -> "Phase":
        """A step of this call."""
        return Phase(self, step)

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.action} {self.place}"


class Phase(NamedTuple):
    """How far a rank is: its call, and at which step of it."""

    call: Call
    step: str

    @property
    def text(self) -> str:
        """For people."""
        return f"{self.call.text}: {self.step}"

    @property
    def wire(self) -> bytes:
        """For the other ranks: six bytes that differ for different calls and steps."""
        return xxhash.xxh32_digest(self.call.text.encode()) + xxhash.xxh32_digest(self.step.encode())[:2]

    def same_call(self, wire: bytes) -> bool:
        """Whether another rank's `wire` is a step of a call with the same action and place."""
        return wire[:4] == self.wire[:4]


@runtime_checkable
class Comm(Protocol):
    """The ranks that save or load together. Every rank makes the same calls in the same order."""

    @property
    def rank(self) -> int:
        """The number of this rank, from 0."""

    @property
    def size(self) -> int:
        """How many ranks there are."""

    @property
    def coordinator(self) -> int:
        """The rank that collects notes and decides. Any rank can be the coordinator."""

    @property
    def group(self) -> Any:
        """The process group of these ranks, through which tensors can be sent; None where there is none."""

    @property
    def timeout_s(self) -> float:
        """The longest that this rank waits for the others, each time."""

    def begin(self, caller: Caller) -> bool:
        """Begin a call of several steps: until `end`, no step is taken for that of a new call. Use `calling`.

        False within another call, of which it is a part. A call whose caller is gone has ended.
        """

    def end(self, caller: Caller) -> None:
        """End the call that this caller began, if it began one."""

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """Bring all payloads to the coordinator, in order of rank, and its decision to every rank.

        Raises RanksMissing on every rank if a rank has not arrived before the deadline.
        """

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """The coordinator's note, on every rank. Waits for the coordinator only; the others pass None."""

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """The coordinator's note for this rank. The coordinator passes one for each rank, the others pass None."""

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Take part in a meeting without waiting for its outcome: for a rank that is about to end."""

    def withdraw(self, phase: Phase, payload: bytes) -> None:
        """Leave the call that this rank is in, wherever it is, and say why: the others raise that. Does not wait."""

    def post(self, name: str, note: bytes) -> None:
        """Put up a note for the other ranks to look at; it replaces one of the same name. Does not wait."""

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """The notes that ranks posted under these names, once all are there; None for those not there in time."""

    def index_of(self, global_rank: int) -> int | None:
        """The rank, counted here, of a rank of the whole job; None if it does not take part."""

    def secondary(self, purpose: str) -> "Comm":
        """The same ranks on a separate channel, for calls that run in a thread beside other calls.

        Its meetings are its own, and it does not use the process group. Every rank opens the channels of one purpose in
        the same order. Does not wait: the ranks find each other in their first meeting there.
        """

    def close(self) -> None:
        """Take what is left of a secondary channel off the board. No call may follow."""


class Solo:
    """One process alone. As `process_group`, it lets one rank of a job save or load without the others.

    >>> receipt = milepost.save({"step": 1}, "memory://alone", process_group=milepost.Solo())
    >>> receipt.world
    1
    """

    rank = 0
    size = 1
    coordinator = 0
    group: Any = None
    timeout_s = 0.0

    def begin(self, caller: Caller) -> bool:
        """True: no other rank needs to know."""
        del caller
        return True

    def end(self, caller: Caller) -> None:
        """Does nothing: there are no steps to keep apart."""

    def meet(self, phase: Phase, payload: bytes, decide: Callable[[list[bytes]], bytes]) -> bytes:
        """What is decided from the one payload."""
        del phase
        return decide([payload])

    def announce(self, phase: Phase, note: bytes | None) -> bytes:
        """The note itself."""
        del phase
        return note or b""

    def hand_out(self, phase: Phase, notes: list[bytes] | None) -> bytes:
        """The only note."""
        del phase
        return notes[0] if notes else b""

    def leave(self, phase: Phase, payload: bytes) -> None:
        """Does nothing: no other rank waits."""

    def withdraw(self, phase: Phase, payload: bytes) -> None:
        """Does nothing: no other rank waits."""

    def post(self, name: str, note: bytes) -> None:
        """Does nothing: no other rank looks."""

    def look(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """None for each, at once: no other rank posts."""
        del timeout_s
        return [None] * len(names)

    def index_of(self, global_rank: int) -> int | None:
        """Rank 0 is the only one."""
        return 0 if global_rank == 0 else None

    def secondary(self, purpose: str) -> "Comm":
        """The same object: there are no meetings to keep apart."""
        del purpose
        return self

    def close(self) -> None:
        """Does nothing: there is no board."""
