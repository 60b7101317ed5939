"""Finding a checkpoint: the generations that are committed, and the manifest of the newest.

A checkpoint exists when, and only when, a manifest exists. The highest generation is the checkpoint.
"""

from concurrent.futures import ThreadPoolExecutor

from milepost.core.limits import MAX_MANIFEST_BYTES
from milepost.core.manifest import Manifest, ShardFile, generation_of, manifest_name, unseal
from milepost.data.collection_pause import CollectionPaused
from milepost.data.read import read_bytes
from milepost.errors import CheckpointDamaged, CheckpointNotFound, UnsafeCheckpoint, UnsupportedFormat
from milepost.store import Store

_TRIES = 20
_LOOKS = 16
"""How many files are opened at the same time."""
REMOVED = ".removed"
"""Behind a manifest's name: this generation is being removed; see `removal.py`."""


def generations(store: Store) -> list[int]:
    """The numbers of all manifests, newest first, without looking into them."""
    found = (generation_of(name) for name in store.list("manifest-"))
    return sorted((number for number in found if number is not None), reverse=True)


def newest_generation(store: Store) -> int:
    """The number of the newest manifest; 0 if there is none."""
    return next(iter(generations(store)), 0)


def find(store: Store) -> tuple[int, bytes]:
    """The newest generation and the bytes of its manifest. Raises CheckpointNotFound."""
    for _ in range(_TRIES):
        number = newest_generation(store)
        if number == 0:
            raise CheckpointNotFound(f"there is no checkpoint at {store.url}. {_why_not(store)}")
        data = read_manifest(store, number)
        if data is not None:
            return number, data
        # It was swept after the listing, so there is a newer one: look again.
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
                f"{store.url}/{manifest_name(generation)} has {reader.size_bytes} bytes; "
                f"a manifest has at most {MAX_MANIFEST_BYTES}"
            )
        return read_bytes(reader, 0, reader.size_bytes)
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


def look_whole(place: Store) -> Manifest:
    """The manifest of a checkpoint that looks whole: the manifest is valid, all files exist and have the right size.

    Reads no data; `Checkpoint.verify` does. Raises CheckpointNotFound or CheckpointDamaged.
    """
    manifest = parse(place.url, *find(place))

    def look(file: ShardFile) -> None:
        name = manifest.file_name(file.rank)
        try:
            reader = place.reader(name)
        except FileNotFoundError:
            raise CheckpointDamaged(f"{place.url}/{name} is missing") from None
        size_bytes = reader.size_bytes
        reader.close()
        if size_bytes != file.size_bytes:
            raise CheckpointDamaged(f"{place.url}/{name} has {size_bytes} bytes and was saved with {file.size_bytes}")

    with ThreadPoolExecutor(_LOOKS) as pool:
        for _ in pool.map(look, manifest.files):
            pass
    return manifest
