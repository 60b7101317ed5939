"""Milepost's own format from another checkpoint: the same files that a save writes, from tensors that are read on the way.

No rank has to ask another what there is: all see the source. So they meet twice, to agree on a name and to commit.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import numpy as np
import xxhash

from milepost.comm import Comm, Phase, together
from milepost.commit.attempt import take_aim
from milepost.commit.publish import publish, sweep
from milepost.core.division import PlannedWrite, share_out, written_by
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Whole
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import ShardFile, Value, new_manifest, shard_name
from milepost.core.ranks import pack_ranks
from milepost.core.shardfile import NewEntry, make_header, seal_of, sums_of
from milepost.core.table import TensorRow
from milepost.core.tree import Node
from milepost.data.transfer import Meter, Transfer
from milepost.errors import CheckpointError, InvalidState, RanksDisagree, StorageError
from milepost.formats.write.content import Content, FilePiece, LateBox, LateReader, write_range
from milepost.store import Store
from milepost.version import __version__


@dataclass(frozen=True, slots=True)
class Contents:
    """What the new checkpoint holds; `names` maps each of its tensors to the key that it has in the source."""

    rows: tuple[TensorRow, ...]
    reader: LateReader
    names: dict[str, str]
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    metadata: Any

    def digest(self) -> bytes:
        """Equal on two ranks that would write the same."""
        return xxhash.xxh3_128_digest(msgspec.json.encode((self.rows, self.nodes, self.values)))


_FILES = msgspec.msgpack.Decoder(ShardFile | None)


def write_milepost(
    store: Store,
    find: Callable[[], Contents],
    comm: Comm,
    transfer: Transfer,
    meter: Meter,
    *,
    overwrite: bool,
) -> None:
    """Write and commit a checkpoint with the contents that `find` gives on every rank. Atomic, as a save is."""
    found: list[Contents] = []

    def phase(step: str) -> Phase:
        return Phase("converting to", store.url, step)

    def describe() -> bytes:
        found.append(find())
        return found[0].digest()

    def start(digests: list[bytes]) -> bytes:
        if len(set(digests)) > 1:
            raise RanksDisagree("the ranks do not see the same source, or pass other arguments")
        return msgspec.msgpack.encode(take_aim(store, overwrite=overwrite))

    generation, save_id = msgspec.msgpack.decode(together(comm, phase("planning"), describe, start))
    contents, layout = found[0], Whole(pack_ranks(range(comm.size)))
    tensors, layouts = share_out(contents.rows, {row.key: layout for row in contents.rows}, comm.size)
    items = [item for tensor in tensors for item in written_by(tensor, layouts[tensor.layout], comm.rank)]

    def work() -> bytes:
        late = {i.name: LateBox(contents.reader, contents.names[i.key], i.dtype, i.box) for i in items}
        return msgspec.msgpack.encode(_write_shard(store, save_id, comm.rank, items, late, transfer, meter))

    def commit(packed: list[bytes]) -> bytes:
        written = [_FILES.decode(data) for data in packed]
        manifest = new_manifest(
            generation,
            save_id,
            datetime.now(UTC).isoformat(timespec="seconds"),
            f"milepost {__version__}",
            comm.size,
            metadata=contents.metadata,
            layouts=layouts,
            tensors=tensors,
            tree=contents.nodes,
            values=contents.values,
            per_rank=(),
            files=tuple(file for file in written if file is not None),
        )
        publish(store, manifest)
        sweep(store, manifest)
        return b""

    try:
        together(comm, phase("writing"), work, commit)
    except CheckpointError as error:
        # Where the coordinator did not answer it may still commit, and the file must stay; a later save sweeps it.
        if comm.size == 1 or error.failures:
            with contextlib.suppress(StorageError):  # the error that we met first says more
                store.delete(shard_name(save_id, comm.rank))
        raise
    meter.finish()


def _write_shard(
    store: Store,
    save_id: str,
    rank: int,
    items: list[PlannedWrite],
    late: dict[str, LateBox],
    transfer: Transfer,
    meter: Meter,
) -> ShardFile | None:
    """One rank's shard file, as `milepost.data.write` makes it."""
    if not items:
        return None
    entries = [NewEntry(item.name, item.dtype, item.box.shape) for item in items]
    # Wide elements first: then each entry is aligned to its element size without padding, which the format has not.
    entries.sort(key=lambda entry: -DTYPES[entry.dtype].size_bytes)
    notes = {"format": "milepost", "save_id": save_id, "rank": str(rank)}
    name = shard_name(save_id, rank)
    try:
        head, header = make_header(entries, notes, BLOCK_BYTES)
    except ValueError as error:
        raise InvalidState(f"{store.url}/{name} cannot be written: {error}") from None
    first, stop = header.header_bytes, header.header_bytes + header.data_bytes
    pieces = [
        FilePiece(first + header.entries[entry.name].data_offsets[0], entry.size_bytes, late[entry.name])
        for entry in entries
    ]
    sums = np.zeros(header.table_bytes // 8, dtype="<u8")

    def seen(position: int, view: memoryview) -> None:
        found = sums_of([view], BLOCK_BYTES)
        at = (position - first) // BLOCK_BYTES
        sums[at : at + len(found)] = found

    meter.expect(header.data_bytes)
    writer = store.writer(name, header.size_bytes, direct=transfer.direct)
    try:
        writer.write(0, [head])
        write_range(writer, Content(name, header.size_bytes, pieces), first, stop, transfer, meter, seen)
        table = sums.tobytes()
        writer.write(stop, [table])
        writer.commit()
    except BaseException:
        writer.abort()
        raise
    return ShardFile(rank, header.size_bytes, header.header_bytes, seal_of(head, table))
