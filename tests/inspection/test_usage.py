"""What steps that share data take: told by the manifests, and true on the disk."""

import shutil

import pytest
import torch

import milepost
from milepost.core.limits import KIB
from milepost.inspection.diff import diff
from milepost.inspection.pruning import plan_pruning, prune
from milepost.inspection.runs import look_at
from milepost.steps.retention import Rule
from milepost.steps.shelf import step_name
from milepost.store import MemoryStore, Traits

WIDTH = 1 << 18


def state_of(step):
    """A tensor that never changes, and one that always does."""
    return {"frozen": torch.arange(float(WIDTH)), "adapter": torch.full((1000,), float(step)), "step": step}


@pytest.fixture
def run(tmp_path):
    with milepost.Checkpointer(tmp_path / "run", incremental=True) as keeper:
        for step in (1, 2, 3, 4):
            keeper.save(state_of(step), step)
    return tmp_path / "run"


def on_disk(folder):
    """What all files take, each once however many names it has."""
    files = {(one.stat().st_dev, one.stat().st_ino): one.stat().st_size for one in folder.rglob("*") if one.is_file()}
    return sum(files.values())


def test_run_takes_what_its_files_take(run):
    found = look_at(run)
    assert found.file_bytes == on_disk(run)
    for step in found.steps:
        assert step.file_bytes == on_disk(run / step.name)
        assert step.data_bytes == WIDTH * 4 + 4000
        assert step.new_bytes == (step.data_bytes if step.step == 1 else 4000)
        assert step.new_file_bytes < step.file_bytes or step.step == 1
    assert found.steps[0].new_file_bytes == found.steps[0].file_bytes
    assert found.file_bytes == sum(step.new_file_bytes for step in found.steps)


def test_data_of_a_removed_step_counts_once(run):
    shutil.rmtree(run / step_name(1))
    found = look_at(run)
    assert found.file_bytes == on_disk(run) > sum(step.new_file_bytes for step in found.steps) + WIDTH * 4
    assert look_at(run / step_name(3)).file_bytes == on_disk(run / step_name(3))


@pytest.mark.parametrize("last", [1, 2, 3])
def test_prune_frees_what_it_says(run, last):
    before, rule = on_disk(run), Rule(keep_last=last)
    planned = plan_pruning(run, rule)
    assert on_disk(run) == before
    done = prune(run, rule, planned)
    assert done.freed_bytes == planned.pruning.freed_bytes == before - on_disk(run)
    assert done.shared_bytes == planned.pruning.shared_bytes > WIDTH * 4
    assert look_at(run).file_bytes == on_disk(run)


@pytest.mark.parametrize("copy", [milepost.copy, shutil.copytree])
def test_prune_of_a_copied_run_frees_what_it_says(run, tmp_path, copy):
    """Steps that were copied hold the data by themselves."""
    copy(run, tmp_path / "copy")
    assert look_at(tmp_path / "copy").file_bytes == on_disk(tmp_path / "copy") > on_disk(run) + 3 * WIDTH * 4
    before = on_disk(tmp_path / "copy")
    done = prune(tmp_path / "copy", Rule(keep_last=1))
    assert (done.freed_bytes, done.shared_bytes) == (before - on_disk(tmp_path / "copy"), 0)


def test_copied_run_in_an_object_store_shares_nothing(run):
    store = MemoryStore(traits=Traits(is_current=True, part_bytes=1 << 20, requests=4))
    milepost.copy(run, store)
    found = look_at(store)
    assert found.file_bytes == sum(step.file_bytes for step in found.steps) > 4 * WIDTH * 4
    assert plan_pruning(store, Rule(keep_last=1)).pruning.shared_bytes == 0


def test_prune_of_plain_steps_shares_nothing(tmp_path):
    with milepost.Checkpointer(tmp_path) as keeper:
        for step in (1, 2):
            keeper.save(state_of(step), step)
    planned = plan_pruning(tmp_path, Rule(keep_last=1)).pruning
    assert planned.shared_bytes == 0
    assert planned.freed_bytes == look_at(tmp_path).steps[0].file_bytes


def test_shared_data_is_not_compared(run, monkeypatch):
    """Also where it is damaged: nothing of it is looked at. The table of the file that holds it is read once."""
    [first] = (run / step_name(1)).rglob("*.safetensors")
    size = first.stat().st_size
    with first.open("r+b") as file:  # it is one file, under four names
        file.seek(size // 2)
        file.write(bytes(64 * KIB))
    found = diff(run / step_name(1), run / step_name(4))
    assert [tensor.key for tensor in found.tensors] == ["adapter"]
    assert found.bytes_read < 300 * KIB, "manifests, headers, tables, and blocks that the adapter shares"
    later = diff(run / step_name(2), run / step_name(4))
    assert [tensor.key for tensor in later.tensors] == ["adapter"]
    assert later.bytes_read < 64 * KIB, "the old file is not even opened"
    for name in (run / step_name(2)).rglob("*-*-*-*.safetensors"):
        name.unlink()
    assert diff(run / step_name(2), run / step_name(4)).bytes_read == later.bytes_read
