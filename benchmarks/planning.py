"""What planning a checkpoint costs as the cluster grows: Milepost beside torch.distributed.checkpoint (DCP), without data.

Jobs of 64 to 16,384 ranks and 1,000 tensors: FSDP (one axis cuts), HSDP (one axis copies, one cuts) and 3-D (8 pipeline
stages with keys of their own, each cut by data and tensor parallelism). Seconds are CPU seconds of one thread, medians over
rounds in which all cases take turns; [min..max] is beside them. Nothing is kept from one measurement to the next.

Milepost, one rank: `describe` of its state, then its plan and the list of entries that it writes. The coordinator: the same, and all
that it does in the meetings of a real `milepost.save`. That save runs through the real protocol: the coordinator and two ranks of each
group of equal ranks are threads, and the second of the two stands in for all others of its group. Every message is counted as
often as it would be sent, when it is pinned to the board and again when it is read. (Checked against real threads for all ranks.)
For later saves with the same plans the coordinator's figure is its meetings alone; that it describes its state again is not in it.

DCP, rank 0: its own planner and its own records for a plain FSDP job, with no process group: unpickle the gathered plans,
`create_global_plan` (dedup, metadata, validation), pickle what is scattered, unpickle the gathered results, make and pickle the
metadata. Left out, to its advantage: making the local plans, the pickling for the last broadcast, and the network.
"""

import argparse
import gc
import json
import multiprocessing
import os
import pickle
import platform
import random
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgspec
import torch
from showing import Row, format_table

import milepost
from milepost.comm import BoardComm, MemoryBoard, Phase
from milepost.core import box, layout, ranks
from milepost.core.agreement import Terms, group_of, make_plan
from milepost.core.division import read_plan, written_by
from milepost.core.layout import Grid
from milepost.core.manifest import seal, shard_name, unseal
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.table import TensorRow
from milepost.saving.describe import describe
from milepost.state.values import Codec
from milepost.store.memory import MemoryStore
from milepost.testing import on_mesh, simulate_save

SHAPE = (16384, 1024)
STAGES, SHARDS, TENSOR_PARALLEL = 8, 8, 4
FSDP, SCALARS, HSDP, PIPELINE, LONG_PIPELINE = "FSDP", "FSDP + scalars", "HSDP", "3-D", "3-D, all on each rank"
KINDS = (FSDP, SCALARS, HSDP, PIPELINE, LONG_PIPELINE)
BAR_WORLD = 1024
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DcpSize:
    """A job for DCP, and in how many of the rounds it takes part."""

    world: int
    tensors: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    worlds: tuple[int, ...]
    tensors: int
    rounds: int
    save_rounds: int
    dcp: tuple["DcpSize", ...]
    real_worlds: tuple[int, ...]
    real_tensors: int


FULL = Sizes(
    (64, 256, 1024, 4096, 16384),
    1000,
    rounds=5,
    save_rounds=2,
    # A quarter of the tensors for 1,024 ranks: with all of them DCP would take longer than everything else together.
    dcp=(DcpSize(64, 1000, 3), DcpSize(256, 1000, 1), DcpSize(1024, 250, 1)),
    real_worlds=(16, 64, 256, 1024),
    real_tensors=10,
)
QUICK = Sizes((64, 1024, 16384), 1000, 1, 1, (DcpSize(64, 250, 1),), (16,), 10)
TINY = Sizes((64, 1024), 48, 1, 1, (DcpSize(64, 48, 1),), (16,), 5)


# The jobs


@dataclass(frozen=True, slots=True)
class Job:
    """A kind of job: for each group of ranks with equal tensors, the names of these and their cut."""

    kind: str
    world: int
    tensors: int

    @property
    def groups(self) -> dict[str, tuple[list[str], Grid]]:
        """The keys and the cut of the sharded tensors, by group of ranks."""
        return _groups(self)

    def state(self, rank: int, tiny: bool) -> dict[str, Any]:
        """What a rank passes to `save`. Tiny tensors have one element on each rank; others have no memory of their own."""
        keys, grid = next(group for members, group in self.groups.items() if rank in unpack_ranks(members))
        shape = _smallest(grid) if tiny else SHAPE
        local = torch.zeros(1).expand(grid.local_shape(shape, rank))
        state: dict[str, Any] = {"model": {key: milepost.Sharded.on_grid(shape, local, grid, rank) for key in keys}}
        if self.kind == SCALARS:
            state["optimizer"] = {key: {"step": torch.tensor(1.0)} for key in keys}
        return state

    def rows(self) -> dict[str, list[TensorRow]]:
        """The same for the simulator."""
        return {
            members: [TensorRow(key, "float32", SHAPE, "tensor", grid) for key in keys]
            for members, (keys, grid) in self.groups.items()
        }


@lru_cache
def _groups(job: Job) -> dict[str, tuple[list[str], Grid]]:
    everyone, names = pack_ranks(range(job.world)), _keys(0, job.tensors)
    if job.kind in (FSDP, SCALARS):
        return {everyone: (names, on_mesh((job.world,), (0,)))}
    if job.kind == HSDP:
        return {everyone: (names, on_mesh((job.world // SHARDS, SHARDS), (None, 0)))}
    each, count = job.world // STAGES, job.tensors if job.kind == LONG_PIPELINE else job.tensors // STAGES
    found = {}
    for stage in range(STAGES):
        members = pack_ranks(range(stage * each, (stage + 1) * each))
        mesh = on_mesh((each // TENSOR_PARALLEL, TENSOR_PARALLEL), (0, 1), members)
        found[members] = (_keys(stage * count, count), mesh)
    return found


@lru_cache
def _terms(job: Job) -> bytes:
    """What the coordinator tells the ranks of this job."""
    return msgspec.json.encode(simulate_save(job.world, job.rows()).terms)


def _keys(start: int, count: int) -> list[str]:
    return [f"layers.{i // 7}.block.{i % 7}.weight.{i}" for i in range(start, start + count)]


def _smallest(grid: Grid) -> tuple[int, ...]:
    shape = [1] * len(SHAPE)
    for size, cut in zip(grid.mesh.shape, grid.cuts, strict=True):
        if cut is not None:
            shape[cut.dim] *= size
    return tuple(shape)


# Measuring


@dataclass(slots=True)
class Samples:
    """What the rounds gave, by name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.values[name].append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def spread(self, name: str) -> str:
        return f"[{min(self.values[name]):.3f}..{max(self.values[name]):.3f}]"


def forget() -> None:
    """Empty every cache of the planner, so that each measurement is a first one."""
    for module in (box, layout, ranks):
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()
    gc.collect()


def cpu_s(action: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds of this thread, and what came out."""
    start = time.thread_time()
    result = action()
    return time.thread_time() - start, result


def _status_bytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def peak_bytes(action: Callable[[], Any]) -> tuple[int, Any]:
    """The most memory that this process took beyond what it had before."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    result = action()
    return max(0, _status_bytes("VmHWM") - before), result


# Milepost


STEPS = {
    Phase("", "", step).wire[4:]: step
    for step in ("starting", "describing the state", "agreeing on the layout", "writing", "committing")
}


class Crowd:
    """A board for a job of which only some ranks run; each of the others is represented by one that has the same to say."""

    def __init__(self, world: int, groups: Iterable[str]) -> None:
        self.board = MemoryBoard()
        self.stands_for: dict[int, int] = {}
        for members in map(unpack_ranks, groups):
            self.stands_for |= dict.fromkeys(members, members[1]) | {members[0]: members[0]}
        self.weight = Counter(self.stands_for.values())
        self.sent: Counter[str] = Counter()
        self._lock = threading.Lock()
        assert len(self.stands_for) == world

    def count_bytes(self, verb: str, name: str, note: bytes, times: int) -> None:
        """Add a message, under the step that it belongs to."""
        answer = name.endswith("/all")
        step = STEPS[note[5:7] if answer else note[4:6]]  # the end of `Phase.wire`, which an answer has behind a sign
        what = "the coordinator's answer" if answer else "reports to the coordinator"
        with self._lock:
            self.sent[f"{step}: {what}, {verb}"] += len(note) * times


@dataclass(frozen=True, slots=True)
class Seat:
    """The board as one rank of a crowd sees it."""

    crowd: Crowd
    rank: int

    def pin(self, name: str, note: bytes) -> None:
        self.crowd.count_bytes("pinned", name, note, self.crowd.weight[self.rank])
        self.crowd.board.pin(name, note)

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        real = [self._real(name) for name in names]
        notes = dict(zip(set(real), self.crowd.board.read(list(set(real)), timeout_s), strict=True))
        for name, times in Counter(real).items():
            if (note := notes[name]) is not None:
                self.crowd.count_bytes("read", name, note, times * self.crowd.weight[self.rank])
        # Copies: the coordinator of a real job would get as many separate messages.
        return [None if (note := notes[name]) is None else bytes(bytearray(note)) for name in real]

    def _real(self, name: str) -> str:
        number, _, who = name.partition("/")
        return f"{number}/{self.crowd.stands_for[int(who)]}" if who.isdecimal() else name

    def count(self, name: str, step: int = 1) -> int:
        return self.crowd.board.count(name, step)

    def remove(self, name: str) -> None:
        self.crowd.board.remove(name)


class CrowdedStore(MemoryStore):
    """In which a file that one rank wrote is there for all that it stands for: before it commits, the coordinator looks for them."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__()
        self.crowd = crowd

    def list(self, prefix: str) -> Iterator[str]:
        folder, _, save_id = prefix.rstrip("/").partition("/")
        if folder != "data" or not save_id:
            return super().list(prefix)
        there = set(super().list(prefix))
        of = {rank: shard_name(save_id, real) for rank, real in self.crowd.stands_for.items()}
        return iter([shard_name(save_id, rank) for rank, name in of.items() if name in there])


class TimedComm(BoardComm):
    """Adds up the CPU seconds that a rank spends in meetings; waiting takes none."""

    cpu_s = 0.0

    def meet(self, phase, payload, decide):
        taken, answer = cpu_s(lambda: super(TimedComm, self).meet(phase, payload, decide))
        self.cpu_s += taken
        return answer


@dataclass(frozen=True, slots=True)
class Saved:
    """What two saves by a crowd showed: bytes by step, and the coordinator's CPU seconds in meetings; first, then steady state."""

    bytes_by_step: tuple[dict[str, int], dict[str, int]]
    lead_cpu_s: tuple[float, float]

    @property
    def bytes(self) -> tuple[int, int]:
        first, steady = self.bytes_by_step
        return sum(first.values()), sum(steady.values())


def save_twice(job: Job) -> Saved:
    """Run the real save of a job twice, with the same plans."""
    crowd = Crowd(job.world, job.groups)
    store, plans = CrowdedStore(crowd), {rank: milepost.Plans() for rank in crowd.weight}
    states = {rank: job.state(rank, tiny=True) for rank in crowd.weight}
    comms = {rank: TimedComm(Seat(crowd, rank), rank, job.world, TIMEOUT_S) for rank in crowd.weight}
    sent, spent = [], []
    for _ in range(2):
        crowd.sent.clear()
        comms[0].cpu_s = 0.0
        in_threads(
            {
                rank: lambda rank=rank: milepost.save(
                    states[rank], store, process_group=comms[rank], plans=plans[rank], timeout_s=TIMEOUT_S
                )
                for rank in crowd.weight
            }
        )
        sent.append(dict(crowd.sent))
        spent.append(comms[0].cpu_s)
    return Saved((sent[0], sent[1]), (spent[0], spent[1]))


def in_threads(actions: dict[int, Callable[[], Any]]) -> None:
    """Run each in a thread of its own; raise what the first of them raised."""
    errors: list[BaseException] = []

    def run(action: Callable[[], Any]) -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=run, args=(action,), name=f"rank-{rank}") for rank, action in actions.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def real_bytes(job: Job) -> tuple[int, int]:
    """The bytes of both saves when every rank is a real thread."""
    board, store, everyone = MemoryBoard(), MemoryStore(), range(job.world)
    comms = [BoardComm(board, rank, job.world, TIMEOUT_S) for rank in everyone]
    plans = [milepost.Plans() for _ in everyone]
    states = [job.state(rank, tiny=True) for rank in everyone]
    totals = [0]
    for _ in range(2):
        in_threads(
            {r: lambda r=r: milepost.save(states[r], store, process_group=comms[r], plans=plans[r]) for r in everyone}
        )
        totals.append(board.bytes_pinned + board.bytes_read)
    return totals[1], totals[2] - totals[1]


def plan_of_one_rank(job: Job) -> float:
    """The CPU seconds that a rank in the middle plans for: describe, decode the terms, plan, list its entries."""
    rank = job.world // 2 + 1
    state, packed = job.state(rank, tiny=False), _terms(job)
    comm = BoardComm(MemoryBoard(), rank, job.world, TIMEOUT_S)
    forget()

    def plan() -> int:
        described = describe(state, comm, Codec(), {})
        heard = msgspec.json.decode(packed, type=Terms)
        mine = make_plan(heard, group_of(rank, heard.groups), described.table, job.world, spread=True)
        return sum(len(list(written_by(t, mine.layouts[t.layout], rank))) for t in mine.tensors)

    return cpu_s(plan)[0]


def measure_milepost(job: Job, also_save: bool) -> dict[str, float]:
    """One round of one job."""
    rank_s = plan_of_one_rank(job)
    if not also_save:
        return {"one rank": rank_s}
    forget()
    saved = save_twice(job)
    return {
        "one rank": rank_s,
        "lead, first": rank_s + saved.lead_cpu_s[0],
        "lead, steady": saved.lead_cpu_s[1],
        "bytes, first": saved.bytes[0],
        "bytes, steady": saved.bytes[1],
    }


def measure_manifest(world: int, tensors: int) -> dict[str, float]:
    """The size of the manifest, opening it, and the load plan of one rank of three quarters as many."""
    save = simulate_save(world, Job(FSDP, world, tensors).rows())
    sealed = seal(save.manifest)
    forget()
    open_s, manifest = cpu_s(lambda: unseal(sealed))
    there = Job(FSDP, 3 * world // 4, tensors)
    (keys, grid), rank = next(iter(there.groups.values())), there.world // 2
    saved = {tensor.key: tensor for tensor in manifest.tensors}
    forget()

    def plan() -> int:
        boxes = [(key, piece.box) for key in keys for piece in grid.pieces(SHAPE, rank)]
        return sum(len(read_plan(manifest, saved[key], region)) for key, region in boxes)

    return {"bytes": len(sealed), "open": open_s, "load plan": cpu_s(plan)[0]}


def lead_memory(world: int, tensors: int) -> int:
    """The peak of a coordinator, in a process of its own. One other rank lives there too, so it is a little less."""
    job = Job(FSDP, world, tensors)
    save_twice(Job(FSDP, 16, 2))  # whatever is imported late, is imported now
    return peak_bytes(lambda: save_twice(job))[0]


# DCP


def measure_dcp(world: int, tensors: int) -> dict[str, float]:
    """What rank 0 of an FSDP job does in DCP, and the load plan of one rank of three quarters as many."""
    from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
    from torch.distributed.checkpoint.filesystem import _StorageInfo
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata
    from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
    from torch.distributed.checkpoint.storage import WriteResult

    found: dict[str, float] = {}
    gathered = [pickle.dumps(_dcp_plan(rank, world, tensors)) for rank in range(world)]

    def timed(name: str, action: Callable[[], Any]) -> Any:
        found[name], result = cpu_s(action)
        return result

    def work() -> bytes:
        plans = timed("unpickle plans", lambda: [pickle.loads(data) for data in gathered])
        central, metadata = timed("global plan", lambda: DefaultSavePlanner().create_global_plan(plans))
        scattered = timed("pickle plans", lambda: [pickle.dumps(plan) for plan in central])
        results = [
            pickle.dumps([WriteResult(i.index, 64, _StorageInfo(f"__{rank}_0.distcp", 64 * n, 64))
                          for n, i in enumerate(plan.items)])
            for rank, plan in enumerate(central)
        ]  # fmt: skip
        plans.clear()
        central.clear()
        heard = timed("unpickle results", lambda: [pickle.loads(data) for data in results])
        metadata.storage_data = timed(
            "storage data", lambda: {result.index: result.storage_data for each in heard for result in each}
        )
        packed: bytes = timed("pickle metadata", lambda: pickle.dumps(metadata))
        small = sum(map(len, gathered)) + sum(map(len, scattered)) + sum(map(len, results))
        found["bytes"] = small + len(packed) * (world - 1)
        return packed

    found["peak"], packed = peak_bytes(work)
    found["lead"] = sum(s for name, s in found.items() if name not in ("peak", "bytes"))
    found["metadata bytes"] = len(packed)
    metadata = timed("open", lambda: pickle.loads(packed))
    there = 3 * world // 4
    offset, size = _chunk(there // 2, there)
    wanted = [ChunkStorageMetadata(torch.Size((offset, 0)), torch.Size((size, SHAPE[1])))]
    timed(
        "load plan",
        lambda: [
            create_read_items_for_chunk_list(key, metadata.state_dict_metadata[key], wanted)
            for key in _keys(0, tensors)
        ],
    )
    return found


def _chunk(rank: int, world: int) -> tuple[int, int]:
    size = -(-SHAPE[0] // world)
    start = min(rank * size, SHAPE[0])
    return start, min(size, SHAPE[0] - start)


def _dcp_plan(rank: int, world: int, tensors: int) -> Any:
    """The local plan that DCP makes for DTensors with the placement Shard(0)."""
    from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorProperties
    from torch.distributed.checkpoint.planner import SavePlan, TensorWriteData, WriteItem, WriteItemType

    offset, size = _chunk(rank, world)
    offsets, sizes, whole = torch.Size((offset, 0)), torch.Size((size, SHAPE[1])), torch.Size(SHAPE)
    items = [
        WriteItem(
            index=MetadataIndex(key, offsets),
            type=WriteItemType.SHARD,
            tensor_data=TensorWriteData(ChunkStorageMetadata(offsets, sizes), TensorProperties(torch.float32), whole),
        )
        for key in _keys(0, tensors)
    ]
    return SavePlan(items, planner_data={key: (key,) for key in _keys(0, tensors)})


# All of it


@dataclass(slots=True)
class Results:
    """Everything that was measured."""

    sizes: Sizes
    milepost: dict[tuple[str, int], Samples] = field(default_factory=lambda: defaultdict(Samples))
    manifest: dict[int, Samples] = field(default_factory=lambda: defaultdict(Samples))
    dcp: dict[DcpSize, Samples] = field(default_factory=lambda: defaultdict(Samples))
    real: dict[int, tuple[tuple[int, int], tuple[int, int]]] = field(default_factory=dict)
    by_step: tuple[dict[str, int], dict[str, int]] = field(default_factory=lambda: ({}, {}))
    memory_bytes: int = 0


def in_new_process(action: Callable[..., Any], *arguments: Any) -> Any:
    """Call a function of this file in a fresh process."""
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, mp_context=context) as pool:
        return pool.submit(action, *arguments).result()


def measure(sizes: Sizes) -> Results:
    """All rounds; the cases of a round are in another order each time."""
    results, count = Results(sizes), sizes.tensors
    # Not one number comes from these: they import and compile what is needed.
    measure_milepost(Job(PIPELINE, 64, 16), also_save=True)
    measure_manifest(64, 16)

    def milepost_case(kind: str, world: int, also_save: bool) -> None:
        results.milepost[kind, world].add(measure_milepost(Job(kind, world, count), also_save))

    def manifest_case(world: int) -> None:
        results.manifest[world].add(measure_manifest(world, count))

    def dcp_case(size: DcpSize) -> None:
        results.dcp[size].add(in_new_process(measure_dcp, size.world, size.tensors))

    for turn in range(sizes.rounds):
        cases: list[tuple[Callable[..., None], tuple[Any, ...]]] = [
            (milepost_case, (kind, world, turn < sizes.save_rounds and kind != LONG_PIPELINE))
            for kind in KINDS
            for world in sizes.worlds
        ]
        cases += [(manifest_case, (world,)) for world in sizes.worlds]
        cases += [(dcp_case, (size,)) for size in sizes.dcp if turn < size.rounds]
        random.Random(turn).shuffle(cases)
        for case, arguments in cases:
            case(*arguments)
    results.by_step = save_twice(Job(FSDP, BAR_WORLD, count)).bytes_by_step
    for world in sizes.real_worlds:
        job = Job(FSDP, world, sizes.real_tensors)
        results.real[world] = (real_bytes(job), save_twice(job).bytes)
    results.memory_bytes = in_new_process(lead_memory, max(sizes.worlds), count)
    return results


# Showing


def _below(name: str, value: float, unit: str, bar: float) -> Row:
    return Row(name, value, unit, f"< {bar:g}", value < bar)


def rows_of(results: Results) -> list[Row]:
    """Every number, with its bar where there is one."""
    rows = []
    least, most = min(results.sizes.worlds), max(results.sizes.worlds)
    for (kind, world), samples in sorted(
        results.milepost.items(), key=lambda item: (KINDS.index(item[0][0]), item[0][1])
    ):
        name = f"Milepost, {kind}, {world} ranks"
        one = f"{name}: one rank", samples.median("one rank"), "s"
        barred = world == BAR_WORLD and kind != SCALARS
        rows.append(_below(*one, 0.1) if barred else Row(*one))
        if "lead, first" not in samples.values:
            continue
        rows += [Row(f"{name}: {who}", samples.median(who), "s") for who in ("lead, first", "lead, steady")]
        for when, bar in (("first", 1e6), ("steady", 250e3)):
            sent = f"{name}: sent and read in all, {when}", samples.median(f"bytes, {when}"), "B"
            rows.append(_below(*sent, bar) if world == BAR_WORLD and kind in (FSDP, HSDP, PIPELINE) else Row(*sent))
    for kind in KINDS:
        ratio = (results.milepost[kind, most].median("one rank")) / results.milepost[kind, least].median("one rank")
        rows.append(_below(f"Milepost, {kind}: one rank, {most} over {least} ranks", ratio, "x", 2))
    for world, samples in sorted(results.manifest.items()):
        name, at_bar = f"Milepost, FSDP, {world} ranks", world == BAR_WORLD
        for what, unit, bar in (("bytes", "B", 1e6), ("open", "s", 0.1), ("load plan", "s", 0.3)):
            label = {"bytes": "manifest", "open": "open the manifest", "load plan": f"load plan on {3 * world // 4}"}[
                what
            ]
            one = f"{name}: {label}", samples.median(what), unit
            rows.append(_below(*one, bar) if at_bar else Row(*one))
    rows.append(
        _below(f"Milepost, FSDP, {most} ranks: memory of the coordinator", results.memory_bytes / 1e6, "MB", 200)
    )
    for world, (real, crowd) in results.real.items():
        for when, a, b in (("first", real[0], crowd[0]), ("steady", real[1], crowd[1])):
            rows.append(Row(f"check, {world} ranks: sent, {when}, real threads", a, "B"))
            rows.append(Row(f"check, {world} ranks: sent, {when}, stand-ins", b, "B"))
    rows += [
        Row(f"DCP, FSDP, {size.world} ranks, {size.tensors} tensors: {what}", samples.median(what), _unit(what))
        for size, samples in sorted(results.dcp.items(), key=lambda item: item[0].world)
        for what in samples.values
    ]
    return rows


def _unit(what: str) -> str:
    return "B" if what == "peak" or "bytes" in what else "s"


def _size(size_bytes: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if size_bytes >= size:
            return f"{size_bytes / size:.1f} {unit}"
    return f"{size_bytes:.0f} B"


def milepost_table(results: Results) -> str:
    """One line for each job."""
    heads = ["Milepost", "ranks", "one rank s", "", "lead s, first", "", "steady", "sent in all, first", "steady"]
    lines = []
    for kind in KINDS:
        for world in results.sizes.worlds:
            s = results.milepost[kind, world]
            line = [kind, str(world), f"{s.median('one rank'):.3f}", s.spread("one rank")]
            if "lead, first" in s.values:
                line += [f"{s.median('lead, first'):.3f}", s.spread("lead, first"), f"{s.median('lead, steady'):.3f}"]
                line += [_size(s.median(f"bytes, {when}")) for when in ("first", "steady")]
            lines.append(line + [""] * (len(heads) - len(line)))
    return format_table(heads, lines)


def comparison(results: Results) -> str:
    """Both systems side by side, for FSDP."""
    heads = ["FSDP", "ranks", "Milepost", "DCP", "DCP/Milepost"]
    lines, all_tensors = [], results.sizes.tensors
    for size, dcp in sorted(results.dcp.items(), key=lambda item: item[0].world):
        ours, manifest = results.milepost[FSDP, size.world], results.manifest[size.world]
        mark = "" if size.tensors == all_tensors else f" ({size.tensors} tensors)"
        for what, a, b, show in (
            ("busiest rank, CPU", ours.median("lead, first"), dcp.median("lead"), "{:.3f} s".format),
            ("the same, later saves [1]", ours.median("lead, steady"), dcp.median("lead"), "{:.3f} s".format),
            ("sent in all [2]", ours.median("bytes, first"), dcp.median("bytes"), _size),
            ("manifest or metadata", manifest.median("bytes"), dcp.median("metadata bytes"), _size),
            ("open it", manifest.median("open"), dcp.median("open"), "{:.3f} s".format),
            ("load plan of a rank", manifest.median("load plan"), dcp.median("load plan"), "{:.3f} s".format),
        ):
            at_least = "> " if mark else ""
            lines.append(
                [what, str(size.world), show(a), show(b) + mark, f"{at_least}{b / a:.{0 if b > 10 * a else 1}f}"]
            )
        lines.append(["memory of rank 0", str(size.world), "", _size(dcp.median("peak")) + mark, ""])
    lines.append(["memory of the coordinator", str(max(results.sizes.worlds)), _size(results.memory_bytes), "", ""])
    notes = (
        "[1] DCP as it is by default, without cached plans.",
        "[2] Milepost: sent and read, both counted. DCP: counted once, the broadcast metadata as size x (ranks - 1).",
        f"Milepost always with {all_tensors} tensors; where DCP had fewer, the ratio is a lower limit.",
    )
    return "\n".join([format_table(heads, lines), *notes])


def messages_table(results: Results) -> str:
    """What each message takes in all, and the check of the count."""
    lines = [
        [when, step, f"{size}"]
        for when, steps in zip(("first", "steady"), results.by_step, strict=True)
        for step, size in sorted(steps.items())
    ]
    table = format_table(["save", f"messages, FSDP, {BAR_WORLD} ranks", "bytes"], lines)
    checks = [
        f"{world} ranks: real threads {real[0]} and {real[1]} bytes, stand-ins {crowd[0]} and {crowd[1]}"
        for world, (real, crowd) in results.real.items()
    ]
    return "\n".join(
        [table, "", f"The count, checked ({results.sizes.real_tensors} tensors; first save, steady state):", *checks]
    )


def bars_table(rows: list[Row]) -> str:
    """The rows that have a bar."""
    lines = [["met" if r.ok else "MISSED", r.name, f"{r.value:.4g} {r.unit}", r.bar or ""] for r in rows if r.bar]
    return format_table(["", "bar", "value", "wanted"], lines)


def draw(results: Results, file: Path) -> None:
    """Growth curves of both systems."""
    import matplotlib as mpl

    mpl.use("Agg")
    import matplotlib.pyplot as plt

    worlds, sizes = list(results.sizes.worlds), sorted(results.dcp, key=lambda size: size.world)
    dcp_worlds = [size.world for size in sizes]
    ours, theirs = "#1f5fa8", "#c4501b"
    figure, (left, right) = plt.subplots(1, 2, figsize=(10, 4.2))

    def line(axes: Any, x: list[int], y: list[float], color: str, style: str, label: str) -> None:
        axes.plot(x, y, style, color=color, marker="o", markersize=4, linewidth=1.8, label=label)

    def samples(what: str) -> list[float]:
        return [results.milepost[FSDP, world].median(what) for world in worlds]

    def dcp(what: str) -> list[float]:
        # In proportion to the tensors where there were fewer; the title says so.
        return [results.dcp[size].median(what) * results.sizes.tensors / size.tensors for size in sizes]

    line(left, dcp_worlds, dcp("lead"), theirs, "-", "DCP: rank 0")
    line(left, worlds, samples("lead, first"), ours, "-", "Milepost: lead, first save")
    line(left, worlds, samples("one rank"), ours, "--", "Milepost: any other rank")
    line(left, worlds, samples("lead, steady"), ours, ":", "Milepost: lead, later saves")
    line(right, dcp_worlds, dcp("bytes"), theirs, "-", "DCP: sent in all")
    line(right, dcp_worlds, dcp("metadata bytes"), theirs, "--", "DCP: metadata file")
    line(right, worlds, samples("bytes, first"), ours, "-", "Milepost: sent and read in all, first save")
    line(right, worlds, [results.manifest[w].median("bytes") for w in worlds], ours, "--", "Milepost: manifest")
    line(right, worlds, samples("bytes, steady"), ours, ":", "Milepost: sent and read in all, later saves")
    for axes, title, unit in ((left, "Planning a save, busiest rank", "CPU seconds"), (right, "Metadata", "bytes")):
        axes.set(
            xscale="log",
            yscale="log",
            xlabel="ranks",
            ylabel=unit,
            xticks=worlds,
            xticklabels=[f"{w:,}" for w in worlds],
        )
        axes.set_title(title, loc="left", fontsize=11)
        axes.minorticks_off()
        axes.grid(alpha=0.25)
        axes.spines[["top", "right"]].set_visible(False)
        low, high = axes.get_ylim()
        axes.set_ylim(low, high * (high / low) ** 0.5)  # room for the legend
        axes.legend(frameon=False, fontsize=8, loc="upper right")
    fewer = [f"{size.world:,} with {size.tensors}" for size in sizes if size.tensors != results.sizes.tensors]
    scaled = f" ({', '.join(fewer)} tensors, scaled up)" if fewer else ""
    title = f"{results.sizes.tensors:,} tensors, FSDP. DCP was measured up to {max(dcp_worlds):,} ranks{scaled}"
    figure.suptitle(title, fontsize=9)
    figure.tight_layout()
    figure.savefig(file, dpi=110)


def _load() -> str:
    return "load average " + ", ".join(f"{n:.1f}" for n in os.getloadavg())


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="one round, fewer ranks: under a minute")
    parser.add_argument("--tiny", action="store_true", help=argparse.SUPPRESS)  # for the tests
    parser.add_argument("--rounds", type=int, help="rounds (default 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    parser.add_argument("--figure", type=Path, metavar="FILE", help="also draw the growth curves")
    return parser.parse_args()


def main() -> None:
    """Measure, print the tables, write the rows and the figure."""
    arguments = _arguments()
    sizes = TINY if arguments.tiny else QUICK if arguments.quick else FULL
    sizes = replace(sizes, rounds=arguments.rounds or sizes.rounds)
    print(__doc__.strip(), end="\n\n")
    print(
        f"torch {torch.__version__}, Python {platform.python_version()}, {os.cpu_count()} CPUs; {sizes.tensors} tensors, ",
        end="",
    )
    print(f"rounds: {sizes.rounds}; {_load()}", end="\n\n", flush=True)
    torch.set_num_threads(1)
    began = time.monotonic()
    results = measure(sizes)
    rows = rows_of(results)
    print(milepost_table(results), comparison(results), messages_table(results), bars_table(rows), sep="\n\n")
    print(f"\n{time.monotonic() - began:.0f} s; {_load()}")
    if arguments.quick or arguments.tiny:
        print("A quick run shows that all of it works; it is too short to judge by.")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))
    if arguments.figure:
        draw(results, arguments.figure)


if __name__ == "__main__":
    main()
