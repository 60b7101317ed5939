"""A small model and its optimizers, for the tests of optimizers by name."""

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions

FORMS = {"nested": StateDictOptions(), "flat": StateDictOptions(flatten_optimizer_state_dict=True)}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Linear(3, 2))


def train(model, *optimizers, steps=2):
    generator = torch.Generator().manual_seed(1)
    for _ in range(steps):
        model(torch.randn(5, 4, generator=generator)).square().sum().backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def same(a, b):
    if isinstance(a, dict):
        return a.keys() == b.keys() and all(same(a[key], b[key]) for key in a)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return torch.equal(a, b) if isinstance(a, torch.Tensor) else a == b


def by_name(model, *optimizers):
    """(state, options) of each parameter, by its name in the model."""
    names = {p: name for name, p in model.named_parameters()}
    found = {}
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            options = {key: value for key, value in group.items() if key != "params"}
            found.update({names[p]: (dict(optimizer.state.get(p, {})), options) for p in group["params"]})
    return found
