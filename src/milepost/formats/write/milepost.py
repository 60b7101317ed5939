"""Milepost's own format, written from another checkpoint: tensors are read while they are written.

All ranks see the source, so no rank has to ask another what there is. They meet twice: to aim and to commit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from milepost.comm import Bytes, Call, Comm, Meeting, defer, meet
from milepost.commit.attempt import Aim, Attempt, Contents, take_aim
from milepost.core.division import share_out, written_by
from milepost.core.layout import Whole
from milepost.core.manifest import ShardFile, Value
from milepost.core.ranks import pack_ranks
from milepost.core.shardfile import NewEntry
from milepost.core.table import TensorRow
from milepost.core.tree import Node
from milepost.core.wire import Wire
from milepost.data.late import LateBox, LateReader
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import EntryToWrite
from milepost.errors import RanksDisagree
from milepost.store import Store


@dataclass(frozen=True, slots=True)
class SourceContents:
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


_PLANNING = Meeting("planning", Bytes(), Wire(Aim))
_FILES: Wire[ShardFile | None] = Wire(ShardFile | None)
_WRITING = Meeting("writing", _FILES, Wire(bool))


def write_milepost(
    store: Store,
    find: Callable[[], SourceContents],
    comm: Comm,
    transfer: Transfer,
    meter: Meter,
    *,
    overwrite: bool,
) -> None:
    """Write and commit a checkpoint with the contents that `find` gives on every rank. Atomic, as a save is."""
    call = Call("converting to", store.url)
    found = defer(comm, find)

    def start(digests: list[bytes]) -> Aim:
        if len(set(digests)) > 1:
            raise RanksDisagree("the ranks do not see the same source, or pass other arguments")
        return take_aim(store, overwrite=overwrite)

    aim = meet(comm, call, _PLANNING, lambda: found.get().digest(), start)
    attempt = Attempt(store, aim, comm.rank, comm.size, decides=comm.rank == comm.coordinator)
    source = found.get()
    everywhere = Whole(pack_ranks(range(comm.size)))
    tensors, layouts = share_out(source.rows, {row.key: everywhere for row in source.rows}, comm.size)

    def write() -> ShardFile | None:
        entries = [
            EntryToWrite(
                NewEntry(item.name, item.dtype, item.box.shape),
                LateBox(source.reader, source.names[item.key], item.dtype, item.box),
            )
            for tensor in tensors
            for item in written_by(tensor, layouts[tensor.layout], comm.rank)
        ]
        return attempt.write(entries, transfer, meter).file

    def commit(files: list[ShardFile | None]) -> bool:
        written = tuple(file for file in files if file is not None)
        attempt.commit(Contents(source.metadata, layouts, tensors, source.nodes, source.values, (), written))
        return True

    try:
        meet(comm, call, _WRITING, write, commit)
    except BaseException as error:
        attempt.fail(error)
        raise
    meter.finish()
