"""Hugging Face folders from checkpoints and live states: the files are byte for byte those of safetensors itself."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import milepost
from milepost.core.box import Box
from milepost.formats.write.export import runs_of
from tests import ranks
from tests.formats.write.conversions import HELD, REFUSED, bits, random_bits, read_folder, same


def test_the_file_is_the_one_that_safetensors_writes(tmp_path):
    state = {f"{name}.{i}": random_bits(name, 3 + i, 4) for name in HELD for i in range(2)}
    state |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3), "größe": torch.ones(2)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "hf", "safetensors")
    save_file(state, tmp_path / "theirs.safetensors", {"format": "pt"})
    ours = (tmp_path / "hf" / "model.safetensors").read_bytes()
    assert ours == (tmp_path / "theirs.safetensors").read_bytes()


def test_a_large_state_is_cut_into_files_with_an_index(tmp_path):
    state = {"a": random_bits("float32", 900), "b": random_bits("bfloat16", 10_000), "c": random_bits("int8", 300)}
    state |= {"d": random_bits("float64", 100), "e": torch.empty(0)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "hf", "safetensors", max_shard_bytes=4000)
    names = sorted(p.name for p in (tmp_path / "hf").iterdir())
    assert names == [f"model-0000{i}-of-00003.safetensors" for i in (1, 2, 3)] + ["model.safetensors.index.json"]
    same(dict(sorted(read_folder(tmp_path / "hf").items())), state)


@pytest.mark.parametrize("dtype", REFUSED)
def test_types_that_safetensors_lacks_are_listed(tmp_path, dtype):
    milepost.save({"a": torch.ones(2), "x": random_bits(dtype, 3), "y": random_bits(dtype, 2)}, tmp_path / "source")
    with pytest.raises(milepost.InvalidRequest, match=rf"(?s)2 of the tensors.*'x' is {dtype}.*'y' is {dtype}"):
        milepost.convert(tmp_path / "source", tmp_path / "hf", "safetensors")
    assert not (tmp_path / "hf").exists()


def test_plain_values_go_into_the_header_and_others_are_listed_or_dropped(tmp_path):
    state = {"a": torch.ones(2), "step": 7, "name": "x", "betas": [0.9, None], "odd": {"s": {1, 2}}, "nan": math.nan}
    milepost.save(state, tmp_path / "source", metadata={"loss": 2.5})
    with pytest.raises(milepost.InvalidRequest, match=r"(?s)2 values.*'odd.s' \(set\).*'nan' \(float\).*drop_values"):
        milepost.convert(tmp_path / "source", tmp_path / "hf", "safetensors")
    milepost.convert(tmp_path / "source", tmp_path / "hf", "safetensors", drop_values=True)
    with safe_open(tmp_path / "hf" / "model.safetensors", "pt") as file:
        assert file.metadata() == {
            "format": "pt", "loss": "2.5", "step": "7", "name": "x", "betas": "[0.9, null]",
        }  # fmt: skip


shapes = st.lists(st.integers(1, 4), min_size=0, max_size=4).map(tuple)


@given(shapes, st.data())
def test_the_runs_of_a_box_are_its_elements_in_order(shape, data):
    offset = tuple(data.draw(st.integers(0, n - 1)) for n in shape)
    box = Box(offset, tuple(data.draw(st.integers(1, n - a)) for n, a in zip(shape, offset, strict=True)))
    whole = torch.arange(math.prod(shape)).view(shape)
    inside = whole[box.slices].reshape(-1).tolist()
    runs = list(runs_of(box, shape))
    assert [i for at, _, length in runs for i in range(at, at + length)] == inside
    assert [i for _, low, length in runs for i in range(low, low + length)] == list(range(len(inside)))
    assert all(a + length != b for (a, _, length), (b, _, _) in itertools.pairwise(runs)) or len(runs) == 1


# ---------------------------------------------------------------- live states


def live_state():
    torch.manual_seed(1)
    return {
        "rows": torch.randn(33, 40),
        "columns": torch.randn(21, 30, 2),
        "both": torch.randn(64, 5),
        "same": torch.randn(700_000),
        "uneven": torch.arange(3, dtype=torch.int16),
        "bytes": random_bits("bfloat16", 400, 1000),
    }


def test_one_process_exports_a_module(tmp_path):
    model = torch.nn.Linear(5, 3)
    milepost.export_safetensors(model, tmp_path / "hf")
    same(read_folder(tmp_path / "hf"), {"bias": model.bias.data, "weight": model.weight.data})


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_tensors_on_a_gpu_are_exported(tmp_path):
    state = {key: tensor.cuda() for key, tensor in live_state().items()}
    milepost.export_safetensors(state | {"turned": state["rows"].t()}, tmp_path / "hf")
    found = read_folder(tmp_path / "hf")
    same({key: found[key] for key in state}, live_state())
    same(found["turned"], live_state()["rows"].t().contiguous())


def export_on_ranks(rank, folder, shard_bytes):
    mesh = init_device_mesh("cpu", (2,))
    whole = live_state()
    cuts = {"rows": [Shard(0)], "columns": [Shard(1)], "both": [Shard(0)], "same": [Replicate()], "uneven": [Shard(0)]}
    cuts["bytes"] = [Shard(1)]
    state = {key: distribute_tensor(whole[key], mesh, cut, src_data_rank=None) for key, cut in cuts.items()}
    state["plain"] = torch.arange(10.0)
    milepost.export_safetensors(state, folder, max_shard_bytes=shard_bytes)
    return sorted(p.name for p in folder.iterdir())


@pytest.mark.slow
@pytest.mark.parametrize("shard_bytes", [10**9, 800_000])
def test_ranks_write_their_own_bytes_of_the_final_files(tmp_path, shard_bytes):
    (names, _) = ranks.spawn(2, export_on_ranks, tmp_path / "hf", shard_bytes)
    assert not any(name.endswith(".tmp") for name in names)
    expected = live_state() | {"plain": torch.arange(10.0)}
    found = read_folder(tmp_path / "hf")
    assert set(found) == set(expected)
    for key, tensor in expected.items():
        assert torch.equal(bits(found[key]), bits(tensor)), key


def export_on_a_mesh(rank, folder):
    mesh = init_device_mesh("cpu", (2, 2))
    whole = live_state()
    cuts = {"rows": [Shard(0), Shard(0)], "columns": [Shard(1), Shard(0)], "both": [Shard(0), Shard(1)]}
    cuts |= {"same": [Replicate(), Shard(0)], "uneven": [Shard(0), Replicate()], "bytes": [Replicate(), Replicate()]}
    state = {key: distribute_tensor(whole[key], mesh, cut, src_data_rank=None) for key, cut in cuts.items()}
    milepost.export_safetensors(state, folder, host_memory_bytes=256 * 1024)


@pytest.mark.slow
def test_ranks_of_a_mesh_write_every_byte_once(tmp_path):
    ranks.spawn(4, export_on_a_mesh, tmp_path / "hf")
    found = read_folder(tmp_path / "hf")
    same({key: found[key] for key in live_state()}, live_state())


def export_different_keys(rank, folder):
    milepost.export_safetensors({f"stage{rank}": torch.full((5,), float(rank))}, folder, rename=lambda key: f"m.{key}")


@pytest.mark.slow
def test_ranks_may_hold_different_tensors(tmp_path):
    ranks.spawn(2, export_different_keys, tmp_path / "hf")
    same(read_folder(tmp_path / "hf"), {"m.stage0": torch.zeros(5), "m.stage1": torch.ones(5)})


def test_a_state_with_values_that_do_not_fit_is_refused(tmp_path):
    with pytest.raises(milepost.InvalidRequest, match="'s'"):
        milepost.export_safetensors({"a": torch.ones(1), "s": {1, 2}}, tmp_path / "hf")
    assert not (tmp_path / "hf").exists()
