"""Targets that share memory: tied weights and views hold one value, or the load fails and names the keys."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost
from tests.ranks import spawn


def tied(device=None):
    model = nn.ModuleDict({"embed": nn.Embedding(5, 3, device=device), "head": nn.Linear(3, 5, False, device=device)})
    model["head"].weight = model["embed"].weight
    return model


@pytest.mark.parametrize("device", ["cpu", "meta"])
@pytest.mark.parametrize("differ", [False, True])
def test_two_saved_values_for_one_tied_weight_are_refused(tmp_path, device, differ):
    weight = torch.randn(5, 3)
    other = weight.clone()
    other[4, 2] += differ
    milepost.save({"m": {"embed.weight": weight, "head.weight": other}}, tmp_path)
    model = tied(device)
    if differ:
        with pytest.raises(milepost.InvalidState, match=r"'m\.head\.weight' and 'm\.embed\.weight'\nUntie"):
            milepost.load({"m": model}, tmp_path)
        untied = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, False)})
        milepost.load({"m": untied}, tmp_path)
        assert torch.equal(untied["head"].weight, other)
    else:
        milepost.load({"m": model}, tmp_path)
        assert model["head"].weight is model["embed"].weight
        assert torch.equal(model["head"].weight, weight)


@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_hugging_face_folder_without_the_tied_key_loads(tmp_path, device):
    weight = torch.randn(5, 3)
    save_file({"embed.weight": weight}, tmp_path / "model.safetensors")
    model = tied(device)
    assert milepost.explain(model, tmp_path).fits()
    milepost.load(model, tmp_path)
    assert model["head"].weight is model["embed"].weight
    assert torch.equal(model["head"].weight, weight)
    untied = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, False)})
    with pytest.raises(milepost.StateMismatch, match=r"'head\.weight'"):
        milepost.load(untied, tmp_path)


@pytest.mark.parametrize("kind", ["views", "arrays"])
@pytest.mark.parametrize("at", [0, 999])
def test_views_of_one_tensor_get_values_that_fit_or_an_error(tmp_path, kind, at):
    flat = torch.arange(1000.0)
    milepost.save({"flat": flat, "end": flat[900:], "start": flat[:900:2]}, tmp_path / "same")
    changed = flat.clone()
    changed[at] = -1
    milepost.save({"flat": changed, "end": flat[900:], "start": flat[:900:2]}, tmp_path / "other")
    target = torch.zeros(1000)
    state = {"flat": target, "end": target[900:], "start": target[:900:2]}
    if kind == "arrays":
        state = {"flat": target, "end": torch.from_numpy(target.numpy()[900:]), "start": target[:900:2]}
        assert np.shares_memory(target.numpy(), state["end"].numpy())
    milepost.load(state, tmp_path / "same")
    assert torch.equal(target, flat)
    with pytest.raises(milepost.InvalidState, match="saved with different values, and share memory"):
        milepost.load(state, tmp_path / "other")


def test_conjugate_view_is_not_its_tensor(tmp_path):
    numbers = torch.tensor([1 + 2j, 3 - 1j])
    milepost.save({"a": numbers}, tmp_path / "one")
    milepost.save({"a": numbers, "b": numbers.conj()}, tmp_path / "both")
    target = torch.zeros(2, dtype=torch.complex64)
    with pytest.raises(milepost.StateMismatch, match="'b'"):
        milepost.load({"a": target, "b": target.conj()}, tmp_path / "one")
    milepost.load({"a": target, "b": target.conj()}, tmp_path / "both")
    assert torch.equal(target, numbers)


def load_tied(rank, path):
    same, other = torch.ones(2**21), torch.ones(2**21)
    other[-1] = 2
    milepost.save({"a": same, "b": other}, path + "/other")
    milepost.save({"a": same, "b": same}, path + "/same")
    target = torch.zeros(2**21)
    milepost.load({"a": target, "b": target}, path + "/same", share_reads=True)
    assert torch.equal(target, same)
    try:
        milepost.load({"a": target, "b": target}, path + "/other", share_reads=True)
    except milepost.CheckpointError as error:
        return rank, "'b' and 'a'" in str(error)
    return rank, False


@pytest.mark.slow
def test_ranks_that_share_reads_compare_tied_targets(tmp_path):
    assert spawn(2, load_tied, str(tmp_path)) == [(0, True), (1, True)]


def test_tied_weights_are_stored_once(tmp_path):
    model = tied()
    receipt = milepost.save({"m": model, "again": model["embed"].weight, "view": model["embed"].weight.t()}, tmp_path)
    assert receipt.data_bytes == 2 * 5 * 3 * 4, "the view has another shape"
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.verify().ok
        original = checkpoint.manifest
        for key in ("m.embed.weight", "m.head.weight", "again"):
            assert torch.equal(checkpoint[key].read(), model["embed"].weight)
    untied = nn.ModuleDict({"embed": nn.Embedding(5, 3), "head": nn.Linear(3, 5, False)})
    state = {"m": untied, "again": torch.zeros(5, 3), "view": torch.zeros(3, 5)}
    milepost.load(state, tmp_path)
    assert torch.equal(untied["head"].weight, model["head"].weight)
    assert torch.equal(state["again"].t(), state["view"])
    for to in ("milepost", "torch", "dcp", "safetensors"):
        milepost.convert(tmp_path, tmp_path.with_name(to), to=to)
        if to == "milepost":
            copy = milepost.open(tmp_path.with_name(to)).manifest
            assert [file.size_bytes for file in copy.files] == [file.size_bytes for file in original.files]
        assert torch.equal(milepost.open(tmp_path.with_name(to))["m.head.weight"].read(), model["head"].weight)


def save_tied(rank, path):
    """Weights that are tied on every rank, on one rank only, and cut over the ranks."""
    mesh = init_device_mesh("cpu", (2,))
    cut = DTensor.from_local(torch.arange(8.0).view(4, 2) + 8 * rank, mesh, [Shard(0)])
    plain, other = torch.ones(3), torch.ones(3)
    state = {"a": cut, "b": cut, "c": plain, "d": plain if rank == 0 else other}
    if rank == 0:
        state["e"] = plain
    receipt = milepost.save(state, path, plans=PLANS)
    if rank == 0:
        plain += 1
    else:
        plain += 1
        other += 1
    again = milepost.save({k: v * 1 for k, v in state.items()}, path + "/untied", plans=PLANS)
    read = milepost.open(path)
    same = torch.equal(read["b"].read(), torch.arange(16.0).view(8, 2))
    return receipt.data_bytes, again.data_bytes, same, [read[k].read().tolist() for k in "cde"]


PLANS = milepost.Plans()


@pytest.mark.slow
def test_weights_tied_on_some_ranks_are_stored_whole(tmp_path):
    cut, plain = 16 * 4, 3 * 4
    expected = (cut + 3 * plain, 2 * cut + 3 * plain, True, [[1.0] * 3] * 3)
    assert spawn(2, save_tied, str(tmp_path)) == [expected] * 2
