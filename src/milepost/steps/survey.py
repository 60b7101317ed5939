"""Which steps there are under a root: their folders, and what is in them. Two ways to look, one for each kind of store.

In a file system a listing may be old. So it is given some time where something is missing that should be there, and
nothing is remembered. In an object store a listing is current and costs a request. So one listing of the root names all
folders, and each folder that matters is asked once, by a listing of its top: never for its data.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeGuard, TypeVar

from milepost.commit.beside import names_at
from milepost.commit.find import REMOVED, generations_in, is_committed, lacks_files, patiently, removals_in
from milepost.core.manifest import generation_of
from milepost.errors import InvalidRequest
from milepost.formats.read.names import looks_foreign, names_look_foreign
from milepost.steps.names import MAX_STEP, StepNames, is_folder, names_in
from milepost.store import LocalStore, Store, Within
from milepost.store.stopping import side_by_side

S = TypeVar("S")
T = TypeVar("T")
_PAUSES_S = (0.0, 0.0, 0.001, 0.004, 0.016, 0.064)
_LOOKS = 16
"""How many folders are asked at the same time, where the store does not say."""


@dataclass(frozen=True, slots=True)
class ForeignStep:
    """A step that was saved under another name, or in another format. `ours`: it is in Milepost's format."""

    name: str
    ours: bool


class Survey(Protocol):
    """What is known about the steps under a root."""

    def steps(self) -> list[int]:
        """The steps that are committed, and those of other programs, oldest first. Looks at names only."""

    def latest(self) -> int | None:
        """The newest of `steps`."""

    def newest(self) -> tuple[int, str] | None:
        """The newest of `steps`, and the folder that it is read from."""

    def recent(self, count: int) -> list[tuple[int, str]]:
        """The newest of `steps`, newest first, and the folder of each. Asks few folders where that costs a request."""

    def untried(self, skipped: Collection[int]) -> tuple[int, str] | None:
        """The newest step other than these, and its folder. Waits where a listing may be old."""

    def is_there(self, step: int) -> bool:
        """Whether this step is among `steps`."""

    def within(self, name: str) -> Store:
        """The store of a step that `folder_of` found."""

    def folder_of(self, step: int) -> str:
        """The name under the root where a step is read from. Where both exist, ours counts, not another program's.

        Raises InvalidRequest if several of others are the same step.
        """

    def others(self, step: int) -> list[ForeignStep]:
        """What other programs saved as this step, unless Milepost saved it too."""

    def committed(self) -> Mapping[int, int]:
        """The newest generation of each step of ours that has one."""

    def remembered(self) -> Mapping[int, int]:
        """Like `committed` after `markers`, for the job that saves: what it found before may come from memory.

        Its own removals end that, by `forget`, and so does a root that lists the folder no more. Another job's removal
        is seen by `gone`.
        """

    def unfinished(self) -> list[int]:
        """The steps whose folders hold data of saves, and no manifest and no marker."""

    def gone(self, steps: Iterable[int]) -> set[int]:
        """Those of these steps that `remembered` gave from memory, and that are there no more."""

    def markers(self) -> Mapping[int, Sequence[str]]:
        """The markers of removals in the folders of steps."""

    def forget(self, step: int) -> None:
        """Remember nothing of this step: it was saved or removed."""

    def rest(self, step: int) -> None:
        """Do not ask for this step before `forget`, for retention: it was removed, and only its marker is left."""


class _Places:
    """Names and stores of steps."""

    def __init__(self, root: Store, names: StepNames) -> None:
        self.root, self.patterns = root, names

    def place(self, step: int) -> Store:
        """The store into which a step is saved."""
        return Within(self.root, self.patterns.own.name(step))

    def within(self, name: str) -> Store:
        """The store of a step that `folder_of` found."""
        if isinstance(self.root, LocalStore) and self.patterns.own.step(name) is None:
            return LocalStore(self.root.root / name)  # it may be a file
        return Within(self.root, name)

    def prefixes(self) -> list[str]:
        """What the names of steps start with."""
        return [pattern.prefix for pattern in (self.patterns.own, *self.patterns.others)]

    def only(self, step: int, found: Sequence[ForeignStep]) -> str:
        """The one name of a step of others. Raises InvalidRequest if there are several."""
        if len(found) > 1:
            names = ", ".join(repr(foreign.name) for foreign in found[:4])
            raise InvalidRequest(f"step {step} at {self.root.url} has several names: {names}. Move all but one away")
        return found[0].name if found else self.patterns.own.name(step)


class FileSurvey(_Places):
    """The steps in a file system, or in a store like one."""

    def steps(self) -> list[int]:
        """See `Survey`."""
        committed = self.committed()
        return sorted(committed.keys() | self._foreign(committed).keys())

    def latest(self) -> int | None:
        """See `Survey`."""
        return max(self.steps(), default=None)

    def newest(self) -> tuple[int, str] | None:
        """See `Survey`."""
        step = self.latest()
        return None if step is None else (step, self.folder_of(step))

    def recent(self, count: int) -> list[tuple[int, str]]:
        """See `Survey`. One look at all folders, however many are asked for."""
        committed = self.committed()
        others = self._foreign(committed)
        newest = sorted(committed.keys() | others.keys(), reverse=True)[:count]
        return [(step, self.only(step, () if step in committed else others[step])) for step in newest]

    def is_there(self, step: int) -> bool:
        """See `Survey`. The listing of the root may be old, so it is looked for by its name, too."""
        return step in self.steps() or is_committed(self.place(step), 1)

    def untried(self, skipped: Collection[int]) -> tuple[int, str] | None:
        """See `Survey`.

        If none is left, and one is being removed or is gone, then the listing may be old: there should be newer steps,
        and it is given some time to show them.
        """

        def look() -> list[int]:
            return [step for step in self.steps() if step not in skipped]

        left = look()
        if not left and (self._removes() or any(map(self._is_going, skipped))):
            left = patiently(self.root, look)
        return (left[-1], self.folder_of(left[-1])) if left else None

    def _removes(self) -> bool:
        """Whether a step is being removed, where a listing may be old."""
        return isinstance(self.root, LocalStore) and any(self.markers().values())

    def _is_going(self, step: int) -> bool:
        """Whether a step of ours is not there any more, or not all of its files are."""
        committed = self.committed()
        return (step in committed or step not in self._foreign(committed)) and lacks_files(self.place(step))

    def folder_of(self, step: int) -> str:
        """See `Survey`."""
        return self.only(step, self.others(step))

    def others(self, step: int) -> list[ForeignStep]:
        """See `Survey`."""
        committed = self.committed()
        return [] if step in committed else self._foreign(committed).get(step, [])

    def _foreign(self, committed: Mapping[int, int]) -> dict[int, list[ForeignStep]]:
        """The steps of other programs: by another name, or by our names in another format."""
        found: dict[int, list[ForeignStep]] = {}
        for name, is_file in sorted(names_in(self.root, self.prefixes())):
            own = self.patterns.own.step(name)
            step = self.patterns.step_of(name, file=is_file)
            if not is_step(step) or (own is not None and own in committed):
                continue
            place = self.within(name)
            ours = not is_file and any(generation_of(known) is not None for known in place.list("manifest-"))
            if (ours and own is None) or is_file or (not ours and looks_foreign(place)):
                found.setdefault(step, []).append(ForeignStep(name, ours))
        return found

    def committed(self) -> dict[int, int]:
        """See `Survey`."""
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

    def markers(self) -> dict[int, list[str]]:
        """See `Survey`."""
        return {step: [name for name in names if name.endswith(REMOVED)] for step, names in self._names().items()}

    def _names(self) -> dict[int, list[str]]:
        """For each folder of a step: the names in it that start with `manifest-`, if any."""
        own = self.patterns.own
        folders = (own.step(name) for name, is_file in names_in(self.root, [own.prefix]) if not is_file)
        # Folder by folder: a listing of everything would go through all data files.
        return {step: list(self.place(step).list("manifest-")) for step in folders if is_step(step)}

    def _has_folder(self, step: int) -> bool:
        """Whether the folder of a step that is listed is really there. If not, then the listing of the root is old."""
        return not isinstance(self.root, LocalStore) or is_folder(self.root.root / self.patterns.own.name(step))

    def unfinished(self) -> list[int]:
        """See `Survey`."""
        names = self._names()
        steps = names.keys() - _newest(names).keys() - {step for step, found in self.markers().items() if found}
        return [step for step in sorted(steps) if next(iter(self.place(step).list("data/")), None)]

    def remembered(self) -> dict[int, int]:
        """Nothing is remembered."""
        return self.committed()

    def gone(self, steps: Iterable[int]) -> set[int]:
        """None: nothing is remembered."""
        del steps
        return set()

    def forget(self, step: int) -> None:
        """Nothing is remembered."""

    def rest(self, step: int) -> None:
        """A removal leaves nothing here."""


@dataclass(frozen=True, slots=True)
class _StepFolder:
    """What one listing of a folder's top shows. `generation`: the newest of ours, or 0. `is_bare`: only `data/`."""

    generation: int = 0
    markers: tuple[str, ...] = ()
    is_foreign: bool = False
    has_data: bool = False
    is_bare: bool = False


class ObjectSurvey(_Places):
    """The steps in a store whose listings are current, and cost a request each."""

    def __init__(self, root: Store, names: StepNames) -> None:
        super().__init__(root, names)
        self._known: dict[int, int] = {}
        self._resting: set[int] = set()

    def steps(self) -> list[int]:
        """See `Survey`. Asks all folders, several at the same time."""
        asked: set[int] = set()
        found: list[int] = []
        while not found and (listed := self._listed(asked)):  # a step may be removed while we look, after a newer came
            asked |= listed.keys()
            readings = self._each(lambda step: self._reading(step, listed[step]), listed)
            found = [step for step, reading in zip(listed, readings, strict=True) if reading is not None]
        return sorted(found)

    def latest(self) -> int | None:
        """See `Survey`."""
        found = self.newest()
        return None if found is None else found[0]

    def newest(self) -> tuple[int, str] | None:
        """See `Survey`."""
        return self.untried(())

    def untried(self, skipped: Collection[int]) -> tuple[int, str] | None:
        """See `Survey`. Asks the newest first, until one is a step: usually one listing of the root and one of it."""
        asked = set(skipped)
        while listed := self._listed(asked):
            asked |= listed.keys()
            for some in _growing(sorted(listed, reverse=True)):
                readings = self._each(lambda step: self._reading(step, listed[step]), some)
                for step, reading in zip(some, readings, strict=True):
                    if reading is not None:
                        return step, self.only(step, reading)
        return None

    def recent(self, count: int) -> list[tuple[int, str]]:
        """See `Survey`. Asks the newest first, as `untried` does: about one folder for each step."""
        asked: set[int] = set()
        found: list[tuple[int, str]] = []
        while not found and (listed := self._listed(asked)):
            asked |= listed.keys()
            for some in _growing(sorted(listed, reverse=True)):
                readings = self._each(lambda step: self._reading(step, listed[step]), some)
                pairs = zip(some, readings, strict=True)
                found += [(step, self.only(step, reading)) for step, reading in pairs if reading is not None]
                if len(found) >= count:
                    break
        return found[:count]

    def is_there(self, step: int) -> bool:
        """See `Survey`."""
        return self._look_up(step) is not None

    def folder_of(self, step: int) -> str:
        """See `Survey`."""
        return self.only(step, self.others(step))

    def others(self, step: int) -> list[ForeignStep]:
        """See `Survey`."""
        return self._look_up(step) or []

    def _look_up(self, step: int) -> list[ForeignStep] | None:
        """What `_reading` gives. Where Milepost saved the step, that costs one request."""
        if self._ask(self.patterns.own.name(step)).generation:
            return []
        return self._reading(step, self._listed(()).get(step, []))

    def _listed(self, without: Collection[int]) -> dict[int, list[tuple[str, bool]]]:
        """The names of folders and files that may be steps, and whether each is a file; by step, without these."""
        found: dict[int, list[tuple[str, bool]]] = {}
        for name, is_file in sorted(names_in(self.root, self.prefixes())):
            step = self.patterns.step_of(name, file=is_file)
            if is_step(step) and step not in without:
                found.setdefault(step, []).append((name, is_file))
        return found

    def _reading(self, step: int, names: Sequence[tuple[str, bool]]) -> list[ForeignStep] | None:
        """How a step is read: empty if it is by Milepost's own name, else what others saved. None: it is no step."""
        others = []
        for name, is_file in names:
            folder = _StepFolder(is_foreign=True) if is_file else self._ask(name)
            if folder.generation and name == self.patterns.own.name(step):
                return []
            if folder.generation or folder.is_foreign:
                others.append(ForeignStep(name, ours=folder.generation > 0))
        return others or None

    def _ask(self, name: str) -> _StepFolder:
        names = names_at(self.within(name))
        numbers = generations_in(self.root, names)
        files = {one for one in names if not one.endswith("/")}
        is_foreign = not numbers and names_look_foreign(files)
        markers = tuple(removals_in(names).values())
        return _StepFolder(numbers[0] if numbers else 0, markers, is_foreign, "data/" in names, names <= {"data/"})

    def _each(self, look: Callable[[int], T], steps: Iterable[int]) -> list[T]:
        """What `look` gives for each step, several at the same time."""
        return each(self.root, look, steps)

    def committed(self) -> dict[int, int]:
        """See `Survey`. Asks all folders of ours, several at the same time."""
        self._known.clear()
        self._look_around()
        return dict(self._known)

    def remembered(self) -> dict[int, int]:
        """See `Survey`. Asks nothing: `markers` has asked the folders in which no step was known."""
        return dict(self._known)

    def markers(self) -> dict[int, Sequence[str]]:
        """See `Survey`. Asks the folders in which no step is known yet."""
        return {step: folder.markers for step, folder in self._look_around().items() if folder.markers}

    def unfinished(self) -> list[int]:
        """See `Survey`. Asks the folders in which no step is known yet."""
        found = self._look_around().items()
        return [step for step, folder in found if folder.has_data and not folder.generation and not folder.markers]

    def _look_around(self) -> dict[int, _StepFolder]:
        """Ask the folders of ours in which no step is known, unless they rest; remember the steps."""
        own = self.patterns.own
        names = names_in(self.root, [own.prefix])
        there = {step for step in (own.step(name) for name, is_file in names if not is_file) if is_step(step)}
        self._known = {step: generation for step, generation in self._known.items() if step in there}
        self._resting &= there
        asked = sorted(there - self._known.keys() - self._resting)
        folders = dict(zip(asked, self._each(lambda step: self._ask(own.name(step)), asked), strict=True))
        self._known |= {step: folder.generation for step, folder in folders.items() if folder.generation}
        self._resting |= {step for step, folder in folders.items() if folder.is_bare and self._is_empty(step)}
        return folders

    def _is_empty(self, step: int) -> bool:
        """Whether nothing lies in a folder that is listed: some servers go on listing folders that are empty."""
        return next(iter(self.place(step).list("data/")), None) is None

    def gone(self, steps: Iterable[int]) -> set[int]:
        """See `Survey`. Asks their folders again."""
        asked = [step for step in steps if self._known.pop(step, None)]
        folders = self._each(lambda step: self._ask(self.patterns.own.name(step)), asked)
        found = {step: folder.generation for step, folder in zip(asked, folders, strict=True) if folder.generation}
        self._known |= found
        return set(asked) - found.keys()

    def forget(self, step: int) -> None:
        """See `Survey`."""
        self._known.pop(step, None)
        self._resting.discard(step)

    def rest(self, step: int) -> None:
        """See `Survey`. Not where the step was saved again, and its marker could not be swept."""
        if step not in self._known:
            self._resting.add(step)


def survey_of(root: Store, names: StepNames) -> Survey:
    """The way to look at the steps in this kind of store."""
    return ObjectSurvey(root, names) if root.traits.is_current else FileSurvey(root, names)


def each(root: Store, look: Callable[[S], T], steps: Iterable[S]) -> list[T]:
    """What `look` gives for each step, or name of one; several at the same time, as many as the store bears."""
    return side_by_side(look, steps, root.traits.requests or _LOOKS)


def _growing(steps: Sequence[int]) -> Iterator[Sequence[int]]:
    """Steps in batches of 1, 2, 4, ... up to as many as are asked at the same time."""
    start, size = 0, 1
    while start < len(steps):
        yield steps[start : start + size]
        start, size = start + size, min(2 * size, _LOOKS)


def _newest(names: Mapping[int, Sequence[str]]) -> dict[int, int]:
    """The newest generation of each step, by the names in its folder; without those that have none."""
    numbers = {step: [g for g in map(generation_of, found) if g is not None] for step, found in names.items()}
    return {step: max(found) for step, found in numbers.items() if found}


def is_step(step: int | None) -> TypeGuard[int]:
    """Whether a name has a step in it, and one that Milepost could save."""
    return step is not None and step <= MAX_STEP
