"""What is at a place: a run with its steps, one checkpoint, or nothing. Looks at manifests and names, never at data.

A run is a folder with checkpoints in it, one in each folder, however they are named and in whichever format.
"""

import contextlib
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from datetime import UTC, datetime
from functools import partial
from typing import Any, Literal, NamedTuple

import msgspec

from milepost.checkpoint import files_at
from milepost.commit.beside import METADATA, names_at, refuse_newer_index
from milepost.commit.find import generations_in, is_current, look_at_files, newest, parse, read_manifest, removals_in
from milepost.commit.nesting import folder_in
from milepost.commit.signs import users_of
from milepost.core.history import PhaseTime
from milepost.core.manifest import Manifest, unseal_brief
from milepost.core.save_id import intended_generation
from milepost.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    NoReply,
    StorageError,
    UnsafeCheckpoint,
)
from milepost.formats.read.names import is_deepspeed, names_look_foreign
from milepost.inspection.foreign_files import iso, look_at_foreign, size_and_time
from milepost.inspection.run_rule import rule_of, told_rule
from milepost.inspection.usage import StepFiles, files_of, room_of
from milepost.inspection.verified import verified_at
from milepost.steps.names import StepNames, names_in, step_in
from milepost.steps.retention import Rule
from milepost.steps.shelf import metrics_of
from milepost.steps.survey import each
from milepost.store import AtGeneration, LocalStore, Location, Store, Within, store_at

MOST_FILES = 100_000
"""How many shard files are looked for, those of the newest steps first."""
_ASKED_ALWAYS = 16
"""How many of the newest steps are asked for at every look, where a listing is a request."""
_TURNS = 16
"""The others are asked for at one of so many looks."""
_TORCH_FILES = (".pt", ".pth", ".ckpt")
StepState = Literal["whole", "unfinished", "removed", "damaged", "unreadable", "unhealthy"]
"""`removed`: it is being removed. `unreadable`: it may be whole, but cannot be read here: no permission, or newer."""


class StepSummary(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint, as far as its manifest and the names of its files tell. `state` says whether it can be used.

    `step`: the number in its name; None where there is none. `reason`: why `state` is not "whole". `format`:
    "milepost", or that of another library. `looked_at`: what `state` rests on. With "files", all files are there and
    have the right size; with "manifest", they were too many to look for; with "names", another library's checkpoint was
    not opened. `data_bytes`: the tensors and values of ranks; `new_bytes`: those of them that its own save wrote.
    `file_bytes`: all files that it needs, those of earlier saves and the manifest included, so steps that share a file
    each count it; `new_file_bytes`: what its own save added to the disk. None: not known. `used_by`: the folders of the
    steps that use data of one that was removed. `kept`: why the rule of the run keeps it. `verified`: when `milepost
    verify --record` last read all of it. Numbers in `metrics` that are not finite are null in JSON.
    """

    step: int | None
    name: str
    url: str
    state: StepState
    reason: str = ""
    format: str = "milepost"
    looked_at: Literal["files", "manifest", "names"] = "files"
    generation: int = 0
    ranks: int | None = None
    data_bytes: int | None = None
    new_bytes: int | None = None
    file_bytes: int | None = None
    new_file_bytes: int | None = None
    created: str | None = None
    age_s: float | None = None
    metrics: dict[str, float | None] = {}
    kept: tuple[str, ...] = ()
    timings: tuple[PhaseTime, ...] = ()
    verified: str | None = None
    used_by: tuple[str, ...] = ()


class PlaceSummary(msgspec.Struct, frozen=True, kw_only=True):
    """What is at a place. `steps`: oldest first; one for a checkpoint, none where there is nothing. `reason`: why not.

    `newest`: the name of the last step that is whole and healthy; empty where none is. `file_bytes`: what all steps
    take together, as far as known: a file that several of them share counts once.
    `retention`: the rule that the run is pruned by, as its newest step tells it; None where it tells none.
    """

    url: str
    kind: Literal["run", "checkpoint", "nothing"]
    steps: tuple[StepSummary, ...] = ()
    newest: str = ""
    file_bytes: int = 0
    retention: dict[str, Any] | None = None
    reason: str = ""


class _Inspected(msgspec.Struct, frozen=True):
    """A checkpoint that was looked at, and its manifest if it is one of ours and could be read."""

    summary: StepSummary
    place: Store
    manifest: Manifest | None = None


class SeenSteps:
    """What was found in the folders of a run. A look that gets it reads only what has changed since the last one.

    A step counts as unchanged while the names at its place are the same. Where each listing is a request, most of the
    older steps are asked for only now and then.
    """

    def __init__(self) -> None:
        self._found: dict[str, tuple[frozenset[str], _Inspected]] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._looks = 0

    def look(self, root: Store, names: list[str]) -> "list[_Inspected | None]":
        """What is in these folders, which are all of the run."""
        self._looks += 1
        newest = set(sorted(names, key=lambda name: (step_in(name) or 0, name))[-_ASKED_ALWAYS:])
        turn = self._looks % _TURNS

        def look(at: int) -> tuple[frozenset[str], _Inspected | None]:
            name, place = names[at], folder_in(root, names[at])
            known = self._found.get(name)
            if known and root.traits.is_current and name not in newest and at % _TURNS != turn:
                return known
            try:
                here = names_at(place)
            except StorageError:
                return frozenset(), _look(place, name, None)
            return known if known and known[0] == here else (here, _look(place, name, here))

        found = each(root, look, range(len(names)))
        self._names = {name: here for name, (here, _) in zip(names, found, strict=True)}
        return [one for _, one in found]

    def keep(self, seen: "list[_Inspected]") -> None:
        """Remember what was found of the steps that can be used; without the lists of their files."""
        usable = (one for one in seen if one.manifest is not None and one.summary.state in ("whole", "unhealthy"))
        self._found = {
            one.summary.name: (self._names.get(one.summary.name, frozenset()), _brief(one)) for one in usable
        }


def _brief(one: "_Inspected") -> "_Inspected":
    assert one.manifest is not None
    return _Inspected(one.summary, one.place, msgspec.structs.replace(one.manifest, files=()))


class Look(NamedTuple):
    """What is at a place, and the files of each step by its name."""

    summary: PlaceSummary
    files: Mapping[str, StepFiles]


def look_at(path: Location, seen: SeenSteps | None = None) -> PlaceSummary:
    """What is at this place, newest last. Raises StorageError if the store does not answer.

    A step that cannot be read is no error: its `state` says so. Object stores are asked for several steps at once.
    `seen`: of an earlier look at the same place.
    """
    return look_with_files(path, seen).summary


def look_with_files(path: Location, seen: SeenSteps | None = None) -> Look:
    """The same, with the files of each step."""
    store = store_at(path)
    if isinstance(store, LocalStore) and os.path.isfile(store.root):
        return _summed(store, "checkpoint", [_opened(store, "")])
    names = names_at(store)
    own = _look(store, "", names) if names else None
    if own is not None and own.manifest is None and own.summary.state == "whole":
        own = _opened(store, "")  # one of another library: there is time to look into it
    seen = seen or SeenSteps()
    found = _inside(store, seen) if _lists_folders(store) else []
    if not found and own is None:
        return Look(_nothing(store), {})
    if not found:
        assert own is not None
        return _summed(store, "checkpoint", _with_files([own], store))
    inspected = _with_files(sorted([*([own] if own else []), *found], key=_order), store)
    seen.keep(inspected)
    rule = next((rule for one in reversed(inspected) if (rule := rule_of(one.manifest))), None)
    kept = why_kept(rule, [one.summary for one in inspected if one.manifest is not None])
    newest = next((one.summary.name for one in reversed(inspected) if one.summary.state == "whole"), "")
    return _summed(store, "run", inspected, kept, newest=newest, retention=told_rule(rule))


def _summed(
    store: Store,
    kind: Literal["run", "checkpoint"],
    seen: list[_Inspected],
    kept: Mapping[str, tuple[str, ...]] | None = None,
    **told: Any,
) -> Look:
    """What was found at a place, as a whole."""
    now, kept = datetime.now(UTC), kept or {}
    files = {one.summary.name: files_of(one.place, one.manifest, one.summary.new_file_bytes) for one in seen}
    steps = (msgspec.structs.replace(one.summary, kept=kept.get(one.summary.name, ())) for one in seen)
    aged = tuple(_aged(step, now) for step in steps)
    return Look(PlaceSummary(url=store.url, kind=kind, steps=aged, file_bytes=room_of(files.values()), **told), files)


class StepToShow(NamedTuple):
    """The newest step of a run that is whole and healthy, where it is, and the newer ones that are not."""

    summary: StepSummary
    place: Store
    passed: tuple[StepSummary, ...]


def newest_step(root: Store, *, or_unhealthy: bool = False) -> StepToShow | None:
    """The newest step of a run that is whole and healthy. None: it is no run.

    `or_unhealthy`: where none is, the newest that is unhealthy. A place with a checkpoint of its own is no run here.
    Looks at as few steps as it can. Raises CheckpointNotFound if there is no such step.
    """
    if not _lists_folders(root) or (isinstance(root, LocalStore) and os.path.isfile(root.root)):
        return None
    names = names_at(root)
    files = {name for name in names if not name.endswith("/")}
    if generations_in(root, names) or names_look_foreign(files):
        return None
    passed: list[StepSummary] = []
    for look in _newest_first(root):
        one = look()
        if one is None:
            continue
        summary = _with_files([one], root)[0].summary
        if summary.state == "whole":
            return StepToShow(summary, place_of_step(root, summary.name), tuple(passed))
        passed.append(summary)
    if not passed:
        return None
    last = next((at for at, one in enumerate(passed) if one.state == "unhealthy"), None)
    if last is not None and or_unhealthy:
        return StepToShow(passed[last], place_of_step(root, passed[last].name), tuple(passed[:last]))
    what = "whole and healthy" if last is not None else "whole"
    raise CheckpointNotFound(f"{root.url} is a run without a step that is {what}; `milepost ls` says what is wrong")


def _newest_first(root: Store) -> Iterator[Callable[[], _Inspected | None]]:
    """A look at each place under a root that may be a step, the one with the highest number first."""
    names = ((step_in(name), name, is_file) for name, is_file in names_in(root, [""]) if name != "data")
    for step, name, is_file in sorted(names, key=lambda one: (one[0] is not None, one[0] or 0, one[1]), reverse=True):
        if not is_file:
            yield partial(_look, folder_in(root, name), name, None)
        elif step is not None and name.endswith(_TORCH_FILES):
            yield partial(_torch_file, root, name)


def _lists_folders(root: Store) -> bool:
    """Whether there can be a run here: the web lists nothing, and one generation is one checkpoint."""
    return not isinstance(root, AtGeneration) and not root.url.startswith(("http://", "https://"))


def _nothing(store: Store) -> PlaceSummary:
    """The file of another library that a URL names; or nothing, and why."""
    try:
        return PlaceSummary(url=store.url, kind="checkpoint", steps=(_foreign(store, ""),))
    except CheckpointNotFound as error:
        return PlaceSummary(url=store.url, kind="nothing", reason=str(error))
    except CheckpointError as error:
        if isinstance(error, StorageError):
            raise
        return PlaceSummary(url=store.url, kind="checkpoint", steps=(_broken(store, "", error),))


def _order(seen: _Inspected) -> tuple[bool, int, str]:
    step = seen.summary.step
    return step is not None, step or 0, seen.summary.name


def _inside(root: Store, seen: SeenSteps) -> list[_Inspected]:
    """The checkpoints in the folders of a place, and the files of torch.save in it that are numbered."""
    names = sorted(one for one in names_in(root, [""]) if one[0] != "data")
    files = [name for name, is_file in names if is_file and name.endswith(_TORCH_FILES) and step_in(name) is not None]
    folders = [name for name, is_file in names if not is_file]
    return [one for one in seen.look(root, folders) if one is not None] + [_torch_file(root, name) for name in files]


def place_of_step(root: Store, name: str) -> Store:
    """The place of a step that `look_at` found under a root, with the settings of the root."""
    return root if name == "." else folder_in(root, name)


def _look(place: Store, name: str, names: frozenset[str] | None) -> _Inspected | None:
    """What is in one folder; None if it is no checkpoint, and none was begun."""
    try:
        names = names_at(place) if names is None else names
        numbers = generations_in(place, names)
        if numbers:
            return _own(place, name, names, numbers[0])
        return _other(place, name, names)
    except StorageError as error:
        if isinstance(error, NoReply) or not name:
            raise
        return _Inspected(_broken(place, name, error), place)  # no permission for this one, or it was removed


def _own(place: Store, name: str, names: frozenset[str], listed: int) -> _Inspected:
    """A checkpoint of ours, without a look at its files."""
    size_bytes = 0
    try:
        data = read_manifest(place, listed) if place.traits.is_current else None
        number, data = (listed, data) if data is not None else newest(place)[:2]
        size_bytes = len(data)
        manifest = parse(place.url, number, data, unseal_brief)
        refuse_newer_index(place, names, lambda: manifest)
    except CheckpointNotFound:
        return _Inspected(_step(place, name, state="removed", reason=f"{place.url} was removed a moment ago"), place)
    except CheckpointError as error:
        return _Inspected(_broken(place, name, error, generation=listed), place)
    summary = _whole(place, name, manifest, size_bytes)
    return _Inspected(msgspec.structs.replace(summary, verified=verified_at(names, number)), place, manifest)


def _whole(place: Store, name: str, manifest: Manifest, manifest_bytes: int = 0) -> StepSummary:
    """What a manifest tells of a checkpoint, ours or another library's."""
    ours, health = manifest.generation > 0, manifest.health
    return _step(
        place,
        name,
        state="unhealthy" if health is not None and not health.ok else "whole",
        reason=health.reason if health is not None and not health.ok else "",
        format=manifest.format,
        looked_at="manifest",
        generation=manifest.generation,
        ranks=manifest.world,
        data_bytes=manifest.data_bytes if ours else sum(tensor.size_bytes for tensor in manifest.tensors),
        new_bytes=manifest.new_bytes if ours else None,
        file_bytes=sum(file.size_bytes for file in manifest.stored) + manifest_bytes,
        new_file_bytes=sum(file.size_bytes for file in manifest.files) + manifest_bytes,
        created=manifest.created or None,
        metrics={**metrics_of(manifest)} if ours else {},
        timings=manifest.timings,
    )


def _other(place: Store, name: str, names: frozenset[str]) -> _Inspected | None:
    """What is in a folder without a manifest of ours."""
    files = {one for one in names if not one.endswith("/")}
    if names_look_foreign(files):
        format_name = "dcp" if METADATA in files else "deepspeed" if is_deepspeed(files) else "safetensors"
        size_bytes, created = size_and_time(place)
        return _Inspected(_unopened(place, name, format_name, size_bytes, created), place)
    if any(one.endswith(".distcp") for one in files):
        return _Inspected(_step(place, name, state="unfinished", format="dcp", reason=_NEVER_FINISHED), place)
    if "data/" not in names or not _has_attempts(place):
        return None
    if removals_in(names):
        left = list(place.list("data/"))
        if not left:
            return None  # it was removed, and only the marker is left, for those whose listing is old
        users = tuple(users_of(place, left))
        reason = f"removed; its data is used by {', '.join(users)}" if users else "it is being removed"
        return _Inspected(_step(place, name, state="removed", reason=reason, used_by=users), place)
    return _Inspected(_step(place, name, state="unfinished", reason=_NEVER_FINISHED), place)


_NEVER_FINISHED = "it is being saved, or the save never finished"


def _has_attempts(place: Store) -> bool:
    found = (name.split("/")[1] for name in place.list("data/", shallow=True))
    return any(intended_generation(name) is not None for name in found)


def _torch_file(root: Store, name: str) -> _Inspected:
    """A file of torch.save, by its name."""
    size_bytes, created = None, None
    with contextlib.suppress(OSError):  # removed meanwhile
        if isinstance(root, LocalStore):
            status = (root.root / name).stat()
            size_bytes, created = status.st_size, iso(status.st_mtime)
    return _Inspected(_unopened(Within(root, name), name, "torch", size_bytes, created), root)


def _unopened(place: Store, name: str, format_name: str, size_bytes: int | None, created: str | None) -> StepSummary:
    """A checkpoint of another library, by the names of its files."""
    sizes = {"file_bytes": size_bytes, "new_file_bytes": size_bytes}
    return _step(place, name, state="whole", format=format_name, looked_at="names", created=created, **sizes)


def _opened(store: Store, name: str) -> _Inspected:
    """A checkpoint of another library, opened; what is wrong with it is in its state."""
    try:
        return _Inspected(_foreign(store, name), store)
    except CheckpointError as error:
        return _Inspected(_broken(store, name, error), store)


def _foreign(store: Store, name: str) -> StepSummary:
    """What a checkpoint of another library holds, with a look at its files. Raises what `files_at` raises."""
    with contextlib.closing(files_at(store)) as files:
        found = msgspec.structs.replace(_whole(store, name, files.manifest), created=size_and_time(store)[1])
        return _looked(found, lambda: look_at_foreign(files))


def _with_files(seen: list[_Inspected], root: Store) -> list[_Inspected]:
    """The same, with a look at the files of those that have a manifest: the newest first, up to `MOST_FILES`."""
    budget, chosen = MOST_FILES, []
    for i in range(len(seen) - 1, -1, -1):
        manifest = seen[i].manifest
        if manifest is not None and manifest.files and seen[i].summary.looked_at != "files":
            budget -= len(manifest.stored)
            if budget < 0:
                break
            chosen.append(i)

    def look(i: int) -> StepSummary:
        manifest = seen[i].manifest
        assert manifest is not None
        found = _looked(seen[i].summary, lambda: look_at_files(seen[i].place, manifest))
        is_stale = found.state == "damaged" and not is_current(seen[i].place, manifest.generation)
        return _again(seen[i]) if is_stale else found

    # In a file system, `look_at_files` itself looks for several files at once.
    found = each(root, look, chosen) if root.traits.is_current else list(map(look, chosen))
    looked = dict(zip(chosen, found, strict=True))
    return [_Inspected(looked.get(i, one.summary), one.place, one.manifest) for i, one in enumerate(seen)]


def _again(one: _Inspected) -> StepSummary:
    """What is there now, where a checkpoint was replaced or removed between the looks at its manifest and its files."""
    found = _look(one.place, "" if one.summary.name == "." else one.summary.name, None)
    gone = msgspec.structs.replace(one.summary, state="removed", reason="it was removed a moment ago")
    return gone if found is None else found.summary


def _looked(summary: StepSummary, look: Callable[[], object]) -> StepSummary:
    """A summary with what a look at the files says."""
    try:
        look()
    except (CheckpointDamaged, UnsafeCheckpoint) as error:
        return msgspec.structs.replace(summary, state="damaged", reason=str(error), looked_at="files")
    except StorageError as error:
        return msgspec.structs.replace(summary, state="unreadable", reason=str(error))
    return msgspec.structs.replace(summary, looked_at="files")


def _step(place: Store, name: str, **told: Any) -> StepSummary:
    shown = name or place.url.rstrip("/").rpartition("/")[2]
    return StepSummary(step=step_in(shown), name=name or ".", url=place.url, **told)


def _broken(place: Store, name: str, error: CheckpointError, generation: int = 0) -> StepSummary:
    state = "damaged" if isinstance(error, CheckpointDamaged) else "unreadable"
    return _step(place, name, state=state, reason=str(error), generation=generation, looked_at="manifest")


def _aged(step: StepSummary, now: datetime) -> StepSummary:
    try:
        created = datetime.fromisoformat(step.created or "")
    except ValueError:
        return step
    created = created if created.tzinfo is not None else created.replace(tzinfo=UTC)
    return msgspec.structs.replace(step, age_s=round((now - created).total_seconds(), 1))


def why_kept(
    rule: Rule | None, steps: Iterable[StepSummary], names: StepNames | None = None
) -> Mapping[str, tuple[str, ...]]:
    """Why a rule keeps each of these steps, by name. Pure. Those that it does not keep are missing.

    Damaged steps do not count and stay; so do those under another name than those that `names` makes.
    """
    if rule is None:
        return {}
    own = (names or StepNames()).own
    counted = {step.step: step for step in steps if step.step is not None and own.step(step.name) is not None}
    usable = {number: step for number, step in counted.items() if step.state in ("whole", "unhealthy")}
    unhealthy = {number for number, step in usable.items() if step.state == "unhealthy"}
    scores = {n: None if n in unhealthy else step.metrics.get(rule.best or "") for n, step in usable.items()}
    reasons: dict[int, list[str]] = {number: [] for number in rule.kept(scores, unhealthy)}
    for some, what in ((scores.keys() - unhealthy, ""), (unhealthy, " unhealthy")):
        for number in sorted(some, reverse=True)[: rule.keep_last or 1] if rule.is_set else ():
            reasons[number].append((f"last {rule.keep_last}" if rule.keep_last else "newest") + what)
    for number, why in reasons.items():
        if rule.keep_every and number % rule.keep_every == 0 and number not in unhealthy:
            why.append(f"every {rule.keep_every}")
    for number in rule.ranked(scores)[: rule.keep_best or 0]:
        reasons[number].append(f"best {rule.keep_best} by {rule.best}")
    return {usable[number].name: tuple(why) or ("no rule removes it",) for number, why in reasons.items()}
