"""Stateful objects that are no modules: they get what was saved, and are not disturbed before."""

import pytest
import torch
from torch import nn
from torchdata.nodes import Batcher, IterableWrapper, Loader
from torchdata.stateful_dataloader import StatefulDataLoader

import milepost


class Numbers(torch.utils.data.Dataset):
    """Ten numbers."""

    def __len__(self):
        return 10

    def __getitem__(self, i):
        return i


class Watched(StatefulDataLoader):
    """A loader that counts how often it was asked for its state, which starts its workers."""

    asked = 0

    def state_dict(self):
        self.asked += 1
        return super().state_dict()


def loader(workers):
    torch.manual_seed(1)
    return Watched(Numbers(), batch_size=2, shuffle=True, num_workers=workers)


@pytest.mark.filterwarnings("ignore::UserWarning")  # torchdata calls what newer versions of torch will drop
@pytest.mark.parametrize("workers", [0, 2])
def test_torchdata_loader_goes_on_and_starts_no_workers(tmp_path, workers):
    old = loader(workers)
    batches = iter(old)
    seen = [next(batches), next(batches)]
    milepost.save({"loader": old, "step": 2}, tmp_path)
    rest = [batch.tolist() for batch in batches]
    assert len(seen) + len(rest) == 5
    new = loader(workers)
    torch.manual_seed(99)
    milepost.load({"loader": new, "step": 0}, tmp_path)
    assert new.asked == 0
    assert [batch.tolist() for batch in new] == rest


def test_torchdata_node_loader_goes_on(tmp_path):
    def made():
        return Loader(Batcher(IterableWrapper(range(10)), 2, drop_last=False))

    old = made()
    batches = iter(old)
    assert [next(batches), next(batches)] == [[0, 1], [2, 3]]
    milepost.save({"loader": old}, tmp_path)
    new = made()
    milepost.load({"loader": new}, tmp_path)
    assert list(new) == [[4, 5], [6, 7], [8, 9]]


class Once:
    """A data source that must not be asked for its state before it gets one."""

    def __init__(self, content):
        self.content, self.asked = content, 0

    def __iter__(self):
        return iter(())

    def state_dict(self):
        self.asked += 1
        return self.content

    def load_state_dict(self, state):
        self.content = state


class Schedule:
    """A stateful object without tensors."""

    def __init__(self, content):
        self.content, self.asked = content, 0

    state_dict, load_state_dict = Once.state_dict, Once.load_state_dict


@pytest.mark.parametrize("kind", [Once, Schedule])
def test_object_gets_what_was_saved_and_is_not_asked_before(tmp_path, kind):
    content = {"position": 5, "seen": [1, 2], "names": {3: "x", (1, 2): None}}
    if kind is Once:
        content |= {"shuffle": torch.arange(4), "kept": {"rng": torch.get_rng_state()}}
    milepost.save({"data": kind(content)}, tmp_path)
    new = kind({"other": "shape", "seen": {}})
    milepost.load({"data": new}, tmp_path)
    assert new.asked == 0
    assert new.content.keys() == content.keys()
    assert [new.content[k] for k in ("position", "seen", "names")] == [5, [1, 2], {3: "x", (1, 2): None}]
    if kind is Once:
        assert torch.equal(new.content["shuffle"], torch.arange(4))
        assert torch.equal(new.content["kept"]["rng"], content["kept"]["rng"])


def test_object_that_was_not_saved_is_named_and_left_alone(tmp_path):
    milepost.save({"step": 1}, tmp_path)
    data = Once({"position": 5})
    with pytest.raises(milepost.StateMismatch, match=r"1 key missing .*\n    'data': on rank 0"):
        milepost.load({"data": data, "step": 0}, tmp_path)
    milepost.load({"data": data, "step": 0}, tmp_path, allow_missing=True)
    assert (data.content, data.asked) == ({"position": 5}, 0)


class AppState:
    """An object that keeps a module's tensors in its state, as in DCP's examples."""

    def __init__(self):
        self.model = nn.Linear(3, 2)

    def state_dict(self):
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state):
        self.given = state
        self.model.load_state_dict(state["model"])


def test_object_with_tensors_is_filled_where_they_are(tmp_path):
    old, new = AppState(), AppState()
    milepost.save({"app": old}, tmp_path)
    milepost.load({"app": new}, tmp_path)
    assert torch.equal(new.model.weight, old.model.weight)
    assert new.given["model"]["weight"].data_ptr() == new.model.weight.data_ptr()


class Refusing(AppState):
    """An object that does not take its state back."""

    def load_state_dict(self, state):
        raise ValueError("not this one")


def test_error_half_way_says_that_the_state_is_partly_filled(tmp_path):
    state = {"w": torch.ones(3), "app": Refusing()}
    milepost.save(state, tmp_path)
    with pytest.raises(ValueError, match="not this one") as refused:
        milepost.load(state, tmp_path)
    [file] = tmp_path.rglob("*.safetensors")
    data = bytearray(file.read_bytes())
    data[-1] ^= 1
    file.write_bytes(data)
    with pytest.raises(milepost.CheckpointDamaged) as damaged:
        milepost.load(state, tmp_path)
    for error in (refused, damaged):
        assert "the state may be partly filled" in error.value.__notes__[-1]
    with pytest.raises(milepost.StateMismatch) as untouched:
        milepost.load({"other": 1}, tmp_path)
    assert not hasattr(untouched.value, "__notes__")
