"""Incremental saves in an object store, real code: one job stops before each of its requests while another goes on."""

import contextlib
import random
from dataclasses import replace
from functools import partial

import pytest
import torch

import milepost
from milepost import Checkpointer
from milepost.commit.find import REMOVED, generations, missing_objects, parse, read_manifest
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf, step_name
from milepost.store import MemoryStore, Within
from milepost.testing import CountingStore, LateStore
from tests.commit.object_places import OBJECTS, Turns, objects


def state(step):
    return {"frozen": torch.arange(300.0), "adapter": torch.full((20,), float(step)), "n": step}


def save(store, step, **options):
    with Checkpointer(store, incremental=True, **options) as keeper:
        return keeper.save(state(step), step)


def check(store):
    """All that is listed is whole, byte by byte."""
    keeper = Checkpointer(store)
    for step in keeper.steps():
        with keeper.open(step) as checkpoint:
            assert checkpoint.verify().ok, f"step {step} is listed, and is not whole"
            found, wanted = checkpoint.state(), state(step % 10)
            assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(wanted[key])) for key in wanted)
    return keeper.steps()


def run():
    """Steps 1 and 2, which uses data of step 1."""
    store = objects()
    for step in (1, 2):
        save(store, step)
    return store


def remove_all(store):
    for step in Checkpointer(store).steps():
        Checkpointer(store).remove(step)


def save_plainly(step):
    return lambda store: milepost.save(state(step % 10), Within(store, step_name(step)))


def save_and_remove(store):
    save(store, 4)
    Checkpointer(store).remove(2)


JOBS = {
    "save": lambda store: save(store, 3),
    "save, keep one": lambda store: save(store, 3, keep_last=1),
    "save over the base": lambda store: save(store, 2),
    "prune": lambda store: Shelf(store).prune(Rule(keep_last=1)),
    "remove the oldest": lambda store: Checkpointer(store).remove(1),
    "remove the newest": lambda store: Checkpointer(store).remove(2),
    "remove all": remove_all,
    "save, and remove its base": save_and_remove,
    "save over the base plainly": save_plainly(2),
}
FAST = {"save", "prune", "remove the newest", "remove all", "save over the base plainly"}
RISKY = ("remove the oldest", "save, and remove its base")
PAIRS = [
    pytest.param(
        one,
        other,
        id=f"{one} | {other}",
        marks=[pytest.mark.slow] * (not {one, other} <= FAST and (one, other) != RISKY),
    )
    for one in JOBS
    for other in JOBS
    if "save" in one + other
]


class Stopping(CountingStore):
    """A store that lets another job run before one of its requests."""

    def __init__(self, inner, at, job):
        super().__init__(inner)
        self.at, self.job = at, job

    def before(self, number, call):
        if number == self.at:
            attempt(self.job, self.inner)
            check(self.inner)


def attempt(job, store):
    """Run a job. Jobs that share a folder by mistake get errors."""
    try:
        job(store)
    except (milepost.SaveConflict, milepost.CheckpointNotFound, milepost.StorageError):
        pass
    except milepost.CheckpointDamaged:
        assert 3 not in Checkpointer(store).steps(), "another job removed what this one had just saved"


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_job_that_stops_anywhere_leaves_listed_steps_whole(one, other):
    counting = CountingStore(run())
    JOBS[one](counting)
    for at in range(1, counting.calls + 1):
        store = run()
        attempt(JOBS[one], Stopping(store, at, JOBS[other]))
        check(store)
        save(store, 5, max_depth=1, keep_last=1)
        save(store, 6, max_depth=1, keep_last=1)
        assert check(store) == [6]
        remove_all(store)
        Shelf(store).finish()
        left = [name for name in store.objects if not name.endswith(REMOVED)]
        assert not left, f"stopped before call {at}"


class InTurn(CountingStore):
    """A store whose requests wait for the turn of their job, but for those that move data, by threads of the job."""

    def __init__(self, inner, turns):
        super().__init__(inner)
        self.turns = turns

    def before(self, number, call):
        if ".safetensors" not in call or call.startswith("delete"):
            self.turns.wait()


def whole(store):
    """Look at what each step that is committed needs; say which steps those are."""
    found = []
    for name in sorted({name.split("/")[0] for name in store.objects}):
        place = Within(store, name)
        numbers = generations(place)
        data = read_manifest(place, numbers[0]) if numbers else None
        if data is not None:
            manifest = parse(place.url, numbers[0], data)
            assert missing_objects(place, manifest) == {}, f"{name} is committed, and is not whole"
            found.append((name, len(manifest.older)))
    return found


def save_some(store, steps):
    for step in steps:
        with contextlib.suppress(milepost.CheckpointError):
            save(store, step, max_depth=3)


def remove_some(store, chance):
    for _ in range(4):
        with contextlib.suppress(milepost.CheckpointError):
            steps = Checkpointer(store).steps()
            if chance.random() < 0.3:
                Shelf(store).prune(Rule(keep_last=2))
            elif steps:
                Checkpointer(store).remove(chance.choice(steps))


@pytest.mark.parametrize("seed", [*range(12), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(12, 150))])
def test_savers_and_removers_in_any_order_with_late_requests(seed):
    """Two jobs save, two remove, request by request in turn. Some requests come late, or twice."""
    chance = random.Random(seed)
    inner = MemoryStore(traits=replace(OBJECTS, requests=1))
    fates = [None, "late", "twice"]
    store = LateStore(
        inner, lambda call: None if ".safe" in call else chance.choices(fates, [30, 1, 2 * (seed % 2)])[0]
    )
    used = 0

    def watch():
        nonlocal used
        used = max(used, sum(count for _, count in whole(inner)))
        while store.waiting and chance.random() < 0.1:
            store.arrive(chance.randrange(store.waiting))
            whole(inner)

    save(inner, 1)
    turns = Turns(seed, watch)
    jobs = [partial(save_some, InTurn(store, turns), steps) for steps in ((10, 20, 20, 30), (11, 11, 21, 31))]
    jobs += [partial(remove_some, InTurn(store, turns), random.Random(seed + n)) for n in range(2)]
    assert turns.run(*jobs) == [None] * 4
    assert used, "something was used where it lay"
    store.arrive()
    whole(inner)
    for step in (41, 42):
        save(inner, step)
    check_all(inner)


def check_all(store):
    keeper = Checkpointer(store)
    for step in keeper.steps():
        with keeper.open(step) as checkpoint:
            assert checkpoint.verify().ok
