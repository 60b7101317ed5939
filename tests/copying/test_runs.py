"""A run is copied step by step, oldest first: cut short it is a run, and the same call goes on."""

import multiprocessing as mp
import os
import random
import shutil
import time

import pytest
import torch

import milepost
from milepost.cli.app import main
from milepost.copying.checkpoint_copy import CopyOptions
from milepost.copying.copy import copy_place
from milepost.copying.run_copy import ChosenSteps
from milepost.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, UnsafeCheckpoint
from milepost.inspection.runs import look_at
from milepost.steps.shelf import step_name
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, CrashingStore
from tests.commit.object_places import objects
from tests.steps.numbered import files_of, flip, holds, state


def make_run(root, steps, wide=0):
    with milepost.Checkpointer(root) as keeper:
        for step in steps:
            further = {"wide": torch.full((wide,), float(step))} if wide else {}
            keeper.save(state(step) | further, step, metrics={"loss": 1 / (step + 1)})
    return root


def states(done):
    return {step.step: step.state for step in done.steps}


def steps_in(place):
    """The steps that are whole, each read and compared."""
    with milepost.Checkpointer(place) as keeper:
        found = keeper.steps()
    for step in found:
        with milepost.open(Within(place, step_name(step))) as checkpoint:
            assert checkpoint.verify().ok
            read = checkpoint.state()
            assert holds({key: read[key] for key in ("a", "b", "n")}, step)
    return found


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_run_is_copied_and_trains_on(tmp_path, store_of):
    make_run(tmp_path, [1, 2, 30])
    target = store_of()
    done = milepost.copy(tmp_path, target)
    assert (done.kind, states(done)) == ("run", dict.fromkeys((1, 2, 30), "copied"))
    assert steps_in(target) == [1, 2, 30]
    mine, theirs = look_at(tmp_path), look_at(target)
    for a, b in zip(mine.steps, theirs.steps, strict=True):
        assert (a.metrics, a.created, a.ranks, a.data_bytes) == (b.metrics, b.created, b.ranks, b.data_bytes)
    with milepost.Checkpointer(target, keep_last=2) as keeper:
        assert keeper.restore(state(0)) == 30
        keeper.save(state(31), 31)
        assert keeper.steps() == [30, 31]


def test_same_call_copies_what_is_new_and_what_was_cut_short(tmp_path):
    make_run(tmp_path / "a", range(4))
    target = MemoryStore()
    counting = CountingStore(target)
    milepost.copy(tmp_path / "a", counting)
    seen = set()
    for at in range(1, counting.calls, 3):
        target = MemoryStore()
        with pytest.raises(Crash):
            milepost.copy(tmp_path / "a", CrashingStore(target, at))
        found = steps_in(target)
        assert found == list(range(len(found))), "the oldest first"
        seen.add(len(found))
        again = milepost.copy(tmp_path / "a", target)
        assert states(again) == {step: "there" if step in found else "copied" for step in range(4)}
        assert steps_in(target) == [0, 1, 2, 3]
        saves = {milepost.open(Within(target, step_name(step))).manifest.save_id for step in range(4)}
        assert all(name.split("/")[2] in saves for name in target.objects if "/data/" in name), "leftovers are swept"
    assert seen >= {0, 1, 2, 3}


def test_only_the_chosen_steps_are_copied(tmp_path):
    make_run(tmp_path, [1, 2, 30, 40])
    chosen = [({"steps": [2, 40]}, [2, 40]), ({"newest": True}, [40]), ({"steps": range(1, 3)}, [1, 2])]
    for options, expected in chosen:
        target = MemoryStore()
        milepost.copy(tmp_path, target, **options)
        assert steps_in(target) == expected
    ranges = ChosenSteps((range(2, 31), range(40, 10**10)))
    assert states(copy_place(LocalStore(tmp_path), MemoryStore(), ranges, CopyOptions())) == dict.fromkeys(
        (2, 30, 40), "copied"
    )
    with pytest.raises(CheckpointNotFound, match="has no step 3, 5"):
        milepost.copy(tmp_path, MemoryStore(), steps=[2, 3, 5])
    with pytest.raises(InvalidRequest, match="steps are whole numbers"):
        milepost.copy(tmp_path, MemoryStore(), steps=[-1])


def test_damaged_step_is_left_out_and_told(tmp_path):
    make_run(tmp_path, [1, 2, 3, 4])
    flip(files_of(tmp_path, 2)[0])
    files_of(tmp_path, 3)[0].unlink()
    target = MemoryStore()
    with pytest.raises(
        CheckpointDamaged, match=r"(?s)2 of 4 steps.*step-0000000002: .*'a'.*step-0000000003: .*missing"
    ):
        milepost.copy(tmp_path, target)
    assert steps_in(target) == [1, 4]
    assert not [name for name in target.objects if "0002/" in name or "0003/" in name]


def test_progress_is_told_over_all_steps(tmp_path):
    make_run(tmp_path, [1, 2], wide=1000)
    told = []
    milepost.copy(tmp_path, MemoryStore("memory://told"), progress=told.append)
    assert (told[-1].action, told[-1].url, told[-1].finished) == ("copy", "memory://told", True)
    assert told[-1].total_bytes == sum(step.data_bytes for step in look_at(tmp_path).steps)
    target = MemoryStore()
    milepost.copy(tmp_path, target)
    told.clear()
    milepost.copy(tmp_path, target, progress=told.append)
    assert told == [], "nothing was left to copy"


def test_steps_that_were_never_finished_stay_behind(tmp_path):
    make_run(tmp_path, [1, 2, 3])
    (tmp_path / step_name(3) / "manifest-00000001.json").unlink()
    target = MemoryStore()
    assert states(milepost.copy(tmp_path, target)) == {1: "copied", 2: "copied", 3: "unfinished"}
    assert steps_in(target) == [1, 2]


def test_step_that_retention_removes_meanwhile_is_no_error(tmp_path):
    make_run(tmp_path, [1, 2, 3])
    inner = MemoryStore()

    class Prunes(CountingStore):
        def after(self, number, call):
            if call == f"create {step_name(1)}/manifest-00000001.json":
                with milepost.Checkpointer(tmp_path, keep_last=1) as keeper:
                    keeper.save(state(4), 4)

    done = milepost.copy(tmp_path, Prunes(inner))
    assert states(done) == {1: "copied", 2: "removed", 3: "removed"}
    assert steps_in(inner) == [1]


class Removes(CountingStore):
    """A target whose source loses these steps, each as soon as the target was asked about it."""

    def __init__(self, inner, source, steps):
        super().__init__(inner)
        self.source, self.steps = source, steps

    def after(self, number, call):
        for step in self.steps:
            if step_name(step) in call:
                shutil.rmtree(self.source / step_name(step), ignore_errors=True)


def test_newest_step_that_is_removed_makes_place_for_the_next(tmp_path):
    make_run(tmp_path, [1, 2, 3])
    done = milepost.copy(tmp_path, Removes(MemoryStore(), tmp_path, [2, 3]), newest=True)
    assert states(done) == {1: "copied"}


def test_nothing_copied_because_all_was_removed_is_told(tmp_path):
    make_run(tmp_path, [1, 2])
    target = MemoryStore()
    with pytest.raises(CheckpointNotFound, match=r"2 of 2 steps .* were not copied, 0 were:\n  .*1: it was removed b"):
        milepost.copy(tmp_path, Removes(target, tmp_path, [1, 2]))
    assert not target.objects
    make_run(tmp_path, [1, 2, 3])
    with pytest.raises(CheckpointNotFound, match=r"1 of 3 steps .* were not copied, 2 were"):
        milepost.copy(tmp_path, Removes(target, tmp_path, [2]), steps=[1, 2, 3])
    assert steps_in(target) == [1, 3]


def test_other_checkpoints_are_replaced_only_if_asked(tmp_path):
    make_run(tmp_path / "a", [1, 2])
    make_run(tmp_path / "b", [2], wide=3)
    with pytest.raises(InvalidRequest, match=r"other checkpoints under the names step-0000000002.*Nothing was copied"):
        milepost.copy(tmp_path / "a", tmp_path / "b")
    assert steps_in(LocalStore(tmp_path / "b")) == [2]
    milepost.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert steps_in(LocalStore(tmp_path / "b")) == [1, 2]
    assert "wide" not in milepost.open(tmp_path / "b" / step_name(2))


def test_steps_of_other_formats_are_refused_unless_left_out(tmp_path):
    make_run(tmp_path, [1])
    torch.save(state(2), tmp_path / "checkpoint-2.pt")
    with pytest.raises(InvalidRequest, match=r"checkpoint-2\.pt .*torch.* which a copy does not change. Convert"):
        milepost.copy(tmp_path, MemoryStore())
    assert states(milepost.copy(tmp_path, MemoryStore(), newest=True)) == {1: "copied"}
    assert states(milepost.copy(tmp_path, MemoryStore(), steps=[1])) == {1: "copied"}


@pytest.mark.parametrize("name", ["..", "../..", "/etc", "a\\b"])
def test_step_with_a_name_that_leads_out_is_never_copied(tmp_path, name):
    source = MemoryStore()
    make_run(source, [1])
    for one, data in list(source.objects.items()):
        source.objects[one.replace(step_name(1), f"{name}/out")] = data
        source.objects[one.replace(step_name(1), name)] = data
    with pytest.raises(UnsafeCheckpoint):
        milepost.copy(source, tmp_path / "a" / "b")
    assert list(tmp_path.rglob("*")) == []


def test_dry_run_says_what_would_be_copied_and_writes_nothing(tmp_path):
    make_run(tmp_path / "a", [1, 2])
    milepost.copy(tmp_path / "a", tmp_path / "b", steps=[1])
    before = sorted(tmp_path.rglob("*"))
    told = copy_place(
        LocalStore(tmp_path / "a"), LocalStore(tmp_path / "b"), ChosenSteps(), CopyOptions(), dry_run=True
    )
    assert states(told) == {1: "there", 2: "planned"}
    assert sorted(tmp_path.rglob("*")) == before


def run_command(arguments, out):
    """The target of a forked process."""
    os.dup2(os.open(out, os.O_WRONLY | os.O_CREAT), 1)
    os._exit(main(arguments))


def kill_copies(folder, trials, seed):
    """Start `milepost cp`, kill it at a random moment, look, and copy again. Gives how many steps were there."""
    chance, context = random.Random(seed), mp.get_context("forkserver")
    context.set_forkserver_preload(["tests.copying.test_runs"])
    make_run(folder / "a", range(5), wide=1 << 19)
    seen = []
    for trial in range(trials):
        target = folder / f"b{trial}"
        command = (["cp", str(folder / "a"), str(target)], folder / "out")
        process = context.Process(target=run_command, args=command, daemon=True)
        process.start()
        deadline = time.monotonic() + 60
        # Also where all is slow, some are killed early and some late.
        while len(steps_in(LocalStore(target))) < trial % 5 and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        while not target.exists() and process.is_alive() and time.monotonic() < deadline:
            time.sleep(0.001)
        time.sleep(chance.uniform(0, 0.05))
        process.kill()
        process.join()
        found = steps_in(LocalStore(target))
        assert found == list(range(len(found))), "the oldest first"
        told = {step.state for step in look_at(target).steps}
        assert told <= {"whole", "unfinished"}
        assert main(command[0]) == 0
        assert steps_in(LocalStore(target)) == list(range(5))
        for step in range(5):
            files = list((target / step_name(step) / "data").glob("*/*"))
            assert len({file.parent for file in files}) == 1, "leftovers are swept"
        seen.append(len(found))
    return seen


def test_killed_cp_leaves_whole_steps_and_goes_on(tmp_path):
    kill_copies(tmp_path, 2, seed=3)


@pytest.mark.slow
def test_cp_killed_at_many_moments_leaves_whole_steps(tmp_path):
    seen = kill_copies(tmp_path, 25, seed=4)
    assert len(set(seen)) > 2, "some were killed early, and some late"
