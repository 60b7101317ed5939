"""Steps in an object store: few requests, none for data; removals that stay marked; requests that come late."""

import pytest
import torch

import milepost
from milepost import Checkpointer
from milepost.commit.find import REMOVED
from milepost.core.manifest import manifest_name
from milepost.steps import shelf
from milepost.steps.shelf import step_name
from milepost.store import Within
from milepost.testing import LateStore
from tests.commit.object_places import FoldersStay, RequestStore, objects
from tests.steps.numbered import holds, state


def thousand(store, steps=1000):
    """A thousand steps, each with many data objects: copies of one."""
    milepost.save(state(7), Within(store, "one"))
    one = {name: data for name, data in store.objects.items() if name.startswith("one/")}
    data = next(name for name in one if "/data/" in name)
    one |= {f"{data}-{number:05d}": b"" for number in range(5)}
    for step in range(1, steps + 1):
        store.objects |= {name.replace("one", step_name(step), 1): content for name, content in one.items()}
    for name in one:
        store.objects.pop(name, None)


def test_newest_of_a_thousand_steps_takes_few_requests():
    inner = objects()
    thousand(inner)
    inner.create(f"{step_name(2000)}/data/00000001-0123456789abcdef/00000.safetensors", b"dead")
    store = RequestStore(inner)
    keeper = Checkpointer(store)
    assert keeper.latest() == 1000
    assert len(store.taken()) <= 5
    assert keeper.open().generation == 1
    assert len(store.taken()) <= 7
    assert keeper.restore(target := state(0)) == 1000
    requests = store.taken()
    assert holds(target, 7)
    assert len([one for one in requests if "/data/" not in one]) <= 7
    assert not [one for one in requests if one.startswith("list") and "/data/" in one]
    inner.delete(*inner.list(step_name(2000)))
    assert Checkpointer(store).restore(state(0)) == 1000
    assert len([one for one in store.taken() if "/data/" not in one]) <= 5
    assert Checkpointer(store).restore(state(0), step=500) == 500
    assert len([one for one in store.taken() if "/data/" not in one]) <= 5
    assert len(keeper.steps()) == 1000
    assert len(store.taken()) <= 1003


def test_save_beside_many_steps_asks_for_none_twice():
    inner = objects()
    thousand(inner, 200)
    store = RequestStore(inner)
    keeper = Checkpointer(store, keep_last=1000, keep_best=3, best="loss")
    for step, most in ((201, 450), (202, 9), (203, 9)):
        store.taken()
        keeper.save(state(step), step, metrics={"loss": 1.0})
        assert len(store.taken()) <= most
    keeper = Checkpointer(store, keep_last=3)
    keeper.save(state(204), 204)
    store.taken()
    keeper.save(state(205), 205)
    requests = store.taken()
    assert keeper.steps() == [203, 204, 205]
    assert len(requests) == 6 + 2 + 2 + 3 + 8, "save, look, those that are kept, is it whole, remove"
    listed = [one for one in requests if one.startswith("list") and one.endswith("data/")]
    assert listed == [f"list {step_name(202)}/data/"], "the data that is removed"


def test_another_jobs_removal_is_noticed():
    """What this job remembers must not make it remove a step that the rule keeps."""
    store = objects()
    mine, other = Checkpointer(store, keep_last=3), Checkpointer(store)
    for step in (1, 2, 3):
        mine.save(state(step), step)
    other.remove(2)
    assert mine.steps() == [1, 3]
    assert mine.latest() == 3
    mine.save(state(4), 4)
    assert mine.steps() == [1, 3, 4], "the three newest that there are"
    other.remove(4)
    assert mine.latest() == 3
    assert mine.restore(state(0)) == 3
    with pytest.raises(milepost.CheckpointNotFound):
        mine.open(4)


def test_marker_of_a_removal_stays_for_a_while(monkeypatch):
    store = objects()
    keeper = Checkpointer(store, keep_last=1)
    for step in (1, 2, 3):
        keeper.save(state(step), step)
    left = {name for name in store.objects if not name.startswith(step_name(3))}
    assert left == {f"{step_name(step)}/{manifest_name(1)}{REMOVED}" for step in (1, 2)}, "and no data"
    keeper.save(state(20), 2)
    assert milepost.open(Within(store, step_name(2))).generation == 2, "the number is not used again"
    fresh = Checkpointer(store, keep_last=1)
    fresh.save(state(4), 4)
    monkeypatch.setattr(shelf, "LATE_S", 0.0)
    fresh.save(state(5), 5)
    fresh.save(state(6), 6)
    assert {name.split("/")[0] for name in store.objects} == {step_name(5), step_name(6)}, "the last was just removed"


def test_copy_of_a_manifest_outlives_no_marker(monkeypatch):
    """A copy of the request that committed a step arrives when the step was removed, and its marker may go soon."""
    twice = f"create {step_name(1)}/{manifest_name(1)}"
    store = LateStore(objects(), lambda call: "twice" if call == twice else None)
    keeper = Checkpointer(store, keep_last=1)
    keeper.save(state(1), 1)
    keeper.save(state(2), 2)
    store.arrive()
    monkeypatch.setattr(shelf, "LATE_S", 0.0)
    for step in (3, 4, 5, 6):
        keeper.save(state(step), step)
        assert keeper.steps() == [step]
    assert {name.split("/")[0] for name in store.inner.objects} == {step_name(5), step_name(6)}


def test_step_that_was_saved_again_beside_its_marker_counts():
    store = LateStore(objects(), lambda call: "late" if call.startswith("delete") and call.endswith(REMOVED) else None)
    keeper = Checkpointer(store, keep_last=1)
    keeper.save(state(1), 1)
    keeper.remove(1)
    keeper.save(state(2), 1)
    assert any(name.endswith(REMOVED) for name in store.inner.objects), "the sweep could not delete it"
    fresh = Checkpointer(store, keep_last=1)
    fresh.save(state(3), 3)
    assert fresh.steps() == [3]


@pytest.mark.parametrize("again", [False, True])
def test_deletions_that_come_late_hit_no_newer_step(again):
    store = LateStore(objects(), lambda call: "twice" if call.startswith("delete") else None)
    keeper = Checkpointer(store)
    keeper.save(state(1), 1)
    keeper.save(state(2), 2)
    keeper.remove(2)
    assert keeper.steps() == [1]
    if again:
        keeper.save(state(3), 2)
    store.arrive()
    assert keeper.steps() == [1, 2][: 1 + again]
    assert keeper.restore(target := state(0)) == 1 + again
    assert holds(target, 3 if again else 1)


def test_step_whose_save_got_no_reply_may_appear():
    store = LateStore(objects(), lambda call: "late" if f"{step_name(2)}/manifest" in call else None)
    keeper = Checkpointer(store, keep_last=2)
    keeper.save(state(1), 1)
    with pytest.raises(milepost.NoReply, match="appears, whole"):
        keeper.save(state(2), 2)
    assert keeper.latest() == 1
    store.arrive()
    assert keeper.restore(target := state(0)) == 2
    assert holds(target, 2)
    keeper.save(state(3), 3)
    assert keeper.steps() == [2, 3]


def test_late_manifest_of_data_that_was_removed_is_no_step():
    store = LateStore(objects(), lambda call: "late" if "create" in call and "manifest-" in call else None)
    keeper = Checkpointer(store)
    with pytest.raises(milepost.NoReply):
        keeper.save(state(2), 2)
    store.fate = lambda _: None
    assert keeper.remove_unfinished() == [2]
    store.arrive()
    assert keeper.steps() == []
    assert keeper.restore(state(0), default=0) == 0
    keeper.save(state(3), 2)
    assert keeper.steps() == [2]


def test_newest_is_found_while_the_only_step_is_replaced():
    inner = objects()
    keeper = Checkpointer(inner, keep_last=1)
    keeper.save(state(1), 1)

    class Overtaken(LateStore):
        """Between the list of folders and the look into the first, a newer step is saved and the older one removed."""

        def list(self, prefix, **depth):
            if prefix.startswith("step-0") and keeper.latest() < 3:
                keeper.save(state(3), keeper.latest() + 1)
            return super().list(prefix, **depth)

    assert Checkpointer(Overtaken(inner, lambda _: None)).latest() == 3
    inner.objects.clear()
    keeper.save(state(1), 1)
    assert Checkpointer(Overtaken(inner, lambda _: None)).steps() == [3]


def test_steps_of_other_programs_are_found_by_their_names():
    store = objects()
    keeper = Checkpointer(store, also_read=["checkpoint-{step}", "old-{step}.ckpt"])
    keeper.save(state(1), 1)
    milepost.save(state(2), Within(store, "checkpoint-2"))
    store.create(f"{step_name(3)}/model.safetensors", b"")
    store.create("old-4.ckpt", b"")
    store.create(f"{step_name(5)}/notes.txt", b"")
    assert keeper.steps() == [1, 2, 3, 4]
    assert keeper.latest() == 4
    store.delete("old-4.ckpt", f"{step_name(3)}/model.safetensors")
    assert keeper.restore(target := state(0)) == 2
    assert holds(target, 2)
    milepost.save(state(9), Within(store, step_name(2)))
    assert keeper.restore(target) == 2
    assert holds(target, 9), "ours counts"
    keeper.remove(2)
    assert holds(keeper.open(2).state(), 2)


def test_best_step_is_read_once_for_each_manifest():
    inner = objects()
    store = RequestStore(inner)
    keeper = Checkpointer(store, keep_best=1, best="loss", keep_last=2)
    for step, loss in ((1, 3.0), (2, 1.0), (3, 2.0), (4, 5.0)):
        keeper.save({"w": torch.ones(2)}, step, metrics={"loss": loss})
    assert keeper.steps() == [2, 3, 4]
    gets = [one for one in store.taken("get") if f"{step_name(2)}/manifest" in one]
    assert keeper.best() == 2
    assert len(gets) <= 2, "one for the metric, one to see that it is whole"
    assert store.taken("get") == []


def test_empty_folders_that_stay_listed_are_asked_once(monkeypatch):
    store = FoldersStay(objects())
    monkeypatch.setattr(shelf, "LATE_S", 0.0)
    keeper = Checkpointer(store, keep_last=1)
    counts = []
    for step in range(1, 9):
        store.taken()
        keeper.save(state(step), step)
        counts.append(len(store.taken()))
    assert len(list(store.list("step-", shallow=True))) == 8
    assert {name.split("/")[0] for name in store.inner.objects} == {step_name(7), step_name(8)}
    assert counts[-1] == counts[3], "not more with each step that was removed"
    assert keeper.steps() == [8]
    assert keeper.remove_unfinished() == []
