"""Reading a run for the page: which steps there are, and the part of each manifest that differs from step to step."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from milepost.checkpoint import files_at
from milepost.commit.find import find
from milepost.commit.nesting import folder_in
from milepost.core.history import PhaseTime
from milepost.core.manifest import Manifest, OlderFile, ShardFile
from milepost.core.seal import is_sealed
from milepost.core.statistics import Health
from milepost.core.wire import Wire
from milepost.data.read import Files
from milepost.errors import CheckpointError, CheckpointNotFound
from milepost.inspection.runs import PlaceSummary, StepSummary
from milepost.steps.survey import each
from milepost.store import Store

_AT_ONCE = 16
"""How many manifests are read at the same time, and held."""
ABSENT = ("unfinished", "removed")
"""The states of steps that have no manifest."""


@dataclass(frozen=True, slots=True)
class FoundStep:
    """A step before it is read: its folder and its number, and what `look_at` tells of it, where that was asked."""

    name: str
    step: int | None
    is_unfinished: bool = False
    summary: StepSummary | None = None


@dataclass(frozen=True, slots=True)
class ReadStep:
    """A step with the bytes of its manifest, or the files of another library's checkpoint, or why it has neither.

    `place`: where its own files are.
    """

    found: FoundStep
    url: str
    generation: int = 0
    data: bytes = b""
    files: Files | None = None
    place: Store | None = None
    fault: str = ""


def steps_of(place: PlaceSummary) -> list[FoundStep]:
    """The steps of a run that was looked at, newest first."""
    return [FoundStep(one.name, one.step, one.state in ABSENT, one) for one in reversed(place.steps)]


def read_steps(root: Store, found: list[FoundStep]) -> Iterator[ReadStep]:
    """The steps with their manifests, some of them at a time. One that cannot be read has a fault; none raises."""

    def look(index: int) -> ReadStep:
        one = found[index]
        place = store_of_step(root, one.name)
        if one.is_unfinished:
            return ReadStep(one, place.url)
        try:
            try:
                return ReadStep(one, place.url, *find(place), place=place)
            except CheckpointNotFound:
                return ReadStep(one, place.url, files=files_at(place))
        except CheckpointError as error:
            return ReadStep(one, place.url, fault=str(error))

    for start in range(0, len(found), _AT_ONCE):
        yield from each(root, look, range(start, min(start + _AT_ONCE, len(found))))


def store_of_step(root: Store, name: str) -> Store:
    """The store of a step in a folder, or in a file, of this name. `.` is the root itself."""
    return root if name == "." else folder_in(root, name)


class Rest(msgspec.Struct, frozen=True):
    """A manifest whose structure, values and statistics are not parsed yet."""

    generation: int
    save_id: str
    created: str
    writer: str
    world: int
    block_bytes: int
    metadata: Any
    layouts: msgspec.Raw
    tensors: msgspec.Raw
    tree: msgspec.Raw
    per_rank: msgspec.Raw
    values: msgspec.Raw
    files: tuple[ShardFile, ...]
    timings: tuple[PhaseTime, ...] = ()
    statistics: msgspec.Raw = msgspec.Raw(b"[]")
    health: Health | None = None
    older: tuple[OlderFile, ...] = ()

    @property
    def digest(self) -> bytes:
        """The same for manifests that describe the same structure."""
        digest = xxhash.xxh3_128()
        for part in (self.layouts, self.tensors, self.tree, self.per_rank):
            digest.update(memoryview(part))
            digest.update(b"\0")
        return digest.digest()


_REST = Wire.json(Rest)


def rest_of(data: bytes) -> Rest:
    """What differs from step to step. Raises ValueError for bytes that are no whole manifest."""
    if not is_sealed(data):
        raise ValueError("its checksum does not fit its content")
    return _REST.unpack(data)


def rest_of_manifest(manifest: Manifest) -> Rest:
    """The same of a manifest that was parsed, or that was made for a checkpoint of another library."""
    return _REST.unpack(msgspec.json.encode(manifest))
