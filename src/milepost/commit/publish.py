"""Publishing: one create-if-absent makes a checkpoint exist, and a sweep removes what can no longer matter.

After generation g is committed, every save that aimed at g or less can no longer succeed, so its data may be removed:
no clock and no lock is needed, and a save that is under way is never disturbed.
"""

import contextlib
import logging
from collections.abc import Collection, Iterable

from milepost.commit.beside import names_at
from milepost.commit.find import (
    REMOVED,
    can_be_opened,
    generations,
    generations_in,
    is_empty,
    is_overtaken,
    is_used,
    missing_objects,
    patiently,
    read_manifest,
    removals_in,
    was_overtaken,
)
from milepost.commit.signs import delete_unused
from milepost.core.manifest import Manifest, ShardFile, generation_of, manifest_name, seal
from milepost.core.ranks import pack_ranks
from milepost.core.save_id import intended_generation
from milepost.core.signs import save_at
from milepost.data.collection_pause import CollectionPaused
from milepost.data.read import place_of
from milepost.errors import AlreadyExists, CheckpointError, NoReply, NotDurable, SaveConflict, StorageError
from milepost.store import Store

_log = logging.getLogger("milepost")


@CollectionPaused()
def publish(store: Store, manifest: Manifest) -> Collection[str] | None:
    """Make the checkpoint exist. Gives what is at the place then, or None if that could not be seen.

    Raises SaveConflict if another save was first; nothing changes then. Raises StorageError if data that it names
    cannot be seen from this rank, and NoReply if the checkpoint may appear later.
    """
    _look_for_data(store, manifest)
    _create(store, manifest.generation, seal(manifest))
    is_old, names = _look_for_newer(store, manifest.generation)
    if is_old:
        # The name was free because the save that had it was replaced and swept, and this save's data with it.
        # The newest generation is never swept.
        with contextlib.suppress(OSError, CheckpointError):
            store.delete(manifest_name(manifest.generation))
        raise conflict(store, manifest.generation)
    return names


def _look_for_newer(store: Store, generation: int) -> tuple[bool, Collection[str] | None]:
    """Whether a newer generation is committed, and what is at the place. Never raises.

    A store that does not answer takes no commit back. If there is a newer one all the same, it looks as if it had come
    right after this one: it stands, and this one goes.
    """
    try:
        names = names_at(store)
        if store.traits.is_current:  # then the marker of a removal stays for a while: this number was used and removed
            return is_used(names, generation + 1) or generation in removals_in(names), names
        newer = generations_in(store, names)[:1] > [generation]
        return newer or can_be_opened(store, manifest_name(generation + 1)), names
    except (CheckpointError, OSError) as error:
        _log.warning(
            "generation %d is committed at %s, but whether another job has committed a newer one could not be seen: %s",
            generation, store.url, error,
        )  # fmt: skip
        return False, None


def _create(store: Store, generation: int, sealed: bytes) -> None:
    """Create the manifest of a generation. Raises SaveConflict or StorageError if this content is not there then."""
    try:
        store.create(manifest_name(generation), sealed)
    except NotDurable:
        raise
    except (CheckpointError, OSError) as error:
        # An error does not prove that nothing happened: the reply may have been lost. Is the manifest there ours?
        try:
            ours = _read_back(store, generation) == sealed
            reason = None if ours else _not_published(store, generation, error)
        except (CheckpointError, OSError):
            if isinstance(error, NoReply):
                raise _may_appear(store, generation, error) from error
            raise error from None  # the store does not answer: this is the first that was heard of it
        if ours:
            _make_durable(store, generation)
        elif reason is error:
            raise
        elif reason is not None:
            raise reason from error


def _read_back(store: Store, generation: int) -> bytes | None:
    """The manifest of this generation. One that is listed is given some time until it can be opened by its name."""

    def look() -> tuple[bytes | None] | None:
        data = read_manifest(store, generation)
        return (data,) if data is not None or generation not in generations(store) else None

    return (patiently(store, look) or (None,))[0]


def _make_durable(store: Store, generation: int) -> None:
    """Sync a manifest that is there though its creation failed: nobody may have synced it. Raises NotDurable."""
    if store.traits.is_current:
        return  # what is there is durable
    try:
        _sync(store, generation)
    except (CheckpointError, OSError) as error:
        # A caller that sees a failure must not find the checkpoint there.
        with contextlib.suppress(OSError, CheckpointError):
            store.delete(manifest_name(generation))
        raise NotDurable(f"{error}; it was taken back", errno=getattr(error, "errno", None)) from error


def _sync(store: Store, generation: int) -> None:
    """Make the names of manifests durable, by deleting one that nobody uses. Twice, if the first reply is lost."""
    unused = f"{manifest_name(generation)}.none"
    with contextlib.suppress(OSError, CheckpointError):
        return store.delete(unused, durable=True)
    return store.delete(unused, durable=True)


def _not_published(store: Store, generation: int, error: Exception) -> Exception:
    """Why a manifest could not be created: another save was first, or the store refused."""
    # Something has vanished, or is claimed: so there should be another save, which may not be seen yet.
    waits = isinstance(error, (FileNotFoundError, AlreadyExists))
    if was_overtaken(store, generation) if waits else is_overtaken(store, generation):
        # Where the name was not taken: another save committed, and swept what this manifest was about to be made from.
        return conflict(store, generation)
    if isinstance(error, AlreadyExists):
        return SaveConflict(
            f"another job has claimed generation {generation} of {store.url}, and is about to commit it or died. "
            "Nothing was committed here. Save again; do two jobs write to one place?"
        )
    if isinstance(error, NoReply):
        return _may_appear(store, generation, error)
    if isinstance(error, CheckpointError):
        return error
    number = error.errno if isinstance(error, OSError) else None
    return StorageError(f"cannot commit to {store.url}: {error}. Was it removed or renamed meanwhile?", errno=number)


def _may_appear(store: Store, generation: int, error: NoReply) -> NoReply:
    """The error of a save that may be committed later, when the request arrives after all."""
    return NoReply(
        f"whether generation {generation} of {store.url} is committed is not known: {error}. The request may still "
        f"take effect. Then the checkpoint appears, whole; its data stays until another save replaces it. "
        f"`milepost.open(path).generation` is {generation} or more when it has. Saving again is safe at any time.",
        errno=error.errno,
    )


def conflict(store: Store, generation: int) -> SaveConflict:
    """The error of a save that another one overtook."""
    return SaveConflict(
        f"another job committed generation {generation} of {store.url} while this save was under way. "
        "Its checkpoint stands. Do two jobs write to one place?"
    )


def _look_for_data(store: Store, manifest: Manifest) -> None:
    """Raise if a rank wrote elsewhere: to a disk of its own machine, or below a mount that is missing."""

    def look() -> str:
        if not _unseen(store, manifest):
            return "all is there"
        if is_overtaken(store, manifest.generation):
            return "overtaken"
        return "nothing is there" if is_empty(store) else ""

    seen = patiently(store, look)
    if seen == "overtaken":
        raise conflict(store, manifest.generation)  # the other save has swept the data
    unseen = _unseen(store, manifest) if seen != "all is there" else []
    if not unseen:
        return
    raise StorageError(
        f"what rank{'s' * (len(unseen) > 1)} {pack_ranks(unseen)} wrote to {store.url} cannot be seen from the rank "
        "that commits, so nothing was committed. Do all ranks share that place, and was it mounted all the time?"
    )


def _unseen(store: Store, manifest: Manifest) -> list[int]:
    """The ranks whose files are not there. The listing of a network file system may be old, so names are tried, too."""
    if store.traits.is_current:
        return list(missing_objects(store, manifest))
    there = set(store.list(f"data/{manifest.save_id}/"))

    def is_seen(file: ShardFile) -> bool:
        place = place_of(store, file)
        return all(part.name in there or can_be_opened(place, part.name) for part in manifest.parts_of(file))

    return sorted({file.rank for file in manifest.stored if not is_seen(file)})


def sweep(store: Store, manifest: Manifest, names: Collection[str] | None = None) -> None:
    """Remove older generations, and data of saves that can no longer succeed. Failures are logged, never raised.

    Files that other steps use stay. `names`: what is at the place, if it is known.
    """
    try:
        names = list(store.list("manifest-") if names is None else names)
        ended = _ended_names(manifest, names)
        markers = {name for name in ended if name.endswith(REMOVED)}
        store.delete(*(name for name in ended if name not in markers))
        # Now: data must not vanish while a manifest names it. On NFS, what a reader of this machine has open stays.
        stays = delete_unused(store, _dead_data(store, manifest))
        store.delete(*(markers - _mark(store, manifest, stays, markers)))
    except (CheckpointError, OSError) as error:
        _log.warning("could not sweep old data at %s; the next save will: %s", store.url, error)


def _ended_names(manifest: Manifest, names: Iterable[str]) -> list[str]:
    """Manifests of older generations; and temporary files, claims and markers of this one and of older ones."""
    found: list[str] = []
    for name in names:
        number = generation_of(name)
        helper = generation_of(name.split(".json")[0] + ".json") if number is None else None
        if (number is not None and number < manifest.generation) or (
            helper or manifest.generation + 1
        ) <= manifest.generation:
            found.append(name)
    return found


def _dead_data(store: Store, manifest: Manifest) -> list[str]:
    """The data of other saves, which can no longer succeed, and the signs at it."""
    # Not what lies in the folder of this save, which may be much; unless there are several others. (Some servers go on
    # listing folders that are empty, and each would cost a request.)
    dead = {save_at(name) for name in store.list("data/", shallow=True) if _is_dead_data(name, manifest)}
    data = store.list(f"data/{next(iter(dead))}" if len(dead) == 1 else "data/") if dead else ()
    return [name for name in data if _is_dead_data(name, manifest)]


def _is_dead_data(name: str, manifest: Manifest) -> bool:
    """Whether a name below `data/` belongs to another save, which can no longer succeed."""
    save_id = save_at(name)
    aimed = intended_generation(save_id)
    return aimed is not None and aimed <= manifest.generation and save_id != manifest.save_id


def _mark(store: Store, manifest: Manifest, stays: Collection[str], markers: Collection[str]) -> set[str]:
    """The marker by which those who remove steps find what stays of older generations; none if nothing stays."""
    newest = max(map(save_at, stays), default="")
    aimed = intended_generation(newest)
    if aimed is None or aimed >= manifest.generation or not store.traits.is_current:
        return set()
    marker = manifest_name(aimed) + REMOVED
    if marker not in markers:
        with contextlib.suppress(AlreadyExists):
            store.create(marker, newest.encode())
    return {marker}
