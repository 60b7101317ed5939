"""Removing a checkpoint: it ceases to exist in one step, and then its data goes.

A removal has this order:

    1. what older saves left is swept, so that nothing older becomes visible in step 3
    2. a marker, `manifest-<generation>.json.removed`, is created: it holds the id of the save that is removed
    3. that save's manifest is deleted: from here on there is no checkpoint
    4. once that is durable, that save's data is deleted
    5. the marker is deleted; where requests can take effect late, that comes later (see below)

So a checkpoint that has a manifest has its data, after a power cut too. The marker and the sweep are durable before
step 3, because creating the marker syncs the folder. The removal of the manifest is durable before step 4. The later
steps need no sync.

A removal that was cut short left its marker, and the next removal finishes it. A folder without manifest and without
marker is a save under way, or one that died, and is never touched. A marker names one save id, which no other save ever
has, so a save that runs in the same folder loses nothing; and `take_aim` passes marked generations over.

In an object store a request can take effect after its sender gave up, or sent it again. Then the deletion of step 3
could hit the manifest of a newer save, if that had the same number; and a manifest whose creation got no reply could
appear when its data is gone. So there the marker stays for `LATE_S`: no save gets its number meanwhile, and a marked
generation and those before it are no checkpoints, whoever creates their manifests. `forget_removal` ends that, unless
such a manifest has come: it would be a checkpoint without data. `finish_removal` deletes it first, and the marker stays
for as long again.

Where other steps use files of the save that goes (see `signs.py`), those files stay, and the marker for as long as they
do. `free_unused` looks at them again.
"""

import logging
from collections.abc import Iterable
from contextlib import suppress
from typing import NamedTuple

from milepost.commit.beside import names_at
from milepost.commit.find import REMOVED, generations_in, is_there, newest, parse, read_manifest, removals_in
from milepost.commit.publish import sweep
from milepost.commit.signs import Notes, delete_ended, delete_unused, ended_data
from milepost.core.manifest import generation_of, manifest_name
from milepost.core.save_id import intended_generation
from milepost.core.signs import save_at
from milepost.data.read import read_bytes
from milepost.errors import AlreadyExists, CheckpointDamaged, CheckpointNotFound, StorageError
from milepost.events.operation import Operation, operating, phasing
from milepost.store import Store

_log = logging.getLogger("milepost")
_MAX_MARKER_BYTES = 100
_TRIES = 4
"""How often a marker is created that another job, which removes the same checkpoint, sweeps away."""
LATE_S = 3600.0
"""A request that was sent so long ago takes effect no more: S3 and Azure refuse one after 15 minutes."""


class Removal(NamedTuple):
    """What a removal left: its marker, which stays in an object store, and whether it left data that others use."""

    marker: str
    leaves_data: bool


def remove_checkpoint(place: Store, *, step: int | None = None) -> Removal:
    """Remove the checkpoint at `place`, in the order that the module describes. Raises StorageError if it is in use.

    What is left: see `forget_removal` and `free_unused`. `step`: for those who listen.
    """
    with operating("remove", place.url, step=step) as operation, phasing("removing"):
        return _remove(place, operation)


def _remove(place: Store, operation: Operation) -> Removal:
    generation, data, _, names = newest(place)
    manifest = parse(place.url, generation, data)
    sweep(place, manifest, names)
    there = generations_in(place, names_at(place))
    if not there:
        raise CheckpointNotFound(f"{place.url} was removed by another job")
    if there != [generation]:
        raise StorageError(f"{place.url} is being saved to, or older manifests there cannot be deleted; it stays")
    marker = _mark(place, generation, manifest.save_id)
    if place.traits.is_current:  # the manifest is the one that was read: its number is not used again
        place.delete(manifest_name(generation))
        leaves_data = delete_ended(place, generation)
    else:
        leaves_data = finish_removal(place, [marker])
    operation.remove(generation, sum(file.size_bytes for file in manifest.files))
    return Removal(marker, leaves_data)


def _mark(place: Store, generation: int, save_id: str) -> str:
    """Create the marker of a removal, and give its name. Raises CheckpointNotFound if another job removed it first."""
    marker = manifest_name(generation) + REMOVED
    for _ in range(_TRIES):
        try:
            place.create(marker, save_id.encode())
        except AlreadyExists:
            return marker  # another job removes it too
        except FileNotFoundError:  # that job swept what was to be the marker, or removed the folder
            if not is_there(place, generation):
                raise CheckpointNotFound(f"{place.url} was removed by another job") from None
        else:
            return marker
    raise StorageError(f"{place.url} cannot be removed: what is created there is gone at once")


def remove_unfinished(place: Store, *, step: int | None = None) -> Removal | None:
    """Remove the data of saves that never finished, where there is no checkpoint. No save may be under way there.

    The marker stays in an object store: a manifest of theirs that comes late is no checkpoint. `step`: for those who
    listen. None where there is nothing to remove.
    """
    names = names_at(place)
    aims = {name: intended_generation(save_at(name)) or 0 for name in place.list("data/")}
    data = [name for name, aim in aims.items() if aim]
    if not data or generations_in(place, names) or removals_in(names):
        return None
    if not place.traits.is_current and any(is_there(place, aim) for aim in set(aims.values()) if aim):
        return None  # the listing is old: it was committed
    newest_data = max(data, key=aims.__getitem__)
    marker = manifest_name(aims[newest_data]) + REMOVED
    with operating("remove", place.url, step=step), phasing("removing"):
        if place.traits.is_current:
            with suppress(AlreadyExists):  # by a request whose reply was lost, or another job removes it too
                place.create(marker, save_at(newest_data).encode())
            # Listed anew: one of these saves may have been committed late, and been the base of another, until now.
            leaves_data = delete_ended(place, aims[newest_data])
        else:  # a manifest that was taken back must not come back after a power cut, when its data is gone
            place.delete(f"{marker}.none", durable=True)
            leaves_data = bool(delete_unused(place, data))
        place.delete(*(name for name in names if name.startswith("manifest-")))
    return Removal(marker, leaves_data)


def free_unused(place: Store, markers: Iterable[str], notes: Notes) -> bool:
    """Delete what removals left because other steps used it, if none does now. Whether some of it stays."""
    generations = (generation_of(marker.removesuffix(REMOVED)) for marker in markers)
    return delete_ended(place, max(number or 0 for number in generations), notes)


def forget_removal(place: Store, marker: str) -> None:
    """Delete the marker of a removal in an object store, which was finished at least `LATE_S` ago.

    Not if a manifest that it ends has come late, see `finish_removal`; and not while data stays that other steps use.
    """
    save_id, generation = _marked(place, marker), generation_of(marker.removesuffix(REMOVED))
    if save_id is None or generation is None or intended_generation(save_id) != generation:
        return
    names = names_at(place)
    if not _ended(names, generation) and not ("data/" in names and ended_data(place, generation)):
        place.delete(marker)


def remove_all_generations(place: Store) -> None:
    """Remove every generation, also damaged ones, because something else has taken their place."""
    numbers = generations_in(place, names_at(place))
    for number in reversed(numbers):  # the newest last: an older one must not become the checkpoint
        place.delete(manifest_name(number), durable=number == numbers[0])
    if numbers:
        delete_ended(place, numbers[0])


def finish_removal(place: Store, markers: Iterable[str]) -> bool:
    """Finish the removals that these markers stand for. May run twice, and in two jobs at once.

    In an object store the markers stay; see `forget_removal`. Whether data stays that other steps use.
    """
    leaves_data = False
    for marker in markers:
        generation = generation_of(marker.removesuffix(REMOVED))
        save_id = _marked(place, marker)
        if generation is None or save_id is None:
            continue
        if intended_generation(save_id) != generation:
            _log.warning("%s/%s is not a marker of Milepost, and is ignored", place.url, marker)
        elif place.traits.is_current:
            place.delete(*_ended(names_at(place), generation))
            leaves_data |= delete_ended(place, generation)
        else:
            leaves_data |= _finish_durably(place, marker, generation, save_id)
    return leaves_data


def _finish_durably(place: Store, marker: str, generation: int, save_id: str) -> bool:
    """Delete the manifest and the data of a save in a folder, and then the marker. Whether data stays, and the marker.

    Durably: a power cut that brought back a manifest without its data would leave a step that is listed and cannot be
    loaded. Also if the manifest is gone already: the process that deleted it may have died before the sync. Then an
    unused name is deleted, for its sync.
    """
    belongs = _belongs(place, generation, save_id)
    place.delete(manifest_name(generation) if belongs else f"{marker}.none", durable=True)
    # Signs are in a folder that is a copy of one in an object store.
    data = [name for name in place.list(f"data/{save_id}") if save_at(name) == save_id]
    leaves_data = bool(delete_unused(place, data))
    place.delete(*place.list(f"{marker}."))
    if not leaves_data:
        place.delete(marker)
    return leaves_data


def _ended(names: Iterable[str], generation: int) -> list[str]:
    """The manifests among these names that the marker of this generation ends: of this one, and of those before it."""
    numbers = {name: generation_of(name) for name in names}
    return [name for name, number in numbers.items() if number is not None and number <= generation]


def _marked(place: Store, marker: str) -> str | None:
    """The save id in a marker, or None if there is no marker any more."""
    try:
        reader = place.reader(marker)
    except FileNotFoundError:
        return None
    try:
        return read_bytes(reader, 0, min(reader.size_bytes, _MAX_MARKER_BYTES)).decode("ascii", "replace")
    except FileNotFoundError:
        return None
    finally:
        reader.close()


def _belongs(place: Store, generation: int, save_id: str) -> bool:
    """Whether the manifest of this generation is that of this save. A damaged one is: the marker came first."""
    data = read_manifest(place, generation)
    if data is None:
        return False
    try:
        return parse(place.url, generation, data).save_id == save_id
    except CheckpointDamaged:
        return True
