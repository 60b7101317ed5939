"""Optimizers are keyed by the names of their parameters: any order and grouping gives each its state back."""

import copy
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_optimizer_state_dict

import milepost
from milepost.store import MemoryStore
from tests.state.trained import FORMS, by_name, net, same, train
from tests.strategies import examples


def trained(kind=torch.optim.AdamW, **options):
    model = net()
    optimizer = kind(model.parameters(), **{"lr": 0.1, **options})
    train(model, optimizer)
    return model, optimizer


def keys_of(place):
    return [key for key in milepost.open(place) if key.startswith("optim.state")]


def test_keys_are_the_names_of_the_parameters():
    model, optimizer = trained(torch.optim.SGD, momentum=0.9)
    place = MemoryStore()
    milepost.save({"optim": optimizer, "model": model}, place)
    names = [f"model.{name}" for name, _ in model.named_parameters()]
    assert keys_of(place) == [f"optim.state.{name}.momentum_buffer" for name in names]
    saved = milepost.open(place).state()["optim"]
    assert list(saved["param_groups"]) == names[:1]
    assert saved["param_groups"][names[0]]["lr"] == 0.1
    assert saved["param_groups"][names[0]]["params"] == dict.fromkeys(names)


WRAPPERS = {
    "data parallel": nn.DataParallel,
    "compiled": torch.compile,
    "activation checkpoints": lambda m: nn.Sequential(*(checkpoint_wrapper(child) for child in m)),
    "several": lambda m: torch.compile(nn.DataParallel(checkpoint_wrapper(m))),
}


@pytest.mark.parametrize("wrap", WRAPPERS)
def test_wrappers_are_not_in_the_names(wrap):
    model, optimizer = trained()
    plain, place = MemoryStore(), MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, plain)
    milepost.save({"model": WRAPPERS[wrap](model), "optim": optimizer}, place)
    assert list(milepost.open(place)) == list(milepost.open(plain))
    other = net()
    target = torch.optim.AdamW(other.parameters())
    milepost.load({"model": WRAPPERS[wrap](other), "optim": target}, plain)
    # DataParallel moves a model to the GPU, where there is one.
    loaded = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, target.state_dict())
    kept = torch.utils._pytree.tree_map_only(torch.Tensor, torch.Tensor.cpu, optimizer.state_dict())
    assert same(loaded, kept)


@st.composite
def groupings(draw, names):
    """These names in any order, in some groups of some optimizers; no group holds both weights and biases."""
    optimizers = []
    for name in draw(st.permutations(names)):
        groups = draw(st.sampled_from([*optimizers, None]))
        if groups is None:
            groups = []
            optimizers.append(groups)
        alike = [group for group in groups if group[0].endswith("bias") == name.endswith("bias")]
        group = draw(st.sampled_from([*alike, None]))
        if group is None:
            groups.append([name])
        else:
            group.append(name)
    return optimizers


NAMES = [name for name, _ in net().named_parameters()]


def make(model, grouping, **options):
    named = dict(model.named_parameters())
    return [
        torch.optim.AdamW([{"params": [named[name] for name in group]} for group in groups], **options)
        for groups in grouping
    ]


@examples(40)
@given(st.data())
def test_any_grouping_gives_each_parameter_its_state(data):
    """Permuted, frozen, unfrozen, split, joined, regrouped: what both sides hold comes back exactly."""
    before = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    after = data.draw(st.lists(st.sampled_from(NAMES), min_size=1, unique=True))
    stateless = data.draw(st.sets(st.sampled_from(NAMES)))
    model = net()
    optimizers = make(model, data.draw(groupings(before)), lr=0.1)
    train(model, *optimizers)
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group["weight_decay"] = 0.0 if group["params"][0].dim() == 1 else 0.3
            for p in group["params"]:
                if by_identity(model, p) in stateless:
                    del optimizer.state[p]
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizers}, place)
    other = net()
    targets = make(other, data.draw(groupings(after)), lr=0.7, weight_decay=0.7)
    if data.draw(st.booleans()):
        train(other, *targets)
    fresh = by_name(other, *targets)
    state = {"model": other, "first": targets[0], "rest": dict(enumerate(targets[1:]))}
    report = milepost.explain(state, place)
    assert set(report.missing) == {key for key in report.missing if key.endswith(tuple(set(after) - set(before)))}
    assert report.fits() == (set(before) == set(after))
    milepost.load(state, place, allow_missing=True, allow_unexpected=True)
    saved, loaded = by_name(model, *optimizers), by_name(other, *targets)
    for name in after:
        if name in saved:
            assert same(loaded[name], saved[name]), name
        else:
            assert same(loaded[name][0], fresh[name][0]), name


def by_identity(model, parameter):
    return next(name for name, p in model.named_parameters() if p is parameter)


def test_tied_parameter_has_one_state():
    def tied():
        model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
        model[1].weight = model[0].weight
        return model

    model = tied()
    optimizer = torch.optim.Adam(model.parameters())
    train(model, optimizer)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    assert {key.rpartition(".")[0] for key in keys_of(place)} == {"optim.state.model.0.weight"}
    wanted = optimizer.state_dict()["state"][0]
    again = tied()
    target = torch.optim.Adam(again.parameters())
    milepost.load({"model": again, "optim": target}, place)
    assert same(target.state_dict()["state"], {0: wanted})
    untied = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    target = torch.optim.Adam(untied.parameters())
    milepost.load({"model": untied, "optim": target}, place)
    assert same(target.state_dict()["state"], {0: wanted, 1: wanted})
    # And back: two states that are equal fit one parameter, and two that differ are an error.
    milepost.save({"model": untied, "optim": target}, place)
    target = torch.optim.Adam(again.parameters())
    milepost.load({"model": again, "optim": target}, place)
    assert same(target.state_dict()["state"], {0: wanted})
    train(untied, target_of := torch.optim.Adam(untied.parameters()))
    with torch.no_grad():
        untied[1].weight.copy_(untied[0].weight)
    milepost.save({"model": untied, "optim": target_of}, place)
    with pytest.raises(milepost.CheckpointError, match=r"optim\.state\.model\.[01]\.weight"):
        milepost.load({"model": again, "optim": target}, place)


def test_name_in_two_optimizers_is_found_by_the_key():
    model, first = trained(lr=0.1)
    second = torch.optim.AdamW(model.parameters(), lr=0.2)
    train(model, second)
    place = MemoryStore()
    milepost.save({"model": model, "a": first, "b": second}, place)
    other = net()
    targets = {"b": torch.optim.AdamW(other.parameters()), "a": torch.optim.AdamW(other.parameters())}
    milepost.load({"model": other, **targets}, place)
    assert same(targets["a"].state_dict(), first.state_dict())
    assert same(targets["b"].state_dict(), second.state_dict())
    report = milepost.explain({"model": other, "c": targets["a"]}, place)
    assert "'optim" not in str(report)
    assert "several saved optimizers hold it ('a', 'b')" in str(report)


def test_parameters_without_a_module_keep_their_numbers():
    def build():
        model, alone = net(), nn.Parameter(torch.ones(3))
        return model, alone, torch.optim.SGD([alone, *model.parameters()], lr=0.1, momentum=0.9)

    model, alone, optimizer = build()
    alone.grad = torch.tensor([1.0, 2.0, 3.0])
    train(model, optimizer)
    place = MemoryStore()
    with pytest.warns(RuntimeWarning, match="'optim': no module in this state owns the parameters 0 of the optimizer"):
        milepost.save({"model": model, "optim": optimizer}, place)
    assert "optim.state.0.momentum_buffer" in keys_of(place)
    assert "optim.state.model.0.weight.momentum_buffer" in keys_of(place)
    model, _, target = build()
    milepost.load({"model": model, "optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())


def test_optimizer_alone_is_saved_by_number_and_loads_beside_a_module():
    model, optimizer = trained()
    place = MemoryStore()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        milepost.save({"optim": optimizer}, place)
    assert keys_of(place)[0] == "optim.state.0.step"
    other = net()
    target = torch.optim.AdamW(other.parameters())
    milepost.load({"optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())
    target = torch.optim.AdamW(other.parameters())
    milepost.load({"model": other, "optim": target}, place, allow_missing=True)
    assert same(target.state_dict(), optimizer.state_dict())
    milepost.save({"model": model, "optim": optimizer}, place)
    with pytest.raises(milepost.StateMismatch, match="put the modules that own its parameters into the state"):
        milepost.load({"optim": target}, place, allow_unexpected=True)


def test_groups_that_differ_do_not_become_one_in_silence():
    model = net()
    named = dict(model.named_parameters())
    groups = [{"params": [named["0.weight"]], "weight_decay": 0.5}, {"params": [named["2.weight"]]}]
    place = MemoryStore()
    milepost.save({"model": model, "optim": torch.optim.AdamW(groups, lr=0.1, weight_decay=0.0)}, place)
    target = torch.optim.AdamW([named["2.weight"], named["0.weight"]], lr=0.9, weight_decay=0.25)
    with pytest.raises(milepost.StateMismatch) as error:
        milepost.load({"model": model, "optim": target}, place)
    assert "'optim.param_groups.model.2.weight.weight_decay'" in str(error.value)
    assert "0.5 in the group of 'model.0.weight'" in str(error.value)
    assert target.param_groups[0]["lr"] == 0.9
    milepost.load({"model": model, "optim": target}, place, allow_missing=True)
    assert (target.param_groups[0]["lr"], target.param_groups[0]["weight_decay"]) == (0.1, 0.25)


def test_state_of_another_kind_of_optimizer_is_refused():
    model, optimizer = trained()
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    target = torch.optim.SGD(model.parameters(), momentum=0.9)
    with pytest.raises(milepost.StateMismatch, match="an optimizer of another kind: it has the options amsgrad, betas"):
        milepost.load({"model": model, "optim": target}, place)


def test_two_kinds_of_optimizer_share_a_model_and_a_schedule():
    def build():
        model = nn.Sequential(nn.Linear(4, 3), nn.LayerNorm(3), nn.Linear(3, 2))
        muon = torch.optim.Muon([p for p in model.parameters() if p.dim() == 2], lr=0.1)
        adam = torch.optim.AdamW([p for p in model.parameters() if p.dim() == 1], lr=0.2, amsgrad=True)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.5) for one in (muon, adam)]
        return {"model": model, "optim": {"muon": muon, "adam": adam}, "schedules": schedules}

    state, other, place = build(), build(), MemoryStore()
    train(state["model"], *state["optim"].values())
    for schedule in state["schedules"]:
        schedule.step()
    milepost.save(state, place)
    milepost.load(other, place)
    for each in (state, other):
        train(each["model"], *each["optim"].values())
        for schedule in each["schedules"]:
            schedule.step()
    assert same(other["model"].state_dict(), state["model"].state_dict())
    assert other["schedules"][0].get_last_lr() == state["schedules"][0].get_last_lr()
    assert "optim.adam.state.model.1.weight.max_exp_avg_sq" in milepost.open(place)


@pytest.mark.parametrize("options", [{"foreach": True}, {"fused": True}, {"capturable": False, "foreach": False}])
def test_variants_load_into_each_other(options):
    model, optimizer = trained(**options)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    other = net()
    target = torch.optim.AdamW(other.parameters(), lr=torch.tensor(0.5))
    milepost.load({"model": other, "optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())
    train(model, optimizer)
    train(other, target)
    assert same(other.state_dict(), model.state_dict())


def test_lbfgs_needs_the_same_order():
    def closure(model, optimizer):
        optimizer.zero_grad()
        loss = model(torch.ones(2, 4)).square().sum()
        loss.backward()
        return loss

    model = net()
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.1, max_iter=3)
    optimizer.step(lambda: closure(model, optimizer))
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    other = net()
    target = torch.optim.LBFGS(other.parameters())
    milepost.load({"model": other, "optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())
    with pytest.raises(milepost.StateMismatch, match="LBFGS keeps one vector for all its parameters"):
        milepost.load({"model": other, "optim": torch.optim.LBFGS(reversed(list(other.parameters())))}, place)


class Counting(torch.optim.SGD):
    """Keeps numbers and nested tensors for each parameter, and something for none."""

    def step(self, closure=None):
        super().step(closure)
        self.state["all"] = {"steps": self.state.get("all", {}).get("steps", 0) + 1}
        for group in self.param_groups:
            for p in group["params"]:
                kept = self.state[p]
                kept["step"] = kept.get("step", 0) + 1
                kept["deep"] = {"list": [p.detach() * 2, 3], "pair": (1, p.detach() + 1)}


def test_state_of_any_shape_comes_back():
    model, optimizer = trained(Counting, momentum=0.9)
    optimizer.add_param_group({"params": [], "lr": 0.3})
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    other = net()
    target = Counting([{"params": list(other.parameters())}, {"params": []}], lr=0.9, momentum=0.1)
    milepost.load({"model": other, "optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())


class Own(torch.optim.SGD):
    """Has a form of its own."""

    def state_dict(self):
        return {"mine": super().state_dict()}

    def load_state_dict(self, state_dict):
        super().load_state_dict(state_dict["mine"])


def test_optimizer_with_its_own_state_dict_is_left_alone():
    model, optimizer = trained(Own, momentum=0.9)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    assert "optim.mine.state.0.momentum_buffer" in milepost.open(place)
    other = net()
    target = Own(other.parameters(), lr=0.5, momentum=0.5)
    milepost.load({"model": other, "optim": target}, place)
    assert same(target.state_dict(), optimizer.state_dict())


def test_named_parameters_of_torch_keep_their_names():
    model = net()
    optimizer = torch.optim.AdamW(model.named_parameters())
    train(model, optimizer)
    place = MemoryStore()
    milepost.save({"model": model, "optim": optimizer}, place)
    target = torch.optim.AdamW(reversed(list(model.named_parameters())))
    milepost.load({"model": model, "optim": target}, place)
    assert target.param_groups[0]["param_names"] == NAMES[::-1]
    assert same(by_name(model, target)["0.weight"][0], by_name(model, optimizer)["0.weight"][0])


@pytest.mark.parametrize("way", ["async", "checkpointer"])
def test_every_way_to_save_uses_names(tmp_path, way):
    model, optimizer = trained()
    state = {"model": model, "optim": optimizer}
    other = net()
    target = torch.optim.AdamW(reversed(list(other.parameters())))
    if way == "checkpointer":
        with milepost.Checkpointer(tmp_path) as keeper:
            keeper.async_save(state, 1)
            keeper.wait()
            assert keeper.restore({"model": other, "optim": target}) == 1
    else:
        milepost.async_save(state, tmp_path).result()
        milepost.load({"model": other, "optim": target}, tmp_path)
    assert same(by_name(other, target)["2.bias"][0], by_name(model, optimizer)["2.bias"][0])


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
@pytest.mark.parametrize("way", ["milepost", "dcp", "torch"])
@pytest.mark.parametrize("form", FORMS)
def test_torchs_state_dicts_by_name_load_into_an_optimizer(tmp_path, form, way):
    model, optimizer = trained()
    names = get_model_state_dict(model), get_optimizer_state_dict(model, optimizer, options=FORMS[form])
    state = dict(zip(("model", "optim"), names, strict=True))
    if way == "milepost":
        milepost.save(state, tmp_path)
    elif way == "dcp":
        dcp.save(state, checkpoint_id=tmp_path)
    else:
        torch.save(state, tmp_path / "a.pt")
    other = net()
    targets = make(other, [[["2.weight", "2.bias"]], [["0.bias"], ["0.weight"]]], lr=0.9)
    averaged = copy.deepcopy(other)
    place = tmp_path / "a.pt" if way == "torch" else tmp_path
    milepost.load({"model": other, "a": targets[0], "b": targets[1], "ema": averaged}, place, allow_missing=True)
    assert same(by_name(other, *targets), by_name(model, optimizer))


def test_conversion_keeps_the_names(tmp_path):
    model, optimizer = trained()
    milepost.save({"model": model, "optim": optimizer}, tmp_path / "a")
    milepost.convert(tmp_path / "a", tmp_path / "b", to="dcp")
    milepost.convert(tmp_path / "a", tmp_path / "c.pt", to="torch")
    assert torch.load(tmp_path / "c.pt")["optim"]["state"]["model.0.weight"]["step"] == 2
    for place in (tmp_path / "b", tmp_path / "c.pt"):
        other = net()
        target = torch.optim.AdamW(reversed(list(other.parameters())))
        milepost.load({"model": other, "optim": target}, place)
        assert same(by_name(other, target), by_name(model, optimizer))
