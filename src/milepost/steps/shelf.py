"""The steps under one root, each a folder such as `step-0000000100` with a checkpoint in it. Knows no ranks.

Steps that other programs saved, under other names or in other formats, are found and read. They do not count when
old steps are removed, and are never removed by a rule.
"""

import itertools
import logging
import operator
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import TypeGuard

from milepost.commit.find import REMOVED, is_committed, lacks_files, look_whole, newest, parse, patiently
from milepost.commit.removal import finish_removal, remove_checkpoint
from milepost.core.manifest import Manifest, generation_of
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest, StorageError
from milepost.formats.read.recognise import looks_foreign
from milepost.state.values import Codec
from milepost.steps.names import StepNames, is_folder, names_in
from milepost.steps.retention import Rule
from milepost.store import LocalStore, Store, Within

_log = logging.getLogger("milepost")
MAX_STEP = 9_999_999_999
"""The last step whose name sorts behind all others."""
METRICS = "metrics"
"""The key in a checkpoint's metadata under which its metrics stand."""
_PAUSES_S = (0.0, 0.0, 0.001, 0.004, 0.016, 0.064)


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """A step that was saved under another name, or in another format. `ours`: it is in Milepost's format."""

    name: str
    ours: bool


class Shelf:
    """The steps under one root. Everything else there is ignored and never touched."""

    def __init__(self, root: Store, names: StepNames | None = None) -> None:
        self.root = root
        self._patterns = names or StepNames()
        self._scores: dict[tuple[int, int], dict[str, float]] = {}
        self._left_alone: set[str] = set()

    def place(self, step: int) -> Store:
        """The store into which a step is saved."""
        return Within(self.root, self._patterns.own.name(checked_step(step)))

    def steps(self) -> list[int]:
        """The steps that are committed, and those of other programs, oldest first. Looks at names only."""
        committed = self._committed()
        return sorted(committed.keys() | self._foreign(committed).keys())

    def is_there(self, step: int) -> bool:
        """Whether this step is committed. The listing of the root may be old, so it is looked for by its name, too."""
        return step in self.steps() or is_committed(self.place(step), 1)

    def untried(self, skipped: Collection[int]) -> list[int]:
        """The steps other than these, oldest first.

        If none is left, and one is being removed or is gone, then the listing may be old: there should be newer steps,
        and it is given some time to show them.
        """

        def look() -> list[int]:
            return [step for step in self.steps() if step not in skipped]

        return look() or (patiently(self.root, look) if self._removes() or any(map(self._is_going, skipped)) else [])

    def _removes(self) -> bool:
        """Whether a step is being removed, where a listing may be old."""
        names = itertools.chain.from_iterable(self._names().values())
        return isinstance(self.root, LocalStore) and any(name.endswith(REMOVED) for name in names)

    def _is_going(self, step: int) -> bool:
        """Whether a step of ours is not there any more, or not all of its files are."""
        committed = self._committed()
        return (step in committed or step not in self._foreign(committed)) and lacks_files(self.place(step))

    def folder_of(self, step: int) -> str:
        """The name under the root where a step is read from. Where both exist, ours counts, not another program's.

        Raises InvalidRequest if several of others are the same step.
        """
        committed = self._committed()
        found = [] if step in committed else self._foreign(committed).get(step, [])
        if len(found) > 1:
            names = ", ".join(repr(foreign.name) for foreign in found[:4])
            raise InvalidRequest(f"step {step} at {self.root.url} has several names: {names}. Move all but one away")
        return found[0].name if found else self._patterns.own.name(checked_step(step))

    def within(self, name: str) -> Store:
        """The store of a step that `folder_of` found."""
        if isinstance(self.root, LocalStore) and self._patterns.own.step(name) is None:
            return LocalStore(self.root.root / name)  # it may be a file
        return Within(self.root, name)

    def _foreign(self, committed: Mapping[int, int]) -> dict[int, list[ForeignStep]]:
        """The steps of other programs: by another name, or by our names in another format."""
        patterns = (self._patterns.own, *self._patterns.others)
        found: dict[int, list[ForeignStep]] = {}
        for name, is_file in sorted(names_in(self.root, [pattern.prefix for pattern in patterns])):
            own = self._patterns.own.step(name)
            step = self._patterns.step_of(name, file=is_file)
            if not _is_step(step) or (own is not None and own in committed):
                continue
            place = self.within(name)
            ours = not is_file and any(generation_of(known) is not None for known in place.list("manifest-"))
            if (ours and own is None) or is_file or (not ours and looks_foreign(place)):
                found.setdefault(step, []).append(ForeignStep(name, ours))
        return found

    def scores(self, metric: str | None) -> dict[int, float | None]:
        """The committed steps with the value of a metric; None where there is none or it cannot be read."""
        committed = self._committed()
        return {step: self._metrics(step, g).get(metric) if metric else None for step, g in committed.items()}

    def retain(self, rule: Rule, saved: int) -> list[int]:
        """Remove what the rule does not keep, and say which steps that were. `saved`, just committed, is always kept.

        First, removals that were cut short are finished. Nothing is removed unless the newest step that remains is
        whole (see `look_whole`). Steps that are not whole do not count, and stay. Raises CheckpointDamaged if `saved`
        itself is not whole. A step that cannot be removed is logged.
        """
        self.finish()
        scores = self.scores(rule.best if rule.keep_best else None)
        while True:
            kept = rule.kept(scores) | {saved}
            doomed = sorted(scores.keys() - kept)
            if not doomed:
                return []
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
        for step, names in self._names().items():
            markers = [name for name in names if name.endswith(REMOVED)]
            try:
                finish_removal(self.place(step), markers)
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but not all of its data could be deleted: {error}")

    def _names(self) -> dict[int, list[str]]:
        """For each folder of a step: the names in it that start with `manifest-`, if any."""
        own = self._patterns.own
        if isinstance(self.root, LocalStore):
            # Folder by folder: a listing of everything would go through all data files.
            folders = (own.step(name) for name, is_file in names_in(self.root, ()) if not is_file)
            return {step: list(self.place(step).list("manifest-")) for step in folders if _is_step(step)}
        grouped: dict[int, list[str]] = {}
        for full in self.root.list(own.prefix):
            folder, _, name = full.partition("/")
            step = own.step(folder)
            if _is_step(step):
                grouped.setdefault(step, []).append(name)
        return {step: [name for name in names if name.startswith("manifest-")] for step, names in grouped.items()}

    def _committed(self) -> dict[int, int]:
        """The newest generation of each step that has one."""
        for pause_s in _PAUSES_S:
            names = self._names()
            committed = _newest(names)
            if committed or not names:
                return committed
            # Folders and no step: saves under way, or a step that was removed while we looked, after a newer one came.
            time.sleep(pause_s)
        if all(map(self._has_folder, names)):
            return {}

        def look() -> tuple[dict[int, int]] | None:
            names = self._names()
            committed = _newest(names)
            return (committed,) if committed or not names else None

        return (patiently(self.root, look) or ({},))[0]

    def _has_folder(self, step: int) -> bool:
        """Whether the folder of a step that is listed is really there. If not, then the listing of the root is old."""
        return not isinstance(self.root, LocalStore) or is_folder(self.root.root / self._patterns.own.name(step))

    def _metrics(self, step: int, generation: int) -> dict[str, float]:
        if (step, generation) not in self._scores:
            try:
                place = self.place(step)
                # Not `find`, which refuses a place where another library has saved too: its metrics are no less good.
                number, data, _, _ = newest(place)
                self._scores[step, generation] = metrics_of(parse(place.url, number, data))
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
        committed = self._committed()
        others = [] if step in committed else self._foreign(committed).get(step, [])
        if not others:
            self._remove_own(step)
            return
        place = self.within(self.folder_of(step))
        if not others[0].ours:
            raise InvalidRequest(f"{place.url} was not saved by Milepost, so it is not removed; delete it by hand")
        remove_checkpoint(place)

    def _remove_own(self, step: int) -> None:
        remove_checkpoint(self.place(step))
        self._scores = {key: value for key, value in self._scores.items() if key[0] != step}

    def _say_once(self, step: int, text: str) -> None:
        line = f"{self.place(step).url} {text}"
        if line not in self._left_alone:
            self._left_alone.add(line)
            _log.warning("%s", line)


def _newest(names: Mapping[int, Sequence[str]]) -> dict[int, int]:
    """The newest generation of each step, by the names in its folder; without those that have none."""
    numbers = {step: [g for g in map(generation_of, found) if g is not None] for step, found in names.items()}
    return {step: max(found) for step, found in numbers.items() if found}


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


def _is_step(step: int | None) -> TypeGuard[int]:
    return step is not None and step <= MAX_STEP
