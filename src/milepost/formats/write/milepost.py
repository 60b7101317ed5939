"""Milepost's own format from another checkpoint: the files that a save writes, from tensors that are read as needed.

All ranks see the source, so none has to describe it to another. They meet twice: to agree on a name, and to commit.
"""

import contextlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

import msgspec
import xxhash

from milepost.comm import Comm, Phase, together
from milepost.commit.publish import aim, exists, publish, sweep
from milepost.core.division import share_out, written_by
from milepost.core.layout import Whole
from milepost.core.manifest import ShardFile, Value, new_manifest, shard_name
from milepost.core.ranks import pack_ranks
from milepost.core.shardfile import NewEntry
from milepost.core.table import TensorRow
from milepost.core.tree import Node
from milepost.core.wire import Wire
from milepost.data.late import LateBox, LateReader
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import EntryToWrite, write_shard
from milepost.errors import CheckpointError, InvalidRequest, RanksDisagree, StorageError
from milepost.store import Store
from milepost.version import __version__


@dataclass(frozen=True, slots=True)
class Contents:
    """What the new checkpoint holds. `names` maps the key of each tensor to its key in the source."""

    rows: tuple[TensorRow, ...]
    reader: LateReader
    names: dict[str, str]
    nodes: tuple[Node, ...]
    values: tuple[Value, ...]
    metadata: Any

    def digest(self) -> bytes:
        """Equal on two ranks that would write the same."""
        return xxhash.xxh3_128_digest(msgspec.json.encode((self.rows, self.nodes, self.values)))


_FILES: Wire[ShardFile | None] = Wire(ShardFile | None)
_AIM = Wire(tuple[int, str])


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
        if not overwrite and exists(store):
            raise InvalidRequest(f"there is a checkpoint at {store.url} already; pass overwrite=True to replace it")
        return _AIM.pack(aim(store))

    generation, save_id = _AIM.unpack(together(comm, phase("planning"), describe, start))
    contents, layout = found[0], Whole(pack_ranks(range(comm.size)))
    tensors, layouts = share_out(contents.rows, {row.key: layout for row in contents.rows}, comm.size)
    items = [item for tensor in tensors for item in written_by(tensor, layouts[tensor.layout], comm.rank)]

    def work() -> bytes:
        entries = [
            EntryToWrite(
                NewEntry(item.name, item.dtype, item.box.shape),
                LateBox(contents.reader, contents.names[item.key], item.dtype, item.box),
            )
            for item in items
        ]
        return _FILES.pack(write_shard(store, save_id, comm.rank, entries, transfer, meter).file)

    def commit(packed: list[bytes]) -> bytes:
        written = [_FILES.unpack(data) for data in packed]
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
        # If the coordinator did not answer, it may still commit: the file must stay. A later save removes it.
        if comm.size == 1 or error.failures:
            with contextlib.suppress(StorageError):  # the first error says more
                store.delete(shard_name(save_id, comm.rank))
        raise
    meter.finish()
