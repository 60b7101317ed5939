"""What a caller has set in torch (default device and dtype, inference mode, ...) does not get into what is saved."""

import contextlib

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

import milepost


@contextlib.contextmanager
def default_device(device):
    torch.set_default_device(device)
    try:
        yield
    finally:
        torch.set_default_device(None)


@contextlib.contextmanager
def default_dtype(dtype):
    torch.set_default_dtype(dtype)
    try:
        yield
    finally:
        torch.set_default_dtype(torch.float32)


@contextlib.contextmanager
def deterministic():
    torch.use_deterministic_algorithms(True)
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)


MODES = {
    "default device": lambda: default_device("meta"),
    "device": lambda: torch.device("meta"),
    "default dtype": lambda: default_dtype(torch.float64),
    "inference": torch.inference_mode,
    "no grad": torch.no_grad,
    "autocast": lambda: torch.autocast("cpu", dtype=torch.bfloat16),
    "deterministic": deterministic,
}


def job(device="cpu"):
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(200, 100, device=device), nn.BatchNorm1d(100, device=device))
    return {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters()),
        "array": torch.arange(5).numpy(),
        "conjugate": torch.ones(4, 4, dtype=torch.complex64).conj(),
        "strided": torch.randn(300, 200).t(),
        "half": torch.randn(5, dtype=torch.bfloat16),
        "bytes": b"x" * 100_000,
        "own": milepost.PerRank({"rng": torch.arange(3)}),
    }


def train(state):
    state["optimizer"].zero_grad()
    state["model"](torch.ones(3, 200)).sum().backward()
    state["optimizer"].step()


def leaves(state):
    """All tensors of a job."""
    optimizer = state["optimizer"].state_dict()["state"]
    return [
        *state["model"].state_dict().values(),
        *(tensor for number in sorted(optimizer) for tensor in optimizer[number].values()),
        *(state[key] for key in ("conjugate", "strided", "half")),
        torch.from_numpy(state["array"]),
        state["own"].value["rng"],
    ]


def check_same(old, new):
    assert old["bytes"] == new["bytes"]
    for a, b in zip(leaves(old), leaves(new), strict=True):
        assert (b.device.type, a.dtype, b.is_inference()) == ("cpu", b.dtype, False)
        assert torch.equal(a, b)


@pytest.fixture(params=MODES)
def mode(request):
    return MODES[request.param]


@pytest.fixture
def old():
    state = job()
    train(state)
    return state


def test_saves_hold_the_same_in_every_mode(tmp_path, mode, old):
    with mode():
        milepost.save(old, tmp_path / "now")
        milepost.async_save(old, tmp_path / "later").result()
    for place in ("now", "later"):
        new = job()
        milepost.load(new, tmp_path / place)
        check_same(old, new)


@pytest.mark.slow
@pytest.mark.parametrize("name", ["default device", "inference"])
def test_saves_of_a_process_hold_the_same_in_a_mode(tmp_path, name, old):
    with MODES[name](), milepost.AsyncSaver(background="process") as saver:
        saver.save(old, tmp_path).result()
    new = job()
    milepost.load(new, tmp_path)
    check_same(old, new)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_loads_fill_the_same_in_every_mode(tmp_path, mode, old, device):
    milepost.save(old, tmp_path)
    new = job(device)
    with mode():
        milepost.load(new, tmp_path)
    check_same(old, new)
    train(old)
    train(new)
    check_same(old, new)


def test_reads_and_conversions_give_the_same_in_every_mode(tmp_path, mode, old):
    milepost.save(old, tmp_path / "own")
    double = job()["model"].double()
    with mode():
        read = milepost.open(tmp_path / "own").state()
        milepost.convert(tmp_path / "own", tmp_path / "dcp", to="dcp", rename={"own": None})
        milepost.convert(tmp_path / "dcp", tmp_path / "file.pt", to="torch")
        milepost.load({"model": double}, tmp_path / "own", convert_dtype=True, allow_unexpected=True)
    assert torch.equal(double[0].weight.float(), old["model"][0].weight)
    assert torch.equal(read["strided"], old["strided"])
    assert (read["strided"].device.type, read["strided"].is_inference()) == ("cpu", False)
    converted = torch.load(tmp_path / "file.pt", weights_only=True)
    assert torch.equal(converted["strided"], old["strided"])
    assert torch.equal(converted["half"], old["half"])


@pytest.mark.parametrize("place", ["inside", "outside"])
def test_tensors_of_inference_mode_are_saved_and_filled(tmp_path, place):
    with torch.inference_mode():
        old = {"flat": torch.randn(20_000), "strided": torch.randn(300, 400).t(), "other": torch.randn(9).double()}
        new = {"flat": torch.zeros(20_000), "strided": torch.zeros(300, 400).t(), "other": torch.zeros(9)}
    with torch.inference_mode(place == "inside"):
        milepost.save(old, tmp_path)
        milepost.load(new, tmp_path, convert_dtype=True)
    for key, tensor in old.items():
        assert torch.equal(new[key], tensor.to(new[key].dtype)), key


def test_fake_mode_is_refused_and_leaves_nothing(tmp_path, old):
    milepost.save(old, tmp_path / "a")
    new = job()
    with FakeTensorMode():
        for call in (
            lambda: milepost.save(old, tmp_path / "b"),
            lambda: milepost.async_save(old, tmp_path / "b").result(),
            lambda: milepost.load(new, tmp_path / "a"),
            lambda: milepost.open(tmp_path / "a").state(),
            lambda: milepost.open(tmp_path / "a")["half"].read(),
            lambda: milepost.convert(tmp_path / "a", tmp_path / "b"),
        ):
            with pytest.raises(milepost.InvalidRequest, match="a FakeTensorMode is active"):
                call()
    assert not (tmp_path / "b").exists()
    milepost.load(new, tmp_path / "a")
    check_same(old, new)


def test_tensors_inside_of_vmap_are_refused_by_name(tmp_path):
    milepost.save({"whole": torch.ones(3)}, tmp_path / "a")

    def inside(x):
        with pytest.raises(milepost.InvalidState, match=r"'x' is a tensor inside of torch\.func"):
            milepost.save({"x": x}, tmp_path / "b")
        target = torch.zeros(3)
        milepost.load({"whole": target}, tmp_path / "a")
        assert target.tolist() == [1.0] * 3
        return x

    torch.vmap(inside)(torch.ones(2, 3))
