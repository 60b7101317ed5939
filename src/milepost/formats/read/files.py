"""Files of other libraries, as `data/place.py` reads shard files: entries in one address space.

Where every entry is aligned in its file, as in safetensors files and files of `torch.save`, an address is a position in
the file. Elsewhere, as in DCP's files, whose items start at any byte, the entries get new, aligned addresses one after
the other, and reading translates. Tensors that do not lie in one run are gathered when they are read.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

from milepost.core.box import Shape
from milepost.core.division import PlannedRead
from milepost.core.dtypes import DTYPES
from milepost.core.limits import KIB, MIB, PAGE_BYTES
from milepost.core.manifest import Manifest
from milepost.core.shardfile import Entry, FileParts, Header
from milepost.data.read import Damage, Files, VerifiedFile, read_bytes
from milepost.data.transfer import Meter, Transfer
from milepost.data.transforms import restored
from milepost.errors import CheckpointDamaged, CheckpointError
from milepost.formats.read.archive import Archive, Window
from milepost.formats.read.content import read_tensor
from milepost.formats.read.crc import Cursor, RangeSum, Sums
from milepost.formats.read.spots import GAP_BYTES, BackingStorage, FileEntry, Item, Spot, gather, spot_of
from milepost.store import Reader, Store
from milepost.store.base import OneWayReader

_ALIGN = 64
SLACK_BYTES = MIB
"""The most bytes that an archive may have besides its tensor."""
_GATHER_BYTES = 512 * KIB
_SMALL_STORAGE = 16 * MIB
"""A storage behind views is checked up to this size; checking a larger one would read far more than is wanted."""


class ForeignFile(VerifiedFile):
    """One file of another library, open. May be used by several threads at once."""

    def __init__(self, store: Store, name: str, slots: Sequence[FileEntry], open_file: Callable[[], Reader]) -> None:
        self.name, self.where, self.block_bytes = name, f"{store.url}/{name}", PAGE_BYTES
        try:
            self._raw = open_file()
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.where} is missing") from None
        self._window = Window(self._raw, store)
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
        self.parts, self.traits = FileParts(name, 0, data_bytes, data_bytes), store.traits

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
            packed = self._read_raw(item.offset, item.length)
            what = f"{slot.key[:200]!r} in {self.where}"
            kept = self._unpacked = (
                item,
                restored(packed, item.transforms, max(slot.size_bytes, 64 * item.length) + SLACK_BYTES, what),
            )
        return kept[1]

    def read(self, start: int, views: Sequence[memoryview], *, verify: bool = True) -> None:
        """Fill the views with the bytes from `start` on; bytes that no known entry covers are left as they are."""
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
        """Check the storages of views that were looked up: a view has no checksum of its own."""
        views, self._views = self._views, []
        damaged = next(self._damaged_storages(views), None)
        if damaged is not None:
            self._views[:0] = views  # so that the next read raises it again
            raise CheckpointDamaged(damaged.reason)

    def _damaged_storages(self, slots: Iterable[FileEntry]) -> Iterator[Damage]:
        """Check the storages behind these entries. A storage that was right is not checked again."""
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
        """Fill views with an entry that does not lie in one run in the file, in small steps."""
        cursor, stop = Cursor(views), start + sum(map(len, views))
        for low in range(start, stop, _GATHER_BYTES):
            high = min(low + _GATHER_BYTES, stop)
            _fill(cursor.take(high - low), self._gathered(slot, spot, low, high))

    def _gathered(self, slot: FileEntry, spot: Spot, start: int, stop: int) -> bytes:
        """Bytes start..stop of an entry, as if it lay in rows."""
        read = self._read_raw if spot.inside is None else _from_memory(self._unpack(slot, spot.inside))
        return read(spot.at + start, stop - start) if spot.strided is None else gather(read, spot, start, stop)

    def _read_raw(self, at: int, length: int) -> bytes:
        return read_bytes(self._raw, at, length)

    def check(self, start: int, views: Sequence[memoryview]) -> None:
        """Check the records that these bytes complete. Raises CheckpointDamaged, naming file and key."""
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

        def look(start: int, block: memoryview) -> None:
            damaged = self._checks.damaged(start, [block])
            found.extend(Damage(self.name, self._explain_sum(one), (one.what,)) for one in damaged)

        self.read_through(look, transfer, meter, verify=False)
        return found

    def close(self) -> None:
        """Close the file."""
        self._raw.close()


class ForeignFiles(Files):
    """The files of a checkpoint of another library, opened when they are first needed.

    `keeps`: what values of the manifest need for as long as the files are there.
    """

    def __init__(
        self,
        store: Store,
        manifest: Manifest,
        names: Sequence[str],
        slots: Sequence[Sequence[FileEntry]],
        opening: Any,
        keeps: object = None,
    ) -> None:
        super().__init__(store, manifest)
        self._names, self._slots, self._opening, self._keeps = names, slots, opening, keeps

    def name_of(self, rank: int) -> str:
        """The name of a file."""
        return self._names[rank]

    def make(self, rank: int) -> VerifiedFile:
        """Open a file."""
        name = self._names[rank]
        return ForeignFile(self._store, name, self._slots[rank], lambda: self._opening(name))


class _Warm(OneWayReader):
    """A reader whose entries have new addresses, so that direct reads cannot use the pages of the file."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self.size_bytes = reader.size_bytes

    def read(self, offset: int, views: Sequence[memoryview]) -> None:
        self._reader.read(offset, views)

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
    """The requests, joined where the gap between two is small, with memory for the gap."""
    start, end, views = 0, 0, list[memoryview]()
    for position, target in requests:
        if views and end <= position <= end + GAP_BYTES:
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
