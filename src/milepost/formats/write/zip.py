"""The archives of `torch.save`: a zip file in torch's own layout, whose every offset is known before any data.

Each record is stored as it is, begins at a multiple of 64 bytes, and is followed by a descriptor with its CRC-32.
Descriptors and directory are the only bytes that depend on the data; they are written when the sums are known: with
the data, where all of it is in one block, else at the end.
"""

import struct
import sys
import zlib
from collections.abc import Iterable, Iterator, Mapping
from typing import NamedTuple

import xxhash

from milepost.core.crc import combine
from milepost.core.limits import MAX_ENTRIES
from milepost.errors import InvalidRequest
from milepost.formats.write.content import Content, Data, FilePiece, PieceSum, Summed, bytes_in

_ALIGN = 64
_BIG = 0xFFFFFFFF
_MANY = 0xFFFF
_SUMMED, _UTF8 = 0x0008, 0x0800


class ArchiveRecord(NamedTuple):
    """One record: where its header and its data begin, counted from the start of the archive."""

    name: bytes
    header_at: int
    data_at: int
    size_bytes: int

    @property
    def flags(self) -> int:
        """Empty records have no descriptor."""
        return _UTF8 | (_SUMMED if self.size_bytes else 0)

    @property
    def wide(self) -> bool:
        """Whether sizes or offsets need 64 bits."""
        return self.size_bytes >= _BIG or self.header_at >= _BIG

    @property
    def end(self) -> int:
        """Where the next one begins."""
        return self.data_at + self.size_bytes + ((24 if self.wide else 16) if self.size_bytes else 0)


class ArchiveLayout:
    """The layout of one archive that starts at `base` of a file: a pickle, and the storages that it names."""

    def __init__(self, base: int, pickled: bytes, storages: list[Data]) -> None:
        self.base = base
        self.pieces: list[FilePiece] = []
        self._records: list[ArchiveRecord] = []
        self._known: list[int | None] = []
        self._storages: dict[int, ArchiveRecord] = {}
        self._text = bytearray()
        self._add("data.pkl", pickled)
        self._add(".format_version", b"1")
        self._add(".storage_alignment", str(_ALIGN).encode())
        self._add("byteorder", sys.byteorder.encode())
        for number, storage in enumerate(storages):
            self._add(f"data/{number}", storage)
        self._add("version", b"3\n")
        self._add(".data/serialization_id", self._identity(pickled))
        if len(self._records) > MAX_ENTRIES:
            raise InvalidRequest(
                f"an archive of torch.save would have {len(self._records)} records, and its readers accept {MAX_ENTRIES}. "
                "Leave tensors out (rename={key: None}), or write another format."
            )
        self._directory_at = self._records[-1].end
        end = self._directory([known or 0 for known in self._known])
        self.size_bytes = self._directory_at + len(end)
        if any(known is None for known in self._known):
            self._put_text(self._directory_at)
        else:  # no tensor that could change it
            self._text += end
            self._put_text(self.size_bytes)

    def _identity(self, pickled: bytes) -> bytes:
        """Two numbers, as torch has them: one for the names, one for the content."""
        names = xxhash.xxh3_64_intdigest(b"\0".join(record.name for record in self._records))
        return f"{names:020d}{xxhash.xxh3_64_intdigest(pickled):020d}".encode()

    def _add(self, name: str, data: Data) -> None:
        at = self._records[-1].end if self._records else 0
        record = _placed(f"archive/{name}".encode(), at, bytes_in(data))
        self._records.append(record)
        self._text += _header(record)
        if isinstance(data, bytes):
            self._known.append(zlib.crc32(data))
            self._text += data + _descriptor(record, zlib.crc32(data))
            return
        if not record.size_bytes:
            self._known.append(0)
            return
        self._known.append(None)
        self._storages[self.base + record.data_at] = record
        self._put_text(record.data_at)
        self.pieces.append(FilePiece(self.base + record.data_at, record.size_bytes, data))

    def _put_text(self, end: int) -> None:
        """Close the run of literal bytes that ends here."""
        self.pieces.append(FilePiece(self.base + end - len(self._text), len(self._text), bytes(self._text)))
        self._text.clear()

    def descriptor(self, start: int, crc: int) -> tuple[int, bytes]:
        """What follows the storage that starts at this place of the file, and where."""
        record = self._storages[start]
        return start + record.size_bytes, _descriptor(record, crc)

    def directory(self, sums: Mapping[int, int]) -> tuple[int, bytes]:
        """What the archive ends with, given the CRC of the storage at each place, and where."""
        crcs = [
            sums[self.base + record.data_at] if known is None else known
            for record, known in zip(self._records, self._known, strict=True)
        ]
        return self.base + self._directory_at, self._directory(crcs)

    def _directory(self, crcs: list[int]) -> bytes:
        listed = b"".join(_listed(record, crc) for record, crc in zip(self._records, crcs, strict=True))
        count, at, size = len(self._records), self._directory_at, len(listed)
        wide = struct.pack("<4sQHHIIQQQQ", b"PK\x06\x06", 44, 0x031E, 45, 0, 0, count, count, size, at)
        pointer = struct.pack("<4sIQI", b"PK\x06\x07", 0, at + size, 1)
        few = min(count, _MANY)
        end = struct.pack("<4sHHHHIIH", b"PK\x05\x06", 0, 0, few, few, min(size, _BIG), min(at, _BIG), 0)
        return listed + wide + pointer + end


def _descriptor(record: ArchiveRecord, crc: int) -> bytes:
    """What follows the data of a record that is not empty."""
    form = "<4sIQQ" if record.wide else "<4sIII"
    return struct.pack(form, b"PK\x07\x08", crc, record.size_bytes, record.size_bytes)


def _placed(name: bytes, at: int, size_bytes: int) -> ArchiveRecord:
    """The record whose header begins at `at`: its data at the next multiple of 64 behind header and padding."""
    start = at + 30 + len(name) + len(_wide_sizes(size_bytes, 0, at)) + 4
    return ArchiveRecord(name, at, -(-start // _ALIGN) * _ALIGN, size_bytes)


def _wide_sizes(size: int, stored: int, at: int) -> bytes:
    """The extra field for sizes and offsets that need 64 bits; empty where none does."""
    fields = ([size, stored] if size >= _BIG else []) + ([at] if at >= _BIG else [])
    return struct.pack(f"<HH{len(fields)}Q", 1, 8 * len(fields), *fields) if fields else b""


def _header(record: ArchiveRecord) -> bytes:
    """The header in front of a record, up to its data."""
    extra = _wide_sizes(record.size_bytes, 0, record.header_at)
    padding = record.data_at - record.header_at - 30 - len(record.name) - len(extra) - 4
    extra += struct.pack("<2sH", b"FB", padding) + b"Z" * padding
    fixed = struct.pack("<4sHHHHHIIIHH", b"PK\x03\x04", 0, record.flags, 0, 0, 0, 0, 0, 0, len(record.name), len(extra))
    return fixed + record.name + extra


def _listed(record: ArchiveRecord, crc: int) -> bytes:
    """The line of a record in the directory."""
    extra = _wide_sizes(record.size_bytes, record.size_bytes, record.header_at)
    size, at = min(record.size_bytes, _BIG), min(record.header_at, _BIG)
    fixed = struct.pack(
        "<4sHHHHHHIIIHHHHHII",
        *(b"PK\x01\x02", 0, 0, record.flags, 0, 0, 0, crc, size, size),
        *(len(record.name), len(extra), 0, 0, 0, 0, at),
    )
    return fixed + record.name + extra


def endings(content: Content, sums: Iterable[PieceSum]) -> Iterator[tuple[int, bytes]]:
    """What is to be written last, each with its place in the file, from the sums that all parts of it brought."""
    found: dict[Summed, dict[int, int]] = {}
    closed = set()
    for part in sorted(sums):
        crcs = found.setdefault(content.archive_of(part.start), {})
        first = crcs.get(part.start)
        crcs[part.start] = part.crc if first is None else combine(first, part.crc, part.length)
        if part.closed:
            closed.add(part.start)
    for archive, crcs in found.items():
        yield from (archive.descriptor(start, crc) for start, crc in crcs.items() if start not in closed)
        yield archive.directory(crcs)
