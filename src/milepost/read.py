"""Reading: verified bytes of shard files, and their way into tensors. Torch is needed only for the tensors.

Every byte is checked against the file's table of checksums before it is used; the table and the header are checked
against the manifest. Reads go forward through each file, block by block, and keep the last block, so neighbouring
entries do not read a block twice.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
import xxhash

from milepost.core.dtypes import DTYPES
from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, ShardFile
from milepost.core.plan import ReadItem
from milepost.core.shardfile import CHECKSUMS, Entry, Header, read_header, seal_of
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint
from milepost.store import Reader, Store

WINDOW_BYTES = 16 * MIB
"""The most that is read at a time."""
MAX_TABLE_BYTES = 256 * MIB
"""The longest table of checksums that is read: enough for 32 TiB in blocks of a MiB. A file with holes can claim more."""
MAX_OPEN = 64
"""How many files stay open at once: a checkpoint of a large job has more than a process may open."""


@dataclass(frozen=True, slots=True)
class Damage:
    """One damaged place: the file, what is wrong, and the entries that it touches."""

    file: str
    reason: str
    entries: tuple[str, ...] = ()


class VerifiedFile:
    """One shard file, open: its header, and any range of its data, checked. Not safe for several threads at once."""

    def __init__(self, store: Store, manifest: Manifest, record: ShardFile) -> None:
        self.name = manifest.file_name(record.rank)
        self.where = f"{store.url}/{self.name}"
        self._block = manifest.block_bytes
        self._reader = self._open(store, record)
        try:
            self.header, self._sums = self._read_head(record, manifest)
        except BaseException:
            self._reader.close()
            raise
        self._memory = memoryview(bytearray(0))
        self._start, self._window = 0, self._memory
        self._wanted: list[tuple[int, int]] = []

    def _open(self, store: Store, record: ShardFile) -> Reader:
        try:
            reader = store.reader(self.name)
        except FileNotFoundError:
            raise CheckpointDamaged(
                f"{self.where} is missing. If a newer save replaced this checkpoint meanwhile, open it again."
            ) from None
        if reader.size_bytes != record.size_bytes:
            reader.close()
            raise CheckpointDamaged(
                f"{self.where} has {reader.size_bytes} bytes and was saved with {record.size_bytes}"
            )
        return reader

    def _read_head(
        self, record: ShardFile, manifest: Manifest
    ) -> "tuple[Header, np.ndarray[tuple[int], np.dtype[np.uint64]]]":
        """Header and table of checksums, checked against the manifest."""
        head = self._read(0, record.header_bytes)
        data_bytes = _data_bytes(record.size_bytes - record.header_bytes, self._block)
        table_bytes = record.size_bytes - record.header_bytes - data_bytes
        if table_bytes > MAX_TABLE_BYTES:
            raise UnsafeCheckpoint(f"{self.where} would have a table of {table_bytes} bytes, over {MAX_TABLE_BYTES}")
        table = self._read(record.header_bytes + data_bytes, table_bytes)
        if seal_of(bytes(head), bytes(table)) != record.checksum:
            raise CheckpointDamaged(f"{self.where}: its header or table of checksums is not what was saved")
        try:
            header = read_header(bytes(head), record.size_bytes, self._block)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.where}: {str(error)[:1000]}") from None
        if header.notes.get("save_id") != manifest.save_id or header.notes.get("rank") != str(record.rank):
            raise CheckpointDamaged(f"{self.where} belongs to another save or rank")
        return header, np.frombuffer(table, dtype="<u8")

    def _read(self, offset: int, length: int) -> memoryview:
        buffer = memoryview(bytearray(length))
        self._reader.read_into(offset, buffer)
        return buffer

    def entry(self, item: ReadItem, dtype: str) -> Entry:
        """The entry that a planned read is from. Raises CheckpointDamaged unless it is what the manifest says."""
        found, kind = self.header.entries.get(item.name), DTYPES[dtype]
        if found is None or found.shape != (*item.source.shape, *kind.inner) or found.dtype != kind.stored_as:
            raise CheckpointDamaged(f"{self.where} does not hold {item.name[:200]!r} as {dtype} {item.source.shape}")
        return found

    def expect(self, ranges: Iterable[tuple[int, int]]) -> None:
        """Announce the data ranges that will be asked for, so that neighbours are read together."""
        merged: list[tuple[int, int]] = []
        for start, stop in sorted(ranges):
            low, high = start // self._block * self._block, -(-stop // self._block) * self._block
            if merged and low <= merged[-1][1]:
                merged[-1] = (merged[-1][0], max(high, merged[-1][1]))
            else:
                merged.append((low, high))
        self._wanted = merged

    def data(self, start: int, stop: int) -> memoryview:
        """Bytes start..stop of the data, verified; valid until the next call. Raises CheckpointDamaged, naming entries."""
        low, high = (
            start // self._block * self._block,
            min(-(-stop // self._block) * self._block, self.header.data_bytes),
        )
        if low < self._start or high > self._start + len(self._window):
            self._fill(low, max(high, self._ahead(low)))
        return self._window[start - self._start : stop - self._start]

    def _ahead(self, low: int) -> int:
        """How far to read on from `low`: to the end of what was announced there, or one window."""
        end = next((b for a, b in self._wanted if a <= low < b), low)
        return min(end, low + WINDOW_BYTES, self.header.data_bytes)

    def _fill(self, low: int, high: int) -> None:
        kept_end = self._start + len(self._window)
        kept = min(kept_end, high) - low if self._start <= low < kept_end else 0
        tail = self._window[low - self._start : low - self._start + kept] if kept else b""
        if len(self._memory) < high - low:
            # Kept for the whole file: a copy into memory that was touched before is several times faster.
            room = min(WINDOW_BYTES + self._block, -(-self.header.data_bytes // self._block) * self._block)
            self._memory = memoryview(bytearray(max(high - low, room)))
        buffer = self._memory[: high - low]
        buffer[:kept] = tail
        self._window = self._memory[:0]  # until all of it is checked
        if low + kept < high:
            self._reader.read_into(self.header.header_bytes + low + kept, buffer[kept:])
        for block in range((low + kept) // self._block, -(-high // self._block)):
            at = block * self._block - low
            if xxhash.xxh3_64_intdigest(buffer[at : at + self._block]) != int(self._sums[block]):
                raise CheckpointDamaged(self._explain(block))
        self._start, self._window = low, buffer

    def _explain(self, block: int) -> str:
        names = self.entries_in(block)
        shown = ", ".join(repr(name[:200]) for name in names[:5]) + (
            f" and {len(names) - 5} more" if len(names) > 5 else ""
        )
        start = self.header.header_bytes + block * self._block
        return f"{self.where}: bytes {start}..{start + self._block} are not what was saved; they hold {shown}"

    def entries_in(self, block: int) -> list[str]:
        """The names of the entries that a block touches."""
        low, high = block * self._block, (block + 1) * self._block
        return [
            name
            for name, e in self.header.entries.items()
            if name != CHECKSUMS and e.data_offsets[0] < high and e.data_offsets[1] > low
        ]

    def check_all(self) -> list[Damage]:
        """Read everything; one `Damage` for each block that is not what was saved."""
        found = []
        for block in range(len(self._sums)):
            low = block * self._block
            length = min(self._block, self.header.data_bytes - low)
            data = self._read(self.header.header_bytes + low, length)
            if xxhash.xxh3_64_intdigest(data) != int(self._sums[block]):
                found.append(Damage(self.name, f"block {block}: {self._explain(block)}", tuple(self.entries_in(block))))
        return found

    def close(self) -> None:
        """Close the file."""
        self._reader.close()


def _data_bytes(rest_bytes: int, block: int) -> int:
    """How much of what follows the header is data: each block of it has eight bytes in the table behind it."""
    blocks = -(-rest_bytes // (block + 8))
    return rest_bytes - 8 * blocks


class Files:
    """The shard files of one checkpoint, opened when they are first needed; at most `MAX_OPEN` stay open."""

    def __init__(self, store: Store, manifest: Manifest) -> None:
        self._store, self.manifest = store, manifest
        self._records = {file.rank: file for file in manifest.files}
        self._open: dict[int, VerifiedFile] = {}

    def of(self, rank: int) -> VerifiedFile:
        """The file that `rank` wrote."""
        if rank not in self._open:
            if rank not in self._records:
                raise CheckpointDamaged(f"{self._store.url}: the manifest names data of rank {rank}, but no file of it")
            if len(self._open) >= MAX_OPEN:
                self._open.pop(next(iter(self._open))).close()
            self._open[rank] = VerifiedFile(self._store, self.manifest, self._records[rank])
        return self._open[rank]

    def close(self) -> None:
        """Close all files."""
        for file in self._open.values():
            file.close()
        self._open.clear()
