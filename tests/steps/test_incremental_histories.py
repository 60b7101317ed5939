"""Any history of incremental saves, removals and crashes: what a listing shows is whole, and holds what was saved."""

import contextlib
import itertools
import multiprocessing as mp
import random
import shutil
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost import Checkpointer
from milepost.commit.find import REMOVED
from milepost.commit.removal import remove_checkpoint
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf, step_name
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, CrashingStore, LateStore, UnsyncedStore, run_ranks
from tests.commit.object_places import objects
from tests.steps.power import states_of
from tests.strategies import examples

KEYS = ("a", "b", "c", "d")


class Run:
    """A run with a state of a few tensors, the store that it is saved to, and what each step should hold."""

    def __init__(self, store):
        self.store, self.values = store, dict.fromkeys(KEYS, 0)
        self.expected = {}

    def state(self, values=None):
        values = values or self.values
        return {key: torch.full((40 + 9 * i,), float(values[key])) for i, key in enumerate(KEYS)} | {"n": dict(values)}

    def save(self, step, changed, *, crash_at=None, after=False, world=1, keep=None, **options):
        """Change some tensors and save. After a crash, the step may hold either state."""
        for key in changed:
            self.values[key] += 1
        store = self.store if crash_at is None else CrashingStore(self.store, crash_at, after=after)

        def work(comm):
            Checkpointer(store, incremental=True, keep_last=keep, process_group=comm, **options).save(
                self.state(), step
            )

        before = self.expected.get(step, [])
        self.expected[step] = [*before, dict(self.values)]
        try:
            run_ranks(world, work) if world > 1 else work(milepost.Solo())
        except Crash:
            return
        except milepost.CheckpointError:
            if crash_at is None:
                raise
            return
        self.expected[step] = [dict(self.values)]

    def check(self, store=None):
        """All that is listed is whole, byte by byte, and holds one of the states that it may hold."""
        keeper = Checkpointer(store or self.store)
        for step in keeper.steps():
            with keeper.open(step) as checkpoint:
                assert checkpoint.verify().ok, f"step {step} is listed, and is not whole"
                found = checkpoint.state()
                values = found.pop("n")
                assert values in self.expected[step]
                wanted = self.state(values)
                assert all(torch.equal(tensor, wanted[key]) for key, tensor in found.items())
        return keeper.steps()


ACTIONS = st.one_of(
    st.tuples(st.just("save"), st.integers(1, 6), st.sets(st.sampled_from(KEYS))),
    st.tuples(st.just("next"), st.integers(1, 3), st.sets(st.sampled_from(KEYS))),
    st.tuples(st.just("dies"), st.integers(1, 60), st.sets(st.sampled_from(KEYS))),
    st.tuples(st.just("remove"), st.integers(0, 9), st.just(None)),
    st.tuples(st.just("removal dies"), st.integers(1, 20), st.integers(0, 9)),
    st.tuples(st.just("prune"), st.integers(1, 3), st.just(None)),
    st.tuples(st.just("deep"), st.integers(1, 2), st.sets(st.sampled_from(KEYS))),
)


def act(run, action):
    kind, number, more = action
    steps = Checkpointer(run.store).steps()
    newest = max(steps, default=0)
    if kind == "save":
        run.save(number, more)
    elif kind == "next":
        run.save(newest + number, more, keep=3)
    elif kind == "deep":
        run.save(newest + 1, more, max_depth=number, max_waste=0.9)
    elif kind == "dies":
        run.save(newest + 1, more, crash_at=number, after=number % 2 == 0)
    elif kind == "remove" and steps:
        with contextlib.suppress(milepost.CheckpointNotFound):  # its removal was cut short, and is finished now
            Checkpointer(run.store).remove(steps[number % len(steps)])
    elif kind == "removal dies" and steps:
        place = Within(CrashingStore(run.store, number), step_name(steps[more % len(steps)]))
        with contextlib.suppress(Crash):
            remove_checkpoint(place)
    elif kind == "prune":
        Shelf(run.store).prune(Rule(keep_last=number))


@examples(250)
@given(st.lists(ACTIONS, min_size=3, max_size=12))
def test_listed_steps_are_whole_after_any_history(actions):
    run = Run(MemoryStore())
    for action in actions:
        act(run, action)
        if action[0] in ("remove", "removal dies", "prune"):
            run.check()
    run.save(50, ())
    assert run.check()[-1] == 50
    keeper = Checkpointer(run.store, keep_last=1)
    keeper.remove_unfinished()
    keeper.save(run.state(), 51)
    assert {name.split("/")[0] for name in run.store.list("")} == {step_name(51)}, "nothing stays for ever"


@examples(250)
@given(st.lists(ACTIONS, min_size=3, max_size=12), st.lists(st.integers(1, 3), min_size=12, max_size=12))
def test_histories_in_an_object_store(actions, worlds):
    """There files are used where they lie. What nobody uses any more ends all the same."""
    run = Run(objects())
    for action, world in zip(actions, worlds, strict=False):
        if action[0] == "save":
            run.save(action[1], action[2], world=world)
        else:
            act(run, action)
        run.check()
    for step in (50, 51):
        run.save(step, ())
    assert run.check()[-1] == 51
    keeper = Checkpointer(run.store)
    keeper.remove_unfinished()
    for step in keeper.steps()[:-1]:
        keeper.remove(step)
    assert run.check() == [51]
    assert unused(run.store, keeper) == []
    keeper.remove(51)
    assert all(name.endswith(REMOVED) for name in run.store.objects), sorted(run.store.objects)


def unused(store, keeper):
    """Names of data that no step of a run needs."""
    used = set()
    for step in keeper.steps():
        with keeper.open(step) as checkpoint:
            manifest = checkpoint.manifest
        folders = {file: getattr(file, "folder", "") or step_name(step) for file in manifest.stored}
        used |= {f"{folders[file]}/{part.name}" for file in manifest.stored for part in manifest.parts_of(file)}
    return sorted(name for name in store.objects if ".safetensors" in name and name not in used)


@examples(150)
@given(st.lists(ACTIONS, min_size=3, max_size=10), st.integers(0, 1 << 30))
def test_late_requests_leave_every_listed_step_whole(actions, seed):
    chance = random.Random(seed)
    store = LateStore(objects(), lambda _: chance.choices([None, "late", "twice"], [20, 1, 2])[0])
    run = Run(store)
    for action in actions:
        with contextlib.suppress(milepost.CheckpointError):
            act(run, action)
        while store.waiting and chance.random() < 0.5:
            store.arrive(chance.randrange(store.waiting))
            run.check(store.inner)
        run.check(store.inner)
    store.arrive()
    run.check(store.inner)
    store.fate = lambda _: None
    run.save(50, ())
    assert run.check()[-1] == 50
    keeper = Checkpointer(store.inner)
    keeper.remove_unfinished()
    for step in keeper.steps():
        keeper.remove(step)
    shelf = Shelf(store.inner)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("milepost.steps.shelf.LATE_S", 0.0)
        for _ in range(4):  # an hour later, and hours later
            shelf.finish()
    shelf.remove_unfinished()
    assert all(name.endswith(REMOVED) for name in store.inner.objects), sorted(store.inner.objects)


@examples(30)
@given(st.lists(ACTIONS, min_size=2, max_size=8), st.lists(st.integers(1, 3), min_size=8, max_size=8))
def test_histories_on_a_file_system_and_on_changing_ranks(tmp_path_factory, actions, worlds):
    folder = tmp_path_factory.mktemp("run")
    run = Run(LocalStore(folder))
    for action, world in zip(actions, worlds, strict=False):
        if action[0] == "save":
            run.save(action[1], action[2], world=world)
        else:
            act(run, action)
        run.check()
    shutil.rmtree(folder)


@pytest.mark.slow
def test_power_cut_leaves_every_listed_step_whole():
    store = UnsyncedStore()
    run = Run(store)
    for step in (1, 2, 3):
        run.save(step, ("a",), keep=2)
    first = len(store.journal)
    run.save(4, ("b",), keep=2)  # removes step 2, whose files steps 3 and 4 use
    Checkpointer(store).remove(3)
    count = 0
    for _, found in states_of(store, first, 2):
        assert run.check(found)
        count += 1
    assert count > 100


def test_link_is_durable_before_the_manifest_that_needs_it():
    """Without the sync of its folder a power cut could take the second name, and leave the manifest."""
    store = UnsyncedStore()
    run = Run(store)
    run.save(1, ())
    run.save(2, ("a",))
    calls = [getattr(operation, "call", "") for operation in store.journal]
    linked = next(i for i, call in enumerate(calls) if call.startswith("link") and ".safetensors" in call)
    folder = calls[linked].removeprefix("link ").rpartition("/")[0]
    synced = next(i for i, call in enumerate(calls) if i > linked and call == f"fsync {folder}")
    committed = next(i for i, call in enumerate(calls) if i > linked and call.endswith("manifest-00000001.json"))
    assert linked < synced < committed


@pytest.mark.parametrize("seed", range(4))
def test_pruners_savers_and_readers_side_by_side(tmp_path, seed):
    """Two processes prune while one saves and one reads, each call after a random pause."""
    dice = random.Random(seed)

    class Slow(CountingStore):
        def before(self, number, call):
            time.sleep(dice.random() * 0.002)

    run, errors, done = Run(LocalStore(tmp_path)), [], threading.Event()
    run.save(1, ())

    def guarded(work):
        def body():
            try:
                while not done.is_set():
                    work()
            except Exception as error:
                errors.append(error)

        return threading.Thread(target=body)

    def prune():
        Shelf(Slow(LocalStore(tmp_path))).prune(Rule(keep_last=1))

    def read():
        keeper = Checkpointer(Slow(LocalStore(tmp_path)))
        target = run.state()
        with contextlib.suppress(milepost.CheckpointNotFound):
            keeper.restore(target)
            values = target["n"]
            assert all(bool((target[key] == values[key]).all()) for key in KEYS)

    threads = [guarded(prune), guarded(prune), guarded(read)]
    for thread in threads:
        thread.start()
    run.store = Slow(LocalStore(tmp_path))
    try:
        for step in range(2, 14):
            run.save(step, dice.sample(KEYS, 1))
    finally:
        done.set()
        for thread in threads:
            thread.join()
    assert not errors
    run.store = LocalStore(tmp_path)
    assert run.check()[-1] == 13


def keep_saving(folder, sender):
    """Save step after step, removing old ones, until killed."""
    torch.set_num_threads(1)
    run = Run(LocalStore(folder))
    steps = Checkpointer(folder).steps()
    sender.send_bytes(b"ready")
    with Checkpointer(folder, incremental=True, keep_last=2) as keeper:
        for step in itertools.count(max(steps, default=0) + 1):
            run.values = {key: step // (i + 1) for i, key in enumerate(KEYS)}
            keeper.save(run.state(), step)


@pytest.mark.slow
def test_sigkill_leaves_every_listed_step_whole(tmp_path):
    chance, context = random.Random(3), mp.get_context("forkserver")
    newest = 0
    for _ in range(20):
        receiver, sender = context.Pipe(duplex=False)
        process = context.Process(target=keep_saving, args=(str(tmp_path), sender), daemon=True)
        process.start()
        sender.close()
        assert receiver.poll(60)
        assert receiver.recv_bytes() == b"ready"
        time.sleep(chance.uniform(0.0, 0.3))
        process.kill()
        process.join()
        keeper = Checkpointer(tmp_path)
        for step in keeper.steps():
            with keeper.open(step) as checkpoint:
                assert checkpoint.verify().ok
                found = checkpoint.state()
                assert found["n"] == {key: step // (i + 1) for i, key in enumerate(KEYS)}
                assert all((found[key] == found["n"][key]).all() for key in KEYS)
        assert (keeper.latest() or 0) >= newest
        newest = keeper.latest() or 0
    assert newest > 3
