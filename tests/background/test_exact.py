"""A background save holds the state at the call, on threads, processes and real ranks, and no byte is copied twice."""

import contextlib
import ctypes
import gc

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost.core.limits import MIB
from milepost.store import LocalStore
from tests.background.saves import (
    DTYPE_NAMES,
    TIMEOUT_S,
    GatedStore,
    Team,
    content,
    every_form,
    limited,
    one_step,
    other_leaves,
    saved_now,
    shared_state,
    spoil,
    trained,
)
from tests.ranks import spawn
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


def large_state(count=5000):
    tiny = {str(i): random_tensor(DTYPE_NAMES[i % len(DTYPE_NAMES)], i % 9, seed=i) for i in range(count)}
    return {"tiny": tiny, "forms": every_form(), **other_leaves()}


# ---------------------------------------------------------------- exact


@pytest.mark.slow
@pytest.mark.parametrize("stage", ["host", "overlap"])
def test_saved_state_is_the_state_at_the_call(saver, tmp_path, stage):
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


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.parametrize(("world", "background"), [(4, "thread"), (2, "process")])
def test_a_job_of_real_ranks_saves_its_dtensors_exactly(tmp_path, world, background):
    kinds = spawn(world, gloo_job, str(tmp_path), background)[0]
    assert "_StridedShard" in kinds or world == 2
    for i in range(3):
        assert content(tmp_path / f"later{i}") == content(tmp_path / f"now{i}"), i


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
        arena = saver._engine.stager.arena
        start = arena.data.data_ptr()
        staged = [length for at, length in written if start <= at < start + arena.capacity]
        assert sum(staged) == receipt.data_bytes
        assert len(staged) == -(-receipt.data_bytes // milepost.Transfer().block_bytes), "one for each block"
    expected = saved_now(state, tmp_path / "now")
    assert content(tmp_path)["files"] == expected["files"]
