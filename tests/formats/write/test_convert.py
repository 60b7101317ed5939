"""Conversions: from every format to every other, by one process or several ranks."""

import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import milepost
from tests import ranks
from tests.formats.write.conversions import (
    FORMATS,
    HELD,
    files_in,
    flat_state,
    random_bits,
    read_back,
    same,
    training_state,
)

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


MIB = 1 << 20


# ---------------------------------------------------------------- what comes out


@pytest.mark.parametrize("to", FORMATS)
def test_one_process_gives_every_tensor_to_each_format(tmp_path, to):
    state = flat_state()
    milepost.save(state, tmp_path / "source")
    done = milepost.convert(tmp_path / "source", tmp_path / "out", to)
    found = read_back(tmp_path / "out", to)
    same({key: found[key] for key in state}, state)
    assert len(found) == len(state) == done.tensors
    assert done.data_bytes == sum(t.numel() * t.element_size() for t in state.values())


def convert_on_ranks(rank, source, target, to):
    milepost.convert(source, target, to, max_shard_bytes=2 * MIB, transfer=milepost.Transfer(2, MIB))


@pytest.mark.slow
@pytest.mark.parametrize("to", FORMATS)
def test_two_ranks_write_one_target_together(tmp_path, to):
    state = flat_state()
    milepost.save(state, tmp_path / "source")
    ranks.spawn(2, convert_on_ranks, tmp_path / "source", tmp_path / "out", to)
    found = read_back(tmp_path / "out", to)
    same({key: found[key] for key in state}, state)
    left = [p.name for p in tmp_path.rglob("*") if p.name.endswith(".tmp")]
    assert not left
    if to == "milepost":
        assert milepost.open(tmp_path / "out").world == 2
    if to == "dcp":
        assert {p.name for p in (tmp_path / "out").iterdir()} == {".metadata", "__0_0.distcp", "__1_0.distcp"}


@pytest.mark.slow
@pytest.mark.parametrize("to", ["torch", "safetensors"])
def test_several_ranks_write_the_same_bytes_as_one(tmp_path, to):
    milepost.save(flat_state(), tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "one" / "x", to, max_shard_bytes=2 * MIB)
    ranks.spawn(2, convert_on_ranks, tmp_path / "source", tmp_path / "two" / "x", to)
    assert files_in(tmp_path / "one") == files_in(tmp_path / "two")


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_the_size_of_blocks_does_not_show_in_the_files(tmp_path, to):
    milepost.save(flat_state(), tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "one" / "x", to)
    small = milepost.Transfer(3, 64 * 1024)
    milepost.convert(tmp_path / "source", tmp_path / "two" / "x", to, transfer=small, host_memory_bytes=MIB)
    one, two = files_in(tmp_path / "one"), files_in(tmp_path / "two")
    assert set(one) == set(two)
    assert all(one[name] == two[name] for name in one if not name.endswith(".metadata"))


def test_milepost_to_milepost_keeps_containers_values_and_metadata(tmp_path):
    import numpy as np

    state = training_state() | {"array": np.arange(4.0), "long": b"xy" * 40_000}
    milepost.save(state, tmp_path / "source", metadata={"loss": 1.5})
    milepost.convert(tmp_path / "source", tmp_path / "out")
    one, two = milepost.open(tmp_path / "source"), milepost.open(tmp_path / "out")
    assert two.metadata == {"loss": 1.5}
    assert two.manifest.tree == one.manifest.tree
    left, right = one.state(), two.state()
    assert np.array_equal(left.pop("array"), right.pop("array"))
    same(right, left)


def test_a_checkpoint_in_memory_is_a_target_for_milepost_only(tmp_path):
    state = flat_state(3)
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", "memory://converted")
    same(milepost.open("memory://converted").state(), state)
    milepost.convert("memory://converted", tmp_path / "a.pt", "torch")
    same(torch.load(tmp_path / "a.pt", weights_only=True), state)
    with pytest.raises(milepost.InvalidRequest, match="written to a path"):
        milepost.convert(tmp_path / "source", "memory://other", "dcp")


def test_a_resharded_source_is_read_from_all_its_files(tmp_path):
    whole = torch.randn(64, 48)
    parts = {(0, 0): whole[:40, :20], (40, 0): whole[40:, :20], (0, 20): whole[:, 20:]}
    milepost.save({"w": milepost.Sharded((64, 48), parts)}, tmp_path / "source")
    for to in FORMATS:
        milepost.convert(tmp_path / "source", tmp_path / to, to)
        same(read_back(tmp_path / to, to), {"w": whole})


def test_compressed_tensors_are_converted(tmp_path):
    pytest.importorskip("zstandard")
    state = {"a": torch.arange(600_000.0).view(600, 1000), "b": torch.ones(3)}
    milepost.save(
        state,
        storage_writer=milepost.planning.CheckpointWriter(
            tmp_path / "source", transforms=[milepost.planning.ZStandard()]
        ),
    )
    for to in FORMATS:
        milepost.convert(tmp_path / "source", tmp_path / to, to, transfer=milepost.Transfer(2, 64 * 1024))
        found = read_back(tmp_path / to, to)
        same({key: found[key] for key in state}, state)


# ---------------------------------------------------------------- from other formats


UNREAD = ("float8_e4m3fnuz", "float8_e5m2fnuz")
"""Safetensors has these; our reader of safetensors has not."""


def rich_state():
    torch.manual_seed(3)
    matrix = torch.randn(300, 200)
    state = {f"d.{name}": random_bits(name, 7, 6) for name in HELD if name not in UNREAD}
    return state | {
        "turned": matrix.t(),
        "part": matrix[10:200, 5:60],
        "stepped": matrix[::3],
        "shared": matrix,
        "scalar": torch.tensor(7),
        "empty": torch.empty(3, 0),
        "large": torch.randn(1_200_003),
    }


@pytest.fixture(scope="module")
def by_others(tmp_path_factory):
    """One state in each format, written by the library that the format belongs to."""
    folder, state = tmp_path_factory.mktemp("others"), rich_state()
    (folder / "safetensors").mkdir()
    whole = {key: tensor.contiguous().clone() for key, tensor in state.items()}
    save_file(whole, folder / "safetensors" / "model.safetensors")
    torch.save(state, folder / "torch")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save(whole, checkpoint_id=folder / "dcp", no_dist=True)
    milepost.save(state, folder / "milepost")
    return folder


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("source", FORMATS)
def test_every_format_becomes_every_other(tmp_path, by_others, source, to):
    state = {key: tensor.contiguous() for key, tensor in rich_state().items()}
    small = milepost.Transfer(2, 64 * 1024)
    milepost.convert(by_others / source, tmp_path / "out", to, transfer=small, max_shard_bytes=MIB)
    if to == "dcp":  # torch cannot copy all of its own types
        found = {key: lazy.read() for key, lazy in milepost.open(tmp_path / "out").tensors.items()}
    else:
        found = read_back(tmp_path / "out", to)
    assert set(found) == set(state)
    same({key: found[key] for key in state}, state)


@pytest.mark.parametrize("to", FORMATS)
def test_a_training_state_of_torch_save_keeps_its_containers(tmp_path, to):
    state = training_state()
    del state["more"], state["nothing"]
    state["lr"] = [0.1, 0.2]
    torch.save(state, tmp_path / "a.pt")
    milepost.convert(tmp_path / "a.pt", tmp_path / "out", to, drop_values=True)
    found = milepost.open(tmp_path / "out")
    if to in ("milepost", "torch"):
        same(found.state(), state)
    same(found["model.0.weight"].read(), state["model"]["0.weight"])
    same(found["optim.state.1.exp_avg"].read(), state["optim"]["state"][1]["exp_avg"])


# ---------------------------------------------------------------- keys


@pytest.mark.parametrize("to", FORMATS)
def test_keys_can_be_renamed_and_left_out(tmp_path, to):
    milepost.save(training_state(), tmp_path / "source")
    rename = lambda key: key.removeprefix("model.") if key.startswith("model.") else None  # noqa: E731
    milepost.convert(tmp_path / "source", tmp_path / "out", to, rename=rename)
    found = read_back(tmp_path / "out", to)
    same({key: found[key] for key in sorted(found)}, dict(sorted(training_state()["model"].items())))


def test_leaving_out_alone_keeps_the_containers(tmp_path):
    milepost.save({"a": {"x": torch.ones(1), "y": torch.zeros(1)}, "n": 3}, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "a.pt", "torch", rename={"a.y": None})
    same(torch.load(tmp_path / "a.pt", weights_only=True), {"a": {"x": torch.ones(1)}, "n": 3})


@pytest.mark.parametrize(
    ("rename", "message"),
    [
        (lambda _: "same", "(?s)one key to several.*'a', 'b', 'c'"),
        ({"a": "b"}, "'b': 'a', 'b'"),
        ({"nothing": "b"}, "not there"),
        (lambda _: 3, "a key or None, not 3"),
    ],
)
def test_names_that_clash_or_are_unknown_are_refused(tmp_path, rename, message):
    milepost.save({"a": torch.ones(1), "b": torch.ones(1), "c": 1}, tmp_path / "source")
    for to in FORMATS:
        with pytest.raises(milepost.InvalidRequest, match=message):
            milepost.convert(tmp_path / "source", tmp_path / "out", to, rename=rename)
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize("to", FORMATS)
def test_key_without_letters_is_converted_but_not_given(tmp_path, to):
    state = {"": torch.ones(2), "b": torch.zeros(1)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "out", to)
    found = read_back(tmp_path / "out", to)
    same({key: found[key] for key in state}, state)
    with pytest.raises(milepost.InvalidRequest, match="a key or None, not ''"):
        milepost.convert(tmp_path / "source", tmp_path / "other", to, rename={"": None, "b": ""})


# ---------------------------------------------------------------- what may be there already


def test_an_unknown_format_is_refused(tmp_path):
    with pytest.raises(milepost.InvalidRequest, match="not 'onnx'"):
        milepost.convert(tmp_path, tmp_path / "out", "onnx")
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.convert(tmp_path / "nothing", tmp_path / "out", "torch")
    with pytest.raises(milepost.InvalidRequest, match="host_memory_bytes"):
        milepost.convert(tmp_path, tmp_path / "out", "torch", host_memory_bytes=1000)


@pytest.mark.parametrize("to", FORMATS)
def test_what_is_there_is_replaced_only_when_asked(tmp_path, to):
    milepost.save({"old": torch.ones(3)}, tmp_path / "one")
    milepost.save({"new": torch.zeros(4)}, tmp_path / "two")
    milepost.convert(tmp_path / "one", tmp_path / "out", to)
    with pytest.raises(milepost.InvalidRequest, match="overwrite=True"):
        milepost.convert(tmp_path / "two", tmp_path / "out", to)
    same(read_back(tmp_path / "out", to), {"old": torch.ones(3)})
    milepost.convert(tmp_path / "two", tmp_path / "out", to, overwrite=True)
    same(read_back(tmp_path / "out", to), {"new": torch.zeros(4)})


def test_files_of_an_older_export_do_not_stay_behind(tmp_path):
    milepost.save(flat_state(5), tmp_path / "source")
    out = tmp_path / "out"
    out.mkdir()
    (out / "config.json").write_text("{}")
    (out / ".model.safetensors.0123456789abcdef.tmp").write_text("of one that was killed")
    milepost.convert(tmp_path / "source", out, "safetensors", max_shard_bytes=100_000)
    many = {p.name for p in out.iterdir()}
    assert "model.safetensors.index.json" in many
    assert "model.safetensors" not in many
    milepost.convert(tmp_path / "source", out, "safetensors", overwrite=True)
    assert {p.name for p in out.iterdir()} == {"config.json", "model.safetensors"}
    milepost.convert(tmp_path / "source", out, "safetensors", max_shard_bytes=100_000, overwrite=True)
    assert {p.name for p in out.iterdir()} == many


def test_progress_is_told(tmp_path):
    milepost.save(flat_state(), tmp_path / "source")
    seen = []
    milepost.convert(tmp_path / "source", tmp_path / "out", "safetensors", progress=seen.append)
    assert seen[-1].finished
    assert seen[-1].total_bytes >= 1_500_001 * 4
