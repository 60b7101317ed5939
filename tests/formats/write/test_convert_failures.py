"""Conversions that fail: whole or not at all, within the budget, and every rank raises."""

import os
import subprocess
import sys
import time

import pytest
import torch

import milepost
from milepost.formats.write import files
from milepost.store import local
from milepost.testing import CountingStore
from tests import ranks
from tests.formats.write.conversions import FORMATS, files_in, flat_state, read_back, read_folder, same

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


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


class Unreadable(CountingStore):
    """A store whose calls of one kind fail as the system fails them."""

    def __init__(self, inner, word):
        super().__init__(inner)
        self.word = word

    def before(self, number, call):
        if self.word in call:
            raise OSError(5, "Input/output error")


@pytest.mark.parametrize("to", FORMATS)
@pytest.mark.parametrize("word", ["list", "reader manifest", "reader data"])
def test_a_source_that_cannot_be_read_is_named_and_not_the_target(tmp_path, to, word):
    source = milepost.store.MemoryStore()
    milepost.save(flat_state(), source)
    with pytest.raises(milepost.StorageError, match=rf"cannot read {source.url}.*Input/output error") as caught:
        milepost.convert(Unreadable(source, word), tmp_path / "out", to)
    assert caught.value.errno == 5
    assert "cannot write" not in str(caught.value)
    milepost.convert(source, tmp_path / "out", to)


def damaged_on_ranks(rank, source, target, to):
    try:
        milepost.convert(source, target, to)
    except milepost.CheckpointDamaged as error:
        return str(error)


@pytest.mark.slow
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


@pytest.mark.slow
def test_a_disk_that_is_full_is_told_and_nothing_is_made(tmp_path):
    done = subprocess.run([sys.executable, "-c", FULL], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert [line.split()[0] for line in lines] == ["dcp", "torch", "safetensors", "milepost"]
    assert all("cannot make room for" in line and "ulimit -f" in line for line in lines), lines
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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
