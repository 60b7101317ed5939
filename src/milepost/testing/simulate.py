"""The simulator: plan a save by W ranks and a load by V ranks, in one process, without torch, tensors or data.

It runs the planning functions of real saves and loads. It tells what each rank would write and read, how much the ranks
would send to each other, and how large the manifest would be.
"""

import math
import zlib
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import msgspec

from milepost.comm.together import answer_bytes, note_bytes
from milepost.core.agreement import GroupPlan, Overview, Terms, conclude, group_of, make_plan
from milepost.core.box import Box, Shape, strides_of
from milepost.core.division import PlannedRead, read_plan, written_by
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.history import pack_times
from milepost.core.layout import Boxes, Cut, Grid, Mesh, Whole
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import Manifest, ShardFile, new_manifest, seal
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.shardfile import NewEntry, file_order, make_header
from milepost.core.swap_plan import Rounds, SwapPlan, WantRow, merge_wants
from milepost.core.table import Table, TensorRow, merge_tables
from milepost.core.tree import Node
from milepost.data.transfer import HOST_MEMORY_BYTES
from milepost.errors import RanksDisagree

Rows = Sequence[TensorRow]
"""The tensors of a rank, in order."""


def on_mesh(shape: Shape, cuts: Sequence[int | tuple[int, int] | None], ranks: str | None = None) -> Grid:
    """The layout of a tensor over a mesh of this shape.

    `cuts` has, for each axis of the mesh, the dimension that it cuts, or None to replicate. A pair (dimension, stride)
    is a strided cut. `ranks` lists the ranks in row-major order, as in "0-3,8"; by default they are 0, 1, 2, ...

    >>> milepost.testing.on_mesh((2, 4), [None, 0]).local_shape((16, 3), rank=0)
    (4, 3)
    """
    mesh = Mesh(tuple(shape), ranks if ranks is not None else pack_ranks(range(math.prod(shape))))
    return Grid(mesh, tuple(None if c is None else Cut(*c) if isinstance(c, tuple) else Cut(c) for c in cuts))


@dataclass(frozen=True)
class SimulatedSave:
    """A save that is planned and not carried out; `simulate_save` makes one.

    Raises RanksDisagree where a real save would.

    >>> row = milepost.testing.TensorRow("w", "float32", (1024, 64), "tensor", milepost.testing.on_mesh((8,), [0]))
    >>> save = milepost.testing.simulate_save(8, [row])
    >>> save.bytes_written(rank=0), save.manifest_bytes < 10_000
    (32768, True)
    """

    world: int
    tables: Mapping[str, Table]
    terms: Terms = field(init=False)
    overview: Overview = field(init=False)

    def __post_init__(self) -> None:
        groups = [(ranks, table.digest()) for ranks, table in self.tables.items()]
        tables = list(self.tables.values())
        merged = merge_tables([(unpack_ranks(ranks), table) for ranks, table in self.tables.items()])
        if merged.problems:
            raise RanksDisagree("the ranks do not describe one state:\n  " + "\n  ".join(merged.problems[:50]))
        settled = conclude(groups, tables, merged, self.world, share_replicas=True)
        object.__setattr__(self, "terms", settled.terms)
        object.__setattr__(self, "overview", settled.overview)

    def plan(self, rank: int) -> GroupPlan:
        """The plan that this rank would make for itself."""
        group = group_of(rank, self.terms.groups)
        return make_plan(self.terms, group, self.tables[group], self.world, share_replicas=True)

    def entries(self, rank: int) -> list[NewEntry]:
        """The entries that a rank would write, in the order of its file."""
        items = [
            NewEntry(item.name, item.dtype, item.box.shape)
            for tensor in self.overview.tensors
            for item in written_by(tensor, self.overview.layouts[tensor.layout], rank)
        ]
        return sorted(items, key=lambda e: file_order(e.dtype, e.size_bytes))

    def bytes_written(self, rank: int) -> int:
        """The bytes that a rank would write."""
        return sum(entry.size_bytes for entry in self.entries(rank))

    @cached_property
    def manifest(self) -> Manifest:
        """The manifest, with invented lines for the files."""
        held = sum(math.prod(t.shape) * DTYPES[t.dtype].size_bytes for t in self.overview.tensors)
        size = 4096 + held // self.world + BLOCK_BYTES
        files = tuple(ShardFile(rank, size, 4096, f"{rank:016x}") for rank in range(self.world))
        content = {
            "layouts": self.overview.layouts,
            "tensors": self.overview.tensors,
            "tree": self.overview.tree,
            "per_rank": self.overview.per_rank,
        }
        return new_manifest(
            1, "00000001-0123456789abcdef", "", "simulated", self.world, metadata={}, values=(), files=files, **content
        )

    @cached_property
    def manifest_bytes(self) -> int:
        """The size of the manifest in bytes. The manifest is checked, too."""
        return len(seal(self.manifest))

    def exchange_bytes(self, steady: bool = False) -> int:
        """The bytes that the ranks would send to each other in a save, and read: each note counts both times.

        `steady`: in a later save with the same `Plans`. Values and error texts are not counted.
        """
        others = self.world - 1
        aim = (1, "00000001-0123456789abcdef")  # as an `Aim` is packed; importing that class would import torch
        start = (aim, self.terms.id if steady else b"", False, True, "")
        total = self.world * _decision_bytes(msgspec.msgpack.encode(start))
        if not steady:
            terms = msgspec.json.encode(self.terms)
            total += others * 2 * _report_bytes(bytes(16)) + self.world * _decision_bytes(terms)
            if len(self.tables) > 1:
                sent = [_report_bytes(zlib.compress(msgspec.json.encode(table))) for table in self.tables.values()]
                silent = max(others - len(sent), 0)
                total += 2 * sum(sent) + 2 * silent * _report_bytes(b"") + self.world * _decision_bytes(terms)
        copied = any(
            layout.replicas().shape[1] > 1 for layout in self.overview.layouts if not isinstance(layout, Boxes)
        )
        size = self.bytes_written(0)
        replicas = {bytes(8): bytes(8)} if copied else {}
        times = pack_times(dict.fromkeys(("describing", "planning", "writing"), 1.0))
        result = (bytes(8), bytes(8), replicas, size, 4096, bytes(8), size, b"", 0, b"", times)
        answer = (True, size * self.world, False, False, (), None)
        return (
            total
            + others * 2 * _report_bytes(msgspec.msgpack.encode(result))
            + self.world * _decision_bytes(msgspec.msgpack.encode(answer))
        )


def _report_bytes(payload: bytes) -> int:
    """The size of a rank's note to the coordinator: its step, and its report."""
    return 6 + note_bytes(payload)


def _decision_bytes(decision: bytes) -> int:
    """The size of the coordinator's note to all ranks: a sign, its step, and its decision."""
    return 7 + answer_bytes(decision)


def simulate_save(world: int, tensors: Rows | Mapping[str, Rows]) -> SimulatedSave:
    """Plan a save by `world` ranks that all hold these tensors. Raises RanksDisagree where a real save would.

    A mapping gives each group of ranks, such as "0-3,8", tensors of its own.

    >>> row = milepost.testing.TensorRow("w", "float32", (1024, 64), "tensor", milepost.testing.on_mesh((8,), [0]))
    >>> milepost.testing.simulate_save(8, [row]).bytes_written(rank=7)
    32768
    """
    groups = tensors if isinstance(tensors, Mapping) else {pack_ranks(range(world)): tensors}
    return SimulatedSave(world, {ranks: _table(rows) for ranks, rows in groups.items()})


def _table(rows: Rows) -> Table:
    tree = (Node(0, None, "dict"), *(Node(1, row.key, "tensor", row.key) for row in rows))
    return Table(tuple(rows), tree, (), ())


@dataclass(frozen=True, slots=True)
class SimulatedLoad:
    """What one rank would read; `simulate_load` makes one.

    `needed_bytes` counts the bytes of the target, `read_bytes` whole checksummed blocks. `files` lists the files that
    the rank opens, by the rank that wrote each.
    """

    items: tuple[PlannedRead, ...]
    needed_bytes: int
    read_bytes: int
    files: tuple[int, ...]

    @property
    def amplification(self) -> float:
        """Bytes read for each byte needed."""
        return self.read_bytes / self.needed_bytes if self.needed_bytes else 1.0


def simulate_load(save: SimulatedSave, world: int, tensors: Rows, rank: int) -> SimulatedLoad:
    """What `rank` of `world` would read of a simulated save, into tensors with these layouts (None: the whole tensor).

    Raises KeyError for a tensor that was not saved, and ValueError for one that was saved with another shape.

    >>> saved, wanted = milepost.testing.on_mesh((8,), [0]), milepost.testing.on_mesh((6,), [0])
    >>> save = milepost.testing.simulate_save(8, [milepost.testing.TensorRow("w", "int8", (48,), "tensor", saved)])
    >>> rows = [milepost.testing.TensorRow("w", "int8", (48,), "tensor", wanted)]
    >>> load = milepost.testing.simulate_load(save, 6, rows, rank=1)
    >>> load.needed_bytes, load.files
    (8, (1, 2))
    """
    saved = {t.key: t for t in save.manifest.tensors}
    items: list[PlannedRead] = []
    for row in tensors:
        tensor = saved[row.key]
        if tensor.shape != row.shape:
            raise ValueError(f"{row.key!r} was saved as {tensor.shape} and the target is {row.shape}")
        layout = row.layout or Whole(pack_ranks(range(world)))
        for piece in layout.pieces(row.shape, rank):
            if piece.box.elements:
                items.extend(read_plan(save.manifest, tensor, piece.box))
    needed = sum(item.box.elements * DTYPES[saved[item.key].dtype].size_bytes for item in items)
    files = tuple(sorted({item.rank for item in items}))
    read = sum(_blocks_read(save, file, [i for i in items if i.rank == file]) for file in files)
    return SimulatedLoad(tuple(items), needed, read, files)


@dataclass(frozen=True)
class SimulatedSwap:
    """A load in which each rank reads a part of the files for all; `simulate_swap` makes one.

    `needed_bytes`: all tensors that are wanted, once.
    """

    save: SimulatedSave
    world: int
    plan: SwapPlan
    rounds: Rounds
    needed_bytes: int

    def read_bytes(self, rank: int) -> int:
        """What a rank reads, in whole checksummed blocks. Blocks at the edges of what it reads at once count twice."""
        chunks, first, total = list(self.plan.chunks_of(rank)), 0, 0
        while chunks and first <= chunks[-1].round:
            left = (chunk for chunk in chunks if chunk.round >= first)
            stop = self.plan.portion(left, first, self.rounds).stop
            items: dict[int, list[PlannedRead]] = {}
            for chunk in chunks:
                if first <= chunk.round < stop:
                    items.setdefault(chunk.file, []).append(chunk.read_of(chunk.box))
            total += sum(_blocks_read(self.save, file, found) for file, found in items.items())
            first = stop
        return total

    def sent_bytes(self, rank: int) -> int:
        """What a rank sends to others."""
        return sum(
            size_bytes(chunk.tensor.dtype, box.shape)
            for chunk in self.plan.chunks_of(rank)
            for to, box in self.plan.wishes_for(chunk)
            if to != rank
        )

    def amplification(self, ranks: Iterable[int] | None = None) -> float:
        """Bytes that all ranks read for each byte that is wanted; estimated from some `ranks`, if given."""
        looked_at = list(range(self.world) if ranks is None else ranks)
        read = sum(map(self.read_bytes, looked_at)) * self.world / len(looked_at)
        return read / self.needed_bytes if self.needed_bytes else 1.0


def simulate_swap(
    save: SimulatedSave, world: int, tensors: Rows, host_memory_bytes: int = HOST_MEMORY_BYTES
) -> SimulatedSwap:
    """What `world` ranks would read and send each other of a simulated save, if they read each byte once.

    The tensors have the layouts of the targets (None: every rank wants the whole tensor). Raises KeyError for a tensor
    that was not saved.

    >>> rows = [milepost.testing.TensorRow("w", "int8", (4096, 4096), "tensor", milepost.testing.on_mesh((8,), [0]))]
    >>> save = milepost.testing.simulate_save(8, rows)
    >>> columns = milepost.testing.on_mesh((4,), [1])
    >>> rows = [milepost.testing.TensorRow("w", "int8", (4096, 4096), "tensor", columns)]
    >>> milepost.testing.simulate_load(save, 4, rows, rank=0).amplification
    4.0
    >>> swap = milepost.testing.simulate_swap(save, 4, rows)
    >>> swap.amplification(), swap.sent_bytes(rank=0)
    (1.0, 3145728)
    """
    saved = {t.key: t for t in save.manifest.tensors}
    rounds = Rounds.within(host_memory_bytes, world)
    wants = merge_wants([(pack_ranks(range(world)), [WantRow(row.key, row.layout) for row in tensors])])
    needed = sum(size_bytes(saved[row.key].dtype, row.shape) for row in tensors)
    return SimulatedSwap(save, world, SwapPlan(save.manifest, wants, world, rounds.size_bytes), rounds, needed)


def _blocks_read(save: SimulatedSave, rank: int, items: list[PlannedRead]) -> int:
    """The bytes of one file that are read: every block that an item touches, once."""
    _, header = make_header(save.entries(rank), {}, BLOCK_BYTES)
    saved = {t.key: DTYPES[t.dtype].size_bytes for t in save.overview.tensors}
    touched: set[int] = set()
    for item in items:
        start, stop = _span(item.source, item.box)
        at, size = header.entries[item.name].data_offsets[0], saved[item.key]
        touched.update(range((at + start * size) // BLOCK_BYTES, -(-(at + stop * size) // BLOCK_BYTES)))
    return sum(_block_bytes(block, header.data_bytes) for block in touched)


def _span(source: Box, box: Box) -> tuple[int, int]:
    """The first element of `box` in the row-major order of `source`, and the one behind its last."""
    strides = strides_of(source.shape)
    inner = box.within(source)
    first = sum(a * s for a, s in zip(inner.offset, strides, strict=True))
    last = sum((a - 1) * s for a, s in zip(inner.end, strides, strict=True))
    return first, last + 1


def _block_bytes(block: int, data_bytes: int) -> int:
    return min(BLOCK_BYTES, data_bytes - block * BLOCK_BYTES)
