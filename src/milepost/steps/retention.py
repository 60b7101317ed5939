"""Which steps are kept, and how the others are removed. Knows no ranks and no torch.

A step is a folder under the root, `step-0000000100`, with a checkpoint in it. One is removed in this order:

    1. what older saves left in it is swept, so that nothing older comes to light in step 3
    2. a marker, `manifest-<generation>.json.removed`, is created: it holds the id of the save that is removed
    3. that save's manifest is deleted: from here on there is no checkpoint
    4. once that is durable, that save's data is deleted
    5. the marker is deleted

So after a power cut, too, a step that has a manifest has its data: the marker and what was swept are durable before step 3
(creating the marker syncs the folder), and the end of the manifest before step 4. What comes later needs no sync.

A removal that was cut short left its marker, by which the next one finishes it. A folder without manifest and without
marker is a save under way, or one that died, and is never touched. A marker names one save id, which no other save ever
has, so a save that runs in the same folder loses nothing; and `commit.aim` passes marked generations over.
"""

import logging
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

from milepost.commit.publish import REMOVED, find, generations, parse, read_manifest, sweep
from milepost.core.manifest import Manifest, ShardFile, generation_of, intended_generation, manifest_name
from milepost.errors import (
    AlreadyExists,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    StorageError,
)
from milepost.state.values import Codec
from milepost.store import LocalStore, Store, Within

_log = logging.getLogger("milepost")
_STEP = re.compile(r"step-([0-9]{10})")
MAX_STEP = 9_999_999_999
"""The last step whose name sorts behind all others."""
METRICS = "metrics"
"""The key in a checkpoint's metadata under which its metrics stand."""
_LOOKS = 16
"""How many files are looked at, at once."""
_MAX_MARKER_BYTES = 100
_TRIES = 20


@dataclass(frozen=True, slots=True)
class Rule:
    """Which steps are kept; `Checkpointer` explains each field. With no field set: all."""

    keep_last: int | None = None
    keep_every: int | None = None
    keep_best: int | None = None
    best: str | None = None
    mode: Literal["min", "max"] = "min"

    def __post_init__(self) -> None:
        for name in ("keep_last", "keep_every", "keep_best"):
            value = getattr(self, name)
            if value is not None and (not isinstance(value, int) or isinstance(value, bool) or value < 1):
                raise InvalidRequest(f"{name} is a whole number from 1 on, or None; not {value!r}")
        if self.mode not in ("min", "max"):
            raise InvalidRequest(f'mode is "min" or "max", not {self.mode!r}')
        if self.keep_best is not None and not self.best:
            raise InvalidRequest('keep_best needs the name of a metric: best="loss", for example')

    def kept(self, scores: Mapping[int, float | None]) -> set[int]:
        """The steps to keep, given each step's metric. Pure. The newest is always among them."""
        newest = sorted(scores, reverse=True)
        if self.keep_last is None and self.keep_every is None and self.keep_best is None:
            return set(newest)
        chosen = set(newest[: self.keep_last or 1])
        if self.keep_every is not None:
            chosen.update(step for step in newest if step % self.keep_every == 0)
        return chosen.union(self.ranked(scores)[: self.keep_best or 0])

    def ranked(self, scores: Mapping[int, float | None]) -> list[int]:
        """The steps that have a metric, best first; of equal ones the newer first. NaN is no metric."""
        known = {step: value for step, value in scores.items() if value is not None and not math.isnan(value)}
        sign = 1 if self.mode == "min" else -1
        return sorted(known, key=lambda step: (sign * known[step], -step))


def step_name(step: int) -> str:
    """The name of a step's folder; names sort as steps do. Raises InvalidRequest for what is no step."""
    return f"step-{checked_step(step):010d}"


def checked_step(step: int) -> int:
    """The step as an int. Raises InvalidRequest for what is no step."""
    try:
        number = operator.index(step)
    except TypeError:
        number = -1
    if isinstance(step, bool) or not 0 <= number <= MAX_STEP:
        raise InvalidRequest(f"a step is a whole number from 0 to {MAX_STEP}, not {step!r}")
    return number


class Shelf:
    """The steps under one root. Everything else there is ignored and never touched."""

    def __init__(self, root: Store) -> None:
        self.root = root
        self._scores: dict[tuple[int, int], dict[str, float]] = {}
        self._left_alone: set[str] = set()

    def place(self, step: int) -> Store:
        """The store of one step."""
        return Within(self.root, step_name(step))

    def steps(self) -> list[int]:
        """The steps that are committed, oldest first. Looks at names only."""
        return sorted(self._committed())

    def scores(self, metric: str | None) -> dict[int, float | None]:
        """The committed steps with the value of a metric; None where there is none or it cannot be read."""
        committed = self._committed()
        return {step: self._metrics(step, g).get(metric) if metric else None for step, g in committed.items()}

    def retain(self, rule: Rule, saved: int) -> list[int]:
        """Remove what the rule does not keep, and say which steps that were. `saved`, just committed, is always kept.

        First, removals that were cut short are finished. Nothing is removed unless the newest step that remains is
        whole (see `look_whole`); steps that turn out not to be do not count, and stay. Raises CheckpointDamaged if
        `saved` itself is not whole. A step that cannot be removed is told in the log.
        """
        self.finish()
        scores = self.scores(rule.best if rule.keep_best else None)
        while True:
            kept = rule.kept(scores) | {saved}
            doomed = sorted(scores.keys() - kept)
            if not doomed:
                return []
            newest = max(kept & scores.keys())
            fault = self._fault(newest)
            if fault is None:
                return [step for step in doomed if self._try_to_remove(step)]
            if newest == saved:
                raise CheckpointDamaged(f"the checkpoint that was just committed is not whole: {fault}")
            self._say_once(newest, f"does not count when old steps are removed: {fault}")
            del scores[newest]

    def finish(self) -> None:
        """Finish the removals that were cut short. What cannot be done is told in the log."""
        for step, names in self._names().items():
            markers = [name for name in names if name.endswith(REMOVED)]
            try:
                finish_removal(self.place(step), markers)
            except (CheckpointError, OSError) as error:
                self._say_once(step, f"is removed, but not all of its data could be deleted: {error}")

    def _names(self) -> dict[int, list[str]]:
        """For each folder of a step: the names in it that start with `manifest-`, if any."""
        if isinstance(self.root, LocalStore):
            # Folder by folder: a listing of everything would go through all data files.
            return {step: list(self.place(step).list("manifest-")) for step in _folders(self.root)}
        grouped: dict[int, list[str]] = {}
        for full in self.root.list("step-"):
            folder, _, name = full.partition("/")
            match = _STEP.fullmatch(folder)
            if match:
                grouped.setdefault(int(match[1]), []).append(name)
        return {step: [name for name in names if name.startswith("manifest-")] for step, names in grouped.items()}

    def _committed(self) -> dict[int, int]:
        """The newest generation of each step that has one."""
        for _ in range(_TRIES):
            names = self._names()
            numbers = {step: [g for g in map(generation_of, found) if g is not None] for step, found in names.items()}
            committed = {step: max(found) for step, found in numbers.items() if found}
            if committed or not names:
                return committed
            # Folders, and no step: saves that are under way; or a step was removed after a newer one came, while we looked.
        return {}

    def _metrics(self, step: int, generation: int) -> dict[str, float]:
        if (step, generation) not in self._scores:
            try:
                place = self.place(step)
                self._scores[step, generation] = metrics_of(parse(place.url, *find(place)))
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
            self.remove(step)
        except CheckpointNotFound:
            return False  # another job was faster
        except (CheckpointError, OSError) as error:
            self._say_once(step, f"could not be removed: {error}")
            return False
        return True

    def remove(self, step: int) -> None:
        """Remove one step. Raises CheckpointNotFound, or CheckpointDamaged if its manifest cannot be read."""
        remove_checkpoint(self.place(step))
        self._scores = {key: value for key, value in self._scores.items() if key[0] != step}

    def _say_once(self, step: int, text: str) -> None:
        line = f"{self.place(step).url} {text}"
        if line not in self._left_alone:
            self._left_alone.add(line)
            _log.warning("%s", line)


def look_whole(place: Store) -> Manifest:
    """The manifest of a checkpoint that looks whole: its manifest is valid, its files are there and have the right size.

    Reads no data; `Checkpoint.verify` does. Raises CheckpointNotFound or CheckpointDamaged.
    """
    manifest = parse(place.url, *find(place))

    def look(file: ShardFile) -> None:
        name = manifest.file_name(file.rank)
        try:
            reader = place.reader(name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{place.url}/{name} is missing") from None
        size_bytes = reader.size_bytes
        reader.close()
        if size_bytes != file.size_bytes:
            raise CheckpointDamaged(f"{place.url}/{name} has {size_bytes} bytes and was saved with {file.size_bytes}")

    with ThreadPoolExecutor(_LOOKS) as pool:
        for _ in pool.map(look, manifest.files):
            pass
    return manifest


def metrics_of(manifest: Manifest) -> dict[str, float]:
    """The metrics that were saved with a checkpoint. Does not decode the rest of the metadata, which may need types."""
    try:
        spelled = {name: value for name, value in manifest.metadata["dict"] if isinstance(name, str)}
        found = Codec().decode(spelled.get(METRICS, {"dict": []}), METRICS)
        return {str(name): float(value) for name, value in found.items() if not isinstance(value, (str, bytes))}
    except (CheckpointError, TypeError, ValueError, KeyError, AttributeError, OverflowError):
        return {}  # somebody else's metadata


def remove_checkpoint(place: Store) -> None:
    """Remove the checkpoint at `place`: it ceases to exist in one step, and then its data goes. See the module."""
    generation, data = find(place)
    manifest = parse(place.url, generation, data)
    sweep(place, manifest)
    if generations(place) != [generation]:
        raise StorageError(f"{place.url} is being saved to, or older manifests there cannot be deleted; it stays")
    marker = manifest_name(generation) + REMOVED
    with suppress(AlreadyExists):  # another job removes it too
        place.create(marker, manifest.save_id.encode())
    finish_removal(place, [marker])


def finish_removal(place: Store, markers: Iterable[str]) -> None:
    """Do what is left of the removals that these markers stand for. May be done twice, and by two jobs at once."""
    for marker in markers:
        generation = generation_of(marker.removesuffix(REMOVED))
        save_id = _marked(place, marker)
        if generation is None or save_id is None:
            continue
        if intended_generation(save_id) != generation:
            _log.warning("%s/%s is no marker of ours, and is left alone", place.url, marker)
            continue
        # Durably: a power cut that brings back a manifest, and not its data, would leave a step that is listed and cannot be
        # loaded. Also where it is gone, since who deleted it may have died before the sync; then by a name that is never used.
        belongs = _belongs(place, generation, save_id)
        place.delete(manifest_name(generation) if belongs else f"{marker}.none", durable=True)
        for name in [*place.list(f"data/{save_id}/"), *place.list(f"{marker}.")]:
            place.delete(name)
        place.delete(marker)


def _marked(place: Store, marker: str) -> str | None:
    """The save id in a marker, or None if there is no marker any more."""
    try:
        reader = place.reader(marker)
    except FileNotFoundError:
        return None
    try:
        buffer = bytearray(min(reader.size_bytes, _MAX_MARKER_BYTES))
        reader.read(0, [memoryview(buffer)])
        return buffer.decode("ascii", "replace")
    finally:
        reader.close()


def _belongs(place: Store, generation: int, save_id: str) -> bool:
    """Whether the manifest of this generation is that of this save. One that cannot be read is: the marker was first."""
    data = read_manifest(place, generation)
    if data is None:
        return False
    try:
        return parse(place.url, generation, data).save_id == save_id
    except CheckpointDamaged:
        return True


def _folders(root: LocalStore) -> list[int]:
    """The steps that have a folder; links are not followed."""
    try:
        with os.scandir(root.root) as entries:
            matches = [_STEP.fullmatch(e.name) for e in entries if e.is_dir(follow_symlinks=False)]
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StorageError(f"cannot list {root.url}: {error.strerror or error}", errno=error.errno) from error
    return [int(match[1]) for match in matches if match]
