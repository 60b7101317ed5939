"""Whether two checkpoints hold the same, told without reading their data.

They do if their manifests say the same, but for the place, and their files have the same entries and tables of
checksums. A copy made by other means, and one in parts, is equal, too.
"""

from msgspec import structs

from milepost.commit.find import look_at_files
from milepost.core.manifest import Manifest
from milepost.core.reuse import id_of
from milepost.core.shardfile import Entry
from milepost.data.read import Files, VerifiedFile
from milepost.errors import CheckpointDamaged
from milepost.store import Store
from milepost.store.stopping import side_by_side

_AT_ONCE = 8


def holds_the_same(source: Files, target: Files, place: Store) -> bool:
    """Whether the checkpoint `target`, which is at `place`, looks whole and holds what `source` holds.

    Raises CheckpointDamaged for a file of `source` only.
    """
    if _told(source.manifest) != _told(target.manifest):
        return False
    try:
        look_at_files(place, target.manifest)
    except CheckpointDamaged:
        return False
    at_once = min(source.traits.requests or _AT_ONCE, target.traits.requests or _AT_ONCE)
    return all(side_by_side(lambda number: _same_file(source, target, number), source.numbers, at_once))


def _told(manifest: Manifest) -> tuple[Manifest, list[object]]:
    """What a manifest says of its content, and not of the place and the objects that it is stored in."""
    files: list[object] = [(file.rank, manifest.parts_of(file).data_bytes) for file in manifest.files]
    older = [(file.rank, id_of(file, manifest), manifest.parts_of(file).data_bytes) for file in manifest.older]
    bare = structs.replace(manifest, generation=0, save_id="", files=(), older=(), replaced=())
    return bare, [*files, *older]


def _same_file(source: Files, target: Files, number: int) -> bool:
    mine = source.make(number)
    try:
        theirs = target.make(number)
    except CheckpointDamaged:
        return False
    finally:
        mine.close()
    theirs.close()
    return _entries(mine) == _entries(theirs) and mine.table == theirs.table and mine.older == theirs.older


def _entries(file: VerifiedFile) -> list[tuple[str, Entry]]:
    return list(file.header.entries.items())  # in their order
