"""Steps after a power cut: listed steps are whole, the newest whole one is restored, and removed steps stay removed.

The disk is a model of one (`UnsyncedStore`): it may keep any part of what was not synced.
"""

import contextlib

import pytest
import torch

from milepost import Checkpointer, CheckpointNotFound, StorageError
from milepost import open as open_checkpoint
from milepost.commit.find import REMOVED
from milepost.commit.removal import finish_removal, remove_checkpoint
from milepost.core.manifest import manifest_name
from milepost.steps.shelf import step_name
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, UnsyncedStore
from tests.steps.power import states_of


def state(number):
    return {"a": torch.full((8, 16), float(number)), "n": number}


def steps_in(found):
    """The steps that are listed, each of them looked at byte by byte, with the number of the save that each holds."""
    keeper = Checkpointer(found)
    numbers = {}
    for step in keeper.steps():
        with keeper.open(step) as checkpoint:
            assert checkpoint.verify().ok, f"step {step} is listed, and is not whole"
            numbers[step] = checkpoint["n"]
    target = state(0)
    assert keeper.restore(target, default=-1) == max(numbers, default=-1)
    assert target["n"] == numbers.get(max(numbers, default=-1), 0)
    assert (target["a"] == target["n"]).all()
    return numbers


@pytest.mark.parametrize("hard_links", [True, False])
def test_save_over_a_step_leaves_the_old_or_the_new_whole(hard_links):
    store = UnsyncedStore(hard_links=hard_links)
    keeper = Checkpointer(store)
    ends = [0]
    for number in (1, 2, 3):
        keeper.save(state(number), 5)
        ends.append(len(store.journal))
    seen = set()
    for at, found in states_of(store, ends[1], 2):
        done = max(number for number, end in enumerate(ends) if end <= at)
        numbers = steps_in(found)
        assert numbers in ({5: done}, {5: done + 1})
        seen.add(numbers[5])
    assert seen == {1, 2, 3}


@pytest.mark.slow
def test_a_step_that_retention_removed_is_whole_or_not_listed():
    store = UnsyncedStore()
    keeper = Checkpointer(store, keep_last=1)
    keeper.save(state(1), 1)
    keeper.save(state(11), 1)  # with a sweep that is not synced
    first = len(store.journal)
    keeper.save(state(2), 2)
    second = len(store.journal)
    keeper.save(state(3), 3)
    seen = set()
    for at, found in states_of(store, first, 2):
        numbers = steps_in(found)
        assert max(numbers) >= (2 if at >= second else 1)
        assert numbers.items() <= {1: 11, 2: 2, 3: 3}.items()
        seen.add(tuple(numbers))
    assert seen == {(1,), (1, 2), (2,), (2, 3), (3,)}


def test_removed_step_stays_gone_after_a_power_cut():
    store = UnsyncedStore()
    keeper = Checkpointer(store)
    for step in (1, 2):
        keeper.save(state(step), step)
    first = len(store.journal)
    keeper.remove(2)
    seen = set()
    for at, found in states_of(store, first, 4):
        numbers = steps_in(found)
        seen.add(tuple(numbers))
        assert numbers[1] == 1
        if at == len(store.journal):
            assert numbers == {1: 1}
            with pytest.raises(CheckpointNotFound):
                open_checkpoint(Within(found, step_name(2)))
    assert seen == {(1,), (1, 2)}


@pytest.mark.slow
@pytest.mark.parametrize("saved_next", [2, 3])
def test_removal_finished_by_another_save_survives_a_power_cut(saved_next):
    """Into the very step that was being removed, or into another."""

    def prepared():
        store = UnsyncedStore()
        for step in (1, 2):
            Checkpointer(store).save(state(step), step)
        return store, len(store.journal)

    store, first = prepared()
    Checkpointer(store).remove(2)
    for dies_at in range(first, len(store.journal)):
        store, _ = prepared()
        store.dies_at = dies_at
        with pytest.raises(Crash):
            Checkpointer(store).remove(2)
        store.dies_at = None
        Checkpointer(store).save(state(7), saved_next)
        for at, found in states_of(store, dies_at, 0):
            numbers = steps_in(found)
            assert numbers[1] == 1
            assert numbers.items() <= {1: 1, 2: 2, 3: 7}.items() or numbers == {1: 1, 2: 7}
            if at == len(store.journal):
                assert numbers[saved_next] == 7
                Checkpointer(found, keep_last=1).save(state(9), 9)
                assert steps_in(found) == {9: 9}


@pytest.mark.slow
@pytest.mark.parametrize("what", ["remove", "save"])
def test_two_jobs_at_one_step_leave_nothing_that_is_listed_and_not_whole(what):
    """One job removes it. At each of its calls in turn, the other job removes it too, or saves it again."""
    at, done = 0, False
    while not done:
        at += 1
        store = UnsyncedStore()
        for step in (1, 2):
            Checkpointer(store).save(state(step), step)
        first = len(store.journal)
        removing = Interrupted(store, at, what)
        with contextlib.suppress(CheckpointNotFound, StorageError):
            remove_checkpoint(Within(removing, step_name(2)))
        done = removing.calls < at
        for _, found in states_of(store, first, 0):
            assert steps_in(found)[1] == 1
    assert at > 5


class Interrupted(CountingStore):
    """Another job does something to step 2 before call `at`."""

    def __init__(self, inner, at, what):
        super().__init__(inner)
        self.at, self.what = at, what

    def before(self, number, call):
        other = Checkpointer(self.inner)
        if number == self.at:
            with contextlib.suppress(CheckpointNotFound):
                other.remove(2) if self.what == "remove" else other.save(state(7), 2)


def test_finishing_a_removal_syncs_it_without_a_manifest():
    """The one that deleted the manifest died before its sync; so a power cut could still bring it back."""
    store = UnsyncedStore()
    Checkpointer(store).save(state(1), 1)
    place = Within(store, step_name(1))
    marker = manifest_name(1) + REMOVED
    place.create(marker, open_checkpoint(place).manifest.save_id.encode())
    place.delete(manifest_name(1))
    finish_removal(place, [marker])
    assert all(steps_in(found) == {} for _, found in states_of(store, len(store.journal), 8))


def test_a_removal_costs_one_sync_beside_its_marker():
    place = UnsyncedStore()
    Checkpointer(place).save(state(1), 1)
    first = len(place.journal)
    remove_checkpoint(Within(place, step_name(1)))
    calls = [operation.call for operation in place.journal[first:]]
    unlinked = calls.index(f"unlink {step_name(1)}/{manifest_name(1)}")
    syncs = [call for call in calls[unlinked:] if call.startswith("fsync")]
    assert syncs == [f"fsync {step_name(1)}"]
    assert calls[unlinked + 1] == syncs[0], "before any data goes"


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_the_data_goes_only_after_the_manifest_is_durably_gone(tmp_path, kind):
    class Watched(CountingStore):
        deleted = ()

        def delete(self, *names, durable=False):
            self.deleted += tuple((name.split("/")[1].split("-")[0], durable) for name in names)
            super().delete(*names, durable=durable)

    store = Watched(LocalStore(tmp_path) if kind == "local" else MemoryStore())
    keeper = Checkpointer(store)
    keeper.save(state(1), 1)
    keeper.remove(1)
    assert store.deleted == (("manifest", True), ("data", False), ("manifest", False))
    assert list(store.list("")) == []
