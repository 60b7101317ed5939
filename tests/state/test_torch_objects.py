"""Every optimizer and every scheduler of torch comes back: type by type, in every way that saves and loads."""

import copy
import inspect
import warnings
from collections import Counter, OrderedDict, defaultdict

import pytest
import torch
from torch import nn
from torch.optim import lr_scheduler as schedulers
from torch.optim import swa_utils

import milepost
import milepost.dcp
from milepost.core.tree import FACTORIES


def classes_in(module, base):
    """The concrete classes of a module, by name."""
    found = {n: c for n, c in vars(module).items() if inspect.isclass(c) and issubclass(c, base) and c is not base}
    return {name: kind for name, kind in found.items() if not name.startswith("_")}


class Decay:
    """A factor with a state of its own, which a LambdaLR saves."""

    def __init__(self, rate):
        self.rate = rate
        self.seen = Counter()

    def __call__(self, step):
        self.seen[step] += 1
        return self.rate**step


OPTIMIZERS = classes_in(torch.optim, torch.optim.Optimizer)
MAKERS = {
    "LambdaLR": lambda o: schedulers.LambdaLR(o, Decay(0.9)),
    "MultiplicativeLR": lambda o: schedulers.MultiplicativeLR(o, Decay(0.5)),
    "StepLR": lambda o: schedulers.StepLR(o, 2),
    "MultiStepLR": lambda o: schedulers.MultiStepLR(o, [2, 4, 4, 9]),
    "ConstantLR": schedulers.ConstantLR,
    "LinearLR": schedulers.LinearLR,
    "ExponentialLR": lambda o: schedulers.ExponentialLR(o, 0.7),
    "SequentialLR": lambda o: schedulers.SequentialLR(
        o, [schedulers.ConstantLR(o), schedulers.MultiStepLR(o, [1, 3])], [2]
    ),
    "PolynomialLR": schedulers.PolynomialLR,
    "CosineAnnealingLR": lambda o: schedulers.CosineAnnealingLR(o, 5),
    "ChainedScheduler": lambda o: schedulers.ChainedScheduler(
        [schedulers.MultiStepLR(o, [1, 3]), schedulers.ExponentialLR(o, 0.9)], o
    ),
    "ReduceLROnPlateau": lambda o: schedulers.ReduceLROnPlateau(o, patience=1),
    "CyclicLR": lambda o: schedulers.CyclicLR(o, 0.01, 0.1, step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: schedulers.CosineAnnealingWarmRestarts(o, 3),
    "OneCycleLR": lambda o: schedulers.OneCycleLR(o, 0.2, total_steps=20),
    "SWALR": lambda o: swa_utils.SWALR(o, 0.05),
}


def new_optimizer(name):
    torch.manual_seed(0)
    if name == "SparseAdam":
        return OPTIMIZERS[name](nn.Embedding(5, 2, sparse=True).parameters())
    return OPTIMIZERS[name](nn.Linear(3, 2, bias=name != "Muon").parameters(), lr=0.1)


def train(optimizer, steps, seed):
    """Steps with gradients that follow from the seed, sparse ones where the optimizer wants them."""
    generator = torch.Generator().manual_seed(seed)
    for _ in range(steps):
        for group in optimizer.param_groups:
            for p in group["params"]:
                grad = torch.randn(p.shape, generator=generator)
                if isinstance(optimizer, torch.optim.SparseAdam):
                    rows = torch.tensor([[1, 3]])
                    grad = torch.sparse_coo_tensor(rows, grad[rows[0]], p.shape, check_invariants=True)
                p.grad = grad
        optimizer.step(lambda: torch.tensor(1.0))


def advance(scheduler, steps):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # schedulers step here without their optimizers
        for step in range(steps):
            scheduler.step(*([1.0 + step] if isinstance(scheduler, schedulers.ReduceLROnPlateau) else []))


def same(a, b):
    """Equal values of equal types, recursively, in the same order."""
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        inner = list(a) == list(b) and all(same(a[k], b[k]) for k in a)
        return inner and getattr(a, "default_factory", 0) is getattr(b, "default_factory", 0)
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(map(same, a, b))
    return a == b


def save(state, place, way):
    if way == "async":
        milepost.async_save(state, place).result()
    elif way == "dcp":
        milepost.dcp.save(state, checkpoint_id=place)
    else:
        milepost.save(state, place)


def load(state, place, way):
    if way == "dcp":
        milepost.dcp.load(state, checkpoint_id=place)
    else:
        milepost.load(state, place)


def test_no_class_of_torch_is_left_out():
    assert set(MAKERS) == {*classes_in(schedulers, schedulers.LRScheduler), "SWALR"}
    assert len(OPTIMIZERS) > 10


@pytest.mark.parametrize("way", ["save", "async", "dcp"])
def test_every_scheduler_goes_on_where_it_was(tmp_path, way):
    def fresh():
        return {name: make(new_optimizer("SGD")) for name, make in MAKERS.items()}

    old, new = fresh(), fresh()
    for scheduler in old.values():
        advance(scheduler, 3)
    save(old, tmp_path, way)
    saved = milepost.open(tmp_path).state()
    load(new, tmp_path, way)
    for name, scheduler in old.items():
        assert way == "dcp" or same(scheduler.state_dict(), saved[name]), name  # DCP makes text of all keys
        assert same(scheduler.state_dict(), new[name].state_dict()), name
    for name, scheduler in old.items():
        for group, other in zip(scheduler.optimizer.param_groups, new[name].optimizer.param_groups, strict=True):
            other.update({key: value for key, value in group.items() if key != "params"})
        advance(scheduler, 4)
        advance(new[name], 4)
        assert scheduler.get_last_lr() == new[name].get_last_lr(), name


@pytest.mark.parametrize("way", ["save", "async", "dcp"])
def test_every_optimizer_goes_on_where_it_was(tmp_path, way):
    old = {name: new_optimizer(name) for name in OPTIMIZERS}
    for optimizer in old.values():
        train(optimizer, 3, seed=1)
    save(old, tmp_path, way)
    new = {name: new_optimizer(name) for name in OPTIMIZERS}
    saved = milepost.open(tmp_path).state()
    for name, optimizer in old.items():
        assert way == "dcp" or same(optimizer.state_dict(), saved[name]), name
        for p, q in zip(parameters(optimizer), parameters(new[name]), strict=True):
            q.data.copy_(p.data)
    if way == "dcp":  # as users of DCP do: a state must exist to be loaded into
        for optimizer in new.values():
            kept = [p.detach().clone() for p in parameters(optimizer)]
            train(optimizer, 3, seed=2)
            for p, q in zip(parameters(optimizer), kept, strict=True):
                p.data.copy_(q)
    load(new, tmp_path, way)
    for name, optimizer in old.items():
        assert same(optimizer.state_dict(), new[name].state_dict()), name
        train(optimizer, 2, seed=3)
        train(new[name], 2, seed=3)
        assert all(map(torch.equal, parameters(optimizer), parameters(new[name]))), name


def parameters(optimizer):
    return [p for group in optimizer.param_groups for p in group["params"]]


DICTS = [
    OrderedDict([("z", 1), ("a", (2, 3))]),
    Counter({"b": 2, 5: -1, (1, 2): 0}),
    defaultdict(None, {"x": 1}),
    *(defaultdict(factory, {"k": [1], 2: None}) for factory in FACTORIES.values()),
    OrderedDict(inner=defaultdict(list, {"c": Counter(a=1)})),
]


WRAPS = [lambda d: d, lambda d: [d, 1], lambda d: ({"deep": [(d,)]},), lambda d: [d, torch.ones(1)]]


@pytest.mark.parametrize("wrap", WRAPS)
def test_dicts_of_every_type_come_back_at_any_depth(tmp_path, wrap):
    state = {"dicts": {str(i): wrap(d) for i, d in enumerate(DICTS)}, "own": milepost.PerRank([wrap(d) for d in DICTS])}
    milepost.save(state, tmp_path)
    saved = milepost.open(tmp_path).state()
    assert same(saved["dicts"], state["dicts"])
    assert same(saved["own"][0], state["own"].value)
    target = copy.deepcopy(state)
    target["own"].value = None
    milepost.load(target, tmp_path)
    assert same(target["dicts"], state["dicts"])
    assert same(target["own"].value, state["own"].value)


def test_what_a_counter_counted_may_differ(tmp_path):
    state = {"seen": Counter(a=3, b=1), "t": torch.ones(1)}
    milepost.save(state, tmp_path)
    target = {"seen": Counter(c=5), "t": torch.zeros(1)}
    assert milepost.load(target, tmp_path) == state
    assert milepost.dcp.load(fresh := {"seen": Counter(), "t": torch.zeros(1)}, checkpoint_id=tmp_path) is None
    assert fresh == state


class Table(OrderedDict):
    """A subclass, which would come back as another type."""


@pytest.mark.parametrize("wrap", [lambda d: d, lambda d: [1, d], lambda d: [torch.ones(1), d]])
def test_dicts_that_would_not_come_back_are_refused(tmp_path, wrap):
    with pytest.raises(milepost.InvalidState, match=r"(?s)'bad.*factory"):
        milepost.save({"bad": wrap(defaultdict(lambda: 7, a=1))}, tmp_path)
    with pytest.raises(milepost.InvalidState, match=r"(?s)'bad.*Table"):
        milepost.save({"bad": wrap(Table(a=1))}, tmp_path)
    assert list(tmp_path.iterdir()) == []


def test_a_counter_survives_a_file_of_torch(tmp_path):
    optimizer = new_optimizer("SGD")
    scheduler = schedulers.MultiStepLR(optimizer, [2, 4])
    state = {"scheduler": scheduler, "dicts": [Counter(a=1), defaultdict(tuple, x=())], "t": torch.ones(1)}
    milepost.save(state, tmp_path / "a")
    milepost.convert(tmp_path / "a", tmp_path / "b.pt", "torch")
    assert same(torch.load(tmp_path / "b.pt")["scheduler"], scheduler.state_dict())
    milepost.convert(tmp_path / "b.pt", tmp_path / "c")
    other = schedulers.MultiStepLR(new_optimizer("SGD"), [1])
    milepost.load({"scheduler": other, "dicts": [], "t": torch.zeros(1)}, tmp_path / "c")
    assert other.milestones == Counter({2: 1, 4: 1})
    torch.save(state["scheduler"].state_dict(), tmp_path / "file.pt")
    assert same(milepost.open(tmp_path / "file.pt").state()["milestones"], Counter({2: 1, 4: 1}))
