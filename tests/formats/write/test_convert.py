"""Conversions: one process or several ranks, within a budget, whole or not at all."""

import json
import os
import subprocess
import sys
import time
import warnings
import zipfile
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import milepost
from milepost.formats.write import files
from milepost.store import local
from tests import ranks
from tests.formats.write.test_huggingface import HELD, read_folder
from tests.formats.write.test_torchfile import random_bits, same, training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
MIB = 1 << 20
FORMATS = ["milepost", "dcp", "torch", "safetensors"]


def files_in(folder):
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


def read_back(place, to):
    """The flat tensors of a target, by the format's own reader."""
    if to == "milepost":
        checkpoint = milepost.open(place)
        assert checkpoint.verify().ok
        return {key: lazy.read() for key, lazy in checkpoint.tensors.items()}
    if to == "torch":
        with zipfile.ZipFile(place) as archive:
            assert archive.testzip() is None
        return torch.load(place, weights_only=True)
    if to == "safetensors":
        return read_folder(place)
    metadata = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    target = {k: torch.empty(m.size, dtype=m.properties.dtype) for k, m in metadata.items()}
    dcp.load(target, checkpoint_id=place, no_dist=True)
    return target


def flat_state(count=40):
    torch.manual_seed(2)
    state = {f"w{i:02}": torch.randn(i * 700 + 3, 11) for i in range(count)}
    return state | {"scalar": torch.tensor(4), "empty": torch.empty(0, 2), "large": torch.randn(1_500_001)}


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


# ---------------------------------------------------------------- what goes wrong


def damage(folder, fraction=2):
    (path,) = folder.glob("data/*/*")
    with path.open("r+b") as file:
        file.seek(path.stat().st_size // fraction)
        byte = file.read(1)
        file.seek(-1, os.SEEK_CUR)
        file.write(bytes([byte[0] ^ 1]))


@pytest.mark.parametrize("to", FORMATS)
def test_a_damaged_source_is_named_and_nothing_is_made(tmp_path, to):
    milepost.save(flat_state(), tmp_path / "source")
    damage(tmp_path / "source")
    with pytest.raises(milepost.CheckpointDamaged, match="not what was saved"):
        milepost.convert(tmp_path / "source", tmp_path / "out", to)
    assert not [p for p in (tmp_path / "out").rglob("*") if p.is_file()]
    if to != "milepost":
        assert [p.name for p in tmp_path.iterdir()] == ["source"]


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_a_failed_replacement_leaves_the_old_one(tmp_path, to):
    milepost.save({"old": torch.ones(3)}, tmp_path / "one")
    milepost.convert(tmp_path / "one", tmp_path / "to" / "out", to)
    before = files_in(tmp_path / "to")
    milepost.save(flat_state(), tmp_path / "two")
    damage(tmp_path / "two")
    with pytest.raises(milepost.CheckpointDamaged):
        milepost.convert(tmp_path / "two", tmp_path / "to" / "out", to, overwrite=True)
    assert files_in(tmp_path / "to") == before


def damaged_on_ranks(rank, source, target, to):
    try:
        milepost.convert(source, target, to)
    except milepost.CheckpointDamaged as error:
        return str(error)


@pytest.mark.parametrize("to", ["torch", "milepost"])
def test_damage_that_one_rank_meets_is_raised_on_all(tmp_path, to):
    milepost.save(flat_state(), tmp_path / "source")
    damage(tmp_path / "source", 10)
    one, two = ranks.spawn(2, damaged_on_ranks, tmp_path / "source", tmp_path / "out", to)
    assert all("not what was saved" in text for text in (one, two))
    assert not [p for p in tmp_path.glob("out*/**/*") if p.is_file()]
    assert not (tmp_path / "out").is_file()


FULL = """
import resource, sys, torch, milepost
milepost.save({"a": torch.ones(3_000_000)}, "source")
resource.setrlimit(resource.RLIMIT_FSIZE, (2_000_000, 2_000_000))
for to in ("dcp", "torch", "safetensors", "milepost"):
    try:
        milepost.convert("source", "out-" + to, to)
    except milepost.StorageError as error:
        print(to, error)
"""


def test_a_disk_that_is_full_is_told_and_nothing_is_made(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["dcp", "torch", "safetensors", "milepost"]
    assert all("cannot make room for" in line for line in lines), lines
    assert not [p for p in tmp_path.glob("out*/**/*") if p.is_file()]
    assert not (tmp_path / "out-torch").exists()


@pytest.mark.parametrize("to", ["dcp", "safetensors"])
def test_whatever_fails_while_files_get_their_names_nothing_looks_whole(tmp_path, to, monkeypatch):
    milepost.save(flat_state(5), tmp_path / "source")
    marker = {"dcp": ".metadata", "safetensors": "model.safetensors.index.json"}[to]
    done = []

    def rename(old, new):
        done.append(new)
        if len(done) == 2:
            raise OSError(5, "the disk is gone")
        os.replace(old, new)

    monkeypatch.setattr(files.os, "rename", rename)
    out = tmp_path / "out"
    with pytest.raises(milepost.StorageError, match="in place"):
        milepost.convert(tmp_path / "source", out, to, max_shard_bytes=100_000)
    assert not (out / marker).exists()
    monkeypatch.undo()
    milepost.convert(tmp_path / "source", out, to, max_shard_bytes=100_000, overwrite=True)
    same(dict(sorted(read_back(out, to).items())), dict(sorted(flat_state(5).items())))


def test_every_file_is_synced_before_it_has_its_name(tmp_path, monkeypatch):
    milepost.save(flat_state(5), tmp_path / "source")
    events = []
    real_rename, real_commit = os.rename, local.LocalWriter.commit

    def commit(writer):
        events.append(("sync", writer._path.name))
        real_commit(writer)

    def rename(old, new):
        events.append(("name", old.name))
        real_rename(old, new)

    monkeypatch.setattr(local.LocalWriter, "commit", commit)
    monkeypatch.setattr(files.os, "rename", rename)
    milepost.convert(tmp_path / "source", tmp_path / "out", "dcp")
    named = [name for what, name in events if what == "name"]
    assert "metadata" in named[-1]
    for name in named:
        assert events.index(("sync", name)) < events.index(("name", name))
    assert all(what == "name" for what, _ in events[-len(named) :])


def absent_on_one_rank(rank, source, target):
    if rank == 1:
        source = source.with_name("elsewhere")
    try:
        milepost.convert(source, target, "torch", timeout_s=60)
    except milepost.CheckpointError as error:
        return type(error).__name__


def test_a_source_that_one_rank_does_not_see_is_an_error_on_all(tmp_path):
    milepost.save(flat_state(2), tmp_path / "source")
    assert ranks.spawn(2, absent_on_one_rank, tmp_path / "source", tmp_path / "a.pt") == ["CheckpointNotFound"] * 2


# ---------------------------------------------------------------- the budget, and progress

BUDGET = """
import sys, torch, milepost
torch.set_num_threads(1)
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
for to in ("milepost", "dcp", "torch", "safetensors"):
    milepost.convert("small", "warm-" + to, to)  # imports, and what allocators keep
for to in ("milepost", "dcp", "torch", "safetensors"):
    for direct in (True, False):
        open("/proc/self/clear_refs", "w").write("5")
        before = peak()
        milepost.convert("source", "out-" + to, to, overwrite=True, host_memory_bytes=16 << 20,
                         transfer=milepost.Transfer(direct=direct))
        print(to, round(peak() - before, 2))
"""


def test_a_tensor_of_256_mb_is_converted_with_16_mib(tmp_path):
    large = torch.arange(64_000_000, dtype=torch.float32).view(8000, 8000)
    milepost.save({"t": large}, tmp_path / "source")
    milepost.save({"t": torch.ones(500_000)}, tmp_path / "small")
    done = subprocess.run(
        [sys.executable, "-c", BUDGET], cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    grown = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(grown) == 8
    assert max(grown) < 16 + 6, done.stdout
    for to in FORMATS:
        assert torch.equal(read_back(tmp_path / f"out-{to}", to)["t"], large)


FROM_TORCH = """
import torch, milepost
torch.set_num_threads(1)
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) / 1024
milepost.convert("small.pt", "warm", "safetensors")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
milepost.convert("large.pt", "out", "safetensors", host_memory_bytes=16 << 20)
print(round(peak() - before, 2))
"""


def test_the_budget_holds_for_files_of_torch(tmp_path):
    large = torch.arange(64_000_000, dtype=torch.float32).view(8000, 8000)
    torch.save({"t": large}, tmp_path / "large.pt")
    torch.save({"t": torch.ones(500_000)}, tmp_path / "small.pt")
    done = subprocess.run(
        [sys.executable, "-c", FROM_TORCH], cwd=tmp_path, capture_output=True, text=True, timeout=150,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert float(done.stdout) < 16 + 6
    assert torch.equal(read_folder(tmp_path / "out")["t"], large)


@pytest.mark.parametrize("to", FORMATS)
def test_a_conversion_that_is_killed_leaves_nothing_that_looks_whole(tmp_path, to):
    milepost.save({f"t{i}": torch.full((4_000_000,), float(i)) for i in range(12)}, tmp_path / "source")
    program = f"import milepost; milepost.convert('source', 'out', {to!r}, max_shard_bytes=40_000_000)"
    process = subprocess.Popen([sys.executable, "-c", program], cwd=tmp_path)
    try:
        deadline = time.monotonic() + 60
        pattern = "out/data/*/*" if to == "milepost" else ".out*.tmp" if to == "torch" else "out/.*.tmp"
        while not any(tmp_path.glob(pattern)) and process.poll() is None and time.monotonic() < deadline:
            time.sleep(0.001)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == -9, "it was too fast for this test"
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(tmp_path / "out")
    milepost.convert(tmp_path / "source", tmp_path / "out", to, max_shard_bytes=40_000_000, overwrite=True)
    found = read_back(tmp_path / "out", to)
    assert all(torch.equal(found[f"t{i}"], torch.full((4_000_000,), float(i))) for i in range(12))
    assert not list(tmp_path.rglob("*.tmp"))


def test_progress_is_told(tmp_path):
    milepost.save(flat_state(), tmp_path / "source")
    seen = []
    milepost.convert(tmp_path / "source", tmp_path / "out", "safetensors", progress=seen.append)
    assert seen[-1].finished
    assert seen[-1].total_bytes >= 1_500_001 * 4


@pytest.mark.slow
def test_a_small_run_of_the_benchmark_gives_rows_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    small = [
        "--quick",
        "--size-mb",
        "8",
        "--tensors",
        "50",
        "--rounds",
        "1",
        "--dir",
        str(work),
        "--json",
        str(results),
    ]
    benchmark = Path(__file__).parents[3] / "benchmarks" / "convert.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(benchmark), *small], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How fast a checkpoint is converted")
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) == 26
