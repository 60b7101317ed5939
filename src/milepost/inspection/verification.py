"""Reading every byte of checkpoints: which are whole, and which block of which file, tensor and box is damaged."""

import time
from collections.abc import Iterator, Sequence
from typing import Literal

import msgspec

from milepost.checkpoint import Checkpoint, open_checkpoint
from milepost.commit.find import is_current
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.data.read import Damage
from milepost.data.transfer import Watcher
from milepost.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    StorageError,
    UnsafeCheckpoint,
)
from milepost.inspection.place import place_at
from milepost.inspection.runs import look_at, place_of_step
from milepost.inspection.verified import record_verified
from milepost.store import Location, Store

VerifiedState = Literal["whole", "damaged", "missing", "unreadable", "removed"]
"""`missing`: there is no checkpoint. `unreadable`: it may be whole, but not for us: no permission, or newer.
`removed`: a step of a run that was removed before it was read through.
"""
_TRIES = 4
"""How often a checkpoint is opened because a newer save replaced the one that was read, as a load does."""


class DamagedBox(msgspec.Struct, frozen=True):
    """The box of a tensor that damaged bytes belong to. No box: they hold values, or nothing that has a name.

    `used`: False for data in the file of an earlier save that this checkpoint does not use; `key` is its name there.
    """

    key: str
    offset: tuple[int, ...] | None = None
    shape: tuple[int, ...] | None = None
    used: bool = True


class DamagedPlace(msgspec.Struct, frozen=True):
    """One damaged block, or a file that is missing: what is wrong, and what it touches."""

    file: str
    reason: str
    boxes: tuple[DamagedBox, ...] = ()


class VerifiedCheckpoint(msgspec.Struct, frozen=True, kw_only=True):
    """What a look at every byte of one checkpoint found.

    `recorded`: when that was noted beside it, if it was. `not_recorded`: why that could not be written.
    """

    url: str
    state: VerifiedState
    reason: str = ""
    format: str = ""
    files: int = 0
    bytes_read: int = 0
    seconds: float = 0.0
    damages: tuple[DamagedPlace, ...] = ()
    recorded: str | None = None
    not_recorded: str = ""


class VerifyReport(msgspec.Struct, frozen=True):
    """What was found at all places, in order."""

    checkpoints: tuple[VerifiedCheckpoint, ...]


def checkpoints_at(path: Location) -> Sequence[Store]:
    """The checkpoints that a path stands for: the one there, or the steps of a run, but not those never finished.

    `path@3` is generation 3 of a place. Raises CheckpointNotFound for a run of nothing but such.
    """
    root = place_at(path)
    summary = look_at(root)
    if summary.kind != "run":
        return [root]  # `verify_one` says why it cannot be opened
    found = [step.name for step in summary.steps if step.state not in ("unfinished", "removed")]
    if not found:
        raise CheckpointNotFound(f"{root.url} is a run in which no save was finished; `milepost ls` says more")
    return [place_of_step(root, name) for name in found]


def verify_one(place: Store, progress: Watcher | None = None, *, record: bool = False) -> VerifiedCheckpoint:
    """Read and check all of one checkpoint. Raises nothing for what may be wrong with it: `state` says it.

    What a newer save replaces meanwhile is given up, and that save is read. `record`: if it is whole, note beside it
    that it was verified now. Raises InvalidRequest for what is only read.
    """
    try:
        for left in reversed(range(_TRIES)):
            with open_checkpoint(place) as checkpoint:
                found, generation = _verified(checkpoint, progress), checkpoint.generation
                is_done = not left or not generation or (found.state == "whole" and not record)
                if is_done or is_current(place, generation):
                    return _noted(found, place, generation) if record else found
    except CheckpointError as error:
        return unverified(place, error)
    raise AssertionError


def unverified(place: Store, error: CheckpointError) -> VerifiedCheckpoint:
    """What is told of a checkpoint that could not be opened or read. Raises the error if it tells of a wrong use."""
    if isinstance(error, InvalidRequest):
        raise error
    damaged = isinstance(error, (CheckpointDamaged, UnsafeCheckpoint))
    state: VerifiedState = "damaged" if damaged else "unreadable"
    return VerifiedCheckpoint(
        url=place.url, state="missing" if isinstance(error, CheckpointNotFound) else state, reason=str(error)
    )


def _noted(found: VerifiedCheckpoint, place: Store, generation: int) -> VerifiedCheckpoint:
    """The same, with a note of it beside a whole checkpoint of ours."""
    if found.state != "whole" or not generation:
        return found
    try:
        return msgspec.structs.replace(found, recorded=record_verified(place, generation))
    except StorageError as error:
        return msgspec.structs.replace(found, not_recorded=str(error))


def _verified(checkpoint: Checkpoint, progress: Watcher | None) -> VerifiedCheckpoint:
    started = time.monotonic()
    found = checkpoint.verify(progress=progress)
    seconds = time.monotonic() - started
    return VerifiedCheckpoint(
        url=checkpoint.url,
        state="whole" if found.ok else "damaged",
        format=checkpoint.format,
        files=found.files,
        bytes_read=found.bytes_read,
        seconds=round(seconds, 6),
        damages=tuple(_placed(checkpoint, found.damages)),
    )


def _placed(checkpoint: Checkpoint, damages: Sequence[Damage]) -> Iterator[DamagedPlace]:
    """The damage, with the tensors and boxes that it touches."""
    known: dict[tuple[str, str], DamagedBox] = {}
    if damages:
        for tensor in checkpoint.manifest.tensors:
            for item in read_plan(checkpoint.manifest, tensor, Box.whole(tensor.shape)):
                box = DamagedBox(tensor.key, item.source.offset, item.source.shape)
                known.setdefault((checkpoint.file_name(item.rank, item.name), item.name), box)
    older = {checkpoint.manifest.shown_name(file): file.rank for file in checkpoint.manifest.older}
    for damage in damages:
        rank = older.get(damage.file)
        boxes = (
            known.get((damage.file, name)) or _unnamed(checkpoint, damage.file, rank, name) for name in damage.entries
        )
        yield DamagedPlace(damage.file, damage.reason, tuple(boxes))


def _unnamed(checkpoint: Checkpoint, file: str, rank: int | None, entry: str) -> DamagedBox:
    """What is no box of a tensor: values; or what nobody uses of a file of an earlier save, whose user is this rank."""
    try:
        used = rank is None or checkpoint.file_name(rank, entry) == file
    except CheckpointError:
        used = True  # the header that would tell is damaged, too
    return DamagedBox(entry, used=used)
