"""One process: what you saved is what you get, for every kind of state, value and tensor."""

import enum
import os
import subprocess
import sys
from collections import OrderedDict, defaultdict, namedtuple
from dataclasses import dataclass

import numpy as np
import pytest
import torch
from torch import nn

import milepost
from milepost.core.dtypes import DTYPES

Pair = namedtuple("Pair", ["left", "right"])  # noqa: PYI024


class Color(enum.Enum):
    RED = 1
    BLUE = "b"


@dataclass
class Config:
    width: int
    color: Color


def same(a, b):
    """Equal values of equal types, recursively; order of keys counts."""
    if type(a) is not type(b) and not (hasattr(a, "_fields") and hasattr(b, "_fields")):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and a.shape == b.shape and torch.equal(raw(a), raw(b))
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, dict):
        return (
            list(a) == list(b)
            and all(type(x) is type(y) for x, y in zip(a, b, strict=True))
            and all(same(a[k], b[k]) for k in a)
        )
    if isinstance(a, (list, tuple)):
        return len(a) == len(b) and all(same(x, y) for x, y in zip(a, b, strict=True))
    return a == b or (a != a and b != b)


def raw(tensor):
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


NESTED = {
    "list": [torch.ones(2), [torch.zeros(1), "text"], 3],
    "tuple": (torch.arange(3), (torch.arange(2), None)),
    "named": Pair(torch.full((2,), 7), {"deep": torch.ones(())}),
    "ordered": OrderedDict([("z", torch.ones(1)), ("a", 2)]),
    "default": defaultdict(list, {"k": [1, 2]}),
    "keys": {0: torch.zeros(1), "0": torch.ones(1), (1, "x"): 5, None: 6, 2.5: 7, True: torch.ones(2), b"b": 8},
    "dots": {"a.b/c": torch.ones(1), "a": {"b/c": torch.zeros(1)}},
    "empty": {"dict": {}, "list": [], "tuple": (), "ordered": OrderedDict()},
    "values": [1, True, 2.0, "s", None, b"\x00\xff", 1 + 2j, float("inf"), -0.0, 2**200, {1, 2}, frozenset({3})],
    "numpy": {"array": np.arange(6, dtype=np.uint16).reshape(2, 3), "scalar": np.float32(1.5), "flag": np.bool_(True)},
    "torch": [torch.float8_e4m3fn, torch.Size([1, 2]), torch.device("cuda:1")],
    "long": {"bytes": os.urandom(200_000), "bytearray": bytearray(os.urandom(70_000))},
    "groups": [{"lr": 0.1, "params": [0, 1]}],
}


def test_every_container_key_and_value_comes_back_with_its_type_and_order(tmp_path):
    milepost.save(NESTED, tmp_path)
    with milepost.open(tmp_path) as checkpoint:
        state = checkpoint.state()
        for key in NESTED:
            assert same(NESTED[key], state[key]), key
        assert type(state["named"]).__name__ == "Pair"
        assert state["named"]._fields == ("left", "right")
        assert checkpoint.verify().ok


def zeroed(value):
    """A target of the same structure, with other contents."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value) - 1
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if isinstance(value, defaultdict):
        return defaultdict(value.default_factory, {k: zeroed(v) for k, v in value.items()})
    if isinstance(value, dict):
        return type(value)((k, zeroed(v)) for k, v in value.items())
    if isinstance(value, tuple):
        items = [zeroed(v) for v in value]
        return type(value)(*items) if hasattr(value, "_fields") else tuple(items)
    if isinstance(value, list):
        return [zeroed(v) for v in value]
    return "other"


def test_loading_fills_an_existing_state_in_place(tmp_path):
    milepost.save(NESTED, tmp_path)
    target = zeroed(NESTED)
    target["torch"] = target["values"] = "other"
    inner, tensor = target["list"], target["list"][0]
    assert milepost.load(target, tmp_path) is target
    for key in NESTED:
        assert same(NESTED[key], target[key]), key
    assert target["list"] is inner
    assert target["list"][0] is tensor


def random_tensor(name, shape):
    size = int(np.prod(shape)) * DTYPES[name].size_bytes
    data = torch.randint(0, 2 if name == "bool" else 256, (size,), dtype=torch.uint8)
    return data.view(getattr(torch, name)).reshape(shape)


@pytest.mark.parametrize("name", sorted(DTYPES))
def test_every_dtype_keeps_its_bits(tmp_path, name):
    if not hasattr(torch, name):
        pytest.skip(f"this torch has no {name}")
    state = {"a": random_tensor(name, (4, 6)), "scalar": random_tensor(name, ()), "none": random_tensor(name, (0, 3))}
    milepost.save(state, tmp_path)
    target = {k: random_tensor(name, v.shape) for k, v in state.items()}
    milepost.load(target, tmp_path)
    for key in state:
        assert same(state[key], target[key])
    assert same(milepost.open(tmp_path)["a"].read(), state["a"])


def test_views_conjugates_and_parameters_are_saved_by_value(tmp_path):
    base = torch.arange(24.0).view(4, 6)
    z = torch.randn(3, dtype=torch.complex64)
    state = {
        "row": base[1],
        "column": base[:, 2],
        "steps": base[::2, 1::2],
        "transposed": base.t(),
        "expanded": torch.ones(1).expand(4),
        "conjugate": z.conj(),
        "negative": torch._neg_view(base),
        "parameter": nn.Parameter(base.clone()),
    }
    milepost.save(state, tmp_path)
    loaded = milepost.open(tmp_path).state()
    for key, tensor in state.items():
        assert torch.equal(tensor, loaded[key]), key
    assert (tmp_path / "data").exists()
    size = sum(f.stat().st_size for f in tmp_path.rglob("*.safetensors"))
    assert size < 4096 * 2 + 1000, "a view does not drag its storage along"
    wide = torch.zeros(8, 12)
    target = {**{k: torch.zeros_like(v) for k, v in state.items() if k != "expanded"}, "transposed": wide[:6, :4]}
    milepost.load(target, tmp_path, allow_unexpected=True)
    assert torch.equal(wide[:6, :4], base.t())
    assert wide[6:].abs().sum() == 0


def test_tied_weights_stay_equal(tmp_path):
    model = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    model["b"].weight = model["a"].weight
    milepost.save({"m": model}, tmp_path)
    other = nn.ModuleDict({"a": nn.Linear(3, 3), "b": nn.Linear(3, 3)})
    other["b"].weight = other["a"].weight
    milepost.load({"m": other}, tmp_path)
    assert torch.equal(other["a"].weight, model["b"].weight)
    assert other["a"].weight is other["b"].weight


class Counter:
    """A stateful object whose state has other keys from time to time."""

    def __init__(self, seen):
        self.seen = dict(seen)

    def state_dict(self):
        return {"seen": self.seen, "rows": [torch.tensor(v) for v in self.seen.values()]}

    def load_state_dict(self, state):
        self.seen = state["seen"]
        self.rows = state["rows"]


def test_stateful_objects_are_passed_as_they_are(tmp_path):
    def job():
        model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4))
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        return {
            "model": model,
            "optimizer": optimizer,
            "scheduler": torch.optim.lr_scheduler.StepLR(optimizer, 2),
            "counter": Counter({}),
        }

    old = job()
    old["model"](torch.randn(5, 4)).sum().backward()
    old["optimizer"].step()
    old["scheduler"].step()
    old["counter"].seen = {1: 5, "b": 6}
    milepost.save(old, tmp_path)
    new = job()
    milepost.load(new, tmp_path)
    assert same(old["model"].state_dict(), new["model"].state_dict())
    assert same(old["optimizer"].state_dict(), new["optimizer"].state_dict())
    assert old["scheduler"].state_dict() == new["scheduler"].state_dict()
    assert new["counter"].seen == {1: 5, "b": 6}
    assert [r.item() for r in new["counter"].rows] == [5, 6]
    fresh = job()
    milepost.save(fresh, tmp_path / "fresh")
    milepost.load(new, tmp_path / "fresh")
    assert new["optimizer"].state_dict()["state"] == {}, "a checkpoint from before the first step resets the optimizer"


def test_optimizer_state_of_another_shape_is_reported(tmp_path):
    def job(width):
        model = nn.Linear(width, 2)
        optimizer = torch.optim.Adam(model.parameters())
        model(torch.ones(1, width)).sum().backward()
        optimizer.step()
        return optimizer

    milepost.save({"optim": job(3)}, tmp_path)
    with pytest.raises(milepost.StateMismatch, match=r"'optim\.state\.0\.exp_avg': saved as \(2, 3\) .* is \(2, 4\)"):
        milepost.load({"optim": job(4)}, tmp_path)


def test_a_module_on_the_meta_device_gets_memory_where_asked(tmp_path):
    model = nn.Linear(3, 2)
    milepost.save({"m": model, "t": torch.ones(2)}, tmp_path)
    with torch.device("meta"):
        blank = nn.Linear(3, 2)
    state = milepost.load({"m": blank, "t": torch.empty(2, device="meta")}, tmp_path)
    assert torch.equal(blank.weight, model.weight)
    assert isinstance(blank.weight, nn.Parameter)
    assert state["t"].tolist() == [1.0, 1.0]


def test_a_state_may_be_a_module_or_a_list(tmp_path):
    model = nn.Linear(2, 2)
    milepost.save(model, tmp_path / "a")
    other = nn.Linear(2, 2)
    milepost.load(other, tmp_path / "a")
    assert torch.equal(other.weight, model.weight)
    milepost.save([torch.ones(1), 2], tmp_path / "b")
    assert milepost.load([torch.zeros(1), 0], tmp_path / "b") == [torch.ones(1), 2]


def test_enums_and_dataclasses_come_back_where_their_types_are_passed(tmp_path):
    state = {"config": Config(3, Color.BLUE), "color": Color.RED}
    with pytest.raises(milepost.InvalidState, match=r"(?s)'config'.*types=\[Config\].*'color'.*types=\[Color\]"):
        milepost.save(state, tmp_path)
    milepost.save(state, tmp_path, types=[Config, Color])
    assert milepost.load({"config": 0, "color": 0}, tmp_path, types=[Config, Color]) == state
    with pytest.raises(milepost.UnsupportedFormat, match=r"types=\[Config\]"):
        milepost.load({"config": 0, "color": 0}, tmp_path)


class Odd:
    def __eq__(self, other):
        return isinstance(other, Odd)

    __hash__ = None


def test_pickle_needs_a_yes_on_both_sides(tmp_path):
    with pytest.raises(milepost.InvalidState, match=r"'odd' is a .*Odd.*allow_pickle=True"):
        milepost.save({"odd": Odd()}, tmp_path)
    assert not (tmp_path / "data").exists()
    milepost.save({"odd": Odd(), "t": torch.ones(1)}, tmp_path, allow_pickle=True)
    with pytest.raises(milepost.UnsupportedFormat, match="'odd' was saved with pickle"):
        milepost.load({"odd": 0, "t": torch.zeros(1)}, tmp_path)
    assert milepost.open(tmp_path)["t"].read().item() == 1
    with pytest.raises(milepost.UnsupportedFormat):
        milepost.open(tmp_path)["odd"]
    assert milepost.load({"odd": 0, "t": torch.zeros(1)}, tmp_path, allow_pickle=True)["odd"] == Odd()


def freed(tensor):
    """What FSDP leaves of a parameter that it has not gathered: a shape without memory."""
    tensor.untyped_storage().resize_(0)
    return tensor


@pytest.mark.parametrize(
    ("value", "says"),
    [
        (np.array(["text"]), "numpy array of <U4"),
        (np.array([1], dtype=">i4"), "numpy array of >i4"),
        (np.ma.masked_array([1.0, 2.0], mask=[False, True]), "masked array"),
        (torch.empty(3, device="meta"), "no data to save"),
        (freed(torch.ones(1000)), "its memory was freed"),
        (nn.LazyLinear(2).weight, "no shape yet"),
        (torch.ones([1] * 65), "65 dimensions"),
        ({torch.ones(1)}, "Tensors stand in dicts"),
        (lambda: 0, "function"),
        (type("Sub", (dict,), {})(), "would not come back the same"),
    ],
)
def test_what_cannot_be_saved_is_refused_with_its_key(tmp_path, value, says):
    with pytest.raises(milepost.InvalidState, match=r"(?s)'bad\.thing'.*" + says):
        milepost.save({"bad": {"thing": value}, "good": torch.ones(1)}, tmp_path)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("target", "says"),
    [
        (torch.zeros(1, 4).expand(3, 4), "share memory"),
        (torch.zeros(10).as_strided((3, 4), (2, 1)), "share memory"),
        (np.lib.stride_tricks.as_strided(np.zeros(6, np.float32), (3, 4), (4, 4)), "share memory"),
        (freed(torch.zeros(3, 4)), "memory was freed"),
    ],
)
def test_a_target_that_cannot_hold_what_was_saved_is_refused_with_its_key(tmp_path, target, says):
    milepost.save({"t": torch.arange(12.0).view(3, 4)}, tmp_path)
    other = torch.zeros(1)
    with pytest.raises(milepost.StateMismatch, match=rf"(?s)'t': .*{says}.*'other'|'other'.*'t': .*{says}"):
        milepost.load({"t": target, "other": other}, tmp_path)


@pytest.mark.parametrize("cut", [np.s_[::-1], np.s_[:, ::-1], np.s_[::-2, 1:]])
def test_an_array_that_runs_backwards_is_filled_where_it_is(tmp_path, cut):
    base = np.zeros((6, 4), np.float32)
    saved = np.arange(base[cut].size, dtype=np.float32).reshape(base[cut].shape)
    milepost.save({"a": saved}, tmp_path)
    state = {"a": base[cut]}
    view = state["a"]
    milepost.load(state, tmp_path)
    assert state["a"] is view
    assert (base[cut] == saved).all()


def test_a_state_that_contains_itself_is_refused(tmp_path):
    loop: dict = {}
    loop["again"] = loop
    with pytest.raises(milepost.InvalidState, match="does the state contain itself"):
        milepost.save(loop, tmp_path)
    with pytest.raises(milepost.InvalidState, match="put this Tensor in a dict"):
        milepost.save(torch.ones(1), tmp_path)


def test_metadata_travels_along(tmp_path):
    milepost.save({"t": torch.ones(1)}, tmp_path, metadata={"loss": 2.5, "tags": ("a", 1)})
    assert milepost.open(tmp_path).metadata == {"loss": 2.5, "tags": ("a", 1)}


@pytest.mark.slow
def test_looking_into_a_checkpoint_does_not_import_torch(tmp_path):
    milepost.save({"m": nn.Linear(2, 2), "step": 3}, tmp_path)
    code = (
        "import sys, milepost\n"
        f"c = milepost.open({str(tmp_path)!r})\n"
        "assert list(c) == ['m.weight', 'm.bias', 'step'] and c['step'] == 3\n"
        "assert c.tensors['m.weight'].shape == (2, 2) and c['m.bias'].dtype_name == 'float32'\n"
        "assert c.verify().ok\n"
        "assert 'torch' not in sys.modules\n"
        "assert c['m.weight'][0].shape == (2,) and 'torch' in sys.modules\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=100)


def test_lazy_tensors_take_the_indices_that_torch_takes(tmp_path):
    tensor = torch.arange(4 * 5 * 6).view(4, 5, 6)
    milepost.save({"t": tensor, "zero": torch.tensor(7)}, tmp_path)
    lazy = milepost.open(tmp_path)["t"]
    for index in [0, -1, slice(1, 3), (slice(None), 2), (..., 3), (1, ..., slice(0, 6, 2)), (slice(3, 1),), ...]:
        assert torch.equal(lazy[index], tensor[index]), index
    assert milepost.open(tmp_path)["zero"][...].item() == 7
    for index, error in [
        (4, IndexError),
        ((0, 0, 0, 0), IndexError),
        ([1, 2], TypeError),
        (slice(None, None, -1), ValueError),
    ]:
        with pytest.raises(error):
            lazy[index]


def test_no_warning_and_no_process_group_in_one_process(tmp_path, recwarn):
    milepost.save({"t": torch.ones(1)}, tmp_path)
    milepost.load({"t": torch.zeros(1)}, tmp_path)
    assert len(recwarn) == 0


def test_root_list_that_contains_itself_is_refused():
    state = [torch.ones(1)]
    state.append(state)
    with pytest.raises(milepost.InvalidState, match="contain itself"):
        milepost.save(state, milepost.store.MemoryStore())
