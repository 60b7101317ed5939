"""Saves in the background, by what users call: exact, within the budget, loud, and without a trace where they fail."""

import contextlib
import ctypes
import errno
import gc
import os
import signal
import subprocess
import sys
import threading
import time
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import xxhash
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as TorchSavePlanner
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost.background.staging import snapshot
from milepost.background.staging.copying import Copier
from milepost.comm import BoardComm, MemoryBoard
from milepost.core.dtypes import DTYPES
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.store import LocalStore
from milepost.testing import CountingStore
from tests.ranks import spawn
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32
TIMEOUT_S = 60.0
PROMPT_S = 25.0
"""What ends within this did not wait for a timeout."""
HUGE_PAGE = 2 * MIB
DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]


# ---------------------------------------------------------------- states, and what is left of them


def every_form():
    """Every dtype, in every form that a tensor can have in memory."""
    forms = {}
    for i, dtype in enumerate(DTYPE_NAMES):
        whole = random_tensor(dtype, 30, 20, seed=i)
        forms[dtype] = {
            "plain": whole,
            "tied": whole,
            "same memory": whole.view(20, 30),
            "overlapping": whole[3:20, 2:],
            "transposed": random_tensor(dtype, 30, 20, seed=i).t(),
            "strided": random_tensor(dtype, 20, 4, 30, seed=i)[::3, 1:3, 5::7],
            "expanded": random_tensor(dtype, 1, 20, seed=i).expand(10, 20),
            "empty": whole[:0],
            "scalar": random_tensor(dtype, seed=i),
            "several blocks": random_tensor(dtype, BLOCK_BYTES // DTYPES[dtype].size_bytes + 1, seed=i),
        }
    for dtype in ("complex32", "complex64", "complex128"):
        whole = random_tensor(dtype, 40, 30)
        forms[f"lazy {dtype}"] = {
            "it": whole,
            "conj": whole.conj(),
            "conj.t": whole.conj().t(),
            "neg": whole.conj().imag,
        }
    one = torch.randn(50, dtype=torch.complex64)
    forms["lazy in two ways"] = {"conj": one.conj(), "neg": torch._neg_view(one), "both": torch._neg_view(one.conj())}
    forms["parameter"] = torch.nn.Parameter(torch.randn(30, 40))
    forms["large transposed"] = random_tensor("bfloat16", 500, 700).t()
    return forms


def other_leaves():
    numbers = np.random.default_rng(0).standard_normal((60, 40))
    fixed = np.arange(30)
    fixed.flags.writeable = False
    return {
        "numpy": {
            "plain": numbers.copy(),
            "transposed": numbers.copy().T,
            "backwards": numbers.copy()[::-1],
            "fixed": fixed,
            "scalar": np.array(3.5),
            "empty": np.zeros((0, 3), dtype=np.int16),
            "half": numbers.astype(np.float16),
        },
        "bytes": {"short": b"abc", "long": os.urandom(100_000), "array": bytearray(b"abc")},
        "long array": bytearray(os.urandom(200_000)),
        "values": {
            "list": [1, [2, {"a": (3, [4])}]],
            "dict": {"k": [1.5]},
            "set": {1, 2},
            "tuple": ([1], "x"),
            "none": None,
        },
        "in a list": [torch.randn(3), {"t": torch.randn(2), "n": [1]}, (torch.randn(1), [2])],
        "private": milepost.PerRank(
            {"rng": torch.get_rng_state(), "np": np.arange(5.0), "list": [1, {"b": 2}], "e": torch.ones(0)}
        ),
        "sharded": milepost.Sharded(
            (6, 5), {(0, 0): torch.randn(6, 2), (0, 2): random_tensor("float32", 6, 6)[:, ::2]}
        ),
    }


def large_state(count=5000):
    tiny = {str(i): random_tensor(DTYPE_NAMES[i % len(DTYPE_NAMES)], i % 9, seed=i) for i in range(count)}
    return {"tiny": tiny, "forms": every_form(), **other_leaves()}


def spoil(value, seen=None):
    """Change everything that can be changed in place, all the way down."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not_()
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value.fill(0)
    elif isinstance(value, milepost.Sharded):
        spoil([part.data for part in value.parts], seen)
    elif isinstance(value, milepost.PerRank):
        spoil(value.value, seen)
        value.value = None
    elif isinstance(value, bytearray):
        value[:] = bytes(len(value))
    elif isinstance(value, set):
        value.add("late")
    elif isinstance(value, (list, tuple)):
        for item in value:
            spoil(item, seen)
        if isinstance(value, list):
            value.append("late")
    elif isinstance(value, dict):
        for item in list(value.values()):
            spoil(item, seen)
        value["late"] = 1


def content(where):
    """All that a checkpoint says and holds, but for what is different in every save. Checks every byte of it."""
    with milepost.open(where) as checkpoint:
        assert checkpoint.verify().ok
        it = checkpoint.manifest
    files = {
        f.rank: (Path(where) / it.file_name(f.rank)).read_bytes().replace(it.save_id.encode(), b"") for f in it.files
    }
    said = {
        name: getattr(it, name) for name in ("world", "metadata", "layouts", "tensors", "tree", "values", "per_rank")
    }
    return said | {"files": {rank: (len(data), xxhash.xxh3_128_hexdigest(data)) for rank, data in files.items()}}


def saved_now(state, where, comm=None, **options):
    """What a save that waits makes of this state."""
    milepost.save(state, where, process_group=comm, **options)
    return content(where)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ---------------------------------------------------------------- stores that a process can be given


def come_to(gate):
    """Say that somebody is here, and wait until it is open."""
    gate.with_suffix(".reached").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while not gate.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class GatedStore(LocalStore):
    """Writes no data before a gate is open, which is a file, so that it works between processes."""

    def __init__(self, root, gate):
        super().__init__(root)
        self.gate = Path(gate)

    def writer(self, name, size_bytes, *, direct=True):
        if name.startswith("data/"):
            come_to(self.gate)
        return super().writer(name, size_bytes, direct=direct)

    def wait_reached(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not self.gate.with_suffix(".reached").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def open_after(self, seconds):
        timer = threading.Timer(seconds, self.gate.touch)
        timer.start()
        return timer


class FailingStore(LocalStore):
    """Has no room at the `at`-th call of one kind: "writer", "write", "commit" (of data), "create" (of the manifest)."""

    def __init__(self, root, call, at=1):
        super().__init__(root)
        self.call, self.left = call, at

    def count(self, call):
        if call == self.call:
            self.left -= 1
            if self.left == 0:
                raise milepost.StorageError("No space left on device", errno=errno.ENOSPC)

    def create(self, name, data):
        self.count("create")
        super().create(name, data)

    def writer(self, name, size_bytes, *, direct=True):
        inner = super().writer(name, size_bytes, direct=direct)
        if not name.startswith("data/"):
            return inner
        try:
            self.count("writer")
        except OSError:
            inner.abort()
            raise
        return FailingWriter(self, inner)


class FailingWriter:
    def __init__(self, store, inner):
        self.store, self.inner = store, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, offset, views):
        self.store.count("write")
        self.inner.write(offset, views)

    def commit(self):
        self.store.count("commit")
        self.inner.commit()


# ---------------------------------------------------------------- savers, kept over many tests: a process takes seconds


@pytest.fixture(scope="module", params=["thread", "process"])
def saver(request):
    with milepost.AsyncSaver(background=request.param) as made:
        yield made


class Team:
    """Ranks that are threads, each with a saver of its own."""

    def __init__(self, background, world, **options):
        board = MemoryBoard()
        self.world = world
        self.savers = [
            milepost.AsyncSaver(
                background=background,
                process_group=BoardComm(board, rank, world, TIMEOUT_S),
                timeout_s=TIMEOUT_S,
                **options,
            )
            for rank in range(world)
        ]

    def run(self, work):
        """What `work(saver, rank)` gives on each rank. Fails if it raises on any, or took as long as a timeout."""
        results, raised = [None] * self.world, []

        def run(rank):
            try:
                results[rank] = work(self.savers[rank], rank)
            except Exception as error:
                error.add_note(f"on rank {rank}")
                raised.append(error)

        start = time.monotonic()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise ExceptionGroup("ranks failed", raised)
        assert time.monotonic() - start < PROMPT_S
        return results

    def close(self):
        self.run(lambda saver, _: saver.close())


@pytest.fixture(scope="module", params=["thread", "process"])
def team(request):
    made = Team(request.param, 4 if request.param == "thread" else 2)
    # Processes start here, so that no test waits for them.
    made.run(lambda saver, rank: saver.prewarm(shared_state(rank, made.world)))
    yield made
    made.close()


@contextlib.contextmanager
def limited(saver, staging_bytes):
    """The saver with another budget, and no memory to begin with."""
    stager = saver._saver._stager
    before, stager._limit_bytes = stager._limit_bytes, staging_bytes
    stager.free()
    try:
        yield stager.arena
    finally:
        stager._limit_bytes = before


def shared_state(rank, world, size=40_000):
    """Replicas, shards, private values and plain ones."""
    return {
        "replica": random_tensor("float32", size),
        "replicas": {str(i): random_tensor(name, 50, 7, seed=i) for i, name in enumerate(DTYPE_NAMES)},
        "transposed": random_tensor("float32", size // 100, 70, seed=1).t(),
        "mine": milepost.Sharded((2 * world, 500), {(2 * rank, 0): torch.full((2, 500), float(rank))}),
        "private": milepost.PerRank({"rank": [rank], "t": torch.full((5000 * rank,), rank)}),
        "values": {"list": [1, [2]], "step": 7},
    }


# ---------------------------------------------------------------- exact


@pytest.mark.parametrize("stage", ["host", "overlap"])
def test_what_is_saved_is_the_state_at_the_call_whatever_happens_to_it_afterwards(saver, tmp_path, stage):
    state, metadata = large_state(), {"note": [1, {"k": 2}]}
    expected = saved_now(state, tmp_path / "now", metadata=metadata)
    store = GatedStore(tmp_path / "later", tmp_path / "gate")
    pending = saver.save(state, store, stage=stage, metadata=metadata)
    spoil([state["values"], metadata])
    if stage == "overlap":
        pending.wait_staged(TIMEOUT_S)
    spoil({key: value for key, value in state.items() if key != "values"})
    state.clear()
    gc.collect()
    store.gate.touch()
    receipt = pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected
    with milepost.open(tmp_path / "later") as checkpoint:
        assert (checkpoint.generation, checkpoint.manifest.save_id) == (receipt.generation, receipt.save_id)


class Net(torch.nn.Module):
    """Tied weights, buffers, and a parameter that is a view of another tensor."""

    def __init__(self, width=32):
        super().__init__()
        self.up = torch.nn.Linear(width, width, bias=False)
        self.down = torch.nn.Linear(width, width)
        self.down.weight = self.up.weight
        self.norm = torch.nn.BatchNorm1d(width)
        self.part = torch.nn.Parameter(torch.randn(4, width)[1:3])

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x)))) * self.part.sum(0)


def trained():
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    one_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def one_step(model, optimizer, scheduler):
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    scheduler.step()


@pytest.mark.parametrize("stage", ["host", "overlap", "auto"])
def test_training_goes_on_at_once_and_does_not_change_what_is_saved(saver, tmp_path, stage):
    model, optimizer, scheduler = trained()
    state = {
        "model": model,
        "optim": optimizer,
        "scheduler": scheduler,
        "alias": model.part.data[1],
        "ema": torch.ones(9),
    }
    expected = saved_now(state, tmp_path / "now")
    store = GatedStore(tmp_path / "later", tmp_path / "gate")
    pending = saver.save(state, store, stage=stage, optimizer=optimizer if stage != "host" else None)
    state["ema"].zero_()
    model.norm.running_mean.fill_(7)
    one_step(model, optimizer, scheduler)
    store.gate.touch()
    pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected


def test_ranks_save_what_they_had_at_the_call(team, tmp_path):
    comm_less = Team("thread", team.world)
    states = [shared_state(rank, team.world) for rank in range(team.world)]
    comm_less.run(lambda s, rank: s.save(states[rank], tmp_path / "now").result(TIMEOUT_S))
    store = GatedStore(tmp_path / "later", tmp_path / "gate")

    def work(saver, rank):
        pending = saver.save(states[rank], store, stage="host")
        spoil(states[rank])
        if rank == 0:
            store.open_after(0.1)
        return pending.result(TIMEOUT_S)

    assert len({receipt.save_id for receipt in team.run(work)}) == 1
    assert content(tmp_path / "later") == content(tmp_path / "now")
    comm_less.close()


def gloo_job(rank, folder, background):
    """Everything that a training job passes, on real ranks: copied at once, later, and not at all on some of them."""
    from torch.distributed.fsdp import fully_shard
    from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

    world = dist.get_world_size()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
    model = torch.nn.Sequential(torch.nn.Linear(12, 24), torch.nn.ReLU(), torch.nn.Linear(24, 12))
    parallelize_module(model, mesh["tp"], {"0": ColwiseParallel(), "2": RowwiseParallel()})
    if world > 2:
        fully_shard(model, mesh=mesh["dp"])
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)

    def step():
        torch.manual_seed(3)
        model(torch.randn(4, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    step()
    placements = [[Shard(0), Shard(1)], [Replicate(), Shard(0)], [Shard(1), Replicate()], [Replicate(), Replicate()]]
    placed = [distribute_tensor(torch.randn(7, 10), mesh, p) for p in placements]
    saver = milepost.AsyncSaver(background=background, timeout_s=TIMEOUT_S)
    for i, (stage, budget) in enumerate([("host", None), ("overlap", None), ("host", 1000 if rank else None)]):
        state = {
            "model": model,
            "optim": optimizer,
            "placed": [t.detach() for t in placed],
            **shared_state(rank, world),
        }
        milepost.save(state, f"{folder}/now{i}")
        with limited(saver, budget) if i == 2 else contextlib.nullcontext():
            pending = saver.save(state, f"{folder}/later{i}", stage=stage, optimizer=optimizer)
            optimizer.step()
            step()
            if stage == "overlap":
                spoil([state["values"], state["replica"]])
            pending.wait_staged(TIMEOUT_S)
            spoil({key: value for key, value in state.items() if key not in ("model", "optim", "placed")})
            for tensor in placed:
                tensor.to_local().add_(1)
            pending.result(TIMEOUT_S)
    saver.close()
    return {type(p).__name__ for v in model.parameters() if isinstance(v, DTensor) for p in v.placements}


@pytest.mark.parametrize(("world", "background"), [(4, "thread"), (2, "process")])
def test_a_job_of_real_ranks_saves_its_dtensors_exactly(tmp_path, world, background):
    kinds = spawn(world, gloo_job, str(tmp_path), background)[0]
    assert "_StridedShard" in kinds or world == 2
    for i in range(3):
        assert content(tmp_path / f"later{i}") == content(tmp_path / f"now{i}"), i


# ---------------------------------------------------------------- overlap


@pytest.fixture
def slow_copies(monkeypatch):
    """Copying starts when this is set; tells when it was asked for."""
    go = threading.Event()
    copy = Copier.copy

    def slow(self, copies, moment):
        if copies:
            assert go.wait(TIMEOUT_S)
        copy(self, copies, moment)

    monkeypatch.setattr(Copier, "copy", slow)
    yield go
    go.set()


def test_the_optimizer_waits_for_the_copy_and_only_until_then(tmp_path, slow_copies):
    model, optimizer, scheduler = trained()
    state = {"params": dict(model.named_parameters()), "optim": dict(enumerate(optimizer.state.values()))}
    expected = saved_now(state, tmp_path / "now")
    store = GatedStore(tmp_path / "later", tmp_path / "gate")
    with milepost.AsyncSaver(stage="overlap") as saver:
        pending = saver.save(state, store, optimizer=[optimizer])
        assert not pending.staged()
        assert repr(pending) == f"PendingSave({str(store.root)!r}, staging)"
        before = model.part.detach().clone()
        with pytest.raises(TimeoutError, match="not copied yet"):
            pending.wait_staged(0.05)
        stepping = threading.Thread(target=one_step, args=(model, optimizer, scheduler))
        stepping.start()
        stepping.join(0.3)
        assert stepping.is_alive(), "forward and backward ran; the step waits"
        assert torch.equal(model.part, before)
        slow_copies.set()
        stepping.join(TIMEOUT_S)
        assert not torch.equal(model.part, before)
        assert pending.staged()
        assert not pending.done(), "the step did not wait for the writing"
        store.gate.touch()
        pending.result(TIMEOUT_S)
        saver.save(state, tmp_path / "again", optimizer=optimizer).result(TIMEOUT_S)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks, "removed"
    assert content(tmp_path / "later") == expected


@pytest.mark.parametrize("background", ["thread", "process"])
def test_the_optimizer_does_not_wait_for_what_was_copied_on_the_gpu(tmp_path, slow_copies, monkeypatch, background):
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda _: True)  # as if this were one
    monkeypatch.setattr(snapshot, "_chosen", lambda *_: "device")
    model, optimizer, scheduler = trained()
    state = {"model": model, "optim": optimizer, "ema": torch.ones(5)}
    expected = saved_now(state, tmp_path / "now")
    with milepost.AsyncSaver(background=background) as saver:
        pending = saver.save(state, tmp_path / "later", optimizer=optimizer)
        stepping = threading.Thread(target=one_step, args=(model, optimizer, scheduler))
        stepping.start()
        stepping.join(TIMEOUT_S)
        assert not stepping.is_alive()
        assert not pending.staged()
        state["ema"].zero_()
        slow_copies.set()
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected


def test_only_what_the_optimizer_owns_is_copied_after_the_call(tmp_path, monkeypatch):
    """The rest may change at once: so it is copied before the call returns, even if the optimizer's takes long."""
    model, optimizer, _ = trained()
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25)
    state = {"model": model, "optim": optimizer, "ema": torch.ones(5), "np": np.ones(3)}
    expected = saved_now(state, tmp_path / "now")
    go, calls = threading.Event(), []
    copy = Copier.copy

    def slow(self, copies, moment):
        calls.append(len(copies))
        if len(calls) == 2:
            assert go.wait(TIMEOUT_S)
        copy(self, copies, moment)

    monkeypatch.setattr(Copier, "copy", slow)
    with milepost.AsyncSaver(stage="overlap") as saver:
        pending = saver.save(state, tmp_path / "later", optimizer=optimizer)
        assert not pending.staged()
        spoil([state["ema"], state["np"], rate, list(model.buffers())])
        go.set()
        pending.result(TIMEOUT_S)
    now, later = calls
    assert later == 5 + 5 * 3, "the parameters, of which two are one, and what AdamW keeps for each"
    assert now > 0
    assert content(tmp_path / "later") == expected


# ---------------------------------------------------------------- within the budget


def budget_state():
    return {
        "a": random_tensor("float32", 700_000),
        "b": {str(i): random_tensor(DTYPE_NAMES[i % len(DTYPE_NAMES)], 1000 + i, seed=i) for i in range(300)},
        "c": random_tensor("int8", 5 * MIB // 2, seed=1),
        "t": random_tensor("float64", 300, 1000, seed=2).t(),
        "p": milepost.PerRank({"x": random_tensor("int64", 100_000, seed=3)}),
        "l": bytes(100_000),
        "v": [1, 2],
    }


@pytest.mark.parametrize("share", [0, 0.3, 0.9, 1])
def test_what_does_not_fit_in_the_budget_is_written_before_the_call_returns(saver, tmp_path, share):
    state = budget_state()
    expected = saved_now(state, tmp_path / "now")
    whole = sum(length for length, _ in expected["files"].values())
    budget = int(share * whole)
    with limited(saver, budget) as arena:
        for i in range(2):  # the second one finds plan and memory
            pending = saver.save(state, tmp_path / f"later{i}")
            if i == 1:
                spoil(state)
            assert arena.capacity <= max(-(-budget // HUGE_PAGE), 1) * HUGE_PAGE
            pending.result(TIMEOUT_S)
            assert content(tmp_path / f"later{i}") == expected


def test_the_call_waits_only_for_what_is_not_copied(tmp_path, monkeypatch):
    """It returns when the part that did not fit is in the file, and not when all is."""
    state = {"first": random_tensor("float64", 2 * MIB // 8), "second": random_tensor("int8", 40 * MIB, seed=1)}
    milepost.save(state, tmp_path / "now")
    go = threading.Event()
    written = []

    class Store(LocalStore):
        def writer(self, name, size_bytes, *, direct=True):
            inner = super().writer(name, size_bytes, direct=direct)
            write = inner.write

            def slow(offset, views):
                written.append(sum(map(len, views)))
                if name.startswith("data/") and sum(written) > 41 * MIB:
                    assert go.wait(TIMEOUT_S)
                write(offset, views)

            inner.write = slow
            return inner

    with milepost.AsyncSaver(staging_bytes=10 * MIB) as saver:
        pending = saver.save(state, Store(tmp_path / "later"), transfer=milepost.Transfer(1, MIB))
        assert not pending.done()
        assert saver._saver._stager.arena.capacity <= 10 * MIB
        assert 40 * MIB <= sum(written) < 42 * MIB
        spoil(state)
        go.set()
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later")["files"] == content(tmp_path / "now")["files"]


@pytest.mark.parametrize("small", ["first", "last", "all"])
def test_ranks_with_different_budgets_save_together(team, tmp_path, small):
    """Where a process does the work for some ranks and the trainer for others, too."""
    budgets = [
        0 if small == "all" or rank == (0 if small == "first" else team.world - 1) else None
        for rank in range(team.world)
    ]
    states = [shared_state(rank, team.world, 400_000) for rank in range(team.world)]
    team.run(lambda saver, rank: saver.save(states[rank], tmp_path / "now").result(TIMEOUT_S))

    def work(saver, rank):
        with limited(saver, budgets[rank]) as arena:
            for i in range(2):
                state = shared_state(rank, team.world, 400_000)
                pending = saver.save(state, tmp_path / f"later{i}")
                spoil(state)
                pending.result(TIMEOUT_S)
            return arena.capacity

    capacities = team.run(work)
    assert [held > HUGE_PAGE for held in capacities] == [budget is None for budget in budgets]
    for i in range(2):
        assert content(tmp_path / f"later{i}") == content(tmp_path / "now")


def test_one_saver_saves_states_of_other_structures_and_keeps_its_memory_where_it_can(saver, tmp_path):
    arena = saver._saver._stager.arena
    states = {
        "small": lambda: {"a": torch.randn(1000)},
        "grown": lambda: {"a": torch.randn(3 * MIB), "b": [torch.randn(5)]},
        "values only": lambda: {"step": 1, "none": torch.zeros(0, 3)},
        "other dtypes": lambda: {"a": random_tensor("int8", 3 * MIB), "b": torch.randn(7, dtype=torch.float64)},
        "shrunk": lambda: {"a": torch.randn(3)},
        "nothing": dict,
    }
    versions = {}
    for _ in range(2):
        for name, make in states.items():
            state = make()
            expected = saved_now(state, tmp_path / "now")
            pending = saver.save(state, tmp_path / name)
            spoil(state)
            pending.result(TIMEOUT_S)
            assert content(tmp_path / name) == expected, name
            versions.setdefault(name, []).append(arena.version)
    assert len({v for name, seen in versions.items() for v in seen[name == "small" :]}) == 1, "made anew only to grow"


def test_a_structure_that_changes_on_one_rank_only_is_saved_though_another_writes_from_where_its_state_is(
    team, tmp_path
):
    """A rank that let the caller go on could not write again: so it waits until all have the same plan."""

    def state_of(rank, changed):
        cut = 3 if changed and rank == 1 else 2
        parts = {(0,): torch.ones(cut), (cut,): torch.full((5 - cut,), 2.0)} if rank == 1 else {}
        return {"t": milepost.Sharded((5,), parts, torch.float32), "big": torch.arange(9000.0)}

    def work(saver, rank):
        with limited(saver, 0 if rank == 0 else None):
            saver.save(state_of(rank, False), tmp_path).result(TIMEOUT_S)
            state = state_of(rank, True)
            pending = saver.save(state, tmp_path)
            spoil(state)
            return pending.exception(TIMEOUT_S)

    assert set(team.run(work)) == {None}
    with milepost.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["big"].read(), torch.arange(9000.0))
        assert checkpoint["t"].read().tolist() == [1, 1, 1, 2, 2]
        assert checkpoint.generation == 2


def test_where_no_memory_can_be_had_the_state_is_written_from_where_it_is(saver, tmp_path, monkeypatch, caplog):
    """Once a process wrote what lay in its memory from the save before."""
    saver.save({"a": torch.full((MIB,), 7.0)}, tmp_path / "before").result(TIMEOUT_S)
    state = {"a": torch.full((MIB,), 5.0), "b": random_tensor("int16", 20 * MIB)}
    expected = saved_now(state, tmp_path / "now")
    with monkeypatch.context() as patched:
        patched.setattr(
            "milepost.background.staging.arena.Arena._new_pages", lambda *_: (_ for _ in ()).throw(MemoryError("none"))
        )
        pending = saver.save(state, tmp_path / "later")
        spoil(state)
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected
    assert "no staging memory" in caplog.text
    state = {"a": torch.ones(50)}
    pending = saver.save(state, tmp_path / "later")
    spoil(state)
    pending.result(TIMEOUT_S)
    assert milepost.open(tmp_path / "later")["a"].read().sum() == 50


def test_nothing_keeps_the_state_alive_after_the_save(saver, tmp_path):
    state = {"t": torch.ones(1000), "m": torch.nn.Linear(3, 3)}
    watched = [weakref.ref(state["t"]), weakref.ref(state["m"])]
    saver.save(state, tmp_path).result(TIMEOUT_S)
    del state
    time.sleep(0.05)  # the thread ends
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_nothing_keeps_the_state_alive_after_a_save_that_failed(tmp_path):
    state = {"t": torch.ones(1000)}
    watched = weakref.ref(state["t"])
    with milepost.AsyncSaver() as saver:
        assert saver.save(state, FailingStore(tmp_path, "write")).exception(TIMEOUT_S)
        saver.save({"t": torch.zeros(3)}, tmp_path).result(TIMEOUT_S)
        del state
        time.sleep(0.05)
        gc.collect()
        assert watched() is None


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("phase", ["describing", "staging", "writer", "write", "commit", "create"])
def test_a_failure_on_one_rank_is_raised_on_every_rank_and_leaves_nothing(team, tmp_path, phase, monkeypatch):
    place, world = tmp_path / "place", team.world
    team.run(lambda saver, rank: saver.save(shared_state(rank, world), place).result(TIMEOUT_S))
    before, victim = files_in(place), 0 if phase == "create" else world - 1
    reason = {"describing": "'bad' is a builtins.function", "staging": "broken"}.get(phase, "No space left on device")

    def work(saver, rank):
        state = shared_state(rank, world)
        if rank == victim and phase == "describing":
            state["bad"] = lambda: 0
        fails = rank == victim and phase not in ("describing", "staging")
        pending = saver.save(state, FailingStore(place, phase, 2 if phase == "write" else 1) if fails else place)
        error = pending.exception(TIMEOUT_S)
        assert repr(pending) == f"PendingSave({str(place)!r}, failed)"
        with pytest.raises(type(error)):
            pending.result()
        return error

    with monkeypatch.context() as patched:
        if phase == "staging":

            def broken(*_):
                raise ValueError("broken")

            patched.setattr(team.savers[victim]._saver._stager.copier, "copy", broken)
        errors = team.run(work)
    for error in errors:
        assert isinstance(error, milepost.CheckpointError), errors
        assert list(error.failures) == [victim]
        assert reason in str(error)
        assert f"rank {victim}" in str(error)
    assert files_in(place) == before, "the earlier one stands, and nothing of this one remains"
    states = [shared_state(rank, world) for rank in range(world)]
    team.run(lambda saver, rank: saver.save(states[rank], place).result(TIMEOUT_S))
    assert milepost.open(place).generation == 2
    assert milepost.open(place).verify().ok


@pytest.mark.parametrize("call", ["write", "create"])
def test_one_process_raises_the_error_itself(saver, tmp_path, call):
    saver.save({"t": torch.zeros(3)}, tmp_path).result(TIMEOUT_S)
    before = files_in(tmp_path)
    pending = saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, call))
    with pytest.raises(OSError, match="No space left"):
        pending.result(TIMEOUT_S)
    with pytest.raises(milepost.InvalidState, match="'f' is a builtins"):
        saver.save({"f": lambda: 0}, tmp_path)
    assert files_in(tmp_path) == before
    saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S)
    assert milepost.open(tmp_path)["t"].read().tolist() == [1, 1, 1]


def test_what_is_called_afterwards_is_called_on_every_rank_after_the_commit(team, tmp_path):
    def work(saver, rank):
        found = []
        saver.save(
            {"t": torch.ones(2)},
            tmp_path,
            then=lambda comm: found.append((comm.rank, milepost.open(tmp_path).generation)),
        ).result(TIMEOUT_S)
        return found

    assert team.run(work) == [[(rank, 1)] for rank in range(team.world)]


def test_a_failure_of_what_is_called_afterwards_is_raised_on_every_rank(tmp_path):
    team = Team("thread", 2)

    def fail(comm):
        if comm.rank == 1:
            raise ValueError("afterwards")

    try:
        errors = team.run(
            lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path, then=fail).exception(TIMEOUT_S)
        )
    finally:
        team.close()
    assert all("afterwards" in str(e) and "rank 1" in str(e) for e in errors)


def test_a_process_that_cannot_be_started_is_told_to_all_ranks_at_once(tmp_path, monkeypatch):
    """It was a bare OSError, while the others waited. The folder that it would start in is gone, which is no reason."""
    popen, refusals = subprocess.Popen, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    def refuse_once(*args, **options):
        if refusals:
            raise refusals.pop()
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse_once)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    team = Team("process", 2)
    start = time.monotonic()
    errors = team.run(lambda saver, rank: saver.save({"t": torch.zeros(2)}, tmp_path / "a").exception(TIMEOUT_S))
    assert time.monotonic() - start < PROMPT_S
    assert all(isinstance(error, milepost.WriterDied) and "could not be started" in str(error) for error in errors)
    team.run(lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path / "a").result(TIMEOUT_S))
    assert milepost.open(tmp_path / "a")["t"].read().tolist() == [1, 1]
    team.close()


def test_a_process_that_died_between_two_saves_is_told_to_all_ranks_at_once(tmp_path):
    """Once the others waited for it as long as for a rank that is slow."""
    team = Team("process", 2)
    team.run(lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path).result(TIMEOUT_S))
    os.kill(team.savers[1]._saver._writers.link.pid, signal.SIGKILL)
    time.sleep(0.2)
    errors = team.run(lambda saver, rank: saver.save({"t": torch.zeros(2)}, tmp_path).exception(TIMEOUT_S))
    assert all(isinstance(error, milepost.WriterDied) for error in errors)
    assert milepost.open(tmp_path)["t"].read().tolist() == [1, 1]
    team.close()


# ---------------------------------------------------------------- no error is lost


@pytest.mark.parametrize("askers", [(), (0,), (1,)])
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(team, tmp_path, askers):
    place, world = tmp_path / "place", team.world
    silent = [rank for rank in range(world) if rank not in askers]

    def work(saver, rank):
        store = FailingStore(place, "write") if rank == world - 1 else place
        pending = saver.save(shared_state(rank, world), store)
        if rank in askers:
            assert "No space left" in str(pending.exception(TIMEOUT_S))
        try:
            again = saver.save(shared_state(rank, world), place)
        except milepost.CheckpointError as error:
            return "raised", error
        return "told", again.exception(TIMEOUT_S)

    for rank, (how, error) in enumerate(team.run(work)):
        assert how == ("raised" if rank in silent else "told"), rank
        assert "No space left" in str(error)
        assert isinstance(error, milepost.CheckpointError)
        assert list(error.failures) == ([world - 1] if rank in silent else silent)
    assert not files_in(tmp_path)
    states = [shared_state(rank, world) for rank in range(world)]
    team.run(lambda saver, rank: saver.save(states[rank], place).result(TIMEOUT_S))


def test_an_error_that_nobody_asked_for_is_raised_by_wait_and_by_close_and_only_once(saver, tmp_path):
    saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    saver.wait()
    saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S)
    closing = milepost.AsyncSaver()
    closing.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
    with pytest.raises(OSError, match="No space left"):
        closing.close()
    closing.close()
    asked = milepost.AsyncSaver()
    asked.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write")).exception(TIMEOUT_S)
    asked.close()


def test_a_with_block_does_not_hide_the_error_that_leaves_it(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), milepost.AsyncSaver() as saver:  # noqa: PT012
        saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
        _ = 1 / 0
    assert "No space left" in caplog.text
    with pytest.raises(OSError, match="No space left"), milepost.AsyncSaver() as saver:
        saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))


# ---------------------------------------------------------------- two at once, and one that is called off


def test_a_second_save_waits_for_the_first(saver, tmp_path):
    store = GatedStore(tmp_path / "first", tmp_path / "gate")
    state = {"t": torch.ones(1000), "step": [1]}
    first = saver.save(state, store)
    first.wait_staged(TIMEOUT_S)
    assert repr(first).endswith("writing)")
    with pytest.raises(TimeoutError, match="has not ended after"):
        first.result(0.05)
    with pytest.raises(TimeoutError):
        first.exception(0.05)
    state["t"].fill_(2)
    state["step"].append(2)
    store.open_after(0.3)
    second = saver.save(state, tmp_path / "second")
    assert first.done()
    state["t"].fill_(3)
    second.result(TIMEOUT_S)
    assert repr(second).endswith("saved)")
    for place, value, steps in (("first", 1, [1]), ("second", 2, [1, 2])):
        with milepost.open(tmp_path / place) as checkpoint:
            assert checkpoint["t"].read().unique().tolist() == [value]
            assert checkpoint["step"] == steps


@pytest.mark.parametrize("slow", [0, 2])
def test_a_save_that_is_refused_is_refused_on_all_ranks_however_far_each_is(tmp_path, slow):
    """The coordinator's own word counts: where another rank is slower, that one waits."""
    team, go = Team("thread", 3, when_busy="refuse"), threading.Event()

    def work(saver, rank):
        if rank == slow:
            real = saver._saver._save
            saver._saver._save = lambda *work: (real(*work), go.wait(TIMEOUT_S))[0]
        first = saver.save({"t": torch.ones(3)}, tmp_path / "first")
        if rank != slow:
            first.result(TIMEOUT_S)
        if slow != 0 and rank == slow:
            threading.Timer(0.3, go.set).start()
        try:
            saver.save({"t": torch.ones(3)}, tmp_path / "second").result(TIMEOUT_S)
        except milepost.SaveInFlight as error:
            return str(error)
        return "saved"

    for result in team.run(work):
        assert f"the save to {tmp_path / 'first'} is under way" in result if slow == 0 else result == "saved"
    go.set()
    team.run(lambda saver, _: saver.wait())
    team.run(lambda saver, _: saver.save({"t": torch.ones(3)}, tmp_path / "third").result(TIMEOUT_S))
    team.close()


@pytest.mark.parametrize("when", ["staging", "writing"])
def test_one_rank_can_cancel_for_all(team, tmp_path, when, monkeypatch):
    place, world = tmp_path / "place", team.world
    team.run(lambda saver, rank: saver.save(shared_state(rank, world), place).result(TIMEOUT_S))
    before, canceller = files_in(place), world - 1
    store = GatedStore(place, tmp_path / "gate")

    def slow(*_):
        come_to(store.gate)

    def work(saver, rank):
        pending = saver.save(shared_state(rank, world), store, stage="overlap")
        if rank != canceller:
            return pending.exception(TIMEOUT_S)
        store.wait_reached()
        store.open_after(0.4)
        return pending.cancel(TIMEOUT_S), saver._saver._current.exception()

    with monkeypatch.context() as patched:
        if when == "staging":
            patched.setattr(team.savers[canceller]._saver._stager.copier, "copy", slow)
        results = team.run(work)
    told, own = results.pop(canceller)
    assert told is True
    for error in [*results, own]:
        assert isinstance(error, milepost.SaveCancelled)
        assert list(error.failures) == [canceller]
    assert files_in(place) == before

    def too_late(saver, rank):
        pending = saver.save(shared_state(rank, world), place)
        pending.result(TIMEOUT_S)
        return pending.cancel()

    assert team.run(too_late) == [False] * world
    assert milepost.open(place).generation == 2


def test_a_save_that_is_cancelled_alone_leaves_nothing(saver, tmp_path):
    store = GatedStore(tmp_path / "place", tmp_path / "gate")
    pending = saver.save({"t": torch.ones(3)}, store)
    store.wait_reached()
    with pytest.raises(TimeoutError, match="has not ended"):
        pending.cancel(0.3)
    store.gate.touch()
    assert pending.cancel(TIMEOUT_S) is True
    with pytest.raises(milepost.SaveCancelled):
        pending.result()
    assert not files_in(tmp_path / "place")
    saver.save({"t": torch.ones(3)}, tmp_path / "place").result(TIMEOUT_S)


# ---------------------------------------------------------------- the life of a saver


def test_a_closed_saver_has_waited_and_freed_its_memory_and_takes_no_more(tmp_path):
    store = GatedStore(tmp_path / "place", tmp_path / "gate")
    saver = milepost.AsyncSaver()
    pending = saver.save({"t": torch.ones(1000)}, store)
    arena = saver._saver._stager.arena
    assert arena.capacity
    store.open_after(0.2)
    saver.close()
    assert pending.done()
    assert not arena.capacity
    saver.close()
    for call in (lambda: saver.save({}, tmp_path), lambda: saver.prewarm({}), saver.wait):
        with pytest.raises(milepost.InvalidRequest, match="closed"):
            call()
    assert milepost.open(tmp_path / "place")["t"].read().sum() == 1000


def test_a_saver_that_gets_no_thread_saves_in_front_and_says_so(tmp_path, monkeypatch, caplog):
    saver, start = milepost.AsyncSaver(), threading.Thread.start

    def refused(thread):
        if thread.name == "milepost-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        pending = saver.save({"t": torch.ones(3)}, tmp_path)
        assert pending.done()
        assert pending.result(TIMEOUT_S).generation == 1
    assert "in front" in caplog.text
    assert saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S).generation == 2
    saver.close()


def test_a_fork_of_the_trainer_neither_waits_for_its_saves_nor_takes_them_over(tmp_path):
    go_on, inner = threading.Event(), LocalStore(tmp_path)

    class Held(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                assert go_on.wait(TIMEOUT_S)

    saver = milepost.AsyncSaver()
    pending = saver.save({"t": torch.ones(3)}, Held(inner))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(10)  # where it hangs, it must not hang for ever
            saver.join()
            try:
                saver.save({"t": torch.zeros(3)}, tmp_path)
            except milepost.InvalidRequest as error:
                code = 0 if "fork" in str(error) else 2
            saver.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert pending.result(TIMEOUT_S).generation == 1
    saver.close()


def test_after_prewarm_a_save_makes_no_memory(saver, tmp_path):
    arena = saver._saver._stager.arena
    state = {"t": torch.ones(arena.capacity // 4 + MIB), "u": random_tensor("int8", 999)}
    version = arena.version
    saver.prewarm(state)
    assert arena.version == version + 1
    writers = saver._saver._writers
    saver.save(state, tmp_path).result(TIMEOUT_S)
    assert arena.version == version + 1
    assert saver._saver._writers is writers


def test_callbacks_are_called_when_it_has_ended(saver, tmp_path):
    store, calls = GatedStore(tmp_path / "place", tmp_path / "gate"), []
    pending = saver.save({"t": torch.ones(3)}, store)
    called = threading.Event()
    pending.add_done_callback(lambda ended: calls.append((ended, ended.done(), threading.current_thread().name)))
    pending.add_done_callback(lambda _: called.set())
    assert not calls
    store.gate.touch()
    assert called.wait(TIMEOUT_S)
    assert calls == [(pending, True, "milepost-save")]
    pending.add_done_callback(lambda ended: calls.append(ended))
    assert calls[-1] is pending


def test_progress_is_told_and_cannot_stop_the_work(saver, tmp_path):
    """In a process, a callback that raised once ended the save for the trainer, while the process went on with it."""
    told = []
    state = {"t": torch.ones(2 * MIB)}
    receipt = saver.save(state, tmp_path, progress=told.append).result(TIMEOUT_S)
    assert told[-1].finished
    assert told[-1].total_bytes == receipt.data_bytes == 8 * MIB
    assert [p.done_bytes for p in told] == sorted(p.done_bytes for p in told)

    def broken(progress):
        raise ValueError("no screen")

    assert saver.save(state, tmp_path, progress=broken).result(TIMEOUT_S).generation == 2
    assert milepost.open(tmp_path).generation == 2


# ---------------------------------------------------------------- the end of the interpreter

PROGRAM = """
import sys, time, torch, milepost
from milepost.comm import BoardComm, MemoryBoard

place, how, background = sys.argv[1:]

class Slow(milepost.store.LocalStore):
    def writer(self, name, size_bytes, *, direct=True):
        time.sleep(0.5)
        if how == "fails":
            raise milepost.StorageError("No space left on device")
        return super().writer(name, size_bytes, direct=direct)

state = {"t": torch.arange(100_000.0), "step": [1]}
options = {"process_group": BoardComm(MemoryBoard(), 0, 2, 3.0), "timeout_s": 3.0} if how == "dead peer" else {}
store = Slow(place) if background == "thread" else place
milepost.async_save(state, store, background=background, **options)
state["t"].zero_()
state["step"].append(2)
print("end", flush=True)
"""


def test_the_interpreter_ends_after_the_save_and_says_what_nobody_asked_for(tmp_path):
    runs = [("works", "thread"), ("works", "process"), ("fails", "thread"), ("dead peer", "thread")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    programs = {}
    for how, background in runs:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / how / background), how, background]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        programs[how, background] = subprocess.Popen(command, env=environment, **pipes)
    for (how, background), program in programs.items():
        out, err = program.communicate(timeout=TIMEOUT_S)
        place = tmp_path / how / background
        assert (program.returncode, out) == (0, "end\n"), err
        if how == "works":
            assert not err
            with milepost.open(place) as checkpoint:
                assert torch.equal(checkpoint["t"].read(), torch.arange(100_000.0))
                assert checkpoint["step"] == [1]
                assert checkpoint.verify().ok
        else:
            assert f"the save to {place} failed in the background" in err
            assert ("No space left" if how == "fails" else "rank 1 did not come") in err
            assert "Traceback" in err
            assert not files_in(place)


# ---------------------------------------------------------------- ranks that disagree


@pytest.mark.parametrize("what", ["values", "shapes", "replicas", "replicas that are not copied"])
def test_ranks_that_disagree_all_hear_of_it(team, tmp_path, what):
    last = team.world - 1

    def save(saver, rank, **options):
        odd = rank == last
        state = {
            "lr": 0.5 if odd and what == "values" else 0.1,
            "w": torch.zeros(4 if odd and what == "shapes" else 3),
            "buf": torch.full((300_000,), float(odd and what.startswith("replicas"))),
        }
        with limited(saver, 0) if what.endswith("copied") else contextlib.nullcontext():
            pending = saver.save(state, tmp_path, **options)
            spoil(state)
            return pending

    for error in team.run(lambda saver, rank: save(saver, rank).exception(TIMEOUT_S)):
        assert isinstance(error, milepost.RanksDisagree)
        assert {"values": "'lr' is 0.1", "shapes": "'w' is"}.get(what, "'buf'") in str(error)
        assert str(last) in str(error)
    assert not files_in(tmp_path)
    if what != "shapes":
        with pytest.warns(RuntimeWarning, match="'lr'" if what == "values" else "'buf'"):
            team.run(lambda saver, rank: save(saver, rank, on_difference="warn").result(TIMEOUT_S))
        with milepost.open(tmp_path) as checkpoint:
            assert checkpoint["lr"] == 0.1
            assert not checkpoint["buf"].read().any(), "the lowest rank's"


# ---------------------------------------------------------------- the functions, and what they refuse


@pytest.mark.parametrize("background", ["thread", "process"])
def test_the_functions_keep_one_saver_until_it_is_closed(tmp_path, background):
    state = {"t": torch.ones(1000)}
    milepost.prewarm(state, background=background)
    pending = milepost.async_save(state, tmp_path / "a", background=background)
    state["t"].zero_()
    again = milepost.async_save(state, tmp_path / "b", background=background)
    assert pending.done()
    milepost.close_async()
    assert again.done()
    assert milepost.open(tmp_path / "a")["t"].read().sum() == 1000
    milepost.close_async()
    milepost.async_save(state, FailingStore(tmp_path / "c", "write"))
    with pytest.raises(OSError, match="No space left"):
        milepost.close_async()
    milepost.close_async()
    milepost.async_save(state, tmp_path / "c").result(TIMEOUT_S)
    milepost.close_async()


def test_what_cannot_be_is_refused_at_once(saver, tmp_path):
    state = {"t": torch.ones(2)}
    wrong = {
        "background": lambda: milepost.AsyncSaver(background="fork"),
        "stage": lambda: milepost.AsyncSaver(stage="gpu"),
        "when_busy": lambda: milepost.AsyncSaver(when_busy="queue"),
        "staging_bytes": lambda: milepost.AsyncSaver(staging_bytes=-1),
        "stage is one of": lambda: saver.save(state, tmp_path, stage="later"),
        "say where": lambda: saver.save(state),
        "say where: a path": lambda: saver.save(state, planner=milepost.planning.DefaultSavePlanner()),
        "wait, nonsense": lambda: saver.save(state, tmp_path, nonsense=1, wait=2),
        "on_difference": lambda: saver.save(state, tmp_path, on_difference="ignore"),
        "host_memory_bytes": lambda: saver.save(state, tmp_path, host_memory_bytes=1),
    }
    for text, call in wrong.items():
        with pytest.raises(milepost.InvalidRequest) as raised:
            call()
        assert ("nonsense" if "nonsense" in text else text) in str(raised.value)
    if saver._saver._background == "process":
        with pytest.raises(milepost.InvalidRequest, match=r'MemoryStore belongs to this one.*background="thread"'):
            saver.save(state, milepost.store.MemoryStore())
    assert not files_in(tmp_path)
    milepost.save(state, tmp_path)
    refused = saver.save(state, tmp_path, overwrite=False)
    with pytest.raises(milepost.InvalidRequest, match="already"):
        refused.result(TIMEOUT_S)


class SpellingPlanner(milepost.planning.DefaultSavePlanner):
    """One of the user's own, that plans when a gate is open."""

    gate = None

    def create_local_plan(self):
        come_to(self.gate)
        return super().create_local_plan()


class TorchPlanner(TorchSavePlanner):
    gate = None

    def create_local_plan(self):
        come_to(self.gate)
        return super().create_local_plan()


LAZY = [
    milepost.planning.DefaultSavePlanner,
    None,
    SpellingPlanner,  # gets a copy by torch's stager, which forgets that a tensor is a conjugate or negative
]


@pytest.mark.parametrize("kind", LAZY)
def test_planners_save_conjugates_and_negatives_with_their_sign(tmp_path, kind):
    whole = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": whole.conj(), "neg": whole.conj().imag}
    planner = kind and kind()
    (tmp_path / "gate").touch()
    SpellingPlanner.gate = tmp_path / "gate"
    with milepost.AsyncSaver() as saver:
        saver.save(state, tmp_path / "it", planner=planner).result(TIMEOUT_S)
    with milepost.open(tmp_path / "it") as checkpoint:
        for key, tensor in state.items():
            assert torch.equal(checkpoint[key].read(), tensor.resolve_conj().resolve_neg()), key


@pytest.mark.parametrize("kind", [milepost.planning.DefaultSavePlanner, SpellingPlanner, TorchPlanner, None])
def test_planners_and_writers_save_the_state_at_the_call(saver, tmp_path, kind):
    forms = {
        f"{a} {b}": tensor
        for a, of in every_form().items()
        if isinstance(of, dict)
        for b, tensor in of.items()
        if not tensor.is_conj() and not tensor.is_neg()
    }
    leaves = {k: v for k, v in other_leaves().items() if k not in ("private", "sharded", "numpy")}
    state = {"forms": forms, **leaves, "m": torch.nn.Linear(3, 3)}
    planner = kind and kind()
    gate = tmp_path / "gate"
    if isinstance(planner, (SpellingPlanner, TorchPlanner)):
        planner.gate = gate
        gate.touch()
        milepost.save(state, tmp_path / "now", planner=planner)
        gate.unlink()
    else:
        milepost.save(state, tmp_path / "now")
    writer = milepost.planning.CheckpointWriter(tmp_path / "later")
    pending = (
        saver.save(state, storage_writer=writer)
        if planner is None
        else saver.save(state, tmp_path / "later", planner=planner)
    )
    module = state.pop("m")
    spoil(state)
    with torch.no_grad():
        module.weight.fill_(0)
    gate.touch()
    receipt = pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == content(tmp_path / "now")
    assert planner is not None or writer.generation == receipt.generation == 1


# ---------------------------------------------------------------- no byte is copied twice


@pytest.mark.parametrize("aligned", [True, False])
def test_staged_data_is_written_from_where_it_lies(tmp_path, aligned):
    state = {f"{name} {i}": random_tensor(name, 10_000 + 7 * i, seed=i) for i in range(20) for name in DTYPE_NAMES}
    state |= {"large": random_tensor("float32", 3 * MIB), "transposed": random_tensor("int16", 100, 999).t()}
    written = []

    class Recorder:
        def __init__(self, inner):
            self.inner, self.aligned = inner, aligned

        def __getattr__(self, name):
            return getattr(self.inner, name)

        def write(self, offset, views):
            for view in views:
                data = memoryview(view)
                at = 0 if data.readonly else ctypes.addressof(ctypes.c_char.from_buffer(data))
                written.append((at, data.nbytes))
            self.inner.write(offset, views)

    class Store(LocalStore):
        def writer(self, name, size_bytes, *, direct=True):
            inner = super().writer(name, size_bytes, direct=direct)
            return Recorder(inner) if name.startswith("data/") else inner

    with milepost.AsyncSaver() as saver:
        receipt = saver.save(state, Store(tmp_path)).result(TIMEOUT_S)
        arena = saver._saver._stager.arena
        start = arena.data.data_ptr()
        staged = [length for at, length in written if start <= at < start + arena.capacity]
        assert sum(staged) == receipt.data_bytes
        assert len(staged) == -(-receipt.data_bytes // milepost.Transfer().block_bytes), "one for each block"
    expected = saved_now(state, tmp_path / "now")
    assert content(tmp_path)["files"] == expected["files"]
