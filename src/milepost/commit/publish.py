"""Publishing: one create-if-absent makes a checkpoint exist, and a sweep removes what can no longer matter.

After generation g is committed, every save that aimed at g or less can no longer succeed, so its data may be removed:
no clock and no lock is needed, and a save that is under way is never disturbed.
"""

import contextlib
import logging
from collections.abc import Iterable

from milepost.commit.find import can_be_opened, newest_generation, read_manifest
from milepost.core.manifest import Manifest, generation_of, intended_generation, manifest_name, seal
from milepost.core.ranks import pack_ranks
from milepost.data.collection_pause import CollectionPaused
from milepost.errors import AlreadyExists, CheckpointError, NotDurable, SaveConflict, StorageError
from milepost.store import Store

_log = logging.getLogger("milepost")


@CollectionPaused()
def publish(store: Store, manifest: Manifest) -> None:
    """Make the checkpoint exist. Raises SaveConflict if another save was first; nothing changes then.

    Raises StorageError if data that it names cannot be seen from this rank.
    """
    _look_for_data(store, manifest)
    _create(store, manifest.generation, seal(manifest))
    if newest_generation(store) > manifest.generation:
        # The name was free because the save that had it was replaced and swept, and this save's data with it.
        # The newest generation is never swept.
        with contextlib.suppress(OSError, CheckpointError):
            store.delete(manifest_name(manifest.generation))
        raise conflict(store, manifest.generation)


def _create(store: Store, generation: int, sealed: bytes) -> None:
    """Create the manifest of a generation. Raises SaveConflict or StorageError if this content is not there then."""
    try:
        store.create(manifest_name(generation), sealed)
    except NotDurable:
        raise
    except (CheckpointError, OSError) as error:
        # An error does not prove that nothing happened: the reply may have been lost. Is the manifest there ours?
        try:
            newest = newest_generation(store)
            if read_manifest(store, generation) == sealed:
                return
        except (CheckpointError, OSError):
            raise error from None  # the store does not answer: this is the first that was heard of it
        reason = _not_published(store, generation, newest, error)
        if reason is error:
            raise
        raise reason from error


def _not_published(store: Store, generation: int, newest: int, error: Exception) -> Exception:
    """Why a manifest could not be created: another save was first, or the store refused."""
    if newest >= generation:
        # Where the name was not taken: another save committed, and swept what this manifest was about to be made from.
        return conflict(store, generation)
    if isinstance(error, AlreadyExists):
        return SaveConflict(
            f"another job has claimed generation {generation} of {store.url}, and is about to commit it or died. "
            "Nothing was committed here. Save again; do two jobs write to one place?"
        )
    if isinstance(error, CheckpointError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    return StorageError(f"cannot commit to {store.url}: {error}. Was it removed or renamed meanwhile?", errno=number)


def conflict(store: Store, generation: int) -> SaveConflict:
    """The error of a save that another one overtook."""
    return SaveConflict(
        f"another job committed generation {generation} of {store.url} while this save was under way. "
        "Its checkpoint stands. Do two jobs write to one place?"
    )


def _look_for_data(store: Store, manifest: Manifest) -> None:
    """Raise if a rank wrote elsewhere: to a disk of its own machine, or below a mount that is missing."""
    there = set(store.list(f"data/{manifest.save_id}/"))
    unseen = []
    for file in manifest.files:
        name = manifest.file_name(file.rank)
        if name not in there and not can_be_opened(store, name):  # the listing of a network file system may be old
            unseen.append(file.rank)
    if not unseen:
        return
    if newest_generation(store) >= manifest.generation:
        raise conflict(store, manifest.generation)  # the other save has swept the data
    raise StorageError(
        f"what rank{'s' * (len(unseen) > 1)} {pack_ranks(unseen)} wrote to {store.url} cannot be seen from the rank "
        "that commits, so nothing was committed. Do all ranks share that place, and was it mounted all the time?"
    )


def sweep(store: Store, manifest: Manifest) -> None:
    """Remove older generations, and data of saves that can no longer succeed. Failures are logged, never raised."""
    try:
        manifests, data = _dead(store, manifest)
        for name in manifests:
            store.delete(name)
        delete_all(store, data)
    except (CheckpointError, OSError) as error:
        _log.warning("could not sweep old data at %s; the next save will: %s", store.url, error)


def delete_all(store: Store, names: Iterable[str]) -> None:
    """Delete what can be deleted, and raise the first error after that.

    One file that stays must not keep the others: on NFS a file that a reader of this machine has open stays until that
    reader closes it.
    """
    errors = []
    for name in names:
        try:
            store.delete(name)
        except (CheckpointError, OSError) as error:
            errors.append(error)
    if errors:
        raise errors[0]


def _dead(store: Store, manifest: Manifest) -> tuple[list[str], list[str]]:
    """The names to remove: manifests, and then data. Data must not vanish while a manifest still names it."""
    manifests, data = [], []
    for name in store.list("manifest-"):
        number = generation_of(name)
        helper = generation_of(name.split(".json")[0] + ".json") if number is None else None
        if (number is not None and number < manifest.generation) or (
            helper or manifest.generation + 1
        ) <= manifest.generation:
            manifests.append(name)
    for name in store.list("data/"):
        save_id = name.split("/")[1]
        aimed = intended_generation(save_id)
        if aimed is not None and aimed <= manifest.generation and save_id != manifest.save_id:
            data.append(name)
    return manifests, data
