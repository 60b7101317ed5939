"""Hugging Face storage behind DCP's names: whole or absent, and the same files for every reader."""

import itertools
import json
import os
import sys

import numpy as np
import pytest
import safetensors.torch
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import milepost
import milepost.dcp as dcp
from milepost.dcp._consolidate_hf_safetensors import consolidate_safetensors_files_on_every_rank
from milepost.planning import DefaultLoadPlanner, LoadItemType, LoadPlan, MetadataIndex, ReadItem
from tests.ranks import spawn

INDEX = "model.safetensors.index.json"


@pytest.fixture(params=["safetensors", "own"])
def opener(request, monkeypatch):
    """By the safetensors library, and without it."""
    if request.param == "own":
        monkeypatch.setitem(sys.modules, "safetensors", None)


def original(info, rank=0):
    return info.value.failures[rank][0]


# Real ranks


def whole_tensors():
    return {
        "rows": torch.arange(60.0).view(10, 6),
        "columns": torch.arange(40, dtype=torch.bfloat16).view(5, 8),
        "same": torch.arange(7),
    }


def sharded(mesh, placements):
    state = whole_tensors()
    return {key: distribute_tensor(state[key], mesh, [placements[key]]) for key in state}


def save_and_join(rank, folder):
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    state = sharded(mesh, {"rows": Shard(0), "columns": Shard(1), "same": Replicate()})
    writer = dcp.HuggingFaceStorageWriter(folder / "one", save_distributed=True, enable_consolidation=True)
    dcp.save(state, storage_writer=writer)
    numbers = {"rows": 1, "columns": 2, "same": 2}
    consolidate_safetensors_files_on_every_rank(str(folder / "one" / "sharded"), str(folder / "two"), numbers)
    torch_dcp.save(state, storage_writer=torch_dcp.HuggingFaceStorageWriter(folder / "theirs", save_distributed=True))
    found = []
    for module, place in ((dcp, "one/sharded"), (dcp, "theirs"), (dcp, "two"), (torch_dcp, "one/sharded")):
        target = sharded(mesh, {"rows": Shard(1), "columns": Replicate(), "same": Shard(0)})
        for tensor in target.values():
            tensor.to_local().zero_()
        module.load(target, storage_reader=module.HuggingFaceStorageReader(str(folder / place)))
        found.append({key: tensor.full_tensor() for key, tensor in target.items()})
    return found


@pytest.mark.slow
def test_ranks_save_parts_and_everyone_reads_whole_tensors(tmp_path):
    wanted = whole_tensors()
    for found in itertools.chain(*spawn(2, save_and_join, tmp_path)):
        assert all(torch.equal(found[key], wanted[key]) for key in wanted)
    one = safetensors.torch.load_file(tmp_path / "one" / "model-00001-of-00001.safetensors")
    assert all(torch.equal(one[key], wanted[key]) for key in wanted)
    assert set(safetensors.torch.load_file(tmp_path / "two" / "model-00001-of-00002.safetensors")) == {"rows"}
    assert json.loads((tmp_path / "two" / INDEX).read_text())["metadata"]["total_size"] == 240 + 80 + 56
    opened = milepost.open(tmp_path / "one" / "sharded")
    assert torch.equal(opened["rows"].read(), wanted["rows"])
    (tmp_path / "one" / "sharded" / "shard-00002-model-00001-of-00001.safetensors").unlink()
    with pytest.raises(milepost.CheckpointDamaged, match="2 were saved together"):
        milepost.open(tmp_path / "one" / "sharded")
    with pytest.raises(dcp.CheckpointException) as info:
        dcp.load(whole_tensors(), storage_reader=dcp.HuggingFaceStorageReader(tmp_path / "one" / "sharded"))
    assert isinstance(original(info), milepost.CheckpointDamaged)


# One process


def tensors(number):
    return {"a": torch.full((40,), float(number)), "b": torch.full((3, 5), number), "c": torch.tensor(number)}


def save(folder, number, **options):
    writer = dcp.HuggingFaceStorageWriter(folder, fqn_to_index_mapping={"a": 1, "b": 2, "c": 3}, **options)
    dcp.save(tensors(number), storage_writer=writer)


def load(folder):
    target = tensors(-1)
    dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(folder, thread_count=2))
    return {key: int(value.flatten()[0]) for key, value in target.items()}


def test_files_are_those_of_hugging_face(tmp_path, opener):
    save(tmp_path, 5)
    names = [f"model-0000{n}-of-00003.safetensors" for n in (1, 2, 3)]
    assert sorted(os.listdir(tmp_path)) == [*names, INDEX]
    assert json.loads((tmp_path / INDEX).read_text())["weight_map"] == dict(zip("abc", names, strict=True))
    assert load(tmp_path) == {"a": 5, "b": 5, "c": 5}
    assert milepost.open(tmp_path)["b"].read().tolist() == tensors(5)["b"].tolist()


def test_the_index_says_which_file_counts(tmp_path, opener):
    for number in (1, 2):
        safetensors.torch.save_file({"a": torch.full((3,), float(number))}, tmp_path / f"{number}.safetensors")
    reader = dcp.HuggingFaceStorageReader(tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"'a' stands in .*1\.safetensors and in .*2\.safetensors"):
        dcp.load({"a": torch.zeros(3)}, storage_reader=reader)
    safetensors.torch.save_file({"a": torch.full((3,), 5.0), "b": torch.ones(1)}, tmp_path / "1.safetensors")
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "2.safetensors", "b": "1.safetensors"}}))
    state = {"a": torch.zeros(3), "b": torch.zeros(1)}
    dcp.load(state, storage_reader=reader)
    assert (state["a"].tolist(), state["b"].tolist()) == ([2, 2, 2], [1])
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": {"a": "../2.safetensors"}}))
    with pytest.raises(dcp.CheckpointException, match="outside of its folder"):
        dcp.load(state, storage_reader=reader)


def killed_at(folder, number, rename):
    """A save in a process that dies before rename number `rename`. Gives whether it died."""
    child = os.fork()
    if child == 0:
        rest, real = itertools.count(), os.rename
        os.rename = lambda *args: os._exit(9) if next(rest) == rename else real(*args)
        try:
            save(folder, number)
        finally:
            os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def outcome(folder):
    try:
        return set(load(folder).values())
    except dcp.CheckpointException as error:
        return "refused" if isinstance(error.failures[0][0], milepost.CheckpointDamaged) else error


def test_a_save_that_dies_leaves_the_old_the_new_or_nothing(tmp_path):
    seen = []
    for rename in range(5):  # three files and the index
        save(tmp_path, 1)
        assert killed_at(tmp_path, 2, rename) == (rename < 4)
        seen.append(outcome(tmp_path))
    assert seen == [{1}, "refused", "refused", {2}, {2}], "never a mixture of two saves"
    save(tmp_path, 3)
    assert set(load(tmp_path).values()) == {3}
    assert not [name for name in os.listdir(tmp_path) if name.endswith(".tmp")]


def test_a_failed_save_leaves_the_old_one_and_no_files(tmp_path, monkeypatch):
    save(tmp_path, 1)
    there = sorted(os.listdir(tmp_path))
    planner = dcp.DefaultSavePlanner()
    resolve, rest = planner.resolve_data, itertools.count()
    monkeypatch.setattr(planner, "resolve_data", lambda item: resolve(item) if next(rest) < 2 else 1 / 0)
    writer = dcp.HuggingFaceStorageWriter(tmp_path, fqn_to_index_mapping={"a": 1, "b": 2, "c": 3})
    with pytest.raises(dcp.CheckpointException, match="division"):
        dcp.save(tensors(2), storage_writer=writer, planner=planner)
    assert sorted(os.listdir(tmp_path)) == there
    assert set(load(tmp_path).values()) == {1}


def test_what_the_format_cannot_hold_is_refused(tmp_path):
    cases = [
        ({"w": torch.ones(1), "step": 7}, {}, "'step'"),
        ({"w": torch.ones(1)}, {"fqn_to_index_mapping": {"v": 1}}, r"lacks 1 keys: \['w'\]"),
        ({}, {}, "no tensors"),
    ]
    for state, options, message in cases:
        with pytest.raises(dcp.CheckpointException, match=message):
            dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(tmp_path / "new", **options))
    save(tmp_path / "old", 1)
    with pytest.raises(dcp.CheckpointException, match="overwrite=True"):
        save(tmp_path / "old", 2, overwrite=False)


def test_damaged_folders_are_refused_with_their_names(tmp_path, opener):
    save(tmp_path, 1)
    target = {"a": torch.zeros(40, dtype=torch.int32)}
    with pytest.raises(dcp.CheckpointException, match=r"'a': torch\.float32 .* target is torch\.int32"):
        dcp.load(target, storage_reader=dcp.HuggingFaceStorageReader(tmp_path))
    file = tmp_path / "model-00001-of-00003.safetensors"
    file.write_bytes(file.read_bytes()[:-1])
    with pytest.raises(dcp.CheckpointException, match="model-00001-of-00003") as info:
        load(tmp_path)
    assert isinstance(original(info), milepost.CheckpointDamaged)
    file.unlink()
    with pytest.raises(dcp.CheckpointException, match="lacks 1 files of its index"):
        load(tmp_path)
    with pytest.raises(dcp.CheckpointException, match="no folder"):
        load(tmp_path / "nothing")


# Quantized


def write_quantized(folder):
    """A matrix in blocks of 4 with scales in another file, and groups of numbers of 4 bits. Gives their values."""
    random = np.random.default_rng(0)
    weight = torch.from_numpy(random.normal(size=(10, 7)).astype(np.float32)).to(torch.float8_e4m3fn)
    scale = torch.from_numpy(random.uniform(0.5, 2, size=(3, 2)).astype(np.float32))
    blocks = random.integers(0, 256, size=(2, 3, 5, 4), dtype=np.uint8)
    scales = random.integers(120, 135, size=(2, 3, 5), dtype=np.uint8)
    packed = {"m_blocks": torch.from_numpy(blocks), "m_scales": torch.from_numpy(scales), "plain": torch.arange(3.0)}
    safetensors.torch.save_file({"x.weight": weight, **packed}, folder / "one.safetensors")
    safetensors.torch.save_file({"x.weight_scale_inv": scale}, folder / "two.safetensors")
    places = dict.fromkeys(["x.weight", *packed], "one.safetensors") | {"x.weight_scale_inv": "two.safetensors"}
    (folder / INDEX).write_text(json.dumps({"weight_map": places}))
    values = np.array([[float(weight[i, j]) * float(scale[i // 4, j // 4]) for j in range(7)] for i in range(10)])
    steps = [0, 0.5, 1, 1.5, 2, 3, 4, 6]
    numbers = np.zeros((2, 3, 40))
    for a, b, g, k in np.ndindex(2, 3, 5, 4):
        for half, bits in enumerate((blocks[a, b, g, k] % 16, blocks[a, b, g, k] // 16)):
            value = steps[bits % 8] * (-1.0 if bits >= 8 else 1.0) * 2.0 ** (int(scales[a, b, g]) - 127)
            numbers[a, b, 8 * g + 2 * k + half] = value
    return {"x.weight": values.astype(np.float32), "m_blocks": numbers.astype(np.float32)}


def quantized(folder, **options):
    return dcp.QuantizedHuggingFaceStorageReader(folder, block_size=4, **options)


def test_quantized_tensors_are_read_as_their_values(tmp_path, opener):
    wanted = write_quantized(tmp_path)
    state = {key: torch.zeros(value.shape) for key, value in wanted.items()} | {"plain": torch.zeros(3)}
    dcp.load(state, storage_reader=quantized(tmp_path, thread_count=2))
    for key, value in wanted.items():
        np.testing.assert_allclose(state[key].numpy(), value, rtol=1e-6)
    assert state["plain"].tolist() == [0, 1, 2]
    half = {"x.weight": torch.zeros(10, 7, dtype=torch.bfloat16)}
    dcp.load(half, storage_reader=quantized(tmp_path, target_dtype=torch.bfloat16))
    assert torch.equal(half["x.weight"], torch.from_numpy(wanted["x.weight"]).to(torch.bfloat16))


@pytest.mark.parametrize(
    ("key", "offsets", "lengths"), [("x.weight", (3, 2), (6, 4)), ("m_blocks", (1, 0, 11), (1, 2, 18))]
)
def test_a_part_of_a_quantized_tensor_is_read_alone(tmp_path, opener, key, offsets, lengths):
    wanted = write_quantized(tmp_path)[key]
    reader, planner, state = quantized(tmp_path), DefaultLoadPlanner(), {key: torch.zeros(lengths)}
    metadata = reader.read_metadata()
    assert tuple(metadata.state_dict_metadata[key].size) == wanted.shape
    planner.set_up_planner(state, metadata)
    reader.set_up_storage_reader(metadata, True)
    zero = (0,) * len(lengths)
    index = MetadataIndex(key, zero)
    item = ReadItem(LoadItemType.TENSOR, index, torch.Size(zero), index, torch.Size(offsets), torch.Size(lengths))
    reader.read_data(LoadPlan([item]), planner).wait()
    inside = tuple(slice(a, a + n) for a, n in zip(offsets, lengths, strict=True))
    np.testing.assert_allclose(state[key].numpy(), wanted[inside], rtol=1e-6)


def test_wrong_blocks_and_missing_scales_are_told(tmp_path):
    wanted = write_quantized(tmp_path)
    reader = dcp.QuantizedHuggingFaceStorageReader(tmp_path, block_size=5)
    with pytest.raises(dcp.CheckpointException, match="is block_size right"):
        dcp.load({"x.weight": torch.zeros(wanted["x.weight"].shape)}, storage_reader=reader)
    (tmp_path / INDEX).unlink()
    with pytest.raises(dcp.CheckpointException, match="where the scales are"):
        dcp.load({"x.weight": torch.zeros(10, 7)}, storage_reader=quantized(tmp_path))


def test_scales_may_have_the_type_of_exponents(tmp_path):
    """And a reader that goes on to another folder takes nothing along."""
    wanted = write_quantized(tmp_path)["m_blocks"]
    file = tmp_path / "one.safetensors"
    held = safetensors.torch.load_file(file)
    safetensors.torch.save_file({**held, "m_scales": held["m_scales"].view(torch.float8_e8m0fnu)}, file)
    reader, state = quantized(tmp_path), {"m_blocks": torch.zeros(wanted.shape)}
    dcp.load(state, storage_reader=reader)
    np.testing.assert_allclose(state["m_blocks"].numpy(), wanted, rtol=1e-6)
    (tmp_path / "plain").mkdir()
    safetensors.torch.save_file({"m_blocks": torch.ones(wanted.shape)}, tmp_path / "plain" / "m.safetensors")
    (tmp_path / "plain" / INDEX).write_text('{"weight_map": {"m_blocks": "m.safetensors"}}')
    dcp.load(state, checkpoint_id=tmp_path / "plain", storage_reader=reader)
    assert torch.equal(state["m_blocks"], torch.ones(wanted.shape))
    safetensors.torch.save_file({**held, "m_scales": held["m_scales"].to(torch.float32)}, file)
    with pytest.raises(dcp.CheckpointException, match="MXFP4 are bytes"):
        dcp.load(state, storage_reader=quantized(tmp_path))


@pytest.mark.parametrize("name", [INDEX, "z.safetensors"])
def test_a_pipe_in_the_folder_does_not_block(tmp_path, opener, name):
    safetensors.torch.save_file({"w": torch.ones(3)}, tmp_path / "m.safetensors")
    os.mkfifo(tmp_path / name)
    with pytest.raises(dcp.CheckpointException, match="is not a file") as info:
        dcp.load({"w": torch.zeros(3)}, storage_reader=dcp.HuggingFaceStorageReader(tmp_path))
    assert isinstance(original(info), milepost.UnsafeCheckpoint)
