"""Optimizers by name where jobs are odd: models with equal names, stages without parameters, state of other types."""

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import milepost
from milepost.store import MemoryStore
from milepost.testing import run_ranks
from tests.state.trained import FORMS, by_name, net, same, train


@pytest.mark.parametrize("form", FORMS)
def test_torchs_names_of_two_models_are_told_apart_by_the_key(form):
    """A generator and a discriminator: torch calls a parameter of each `0.weight`."""
    state = {"maker": net(), "judge": net()}
    saved = {}
    for steps, (name, model) in enumerate(state.items(), 1):
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1 * steps)
        train(model, optimizer, steps=steps)
        saved[name] = get_model_state_dict(model)
        saved[f"of {name}"] = get_optimizer_state_dict(model, optimizer, options=FORMS[form])
        state = {**state, f"of {name}": optimizer}
    place = MemoryStore()
    milepost.save(saved, place)
    other = {"maker": net(), "judge": net()}
    for name in ("judge", "maker"):
        other[f"of {name}"] = torch.optim.AdamW(reversed(list(other[name].parameters())))
    milepost.load(other, place)
    for name in ("maker", "judge"):
        assert same(by_name(other[name], other[f"of {name}"]), by_name(state[name], state[f"of {name}"]))
    # One optimizer for both has no key that says whose the name is.
    joined = torch.optim.AdamW([*other["maker"].parameters(), *other["judge"].parameters()])
    report = milepost.explain({"maker": other["maker"], "judge": other["judge"], "of maker": joined}, place)
    assert "of maker.state.judge.0.weight" in report.missing


def test_stage_with_empty_groups_is_saved_and_loaded_with_the_others():
    """A stage may have no biases, or no parameters at all; the next job may have one stage, or other empty groups."""

    def stage(names, lr):
        model = nn.Module()
        model.layers = nn.ModuleDict({name: nn.Linear(2, 2, bias=name == "0") for name in names})
        matrices = [p for p in model.parameters() if p.dim() == 2]
        biases = [p for p in model.parameters() if p.dim() == 1]
        groups = [{"params": matrices}, {"params": biases, "weight_decay": 0.0}]
        optimizer = torch.optim.AdamW(groups, lr=lr)
        for p in model.parameters():
            p.grad = torch.ones_like(p)
        optimizer.step()
        return {"model": model, "optim": optimizer}

    stages = ["0", "1", ""]
    place = MemoryStore()
    run_ranks(3, lambda comm: milepost.save(stage(stages[comm.rank], lr=0.1), place, process_group=comm))
    for target in (stage("01", lr=0.9), stage("10", lr=0.9)):
        milepost.load(target, place)
        assert [group["lr"] for group in target["optim"].param_groups] == [0.1, 0.1]
    milepost.save(target, place)
    targets = [stage(names, lr=0.9) for names in stages[::-1]]
    run_ranks(3, lambda comm: milepost.load(targets[comm.rank], place, process_group=comm))
    assert [one["optim"].param_groups[0]["lr"] for one in targets[1:]] == [0.1, 0.1]
    # Alone, too: nothing but groups without parameters.
    milepost.save(stage("", lr=0.1), place)
    alone = stage("", lr=0.9)
    milepost.load(alone, place)
    assert [group["lr"] for group in alone["optim"].param_groups] == [0.1, 0.1]


class Master(torch.optim.Optimizer):
    """Keeps exact weights, and other things, beside parameters of a small type."""

    def __init__(self, parameters):
        super().__init__(parameters, {"lr": 0.01})

    @torch.no_grad()
    def step(self):
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                if not kept:
                    kept.update(weight=p.float(), seen=torch.tensor(2**24), deep={"both": [p.double(), 1]})
                kept["weight"] -= group["lr"] * p.grad.float()
                kept["seen"] += 1
                p.copy_(kept["weight"])


def trained_small(kind, stepped):
    model = net().bfloat16()
    optimizer = kind(model.parameters())
    for step in range(stepped):
        for p in model.parameters():
            p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(step)).bfloat16()
        optimizer.step()
    return model, optimizer


@pytest.mark.parametrize("kind", [Master, torch.optim.NAdam, torch.optim.ASGD])
@pytest.mark.parametrize("stepped", [0, 1])
def test_state_of_another_type_than_its_parameter_stays_exact(kind, stepped):
    """Torch's load_state_dict turns all state into the type of the parameter: float32 into bfloat16."""
    model, optimizer = trained_small(kind, 3)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    other, target = trained_small(kind, stepped)
    milepost.load({"model": other, "optim": target}, place)
    assert same(by_name(other, target), by_name(model, optimizer))
    dtypes = [
        {k: getattr(v, "dtype", None) for k, v in one.state[p].items()}
        for one, p in ((optimizer, model[0].weight), (target, other[0].weight))
    ]
    assert dtypes[0] == dtypes[1]


def test_state_follows_a_parameter_of_another_type():
    model = net()
    optimizer = torch.optim.AdamW(model.parameters())
    train(model, optimizer)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    other = net().bfloat16()
    target = torch.optim.AdamW(other.parameters())
    milepost.load({"model": other, "optim": target}, place, convert_dtype=True)
    assert target.state[other[0].weight]["exp_avg"].dtype is torch.bfloat16
