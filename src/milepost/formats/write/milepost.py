"""Milepost's own format, written from another checkpoint: tensors are read while they are written.

All ranks see the source, so no rank has to ask another what there is. They meet twice: to aim and to commit.
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import xxhash

from milepost.comm import Bytes, Call, Comm, Meeting, defer, meet, operating_on
from milepost.commit.attempt import Aim, Attempt, Contents, take_aim
from milepost.core.division import share_out, written_by
from milepost.core.history import phase_times
from milepost.core.layout import Whole
from milepost.core.manifest import ShardFile, Value
from milepost.core.ranks import pack_ranks
from milepost.core.shardfile import NewEntry
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.table import TensorRow
from milepost.core.tree import Node
from milepost.core.wire import Wire
from milepost.data.late import LateBox, LateReader
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import EntryToWrite
from milepost.errors import RanksDisagree
from milepost.events.operation import Operation, phasing
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
    statistics: tuple[TensorStatistics, ...] = ()
    health: Health | None = None

    def digest(self) -> bytes:
        """Equal on two ranks that would write the same."""
        return xxhash.xxh3_128_digest(msgspec.json.encode((self.rows, self.nodes, self.values, self.health)))


_PLANNING = Meeting("planning", Bytes(), Wire(Aim))


class _WrittenShare(msgspec.Struct, frozen=True, array_like=True):
    """What a rank wrote (None: nothing), how many bytes of tensors that is, and the seconds of its phases."""

    file: ShardFile | None
    data_bytes: int
    times: bytes


_WRITING = Meeting("writing", Wire(_WrittenShare), Wire(int), deciding="committing")


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
    with operating_on(comm, "convert", store.url) as operation:
        _write(store, find, comm, transfer, meter, operation, overwrite=overwrite)


def _write(
    store: Store,
    find: Callable[[], SourceContents],
    comm: Comm,
    transfer: Transfer,
    meter: Meter,
    operation: Operation,
    *,
    overwrite: bool,
) -> None:
    call = Call("converting to", store.url)
    with phasing("describing"):
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

    def write() -> _WrittenShare:
        entries = [
            EntryToWrite(
                NewEntry(item.name, item.dtype, item.box.shape),
                LateBox(source.reader, source.names[item.key], item.dtype, item.box),
            )
            for tensor in tensors
            for item in written_by(tensor, layouts[tensor.layout], comm.rank)
        ]
        written = attempt.write(entries, transfer, meter)
        return _WrittenShare(written.file, written.data_bytes, operation.packed_times())

    def commit(shares: list[_WrittenShare]) -> int:
        files = tuple(one.file for one in shares if one.file is not None)
        timings = operation.timings = phase_times([one.times for one in shares])
        recorded = source.statistics, source.health
        attempt.commit(
            Contents(source.metadata, layouts, tensors, source.nodes, source.values, (), files, timings, *recorded)
        )
        return sum(one.data_bytes for one in shares)

    try:
        total = meet(comm, call, _WRITING, write, commit)
    except BaseException as error:
        attempt.fail(error)
        raise
    meter.finish()
    operation.commit(aim.generation, total, source.health)
