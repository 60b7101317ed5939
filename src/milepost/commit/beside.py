"""What `torch.distributed.checkpoint` (DCP) would still read at a place where Milepost saves: its index, `.metadata`.

Programs reuse names of folders. If both libraries save to one folder, each would go on reading its own checkpoint,
which may be the older one. So there is one rule:

* A commit records in its manifest the index that it found (name, size, checksum).
* Once the manifest is durable, that index is *retired*: it gets another name, under which DCP finds nothing. What it
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
from collections.abc import Callable, Iterator

import xxhash

from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, ReplacedIndex
from milepost.data.read import read_bytes
from milepost.errors import AlreadyExists, AmbiguousCheckpoint, CheckpointError, UnsafeCheckpoint
from milepost.store import Reader, Store

_log = logging.getLogger("milepost")
METADATA = ".metadata"
"""The name of DCP's index."""
_PICKLE = 0x80
_PIECE_BYTES = 4 * MIB


def index_beside(store: Store) -> ReplacedIndex | None:
    """The index of a DCP checkpoint at this place, if there is one. Another file of this name is none."""
    try:
        with contextlib.closing(store.reader(METADATA)) as reader:
            hasher, first = xxhash.xxh3_128(), b""
            for _, piece in _pieces(reader):
                first = first or piece[:1]
                hasher.update(piece)
            if first != bytes([_PICKLE]):
                return None
            return ReplacedIndex(METADATA, reader.size_bytes, hasher.hexdigest())
    except (FileNotFoundError, UnsafeCheckpoint):  # a folder, or a link
        return None


def refuse_newer_index(store: Store, manifest: Callable[[], Manifest]) -> None:
    """Raise AmbiguousCheckpoint if DCP saved here after this manifest was committed."""
    index = index_beside(store)
    if index is None:
        return
    ours = manifest()
    if index not in ours.replaced:
        raise AmbiguousCheckpoint(
            f"{store.url} holds two checkpoints: generation {ours.generation} of Milepost ({ours.created}), and one of "
            f"torch.distributed.checkpoint ({METADATA}) that was saved or copied there later. Milepost does not guess "
            f"which is meant. For the first, remove {METADATA} and the *.distcp files, or pass "
            f"milepost.store.AtGeneration({store.url!r}, {ours.generation}) as the path. For the second, remove the "
            "manifest-*.json files. A new save with Milepost replaces both."
        )


def retire(store: Store, manifest: Manifest) -> None:
    """Rename the index that a committed manifest records, so that DCP finds none. Failures are logged, never raised."""
    for index in manifest.replaced:
        retired = f"{index.name}.replaced-by-{manifest.generation:08d}"
        try:
            if index_beside(store) != index:
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
