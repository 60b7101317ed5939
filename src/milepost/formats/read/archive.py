"""The archives of `torch.save`: zip files whose records are stored, not compressed. Found by their central directory.

Only positions are worked out here; nothing is extracted, and every position is checked against the archive's bounds.
"""

import struct
from collections.abc import Callable

import msgspec

from milepost.core.limits import KIB, MAX_ENTRIES, MIB
from milepost.data.read import read_bytes
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint, UnsupportedFormat
from milepost.store import Reader, Store

Read = Callable[[int, int], bytes]
MAX_PICKLE_BYTES = 256 * MIB
_MAX_DIRECTORY_BYTES = 256 * MIB
_TAIL_BYTES = 1024
_WINDOW_BYTES = 16 * KIB
_LONG_WINDOW_BYTES = MIB
_END = struct.Struct("<4s4H2LH")
_END64 = struct.Struct("<4sQ2H2L4Q")
_LOCATOR = struct.Struct("<4sLQL")
_CENTRAL = struct.Struct("<4s4x2H4x3L3H8xL")  # only what is looked at
_LOCAL = struct.Struct("<4s2B4HL2L2H")
_FULL = 0xFFFFFFFF
_MAX_EXTRAS = 8
"""How many extra fields of a record are looked at. Torch writes one; a hostile archive could have 16,000 in each."""


class ArchiveMember(msgspec.Struct, frozen=True, gc=False):
    """One record of an archive: where its local header is, its size, and the CRC-32 of its bytes (0: not known)."""

    header_at: int
    size_bytes: int
    crc: int


class Window:
    """Small reads of one object, through two windows: neighbours are read together.

    Two, because the directory of an archive stands at its end, and the headers that it leads to before that. They are a
    few pages long, and longer in a store where each read is a request that takes its time.
    """

    def __init__(self, reader: Reader, store: Store) -> None:
        self._reader = reader
        self._bytes = min(store.traits.range_bytes, _LONG_WINDOW_BYTES) or _WINDOW_BYTES
        self._kept: tuple[tuple[int, bytes], ...] = ()  # one object, so that threads see all of it or nothing

    def __call__(self, start: int, length: int) -> bytes:
        """Bytes start..start+length; the caller has checked that they are there."""
        kept = self._kept
        for first, data in kept:
            at = start - first
            if at >= 0 and at + length <= len(data):
                return data[at : at + length]
        data = read_bytes(self._reader, start, min(max(length, self._bytes), self._reader.size_bytes - start))
        if length > self._bytes:
            return data
        self._kept = ((start, data), *kept[:1])
        return data[:length]


class Archive:
    """A zip archive in bytes start..start+length of something. Raises CheckpointDamaged, naming `what`."""

    def __init__(self, read: Read, start: int, length: int, what: str) -> None:
        self._read, self._start, self._length, self._what = read, start, length, what
        self._directory_at, directory_bytes, count = self._find_directory()
        if directory_bytes > _MAX_DIRECTORY_BYTES or self._directory_at + directory_bytes > length:
            raise self._damaged("its directory lies outside of it")
        if count > directory_bytes // _CENTRAL.size:
            raise self._damaged("its directory is too short")
        if count > MAX_ENTRIES:  # before they are looked at, which takes a microsecond for each
            raise UnsafeCheckpoint(f"{what} is an archive of {count} records, over {MAX_ENTRIES}")
        self.records = self._read_directory(self._bytes(self._directory_at, directory_bytes), count)
        self.prefix = self._find_prefix()

    def _damaged(self, why: str) -> CheckpointDamaged:
        return CheckpointDamaged(f"{self._what} is not a whole torch.save archive: {why}")

    def _bytes(self, at: int, length: int) -> bytes:
        if at < 0 or length < 0 or at + length > self._length:
            raise self._damaged("it is too short")
        return self._read(self._start + at, length)

    def _find_directory(self) -> tuple[int, int, int]:
        """Where the central directory is, how long, and how many records it lists."""
        if self._length < _END.size:
            raise self._damaged("it is too short")
        tail_at = max(self._length - _TAIL_BYTES, 0)
        tail = self._bytes(tail_at, self._length - tail_at)
        mark, _, _, _, count, size, at, comment = _END.unpack_from(tail, len(tail) - _END.size)
        if mark != b"PK\5\6" or comment:
            raise self._damaged("its end is missing")
        if count == 0xFFFF or _FULL in (size, at):
            before = len(tail) - _END.size - _LOCATOR.size
            if before < 0:
                raise self._damaged("its end is missing")
            mark, _, where, _ = _LOCATOR.unpack_from(tail, before)
            record = _END64.unpack(self._bytes(where, _END64.size))
            if mark != b"PK\6\7" or record[0] != b"PK\6\6":
                raise self._damaged("its end is damaged")
            count, size, at = record[7], record[8], record[9]
        return at, size, count

    def _read_directory(self, data: bytes, count: int) -> dict[str, ArchiveMember]:
        """The records by name."""
        records: dict[str, ArchiveMember] = {}
        unpack = _CENTRAL.unpack_from
        at, stop, latest = 0, len(data) - _CENTRAL.size, self._directory_at
        for _ in range(count):
            if at > stop:
                raise self._damaged("its directory is too short")
            mark, flags, method, crc, packed, size, name_bytes, extra_bytes, comment_bytes, header_at = unpack(data, at)
            at += _CENTRAL.size + name_bytes
            name = data[at - name_bytes : at].decode("utf-8", "replace")
            if mark != b"PK\1\2" or name in records:
                raise self._damaged("its directory is damaged")
            if method or flags & 1:
                raise UnsupportedFormat(
                    f"{self._what} holds {name[:200]!r} compressed or encrypted, as torch never does"
                )
            if extra_bytes:
                size, packed, header_at = _wide(data[at : at + extra_bytes], [size, packed, header_at])
            if size != packed or header_at + size > latest:
                raise self._damaged(f"its record {name[:200]!r} has an impossible size")
            records[name] = ArchiveMember(header_at, size, crc)
            at += extra_bytes + comment_bytes
        if len(records) != count or at != len(data):
            raise self._damaged("its directory is damaged")
        return records

    def _find_prefix(self) -> str:
        names = [name for name in self.records if name.endswith("/data.pkl") and name.count("/") == 1]
        if len(names) != 1:
            raise UnsupportedFormat(f"{self._what} is a zip archive, but not one of torch.save: it has no data.pkl")
        prefix = names[0].removesuffix("data.pkl")
        if f"{prefix}constants.pkl" in self.records:
            raise UnsupportedFormat(f"{self._what} is a TorchScript program, not data")
        order = self.records.get(f"{prefix}byteorder")
        if order is not None and order.size_bytes < 16 and self.read(f"{prefix}byteorder") != b"little":
            raise UnsupportedFormat(f"{self._what} was saved on a big-endian machine")
        return prefix

    def place(self, name: str) -> tuple[int, ArchiveMember]:
        """Where the bytes of a record start, counted like `start`, and the record."""
        record = self.records.get(name)
        if record is None:
            raise self._damaged(f"its record {name[:200]!r} is missing")
        spelled = name.encode("utf-8", "replace")
        data = self._bytes(record.header_at, _LOCAL.size + len(spelled))
        header = _LOCAL.unpack_from(data)
        at = record.header_at + _LOCAL.size + header[-2] + header[-1]
        fits = header[0] == b"PK\3\4" and header[-2] == len(spelled) and data[_LOCAL.size :] == spelled
        if not fits or at + record.size_bytes > self._directory_at:
            raise self._damaged(f"its record {name[:200]!r} is not where it should be")
        return self._start + at, record

    def read(self, name: str) -> bytes:
        """The bytes of a small record."""
        at, record = self.place(name)
        if record.size_bytes > MAX_PICKLE_BYTES:
            raise UnsupportedFormat(f"{self._what} has a record {name[:200]!r} of {record.size_bytes} bytes")
        return self._bytes(at - self._start, record.size_bytes)


def _wide(extra: bytes, values: list[int]) -> list[int]:
    """The values; those that did not fit 32 bits are taken from the extra field."""
    at = 0
    for _ in range(_MAX_EXTRAS):
        if at + 4 > len(extra):
            break
        kind, size = struct.unpack_from("<HH", extra, at)
        if kind == 1:
            wide = iter(struct.unpack_from(f"<{min(size, len(extra) - at - 4) // 8}Q", extra, at + 4))
            return [next(wide, value) if value == _FULL else value for value in values]
        at += 4 + size
    return values
