"""Everything that the page shows about a place, from manifests and tables only. Needs no torch.

Steps are read from the newest to the oldest. Where a budget runs out, older steps lose detail first, and a note on the
page says what was left out.
"""

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime

import msgspec

from milepost.checkpoint import files_at
from milepost.errors import CheckpointNotFound
from milepost.inspection.place import place_at
from milepost.inspection.runs import PlaceSummary, StepSummary, look_at
from milepost.store import Location, Store
from milepost.version import __version__
from milepost.view.changes import Comparisons
from milepost.view.parts import (
    NumbersOf,
    SharedParts,
    StepNumbers,
    StepParts,
    numbers_of,
    parts_of,
    parts_of_files,
)
from milepost.view.reading import FoundStep, Rest, read_steps, steps_of, store_of_step
from milepost.view.record import VERSION, Page, PageStep, StatisticsStep, Structure
from milepost.view.reused import HeaderBudget

_ROW_BYTES = 16
"""What the statistics of a tensor take in the page, about; only to choose steps before they are read."""
Tell = Callable[[int, int], None]
"""Called with the number of steps read so far, and of all."""


@dataclass(frozen=True, slots=True)
class Budget:
    """How many bytes of the page each kind of detail may take.

    The statistics of the `newest` steps come first. The rest of `statistics_bytes` is spread evenly over older steps.
    `pairs`: how many pairs of steps are compared by their tables of checksums, newest first, and the first with the
    last; `read_bytes`: how much may be read for that. `headers`, `headers_bytes`: how many headers are read, of the
    newest steps, to tell which data lies in which files of earlier saves.
    """

    statistics_bytes: int = 8_000_000
    structures_bytes: int = 4_000_000
    values_bytes: int = 1_000_000
    newest: int = 16
    pairs: int = 24
    read_bytes: int = 64_000_000
    headers: int = 1024
    headers_bytes: int = 32_000_000


@dataclass(frozen=True, slots=True)
class ViewOptions:
    """What the page should show. `steps`: how many of the newest ones; None for all.

    `compare`: pairs of steps that are compared in any case, by their names or numbers.
    """

    budget: Budget = field(default_factory=Budget)
    steps: int | None = None
    compare: tuple[tuple[str, str], ...] = ()


def collect(place: Location, wanted: ViewOptions | None = None, tell: Tell | None = None) -> Page:
    """What is known about the run or the checkpoint at `place`. Reads manifests, tables of checksums and headers.

    A step of a run that cannot be read is shown as damaged, with the reason. Raises CheckpointNotFound if there is
    neither a run nor a checkpoint, and what `milepost.open` raises for a single checkpoint that cannot be read.
    """
    wanted = wanted or ViewOptions()
    store = place_at(place)
    looked = look_at(store)
    if looked.kind == "nothing":
        raise CheckpointNotFound(looked.reason)
    collection = Collection(store, wanted)
    collection.renew(looked, tell)
    return collection.page(looked)


class Collection:
    """What is known of the steps of a place. It can be asked again as the run goes on, and reads each step once."""

    def __init__(self, store: Store, wanted: ViewOptions) -> None:
        self._store, self._wanted = store, wanted
        self._shared = SharedParts(wanted.budget.structures_bytes, _headers(wanted.budget))
        self._parts: dict[str, tuple[tuple[object, ...], StepParts]] = {}
        self._comparisons = Comparisons(lambda name: store_of_step(store, name), wanted.compare)

    def renew(self, looked: PlaceSummary, tell: Tell | None = None) -> None:
        """Read the steps that are not known yet, or that changed, and forget those that are gone."""
        steps = self._steps(looked)
        self._shared.headers = _headers(self._wanted.budget)  # a page that follows a run always knows the newest
        if looked.kind != "run":
            self._parts = {"": (_looks(looked.steps[0]), self._one(looked.steps[0]))} if steps else {}
            return
        known = {step.name: self._parts.get(step.name) for step in steps}
        unread = [step for step in steps if (was := known[step.name]) is None or was[0] != _looks(step.summary)]
        place_of = {step.name: number for number, step in enumerate(steps)}
        read = {step.name: _looks(step.summary) for step in unread}
        self._parts = {name: was for name, was in known.items() if was is not None and name not in read}
        numbers = _ChosenNumbers(self._wanted.budget, len(steps))
        for count, step in enumerate(read_steps(self._store, unread), 1):
            name = step.found.name
            self._parts[name] = (read[name], parts_of(step, self._shared, numbers.at(place_of[name])))
            if tell is not None:
                tell(count, len(unread))

    def _one(self, summary: StepSummary) -> StepParts:
        """The one checkpoint at the place. Raises what `milepost.open` raises."""
        found = FoundStep("", None, summary=summary)
        with_numbers = _ChosenNumbers(self._wanted.budget, 1).at(0)
        return parts_of_files(self._store.url, files_at(self._store), found, self._shared, with_numbers)

    def _steps(self, looked: PlaceSummary) -> list[FoundStep]:
        """The steps that are wanted, newest first."""
        steps = steps_of(looked)
        return steps if self._wanted.steps is None else steps[: self._wanted.steps]

    def page(self, looked: PlaceSummary) -> Page:
        """The page of what was read, for the place as it was seen."""
        is_run = looked.kind != "checkpoint"
        summaries = {step.name if is_run else "": step.summary for step in self._steps(looked)}
        parts = [
            _as_seen(self._parts[name][1], summary)
            for name, summary in summaries.items()
            if name in self._parts and summary is not None
        ]
        notes = [f"Only the newest {len(parts):,} steps are shown."] * (len(parts) < len(looked.steps))
        page = _Assembly(self._wanted.budget, self._shared).page(self._store.url, parts, is_run=is_run, notes=notes)
        page = msgspec.structs.replace(page, file_bytes=looked.file_bytes)
        if not is_run:
            return page
        return self._comparisons.added_to(page, self._wanted.budget.pairs, self._wanted.budget.read_bytes)


def _headers(budget: Budget) -> HeaderBudget:
    return HeaderBudget(budget.headers, budget.headers_bytes)


def _looks(summary: StepSummary | None) -> tuple[object, ...]:
    """What is the same as long as a step need not be read again."""
    if summary is None:
        return ()
    return summary.state, summary.reason, summary.generation, summary.created, summary.file_bytes


def _as_seen(parts: StepParts, summary: StepSummary) -> StepParts:
    """The same parts, with what may change while the manifest stays the same."""
    step = msgspec.structs.replace(parts.step, kept=summary.kept, verified=summary.verified or "")
    return replace(parts, step=step)


class _ChosenNumbers:
    """Which steps keep their statistics: the newest, and every so many of the older. Newer ones are read first."""

    def __init__(self, budget: Budget, steps: int) -> None:
        self._budget, self._steps = budget, steps
        self._has_exact = False

    def at(self, place: int) -> NumbersOf:
        """What gives the statistics of the step at this place, from the newest."""

        def numbers(rest: Rest, structure: Structure) -> StepNumbers | None:
            if not self._is_chosen(place, len(structure.tensors.keys)):
                return None
            exact, self._has_exact = not self._has_exact and place < self._budget.newest, True
            return numbers_of(rest, structure, exact=exact)

        return numbers

    def _is_chosen(self, place: int, tensors: int) -> bool:
        newest = self._budget.newest
        room = self._budget.statistics_bytes // max(1, tensors * _ROW_BYTES) - newest
        older = self._steps - newest
        return place < newest or (room > 0 and (place - newest) % -(-older // room) == 0)


class _Assembly:
    """A page from the parts of its steps, newest first."""

    def __init__(self, budget: Budget, shared: SharedParts) -> None:
        self._shared = shared
        self._room = {"values": budget.values_bytes, "statistics": budget.statistics_bytes}
        self._left_out: dict[str, int] = {}
        self._statistics: list[StatisticsStep] = []
        self._columns: list[bytes] = []
        self._newer: StepParts | None = None

    def page(self, url: str, parts: Iterable[StepParts], *, is_run: bool, notes: list[str]) -> Page:
        """The page, with the steps oldest first."""
        steps = [self._add(number, one) for number, one in enumerate(parts)]
        last = len(steps) - 1
        left_out = {**self._shared.left_out, **self._left_out}
        notes += [f"Left out to keep the page small: {what} of {_steps(count)}." for what, count in left_out.items()]
        return Page(
            version=VERSION,
            made_by=f"milepost {__version__}",
            made=datetime.now(UTC).isoformat(timespec="seconds"),
            source=url,
            is_run=is_run,
            steps=steps[::-1],
            structures=self._shared.structures,
            files=self._shared.tables,
            notes=notes,
            statistics=[msgspec.structs.replace(one, step=last - one.step) for one in reversed(self._statistics)],
            changes=[],
            statistics_bytes=b"".join(self._columns),
        )

    def _add(self, number: int, parts: StepParts) -> PageStep:
        if parts.numbers is not None:
            self._add_numbers(number, parts.numbers)
        elif parts.lacks_numbers:
            self._leave_out("the statistics")
        values, anew = self._values(parts)
        return msgspec.structs.replace(parts.step, values=values, values_anew=anew)

    def _add_numbers(self, number: int, numbers: StepNumbers) -> None:
        if not self._pays("statistics", numbers.packed_bytes):
            self._leave_out("the statistics")
            return
        at = sum(map(len, self._columns))
        rows = numbers.rows, numbers.odd, numbers.exact, numbers.histograms
        self._statistics.append(StatisticsStep(number, at, *rows))
        self._columns.append(numbers.columns)

    def _values(self, parts: StepParts) -> tuple[dict[int, str] | None, bool]:
        """The values that differ from those of the next newer step, and whether these are all of them."""
        if parts.step.structure < 0 or parts.values is None:
            return None, True
        newer = self._newer
        anew = newer is None or newer.step.structure != parts.step.structure
        before = () if newer is None or anew else newer.values or ()
        changed = {i: one for i, one in enumerate(parts.values) if i >= len(before) or before[i] != one}
        if not self._pays("values", sum(map(len, changed.values())) // 2):
            self._leave_out("the values")
            self._newer = None
            return None, True
        self._newer = parts
        return changed, anew

    def _pays(self, kind: str, size_bytes: int) -> bool:
        """Whether there is room for this; if so, it is taken."""
        if size_bytes > self._room[kind]:
            return False
        self._room[kind] -= size_bytes
        return True

    def _leave_out(self, what: str) -> None:
        self._left_out[what] = self._left_out.get(what, 0) + 1


def _steps(count: int) -> str:
    return f"{count:,} step" if count == 1 else f"{count:,} steps"
