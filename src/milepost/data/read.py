"""Reading: shard files whose every byte is checked before it is used. Knows no torch.

Header and table of checksums are checked against the manifest when a file is opened; data is checked block by block
against the table, where it was read to.
"""

import contextlib
import logging
import sys
from array import array
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property, partial

import msgspec

from milepost.core.box import Shape
from milepost.core.division import PlannedRead
from milepost.core.dtypes import DTYPES
from milepost.core.limits import KIB, MIB
from milepost.core.manifest import Manifest, OlderFile, ShardFile
from milepost.core.reuse import OLDER, FileId, digests_by_name, id_of, unpack_older
from milepost.core.shardfile import (
    CHECKSUMS,
    SPAN_BLOCKS,
    Entry,
    Header,
    block_count,
    read_header,
    seal_of,
    slices,
    sums_of,
)
from milepost.data.collection_pause import CollectionPaused
from milepost.data.parts import MAYBE_REPLACED, open_parts
from milepost.data.transfer import Meter, Transfer, new_pages, run_all
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint
from milepost.store import Reader, Store, Traits
from milepost.store.siblings import beside
from milepost.store.stopping import side_by_side

_log = logging.getLogger("milepost")
MAX_TABLE_BYTES = 256 * MIB
"""The longest table of checksums that is read: enough for 2 TiB in one file. A file with holes can claim more."""
_WARM_BYTES = 512 * KIB
"""How much is read before it is checked: it is still in the processor's cache then."""
_REMOVED = "was removed while it was read"
MAX_OPEN = 128
"""How many files stay open at once: a checkpoint of a large job has more than a process may open."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place: the file, what is wrong, and the entries that it touches."""

    file: str
    reason: str
    entries: tuple[str, ...] = ()


class VerifiedFile:
    """One shard file, open: its header, and any blocks of its data, checked. May be used by several threads at once."""

    def __init__(self, store: Store, manifest: Manifest, record: ShardFile) -> None:
        self.name, self.id = manifest.shown_name(record), id_of(record, manifest)
        self.where = f"{store.url}/{manifest.name_of(record)}"
        self.block_bytes = manifest.block_bytes
        self.parts, self.traits = manifest.parts_of(record), store.traits
        self._opening = partial(open_parts, store, self.parts)
        with self._present("is missing"):
            self.reader = self._opening()
        try:
            self.header, self._table = self._read_head(record)
        except BaseException:
            self.reader.close()
            raise
        # Where a request costs a round trip, a job is one request. Else it is checked while it is in the cache.
        self._at_once_bytes = 2**63 if self.traits.requests else max(_WARM_BYTES, self._table.span_bytes)

    @contextlib.contextmanager
    def _present(self, what: str) -> Iterator[None]:
        """Turn FileNotFoundError into CheckpointDamaged."""
        try:
            yield
        except FileNotFoundError:
            raise CheckpointDamaged(f"{self.where} {what}. {MAYBE_REPLACED}") from None

    def _read_head(self, record: ShardFile) -> "tuple[Header, _ChecksumTable]":
        """Header and table, checked against the manifest."""
        head, table = self._head_and_table(record)
        if self.traits.requests and seal_of(head, table) != record.checksum:
            self._open_again("its header or table")
            head, table = self._head_and_table(record)
        if seal_of(head, table) != record.checksum:
            raise CheckpointDamaged(f"{self.where}: its header or table of checksums is not what was saved")
        try:
            with CollectionPaused():
                header = read_header(head, record.size_bytes, self.block_bytes, record.digests, spans=record.spans)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.where}: {str(error)[:1000]}") from None
        if (header.notes.get("save_id"), header.notes.get("rank")) != (self.id.save_id, str(self.id.writer)):
            raise CheckpointDamaged(f"{self.where} belongs to another save or rank")
        return header, _ChecksumTable(table, header.data_bytes, self.block_bytes, spans=record.spans)

    def _open_again(self, what: str) -> None:
        """Prepare to read once more what is not as it was saved. Other threads go on with the reader that they have."""
        _log.warning("%s: %s arrived damaged, and is read again", self.where, what)
        with self._present(_REMOVED):
            self.reader = self._opening()

    def _head_and_table(self, record: ShardFile) -> tuple[bytes, bytes]:
        start = record.header_bytes + self.parts.data_bytes
        if record.size_bytes - start > MAX_TABLE_BYTES:
            raise UnsafeCheckpoint(
                f"{self.where} would have a table of {record.size_bytes - start} bytes, over {MAX_TABLE_BYTES}"
            )
        wanted = [(0, record.header_bytes), (start, record.size_bytes - start)]
        at_once = 2 if self.traits.requests and len(self.parts) > 1 else 1  # one round trip for both
        head, table = side_by_side(lambda one: self._bytes(*one), wanted, at_once)
        return head, table

    @property
    def table(self) -> bytes:
        """The table as it stands in the file: checksums of blocks and spans, and digests of entries."""
        return self._table.text

    @property
    def checksums(self) -> "array[int]":
        """The checksum of each block of the data, as it was saved. Not to be changed."""
        return self._table.blocks

    @cached_property
    def older(self) -> dict[str, FileId]:
        """The entries that this rank has in files of earlier saves, and which files those are."""
        with self._valid():
            return unpack_older(self.header.notes.get(OLDER, ""))

    @cached_property
    def digests(self) -> dict[str, bytes]:
        """The digests of its entries, and of those that this rank has in files of earlier saves; empty without any."""
        with self._valid():
            return digests_by_name(self.header, self._table.digests)

    @contextlib.contextmanager
    def _valid(self) -> Iterator[None]:
        """Turn ValueError into CheckpointDamaged."""
        try:
            yield
        except (ValueError, RecursionError) as error:
            raise CheckpointDamaged(f"{self.where}: {str(error)[:1000]}") from None

    def entry(self, item: PlannedRead, dtype: str) -> Entry:
        """The entry that a planned read is from. Raises CheckpointDamaged unless it is what the manifest says."""
        found, kind = self.header.entries.get(item.name), DTYPES[dtype]
        if found is None or found.shape != (*item.source.shape, *kind.inner) or found.dtype != kind.stored_as:
            raise CheckpointDamaged(f"{self.where} does not hold {item.name[:200]!r} as {dtype} {item.source.shape}")
        if found.data_offsets[0] % kind.size_bytes:
            raise CheckpointDamaged(
                f"{self.where} holds {item.name[:200]!r} at a place that is not aligned for {dtype}"
            )
        return found

    def packed(self, item: PlannedRead) -> bytes:
        """The verified bytes of an entry that was stored through transforms. Raises CheckpointDamaged for others."""
        found = self.header.entries.get(item.name)
        if found is None or found.dtype != "U8" or len(found.shape) != 1:
            raise CheckpointDamaged(f"{self.where} does not hold {item.name[:200]!r} as transformed bytes")
        return self.data(*found.data_offsets)

    def order(self, item: PlannedRead) -> Shape | None:
        """The dimensions from the outermost to the innermost in the file; None for row-major order, as here."""
        del item
        return None

    def read(self, start: int, views: Sequence[memoryview], *, verify: bool = True) -> None:
        """Fill the views with the data from `start`, where a block starts. Raises CheckpointDamaged, naming entries.

        What came over a network and is not what was saved is asked for once more: it may have changed on its way.
        """
        if not verify:
            self._fill(start, views)
            return
        size = self._at_once_bytes
        for part in slices(views, size, -start % size):  # so that each but the first and the last is a whole span
            self._fill(start, part)
            if damaged := self._still_damaged(start, part):
                raise CheckpointDamaged(self._explain(damaged[0]))
            start += sum(map(len, part))

    def _still_damaged(self, start: int, views: Sequence[memoryview]) -> list[int]:
        """The damaged blocks of what was read from `start`: after another read, where it came over a network."""
        damaged = list(self._damaged(start, views))
        if damaged and self.traits.requests:
            self._open_again(f"a range at {start}")
            self._fill(start, views)
            damaged = list(self._damaged(start, views))
        return damaged

    def end_of_part(self, start: int) -> int:
        """Where the object ends that holds this byte of the data, as an offset in the data."""
        return self.parts[self.parts.at(self.header.header_bytes + start)].stop - self.header.header_bytes

    def read_cold(self, start: int, block: memoryview) -> None:
        """Fill page-aligned memory with the data from `start`, past the page cache. Checks nothing."""
        with self._present(_REMOVED):
            self.reader.read_cold(self.header.header_bytes + start, block)

    def _fill(self, start: int, views: Sequence[memoryview]) -> None:
        with self._present(_REMOVED):
            self.reader.read(self.header.header_bytes + start, views)

    def _bytes(self, start: int, count: int) -> bytes:
        # A store that answers slowly has not looked for it when it was opened.
        with self._present("is missing" if self.traits.requests else _REMOVED):
            return read_bytes(self.reader, start, count)

    def check(self, start: int, views: Sequence[memoryview]) -> None:
        """Check the data that was read from `start`, where a block starts. Raises CheckpointDamaged, naming entries."""
        damaged = next(self._damaged(start, views), None)
        if damaged is not None:
            raise CheckpointDamaged(self._explain(damaged))

    def _damaged(self, start: int, views: Sequence[memoryview]) -> Iterator[int]:
        """The blocks that are not what was saved. Whole spans are summed by one call each, the rest block by block."""
        size, end = self._table.span_bytes, self.header.data_bytes
        for part in slices(views, size, -start % size):
            stop = start + sum(map(len, part))
            whole = start % size == 0 and (stop - start == size or stop == end)
            if not whole or not self._table.is_span(start, part):
                yield from self._damaged_blocks(start, part)
            start = stop

    def _damaged_blocks(self, start: int, views: Sequence[memoryview]) -> Iterator[int]:
        first = start // self.block_bytes
        found = sums_of(views, self.block_bytes)
        expected = self._table.blocks[first : first + len(found)].tolist()
        if found != expected:
            yield from (first + i for i, (a, b) in enumerate(zip(found, expected, strict=True)) if a != b)

    def data(self, start: int, stop: int) -> bytes:
        """Bytes start..stop of the data, verified: for small things."""
        low = start // self.block_bytes * self.block_bytes
        high = min(-(-stop // self.block_bytes) * self.block_bytes, self.header.data_bytes)
        blocks = memoryview(bytearray(high - low))
        self.read(low, [blocks])
        return bytes(blocks[start - low : stop - low])

    def _explain(self, block: int) -> str:
        names = self.entries_in(block)
        shown = ", ".join(repr(name[:200]) for name in names[:5]) + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )
        start = self.header.header_bytes + block * self.block_bytes
        return f"{self.where}: bytes {start}..{start + self.block_bytes} are not what was saved; they hold {shown}"

    def entries_in(self, block: int) -> list[str]:
        """The names of the entries that a block touches."""
        low, high = block * self.block_bytes, (block + 1) * self.block_bytes
        return [
            name
            for name, e in self.header.entries.items()
            if name != CHECKSUMS and e.data_offsets[0] < high and e.data_offsets[1] > low
        ]

    def check_all(self, transfer: Transfer, meter: Meter) -> list[Damage]:
        """Read everything; one `Damage` for each block that is not what was saved."""
        found: dict[int, Damage] = {}

        def look(start: int, block: memoryview) -> None:
            for i in self._still_damaged(start, [block]):
                found[i] = Damage(self.name, f"block {i}: {self._explain(i)}", tuple(self.entries_in(i)))

        self.read_through(look, transfer, meter, verify=False)
        return [found[i] for i in sorted(found)]

    def read_through(
        self, look: Callable[[int, memoryview], None], transfer: Transfer, meter: Meter, *, verify: bool = True
    ) -> None:
        """Read all data, block by block, and call `look` with each, from several threads. Raises CheckpointDamaged."""
        total, transfer = self.header.data_bytes, transfer.to_read(self.traits)
        size = -(-transfer.block_bytes // self.block_bytes) * self.block_bytes

        def make_worker() -> Callable[[int], None]:
            memory = memoryview(new_pages(size))

            def read(start: int) -> None:
                block = memory[: min(size, total - start)]
                self.read(start, [block], verify=verify)
                look(start, block)
                meter.add(len(block))

            return read

        threads, apart = transfer.threads_for(total, 1, size), bool(self.traits.requests)
        run_all(iter(range(0, total, size)), make_worker, threads, meter, apart=apart)

    def close(self) -> None:
        """Close the file."""
        self.reader.close()


class _ChecksumTable:
    """The table of a file, taken apart. In a file without spans, each block is a span of its own."""

    __slots__ = ("blocks", "digests", "span_bytes", "spans", "text")

    def __init__(self, text: bytes, data_bytes: int, block_bytes: int, *, spans: bool) -> None:
        self.text, self.span_bytes = text, block_bytes * (SPAN_BLOCKS if spans else 1)
        end = 8 * block_count(data_bytes, block_bytes)
        self.blocks = self.spans = _checksums_in(text[:end])
        if spans:
            start, end = end, end + 8 * block_count(data_bytes, self.span_bytes)
            self.spans = _checksums_in(text[start:end])
        self.digests = text[end:]

    def is_span(self, start: int, views: Sequence[memoryview]) -> bool:
        """Whether these are the bytes of the span that begins at `start`."""
        return sums_of(views, self.span_bytes) == [self.spans[start // self.span_bytes]]


def _checksums_in(table: bytes) -> "array[int]":
    """The numbers of a table. An array, since numpy takes as long to import as a whole command of the command line."""
    found = array("Q", table)
    if sys.byteorder == "big":
        found.byteswap()
    return found


def read_bytes(reader: Reader, start: int, count: int) -> bytes:
    """Bytes start..start+count of an open file."""
    buffer = bytearray(count)
    reader.read(start, [memoryview(buffer)])
    return bytes(buffer)


def read_small(reader: Reader, where: str, max_bytes: int) -> bytes:
    """All bytes of an open file, which is then closed. Raises UnsafeCheckpoint for more than `max_bytes`."""
    with contextlib.closing(reader):
        if reader.size_bytes > max_bytes:
            raise UnsafeCheckpoint(f"{where} has {reader.size_bytes} bytes, over {max_bytes}")
        return read_bytes(reader, 0, reader.size_bytes)


class Files:
    """The shard files of one checkpoint, opened when they are first needed; at most `MAX_OPEN` are kept open.

    Each has a number: the rank that wrote it; the files of earlier saves have the numbers after all ranks.
    """

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self.manifest = store, manifest
        self._records: dict[int, ShardFile] = {file.rank: file for file in manifest.files}
        self._records.update(enumerate(manifest.older, manifest.world))
        self._open: dict[int, VerifiedFile] = {}

    @property
    def url(self) -> str:
        """Where the checkpoint is, for messages."""
        return self._store.url

    @property
    def traits(self) -> Traits:
        """Those of the store that holds the files."""
        return self._store.traits

    @property
    def numbers(self) -> Sequence[int]:
        """The numbers of all files."""
        return list(self._records)

    def record(self, number: int) -> ShardFile:
        """What the manifest says of a file."""
        return self._records[number]

    @cached_property
    def _older(self) -> dict[tuple[int, FileId], int]:
        """The numbers of the files of earlier saves, by the rank whose entries they hold, and by what they are."""
        manifest = self.manifest
        return {
            (file.rank, id_of(file, manifest)): number for number, file in enumerate(manifest.older, manifest.world)
        }

    def locate(self, item: PlannedRead) -> PlannedRead:
        """The same read, with the number of the file that holds it in place of the rank whose it is."""
        if not self.manifest.older:
            return item
        number = self.number_of(item.rank, item.name)
        return item if number == item.rank else msgspec.structs.replace(item, rank=number)

    def number_of(self, rank: int, name: str) -> int:
        """The number of the file that holds an entry of this rank."""
        if not self.manifest.older or rank >= self.manifest.world:
            return rank
        file = self.of(rank)
        older = file.older.get(name)
        if older is None:
            return rank
        if (rank, older) not in self._older:
            raise CheckpointDamaged(f"{file.where} has {name[:200]!r} in a file that the manifest does not name")
        return self._older[rank, older]

    def holding(self, rank: int, name: str) -> VerifiedFile:
        """The file that holds an entry of this rank."""
        return self.of(self.number_of(rank, name))

    def open_ahead(self, numbers: Iterable[int]) -> None:
        """Open these files, at most `MAX_OPEN`, side by side where each costs a round trip or two."""
        missing = [number for number in numbers if number not in self._open and number in self._records]
        if self.traits.requests and len(missing) > 1:
            self._make_room(len(missing))
            files = side_by_side(self.make, missing, self.traits.requests)
            self._open.update(zip(missing, files, strict=True))

    def in_turn(self, numbers: Sequence[int]) -> Iterator[int]:
        """These numbers, one after the other, with the files opened some ahead."""
        step = max(MAX_OPEN // 2, 1)
        for at in range(0, len(numbers), step):
            batch = numbers[at : at + step]
            self.open_ahead(batch)
            yield from batch

    @cached_property
    def transforms(self) -> dict[str, tuple[str, ...]]:
        """The tensors whose bytes were transformed, by key, and how."""
        return {tensor.key: tensor.transforms for tensor in self.manifest.tensors if tensor.transforms}

    def of(self, number: int) -> VerifiedFile:
        """The file that a rank wrote, or one of an earlier save."""
        found = self._open.pop(number, None)
        if found is None:
            if number not in self._records:
                raise CheckpointDamaged(
                    f"{self._store.url}: the manifest names data of rank {number}, but no file of it"
                )
            self._make_room(1)
            found = self.make(number)
        self._open[number] = found  # at the end: the file that was not asked for the longest is the first
        return found

    def _make_room(self, count: int) -> None:
        while self._open and len(self._open) + count > MAX_OPEN:
            # Dropped, not closed: a worker may still read from it. It closes with the last reference.
            self._open.pop(next(iter(self._open)))

    def make(self, number: int) -> VerifiedFile:
        """Open a file; `of` does that once."""
        record = self._records[number]
        return VerifiedFile(place_of(self._store, record), self.manifest, record)

    def name_of(self, number: int) -> str:
        """The name of a file, for people."""
        record = self._records.get(number)
        return self.manifest.shown_name(record) if record is not None else self.manifest.file_name(number)

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()


def place_of(store: Store, record: ShardFile) -> Store:
    """The store that holds a file of the checkpoint at `store`: that one, or that of a checkpoint beside it."""
    if not isinstance(record, OlderFile) or not record.folder:
        return store
    return beside(store, record.folder)
