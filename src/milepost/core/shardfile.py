"""Shard files: valid safetensors files whose entries are boxes and whose last entry is a table of checksums. Pure.

    8 bytes          length of the header, little-endian
    header           JSON, padded with spaces so that the data starts at a page boundary
    data             the entries, without gaps
    @checksums       the last entry: one XXH3-64 for each block of the data before it (U64); then one for each span of
                     8 blocks; and, where the save may be the base of an incremental one, a digest of 16 bytes for
                     each entry (see `core.reuse`)

The manifest holds a checksum over header and table. Whole spans are checked by one call each, which costs Python little
and lets other threads run; blocks serve the ends of a range, and tell what is damaged.

A store may keep a long file as several objects, its *parts*: header and first data, further data, and the table. Joined
in their order they are the file.
"""

import math
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import msgspec
import xxhash

from milepost.core.box import Box, Shape, check_shape
from milepost.core.dtypes import DTYPES, STORED_SIZES, size_bytes
from milepost.core.limits import BLOCK_BYTES, MAX_BLOCK_BYTES, MAX_ENTRIES, MAX_HEADER_BYTES, PAGE_BYTES
from milepost.core.wire import Wire

CHECKSUMS = "@checksums"
PRIVATE = "@private"
NOTES = "__metadata__"
"""Where safetensors keeps text of the file's own, beside the entries."""
DIGEST_BYTES = 16
SPAN_BLOCKS = 8
"""How many blocks a span has."""
_digest = xxhash.xxh3_64_intdigest


class Entry(msgspec.Struct, frozen=True, gc=False):
    """One entry of a header, as safetensors defines it. A missing field gets a value that no entry may have."""

    dtype: str = ""
    shape: Shape = (-1,)
    data_offsets: tuple[int, int] = (-1, -1)

    @property
    def size_bytes(self) -> int:
        """How many bytes the entry holds."""
        return self.data_offsets[1] - self.data_offsets[0]


class _HeaderNotes(msgspec.Struct, frozen=True, rename={"notes": NOTES}):
    """The part of a header that is not an entry."""

    notes: dict[str, str] = {}


_ENTRIES = Wire.json(dict[str, Entry])
_NOTES = Wire.json(_HeaderNotes)


class NewEntry(msgspec.Struct, frozen=True, gc=False):
    """An entry that is to be written: its name, element type (torch's name) and shape."""

    name: str
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """How many bytes the entry will hold."""
        return size_bytes(self.dtype, self.shape)


class Header(msgspec.Struct, frozen=True):
    """A file's header: the entries by name, the file's own notes, and the sizes that follow from them.

    The table holds the checksums of the blocks, then those of the spans and the digests of entries, if there are any.
    """

    entries: dict[str, Entry]
    notes: dict[str, str]
    header_bytes: int
    data_bytes: int
    table_bytes: int

    @property
    def size_bytes(self) -> int:
        """The size of the whole file."""
        return self.header_bytes + self.data_bytes + self.table_bytes


def entry_name(key: str, box: Box, shape: Shape) -> str:
    """The name of the entry that holds `box` of the tensor `key`: the key itself where the box is the whole tensor.

    No two pairs of key and box have one name, and none is a reserved name: a key that ends in a bracket always gets
    its box, and one that starts like a reserved name gets a prefix.
    """
    whole = box.shape == shape and not key.endswith("]")
    name = key if whole else key + box.text
    return f"@@{name}" if name.startswith(("@", "__")) else name


def private_name(key: str) -> str:
    """The name of the entry that holds a rank-private tensor."""
    return f"{PRIVATE}/{key}"


def block_count(data_bytes: int, block_bytes: int) -> int:
    """How many blocks, the last one perhaps shorter, cover the data."""
    return -(-data_bytes // block_bytes)


def table_rows(data_bytes: int, block_bytes: int, digests: int = 0, *, spans: bool = False) -> int:
    """How many numbers of eight bytes the table has: one for each block and each span, two for each digest."""
    blocks = block_count(data_bytes, block_bytes)
    return blocks + (block_count(blocks, SPAN_BLOCKS) if spans else 0) + 2 * digests


def data_bytes_of(
    size_bytes: int, header_bytes: int, block_bytes: int, digests: int = 0, *, spans: bool = False
) -> int:
    """How many bytes of a file are data, and not header or table."""
    rest = size_bytes - header_bytes - DIGEST_BYTES * digests
    if spans:
        rest -= 8 * -(-rest // (SPAN_BLOCKS * (block_bytes + 8) + 8))
    return rest - 8 * -(-rest // (block_bytes + 8))


@dataclass(frozen=True, slots=True)
class FilePart:
    """One object of a file in parts: its name, and the bytes start..stop of the file that it holds."""

    name: str
    start: int
    stop: int

    @property
    def size_bytes(self) -> int:
        """The size of the object."""
        return self.stop - self.start


@dataclass(frozen=True, slots=True)
class FileParts:
    """How a file is cut into objects: `part_bytes` of data in each, the header before the first, the table by itself.

    Whole blocks, so none lies in two objects. With `part_bytes` 0 the file is one object. Nothing is listed: a damaged
    manifest may claim any size.
    """

    name: str
    header_bytes: int
    data_bytes: int
    size_bytes: int
    part_bytes: int = 0

    def __len__(self) -> int:
        return -(-self.data_bytes // self.part_bytes) + 1 if self.part_bytes else 1

    def __getitem__(self, index: int) -> FilePart:
        if not self.part_bytes:
            return FilePart(self.name, 0, self.size_bytes)
        name, table = f"{self.name}-{index:05d}", self.header_bytes + self.data_bytes
        if index == len(self) - 1:
            return FilePart(name, table, self.size_bytes)
        start = self.header_bytes + index * self.part_bytes if index else 0
        return FilePart(name, start, min(self.header_bytes + (index + 1) * self.part_bytes, table))

    def __iter__(self) -> Iterator[FilePart]:
        return (self[index] for index in range(len(self)))

    def at(self, offset: int) -> int:
        """The index of the part that holds this byte of the file."""
        if not self.part_bytes:
            return 0
        if offset >= self.header_bytes + self.data_bytes:
            return len(self) - 1
        return max(offset - self.header_bytes, 0) // self.part_bytes


def file_order(dtype: str, size_bytes: int) -> tuple[int, bool]:
    """The key by which entries are sorted in a file: wide elements first, and entries shorter than a block last.

    Wide first, because then each entry is aligned to its element size without padding, which the format lacks. Short
    ones together, because then few blocks hold several entries: whoever compares two files by their checksums has to
    read such blocks to see which of the entries changed.
    """
    return -DTYPES[dtype].size_bytes, size_bytes < BLOCK_BYTES


def make_header(
    new: list[NewEntry], notes: dict[str, str], block_bytes: int, digests: int = 0, *, spans: bool = False
) -> tuple[bytes, Header]:
    """The bytes of a header for these entries, in this order, and what they say. `digests`: how many the table has."""
    entries: dict[str, Entry] = {}
    position = 0
    for item in new:
        kind = DTYPES[item.dtype]
        end = position + item.size_bytes
        entries[item.name] = Entry(kind.stored_as, (*item.shape, *kind.inner), (position, end))
        position = end
    if len(entries) != len(new):
        raise ValueError("two entries of one shard file have one name")
    rows = table_rows(position, block_bytes, digests, spans=spans)
    entries[CHECKSUMS] = Entry("U64", (rows,), (position, position + 8 * rows))
    data = encode_header(entries, notes)
    return data, Header(entries, notes, len(data), position, 8 * rows)


def encode_header(entries: dict[str, Entry], notes: dict[str, str]) -> bytes:
    """The bytes of a header of these entries, whose last is the table, padded to whole pages."""
    text = msgspec.json.encode({NOTES: notes, **entries})
    if count_entries(text) > MAX_ENTRIES:
        raise ValueError(
            f"{count_entries(text)} entries are more than the {MAX_ENTRIES} that a file may have (a brace in a key "
            "counts as one); save fewer tensors a rank"
        )
    length = -(-(8 + len(text)) // PAGE_BYTES) * PAGE_BYTES
    if length > MAX_HEADER_BYTES:
        raise ValueError(
            f"a header of {length} bytes is more than a safetensors file may have; save fewer tensors a rank"
        )
    return struct.pack("<Q", length - 8) + text.ljust(length - 8)


def read_header(data: bytes, file_bytes: int, block_bytes: int, digests: int = 0, *, spans: bool = False) -> Header:
    """Parse and check a header. Raises ValueError unless its entries tile the file exactly and sizes fit types."""
    if len(data) < 8 or len(data) > MAX_HEADER_BYTES:
        raise ValueError(f"a header cannot have {len(data)} bytes")
    if struct.unpack("<Q", data[:8])[0] != len(data) - 8:
        raise ValueError("the header's own length is not the one that the manifest names")
    if count_entries(data, 8) > MAX_ENTRIES:  # before they are parsed, which takes a microsecond for each
        raise ValueError(f"a header of {count_entries(data, 8)} entries is over the limit of {MAX_ENTRIES}")
    try:
        entries, notes = parse_entries(memoryview(data)[8:])
    except RecursionError:
        raise ValueError("the header is nested too deeply") from None
    if not entries or next(reversed(entries)) != CHECKSUMS:
        raise ValueError("the last entry is not the table of checksums")
    _check_entries(entries)
    table = entries[CHECKSUMS]
    data_bytes, end = table.data_offsets
    if table.dtype != "U64" or table.shape != (table_rows(data_bytes, block_bytes, digests, spans=spans),):
        raise ValueError("the table of checksums does not fit the data")
    if len(data) + end != file_bytes:
        raise ValueError(f"the header describes {len(data) + end} bytes and the file has {file_bytes}")
    return Header(entries, notes, len(data), data_bytes, table.size_bytes)


def parse_entries(text: bytes | memoryview) -> tuple[dict[str, Entry], dict[str, str]]:
    """The entries and the notes of a safetensors header. Raises ValueError, and RecursionError for deep nesting.

    A field that an entry lacks gets a value that no entry may have.
    """
    # The notes are decoded as an entry too, which costs nothing, is thrown away, and spares a decision at each entry.
    entries = _ENTRIES.unpack(text)
    entries.pop(NOTES, None)
    return entries, _NOTES.unpack(text).notes


def count_entries(data: bytes, start: int = 0) -> int:
    """How many entries the JSON of a header has at most, without parsing it: each has a brace, and so may names."""
    return data.count(b"{", start) - 1


def _check_entries(entries: dict[str, Entry]) -> None:
    """Refuse entries that do not follow each other without gaps, or whose size does not fit type and shape."""
    sizes: dict[tuple[str, Shape], int] = {}  # worked out once for all that look alike
    position = 0
    for name, entry in entries.items():
        looks = (entry.dtype, entry.shape)
        size = sizes.get(looks)
        if size is None:
            size = sizes[looks] = _stored_bytes(name, entry)
        start, end = entry.data_offsets
        if start != position or end - start != size:
            raise ValueError(
                f"entry {name[:80]!r} overlaps another, leaves a gap, or has a size that does not fit its shape"
            )
        position = end


def _stored_bytes(name: str, entry: Entry) -> int:
    if entry.dtype not in STORED_SIZES:
        raise ValueError(f"entry {name[:80]!r} has the unknown type {entry.dtype[:20]!r}")
    check_shape(entry.shape)
    return math.prod(entry.shape) * STORED_SIZES[entry.dtype]


def check_block_bytes(block_bytes: int) -> None:
    """Refuse block sizes that are not a power of two between a page and the limit."""
    if not PAGE_BYTES <= block_bytes <= MAX_BLOCK_BYTES or block_bytes & (block_bytes - 1):
        raise ValueError(f"blocks of {block_bytes} bytes are not supported")


def is_name(name: str) -> bool:
    """Whether a name is that of a folder beside another, and leads nowhere else."""
    return name not in ("", ".", "..") and not any(part in name for part in ("/", "\\", "\0"))


def seal_of(header: bytes, table: bytes) -> str:
    """The checksum over header and table that the manifest keeps."""
    hasher = xxhash.xxh3_64(header)
    hasher.update(table)
    return hasher.hexdigest()


def slices(views: Sequence[memoryview], size: int, first: int = 0) -> Iterator[list[memoryview]]:
    """The same bytes, `size` of them at a time; of the first slice, only `first`, if that is not 0."""
    part: list[memoryview] = []
    room = first or size
    for view in views:
        at = 0
        while len(view) - at >= room:
            yield [*part, view[at : at + room]]
            at, part, room = at + room, [], size
        if at < len(view):
            part.append(view[at:])
            room -= len(view) - at
    if part:
        yield part


def sums_of(views: Sequence[memoryview], block_bytes: int) -> list[int]:
    """The checksum of each block of the bytes that the views spell together; the first begins a block."""
    if len(views) == 1:
        view = views[0]
        return [_digest(view[at : at + block_bytes]) for at in range(0, len(view), block_bytes)]
    sums: list[int] = []
    hasher, filled = xxhash.xxh3_64(), 0
    for view in views:
        at = 0
        while at < len(view):
            if not filled and len(view) - at >= block_bytes:
                sums.append(_digest(view[at : at + block_bytes]))
                at += block_bytes
                continue
            step = min(block_bytes - filled, len(view) - at)
            hasher.update(view[at : at + step])
            at, filled = at + step, filled + step
            if filled == block_bytes:
                sums.append(hasher.intdigest())
                hasher, filled = xxhash.xxh3_64(), 0
    return [*sums, hasher.intdigest()] if filled else sums
