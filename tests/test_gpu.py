"""On an accelerator: states in device memory, saved and loaded exactly. Skipped, saying so, where there is none."""

import os

import pytest
import torch
import torch.distributed as dist
from torch import nn

import milepost
from milepost.core.dtypes import DTYPES

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="no accelerator on this machine"),
]


def bits(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu()


def test_every_dtype_goes_from_device_memory_to_device_memory(tmp_path):
    state = {}
    for name, dtype in DTYPES.items():
        data = torch.randint(0, 2, (24 * dtype.size_bytes,), dtype=torch.uint8, device="cuda")
        state[name] = data.view(getattr(torch, name)).reshape(4, 6)
    state["transposed"] = torch.randn(40, 30, device="cuda").t()
    state["large"] = torch.randn(5 << 20, device="cuda")
    milepost.save(state, tmp_path)
    target = {k: torch.zeros_like(v.view(torch.uint8) if v.is_contiguous() else v) for k, v in state.items()}
    target = {k: v.view(state[k].dtype) for k, v in target.items()}
    milepost.load(target, tmp_path)
    for key in state:
        assert torch.equal(bits(state[key]), bits(target[key])), key
        assert target[key].is_cuda


def test_a_job_with_only_nccl_saves_and_loads_a_sharded_model(tmp_path):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    os.environ.update(RANK="0", WORLD_SIZE="1", MASTER_ADDR="127.0.0.1", MASTER_PORT="29511")
    dist.init_process_group("nccl")
    try:
        mesh = init_device_mesh("cuda", (1,))
        model = fully_shard(nn.Linear(64, 32, device="cuda"), mesh=mesh)
        optimizer = torch.optim.AdamW(model.parameters(), fused=True)
        model(torch.randn(4, 64, device="cuda")).sum().backward()
        optimizer.step()
        milepost.save({"model": model, "optim": optimizer}, tmp_path)
        with torch.device("meta"):
            blank = nn.Linear(64, 32)
        blank = fully_shard(blank, mesh=mesh)
        milepost.load({"model": blank}, tmp_path, allow_unexpected=True)
        assert torch.equal(blank.weight.full_tensor(), model.weight.full_tensor())
        assert blank.weight.is_cuda
        fresh = torch.optim.AdamW(blank.parameters(), fused=True)
        milepost.load({"optim": fresh}, tmp_path, allow_unexpected=True)
        old, new = optimizer.state_dict()["state"][0], fresh.state_dict()["state"][0]
        assert torch.equal(old["exp_avg"].full_tensor(), new["exp_avg"].full_tensor())
        blank(torch.randn(4, 64, device="cuda")).sum().backward()
        fresh.step()
    finally:
        dist.destroy_process_group()
