"""Optimizers by name on real ranks: other pipeline stages, other homes of experts, FSDP1."""

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel

import milepost
from tests.ranks import spawn

LAYERS = 4


def seeded(name: str, step: int, shape: torch.Size) -> torch.Tensor:
    """A tensor that depends on the name and the step, and not on the rank that holds it."""
    seed = sum(ord(letter) * 31**i for i, letter in enumerate(name)) % 10**6
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed + step))


def step(model: nn.Module, optimizers: list[torch.optim.Optimizer], number: int) -> None:
    """One step with gradients that each parameter would have on any rank."""
    for name, parameter in model.named_parameters():
        parameter.grad = seeded(name, number, parameter.shape)
    for optimizer in optimizers:
        optimizer.step()


def stage_of(rank: int, world: int) -> nn.Module:
    """The layers of one pipeline stage, under the names that they have in the whole model."""
    per_rank = LAYERS // world
    layers = range(rank * per_rank, (rank + 1) * per_rank)
    model = nn.Module()
    model.layers = nn.ModuleDict({str(i): nn.Linear(6, 3) for i in layers})
    model.norms = nn.ModuleDict({str(i): nn.LayerNorm(3) for i in layers if i % 2})
    return model


def decaying(model: nn.Module, flip: bool, **options: Any) -> torch.optim.Optimizer:
    """AdamW with a group each for norms, matrices and biases, in either order. Some stages have no norms."""
    norms = list(model.norms.parameters())
    matrices = [p for p in model.layers.parameters() if p.dim() > 1]
    biases = [p for p in model.layers.parameters() if p.dim() < 2]
    decay = {0.1: norms, 0.2: matrices, 0.0: biases}
    groups = [{"params": held, "weight_decay": value} for value, held in decay.items() if held]
    return torch.optim.AdamW(groups[:: -1 if flip else 1], **options)


def known(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[tuple[str, Any]]:
    """All that is known of each parameter, by name."""
    decay = {p: group["weight_decay"] for group in optimizer.param_groups for p in group["params"]}
    for name, p in model.named_parameters():
        yield name, (p.detach().clone(), dict(optimizer.state[p]), decay[p], optimizer.param_groups[0]["lr"])


def same(one: Any, other: Any) -> bool:
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, tuple):
        return all(map(same, one, other))
    return torch.equal(one, other) if isinstance(one, torch.Tensor) else one == other


def stages_work(rank: int, where: str) -> None:
    """1 -> 2 -> 4 -> 1 stages, a step in each, beside a run of one stage that is never interrupted."""
    whole = stage_of(0, 1)
    with torch.no_grad():
        for name, parameter in whole.named_parameters():
            parameter.copy_(seeded(name, 0, parameter.shape))
    straight = decaying(whole, flip=False, lr=0.05)
    groups = {count: dist.new_group(list(range(count))) for count in (1, 2, 4)}
    for number, count in enumerate((1, 2, 4, 1)):
        if rank < count:
            model = stage_of(rank, count)
            optimizer = decaying(model, flip=bool(number % 2), lr=0.9, fused=False)
            state = {"model": model, "optim": optimizer}
            if number:
                milepost.load(state, where, process_group=groups[count])
            else:
                model.load_state_dict(whole.state_dict())
                optimizer.load_state_dict(straight.state_dict())
            expected = dict(known(whole, straight))
            for name, found in known(model, optimizer):
                assert same(found, expected[name]), (number, name)
            step(model, [optimizer], number)
            milepost.save(state, where, process_group=groups[count])
        step(whole, [straight], number)
        dist.barrier()


@pytest.mark.slow
def test_pipeline_stages_change_from_1_to_2_to_4_to_1(tmp_path):
    spawn(4, stages_work, str(tmp_path))
    keys = list(milepost.open(tmp_path))
    assert "optim.state.model.layers.3.weight.exp_avg" in keys


def experts_of(rank: int, world: int) -> nn.Module:
    """A router that all ranks have, after the experts of this rank, under their numbers in the whole model."""
    model = nn.Module()
    model.experts = nn.ModuleDict({str(i): nn.Linear(3, 2, bias=False) for i in range(rank, 6, world)})
    model.router = nn.Linear(3, 6)
    return model


def experts_work(rank: int, where: str) -> str:
    pair = dist.new_group([0, 1])
    model = experts_of(rank, 3)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(seeded(name, 0, parameter.shape))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    step(model, [optimizer], 1)
    milepost.save({"model": model, "optim": optimizer}, where)
    told = ""
    if rank < 2:
        again = experts_of(rank, 2)
        experts = torch.optim.AdamW(again.experts.parameters(), lr=0.7)
        router = torch.optim.AdamW(again.router.parameters(), lr=0.7)
        state = {"model": again, "experts": experts, "router": router}
        milepost.load(state, where, process_group=pair)
        for optimizer in (experts, router):
            assert optimizer.param_groups[0]["lr"] == 0.1
        for name, parameter in again.named_parameters():
            kept = (experts if name.startswith("experts") else router).state[parameter]
            assert torch.allclose(kept["exp_avg"], 0.1 * seeded(name, 1, parameter.shape)), name
        del again.experts["0" if rank == 0 else "1"]
        few = torch.optim.AdamW(again.parameters())
        told = str(milepost.explain({"model": again, "optim": few}, where, process_group=pair))
    return told


@pytest.mark.slow
def test_experts_move_to_other_ranks_and_optimizers(tmp_path):
    told = spawn(3, experts_work, str(tmp_path))[0]
    assert "optim.state.model.experts.0.weight.exp_avg" in told
    assert "missing" not in told


def fsdp1(orig: bool, world: int) -> nn.Module:
    model = nn.Sequential(nn.Linear(8, 6), nn.ReLU(), nn.Linear(6, 3))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(seeded(name, world, parameter.shape))
    if world == 1:
        return model
    options: Any = {"use_orig_params": orig, "device_id": torch.device("cpu")}
    model[0] = FullyShardedDataParallel(model[0], **options)
    return FullyShardedDataParallel(model, **options)


def fsdp1_steps(model: nn.Module, optimizer: torch.optim.Optimizer, steps: range) -> None:
    for number in steps:
        model(seeded("data", number, torch.Size((4, 8)))).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()


def fsdp1_work(rank: int, where: str, orig: bool, start: int) -> None:
    """Two steps more of a job that began with `start` steps of another number of ranks."""
    world = dist.get_world_size()
    model = fsdp1(orig, world)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 if start == 0 else 0.9)
    if start:
        milepost.load({"model": model, "optim": optimizer}, where)
    fsdp1_steps(model, optimizer, range(start, start + 2))
    milepost.save({"model": model, "optim": optimizer}, where)


@pytest.mark.slow
@pytest.mark.parametrize("orig", [True, False])
def test_fsdp1_optimizer_goes_on_with_other_ranks_and_without_fsdp(tmp_path, orig):
    spawn(2, fsdp1_work, str(tmp_path), orig, 0)
    spawn(3, fsdp1_work, str(tmp_path), not orig, 2)
    model = fsdp1(orig, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.9)
    milepost.load({"model": model, "optim": optimizer}, tmp_path)
    straight = fsdp1(orig, 1)
    with torch.no_grad():
        for name, parameter in straight.named_parameters():
            parameter.copy_(seeded(name, 2, parameter.shape))
    other = torch.optim.AdamW(straight.parameters(), lr=0.1)
    fsdp1_steps(straight, other, range(4))
    assert optimizer.param_groups[0]["lr"] == 0.1
    for p, q in zip(model.parameters(), straight.parameters(), strict=True):
        assert torch.allclose(p, q, atol=1e-5)
        assert torch.allclose(optimizer.state[p]["exp_avg"], other.state[q]["exp_avg"], atol=1e-6)
        assert optimizer.state[p]["step"] == 4
