"""Targets on the meta device: they get memory, and stay the objects that ties, optimizers and hooks know."""

import warnings
import weakref

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import milepost
from tests.ranks import spawn


class Tied(nn.Module):
    """An embedding whose weight is also that of the last layer."""

    def __init__(self, tie=True):
        super().__init__()
        self.embed = nn.Embedding(6, 4)
        self.norm = nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        if tie:
            self.head.weight = self.embed.weight

    def forward(self, tokens):
        return self.head(self.norm(self.embed(tokens)))


def trained(model, optimizer, steps=2):
    for _ in range(steps):
        optimizer.zero_grad()
        model(torch.tensor([0, 1, 2, 5])).square().sum().backward()
        optimizer.step()
    return model


def job(device="cpu"):
    torch.manual_seed(3)
    with torch.device(device):
        model = Tied()
    return {"model": model, "optimizer": torch.optim.AdamW(model.parameters(), lr=0.1)}


@pytest.fixture
def saved(tmp_path):
    state = job()
    trained(**state)
    milepost.save(state, tmp_path)
    return state, tmp_path


@pytest.mark.parametrize("order", ["model first", "optimizer first"])
def test_meta_model_and_its_optimizer_train_on(saved, order):
    old, path = saved
    new = job("meta")
    parameters = list(new["model"].parameters())
    milepost.load(new if order == "model first" else dict(reversed(new.items())), path)
    assert all(a is b for a, b in zip(new["model"].parameters(), parameters, strict=True))
    assert new["model"].head.weight is new["model"].embed.weight
    states = [t for s in new["optimizer"].state.values() for t in s.values()]
    assert {t.device.type for t in states} == {"cpu"}
    assert len(states) == 9
    trained(**old)
    trained(**new)
    for key, tensor in old["model"].state_dict().items():
        assert torch.equal(tensor, new["model"].state_dict()[key]), key


def test_part_on_meta_leaves_the_rest_the_same_objects(saved):
    old, path = saved
    new = Tied()
    new.norm = nn.BatchNorm1d(4, device="meta")
    weight, running = new.embed.weight, new.norm.running_mean
    address = weight.data_ptr()
    optimizer = torch.optim.SGD(new.parameters(), lr=0.1)
    milepost.load({"model": new}, path, allow_unexpected=True)
    assert new.embed.weight is weight
    assert weight.data_ptr() == address
    assert new.norm.running_mean is running
    assert torch.equal(running, old["model"].norm.running_mean)
    before = new.norm.weight.detach().clone()
    trained(new, optimizer, 1)
    assert not torch.equal(new.norm.weight, before), "the optimizer made before the load trains what was loaded"


class Marked(nn.Parameter):
    """A parameter with a class of its own."""


def test_meta_parameter_keeps_hooks_class_and_attributes(tmp_path):
    milepost.save({"m": nn.Linear(2, 2)}, tmp_path)
    model = nn.Linear(2, 2, device="meta")
    model.weight = Marked(model.weight)
    model.weight.group = "slow"
    model.bias.requires_grad_(False)
    calls = []
    model.weight.register_post_accumulate_grad_hook(lambda _: calls.append("after"))
    handle = model.weight.register_hook(lambda _: calls.append("before"))
    milepost.load({"m": model}, tmp_path)
    assert type(model.weight) is Marked
    assert model.weight.group == "slow"
    assert (model.weight.requires_grad, model.bias.requires_grad) == (True, False)
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["before", "after"]
    handle.remove()
    model(torch.ones(1, 2)).sum().backward()
    assert calls == ["before", "after", "after"]


def test_parameters_of_a_plain_dict_stay_those_of_the_module(saved):
    old, path = saved
    with torch.device("meta"):
        new = Tied()
    state = dict(new.named_parameters(remove_duplicate=False))
    milepost.load({"model": state}, path, allow_unexpected=True)
    assert state["embed.weight"] is new.embed.weight is new.head.weight is state["head.weight"]
    assert torch.equal(new.embed.weight, old["model"].embed.weight)


def test_parameter_that_cannot_keep_its_identity_is_replaced_loudly(saved):
    old, path = saved
    new = job("meta")
    watcher = weakref.ref(new["model"].embed.weight)
    with pytest.warns(RuntimeWarning, match="replaced by new ones, because something holds weak ref.*'weight'"):
        milepost.load(new, path)
    assert new["model"].head.weight is new["model"].embed.weight
    assert new["model"].embed.weight is not watcher()
    trained(**old)
    trained(**new)
    assert torch.equal(old["model"].head.weight, new["model"].head.weight)


def test_optimizer_whose_parameters_stay_on_meta_is_refused(saved):
    _, path = saved
    new = job("meta")
    with pytest.raises(milepost.StateMismatch, match=r"(?s)'optimizer': .*on the meta device.*load their module"):
        milepost.load({"optimizer": new["optimizer"]}, path, allow_unexpected=True)
    milepost.load(new, path)


class Rotary(nn.Module):
    """A module with a buffer that is not saved."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.inner.register_buffer("angles", torch.ones(2), persistent=False)


def test_buffers_left_on_meta_are_named(tmp_path):
    milepost.save({"m": Rotary()}, tmp_path)
    with torch.device("meta"):
        model = Rotary()
    with pytest.warns(RuntimeWarning, match=r"1 tensors .* on the meta device.*'m\.inner\.angles'\. A buffer") as told:
        milepost.load({"m": model}, tmp_path)
    assert told[0].filename == __file__
    model.inner.angles = torch.ones(2)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        milepost.load({"m": model}, tmp_path)


class Renaming(nn.Module):
    """A module whose state dict holds copies, under names of its own."""

    def __init__(self, device=None):
        super().__init__()
        self.inner = nn.Linear(2, 2, device=device)

    def state_dict(self, *_args, **_keywords):
        return {"w": self.inner.weight.detach() * 1, "b": self.inner.bias.detach() * 1}

    def load_state_dict(self, state_dict, strict=True, assign=False):
        return self.inner.load_state_dict({"weight": state_dict["w"], "bias": state_dict["b"]}, strict, assign)


def test_module_with_a_state_dict_of_its_own_loads_from_meta(tmp_path):
    old, new = Renaming(), Renaming("meta")
    milepost.save({"m": old}, tmp_path)
    milepost.load({"m": new}, tmp_path)
    assert torch.equal(old.inner.weight, new.inner.weight)


class Measured(nn.Module):
    """A module with a tensor of its own in its extra state."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Linear(2, 2)
        self.scale = torch.zeros(3)

    def get_extra_state(self):
        return {"scale": self.scale}

    def set_extra_state(self, state):
        self.scale = state["scale"]


@pytest.mark.parametrize("part", ["all", "extra state"])
def test_extra_state_on_meta_leaves_parameters_the_same_objects(tmp_path, part):
    old = Measured()
    old.scale = torch.arange(3.0)
    milepost.save({"m": old}, tmp_path)
    with torch.device("meta" if part == "all" else "cpu"):
        new = Measured()
    new.scale = torch.zeros(3, device="meta")
    parameters = list(new.parameters())
    milepost.load({"m": new}, tmp_path)
    assert all(a is b for a, b in zip(new.parameters(), parameters, strict=True)), "an optimizer would train nothing"
    assert torch.equal(new.inner.weight, old.inner.weight)
    assert new.scale.tolist() == [0, 1, 2]


class Turned(nn.Module):
    """A buffer is a view of a parameter."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.arange(6.0).view(2, 3))
        self.register_buffer("turned", self.weight.detach().t())


def test_views_of_one_memory_on_meta_stay_such_views(tmp_path):
    milepost.save({"m": Turned()}, tmp_path / "same")
    other = Turned()
    other.turned = other.turned.clone() + 1
    milepost.save({"m": other}, tmp_path / "different")
    with torch.device("meta"):
        new, late = Turned(), Turned()
    weight = new.weight
    milepost.load({"m": new}, tmp_path / "same")
    assert new.weight is weight
    assert new.weight.tolist() == [[0, 1, 2], [3, 4, 5]]
    new.weight.detach()[0, 1] = 9
    assert new.turned[1, 0] == 9
    with pytest.raises(milepost.InvalidState, match="share memory in the state"):
        milepost.load({"m": late}, tmp_path / "different")


def test_order_of_elements_on_meta_is_kept(tmp_path):
    old = nn.Conv2d(3, 4, 3).to(memory_format=torch.channels_last)
    milepost.save({"m": old}, tmp_path)
    new = nn.Conv2d(3, 4, 3, device="meta").to(memory_format=torch.channels_last)
    milepost.load({"m": new}, tmp_path)
    assert new.weight.is_contiguous(memory_format=torch.channels_last)
    assert torch.equal(old.weight, new.weight)


@pytest.fixture
def marked_memory():
    """New memory holds no zeros by chance."""
    torch.use_deterministic_algorithms(mode=True)
    yield
    torch.use_deterministic_algorithms(mode=False)


class Grown(nn.Module):
    """Version 2 has a buffer that its code takes from itself where the saved state has none."""

    _version = 2

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("extent", torch.full((2,), 7.0))

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        state_dict.setdefault(prefix + "extent", self.extent)
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


@pytest.mark.usefixtures("marked_memory")
def test_old_module_on_meta_gets_no_value_from_nowhere(tmp_path):
    old = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "grown": Grown()}).state_dict()
    del old["norm.num_batches_tracked"], old["grown.extent"]
    old._metadata["norm"] = old._metadata["grown"] = {"version": 1}
    milepost.save({"m": old}, tmp_path)
    with torch.device("meta"):
        new = nn.ModuleDict({"norm": nn.BatchNorm1d(3), "grown": Grown()})
    count = new["norm"].num_batches_tracked
    with pytest.warns(RuntimeWarning, match="1 tensors of loaded modules are still on the meta device.*grown.extent"):
        milepost.load({"m": new}, tmp_path)
    assert new["norm"].num_batches_tracked == 0
    assert new["norm"].num_batches_tracked is count
    assert new["grown"].weight.tolist() == [1, 1]


def shard_on_meta(rank, path):
    torch.manual_seed(3)
    whole = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    whole[2].weight = whole[0].weight
    optimizer = torch.optim.AdamW(whole.parameters(), lr=0.1)
    whole(torch.ones(2, 5)).sum().backward()
    optimizer.step()
    milepost.save({"m": whole, "o": optimizer}, path)
    with torch.device("meta"):
        blank = nn.Sequential(nn.Linear(5, 5), nn.ReLU(), nn.Linear(5, 5))
    blank[2].weight = blank[0].weight
    fully_shard(blank, mesh=init_device_mesh("cpu", (2,)))
    parameters = list(blank.parameters())
    late = torch.optim.AdamW(parameters, lr=0.1)
    milepost.load({"o": late, "m": blank}, path)
    kept = all(a is b for a, b in zip(blank.parameters(), parameters, strict=True))
    devices = {t.device.type for state in late.state.values() for t in state.values()}
    for model, trainer in ((whole, optimizer), (blank, late)):
        trainer.zero_grad()
        model(torch.ones(2, 5)).sum().backward()
        trainer.step()
    same = [torch.allclose(a, b.full_tensor()) for a, b in zip(whole.parameters(), blank.parameters(), strict=True)]
    del rank
    return kept, devices, same, blank[2].weight is blank[0].weight


@pytest.mark.slow
def test_fsdp_model_on_meta_trains_on_with_its_optimizer(tmp_path):
    assert spawn(2, shard_on_meta, str(tmp_path)) == [(True, {"cpu"}, [True] * 3, True)] * 2
