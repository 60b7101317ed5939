"""What one plan, save and manifest of a job cost: Milepost with its real protocol, DCP with its own planner."""

import gc
import pickle
import statistics
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec
import torch
from planning_jobs import FSDP, SHAPE, TIMEOUT_S, Job, keys_of, terms_of

import milepost
from milepost.comm import BoardComm, Call, MemoryBoard, Phase
from milepost.core import box, layout, ranks
from milepost.core.agreement import Terms, group_of, make_plan
from milepost.core.division import read_plan, written_by
from milepost.core.manifest import seal, shard_name, unseal
from milepost.core.ranks import unpack_ranks
from milepost.saving.describe import describe
from milepost.state.values import Codec
from milepost.store.memory import MemoryStore
from milepost.testing import simulate_save

# Measuring


@dataclass(slots=True)
class Samples:
    """The values of the rounds, by name."""

    values: dict[str, list[float]] = field(default_factory=lambda: defaultdict(list))

    def add(self, found: dict[str, float]) -> None:
        for name, value in found.items():
            self.values[name].append(value)

    def median(self, name: str) -> float:
        return statistics.median(self.values[name])

    def spread(self, name: str) -> str:
        return f"[{min(self.values[name]):.3f}..{max(self.values[name]):.3f}]"


def forget() -> None:
    """Empty every cache of the planner, so that each measurement starts cold."""
    for module in (box, layout, ranks):
        for thing in vars(module).values():
            if hasattr(thing, "cache_clear"):
                thing.cache_clear()
    gc.collect()


def cpu_s(action: Callable[[], Any]) -> tuple[float, Any]:
    """The CPU seconds of this thread, and the result."""
    start = time.thread_time()
    result = action()
    return time.thread_time() - start, result


def _status_bytes(name: str) -> int:
    return int(Path("/proc/self/status").read_text().split(f"{name}:")[1].split()[0]) * 1024


def peak_bytes(action: Callable[[], Any]) -> tuple[int, Any]:
    """The growth of the peak memory of this process, and the result."""
    gc.collect()
    Path("/proc/self/clear_refs").write_text("5")
    before = _status_bytes("VmRSS")
    result = action()
    return max(0, _status_bytes("VmHWM") - before), result


# Milepost


STEPS = {
    Phase(Call("", ""), step).wire[4:]: step
    for step in ("starting", "describing the state", "agreeing on the layout", "writing", "committing")
}


class Crowd:
    """A board for a job of which only some ranks run. Each other rank is represented by one that sends the same."""

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
        """Count a message under its step."""
        answer = name.endswith("/all")
        step = STEPS[note[5:7] if answer else note[4:6]]  # the end of `Phase.wire`; an answer has one byte before it
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
        # Copies: the coordinator of a real job gets separate messages.
        return [None if (note := notes[name]) is None else bytes(bytearray(note)) for name in real]

    def _real(self, name: str) -> str:
        number, _, who = name.partition("/")
        return f"{number}/{self.crowd.stands_for[int(who)]}" if who.isdecimal() else name

    def count(self, name: str, step: int = 1) -> int:
        return self.crowd.board.count(name, step)

    def remove(self, name: str) -> None:
        self.crowd.board.remove(name)


class CrowdedStore(MemoryStore):
    """Lists the file of a rank once for each rank that it represents: the commit looks for all of them."""

    def __init__(self, crowd: Crowd) -> None:
        super().__init__()
        self.crowd = crowd

    def list(self, prefix: str, *, shallow: bool = False) -> Iterator[str]:
        folder, _, save_id = prefix.rstrip("/").partition("/")
        if folder != "data" or not save_id:
            return super().list(prefix, shallow=shallow)
        there = set(super().list(prefix))
        of = {rank: shard_name(save_id, real) for rank, real in self.crowd.stands_for.items()}
        return iter([shard_name(save_id, rank) for rank, name in of.items() if name in there])


class TimedComm(BoardComm):
    """Sums the CPU seconds that a rank spends in meetings. Waiting takes none."""

    cpu_s = 0.0

    def meet(self, phase, payload, decide):
        taken, answer = cpu_s(lambda: super(TimedComm, self).meet(phase, payload, decide))
        self.cpu_s += taken
        return answer


@dataclass(frozen=True, slots=True)
class Saved:
    """Two saves by a crowd, first and steady state: bytes by step, and CPU seconds of the coordinator in meetings."""

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
    """Run each action in its own thread. Raises the first error."""
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
    """CPU seconds of planning on a middle rank: describe, decode the terms, plan, list its entries."""
    rank = job.world // 2 + 1
    state, packed = job.state(rank, tiny=False), terms_of(job)
    comm = BoardComm(MemoryBoard(), rank, job.world, TIMEOUT_S)
    forget()

    def plan() -> int:
        described = describe(state, comm, Codec(), {})
        heard = msgspec.json.decode(packed, type=Terms)
        mine = make_plan(heard, group_of(rank, heard.groups), described.table, job.world, share_replicas=True)
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
    """The size of the manifest, opening it, and the load plan of a rank in a job of three quarters the size."""
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
    """The peak memory of a coordinator, in its own process. It shares that with one other rank, so its own is less."""
    job = Job(FSDP, world, tensors)
    save_twice(Job(FSDP, 16, 2))  # does all late imports
    return peak_bytes(lambda: save_twice(job))[0]


# DCP


def measure_dcp(world: int, tensors: int) -> dict[str, float]:
    """What rank 0 of an FSDP job does in DCP, and the load plan of a rank in a job of three quarters the size."""
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
            for key in keys_of(0, tensors)
        ],
    )
    return found


def _chunk(rank: int, world: int) -> tuple[int, int]:
    size = -(-SHAPE[0] // world)
    start = min(rank * size, SHAPE[0])
    return start, min(size, SHAPE[0] - start)


def _dcp_plan(rank: int, world: int, tensors: int) -> Any:
    """The local plan that DCP makes for DTensors with placement Shard(0)."""
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
        for key in keys_of(0, tensors)
    ]
    return SavePlan(items, planner_data={key: (key,) for key in keys_of(0, tensors)})
