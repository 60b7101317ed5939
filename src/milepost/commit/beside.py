"""What `torch.distributed.checkpoint` (DCP) would still read at a place where Milepost saves: its index.

That is `.metadata`. Without it, DCP takes `__0.metadata`, the index of a rank that saved without the others.

Programs reuse names of folders. If both libraries save to one folder, each would go on reading its own checkpoint,
which may be the older one. So there is one rule:

* A commit records in its manifest each index that it found (name, size, checksum).
* Once the manifest is durable, that index is *retired*: it gets another name, under which DCP does not look. What it
  leads to stays, and so does its content: whoever wants it back renames it.
* A reader that finds an index which the manifest does not record knows that somebody saved with DCP after the commit.
  It refuses, and names both.

A crash between the second and the third leaves an index that the manifest records. So the manifest is the newer one,
and the next save retires the index. No clock is asked: times of files lie after a copy. DCP writes a new random id into
the index of each save, so that no two are equal.

Safetensors files beside a manifest are left alone and never compared: they are an export for other programs, and no
checkpoint to resume from.
"""

import contextlib
import logging
import re
from collections.abc import Callable, Collection, Iterator

import xxhash

from milepost.core.limits import GIB, MIB
from milepost.core.manifest import Manifest, ReplacedIndex
from milepost.data.read import read_bytes
from milepost.errors import AlreadyExists, AmbiguousCheckpoint, CheckpointError, UnsafeCheckpoint
from milepost.store import Reader, Store

_log = logging.getLogger("milepost")
METADATA = ".metadata"
"""The name of DCP's index."""
_OF_RANK = re.compile(r"__[0-9]+\.metadata")
_PICKLE = b"\x80"
_PIECE_BYTES = 4 * MIB
_MOST_BYTES = GIB
"""A larger file is no index: those of the largest models have some hundred MB. A file with holes could take hours."""


def names_at(store: Store) -> frozenset[str]:
    """What lies at the top of a place, by one listing: manifests, markers, the indices of DCP, `data/`."""
    return frozenset(store.list("", shallow=True))


def indices_beside(store: Store, names: Collection[str] | None = None) -> tuple[ReplacedIndex, ...]:
    """The indices of DCP checkpoints at this place; usually none. `names`: what `names_at` gave, if it is known."""
    names = names_at(store) if names is None else names
    found = sorted(name for name in names if _OF_RANK.fullmatch(name))
    if METADATA in names or not store.traits.is_current:  # an old listing may lack it
        found.insert(0, METADATA)
    indices = (_index(store, name) for name in found)
    return tuple(index for index in indices if index is not None)


def _index(store: Store, name: str) -> ReplacedIndex | None:
    """The index of this name, if there is one. Another file of this name is none."""
    try:
        with contextlib.closing(store.reader(name)) as reader:
            if not 0 < reader.size_bytes <= _MOST_BYTES or read_bytes(reader, 0, 1) != _PICKLE:
                return None
            hasher = xxhash.xxh3_128()
            for _, piece in _pieces(reader):
                hasher.update(piece)
            return ReplacedIndex(name, reader.size_bytes, hasher.hexdigest())
    except (FileNotFoundError, UnsafeCheckpoint):  # a folder, or a link
        return None


def refuse_newer_index(store: Store, names: Collection[str], manifest: Callable[[], Manifest]) -> None:
    """Raise AmbiguousCheckpoint if DCP saved here after this manifest was committed. `names`: what is at the place."""
    there = indices_beside(store, names)
    if not there:
        return
    ours = manifest()
    newer = ", ".join(index.name for index in there if index not in ours.replaced)
    if newer:
        raise AmbiguousCheckpoint(
            f"{store.url} holds two checkpoints: generation {ours.generation} of Milepost ({ours.created}), and one of "
            f"torch.distributed.checkpoint ({newer}) that was saved or copied there later. Milepost does not guess "
            f"which is meant. For the first, remove {newer} and the *.distcp files, or pass "
            f"milepost.store.AtGeneration({store.url!r}, {ours.generation}) as the path. For the second, remove the "
            "manifest-*.json files. A new save with Milepost replaces both."
        )


def retire(store: Store, manifest: Manifest) -> None:
    """Rename the index that a committed manifest records, so that DCP finds none. Failures are logged, never raised."""
    for index in manifest.replaced:
        retired = f"{index.name}.replaced-by-{manifest.generation:08d}"
        try:
            if _index(store, index.name) != index:
                continue  # somebody has saved there since: readers will see it
            _copy(store, index.name, retired)
            store.delete(index.name, durable=True)
        except (CheckpointError, OSError) as error:
            _log.warning(
                "%s holds an older checkpoint of torch.distributed.checkpoint, which torch would still load: %s could "
                "not be renamed; the next save tries again: %s", store.url, index.name, error,
            )  # fmt: skip
        else:
            _log.warning(
                "%s held a checkpoint of torch.distributed.checkpoint, which this save replaces. So that torch does "
                "not load it, its index is now called %s; its *.distcp files are still there", store.url, retired,
            )  # fmt: skip


def _copy(store: Store, name: str, other: str) -> None:
    with contextlib.closing(store.reader(name)) as reader:
        try:
            writer = store.writer(other, reader.size_bytes)
        except AlreadyExists:  # by a request whose reply was lost: the name has the number of our generation
            store.delete(other)
            writer = store.writer(other, reader.size_bytes)
        try:
            for at, piece in _pieces(reader):
                writer.write(at, [piece])
            writer.commit()
        except AlreadyExists:
            pass
        except BaseException:
            writer.abort()
            raise


def _pieces(reader: Reader) -> Iterator[tuple[int, bytes]]:
    for at in range(0, reader.size_bytes, _PIECE_BYTES):
        yield at, read_bytes(reader, at, min(_PIECE_BYTES, reader.size_bytes - at))
