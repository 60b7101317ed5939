"""How much room the steps of a run take together: a file that several of them share counts once."""

import os
from collections.abc import Iterable, Mapping
from typing import NamedTuple

from milepost.core.manifest import Manifest, OlderFile
from milepost.core.reuse import FileId, id_of
from milepost.store import LocalStore, Store


class StepFiles(NamedTuple):
    """The files of a step: the bytes of those that it has for itself, and those that it may share, with their sizes."""

    save_id: str
    own_bytes: int
    older: Mapping[FileId, int]


def files_of(place: Store, manifest: Manifest | None, own_bytes: int | None) -> StepFiles:
    """The files of a step. `own_bytes`: of those that its own save wrote, as far as known.

    A step that was copied has files of earlier saves for itself.
    """
    if manifest is None:
        return StepFiles("", own_bytes or 0, {})
    own, shared = own_bytes or 0, dict[FileId, int]()
    for file in manifest.older:
        if _is_alone(place, manifest, file):
            own += file.size_bytes
        else:
            shared[id_of(file, manifest)] = file.size_bytes
    return StepFiles(manifest.save_id, own, shared)


def _is_alone(place: Store, manifest: Manifest, file: OlderFile) -> bool:
    """Whether a file of an earlier save lies in the folder of this step, and nowhere else."""
    if file.folder:
        return False
    if not isinstance(place, LocalStore):
        return place.traits.is_current  # it has no second names
    try:
        return os.stat(place.root / manifest.parts_of(file)[0].name).st_nlink == 1
    except OSError:
        return False


def room_of(steps: Iterable[StepFiles]) -> int:
    """The bytes that the files of these steps take. The data of a removed step counts while one of them needs it."""
    known = list(steps)
    there = {step.save_id for step in known}
    kept = {file: size for step in known for file, size in step.older.items() if file.save_id not in there}
    return sum(step.own_bytes for step in known) + sum(kept.values())
