"""Finding a checkpoint: the generations that are committed, and the manifest of the newest.

A checkpoint exists when, and only when, a manifest exists. The highest generation is the checkpoint. An older one that
a sweep has not removed yet is never taken in its place: it holds older weights.

Where listings are current (`Traits.is_current`), one shallow listing of the place says all: nothing is tried by name,
and nothing is waited for.
"""

import contextlib
import time
from collections.abc import Callable, Collection, Iterable, Iterator
from itertools import islice
from typing import NamedTuple, TypeVar

from milepost.commit.beside import names_at, refuse_newer_index
from milepost.core.limits import MAX_MANIFEST_BYTES
from milepost.core.manifest import Manifest, generation_of, manifest_name, unseal
from milepost.core.seal import is_sealed
from milepost.core.shardfile import FilePart
from milepost.data.collection_pause import CollectionPaused
from milepost.data.read import place_of, read_bytes
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, UnsafeCheckpoint, UnsupportedFormat
from milepost.store import AtGeneration, Store
from milepost.store.stopping import side_by_side

T = TypeVar("T")
PATIENCE_S = 5.0
"""How long a listing may show a manifest that cannot be opened, and no other, before a search gives up."""
_PAUSES_S = (0.005, 0.5)
_AHEAD = 16
"""How many generations above an old listing are tried by name."""
_LOOKS = 16
"""How many files are opened at the same time."""
_LOOKED_AT = 1024
_HEAD_BYTES = 512
"""The number of a manifest and the id of its save stand in so many bytes."""
REMOVED = ".removed"
"""Behind a manifest's name: this generation is being removed; see `removal.py`."""


class Newest(NamedTuple):
    """The newest generation: its number, the bytes of its manifest, the older ones, and what else is at the place."""

    generation: int
    data: bytes
    older: list[int]
    names: Collection[str]


def generations(store: Store) -> list[int]:
    """The numbers of all manifests, newest first, without looking into them."""
    return generations_in(store, store.list("manifest-"))


def generations_in(store: Store, names: Iterable[str]) -> list[int]:
    """The numbers of the manifests among the names at a place, newest first.

    Where listings are current, the marker of a removal ends its generation, and all before it: a manifest of those can
    only have come late. Elsewhere a marker may be listed that is gone, so there the manifest itself has to go.
    """
    names = list(names)
    ended = max(removals_in(names), default=0) if store.traits.is_current else 0
    found = (number for number in map(generation_of, names) if number is not None)
    return sorted((number for number in found if number > ended), reverse=True)


def removals_in(names: Iterable[str]) -> dict[int, str]:
    """The markers of removals among the names at a place, by generation."""
    marked = {generation_of(name.removesuffix(REMOVED)): name for name in names if name.endswith(REMOVED)}
    return {number: name for number, name in marked.items() if number is not None}


def newest_generation(store: Store) -> int:
    """The number of the newest manifest; 0 if there is none."""
    return next(iter(generations(store)), 0)


def can_be_opened(store: Store, name: str) -> bool:
    """Whether there is such an object. The listing of a network file system may be old; this looks the name up anew."""
    try:
        store.reader(name).close()
    except FileNotFoundError:
        return False
    return True


def is_there(store: Store, generation: int) -> bool:
    """Whether there is a manifest of this generation, by its name. One that cannot be read is there."""
    try:
        return can_be_opened(store, manifest_name(generation))
    except CheckpointError:
        return True


def is_current(store: Store, generation: int) -> bool:
    """Whether this generation is still the newest: it was neither replaced nor removed since it was opened."""
    return newest_generation(store) == generation and is_there(store, generation)


@contextlib.contextmanager
def told_if_gone(store: Store, generation: int, doing: str) -> Iterator[None]:
    """Inside, what is not as it was saved because the checkpoint is gone meanwhile is CheckpointNotFound, not damage.

    `generation`: 0 for another library's, not looked at again. `doing`: what it was opened for, such as "read".
    """
    try:
        yield
    except CheckpointDamaged as error:
        if not generation or is_current(store, generation):
            raise
        raise CheckpointNotFound(
            f"{store.url} was replaced or removed while it was {doing}. Try again, or name another step"
        ) from error


def is_newest(store: Store, manifest: Manifest) -> bool:
    """Whether the very save that made this manifest is still the newest checkpoint there. Where listings are current.

    Numbers begin again some time after a removal, so the id of the save is looked for, at the start of the manifest.
    """
    if generations_in(store, names_at(store))[:1] != [manifest.generation]:
        return False
    try:
        reader = store.reader(manifest_name(manifest.generation))
    except FileNotFoundError:
        return False
    try:
        head = read_bytes(reader, 0, min(reader.size_bytes, _HEAD_BYTES))
        return f'"{manifest.save_id}"'.encode() in head
    except FileNotFoundError:
        return False
    finally:
        reader.close()


def is_committed(store: Store, generation: int) -> bool:
    """Whether this generation is committed, or a newer one is. The listing may be old, so the name is tried, too."""
    if newest_generation(store) >= generation:
        return True
    return not store.traits.is_current and can_be_opened(store, manifest_name(generation))


def is_used(names: Collection[str], generation: int) -> bool:
    """Whether this generation or a newer one is, or was, committed: by the manifests and markers among these names."""
    found = {*map(generation_of, names), *removals_in(names)}
    return max((number for number in found if number is not None), default=0) >= generation


def is_overtaken(store: Store, generation: int) -> bool:
    """Like `is_committed`, for a store that may be seen as it was: names above are tried as well."""
    if store.traits.is_current:
        return is_used(list(store.list("manifest-")), generation)
    ahead = range(generation + 1, generation + _AHEAD)
    return is_committed(store, generation) or any(can_be_opened(store, manifest_name(number)) for number in ahead)


def was_overtaken(store: Store, generation: int) -> bool:
    """Like `is_overtaken`, where there are signs of another save. It may not be seen yet, so this waits.

    Not where nothing is left at all: then the place itself was removed or unmounted.
    """
    seen = patiently(store, lambda: is_overtaken(store, generation) or is_empty(store))
    return seen and is_overtaken(store, generation)


def is_empty(store: Store) -> bool:
    """Whether nothing is listed."""
    return next(iter(store.list("")), None) is None


def patiently(store: Store, look: Callable[[], T]) -> T:
    """What `look` gives once that is true, or at last: a network file system may show for a while what was before.

    It looks once where listings are current.
    """
    if store.traits.is_current:
        return look()
    give_up, pause = time.monotonic() + PATIENCE_S, _PAUSES_S[0]
    while not (found := look()) and time.monotonic() < give_up:
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])
    return found


def find(store: Store) -> tuple[int, bytes]:
    """The newest generation and the bytes of its manifest. Raises CheckpointNotFound.

    Raises AmbiguousCheckpoint if another library saved here after Milepost did, and CheckpointDamaged if the newest
    generation is not whole while an older one is.
    """
    while True:
        number, data, older, names = newest(store)
        refuse_newer_index(store, names, lambda: parse(store.url, number, data))  # noqa: B023  # called at once
        fault = _fault_of(store, number, data) if older else ""
        if not fault:
            return number, data
        if newest(store).generation == number:  # else it was replaced while we looked
            _refuse_damaged(store, fault, older)
            return number, data


def newest(store: Store) -> Newest:
    """The newest generation. Raises CheckpointNotFound.

    The listing of a network file system may be old, while a name that is opened is looked up anew. So names above the
    listed ones are tried as well, and a listing that leads nowhere is given some time.
    """
    give_up, pause = time.monotonic() + PATIENCE_S, _PAUSES_S[0]
    while True:
        names = names_at(store)
        listed = generations_in(store, names)
        found = newest_above(store, listed[0] if listed else 0, lambda number: read_manifest(store, number))
        if found is not None:
            return Newest(*found, [number for number in listed if number < found[0]], names)
        if not listed:
            raise CheckpointNotFound(_nothing(store, names))
        if time.monotonic() >= give_up:
            raise CheckpointNotFound(
                f"{store.url} lists {manifest_name(listed[0])}, which cannot be opened, and nothing newer was found in "
                f"{PATIENCE_S:g} s. It was removed and the listing of its file system is old, or it is being saved to "
                "in a loop and changes too fast to be read. Try again."
            )
        # It was swept after the listing, so there is a newer one; or the listing is old.
        time.sleep(pause)
        pause = min(2 * pause, _PAUSES_S[1])


def newest_above(store: Store, listed: int, look: Callable[[int], T | None]) -> tuple[int, T] | None:
    """The newest generation for which `look` finds something: the newest that is listed, or one just above it."""
    data = look(listed) if listed else None
    found = (listed, data) if data is not None else None
    if store.traits.is_current:
        return found
    number, last = listed, listed + (_AHEAD if listed and found is None else 1)
    while number < last:
        number += 1
        data = look(number)
        if data is not None:
            found, last = (number, data), number + 1
    return found


def _nothing(store: Store, names: Collection[str]) -> str:
    """Says that there is no checkpoint, and why."""
    if isinstance(store, AtGeneration):
        there = newest_generation(store.inner)
        return f"there is no generation {store.generation} at {store.url}{f'; the newest is {there}' if there else ''}."
    return f"there is no checkpoint at {store.url}. {_why_not(store, names)}"


def _why_not(store: Store, names: Collection[str]) -> str:
    if removals_in(names):
        return "It was removed."
    leftovers = next(iter(store.list("data/")), None)
    return "It holds data of a save that never finished." if leftovers else "Nothing was saved here."


def read_manifest(store: Store, generation: int) -> bytes | None:
    """The bytes of a manifest, or None if there is none, or none any more.

    What came over a network and does not fit its seal is asked for once more: it may have changed on its way.
    """
    data = _read_manifest_once(store, generation)
    if data is not None and store.traits.requests and not is_sealed(data):
        return _read_manifest_once(store, generation)
    return data


def _read_manifest_once(store: Store, generation: int) -> bytes | None:
    try:
        reader = store.reader(manifest_name(generation))
    except FileNotFoundError:
        return None
    try:
        if reader.size_bytes > MAX_MANIFEST_BYTES:
            raise CheckpointDamaged(
                f"{store.url}/{manifest_name(generation)} has {reader.size_bytes} bytes; "
                f"a manifest has at most {MAX_MANIFEST_BYTES}"
            )
        return read_bytes(reader, 0, reader.size_bytes)
    except FileNotFoundError:
        return None
    finally:
        reader.close()


@CollectionPaused()
def parse(url: str, generation: int, data: bytes, unsealed: Callable[[bytes], Manifest] = unseal) -> Manifest:
    """Check and parse a manifest's bytes, with errors that say where it is. `unsealed`: or `unseal_brief`."""
    where = f"{url}/{manifest_name(generation)}"
    try:
        manifest = unsealed(data)
    except LookupError as error:
        raise UnsupportedFormat(f"{where}: {error.args[0]}. Update Milepost to read it.") from None
    except ValueError as error:
        raise CheckpointDamaged(f"{where} is damaged: {error}") from None
    except MemoryError:
        raise UnsafeCheckpoint(f"{where} has {len(data)} bytes, and takes more memory to read than there is") from None
    if manifest.generation != generation:
        raise CheckpointDamaged(f"{where} is the manifest of generation {manifest.generation}; was it renamed?")
    return manifest


def look_whole(place: Store) -> Manifest:
    """The manifest of a checkpoint that looks whole: the manifest is valid, all files exist and have the right size.

    Reads no data; `Checkpoint.verify` does. Raises CheckpointNotFound or CheckpointDamaged.
    """
    manifest = parse(place.url, *find(place))
    look_at_files(place, manifest)
    return manifest


def lacks_files(place: Store) -> bool:
    """Whether a checkpoint has no manifest, or one whose files are not all there: as after, and during, a removal."""
    generation = newest_generation(place)
    data = read_manifest(place, generation) if generation else None
    if data is None:
        return True
    try:
        manifest = parse(place.url, generation, data)
    except CheckpointError:
        return False
    if place.traits.is_current:
        return bool(missing_objects(place, manifest))
    return not all(
        can_be_opened(place_of(place, file), part.name) for file in manifest.stored for part in manifest.parts_of(file)
    )


def missing_objects(place: Store, manifest: Manifest) -> dict[int, str]:
    """For each rank whose objects a listing of this save's data does not all show: the first that is missing."""
    there: dict[str, set[str]] = {}
    missing: dict[int, str] = {}
    for file in manifest.stored:
        folder = manifest.shown_name(file).rpartition("/")[0]
        if folder not in there:
            there[folder] = set(place_of(place, file).list(f"{manifest.name_of(file).rpartition('/')[0]}/"))
        gone = next((part.name for part in manifest.parts_of(file) if part.name not in there[folder]), "")
        if gone:
            missing.setdefault(file.rank, f"{folder}/{gone.rpartition('/')[2]}")
    return missing


def look_at_files(place: Store, manifest: Manifest) -> None:
    """Raise CheckpointDamaged if a file is missing or has another size than was saved."""
    if place.traits.is_current and place.traits.part_bytes:  # objects are there whole, or not at all
        for name in missing_objects(place, manifest).values():
            raise CheckpointDamaged(f"{place.url}/{name} is missing")
        return

    def look(one: tuple[Store, FilePart]) -> None:
        place, part = one
        try:
            reader = place.reader(part.name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{place.url}/{part.name} is missing") from None
        size_bytes = reader.size_bytes
        reader.close()
        if size_bytes != part.size_bytes:
            raise CheckpointDamaged(
                f"{place.url}/{part.name} has {size_bytes} bytes and was saved with {part.size_bytes}"
            )

    parts = ((place_of(place, file), part) for file in manifest.stored for part in manifest.parts_of(file))
    while some := list(islice(parts, _LOOKED_AT)):  # some at a time: a damaged manifest may claim any number
        side_by_side(look, some, _LOOKS)


def _fault_of(store: Store, generation: int, data: bytes) -> str:
    """Why a generation is not whole; empty if it looks whole. Other errors are left to those who use it."""
    try:
        look_at_files(store, parse(store.url, generation, data))
    except CheckpointDamaged as error:
        return str(error)
    except CheckpointError:
        return ""
    return ""


def _refuse_damaged(store: Store, fault: str, older: list[int]) -> None:
    """Raise CheckpointDamaged, and name the newest older generation that is whole; return if there is none."""
    for number in older:
        data = read_manifest(store, number)
        if data is not None and not _fault_of(store, number, data):
            raise CheckpointDamaged(
                f"{fault}. Generation {number}, which is older, is still there and looks whole. It is not loaded "
                f"unless it is asked for: pass milepost.store.AtGeneration({store.url!r}, {number}) as the path to "
                "open or load it."
            )
