"""Files of other libraries, in the shape in which `place` reads our own: entries in one space of addresses.

Where every entry lies aligned in the file, as in safetensors files and those of `torch.save`, addresses are positions in
the file. Elsewhere, as in DCP's, whose items start at any byte, the entries are laid out anew, one behind the other at
aligned addresses, and reading translates. Tensors that do not lie in one run are gathered when they are read.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from milepost.core.box import Box, Shape, boxes_of_run
from milepost.core.division import PlannedRead
from milepost.core.dtypes import DTYPES
from milepost.core.limits import KIB, MIB, PAGE_BYTES
from milepost.core.manifest import Manifest
from milepost.core.shardfile import Entry, Header
from milepost.data.read import Damage, Files, VerifiedFile
from milepost.data.transfer import Meter, Transfer, new_pages, run_all
from milepost.data.transforms import restored
from milepost.errors import CheckpointDamaged, CheckpointError
from milepost.formats.read.archive import Archive, Window
from milepost.formats.read.content import Strided, located, order_of, read_tensor
from milepost.formats.read.crc import Cursor, RangeSum, Sums
from milepost.store import Reader, Store

_ALIGN = 64
SLACK_BYTES = MIB
"""What an archive may have besides its tensor."""
_GAP = 32 * KIB
"""What lies between two entries is read over if it is at most so much: that is faster than another request."""
_GATHER_BYTES = 512 * KIB
_SMALL_STORAGE = 16 * MIB
"""A storage that views are read from is checked if it has at most so much; else that would be far more than is wanted."""
_SPREAD = 4
"""A strided region is read with what lies between its elements if that is at most so many times as much."""
_HALVES = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True, slots=True)
class Item:
    """A `torch.save` archive of one tensor, in bytes offset..offset+length of a file, perhaps transformed as a whole."""

    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class BackingStorage(NamedTuple):
    """A storage that an entry is a view of: where it starts, like the entry itself, its size and the CRC-32 of its bytes."""

    start: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the bytes of an entry start, in its file or (`inside`) in an item that must be unpacked first.

    `order`: the dimensions from the outermost to the innermost, None where that is their own order. `strided`: set where
    the entry does not lie in one run. `crc`: the CRC-32 of its bytes, 0 if there is none. `storage`: what
    has a sum instead, where the entry is a part of it, or has its bytes in another way.
    """

    at: int
    order: Shape | None = None
    strided: Strided | None = None
    crc: int = 0
    inside: Item | None = None
    storage: BackingStorage | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry: its name, key, type and shape, and where it is, or the archive in which that stands."""

    name: str
    key: str
    dtype: str
    shape: Shape
    where: Spot | Item

    @property
    def size_bytes(self) -> int:
        """How many bytes it has in memory."""
        return Box.whole(self.shape).elements * DTYPES[self.dtype].size_bytes


def spot_of(archive: Archive, tensor: Strided, what: str, inside: Item | None = None) -> Spot:
    """Where a tensor of an archive lies."""
    start, crc = located(archive, tensor, what)
    size, order = DTYPES[tensor.dtype].size_bytes, order_of(tensor)
    storage = BackingStorage(start, tensor.storage.elements * DTYPES[tensor.storage.dtype].size_bytes, crc)
    at = start + tensor.offset * size
    if order is None:
        return Spot(at, strided=tensor, inside=inside, storage=storage)
    covers = tensor.offset == 0 and Box.whole(tensor.shape).elements * size == storage.size_bytes
    in_rows = order == tuple(range(len(order)))
    return Spot(at, None if in_rows else order, None, crc if covers else 0, inside, None if covers else storage)


class ForeignFile(VerifiedFile):
    """One file of another library, open. May be used by several threads at once."""

    def __init__(self, store: Store, name: str, slots: Sequence[FileEntry], open_file: Callable[[], Reader]) -> None:
        self.name, self.where, self.block_bytes = name, f"{store.url}/{name}", PAGE_BYTES
        try:
            self._raw = open_file()
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.where} is missing") from None
        self._window = Window(self._raw)
        self._slots = {slot.name: slot for slot in slots}
        self._checks = Sums()
        self._spots: dict[str, Spot] = {}
        self._unpacked: tuple[Item, bytes] | None = None
        self._views: list[FileEntry] = []
        self._right: set[tuple[BackingStorage, Item | None]] = set()
        self._in_place = all(_is_aligned(slot) for slot in slots)
        self._sorted, self._starts, end = _lay_out(slots)
        self._places = {slot.name: i for i, slot in enumerate(self._sorted)}
        self.reader = self._raw if self._in_place else _Warm(self._raw)
        data_bytes = self._raw.size_bytes if self._in_place else end
        self.header = Header({}, {}, 0, data_bytes, 0)

    def entry(self, item: PlannedRead, dtype: str) -> Entry:
        """The entry that a planned read is from. Raises CheckpointDamaged unless the file holds it whole."""
        slot = self._slots.get(item.name)
        if slot is None or slot.dtype != dtype or slot.shape != item.source.shape:
            raise CheckpointDamaged(f"{self.where} does not hold {item.name[:200]!r} as {dtype} {item.source.shape}")
        start = self._start(slot, self._spot(slot))
        return Entry(DTYPES[dtype].stored_as, slot.shape, (start, start + slot.size_bytes))

    def order(self, item: PlannedRead) -> Shape | None:
        """The dimensions from the outermost to the innermost in the file; None where that is their own order."""
        spot = self._spots.get(item.name)
        return spot.order if spot is not None else None

    def _start(self, slot: FileEntry, spot: Spot) -> int:
        return spot.at if self._in_place else self._starts[self._places[slot.name]]

    def _spot(self, slot: FileEntry) -> Spot:
        """Where an entry is, found out once."""
        spot = self._spots.get(slot.name)
        if spot is None:
            spot = slot.where if isinstance(slot.where, Spot) else self._look_into(slot, slot.where)
            end = spot.at + slot.size_bytes
            if spot.inside is None and spot.strided is None and end > self._raw.size_bytes:
                raise CheckpointDamaged(f"{self.where} ends before {slot.key[:200]!r} does, at byte {end}")
            self._spots[slot.name] = spot
            if spot.storage is not None and spot.storage.size_bytes <= _SMALL_STORAGE:
                self._views.append(slot)
            if spot.crc:
                start = self._start(slot, spot)
                self._checks.add(RangeSum(start, start + slot.size_bytes, spot.crc, slot.key))
        return spot

    def _look_into(self, slot: FileEntry, item: Item) -> Spot:
        what = f"{slot.key[:200]!r} in {self.where}"
        if item.offset + item.length > self._raw.size_bytes:
            raise CheckpointDamaged(f"{self.where} ends before {slot.key[:200]!r} does")
        if item.transforms:
            data = self._unpack(slot, item)
            archive = Archive(_from_memory(data), 0, len(data), what)
        else:
            archive = Archive(self._window, item.offset, item.length, what)
        tensor = read_tensor(archive, what)
        if (tensor.dtype, tensor.shape) != (slot.dtype, slot.shape):
            raise CheckpointDamaged(f"{what} is {tensor.dtype} {tensor.shape}, not {slot.dtype} {slot.shape}")
        return spot_of(archive, tensor, what, item if item.transforms else None)

    def _unpack(self, slot: FileEntry, item: Item) -> bytes:
        kept = self._unpacked
        if kept is None or kept[0] != item:
            packed = bytearray(item.length)
            self._raw.read(item.offset, [memoryview(packed)])
            what = f"{slot.key[:200]!r} in {self.where}"
            kept = self._unpacked = (
                item,
                restored(bytes(packed), item.transforms, max(slot.size_bytes, 64 * item.length) + SLACK_BYTES, what),
            )
        return kept[1]

    def read(self, start: int, views: Sequence[memoryview], *, verify: bool = True) -> None:
        """Fill the views with what lies from `start` on; what no known entry covers is left as it is."""
        known = self._checks.known
        if verify:
            self._check_views()
        if self._in_place:
            self._raw.read(start, views)
        else:
            self._read_laid_out(start, views)
        if verify:
            self._check(start, views, known)

    def _read_laid_out(self, start: int, views: Sequence[memoryview]) -> None:
        cursor, at, stop = Cursor(views), start, start + sum(map(len, views))
        requests: list[tuple[int, list[memoryview]]] = []
        for i in range(max(bisect_right(self._starts, start) - 1, 0), len(self._sorted)):
            slot = self._sorted[i]
            low, high = max(self._starts[i], at), min(self._starts[i] + slot.size_bytes, stop)
            if self._starts[i] >= stop:
                break
            spot = self._spots.get(slot.name)
            if low >= high or spot is None:
                continue
            cursor.take(low - at)
            target, at, skipped = cursor.take(high - low), high, low - self._starts[i]
            if spot.strided is None and spot.inside is None:
                requests.append((spot.at + skipped, target))
            else:
                self._gather_into(slot, spot, skipped, target)
        for position, target in _joined(requests):
            self._raw.read(position, target)

    def _check_views(self) -> None:
        """Check what was looked up and is a view: what has a sum is its storage."""
        views, self._views = self._views, []
        damaged = next(self._damaged_storages(views), None)
        if damaged is not None:
            self._views[:0] = views  # whoever asks again hears it again
            raise CheckpointDamaged(damaged.reason)

    def _damaged_storages(self, slots: Iterable[FileEntry]) -> Iterator[Damage]:
        """Check the storages that these entries are views of, each once, as long as they are found to be right."""
        for slot in slots:
            spot = self._spots[slot.name]
            storage, inside = spot.storage, spot.inside
            if storage is None or not storage.crc or (storage, inside) in self._right:
                continue
            read = self._read_raw if inside is None else _from_memory(self._unpack(slot, inside))
            crc, stop = 0, storage.start + storage.size_bytes
            for at in range(storage.start, stop, _GATHER_BYTES):
                crc = zlib.crc32(read(at, min(_GATHER_BYTES, stop - at)), crc)
            if crc == storage.crc:
                self._right.add((storage, inside))
            else:
                yield Damage(self.name, self._explain_sum(RangeSum(storage.start, stop, crc, slot.key)), (slot.name,))

    def _gather_into(self, slot: FileEntry, spot: Spot, start: int, views: list[memoryview]) -> None:
        """Fill views with an entry that does not lie in one run in the file, a little at a time."""
        cursor, stop = Cursor(views), start + sum(map(len, views))
        for low in range(start, stop, _GATHER_BYTES):
            high = min(low + _GATHER_BYTES, stop)
            _fill(cursor.take(high - low), self._gathered(slot, spot, low, high))

    def _gathered(self, slot: FileEntry, spot: Spot, start: int, stop: int) -> bytes:
        """Bytes start..stop of an entry, as if it lay in rows."""
        read = self._read_raw if spot.inside is None else _from_memory(self._unpack(slot, spot.inside))
        return read(spot.at + start, stop - start) if spot.strided is None else _gather(read, spot, start, stop)

    def _read_raw(self, at: int, length: int) -> bytes:
        buffer = bytearray(length)
        self._raw.read(at, [memoryview(buffer)])
        return bytes(buffer)

    def check(self, start: int, views: Sequence[memoryview]) -> None:
        """Check what these bytes complete. Raises CheckpointDamaged, naming file and key."""
        self._check(start, views, self._checks.known)

    def _check(self, start: int, views: Sequence[memoryview], known: tuple[list[RangeSum], list[int]]) -> None:
        damaged = next(self._checks.damaged(start, views, known), None)
        if damaged is not None:
            raise CheckpointDamaged(self._explain_sum(damaged))

    def _explain_sum(self, damaged: RangeSum) -> str:
        return f"{self.where}: the bytes of {damaged.what[:200]!r} are not what was saved; their CRC-32 differs"

    def entries_in(self, block: int) -> list[str]:
        """The names of the entries that a block touches."""
        low, high = block * self.block_bytes, (block + 1) * self.block_bytes
        spans = ((n, self._start(self._slots[n], s), self._slots[n].size_bytes) for n, s in self._spots.items())
        return [name for name, start, size in spans if start < high and start + size > low]

    def check_all(self, transfer: Transfer, meter: Meter) -> list[Damage]:
        """Look up every entry and read everything; one `Damage` for each that is not whole or not what was saved."""
        found: list[Damage] = []
        for slot in self._slots.values():
            try:
                self._spot(slot)
            except CheckpointError as error:
                found.append(Damage(self.name, str(error), (slot.name,)))
        self._right.clear()
        found.extend(self._damaged_storages(self._slots[name] for name in self._spots))

        def make_worker() -> Callable[[int], None]:
            memory = memoryview(new_pages(transfer.block_bytes))

            def check(start: int) -> None:
                block = memory[: min(transfer.block_bytes, self.header.data_bytes - start)]
                self.read(start, [block], verify=False)
                damaged = self._checks.damaged(start, [block])
                found.extend(Damage(self.name, self._explain_sum(one), (one.what,)) for one in damaged)
                meter.add(len(block))

            return check

        total, size = self.header.data_bytes, transfer.block_bytes
        run_all(iter(range(0, total, size)), make_worker, transfer.threads_for(total, 1, size), meter)
        return found

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class ForeignFiles(Files):
    """The files of a checkpoint of another library, opened when they are first needed."""

    def __init__(
        self, store: Store, manifest: Manifest, names: Sequence[str], slots: Sequence[Sequence[FileEntry]], opening: Any
    ) -> None:
        super().__init__(store, manifest)
        self._names, self._slots, self._opening = names, slots, opening

    def name_of(self, rank: int) -> str:
        """The name of a file."""
        return self._names[rank]

    def make(self, rank: int) -> VerifiedFile:
        """Open a file."""
        name = self._names[rank]
        return ForeignFile(self._store, name, self._slots[rank], lambda: self._opening(name))


class _Warm:
    """A reader whose file is laid out anew, so that its pages are not where direct reads could use them."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.size_bytes = reader.size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._reader.read(offset, views)

    def is_cold(self, offset: int, length: int) -> bool:
        del offset, length
        return False

    def read_cold(self, offset: int, block: memoryview) -> None:
        self._reader.read(offset, [block])

    def close(self) -> None:
        self._reader.close()


def _is_aligned(slot: FileEntry) -> bool:
    spot = slot.where
    if not isinstance(spot, Spot) or spot.strided is not None or spot.inside is not None:
        return False
    return spot.at % DTYPES[slot.dtype].size_bytes == 0


def _lay_out(slots: Sequence[FileEntry]) -> tuple[list[FileEntry], list[int], int]:
    """The entries in the order of the file, the address of each, and where the last ends."""
    ordered = sorted(slots, key=lambda s: s.where.at if isinstance(s.where, Spot) else s.where.offset)
    starts, end = [], 0
    for slot in ordered:
        starts.append(-(-end // _ALIGN) * _ALIGN)
        end = starts[-1] + slot.size_bytes
    return ordered, starts, end


def _joined(requests: list[tuple[int, list[memoryview]]]) -> Iterator[tuple[int, list[memoryview]]]:
    """The requests, those with a small gap between them made one, with memory for what is in the gap."""
    start, end, views = 0, 0, list[memoryview]()
    for position, target in requests:
        if views and end <= position <= end + _GAP:
            if position > end:
                views.append(memoryview(bytearray(position - end)))
            views.extend(target)
        else:
            if views:
                yield start, views
            start, views = position, list(target)
        end = position + sum(map(len, target))
    if views:
        yield start, views


def _from_memory(data: bytes) -> Callable[[int, int], bytes]:
    return lambda at, length: data[at : at + length]


def _fill(views: list[memoryview], data: bytes) -> None:
    at = 0
    for view in views:
        view[:] = data[at : at + len(view)]
        at += len(view)


def _gather(read: Callable[[int, int], bytes], spot: Spot, start: int, stop: int) -> bytes:
    """Bytes start..stop of the rows of a strided tensor. They begin and end with whole elements."""
    tensor = spot.strided
    assert tensor is not None
    size = DTYPES[tensor.dtype].size_bytes
    parts = []
    for box in boxes_of_run(tensor.shape, start // size, stop // size):
        array = np.empty(box.shape, dtype=f"V{size}")
        _gather_box(read, spot, box, array, size)
        parts.append(array.tobytes())
    data = b"".join(parts)
    if tensor.conj or tensor.neg:
        numbers = np.frombuffer(data, dtype={**_HALVES, **_FLOATS}[tensor.dtype]).copy()
        if tensor.neg:
            np.negative(numbers, out=numbers)
        if tensor.conj:
            np.negative(numbers[1::2], out=numbers[1::2])
        data = numbers.tobytes()
    return data


def _gather_box(read: Callable[[int, int], bytes], spot: Spot, box: Box, into: Any, size: int) -> None:
    assert spot.strided is not None
    strides = spot.strided.strides
    repeated = [dim for dim, n in enumerate(box.shape) if n > 1 and strides[dim] == 0]
    if repeated:  # read once, or a small file could ask for any number of reads
        for dim in repeated:
            box = box.narrow(dim, 0, 1)
        once = np.empty(box.shape, dtype=f"V{size}")
        _gather_box(read, spot, box, once, size)
        into[...] = once
        return
    first = sum(a * s for a, s in zip(box.offset, strides, strict=True))
    span = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
    if span <= max(_SPREAD * box.elements, _GAP // size):
        data = np.frombuffer(read(spot.at + first * size, span * size), dtype=f"V{size}")
        into[...] = np.lib.stride_tricks.as_strided(data, box.shape, [s * size for s in strides])
        return
    dim = max((d for d, n in enumerate(box.shape) if n > 1), key=lambda d: strides[d])
    half = box.shape[dim] // 2
    before, after = (slice(None),) * dim + (slice(0, half),), (slice(None),) * dim + (slice(half, None),)
    _gather_box(read, spot, box.narrow(dim, 0, half), into[before], size)
    _gather_box(read, spot, box.narrow(dim, half, box.shape[dim] - half), into[after], size)
