"""What a module of faults yields: lines of the table, with their counts."""

from collections import Counter
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path


@dataclass(frozen=True, slots=True)
class Tally:
    """How trials ended: the count of each ending, by a short name."""

    counts: dict[str, int]

    @property
    def trials(self) -> int:
        """How many there were."""
        return sum(self.counts.values())

    def of(self, *names: str) -> int:
        """How many ended in one of these ways."""
        return sum(self.counts.get(name, 0) for name in names)

    @property
    def text(self) -> str:
        """As a cell of the table: the most frequent first."""
        ordered = sorted(self.counts.items(), key=lambda item: -item[1])
        return "; ".join(f"{count} {name}" for name, count in ordered) or "not run"


@dataclass(frozen=True, slots=True)
class FaultRow:
    """One line: a fault, how it was made, and how the trials of Milepost and DCP ended.

    `good` names the endings that keep the promise. `dcp` is None where DCP has nothing to compare. `note` has other
    facts, such as why the fault was not run.
    """

    number: int
    fault: str
    how: str
    milepost: Tally
    good: frozenset[str]
    dcp: Tally | None = None
    note: str = ""

    @property
    def ok(self) -> bool | None:
        """Whether every trial kept the promise; None without trials."""
        if not self.milepost.trials:
            return None
        return self.milepost.of(*self.good) == self.milepost.trials


@dataclass(slots=True)
class Counting:
    """Counts endings while trials run."""

    counts: Counter[str] = field(default_factory=Counter)

    def add(self, ending: str) -> None:
        """Count one trial that ended this way."""
        self.counts[ending] += 1

    @property
    def tally(self) -> Tally:
        """What was counted."""
        return Tally(dict(self.counts))


Faults = Callable[[bool, Path], Iterator[FaultRow]]
"""The `rows` of a module of faults: `rows(full, folder)` runs all trials of its faults, or a few, in this folder."""
