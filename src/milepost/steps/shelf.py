"""The steps under one root, each a folder such as `step-0000000100` with a checkpoint in it. Knows no ranks.

Steps that other programs saved, under other names or in other formats, are found and read. They do not count when
old steps are removed, and are never removed by a rule.
"""

import logging
import operator
import time
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from typing import Any, TypeVar

from milepost.commit.find import look_whole, newest, parse, read_manifest
from milepost.commit.removal import LATE_S, finish_removal, forget_removal, remove_checkpoint, remove_unfinished
from milepost.core.manifest import Manifest
from milepost.core.option_values import check_values
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


class Shelf:
    """The steps under one root. Everything else there is ignored and never touched."""

    def __init__(self, root: Store, names: StepNames | None = None) -> None:
        self.root = root
        self._patterns = names or StepNames()
        self._survey = survey_of(root, self._patterns)
        self._scores: dict[tuple[int, int], dict[str, float]] = {}
        self._left_alone: set[str] = set()
        self._removed: dict[int, tuple[float, Sequence[str]]] = {}

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

    def scores(self, metric: str | None) -> dict[int, float | None]:
        """The committed steps with the value of a metric; None where there is none or it cannot be read."""
        return self._scored(self._survey.committed(), metric)

    def _scored(self, committed: Mapping[int, int], metric: str | None) -> dict[int, float | None]:
        if metric is None:
            return dict.fromkeys(committed)
        found = self._each(lambda step: self._metrics(step, committed[step]).get(metric), committed)
        return dict(zip(committed, found, strict=True))

    def _each(self, look: Callable[[int], T], steps: Iterable[int]) -> list[T]:
        return each(self.root, look, steps) if self.root.traits.is_current else list(map(look, steps))

    def retain(self, rule: Rule, saved: int) -> list[int]:
        """Remove what the rule does not keep, and say which steps that were. `saved`, just committed, is always kept.

        First, removals that were cut short are finished. Nothing is removed unless the newest step that remains is
        whole (see `look_whole`). Steps that are not whole do not count, and stay. Raises CheckpointDamaged if `saved`
        itself is not whole. A step that cannot be removed is logged.
        """
        self._survey.forget(saved)
        self._removed.pop(saved, None)
        self.finish()
        scores = self._scored(self._survey.remembered(), rule.best if rule.keep_best else None)
        while True:
            kept = rule.kept(scores) | {saved}
            doomed = sorted(scores.keys() - kept)
            if not doomed:
                return []
            gone = self._survey.gone(rule.counted(scores) - {saved})
            if gone:  # another job removed them, so that they keep no place
                scores = {step: score for step, score in scores.items() if step not in gone}
                continue
            last = max(kept & scores.keys())
            fault = self._fault(last)
            if fault is None:
                return [step for step in doomed if self._try_to_remove(step)]
            if last == saved:
                raise CheckpointDamaged(f"the checkpoint that was just committed is not whole: {fault}")
            self._say_once(last, f"does not count when old steps are removed: {fault}")
            del scores[last]

    def finish(self) -> None:
        """Finish the removals that were cut short. Failures are logged."""
        for step, markers in self._survey.markers().items():
            try:
                finish_removal(self.place(step), markers)
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but not all of its data could be deleted: {error}")
            else:
                self._was_removed(step, markers)
        self._forget_removals()

    def remove_unfinished(self) -> list[int]:
        """Remove the data of saves that never finished, in folders without a checkpoint, and say of which steps."""
        removed = []
        for step in self._survey.unfinished():
            marker = remove_unfinished(self.place(step))
            if marker is not None:
                self._was_removed(step, [marker])
                removed.append(step)
        return removed

    def _was_removed(self, step: int, markers: Sequence[str]) -> None:
        """Remember when a removal was finished, where its marker stays for some time."""
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

    def _metrics(self, step: int, generation: int) -> dict[str, float]:
        if (step, generation) not in self._scores:
            try:
                place = self.place(step)
                data = read_manifest(place, generation) if self.root.traits.is_current else None
                if data is None:
                    # Not `find`, which refuses a place where another library saved too: its metrics are no less good.
                    generation, data, _, _ = newest(place)
                self._scores[step, generation] = metrics_of(parse(place.url, generation, data))
            except CheckpointError as error:
                if isinstance(error, StorageError):
                    raise
                return {}
        return self._scores[step, generation]

    def _fault(self, step: int) -> str | None:
        try:
            look_whole(self.place(step))
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
            return
        place = self.within(self.folder_of(step))
        if not others[0].ours:
            raise InvalidRequest(f"{place.url} was not saved by Milepost, so it is not removed; delete it by hand")
        remove_checkpoint(place)

    def _remove_own(self, step: int) -> None:
        marker = remove_checkpoint(self.place(step))
        self._survey.forget(step)
        self._was_removed(step, [marker])
        self._scores = {key: value for key, value in self._scores.items() if key[0] != step}

    def _say_once(self, step: int, text: str) -> None:
        line = f"{self.place(step).url} {text}"
        if line not in self._left_alone:
            self._left_alone.add(line)
            _log.warning("%s", line)


def with_metrics(metadata: dict[str, Any], metrics: Mapping[str, float] | None) -> dict[str, Any]:
    """The metadata to save. Numbers of any kind (a tensor of one element, a numpy scalar) become floats."""
    if METRICS in metadata:
        raise InvalidRequest(f"{METRICS!r} in the metadata is where the metrics go; pass `metrics=`")
    check_values({"metrics": metrics})
    if metrics is None:
        return metadata
    plain: dict[str, float] = {}
    for name, value in metrics.items():
        try:
            plain[name] = float(value)
        except Exception as error:
            raise InvalidRequest(f"metrics: {name!r} is a number, not {value!r}") from error
        if not isinstance(name, str):
            raise InvalidRequest(f"metrics: a name is a string, not {name!r}")
    return {**metadata, METRICS: plain}


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
