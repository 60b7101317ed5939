"""Checkpoints that torch's own DCP wrote are opened, explained and loaded as they are, onto any ranks and meshes."""

import copy
import os
import pickle
from argparse import Namespace
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost.core.dtypes import DTYPES
from tests.formats.foreign_states import rich_state, same, zeroed
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore")


def test_a_rich_state_comes_back_as_it_was(tmp_path):
    state = rich_state()
    dcp.save(state, checkpoint_id=tmp_path / "a")
    with milepost.open(tmp_path / "a") as checkpoint:
        assert checkpoint.format == "dcp"
        assert "dcp" in repr(checkpoint)
        assert same(state, checkpoint.state())
        assert checkpoint["tuple.1"] == 2
        assert checkpoint["step"] == 12
        assert torch.equal(checkpoint["turned"][1:3, ::2], state["turned"][1:3, ::2])
        assert checkpoint.verify().ok
    target = zeroed(state)
    assert milepost.explain(target, tmp_path / "a").fits()
    milepost.load(target, tmp_path / "a")
    assert same(state, target)


def test_all_dtypes(tmp_path):
    names = [name for name in DTYPES if hasattr(torch, name) and name != "float4_e2m1fn_x2"]
    data = torch.arange(48, dtype=torch.uint8)
    state = {name: (data % 2).bool() if name == "bool" else data.view(getattr(torch, name)).clone() for name in names}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    milepost.load(target, tmp_path / "a")
    for name, tensor in state.items():
        assert torch.equal(tensor.view(torch.uint8), target[name].view(torch.uint8)), name


@pytest.mark.parametrize("size", [1, 1023, 3_000_001])
def test_unaligned_tensors_are_placed_strided_and_converted(tmp_path, size):
    """Items of DCP start at any byte; large ones are read in several jobs."""
    state = {f"t{i}": torch.randn(size, dtype=torch.float64 if i % 2 else torch.float32) for i in range(3)}
    state["byte"] = torch.ones(3, dtype=torch.uint8)
    dcp.save(state, checkpoint_id=tmp_path / "a")
    strided = {k: torch.zeros(t.shape[0], 2, dtype=t.dtype)[:, 1] for k, t in state.items()}
    milepost.load(strided, tmp_path / "a")
    assert all(torch.equal(state[k], strided[k]) for k in state)
    other = {k: torch.zeros(t.shape, dtype=torch.float16) for k, t in state.items()}
    milepost.load(other, tmp_path / "a", convert_dtype="lossy", host_memory_bytes=1 << 20)
    assert all(torch.equal(state[k].half(), other[k]) for k in state)


def test_optimizer_takes_its_state_from_keys_that_dcp_made_text(tmp_path):
    model = torch.nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
    model(torch.ones(4)).sum().backward()
    optimizer.step()
    dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=tmp_path / "a")
    fresh = torch.nn.Linear(4, 4)
    taker = torch.optim.AdamW(fresh.parameters())
    milepost.load({"model": fresh, "optim": taker}, tmp_path / "a")
    assert torch.equal(fresh.weight, model.weight)
    assert same(optimizer.state_dict(), taker.state_dict())


def test_a_scheduler_keeps_its_numbers_although_dcp_made_text_of_them(tmp_path):
    parameter = torch.nn.Parameter(torch.ones(1))

    def scheduler():
        return torch.optim.lr_scheduler.MultiStepLR(torch.optim.SGD([parameter], lr=1.0), milestones=[2, 4])

    first = scheduler()
    dcp.save({"sched": first.state_dict()}, checkpoint_id=tmp_path / "a")
    second = scheduler()
    milepost.load({"sched": second}, tmp_path / "a")
    assert dict(second.milestones) == {2: 1, 4: 1}


def test_the_layout_of_torch_2_3_is_read(tmp_path, monkeypatch):
    """Dicts without tensors were one value then."""
    from torch.distributed.checkpoint import _version

    monkeypatch.setattr(_version, "_derived_version", "2_3")
    state = {"a": {"w": torch.ones(3)}, "options": {"lr": 1.0, "deep": {"x": 1}}}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    target = {"a": {"w": torch.zeros(3)}, "options": {"lr": 0.0, "deep": {"x": 0}}}
    milepost.load(target, tmp_path / "a")
    assert same(state, target)


def test_a_planner_that_does_not_flatten_is_read(tmp_path):
    state = {"w": torch.ones(3), "options": {"lr": 1.0}}
    dcp.save(state, checkpoint_id=tmp_path / "a", planner=dcp.DefaultSavePlanner(flatten_state_dict=False))
    assert same(state, milepost.open(tmp_path / "a").state())


def test_records_of_older_versions_are_read(tmp_path):
    """Properties of a tensor were a class of another module, items had no extensions, and the metadata had paths."""
    from torch.distributed._shard.sharded_tensor.metadata import TensorProperties

    def change(metadata):
        metadata.state_dict_metadata["w"].properties = TensorProperties(dtype=torch.float32)
        metadata.storage_meta.checkpoint_id = Path("/somewhere")
        for info in metadata.storage_data.values():
            info.__dict__.pop("transform_descriptors", None)

    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    change_metadata(tmp_path / "a", change)
    assert torch.equal(milepost.open(tmp_path / "a")["w"].read(), torch.ones(3))


def test_a_save_that_never_finished_is_not_found(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").unlink()
    with pytest.raises(milepost.CheckpointNotFound, match="never finished"):
        milepost.load({"w": torch.ones(3)}, tmp_path / "a")


def test_several_files_a_rank_are_read(tmp_path):
    state = {f"t{i}": torch.full((5,), float(i)) for i in range(5)}
    writer = dcp.FileSystemWriter(tmp_path / "a", single_file_per_rank=False, thread_count=2)
    dcp.save(state, storage_writer=writer)
    assert same(state, milepost.open(tmp_path / "a").state())


def test_pickled_values_are_refused_by_key_without_the_opt_in(tmp_path):
    state = {"w": torch.ones(3), "odd": (np.ones(2), Namespace(a=1)), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    with milepost.open(tmp_path / "a") as checkpoint:
        assert checkpoint["step"] == 3
        with pytest.raises(milepost.UnsupportedFormat, match=r"'odd'.*allow_pickle=True"):
            checkpoint["odd"]
    target = {"w": torch.zeros(3), "step": 0}
    milepost.load(target, tmp_path / "a", allow_unexpected=True)
    assert same(target, {"w": torch.ones(3), "step": 3})
    with milepost.open(tmp_path / "a", allow_pickle=True) as checkpoint:
        assert checkpoint["odd"][1] == Namespace(a=1)


def test_compressed_items_are_read(tmp_path):
    pytest.importorskip("zstandard")
    from torch.distributed.checkpoint._extension import ZStandard

    state = {"w": torch.arange(1000.0).view(10, 100), "t": (torch.ones(3), 1), "step": 3, "zero": torch.zeros(1 << 20)}
    dcp.save(state, storage_writer=dcp.FileSystemWriter(tmp_path / "a", _extensions=[ZStandard()]))
    target = zeroed(state)
    milepost.load(target, tmp_path / "a")
    assert same(state, target)


def test_an_unknown_extension_is_refused_by_name(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    change_metadata(tmp_path / "a", lambda m: set_all(m.storage_data, transform_descriptors=["stream.rot13/1"]))
    with pytest.raises(milepost.UnsupportedFormat, match=r"rot13"):
        milepost.load({"w": torch.zeros(3)}, tmp_path / "a")


def set_all(storage, **fields):
    for info in storage.values():
        info.__dict__.update(fields)


def change_metadata(folder, change):
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


# ---------------------------------------------------------------- damage


def saved(tmp_path):
    state = {"w": torch.arange(5000.0), "big": torch.zeros(3_000_000), "v": torch.ones(7), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    return state, tmp_path / "a" / "__0_0.distcp"


@pytest.mark.parametrize("share", [0.0, 0.001, 0.5, 0.9999])
def test_a_truncated_file_is_damaged(tmp_path, share):
    state, file = saved(tmp_path)
    file.write_bytes(file.read_bytes()[: int(file.stat().st_size * share)])
    with pytest.raises(milepost.CheckpointDamaged, match=r"__0_0\.distcp"):
        milepost.load(zeroed(state), tmp_path / "a")


def test_a_missing_file_is_damaged(tmp_path):
    state, file = saved(tmp_path)
    file.unlink()
    with pytest.raises(milepost.CheckpointDamaged, match=r"__0_0\.distcp is missing"):
        milepost.load(zeroed(state), tmp_path / "a")


@pytest.mark.parametrize("key", ["w", "big"])
def test_a_flipped_byte_of_a_tensor_is_noticed_by_its_crc(tmp_path, key):
    state, file = saved(tmp_path)
    metadata = pickle.loads((tmp_path / "a" / ".metadata").read_bytes())
    (info,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
    data = bytearray(file.read_bytes())
    data[info.offset + info.length // 2] ^= 4
    file.write_bytes(data)
    with pytest.raises(milepost.CheckpointDamaged, match=rf"__0_0\.distcp.*'{key}'.*CRC"):
        milepost.load(zeroed(state), tmp_path / "a")
    verification = milepost.open(tmp_path / "a").verify()
    assert [damage.entries for damage in verification.damages] == [(key,)]
    milepost.load(zeroed(state), tmp_path / "a", verify=False)


def test_every_truncation_of_a_small_file_is_an_error_of_ours(tmp_path):
    dcp.save({"w": torch.arange(8.0), "step": 3}, checkpoint_id=tmp_path / "a")
    file = tmp_path / "a" / "__0_0.distcp"
    data = file.read_bytes()
    for length in range(0, len(data), 37):
        file.write_bytes(data[:length])
        with pytest.raises(milepost.CheckpointDamaged):
            milepost.load({"w": torch.zeros(8), "step": 0}, tmp_path / "a")


@pytest.mark.slow
def test_flipped_bytes_end_in_our_errors_or_the_right_data(tmp_path):
    state = {"w": torch.arange(8.0), "step": 3}
    dcp.save(state, checkpoint_id=tmp_path / "a")
    for name in ("__0_0.distcp", ".metadata"):
        file = tmp_path / "a" / name
        data = file.read_bytes()
        for at in range(0, len(data), 7):
            changed = bytearray(data)
            changed[at] ^= 0x15
            file.write_bytes(changed)
            target = {"w": torch.zeros(8), "step": 0}
            try:
                milepost.load(target, tmp_path / "a")
            except milepost.CheckpointError:
                continue
            if name == "__0_0.distcp":
                assert same(state, target), at
        file.write_bytes(data)


def test_parts_that_leave_a_hole_or_overlap_are_damage(tmp_path):
    dcp.save({"w": torch.ones(4, 4)}, checkpoint_id=tmp_path / "a")
    change_metadata(tmp_path / "a", lambda m: setattr(m.state_dict_metadata["w"], "size", torch.Size([8, 4])))
    with pytest.raises(milepost.CheckpointDamaged, match="'w'"):
        milepost.open(tmp_path / "a")


# ---------------------------------------------------------------- ranks


def full(seed):
    return torch.randn(12, 10, generator=torch.Generator().manual_seed(seed))


def save_sharded(rank, folder, world):
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rows": distribute_tensor(full(1), mesh, [Shard(0)]),
        "columns": distribute_tensor(full(2), mesh, [Shard(1)]),
        "copies": distribute_tensor(full(3), mesh, [Replicate()]),
        "plain": full(4),
        "step": 5,
    }
    dcp.save(state, checkpoint_id=folder)


def load_sharded(rank, folder, world):
    mesh = init_device_mesh("cpu", (world,))
    state = {
        "rows": distribute_tensor(torch.zeros(12, 10), mesh, [Shard(1)]),
        "columns": distribute_tensor(torch.zeros(12, 10), mesh, [Shard(0)]),
        "copies": distribute_tensor(torch.zeros(12, 10), mesh, [Shard(0)]),
        "plain": torch.zeros(12, 10),
        "step": 0,
    }
    report = milepost.explain(state, folder)
    assert report.fits(), str(report)
    milepost.load(state, folder)
    whole = [state[k].full_tensor() for k in ("rows", "columns", "copies")]
    return [t.tolist() for t in (*whole, state["plain"])], state["step"]


@pytest.mark.slow
@pytest.mark.parametrize(("before", "after"), [(4, 2), (2, 4)])
def test_dtensors_are_resharded(tmp_path, before, after):
    spawn(before, save_sharded, str(tmp_path / "a"), before)
    for tensors, step in spawn(after, load_sharded, str(tmp_path / "a"), after):
        assert tensors == [full(i).tolist() for i in (1, 2, 3, 4)]
        assert step == 5
    with milepost.open(tmp_path / "a") as checkpoint:
        assert checkpoint.world == before
        assert torch.equal(checkpoint["columns"].read(), full(2))
        assert checkpoint.verify().ok


def save_to_hugging_face(rank, folder, distributed):
    mesh = init_device_mesh("cpu", (2,))
    state = {
        "rows": distribute_tensor(full(1), mesh, [Shard(0)]),
        "columns": distribute_tensor(full(2), mesh, [Shard(1)]),
    }
    dcp.save(state, storage_writer=dcp.HuggingFaceStorageWriter(folder, save_distributed=distributed))


@pytest.mark.slow
def test_the_shards_of_torchs_own_writer_for_hugging_face_are_put_together(tmp_path):
    spawn(2, save_to_hugging_face, str(tmp_path / "a"), True)
    with milepost.open(tmp_path / "a") as checkpoint:
        assert checkpoint.format == "safetensors"
        assert torch.equal(checkpoint["rows"].read(), full(1))
        assert torch.equal(checkpoint["columns"][2:5, 3:9], full(2)[2:5, 3:9])


def build(seed):
    torch.manual_seed(seed)
    model = torch.nn.Sequential(torch.nn.Linear(16, 24), torch.nn.ReLU(), torch.nn.Linear(24, 16))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fsdp_state(model, optimizer):
    names, states = get_state_dict(model, optimizer)
    return {"model": names, "optim": states}


def gather(value):
    if isinstance(value, dict):
        return {k: gather(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        return value.full_tensor().tolist()
    return value.tolist() if isinstance(value, torch.Tensor) else copy.deepcopy(value)


def save_fsdp(rank, folder):
    model, optimizer = build(0)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    state = fsdp_state(model, optimizer)
    dcp.save(state, checkpoint_id=folder)
    return gather(state)


def load_fsdp(rank, folder):
    model, optimizer = build(1)
    model(torch.ones(2, 16)).sum().backward()
    optimizer.step()
    state = fsdp_state(model, optimizer)
    milepost.load(state, folder)
    return gather(state)


@pytest.mark.slow
def test_fsdp2_models_and_optimizers_go_from_four_ranks_to_two(tmp_path):
    saved_state = spawn(4, save_fsdp, str(tmp_path / "a"))[0]
    for loaded in spawn(2, load_fsdp, str(tmp_path / "a")):
        assert loaded == saved_state


def load_nothing(rank, folder):
    try:
        milepost.load({"w": torch.zeros(3)}, folder, timeout_s=60)
    except milepost.CheckpointError as error:
        return type(error).__name__, str(error)
    finally:
        dist.barrier()
    return None


@pytest.mark.slow
def test_damaged_metadata_raises_on_every_rank(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a")
    (tmp_path / "a" / ".metadata").write_bytes(b"\x80\x04nonsense")
    for kind, text in spawn(2, load_nothing, str(tmp_path / "a")):
        assert kind == "CheckpointDamaged"
        assert ".metadata" in text


class Hostile:
    def __init__(self, canary):
        self.canary = canary

    def __reduce__(self):
        return os.mkdir, (str(self.canary),)


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_metadata_that_names_a_function_is_refused_by_name_and_not_run(tmp_path):
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "a", no_dist=True)
    path = tmp_path / "a" / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    metadata.planner_data = {"w": Hostile(tmp_path / "canary")}
    path.write_bytes(pickle.dumps(metadata))
    with pytest.raises(milepost.UnsafeCheckpoint, match=r"posix\.mkdir"):
        milepost.load({"w": torch.zeros(3)}, tmp_path / "a")
    assert not (tmp_path / "canary").exists()
