"""What a save need not write again: entries that an earlier save wrote, known by their digests. No I/O, no torch.

The *digest* of an entry is 128 bits of XXH3 over its *cells*: the pieces between the multiples of 256 KiB in the file
that it was written to. So it can be computed while the file is written, by blocks, in any order. The table of a shard
file ends with the digest of each of its entries, in their order, and then of each entry that is in an older file.

The header's note `older` names those entries: `[[save id, writer, [name, name, ...]], ...]`.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

import xxhash

from milepost.core.limits import KIB, MAX_ENTRIES
from milepost.core.manifest import Manifest, OlderFile, ShardFile
from milepost.core.shardfile import CHECKSUMS, DIGEST_BYTES, Header
from milepost.core.wire import Wire

OLDER = "older"
"""The note of a header that names entries in older files."""
CELL_BYTES = 256 * KIB
"""The unit of digests. One call hashes it: Python takes as long for the call as XXH3 for 16 KiB."""


class FileId(NamedTuple):
    """Which save wrote a file, and which of its ranks."""

    save_id: str
    writer: int


class KeptEntry(NamedTuple):
    """An entry that is not written again: the file that holds it, and its digest."""

    file: FileId
    digest: bytes


_NOTE = Wire.json(list[tuple[str, int, list[str]]])


def pack_older(entries: Mapping[str, KeptEntry]) -> tuple[str, bytes]:
    """The note about entries in older files, and their digests in the order of the note."""
    groups: dict[FileId, list[str]] = {}
    for name, kept in entries.items():
        groups.setdefault(kept.file, []).append(name)
    note = _NOTE.pack([(file.save_id, file.writer, names) for file, names in groups.items()])
    return note.decode(), b"".join(entries[name].digest for names in groups.values() for name in names)


def unpack_older(note: str) -> dict[str, FileId]:
    """The entries in older files by name, in the order of the note. Raises ValueError for what is no such note."""
    found: dict[str, FileId] = {}
    count = 0
    for save_id, writer, names in _NOTE.unpack(note.encode()) if note else ():
        found.update(dict.fromkeys(names, FileId(save_id, writer)))
        count += len(names)
    if len(found) != count or count > MAX_ENTRIES:
        raise ValueError("its note of older files names an entry twice, or too many")
    return found


def digests_by_name(header: Header, digests: bytes) -> dict[str, bytes]:
    """The digests of all entries of a shard file, and of those in older files. Raises ValueError if they are others.

    `digests`: the end of its table.
    """
    if not digests:
        return {}
    names = [name for name in header.entries if name != CHECKSUMS]
    names += unpack_older(header.notes.get(OLDER, ""))
    if len(names) * DIGEST_BYTES != len(digests):
        raise ValueError("it has digests of other entries than it holds")
    starts = range(0, len(digests), DIGEST_BYTES)
    return {name: digests[at : at + DIGEST_BYTES] for name, at in zip(names, starts, strict=True)}


def cell_count(size_bytes: int, phase: int) -> int:
    """How many cells an entry of this size touches that begins `phase` bytes behind the start of a cell."""
    return -(-(phase + size_bytes) // CELL_BYTES)


def digest_of_cells(cells: Sequence[bytes]) -> bytes:
    """The digest of an entry, from those of its cells."""
    return cells[0] if len(cells) == 1 else xxhash.xxh3_128_digest(b"".join(cells))


def cuts_between(start: int, stop: int, entries: Iterable[int]) -> list[int]:
    """Where cells begin in start..stop of a file, and `stop`: at multiples, and where entries begin."""
    first = start // CELL_BYTES * CELL_BYTES + CELL_BYTES
    return sorted({start, stop, *range(first, stop, CELL_BYTES), *entries})


class Reusable(NamedTuple):
    """An entry that need not be written: the number of the file of the base that holds it, its digest and its size."""

    number: int
    digest: bytes
    size_bytes: int


def used_of(chosen: Mapping[str, Reusable]) -> dict[int, int]:
    """How many bytes of each file are used."""
    used: dict[int, int] = {}
    for one in chosen.values():
        used[one.number] = used.get(one.number, 0) + one.size_bytes
    return used


def worth_keeping(
    chosen: Mapping[str, Reusable], data_bytes: Mapping[int, int], max_waste: float
) -> dict[str, Reusable]:
    """Those of the entries whose files are not mostly waste; the others are written again.

    A file is waste as far as this rank uses nothing of it any more: with `max_waste` 0.5, one of which less than half
    is used is given up. `data_bytes`: the size of each file that is judged.
    """
    used = used_of(chosen)
    wasted = {number for number, size in data_bytes.items() if used[number] < (1 - max_waste) * size}
    return {name: one for name, one in chosen.items() if one.number not in wasted}


def older_file(record: ShardFile, base: Manifest, rank: int, used_bytes: int, folder: str = "") -> OlderFile:
    """The row of a file of the base, for a rank of the save that goes on using it.

    `folder`: where it lies, if it gets no name in the folder of that save.
    """
    file = id_of(record, base)
    return OlderFile(
        rank=rank,
        size_bytes=record.size_bytes,
        header_bytes=record.header_bytes,
        checksum=record.checksum,
        part_bytes=record.part_bytes,
        digests=record.digests,
        spans=record.spans,
        save_id=file.save_id,
        writer=file.writer,
        age=age_of(record) + 1,
        used_bytes=used_bytes,
        folder=folder,
    )


def age_of(record: ShardFile) -> int:
    """How many saves before that of its checkpoint a file was written."""
    return record.age if isinstance(record, OlderFile) else 0


def id_of(record: ShardFile, manifest: Manifest) -> FileId:
    """Which save wrote a file of a checkpoint, and which of its ranks."""
    if isinstance(record, OlderFile):
        return FileId(record.save_id, record.writer)
    return FileId(manifest.save_id, record.rank)
