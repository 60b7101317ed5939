"""Removing a step is safe: at any call, beside any save and any reader."""

import threading

import pytest

import milepost
from milepost import CheckpointDamaged, Checkpointer, CheckpointNotFound, StorageError
from milepost.commit.attempt import take_aim
from milepost.commit.find import REMOVED
from milepost.commit.removal import finish_removal, remove_checkpoint
from milepost.core.manifest import manifest_name, shard_name
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf, step_name
from milepost.store import LocalStore, MemoryStore, Within
from milepost.testing import CountingStore, Crash, CrashingStore, run_ranks
from tests.commit.object_places import objects
from tests.steps.numbered import holds, state


def leftovers(store, steps):
    """What lies in folders of steps other than these, or beside the checkpoints in them."""
    found = [name for name in store.list("") if name.split("/")[0] not in {step_name(s) for s in steps}]
    if store.traits.is_current:  # there, markers stay for a while
        return [name for name in found if not name.endswith(REMOVED)]
    return found + [name for name in store.list("") if REMOVED in name]


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["memory", "objects", "local"])
@pytest.mark.parametrize("after", [False, True])
def test_interrupted_removal_is_harmless_and_finished_later(tmp_path, kind, after):
    def fresh(number):
        store = (
            LocalStore(tmp_path / f"{number}")
            if kind == "local"
            else {"memory": MemoryStore, "objects": objects}[kind]()
        )
        keeper = Checkpointer(store)
        for step in (1, 2, 3):
            keeper.save(state(step), step)
        milepost.save(state(2), Within(store, step_name(2)))  # a second generation
        return store

    counting = CountingStore(fresh("count"))
    assert Shelf(counting).retain(Rule(keep_last=1), 3) == [1, 2]
    assert counting.calls > 15
    for at in range(1, counting.calls + 1):
        store = fresh(at)
        with pytest.raises(Crash):
            Shelf(CrashingStore(store, at, after=after)).retain(Rule(keep_last=1), 3)
        keeper = Checkpointer(store, keep_last=1)
        for step in keeper.steps():
            found = state(0)
            assert keeper.restore(found, step=step) == step, "what is still a checkpoint is a whole one"
            assert holds(found, step)
        assert 3 in keeper.steps()
        keeper.save(state(4), 4)
        assert keeper.steps() == [4]
        assert leftovers(store, [4]) == []
        if kind == "local":
            assert [p.name for p in (tmp_path / f"{at}").iterdir()] == [step_name(4)], "folders go, too"


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize("after", [False, True])
def test_a_save_that_dies_at_any_call_leaves_the_kept_steps_whole(after, store_of):
    def fresh():
        store = store_of()
        Checkpointer(store, keep_last=2).save(state(1), 1)
        Checkpointer(store, keep_last=2).save(state(2), 2)
        return store

    counting = CountingStore(fresh())
    Checkpointer(counting, keep_last=2).save(state(3), 3)
    newest = set()
    for at in range(1, counting.calls + 1):
        store = fresh()
        with pytest.raises(Crash):
            Checkpointer(CrashingStore(store, at, after=after), keep_last=2).save(state(3), 3)
        keeper = Checkpointer(store, keep_last=2)
        found = state(0)
        newest.add(step := keeper.restore(found))
        assert holds(found, step)
        keeper.save(state(3), 3)
        assert keeper.steps() == [2, 3]
        assert leftovers(store, [2, 3]) == []
    assert newest == {2, 3}


@pytest.mark.parametrize("kind", ["local", "memory", "objects"])
def test_data_of_dead_saves_is_removed_when_asked(tmp_path, kind):
    store = LocalStore(tmp_path) if kind == "local" else {"memory": MemoryStore, "objects": objects}[kind]()
    Checkpointer(store).save(state(1), 1)

    class Dying(CountingStore):
        dead = False

        def before(self, number, call):
            if self.dead:
                raise Crash

        def after(self, number, call):
            self.dead = call.startswith(("create step-0000000002/data", "commit step-0000000002/data"))
            self.before(number, call)

    for _ in range(3):
        with pytest.raises(Crash):
            Checkpointer(Dying(store)).save(state(2), 2)
    dead = {name for name in store.list(step_name(2)) if "/data/" in name}
    assert len(dead) == 3

    def work(comm):
        return Checkpointer(store, process_group=comm).remove_unfinished()

    assert run_ranks(2, work) == [[2], [2]]
    assert not [name for name in store.list(step_name(2)) if not name.endswith(REMOVED)]
    keeper = Checkpointer(store)
    assert keeper.remove_unfinished() == []
    assert keeper.restore(found := state(0)) == 1
    assert holds(found, 1)
    keeper.save(state(5), 2)
    assert holds(keeper.open(2).state(), 5)


def test_an_older_generation_that_was_not_swept_does_not_come_to_light():
    place = MemoryStore()
    milepost.save(state(1), place)
    first = dict(place.objects)
    milepost.save(state(2), place)
    place.objects.update(first)  # as if the sweep of the second save had been cut short
    remove_checkpoint(place)
    assert place.objects == {}


def test_a_step_stays_where_an_older_generation_of_it_cannot_be_swept():
    class Stuck(CountingStore):
        def before(self, number, call):
            if call == f"delete {manifest_name(1)}":
                raise StorageError("cannot delete")

    place = Stuck(MemoryStore())
    for number in (1, 2):
        milepost.save(state(number), place)
    with pytest.raises(StorageError, match="older manifests there cannot be deleted; it stays"):
        remove_checkpoint(place)
    assert holds(milepost.open(place).state(), 2)
    assert not [name for name in place.list("manifest-") if name.endswith(REMOVED)]


def test_a_save_under_way_is_never_touched(tmp_path):
    """It has a folder without a manifest, as a removal that was cut short has; only the marker tells them apart."""
    keeper = Checkpointer(tmp_path, keep_last=1)

    class Slow(CountingStore):
        """Runs other saves, with their removals, before its own manifest is published."""

        def before(self, number, call):
            if call.startswith("create manifest"):
                for step in (6, 7, 8):
                    keeper.save(state(step), step)

    milepost.save(state(5), Slow(LocalStore(tmp_path / step_name(5))))
    assert keeper.steps() == [5, 8]
    with keeper.open(5) as checkpoint:
        assert checkpoint.verify().ok


@pytest.mark.parametrize("moment", ["marked", "manifest gone", "data gone"])
def test_a_save_into_a_step_that_is_being_removed_loses_nothing(moment):
    store = MemoryStore()
    place = Within(store, step_name(5))
    milepost.save(state(1), place)
    removed = milepost.open(place).manifest
    marker = manifest_name(1) + REMOVED
    place.create(marker, removed.save_id.encode())
    if moment != "marked":
        place.delete(manifest_name(1))
    if moment == "data gone":
        place.delete(shard_name(removed.save_id, 0))
    assert take_aim(place)[0] == 2, "the number that is being removed is not used again"

    class Meanwhile(CountingStore):
        """The removal is finished while this save is about to commit."""

        def before(self, number, call):
            if call.startswith("create"):
                finish_removal(place, [marker])

    milepost.save(state(2), Meanwhile(place))
    finish_removal(place, [marker])  # another remover, that comes late
    assert holds(milepost.open(place).state(), 2)
    assert milepost.open(place).verify().ok
    assert not [name for name in store.list("") if removed.save_id in name or REMOVED in name]


@pytest.mark.parametrize("has_removed_all", [False, True])
def test_a_marker_that_another_remover_sweeps_away_is_no_error(has_removed_all):
    """In a folder a file has its name at last, and until then another job may sweep it."""

    class Swept(CountingStore):
        swept = False

        def before(self, number, call):
            if REMOVED in call and call.startswith("create ") and not self.swept:
                self.swept = True
                if has_removed_all:
                    remove_checkpoint(self.inner)
                raise FileNotFoundError(call)

    store = MemoryStore()
    milepost.save(state(1), store)
    if has_removed_all:
        with pytest.raises(CheckpointNotFound, match="by another job"):
            remove_checkpoint(Swept(store))
    else:
        remove_checkpoint(Swept(store))
    assert list(store.list("")) == []


def test_a_step_that_is_removed_before_the_marker_is_made_is_not_found():
    class Removed(CountingStore):
        listings = 0

        def before(self, number, call):
            self.listings += call == "list "
            if self.listings == 2:
                remove_checkpoint(self.inner)

    store = MemoryStore()
    milepost.save(state(1), store)
    with pytest.raises(CheckpointNotFound, match="by another job"):
        remove_checkpoint(Removed(store))


def test_a_late_remover_does_not_take_another_saves_manifest():
    """Its marker and the manifest are of one generation, but not of one save."""
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    old = milepost.open(place).manifest.save_id
    remove_checkpoint(place)
    milepost.save(state(2), place)
    place.create(marker, old.encode())
    finish_removal(place, [marker])
    assert holds(milepost.open(place).state(), 2)


def test_a_marker_that_is_none_of_ours_is_left_alone(tmp_path, caplog):
    keeper = Checkpointer(tmp_path, keep_last=5)
    keeper.save(state(1), 1)
    (tmp_path / step_name(1) / (manifest_name(1) + REMOVED)).write_text("../../x")
    keeper.save(state(2), 2)
    assert keeper.steps() == [1, 2]
    assert "not a marker of Milepost" in caplog.text


def test_a_removal_is_finished_though_its_manifest_cannot_be_read_any_more():
    """It would be listed, without its data: and the marker says that it was to go."""
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    place.create(marker, milepost.open(place).manifest.save_id.encode())
    place.objects[manifest_name(1)] = b"{}"
    finish_removal(place, [marker])
    assert place.objects == {}


def test_who_opens_a_step_that_is_being_removed_is_told():
    place = MemoryStore()
    milepost.save(state(1), place)
    marker = manifest_name(1) + REMOVED
    place.create(marker, milepost.open(place).manifest.save_id.encode())
    reader = milepost.open(place)
    place.delete(manifest_name(1))
    with pytest.raises(CheckpointNotFound, match="It was removed"):
        milepost.open(place)
    finish_removal(place, [marker])
    with pytest.raises(CheckpointDamaged, match="replaced this checkpoint, or it was removed"):
        reader["a"].read()


def test_an_open_file_reads_on_after_the_removal(tmp_path):
    milepost.save(state(1), tmp_path / "x")
    with milepost.open(tmp_path / "x") as checkpoint:
        checkpoint["a"][0]  # opens the file
        remove_checkpoint(LocalStore(tmp_path / "x"))
        assert holds(checkpoint.state(), 1)


def test_root_never_looks_empty_while_its_only_step_is_replaced(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(1), 1)

    class Overtaken(LocalStore):
        """Between the list of folders and the look into the first, a newer step is saved and the older one removed."""

        def list(self, prefix, **depth):
            if keeper.latest() < 4:
                keeper.save(state(4), keeper.latest() + 1)
            return super().list(prefix, **depth)

    assert Checkpointer(Overtaken(tmp_path)).latest() == 4


@pytest.mark.slow
def test_readers_see_whole_checkpoints_while_steps_come_and_go(tmp_path):
    keeper = Checkpointer(tmp_path, keep_last=1)
    keeper.save(state(0), 0)
    done, problems = threading.Event(), []
    opened, gone = [0], [0]

    def read():
        reader = Checkpointer(tmp_path)
        while not done.is_set():
            step = reader.latest()
            if step is None:
                problems.append("there was no step at all")
                continue
            try:
                with reader.open(step) as checkpoint:
                    if not holds(checkpoint.state(), step):
                        problems.append(f"wrong data at {step}")
                opened[0] += 1
            except CheckpointNotFound:
                gone[0] += 1
            except CheckpointDamaged as error:
                gone[0] += 1
                if "replaced this checkpoint, or it was removed" not in str(error):
                    problems.append(str(error))
            except BaseException as error:
                problems.append(repr(error))

    def restore():
        reader, last = Checkpointer(tmp_path), -1
        while not done.is_set():
            found = state(0)
            try:
                step = reader.restore(found)
                if step < last or not holds(found, step):
                    problems.append(f"restored {step} after {last}: {found}")
                last = step
            except CheckpointDamaged as error:
                if "replaced this checkpoint, or it was removed" not in str(error) and "no checkpoint" not in str(
                    error
                ):
                    problems.append(str(error))
            except BaseException as error:
                problems.append(repr(error))

    threads = [threading.Thread(target=read), threading.Thread(target=restore)]
    for thread in threads:
        thread.start()
    step = 0
    while opened[0] < 300 and step < 3000 and not problems:
        step += 1
        keeper.save(state(step), step)
    done.set()
    for thread in threads:
        thread.join()
    assert problems == []
    assert opened[0] >= 300
    assert keeper.steps() == [step]
