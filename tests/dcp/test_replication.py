"""`_ReplicationStager`: each rank's state on another rank, for even and odd numbers of ranks."""

from datetime import timedelta

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
import milepost.dcp as dcp
from milepost.dcp.staging import AsyncStager, _ReplicationStager
from tests.ranks import spawn

WHOLE = torch.arange(24.0).view(12, 2)


def state_of(rank, mesh):
    big = torch.arange(1000.0)
    return {
        "w": distribute_tensor(WHOLE.clone(), mesh, [Shard(0)]),
        "p": torch.nn.Parameter(torch.full((3,), float(rank))),
        "view": big[10 * rank : 10 * rank + 4],
        "t": torch.full((2, 3), rank, dtype=torch.bfloat16).t(),
        "c": torch.complex(torch.tensor([1.0]), torch.tensor([float(rank)])).conj(),
        "empty": torch.zeros(0, 2),
        "nested": {"step": rank, "list": [torch.tensor(rank), "text"]},
    }


def shown(state):
    return {
        "p": state["p"].tolist(),
        "view": state["view"].tolist(),
        "t": state["t"].tolist(),
        "c": state["c"].tolist(),
        "empty": tuple(state["empty"].shape),
        "nested": (state["nested"]["step"], state["nested"]["list"][0].item(), state["nested"]["list"][1]),
    }


def job(rank, folder):
    size = dist.get_world_size()
    mesh = init_device_mesh("cpu", (size,))
    stager = _ReplicationStager(dist.group.WORLD, timedelta(seconds=60), storage_dir=str(folder / f"{size}"))
    state = state_of(rank, mesh)
    stager.stage(state_of((rank + 1) % size, mesh))  # replaced by the next
    replica = stager.stage(state)
    source = (rank - size // 2) % size
    rows = torch.tensor_split(WHOLE, size)[source]
    state["p"].data.fill_(-1.0)
    kept = torch.load(stager._get_persisted_path(rank, source), weights_only=False)
    dist.barrier()
    # A save with this stager saves each rank's own state, not that of its partner.
    future = dcp.async_save({"w": state["w"]}, checkpoint_id=folder / f"saved{size}", async_stager=stager)
    future.result(60)
    return {
        "like a stager": isinstance(stager, AsyncStager),
        "values": shown(replica) == shown(state_of(source, mesh)) == shown(kept),
        "rows": torch.equal(replica["w"].to_local(), rows) and torch.equal(kept["w"].to_local(), rows),
        "placements": replica["w"].placements == (Shard(0),),
        "files": sorted(path.name for path in (folder / f"{size}").iterdir() if f"rank_{rank}_" in path.name),
    }


@pytest.mark.slow
@pytest.mark.parametrize("world", [3, 4])
def test_each_rank_keeps_the_state_of_another(tmp_path, world):
    for rank, found in enumerate(spawn(world, job, tmp_path)):
        source = (rank - world // 2) % world
        assert found.pop("files") == [f"rank_{rank}_replica_partner_{source}.pt"]
        assert set(found.values()) == {True}, found
    assert torch.equal(milepost.open(tmp_path / f"saved{world}")["w"][...], WHOLE)


def failing_job(rank, folder):
    stager = _ReplicationStager(dist.group.WORLD, timedelta(seconds=5), storage_dir=str(folder))
    if rank == 1:
        return "never came"
    try:
        stager.stage({"w": torch.ones(2)})
    except milepost.RanksMissing as error:
        return str(error)
    return "no error"


@pytest.mark.slow
def test_a_partner_that_does_not_come_is_named(tmp_path):
    first, _ = spawn(2, failing_job, tmp_path)
    assert "rank 1, with which rank 0 exchanges replicas, does not answer" in first


def test_one_rank_alone_keeps_its_state(tmp_path):
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        state = {"w": torch.ones(2)}
        assert _ReplicationStager(dist.group.WORLD, storage_dir=str(tmp_path)).stage(state) is state
    finally:
        dist.destroy_process_group()
