"""How much room the steps of a run take together: a file that several of them share counts once. Pure."""

from collections.abc import Iterable, Mapping
from typing import NamedTuple

from milepost.core.manifest import Manifest
from milepost.core.reuse import FileId, id_of


class StepFiles(NamedTuple):
    """The files of a step: the bytes of those that its own save wrote, and those of earlier saves with their sizes."""

    save_id: str
    own_bytes: int
    older: Mapping[FileId, int]


def files_of(manifest: Manifest | None, own_bytes: int | None) -> StepFiles:
    """The files of a step. `own_bytes`: of those that its own save wrote, as far as known."""
    if manifest is None:
        return StepFiles("", own_bytes or 0, {})
    older = {id_of(file, manifest): file.size_bytes for file in manifest.older}
    return StepFiles(manifest.save_id, own_bytes or 0, older)


def room_of(steps: Iterable[StepFiles]) -> int:
    """The bytes that the files of these steps take. The data of a removed step counts while one of them needs it."""
    known = list(steps)
    there = {step.save_id for step in known}
    kept = {file: size for step in known for file, size in step.older.items() if file.save_id not in there}
    return sum(step.own_bytes for step in known) + sum(kept.values())
