"""What `get_extra_state` gave is handed back as it was saved, whatever the target holds now."""

import io

import numpy as np
import pytest
import torch
from torch import nn

import milepost


class Extra(nn.Module):
    """A module with extra state of any kind."""

    def __init__(self, extra):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.extra = extra

    def get_extra_state(self):
        return self.extra

    def set_extra_state(self, state):
        self.extra = state


def same(a, b):
    if type(a) is not type(b):
        return False
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, np.ndarray):
        return a.dtype == b.dtype and np.array_equal(a, b)
    if isinstance(a, io.BytesIO):
        return a.getvalue() == b.getvalue()
    if isinstance(a, dict):
        return list(a) == list(b) and all(same(a[k], b[k]) for k in a)
    return len(a) == len(b) and all(map(same, a, b)) if isinstance(a, (list, tuple)) else a == b


STATES = {
    "none": None,
    "a number": 5,
    "a dict": {"scale": torch.ones(3), "step": 4, 7: "seven"},
    "a longer dict": {"scale": torch.full((5,), 2.0), "history": [torch.arange(3), 1], "step": 5, "more": {"a": 1}},
    "another dtype": {"scale": torch.ones(3, dtype=torch.bfloat16), "step": 4},
    "empty": {},
    "a tensor": torch.arange(4),
    "another tensor": torch.arange(6.0).view(2, 3),
    "an array": np.arange(3),
    "a file": io.BytesIO(b"fp8"),
    "long bytes": bytes(100_000),
    "a list": [1, (2, torch.ones(1))],
}


@pytest.mark.parametrize("saved", STATES)
def test_extra_state_comes_back_as_saved_whatever_was_there(saved):
    def nested(extra):
        return nn.ModuleDict({"a": Extra(extra), "b": nn.Sequential(Extra(5))})

    store = milepost.store.MemoryStore()
    milepost.save({"m": nested(STATES[saved]), "alone": Extra(STATES[saved])}, store)
    for kind, there in STATES.items():
        target = {"m": nested(there), "alone": nn.DataParallel(Extra(there))}
        before = there.clone() if isinstance(there, torch.Tensor) else there
        milepost.load(target, store)
        assert same(target["m"]["a"].extra, STATES[saved]), kind
        assert same(target["alone"].module.extra, STATES[saved]), kind
        assert not isinstance(there, torch.Tensor) or kind == saved or torch.equal(there, before)


def test_extra_state_that_is_missing_or_unexpected_is_an_error():
    store = milepost.store.MemoryStore()
    milepost.save({"m": Extra({"a": 1})}, store)
    with pytest.raises(milepost.StateMismatch, match=r"'m\._extra_state\.a'"):
        milepost.load({"m": nn.ParameterDict({"weight": torch.zeros(2)})}, store)
    milepost.save({"m": nn.ParameterDict({"weight": torch.zeros(2)})}, store)
    with pytest.raises(milepost.StateMismatch, match=r"'m\._extra_state\.a'"):
        milepost.load({"m": Extra({"a": 1})}, store)


def test_a_dict_of_the_caller_keeps_its_keys():
    store = milepost.store.MemoryStore()
    milepost.save({"d": {"a": 1, "b": 2}}, store)
    with pytest.raises(milepost.StateMismatch, match=r"'d\.b'"):
        milepost.load({"d": {"a": 0}}, store)
    with pytest.raises(milepost.StateMismatch, match=r"'d\.c'"):
        milepost.load({"d": {"a": 0, "b": 0, "c": 0}}, store)
    assert milepost.load({"d": {"a": 0, "c": 3}}, store, allow_missing=True, allow_unexpected=True)["d"] == {
        "a": 1,
        "c": 3,
    }
