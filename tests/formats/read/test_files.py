"""`torch.save` files, and safetensors files alone and as Hugging Face folders, are opened and loaded as they are."""

import collections
import io
import json
import subprocess
import sys
import zipfile

import numpy as np
import pytest
import torch
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
from milepost.core.dtypes import DTYPES
from tests.formats.foreign_states import rich_state, same, zeroed
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore")


class Custom:
    """A class that no reader knows."""


# ---------------------------------------------------------------- torch.save


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_a_rich_state_comes_back_as_it_was(tmp_path, protocol):
    state = rich_state() | {"set": {1, 2}, "complex": 1j, "array": bytearray(b"abc"), "np": np.float32(1.5)}
    state["ordered"] = collections.OrderedDict(b=torch.ones(1), a=2)
    state["default"] = collections.defaultdict(list, {"x": torch.ones(1)})
    state["device"] = torch.device("cpu")
    state["numbered"] = {0: torch.ones(1), "0": torch.zeros(1)}
    torch.save(state, tmp_path / "a.pt", pickle_protocol=protocol)
    with milepost.open(tmp_path / "a.pt") as checkpoint:
        assert checkpoint.format == "torch"
        read = checkpoint.state()
        assert same(state, read)
        assert list(read["numbered"]) == [0, "0"]
        assert read["default"].default_factory is list
        assert checkpoint.verify().ok
    target = zeroed(state)
    milepost.load(target, tmp_path / "a.pt")
    assert same(read["optim"], target["optim"])
    assert same(read["sliced"], target["sliced"])


def test_a_module_and_optimizer_are_loaded_from_their_file(tmp_path):
    model = torch.nn.BatchNorm1d(4)
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    model(torch.randn(3, 4)).sum().backward()
    optimizer.step()
    torch.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, tmp_path / "a.pt")
    fresh = torch.nn.BatchNorm1d(4)
    taker = torch.optim.SGD(fresh.parameters(), momentum=0.9)
    milepost.load({"model": fresh, "optim": taker}, tmp_path / "a.pt")
    assert same(dict(model.state_dict()), dict(fresh.state_dict()))
    assert same(optimizer.state_dict(), taker.state_dict())


def test_all_dtypes(tmp_path):
    names = [name for name in DTYPES if hasattr(torch, name) and name != "float4_e2m1fn_x2"]
    data = torch.arange(48, dtype=torch.uint8)
    state = {name: (data % 2).bool() if name == "bool" else data.view(getattr(torch, name)).clone() for name in names}
    torch.save(state, tmp_path / "a.pt")
    target = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    milepost.load(target, tmp_path / "a.pt")
    for name, tensor in state.items():
        assert torch.equal(tensor.view(torch.uint8), target[name].view(torch.uint8)), name


@pytest.mark.slow
@pytest.mark.parametrize(
    "view",
    [
        lambda t: t.t(),
        lambda t: t[3:, ::7],
        lambda t: t[:, 5],
        lambda t: t.unflatten(0, (60, 50)).permute(2, 0, 1)[::3],
        lambda t: t[:1].expand(500, 700),
        lambda t: torch.view_as_complex(t.view(3000, 350, 2)).conj(),
        lambda t: torch.view_as_complex(t.view(3000, 350, 2)).conj().imag,
        lambda t: t.as_strided((5, 9), (1, 1)),
    ],
)
def test_views_of_every_shape_are_gathered(tmp_path, view):
    whole = torch.arange(3000 * 700, dtype=torch.float32).view(3000, 700)
    torch.save({"a": view(whole), "whole": whole.clone()}, tmp_path / "a.pt")
    with milepost.open(tmp_path / "a.pt") as checkpoint:
        assert torch.equal(checkpoint["a"].read(), view(whole))
        assert torch.equal(checkpoint["a"][1:2], view(whole)[1:2])
        assert torch.equal(checkpoint["whole"].read(), whole)
        assert checkpoint.verify().ok


def test_tied_tensors_parameters_and_bare_tensors(tmp_path):
    weight = torch.nn.Parameter(torch.randn(4))
    torch.save({"a": weight, "b": weight, "c": weight[1:]}, tmp_path / "a.pt")
    assert torch.equal(milepost.open(tmp_path / "a.pt").state()["c"], weight[1:])
    torch.save(weight, tmp_path / "b.pt")
    assert torch.equal(milepost.open(tmp_path / "b.pt")["data"].read(), weight)


def test_pickled_values_are_refused_by_key_without_the_opt_in(tmp_path):
    torch.save({"w": torch.ones(3), "args": Custom(), "deep": [{"x": Custom}]}, tmp_path / "a.pt")
    target = {"w": torch.zeros(3)}
    milepost.load(target, tmp_path / "a.pt", allow_unexpected=True)
    assert torch.equal(target["w"], torch.ones(3))
    with pytest.raises(milepost.UnsupportedFormat, match=r"'args'.*allow_pickle=True"):
        milepost.open(tmp_path / "a.pt")["args"]
    with milepost.open(tmp_path / "a.pt", allow_pickle=True) as checkpoint:
        assert type(checkpoint["args"]) is Custom
        assert checkpoint["deep"] == [{"x": Custom}]


def test_a_file_without_checksums_is_read(tmp_path):
    torch.serialization.set_crc32_options(False)
    try:
        torch.save({"w": torch.ones(3)}, tmp_path / "a.pt")
    finally:
        torch.serialization.set_crc32_options(True)
    assert torch.equal(milepost.open(tmp_path / "a.pt")["w"].read(), torch.ones(3))


@pytest.mark.parametrize("size", [1000, 3_000_000])
def test_a_flipped_byte_is_noticed_by_its_crc(tmp_path, size):
    torch.save({"w": torch.zeros(size), "v": torch.ones(3)}, tmp_path / "a.pt")
    data = bytearray((tmp_path / "a.pt").read_bytes())
    data[len(data) // 2] ^= 1
    (tmp_path / "a.pt").write_bytes(data)
    with pytest.raises(milepost.CheckpointDamaged, match=r"a\.pt.*'w'.*CRC"):
        milepost.load({"w": torch.zeros(size), "v": torch.ones(3)}, tmp_path / "a.pt")
    assert not milepost.open(tmp_path / "a.pt").verify().ok


@pytest.mark.slow
def test_every_truncation_is_an_error_of_ours(tmp_path):
    torch.save({"w": torch.ones(3), "step": 2}, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for length in range(len(data)):
        (tmp_path / "a.pt").write_bytes(data[:length])
        with pytest.raises((milepost.CheckpointDamaged, milepost.UnsupportedFormat)):
            milepost.open(tmp_path / "a.pt")


@pytest.mark.slow
def test_flipped_bytes_end_in_our_errors_or_the_right_data(tmp_path):
    state = {"w": torch.arange(3.0), "step": 2}
    torch.save(state, tmp_path / "a.pt")
    data = (tmp_path / "a.pt").read_bytes()
    for at in range(len(data)):
        changed = bytearray(data)
        changed[at] ^= 0x15
        (tmp_path / "a.pt").write_bytes(changed)
        try:
            with milepost.open(tmp_path / "a.pt") as checkpoint:
                read = checkpoint.state()
        except milepost.CheckpointError:
            continue
        assert same(state, read), at


def test_other_files_are_refused_with_a_hint(tmp_path):
    torch.save({"w": torch.ones(3)}, tmp_path / "old.pt", _use_new_zipfile_serialization=False)
    with pytest.raises(milepost.UnsupportedFormat, match=r"before version 1\.6"):
        milepost.open(tmp_path / "old.pt")
    (tmp_path / "text").write_text("hello")
    with pytest.raises(milepost.UnsupportedFormat, match="neither"):
        milepost.open(tmp_path / "text")
    with zipfile.ZipFile(tmp_path / "a.zip", "w") as archive:
        archive.writestr("x", "y")
    with pytest.raises(milepost.UnsupportedFormat, match=r"data\.pkl"):
        milepost.open(tmp_path / "a.zip")


def load_resharded(rank, path, world):
    mesh = init_device_mesh("cpu", (world,))
    state = {"w": distribute_tensor(torch.zeros(12, 10), mesh, [Shard(1)]), "turned": torch.zeros(10, 12)}
    state["turned"] = distribute_tensor(state["turned"], mesh, [Shard(0)])
    milepost.load(state, path, allow_unexpected=True)
    return state["w"].full_tensor().tolist(), state["turned"].full_tensor().tolist()


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["torch", "safetensors"])
def test_ranks_take_their_parts_of_one_file(tmp_path, kind):
    w = torch.randn(12, 10)
    if kind == "torch":
        torch.save({"w": w, "turned": w.t(), "step": 1}, tmp_path / "a")
    else:
        save_file({"w": w, "turned": w.t().contiguous()}, tmp_path / "a")
    for found in spawn(2, load_resharded, str(tmp_path / "a"), 2):
        assert found == (w.tolist(), w.t().tolist())


# ---------------------------------------------------------------- safetensors


def save_shards(folder, state, shards):
    """As Hugging Face writes them."""
    folder.mkdir()
    weight_map, keys = {}, list(state)
    for i in range(shards):
        name = f"model-{i + 1:05d}-of-{shards:05d}.safetensors"
        part = {key: state[key] for key in keys[i::shards]}
        save_file(part, folder / name, metadata={"format": "pt"})
        weight_map |= dict.fromkeys(part, name)
    index = {"metadata": {"total_size": 1}, "weight_map": weight_map}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    (folder / "config.json").write_text("{}")


def model_and_state():
    model = torch.nn.Sequential(torch.nn.Linear(5, 7), torch.nn.Linear(7, 5))
    return model, {key: tensor.clone() for key, tensor in model.state_dict().items()}


def test_a_folder_of_hugging_face_is_loaded_into_a_model(tmp_path):
    _, state = model_and_state()
    save_shards(tmp_path / "a", state, 3)
    fresh, _ = model_and_state()
    milepost.load(fresh, tmp_path / "a")
    assert same(state, dict(fresh.state_dict()))
    with milepost.open(tmp_path / "a") as checkpoint:
        assert checkpoint.format == "safetensors"
        assert checkpoint.metadata == {"format": "pt"}
        assert sorted(checkpoint) == sorted(state)
        assert checkpoint.verify().ok


def test_one_file_is_loaded_by_its_own_path_and_by_its_folder(tmp_path):
    _, state = model_and_state()
    (tmp_path / "a").mkdir()
    save_file(state, tmp_path / "a" / "weights.safetensors")
    for place in (tmp_path / "a", tmp_path / "a" / "weights.safetensors"):
        read = milepost.open(place).state()
        assert sorted(read) == sorted(state)
        assert all(torch.equal(read[k], state[k]) for k in state)


def test_model_file_comes_first_and_duplicate_keys_are_refused(tmp_path):
    save_file({"w": torch.ones(3)}, tmp_path / "a.safetensors")
    save_file({"w": torch.zeros(3)}, tmp_path / "b.safetensors")
    with pytest.raises(milepost.CheckpointDamaged, match="'w' stands in several files"):
        milepost.open(tmp_path)
    save_file({"w": torch.full((3,), 5.0)}, tmp_path / "model.safetensors")
    assert torch.equal(milepost.open(tmp_path)["w"].read(), torch.full((3,), 5.0))


def test_the_links_of_hugging_faces_cache_are_followed_and_no_others(tmp_path):
    _, state = model_and_state()
    (tmp_path / "blobs").mkdir()
    folder = tmp_path / "snapshots" / "abc"
    folder.mkdir(parents=True)
    save_file(state, tmp_path / "blobs" / "f00")
    save_file(state, tmp_path / "outside")
    (folder / "model.safetensors").symlink_to("../../blobs/f00")
    assert sorted(milepost.open(folder).state()) == sorted(state)
    (folder / "model.safetensors").unlink()
    (folder / "model.safetensors").symlink_to("../../outside")
    with pytest.raises(milepost.UnsafeCheckpoint):
        milepost.open(folder)


def test_safetensors_of_every_dtype_and_any_alignment(tmp_path):
    names = ["bool", "uint8", "int8", "int16", "int32", "int64", "float16", "bfloat16", "float32", "float64"]
    names += ["uint16", "uint32", "uint64", "float8_e4m3fn", "float8_e5m2", "complex64"]
    data = torch.arange(48, dtype=torch.uint8)
    state = {name: (data % 2).bool() if name == "bool" else data.view(getattr(torch, name)).clone() for name in names}
    state |= {"scalar": torch.tensor(1.5), "empty": torch.empty(0, 3)}
    save_file(state, tmp_path / "a.safetensors")
    raw = (tmp_path / "a.safetensors").read_bytes()
    length = int.from_bytes(raw[:8], "little")
    for pad in (0, 1, 3):  # other writers do not align the data
        text = (length + pad).to_bytes(8, "little") + raw[8 : 8 + length] + b" " * pad + raw[8 + length :]
        (tmp_path / "b.safetensors").write_bytes(text)
        target = {k: torch.zeros(2, *t.shape, dtype=t.dtype)[0] for k, t in state.items()}
        milepost.load(target, tmp_path / "b.safetensors")
        for name in names:
            assert torch.equal(state[name].view(torch.uint8), target[name].view(torch.uint8)), name


def header(change):
    def make(folder):
        save_file({"w": torch.ones(4)}, folder / "model.safetensors")
        raw = (folder / "model.safetensors").read_bytes()
        length = int.from_bytes(raw[:8], "little")
        record = json.loads(raw[8 : 8 + length])
        text = json.dumps(change(record)).encode()
        (folder / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + raw[8 + length :])

    return make


@pytest.mark.parametrize(
    "make",
    [
        header(lambda r: {"w": {**r["w"], "data_offsets": [0, 1 << 40]}}),
        header(lambda r: {"w": {**r["w"], "data_offsets": [-8, 8]}}),
        header(lambda r: {"w": {**r["w"], "shape": [1 << 62, 1 << 62]}}),
        header(lambda r: {"w": {**r["w"], "shape": [-4]}}),
        header(lambda r: {"w": {**r["w"], "dtype": "X9"}}),
        header(lambda r: {f"w{i}": r["w"] for i in range(1000)}),
        header(lambda r: [1]),
        lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 100),
        lambda folder: (folder / "model.safetensors").write_bytes(b""),
        lambda folder: (folder / "model.safetensors.index.json").write_text(
            '{"weight_map": {"a": "../x.safetensors"}}'
        ),
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "/etc/passwd"}}'),
        lambda folder: (folder / "model.safetensors.index.json").write_text('{"weight_map": {"a": "b.safetensors"}}'),
        lambda folder: (folder / "model.safetensors.index.json").write_text("[" * 100_000),
        lambda folder: (folder / "model.safetensors").symlink_to("/etc/passwd"),
    ],
)
def test_damaged_and_hostile_safetensors_are_refused(tmp_path, make):
    make(tmp_path)
    with pytest.raises(milepost.CheckpointError):
        milepost.open(tmp_path).state()


def test_nothing_known_is_still_not_found(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for place in (tmp_path, tmp_path / "none", "memory://formats-none"):
        with pytest.raises(milepost.CheckpointNotFound):
            milepost.open(place)
        with pytest.raises(milepost.CheckpointNotFound):
            milepost.load({"a": 1}, place)


def test_a_checkpoint_of_ours_goes_first_and_opens_without_torch(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    milepost.save({"w": torch.zeros(4)}, tmp_path)
    code = f"import sys, milepost; c = milepost.open({str(tmp_path)!r}); assert c.format == 'milepost'; "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


def test_safetensors_are_listed_without_torch(tmp_path):
    save_file({"w": torch.ones(4)}, tmp_path / "model.safetensors")
    code = f"import sys, milepost; c = milepost.open({str(tmp_path)!r}); assert c['w'].shape == (4,); "
    subprocess.run([sys.executable, "-c", code + "assert 'torch' not in sys.modules"], check=True, timeout=60)


def test_a_store_in_memory_holds_other_formats_too():
    buffer = io.BytesIO()
    torch.save({"w": torch.ones(3)}, buffer)
    store = milepost.store.MemoryStore()
    from safetensors.torch import save

    store.create("model.safetensors", save({"w": torch.ones(3)}))
    assert torch.equal(milepost.open(store)["w"].read(), torch.ones(3))
