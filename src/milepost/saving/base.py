"""The base of a save: the committed checkpoint whose unchanged data is not written again."""

import contextlib
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple, Protocol, runtime_checkable

import msgspec
import xxhash

from milepost.commit.attempt import Attempt
from milepost.commit.find import find, is_newest, parse, read_manifest
from milepost.commit.signs import SignTarget
from milepost.core.box import Box
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import Manifest, unseal_brief
from milepost.data.reuse import NOTHING, KeepTarget, LinkTarget, ReuseBase, Reused, ReuseRules
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import EntryToWrite
from milepost.errors import CheckpointError, CheckpointNotFound
from milepost.store import LocalStore, Store
from milepost.store.read_only import refuse_read_only

_log = logging.getLogger("milepost")


@runtime_checkable
class BaseSource(Protocol):
    """Says which checkpoint a save is based on. Goes to the writing process by pickle."""

    def find(self) -> str | None:
        """On the coordinator: the name of the checkpoint, for `at`. None if there is none yet."""

    def at(self, name: str) -> Store:
        """On every rank: the store of the checkpoint of this name."""


@dataclass(frozen=True, slots=True)
class FixedBase:
    """The checkpoint at one place."""

    store: Store

    def find(self) -> str | None:
        """It has no name."""
        return ""

    def at(self, name: str) -> Store:
        """The place."""
        del name
        return self.store


class BaseAim(msgspec.Struct, frozen=True, array_like=True):
    """Which checkpoint all ranks take as the base: its name, its generation, and the digest of its manifest."""

    name: str
    generation: int
    digest: bytes


class Entries(NamedTuple):
    """What a rank has to write, and the tensor and box of each entry that is part of one, by its name."""

    entries: Sequence[EntryToWrite]
    boxes: dict[str, tuple[str, Box]]


def choose_base(source: BaseSource | None) -> BaseAim | None:
    """On the coordinator: the checkpoint that all ranks take as the base; None if there is none that can be one."""
    try:
        name = source.find() if source is not None else None
        if source is None or name is None:
            return None
        store = source.at(name)
        refuse_read_only(store)  # from there nothing can be shared, and it may be slow to answer
        generation, data = find(store)
        return BaseAim(name, generation, xxhash.xxh3_128_digest(data)) if _is_fit(store, generation, data) else None
    except CheckpointNotFound:
        with contextlib.suppress(CheckpointError, OSError):
            _tell_of_none(source)
        return None
    except (CheckpointError, OSError) as error:
        _log.warning("there is no base for this save, so all data is written: %s", error)
        return None


def _tell_of_none(source: BaseSource | None) -> None:
    """Say that there is no checkpoint to share with: loudly where a folder holds something else."""
    if not isinstance(source, FixedBase):
        return
    store = source.store
    there = isinstance(store, LocalStore) and (store.root.is_file() or next(store.list("", shallow=True), None))
    level = logging.WARNING if there else logging.INFO
    _log.log(level, "%s is no checkpoint of Milepost that a save could share data with; all is written", store.url)


def _is_fit(store: Store, generation: int, data: bytes) -> bool:
    return parse(store.url, generation, data, unseal_brief).block_bytes == BLOCK_BYTES


def reuse(
    source: BaseSource | None,
    aim: BaseAim | None,
    entries: Entries,
    attempt: Attempt,
    rules: ReuseRules,
    transfer: Transfer,
    meter: Meter,
) -> Reused:
    """What this rank need not write, because the base has it. Nothing where the base cannot be read."""
    if source is None or aim is None:
        return NOTHING
    try:
        store = source.at(aim.name)
        manifest = _manifest(store, aim)
    except (CheckpointError, OSError) as error:
        _log.warning("the base of this save cannot be read, so all data is written: %s", error)
        return NOTHING
    if manifest is None:
        return NOTHING  # it was replaced or removed since the coordinator saw it
    target = _target(attempt, manifest)
    return ReuseBase(store, manifest, attempt.rank).choose(*entries, rules, transfer, meter, target)


def _target(attempt: Attempt, base: Manifest) -> KeepTarget:
    """How this kind of store keeps files of the base: it has second names for them, or they get signs."""
    name = attempt.store, attempt.aim.save_id, attempt.rank
    if not attempt.store.traits.is_current:
        return LinkTarget(*name)
    return SignTarget(*name, partial(is_newest, manifest=base))


def _manifest(store: Store, aim: BaseAim) -> Manifest | None:
    data = read_manifest(store, aim.generation)
    if data is None or xxhash.xxh3_128_digest(data) != aim.digest:
        return None
    return parse(store.url, aim.generation, data)
