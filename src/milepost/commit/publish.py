"""Committing: generations, create-if-absent, and the sweep of what can no longer matter.

A checkpoint exists when, and only when, a manifest exists. A save aims at the generation after the newest, writes its
data under a name of its own, and then creates that generation's manifest if it is absent. Whoever comes second is told.
After generation g is committed, every save that aimed at g or less can no longer succeed, so its data may be removed:
no clock and no lock is needed, and a save that is under way is never disturbed.
"""

import contextlib
import logging
import secrets

from milepost.core.limits import MAX_MANIFEST_BYTES
from milepost.core.manifest import (
    Manifest,
    generation_of,
    intended_generation,
    make_save_id,
    manifest_name,
    seal,
    unseal,
)
from milepost.core.ranks import pack_ranks
from milepost.data.collection_pause import CollectionPaused
from milepost.errors import (
    AlreadyExists,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    SaveConflict,
    StorageError,
    UnsafeCheckpoint,
    UnsupportedFormat,
)
from milepost.store import Store
from milepost.store.base import CLAIM

_log = logging.getLogger("milepost")
_TRIES = 20
MAX_GENERATION = 99_999_999
REMOVED = ".removed"
"""Behind a manifest's name: this generation is being removed; see `retention`."""


def generations(store: Store) -> list[int]:
    """The numbers of all manifests, newest first, without looking into them."""
    found = (generation_of(name) for name in store.list("manifest-"))
    return sorted((number for number in found if number is not None), reverse=True)


def aim(store: Store) -> tuple[int, str]:
    """The generation that a save should aim at, and a name for the attempt.

    Numbers that were only claimed, and those that are being removed, are passed over.
    """
    found = (generation_of(name.removesuffix(CLAIM).removesuffix(REMOVED)) for name in store.list("manifest-"))
    newest = max((number for number in found if number is not None), default=0)
    if newest >= MAX_GENERATION:
        raise InvalidRequest(f"{store.url} has reached generation {newest}, the last that has a name; save elsewhere")
    return newest + 1, make_save_id(newest + 1, secrets.token_hex(8))


def exists(store: Store) -> bool:
    """Whether there is a committed checkpoint."""
    return bool(generations(store))


def find(store: Store) -> tuple[int, bytes]:
    """The newest generation and the bytes of its manifest. Raises CheckpointNotFound."""
    for _ in range(_TRIES):
        number = next(iter(generations(store)), None)
        if number is None:
            raise CheckpointNotFound(f"there is no checkpoint at {store.url}. {_why_not(store)}")
        data = read_manifest(store, number)
        if data is not None:
            return number, data
        # Swept while we looked: there is a newer one, so look again.
    raise CheckpointNotFound(f"{store.url} changes too fast to be read; is it being saved to in a loop?")


def _why_not(store: Store) -> str:
    if any(name.endswith(REMOVED) for name in store.list("manifest-")):
        return "It was removed."
    leftovers = next(iter(store.list("data/")), None)
    return "It holds data of a save that never finished." if leftovers else "Nothing was saved here."


def read_manifest(store: Store, generation: int) -> bytes | None:
    """The bytes of a manifest, or None if there is none."""
    try:
        reader = store.reader(manifest_name(generation))
    except FileNotFoundError:
        return None
    try:
        if reader.size_bytes > MAX_MANIFEST_BYTES:
            raise CheckpointDamaged(
                f"{store.url}/{manifest_name(generation)} is absurdly large: {reader.size_bytes} bytes"
            )
        buffer = bytearray(reader.size_bytes)
        reader.read(0, [memoryview(buffer)])
        return bytes(buffer)
    finally:
        reader.close()


@CollectionPaused()
def parse(url: str, generation: int, data: bytes) -> Manifest:
    """Check and parse a manifest's bytes, with errors that say where it is."""
    where = f"{url}/{manifest_name(generation)}"
    try:
        manifest = unseal(data)
    except LookupError as error:
        raise UnsupportedFormat(f"{where}: {error.args[0]}. Update Milepost to read it.") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{where} is damaged: {error}") from None
    except MemoryError:
        raise UnsafeCheckpoint(f"{where} has {len(data)} bytes, and takes more memory to read than there is") from None
    if manifest.generation != generation:
        raise CheckpointDamaged(f"{where} is the manifest of generation {manifest.generation}; was it renamed?")
    return manifest


@CollectionPaused()
def publish(store: Store, manifest: Manifest) -> None:
    """Make the checkpoint exist. Raises SaveConflict if another save was first; nothing changes then.

    Raises StorageError if data that it names is not to be seen from here.
    """
    _look_for_data(store, manifest)
    try:
        store.create(manifest_name(manifest.generation), seal(manifest))
    except AlreadyExists:
        raise _beaten(store, manifest.generation) from None
    except FileNotFoundError:
        # What it was about to name was swept away under its hands.
        if _newest(store) >= manifest.generation:
            raise _beaten(store, manifest.generation) from None
        raise
    if _newest(store) > manifest.generation:
        # The name was free because its owner was replaced and swept, and so was this save's data. What is newest never goes.
        with contextlib.suppress(OSError, CheckpointError):
            store.delete(manifest_name(manifest.generation))
        raise _beaten(store, manifest.generation)


def _look_for_data(store: Store, manifest: Manifest) -> None:
    """A rank may have written elsewhere: to a disk of its own machine, or below a mount that is missing."""
    there = set(store.list(f"data/{manifest.save_id}/"))
    unseen = []
    for file in manifest.files:
        name = manifest.file_name(file.rank)
        if name not in there and not _can_be_opened(store, name):  # a listing may be old, in a network's file system
            unseen.append(file.rank)
    if not unseen:
        return
    if _newest(store) >= manifest.generation:
        raise _beaten(store, manifest.generation)  # which has swept it
    raise StorageError(
        f"what rank{'s' * (len(unseen) > 1)} {pack_ranks(unseen)} wrote to {store.url} cannot be seen from the rank that "
        "commits, so nothing was committed. Is that a place that all ranks share, and was it there all the time?"
    )


def _can_be_opened(store: Store, name: str) -> bool:
    try:
        store.reader(name).close()
    except FileNotFoundError:
        return False
    return True


def _newest(store: Store) -> int:
    return next(iter(generations(store)), 0)


def _beaten(store: Store, generation: int) -> SaveConflict:
    return SaveConflict(
        f"another job committed generation {generation} of {store.url} while this save was under way. "
        "Its checkpoint stands. Do two jobs write to one place?"
    )


def sweep(store: Store, manifest: Manifest) -> None:
    """Remove older generations, and data of saves that can no longer succeed. Failures are logged, never raised."""
    try:
        for name in _dead(store, manifest):
            store.delete(name)
    except (CheckpointError, OSError) as error:
        _log.warning("could not sweep old data at %s; the next save will: %s", store.url, error)


def _dead(store: Store, manifest: Manifest) -> list[str]:
    """Manifests first: data must not vanish from under one that still looks alive."""
    names = []
    for name in store.list("manifest-"):
        number = generation_of(name)
        helper = generation_of(name.split(".json")[0] + ".json") if number is None else None
        if (number is not None and number < manifest.generation) or (
            helper or manifest.generation + 1
        ) <= manifest.generation:
            names.append(name)
    for name in store.list("data/"):
        save_id = name.split("/")[1]
        aimed = intended_generation(save_id)
        if aimed is not None and aimed <= manifest.generation and save_id != manifest.save_id:
            names.append(name)
    return names
