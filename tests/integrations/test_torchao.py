"""torchao: quantized optimizer states inside DTensors load on other ranks, bit for bit; quantized weights come back."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import milepost
from tests.ranks import RanksFailed, spawn

KINDS = ["AdamW8bit", "AdamW4bit", "AdamWFp8"]


def job(kind, seed, rows=192, state=True):
    """A sharded model and its optimizer, with moments that were never trained but look so."""
    from torchao import optim

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 96), nn.ReLU(), nn.Linear(96, rows, bias=False))
    fully_shard(model)
    optimizer = getattr(optim, kind)(model.parameters(), lr=1e-2)
    torch.manual_seed(seed + dist.get_rank())
    for p in model.parameters() if state else ():
        kept = {"step": torch.tensor(float(seed))}
        for name, signed in (("exp_avg", True), ("exp_avg_sq", False)):
            kept[name] = optimizer._new_buffer(p, signed)
            local = kept[name]._local_tensor
            local.copy_(torch.rand(local.shape) - (0.5 if signed else 0.0))
        optimizer.state[p] = kept
    return {"model": model, "optim": optimizer}


def moments(state):
    """All moments of all ranks as plain numbers, and the classes of this rank's parts."""
    found, kinds = [], set()
    for kept in state["optim"].state.values():
        for name in ("exp_avg", "exp_avg_sq"):
            assert isinstance(kept[name], DTensor)
            local = kept[name]._local_tensor
            kinds.add(type(local).__name__)
            parts = [None] * dist.get_world_size()
            dist.all_gather_object(parts, (local.dequantize() if hasattr(local, "dequantize") else local).clone())
            found.append(torch.cat(parts))
    return found, kinds


def save_all(rank, folder):
    found = {}
    for kind in KINDS:
        state = job(kind, 1)
        milepost.save(state, f"{folder}/{kind}")
        found[kind] = moments(state)
    return found


def load_all(rank, folder):
    found = {}
    for kind in KINDS:
        state = job(kind, 5)
        milepost.load(state, f"{folder}/{kind}")
        found[kind] = moments(state)
        assert next(iter(state["optim"].state.values()))["step"] == 1.0
    return found


def load_what_does_not_fit(rank, folder):
    """A fresh optimizer has no state to fill; one that is cut within blocks has no parts of the saved one."""
    errors = []
    for options in ({"state": False}, {"rows": 96}):
        try:
            milepost.load(job("AdamW8bit", 5, **options), f"{folder}/AdamW8bit", allow_missing=True)
        except milepost.CheckpointError as error:
            errors.append(str(error))
    return errors


def test_optimizer_states_inside_dtensors_move_to_other_ranks(tmp_path):
    saved = spawn(2, save_all, str(tmp_path))[0]
    for world in (2, 3):
        loaded = spawn(world, load_all, str(tmp_path))[0]
        for kind in KINDS:
            assert any(name.startswith("OptimState") for name in loaded[kind][1])
            assert saved[kind][1] == loaded[kind][1]
            for was, now in zip(saved[kind][0], loaded[kind][0], strict=True):
                assert torch.equal(was, now), kind
    fresh, other = spawn(2, load_what_does_not_fit, str(tmp_path))[0]
    assert "call step() once with a learning rate of 0" in fresh
    assert "(192, 96)" in other


def save_odd_rows(rank, where):
    """43 rows on each rank, in 3 blocks that do not end with a row."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torchao.optim.subclass_8bit import OptimState8bit

    local = OptimState8bit.zeros((43, 96), block_size=43 * 96 // 3)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    milepost.save({"x": DTensor.from_local(local, mesh, [Shard(0)], run_check=False)}, where)


def test_blocks_lie_in_rows(tmp_path):
    spawn(2, save_odd_rows, str(tmp_path / "a"))
    assert milepost.open(tmp_path / "a")["x.tensors.scale"].shape == (6,)
    with pytest.raises(RanksFailed, match="only a cut along dimension 0"):
        spawn(2, save_cut_by_columns, str(tmp_path / "b"))


def save_cut_by_columns(rank, where):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard
    from torchao.optim.subclass_8bit import OptimState8bit

    local = OptimState8bit.zeros((64, 64), block_size=256)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    milepost.save({"x": DTensor.from_local(local, mesh, [Shard(1)], run_check=False)}, where)


@pytest.mark.parametrize("config", ["Int8WeightOnlyConfig", "Float8WeightOnlyConfig", "IntxWeightOnlyConfig"])
def test_quantized_weights_come_back(tmp_path, config):
    from torchao import quantization

    def model(seed):
        torch.manual_seed(seed)
        made = nn.Sequential(nn.Linear(64, 32, bias=False), nn.Linear(32, 16)).to(torch.bfloat16)
        quantization.quantize_(made, getattr(quantization, config)())
        return made

    old, new = model(1), model(2)
    milepost.save({"model": old}, tmp_path / "a")
    milepost.load({"model": new}, tmp_path / "a")
    x = torch.randn(4, 64, dtype=torch.bfloat16)
    assert type(new[0].weight) is type(old[0].weight) is not nn.Parameter
    assert torch.equal(old(x), new(x))
