"""One shard file on its way to another place: the same data and checksums, under the id of another save.

Every byte is checked before it is written: header and table when the file is opened, and each block in the memory that
it is then written from.
"""

import threading
from collections.abc import Iterator
from typing import Protocol

from msgspec import structs

from milepost.copying.flow import Flow
from milepost.core.manifest import OlderFile, ShardFile, older_name, shard_name
from milepost.core.shardfile import FileParts, encode_header, seal_of
from milepost.data.new_files import create_part, is_there, start_file
from milepost.data.read import Files, VerifiedFile
from milepost.errors import AlreadyExists
from milepost.store import Store
from milepost.store.base import Buffer
from milepost.store.stopping import side_by_side


class FileCopy:
    """One shard file. The worker that gets the first block of it begins it, and the one that moves the last ends it."""

    def __init__(self, source: Files, number: int, target: Store, save_id: str, flow: Flow) -> None:
        record = source.record(number)
        self._source, self._number, self._record, self._target = source, number, record, target
        self._save_id, self._flow = save_id, flow
        self.data_bytes = source.manifest.parts_of(record).data_bytes
        self.written: ShardFile | None = None
        """What the new manifest says of the file, once it is whole and durable."""
        self._left = max(-(-self.data_bytes // flow.block_bytes), 1)
        self._lock = threading.Lock()
        self._file: VerifiedFile | None = None
        self._made: _NewFile | None = None

    def starts(self) -> Iterator[int]:
        """Where its blocks start."""
        return iter(range(0, max(self.data_bytes, 1), self._flow.block_bytes))  # of a size that may be a lie

    def move(self, start: int, memory: memoryview) -> int:
        """Copy the block that starts there, through this memory. Gives the number of bytes.

        Raises CheckpointDamaged, naming file, tensors and boxes, for bytes that are not what was saved.
        """
        file, made = self._begun()
        block = memory[: min(self._flow.block_bytes, self.data_bytes - start)]
        self._read(file, start, block)
        made.put(start, block)
        with self._lock:
            self._left -= 1
            is_last = not self._left
        if is_last:
            self.written = made.end()
            self._close()
        return len(block)

    def abort(self) -> None:
        """Give up what is not finished."""
        with self._lock:
            if self._made is not None and self.written is None:
                self._made.abort()
            self._close()

    def _close(self) -> None:
        file, self._file, self._made = self._file, None, None
        if file is not None:
            file.close()

    def _begun(self) -> "tuple[VerifiedFile, _NewFile]":
        with self._lock:
            if self._file is None or self._made is None:
                self._file = self._source.make(self._number)
                self._made = self._begin(self._file)
            return self._file, self._made

    def _begin(self, file: VerifiedFile) -> "_NewFile":
        record, notes = self._record, file.header.notes
        if isinstance(record, OlderFile):  # it stays the file of the save that wrote it, under a name of this one
            name = older_name(self._save_id, record.rank, record.save_id, record.writer)
        else:
            name, notes = shard_name(self._save_id, record.rank), {**notes, "save_id": self._save_id}
        head, table = encode_header(file.header.entries, notes), file.table
        size_bytes = len(head) + self.data_bytes + len(table)
        is_cut = self._target.traits.part_bytes and self.data_bytes > self._flow.block_bytes
        part_bytes = self._flow.block_bytes if is_cut else 0
        is_older = isinstance(record, OlderFile)
        written = structs.replace(
            record,
            size_bytes=size_bytes,
            header_bytes=len(head),
            checksum=seal_of(head, table),
            part_bytes=part_bytes,
            **({"folder": ""} if is_older else {}),
        )
        if self._target.traits.part_bytes:
            parts = FileParts(name, len(head), self.data_bytes, size_bytes, part_bytes)
            return _InParts(self._target, written, head, table, parts)
        return _InPlace(self._target, written, head, table, name, self._flow.direct)

    def _read(self, file: VerifiedFile, start: int, block: memoryview) -> None:
        at_header, size = file.header.header_bytes, self._flow.range_bytes
        if len(block) > size:
            ranges = [(start + at, block[at : at + size]) for at in range(0, len(block), size)]
            side_by_side(lambda one: file.read(one[0], [one[1]]), ranges, self._flow.reads)
        elif self._flow.direct and file.reader.is_cold(at_header + start, len(block)):
            file.read_cold(start, block)
            file.check(start, [block])
        else:
            file.read(start, [block])


class _NewFile(Protocol):
    """A file that is being made of the blocks of another."""

    def put(self, start: int, block: memoryview) -> None:
        """Write the data from `start`."""

    def end(self) -> ShardFile:
        """Make it whole and durable, and give what a manifest says of it."""

    def abort(self) -> None:
        """Give up. Never raises."""


class _InPlace:
    """One file, written in place."""

    def __init__(self, store: Store, written: ShardFile, head: bytes, table: bytes, name: str, direct: bool) -> None:
        self._store, self._written, self._head, self._table, self._name = store, written, head, table, name
        self._writer = start_file(store, name, written.size_bytes, direct)

    def put(self, start: int, block: memoryview) -> None:
        """See `_NewFile`."""
        self._writer.write(len(self._head) + start, [block])

    def end(self) -> ShardFile:
        """See `_NewFile`."""
        self._writer.write(0, [self._head])
        self._writer.write(self._written.size_bytes - len(self._table), [self._table])
        try:
            self._writer.commit()
        except AlreadyExists:
            # Nobody else writes this name: the reply to this very commit was lost.
            if not is_there(self._store, self._name, self._written.size_bytes):
                raise
        return self._written

    def abort(self) -> None:
        """See `_NewFile`."""
        self._writer.abort()


class _InParts:
    """Several objects, each made by one request."""

    def __init__(self, store: Store, written: ShardFile, head: bytes, table: bytes, parts: FileParts) -> None:
        self._store, self._written, self._head, self._table, self._parts = store, written, head, table, parts

    def put(self, start: int, block: memoryview) -> None:
        """See `_NewFile`."""
        data: list[Buffer] = [self._head, block] if start == 0 else [block]
        if len(self._parts) == 1:
            create_part(self._store, self._parts[0], [*data, self._table])
        else:
            create_part(self._store, self._parts[start // self._written.part_bytes], data)

    def end(self) -> ShardFile:
        """See `_NewFile`."""
        if len(self._parts) > 1:
            create_part(self._store, self._parts[len(self._parts) - 1], [self._table])
        return self._written

    def abort(self) -> None:
        """Nothing is open. The attempt removes what was made."""
