"""What the coordinator pins to the board at the end of a step, and the errors that ranks make of it."""

import msgspec

from milepost.comm.base import Phase, mark_told
from milepost.core.ranks import show_ranks
from milepost.core.wire import Wire
from milepost.errors import CheckpointError, RanksMissing

GONE = b"\xff" * 6
"""In place of a call and step: this rank has ended for good. Fits every meeting."""
LEFT = b"\xfe" * 6
"""In place of a call and step: this rank has left its call, and comes again with the next one."""
_ALONE = "To save or load on some ranks only, pass `process_group=milepost.Solo()` or a process group of these ranks."


class Outcome(msgspec.Struct, frozen=True):
    """The decision; or missing ranks, with the step last seen; or ranks at other calls, or with other versions.

    `apart`: from here on the ranks do not count their meetings alike. They join again before the next call.
    `calls`: how many calls the ranks had begun by then, this one included.
    """

    wire: bytes
    decision: bytes = b""
    missing: dict[int, str] = {}
    waited_s: float = 0.0
    odd: dict[int, bytes] = {}
    versions: dict[int, str] = {}
    apart: bool = False
    calls: int = 0

    def pack(self) -> bytes:
        """As a note. A decision, by far the most frequent, takes seven bytes more than itself."""
        if self.apart:
            return b"!" + _OUTCOMES.pack(self)
        return b"." + self.wire + self.decision

    @staticmethod
    def unpack(note: bytes) -> "Outcome":
        """The outcome that a note holds."""
        if note[:1] == b"!":
            return _OUTCOMES.unpack(note[1:])
        return Outcome(note[1:7], note[7:])

    def fits(self, phase: Phase) -> bool:
        """Whether this ends the step that a rank is at."""
        return not self.odd and self.wire in (phase.wire, GONE, LEFT)


_OUTCOMES = Wire(Outcome)


def error_of(outcome: Outcome, phase: Phase, me: int, coordinator: int) -> CheckpointError | None:
    """The error that this rank raises for an outcome; None for a decision, which may hold failures of ranks."""
    error: CheckpointError | None = None
    if outcome.missing:
        error = RanksMissing(_absent(outcome, phase, me))
    elif outcome.versions:
        error = CheckpointError(_mixed(outcome))
    elif not outcome.fits(phase):
        error = CheckpointError(_elsewhere(outcome, phase, me, coordinator))
    if error is not None:
        error.ranks_apart = True
        if outcome.apart:
            mark_told(error)
    return error


def _absent(outcome: Outcome, phase: Phase, me: int) -> str:
    late = " (this rank came too late)" if me in outcome.missing else ""
    groups: dict[str, list[int]] = {}
    for rank, step in outcome.missing.items():
        groups.setdefault(step, []).append(rank)
    seen = "; ".join(
        f"{show_ranks(ranks)} {'last seen at ' + repr(step) if step else 'not seen in this call'}"
        for step, ranks in groups.items()
    )
    hint = f" {_ALONE}" if "" in groups else ""
    return (
        f"{show_ranks(outcome.missing)} did not come to {phase.text!r} within {outcome.waited_s:.0f} s{late}: {seen}. "
        f"Look at the logs of those ranks; raise `timeout_s` if they are only slow.{hint}"
    )


def _elsewhere(outcome: Outcome, phase: Phase, me: int, coordinator: int) -> str:
    odd = outcome.odd or {coordinator: outcome.wire}
    there = ", ".join(
        f"rank {r} is at another {'step of this call' if phase.same_call(wire) else 'call'}"
        for r, wire in list(odd.items())[:5]
        if r != me
    )
    return (
        f"rank {me} is at {phase.text!r}; {there or f'rank {coordinator} is at another call'}. "
        "Do all ranks make the same calls, in the same order, for the same place?"
    )


def _mixed(outcome: Outcome) -> str:
    groups: dict[str, list[int]] = {}
    for rank, version in outcome.versions.items():
        groups.setdefault(version, []).append(rank)
    shown = "; ".join(f"{show_ranks(ranks)}: {version}" for version, ranks in groups.items())
    return f"the ranks run different versions of Milepost: {shown}. Install the same version for all ranks."
