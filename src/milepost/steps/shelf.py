"""The steps under one root, each a folder such as `step-0000000100` with a checkpoint in it. Knows no ranks.

Steps that other programs saved, under other names or in other formats, are found and read. They do not count when
old steps are removed, and are never removed by a rule.
"""

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

from milepost.commit.find import look_whole, newest, newest_generation, parse, read_manifest
from milepost.commit.removal import (
    LATE_S,
    finish_removal,
    forget_removal,
    free_unused,
    remove_checkpoint,
    remove_unfinished,
)
from milepost.commit.signs import Notes
from milepost.core.manifest import Manifest
from milepost.core.option_values import check_values
from milepost.core.statistics import Health
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest, StorageError
from milepost.state.values import Codec
from milepost.steps.names import MAX_STEP, StepNames
from milepost.steps.retention import Rule
from milepost.steps.survey import each, survey_of
from milepost.store import Store, Within

_log = logging.getLogger("milepost")
T = TypeVar("T")
METRICS = "metrics"
"""The key in a checkpoint's metadata under which its metrics stand."""


RETENTION = "retention"
"""The key under which the rules stand that the step was saved by."""


@dataclass(frozen=True, slots=True)
class _StepNotes:
    """What a step's manifest says that matters to the rules."""

    metrics: Mapping[str, float]
    is_healthy: bool = True


class Shelf:
    """The steps under one root. Everything else there is ignored and never touched."""

    def __init__(self, root: Store, names: StepNames | None = None) -> None:
        self.root = root
        self._patterns = names or StepNames()
        self._survey = survey_of(root, self._patterns)
        self._notes: dict[tuple[int, int], _StepNotes] = {}
        self._left_alone: set[str] = set()
        self._removed: dict[int, tuple[float, Sequence[str]]] = {}
        self._used: dict[int, Sequence[str]] = {}
        """The markers of removals that left data which other steps used."""
        self._damaged: dict[int, str] = {}
        self._trusted: frozenset[int] | None = None

    def place(self, step: int) -> Store:
        """The store into which a step is saved."""
        return Within(self.root, self._patterns.own.name(checked_step(step)))

    def steps(self) -> list[int]:
        """The steps that are committed, and those of other programs, oldest first. Looks at names only."""
        return self._survey.steps()

    def latest(self) -> int | None:
        """The newest step."""
        return self._survey.latest()

    def newest(self) -> tuple[int, str] | None:
        """The newest step, and the name under the root where it is read from."""
        return self._survey.newest()

    def newest_own(self, among: Collection[int] | None = None) -> str | None:
        """The name of the folder of the newest step that is no other program's; None without any.

        `among`: one of these steps; None: any.
        """
        found = self._survey.newest()
        if found is not None and self._patterns.own.step(found[1]) == found[0] and (among is None or found[0] in among):
            return found[1]  # the usual case, which asks few folders
        committed = self._survey.committed()
        step = max(committed if among is None else committed.keys() & set(among), default=None)
        return None if step is None else self._patterns.own.name(step)

    @property
    def trusted(self) -> frozenset[int] | None:
        """The steps whose data a save may go on using. None: all, since no restore has found damage."""
        return self._trusted

    def note_damage(self, damaged: Mapping[int, str], whole: int | None) -> None:
        """Remember the steps that a restore found damaged, and the one that it found whole.

        The damaged ones do not count when old steps are removed. Other steps may share the damaged files, so only the
        whole one is trusted, and those that are saved from now on.
        """
        if damaged:
            self._damaged.update(damaged)
            self._trusted = frozenset(() if whole is None else (whole,))

    def note_saved(self, step: int) -> None:
        """Remember that a step was just saved: it is whole now, whatever was known of it."""
        self._damaged.pop(step, None)
        if self._trusted is not None:
            self._trusted |= {step}

    def recent(self, count: int) -> list[tuple[int, str]]:
        """The newest steps, newest first, and where each is read from. Costs few requests, however many there are."""
        return self._survey.recent(count)

    def is_there(self, step: int) -> bool:
        """Whether this step is committed, or another program saved it."""
        return self._survey.is_there(step)

    def untried(self, skipped: Collection[int]) -> tuple[int, str] | None:
        """The newest step other than these, and the name under the root where it is read from."""
        return self._survey.untried(skipped)

    def folder_of(self, step: int) -> str:
        """The name under the root where a step is read from. Where both exist, ours counts, not another program's.

        Raises InvalidRequest if several of others are the same step.
        """
        return self._survey.folder_of(checked_step(step))

    def within(self, name: str) -> Store:
        """The store of a step that `folder_of` found."""
        return self._survey.within(name)

    def health_at(self, name: str) -> Health | None:
        """What a rule said of the step that is read from there; None where there was no rule, or it cannot be read."""
        try:
            place = self.within(name)
            generation = newest_generation(place)
            data = read_manifest(place, generation) if generation else None
            return parse(place.url, generation, data).health if data is not None else None
        except StorageError:
            raise
        except (CheckpointError, NotADirectoryError):
            return None  # damaged, or a file of another program: who loads it says what is wrong

    def scores(self, metric: str | None) -> dict[int, float | None]:
        """The committed steps with the value of a metric; None where there is none, and where a step is unhealthy."""
        return self._scored(self._survey.committed(), metric)

    def _scored(self, committed: Mapping[int, int], metric: str | None) -> dict[int, float | None]:
        if metric is None:
            return dict.fromkeys(committed)
        found = self._each(lambda step: self._note_of(step, committed[step]), committed)
        scores = (note.metrics.get(metric) if note.is_healthy else None for note in found)
        return dict(zip(committed, scores, strict=True))

    def _unhealthy(self, committed: Mapping[int, int]) -> set[int]:
        """Those of these steps that a rule found unhealthy. Reads each manifest once."""
        found = self._each(lambda step: self._note_of(step, committed[step]), committed)
        return {step for step, note in zip(committed, found, strict=True) if not note.is_healthy}

    def _each(self, look: Callable[[int], T], steps: Iterable[int]) -> list[T]:
        return each(self.root, look, steps) if self.root.traits.is_current else list(map(look, steps))

    def retain(self, rule: Rule, saved: int) -> list[int]:
        """Remove what the rule does not keep, and say which steps that were. `saved`, just committed, is always kept.

        First, removals that were cut short are finished. Nothing is removed unless the newest step that remains is
        whole (see `look_whole`). Steps that are not whole do not count, and stay. Raises CheckpointDamaged if `saved`
        itself is not whole. A step that cannot be removed is logged. At last, data goes that was left because other
        steps used it, and that none uses now.
        """
        self._survey.forget(saved)
        self._removed.pop(saved, None)
        self.note_saved(saved)
        self.finish()
        doomed = self._doomed(rule, self._survey.remembered(), saved)
        removed = [step for step in doomed if self._try_to_remove(step)]
        self._free_unused()
        return removed

    def doomed(self, rule: Rule) -> list[int]:
        """The steps that `prune` would remove. Looks only."""
        return self._doomed(rule, self._survey.committed(), None)

    def prune(self, rule: Rule) -> list[int]:
        """Remove what the rule does not keep, as `retain` does, where nothing was just saved."""
        self.finish()
        removed = [step for step in self.doomed(rule) if self._try_to_remove(step)]
        self._free_unused()
        return removed

    def _doomed(self, rule: Rule, committed: Mapping[int, int], saved: int | None) -> list[int]:
        counted = {step: generation for step, generation in committed.items() if step not in self._damaged}
        scores = self._scored(counted, rule.best if rule.keep_best else None)
        own = {saved} if saved is not None else set()
        if rule.kept(scores) >= scores.keys() - own:
            return []  # whatever the verdicts are, so that no manifest is read for them
        faults: dict[int, str | None] = {}
        if saved is not None and saved == max(scores):
            self._check_saved(saved, faults)  # first: this reads its manifest, and so its verdict
        unhealthy = self._unhealthy(counted)
        while True:
            kept = rule.kept(scores, unhealthy) | own
            doomed = sorted(scores.keys() - kept)
            if not doomed:
                return []
            gone = self._survey.gone(rule.counted(scores, unhealthy) - own)
            if gone:  # another job removed them, so that they keep no place
                scores = {step: score for step, score in scores.items() if step not in gone}
                continue
            faulty = self._faulty(kept & scores.keys(), unhealthy, saved, faults)
            if not faulty:
                return doomed
            scores = {step: score for step, score in scores.items() if step not in faulty}

    def _check_saved(self, saved: int, faults: dict[int, str | None]) -> None:
        faults[saved] = self._fault(saved)
        if faults[saved] is not None:
            raise CheckpointDamaged(f"the checkpoint that was just committed is not whole: {faults[saved]}")

    def _faulty(
        self, kept: set[int], unhealthy: set[int], saved: int | None, faults: dict[int, str | None]
    ) -> dict[int, str]:
        """Of the newest step and the newest healthy one, those that are not whole. `faults`: what is known already."""
        faulty = {}
        for last in {max(kept), max(kept - unhealthy, default=max(kept))}:
            if last not in faults:
                if last == saved:
                    self._check_saved(last, faults)
                else:
                    faults[last] = self._fault(last)
            fault = faults[last]
            if fault is not None:
                self._say_once(last, f"does not count when old steps are removed: {fault}")
                faulty[last] = fault
        return faulty

    def finish(self) -> None:
        """Finish the removals that were cut short. Failures are logged."""
        for step, markers in self._survey.markers().items():
            try:
                leaves_data = finish_removal(self.place(step), markers)
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but not all of its data could be deleted: {error}")
            else:
                self._was_removed(step, markers, leaves_data=leaves_data)
        self._forget_removals()

    def _free_unused(self) -> None:
        """Delete data that removals left because other steps used it, if none does now. Failures are logged."""
        notes = Notes(self.root)
        for step, markers in list(self._used.items()):
            try:
                if not free_unused(self.place(step), markers, notes):
                    del self._used[step]
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but not all of its data could be deleted: {error}")

    def remove_unfinished(self) -> list[int]:
        """Remove the data of saves that never finished, in folders without a checkpoint, and say of which steps."""
        removed = []
        for step in self._survey.unfinished():
            found = remove_unfinished(self.place(step), step=step)
            if found is not None:
                self._was_removed(step, [found.marker], leaves_data=found.leaves_data)
                removed.append(step)
        self._free_unused()
        return removed

    def _was_removed(self, step: int, markers: Sequence[str], *, leaves_data: bool) -> None:
        """Remember when a removal was finished, where its marker stays for some time; and whether it left data."""
        self._used.pop(step, None)
        if leaves_data:
            self._used[step] = markers
        if markers and self.root.traits.is_current:
            self._survey.rest(step)
            self._removed[step] = (time.monotonic(), markers)

    def _forget_removals(self) -> None:
        """Delete the markers that have stayed long enough. Failures are logged."""
        old = [step for step, (when, _) in self._removed.items() if time.monotonic() - when >= LATE_S]
        for step in old:
            try:
                for marker in self._removed[step][1]:
                    forget_removal(self.place(step), marker)
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but its marker could not be deleted: {error}")
            else:
                del self._removed[step]
                self._survey.forget(step)

    def _note_of(self, step: int, generation: int) -> _StepNotes:
        if (step, generation) not in self._notes:
            try:
                place = self.place(step)
                data = read_manifest(place, generation) if self.root.traits.is_current else None
                if data is None:
                    # Not `find`, which refuses a place where another library saved too: its metrics are no less good.
                    generation, data, _, _ = newest(place)
                self._remember(step, parse(place.url, generation, data))
            except CheckpointError as error:
                if isinstance(error, StorageError):
                    raise
                return _StepNotes({})
        return self._notes[step, generation]

    def _remember(self, step: int, manifest: Manifest) -> None:
        is_healthy = manifest.health is None or manifest.health.ok
        self._notes[step, manifest.generation] = _StepNotes(metrics_of(manifest), is_healthy)

    def _fault(self, step: int) -> str | None:
        try:
            self._remember(step, look_whole(self.place(step)))
        except StorageError:
            raise  # the store does not answer: that says nothing about the checkpoint
        except CheckpointError as error:
            return str(error)
        return None

    def _try_to_remove(self, step: int) -> bool:
        try:
            self._remove_own(step)
        except CheckpointNotFound:
            return False  # another job removed it first
        except (CheckpointError, OSError) as error:
            self._say_once(step, f"could not be removed: {error}")
            return False
        return True

    def remove(self, step: int) -> None:
        """Remove one step. Raises CheckpointNotFound, or CheckpointDamaged if its manifest cannot be read.

        One of another program is removed only if it is in Milepost's format; else InvalidRequest is raised.
        """
        others = self._survey.others(checked_step(step))
        if not others:
            self._remove_own(step)
            self._free_unused()
            return
        place = self.within(self.folder_of(step))
        if not others[0].ours:
            raise InvalidRequest(f"{place.url} was not saved by Milepost, so it is not removed; delete it by hand")
        remove_checkpoint(place, step=step)

    def _remove_own(self, step: int) -> None:
        found = remove_checkpoint(self.place(step), step=step)
        self._survey.forget(step)
        self._was_removed(step, [found.marker], leaves_data=found.leaves_data)
        self._notes = {key: value for key, value in self._notes.items() if key[0] != step}

    def _say_once(self, step: int, text: str) -> None:
        line = f"{self.place(step).url} {text}"
        if line not in self._left_alone:
            self._left_alone.add(line)
            _log.warning("%s", line)


def with_notes(metadata: dict[str, Any], metrics: Mapping[str, float] | None, rule: Rule) -> dict[str, Any]:
    """The metadata to save: with the metrics, and with the rules that decide how long the step is kept."""
    for name, instead in ((METRICS, "the metrics go; pass `metrics=`"), (RETENTION, "the rules of the run go")):
        if name in metadata:
            raise InvalidRequest(f"{name!r} in the metadata is where {instead}")
    return {**metadata, **_plain_metrics(metrics), **({RETENTION: rule.spelled()} if rule.is_set else {})}


def _plain_metrics(metrics: Mapping[str, float] | None) -> dict[str, dict[str, float]]:
    """Numbers of any kind (a tensor of one element, a numpy scalar) become floats."""
    check_values({"metrics": metrics})
    if metrics is None:
        return {}
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except Exception as error:
            raise InvalidRequest(f"metrics: {name!r} is a number, not {value!r}") from error
        if not isinstance(name, str):
            raise InvalidRequest(f"metrics: a name is a string, not {name!r}")
    return {METRICS: plain}


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """The metrics that were saved with a checkpoint. Does not decode the rest of the metadata, which may need types."""
    try:
        spelled = {name: value for name, value in manifest.metadata["dict"] if isinstance(name, str)}
        found = Codec().decode(spelled.get(METRICS, {"dict": []}), METRICS)
        return {str(name): float(value) for name, value in found.items() if not isinstance(value, (str, bytes))}
    except (CheckpointError, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return {}  # not metrics that Milepost wrote


def step_name(step: int) -> str:
    """The name of a step's folder, by default; names sort as steps do. Raises InvalidRequest if it is not a step."""
    return StepNames().own.name(checked_step(step))


def checked_step(step: int) -> int:
    """The step as an int. Raises InvalidRequest if it is not a step."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise InvalidRequest(f"a step is a whole number from 0 to {MAX_STEP}, not {step!r}")
    return number
