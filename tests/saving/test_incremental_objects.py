"""Incremental saves in object stores: files are used where they lie, and stay for as long as a step uses them."""

import pytest
import torch

import milepost
from milepost import Checkpointer
from milepost.commit.find import REMOVED
from milepost.commit.removal import remove_checkpoint, remove_unfinished
from milepost.commit.signs import Notes
from milepost.core.reuse import FileId
from milepost.core.signs import Sign, User, note_name, sign_at
from milepost.inspection.pruning import plan_pruning, prune
from milepost.inspection.runs import look_at
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf, step_name
from milepost.store import AtGeneration, LocalStore, Within, store_at
from milepost.testing import CountingStore, LateStore, run_ranks
from tests.commit.object_places import OBJECTS, RequestStore, objects
from tests.urls import below

ADAPTER_BYTES, FROZEN_BYTES = 40_000, 5 * OBJECTS.part_bytes
NAMES = {step: step_name(step) for step in range(1, 20)}


def state(moved=0):
    """A tensor of several parts that stays, and a small one that changes."""
    frozen = torch.arange(FROZEN_BYTES // 4, dtype=torch.float32)
    return {"frozen": frozen, "adapter": torch.full((ADAPTER_BYTES // 4,), float(moved)), "step": moved}


def save(store, step, base, moved=None, **options):
    given = state(step if moved is None else moved)
    return milepost.save(given, Within(store, NAMES[step]), base=Within(store, NAMES[base]), **options)


def check(store, step, moved=None):
    """A step is whole, byte by byte, and holds what was saved."""
    place = Within(store, NAMES[step])
    with milepost.open(place) as checkpoint:
        assert checkpoint.verify().ok
    found = milepost.load({"frozen": torch.zeros(FROZEN_BYTES // 4), "adapter": torch.zeros(10_000), "step": 0}, place)
    wanted = state(step if moved is None else moved)
    assert all(torch.equal(torch.as_tensor(found[key]), torch.as_tensor(wanted[key])) for key in wanted)


def data_in(store, step):
    """The shard files in the folder of a step, without signs and notes."""
    return sorted(name for name in store.list(f"{NAMES[step]}/data/") if ".safetensors" in name)


class Uploads(CountingStore):
    """Counts the bytes that are created."""

    sent = 0

    def create(self, name, *data):
        self.sent += sum(memoryview(one).nbytes for one in data)
        super().create(name, *data)


def test_unchanged_data_is_not_uploaded():
    store = Uploads(objects())
    save(store, 1, 19)
    first, store.sent = store.sent, 0
    receipt = save(store, 2, 1)
    assert (receipt.data_bytes, receipt.reused_bytes) == (ADAPTER_BYTES, FROZEN_BYTES)
    assert first > FROZEN_BYTES
    assert store.sent < ADAPTER_BYTES + 8192
    with milepost.open(Within(store, NAMES[2])) as checkpoint:
        [row] = checkpoint.manifest.older
        assert (row.folder, row.age, row.used_bytes) == (NAMES[1], 1, FROZEN_BYTES)
    check(store, 2)


def test_data_stays_until_its_last_user_is_removed():
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        for step in range(1, 5):
            keeper.save(state(step), step)
        for gone in (1, 3, 2):
            keeper.remove(gone)
            assert data_in(store, 1), "step 4 uses it"
            for step in keeper.steps():
                check(store, step)
        assert not data_in(store, 2) + data_in(store, 3)
        keeper.remove(4)
    assert all(name.endswith(REMOVED) for name in store.objects), sorted(store.objects)


def test_retention_frees_what_the_last_removed_step_used():
    store = objects()
    with Checkpointer(store, incremental=True, keep_last=2, max_depth=2) as keeper:
        for step in range(1, 12):
            keeper.save(state(step), step)
            for there in keeper.steps():
                check(store, there)
    held = [step for step in range(1, 12) if data_in(store, step)]
    assert held == [10, 11], "step 10 wrote all its data anew, and step 11 uses it"
    assert not any(".used/" in name for name in store.objects if not name.startswith(NAMES[10]))


def test_another_job_frees_what_stayed():
    """By the marker, which stays past its hour while data does."""
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        for step in (1, 2, 3):
            keeper.save(state(step), step)
        keeper.remove(1)
    remove_checkpoint(Within(store, NAMES[2]))
    assert plan_pruning(store, Rule(keep_last=1)).pruning.cut_short == ()
    prune(store, Rule(keep_last=1))
    assert data_in(store, 1)
    check(store, 3)
    Checkpointer(store).remove(3)
    assert all(name.endswith(REMOVED) for name in store.objects)


def test_marker_stays_for_as_long_as_data_does(monkeypatch):
    monkeypatch.setattr("milepost.steps.shelf.LATE_S", 0.0)
    store = objects()
    with Checkpointer(store, incremental=True, keep_last=1) as keeper:
        for step in range(1, 5):
            keeper.save(state(step), step)
            assert [name for name in store.objects if name.startswith(NAMES[1]) and "manifest" in name]
        keeper.save({"other": torch.ones(9)}, 5)
        for step in (6, 7, 8):
            keeper.save({"other": torch.ones(9)}, step, max_depth=1)
    assert not [name for name in store.objects if name.startswith(NAMES[1])]


def test_place_can_be_its_own_base():
    store = objects()
    for step in range(1, 6):
        receipt = save(store, 1, 1, moved=step)
        assert receipt.reused_bytes == (FROZEN_BYTES if step > 1 else 0)
        check(store, 1, moved=step)
    assert len({name.split("/")[2] for name in data_in(store, 1)}) == 2
    milepost.save({"other": torch.ones(3)}, Within(store, NAMES[1]))
    assert len({name.split("/")[2] for name in store.list(f"{NAMES[1]}/data/")}) == 1, "no data, no signs"


def test_step_that_is_saved_again_keeps_what_others_use():
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        keeper.save(state(1), 1)
        keeper.save(state(2), 2)
        with Checkpointer(store) as plain:
            plain.save({"other": torch.ones(5)}, 1)
            assert plain.open(1).generation == 2
        check(store, 2)
        keeper.remove(2)
        assert len(keeper.steps()) == 1
    Shelf(store).prune(Rule(keep_last=1))
    assert len({name.split("/")[2] for name in data_in(store, 1)}) == 1, "what step 2 used is gone"


def test_listing_says_why_data_of_a_removed_step_stays():
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        for step in (1, 2):
            keeper.save(state(step), step)
        keeper.remove(1)
        first, second = look_at(store).steps
        assert (first.state, first.used_by, second.state) == ("removed", (NAMES[2],), "whole")
        assert first.reason == f"removed; its data is used by {NAMES[2]}"
        assert keeper.remove_unfinished() == []
        assert prune(store, Rule(keep_last=1), unfinished=True).unfinished == ()
        check(store, 2)


def test_step_whose_used_data_is_gone_is_not_whole():
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        for step in (1, 2):
            keeper.save(state(step), step)
        store.delete(*data_in(store, 1)[:1])
        store.delete(*store.list(f"{NAMES[1]}/manifest"))
        [_, found] = look_at(store).steps
        assert (found.state, NAMES[1] in found.reason) == ("damaged", True)
        with pytest.raises(milepost.CheckpointDamaged):
            keeper.restore(state())
        receipt = keeper.save(state(3), 3)
        assert receipt.reused_bytes == 0, "a base that cannot be used costs bytes"


def test_copy_holds_all_its_data():
    store = objects()
    for step in (1, 2):
        save(store, step, step - 1 or 19)
    milepost.copy(Within(store, NAMES[2]), Within(store, NAMES[5]))
    for step in (1, 2):
        remove_checkpoint(Within(store, NAMES[step]))
    check(store, 5, moved=2)
    assert save(store, 6, 5).reused_bytes == ADAPTER_BYTES * 0, "its older files have names of its own"
    check(store, 6)


def test_base_elsewhere_is_not_used():
    one, other = objects(), objects()
    save(one, 1, 19)
    milepost.save(state(2), Within(other, NAMES[2]), base=Within(one, NAMES[1]))
    milepost.save(state(3), Within(other, NAMES[3]), base=AtGeneration(Within(one, NAMES[1]), 1))
    milepost.save(state(4), other, base=other)
    for store, name in ((other, NAMES[2]), (other, NAMES[3])):
        with milepost.open(Within(store, name)) as checkpoint:
            assert not checkpoint.manifest.older
    assert not [name for store in (one, other) for name in store.objects if sign_at(name.partition("/")[2])]


def test_copy_of_a_run_in_a_folder_keeps_what_its_steps_use(tmp_path):
    """Made by a tool that knows nothing of checkpoints: signs and notes come along."""
    store = objects()
    with Checkpointer(store, incremental=True) as keeper:
        for step in (1, 2, 3):
            keeper.save(state(step), step)
    for name, content in store.objects.items():
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_bytes(content)
    local = LocalStore(tmp_path)
    (tmp_path / "latest").symlink_to(tmp_path / NAMES[3])
    assert milepost.open(tmp_path / "latest").verify().ok
    elsewhere = tmp_path.with_name("elsewhere")
    (tmp_path / NAMES[3]).rename(elsewhere)
    (tmp_path / NAMES[3]).symlink_to(elsewhere)
    assert milepost.open(tmp_path / NAMES[3]).verify().ok
    (tmp_path / NAMES[3]).unlink()
    elsewhere.rename(tmp_path / NAMES[3])
    (tmp_path / "latest").unlink()
    with Checkpointer(tmp_path, incremental=True, keep_last=1) as keeper:
        for gone in (1, 2):
            keeper.remove(gone)
            check(local, 3)
        assert keeper.save(state(4), 4).reused_bytes == FROZEN_BYTES, "by a second name"
        check(local, 4)
        keeper.save(state(5), 5)
    assert {path.name for path in tmp_path.iterdir()} == {NAMES[5]}


# --- what goes wrong


@pytest.mark.parametrize("when", ["removed", "replaced", "removed and saved again"])
def test_base_that_dies_before_the_look_is_not_used(when, monkeypatch):
    monkeypatch.setattr("milepost.commit.removal.LATE_S", 0.0)
    store = objects()
    save(store, 1, 19)
    base = Within(store, NAMES[1])

    class Dying(CountingStore):
        def before(self, number, call):
            if ".used/" in call and call.startswith("create"):
                if when == "replaced":
                    milepost.save({"other": 1}, base)
                    return
                found = remove_checkpoint(base)
                if when == "removed and saved again":  # an hour later, so that the numbers begin again
                    store.delete(*store.list(NAMES[1]))
                    milepost.save(state(9), base)
                    assert found.marker not in list(base.list(""))

    receipt = milepost.save(state(2), Within(Dying(store), NAMES[2]), base=base)
    assert receipt.reused_bytes == 0
    check(store, 2)


@pytest.mark.parametrize("what", ["uses/", ".used/"])
@pytest.mark.parametrize("fate", ["late", "twice", "refused"])
def test_late_notes_and_signs_cost_bytes_at_worst(what, fate):
    inner = objects()
    save(inner, 1, 19)

    class Refusing(LateStore):
        def before(self, number, call):
            if call.startswith("create") and what in call and fate == "refused":
                raise milepost.StorageError("no")

    store = Refusing(inner, lambda call: fate if call.startswith("create") and what in call else None)
    store.fate = (lambda _: None) if fate == "refused" else store.fate
    receipt = save(store, 2, 1)
    assert receipt.reused_bytes == (FROZEN_BYTES if fate == "twice" else 0)
    shelf = Shelf(inner)
    shelf.remove(1)
    check(inner, 2)
    store.arrive()
    check(inner, 2)
    shelf.remove(2)
    store.arrive()
    Shelf(inner).finish()
    assert all(name.endswith(REMOVED) for name in inner.objects), sorted(inner.objects)


def test_copies_that_come_after_the_removal_are_deleted():
    inner = objects()
    save(inner, 1, 19)
    store = LateStore(inner, lambda call: "twice" if "uses/" in call or ".used/" in call else None)
    save(store, 2, 1)
    shelf = Shelf(inner)
    shelf.remove(1)
    shelf.remove(2)
    store.arrive()
    assert len(inner.objects) > 2
    for _ in range(2):  # the note, by which the sign is live, may be looked at after it
        Shelf(inner).finish()
    assert all(name.endswith(REMOVED) for name in inner.objects), sorted(inner.objects)


def test_base_that_lost_a_race_keeps_what_was_signed():
    """Its manifest was there for a moment: long enough for another save to be based on it."""
    store = objects()

    class Overtaken(CountingStore):
        def after(self, number, call):
            if call.startswith("create") and "manifest-00000001" in call:
                assert save(store, 2, 1).reused_bytes == FROZEN_BYTES
                milepost.save({"other": 1}, Within(store, NAMES[1]))

    with pytest.raises(milepost.SaveConflict):
        save(Overtaken(store), 1, 19)
    check(store, 2)


def test_unfinished_save_that_became_a_base_keeps_what_was_signed():
    """Its manifest came late, after those who remove its data have looked, and before they have marked it."""
    inner = objects()
    late = LateStore(inner, lambda call: "late" if "manifest" in call else None)
    with pytest.raises(milepost.NoReply):
        save(late, 1, 19)

    class Slow(CountingStore):
        def before(self, number, call):
            if call.startswith("create") and call.endswith(REMOVED):
                late.arrive()
                assert save(inner, 2, 1).reused_bytes == FROZEN_BYTES

    assert remove_unfinished(Within(Slow(inner), NAMES[1])).leaves_data
    check(inner, 2)


def test_note_that_comes_after_a_look_is_seen():
    """One rank's note was there when another's was not yet. What a look did not find is not remembered."""
    store, user = objects(), User("b", "00000001-00000000000000bb")
    signs = [Sign(FileId("00000001-00000000000000aa", 0), user, rank) for rank in (0, 1)]
    notes = Notes(store)
    store.create(f"b/{note_name(user.save_id, 0)}", b"")
    assert notes.live(signs[:1]) == {signs[0]}
    store.create(f"b/{note_name(user.save_id, 1)}", b"")
    assert notes.live(signs) == set(signs)


def test_failed_save_leaves_its_base_as_it_was():
    store = objects()
    save(store, 1, 19)

    class Full(CountingStore):
        def before(self, number, call):
            if call.startswith("create") and "manifest" in call:
                raise milepost.StorageError("no room")

    with pytest.raises(milepost.StorageError):
        save(Full(store), 2, 1)
    assert not list(store.list(NAMES[2]))
    remove_checkpoint(Within(store, NAMES[1]))
    assert all(name.endswith(REMOVED) for name in store.objects)


# --- ranks, requests, a real server


def on_ranks(comm, store, step, base, moved, plans=None):
    rows = torch.arange(4 * 30_000, dtype=torch.float32).reshape(4, -1)
    size = -(-4 // comm.size)
    part = rows[comm.rank * size : (comm.rank + 1) * size].clone()
    given = {"frozen": milepost.Sharded((4, 30_000), {(comm.rank * size, 0): part}), "step": moved}
    given |= {"adapter": torch.full((50,), float(moved))}
    if moved == 3 and comm.rank == 1:
        given["only here"] = torch.ones(7)
    return milepost.save(
        given, Within(store, NAMES[step]), base=Within(store, NAMES[base]), process_group=comm, plans=plans
    )


def test_ranks_use_files_of_other_ranks():
    store = objects()
    for step, world in ((1, 4), (2, 4), (3, 2), (4, 4)):
        plans = [milepost.Plans() for _ in range(world)]
        run_ranks(world, lambda comm, s=step, p=plans: on_ranks(comm, store, s, s - 1 or 19, s, p[comm.rank]))
    shelf = Shelf(store)
    for gone in (1, 2, 3):
        shelf.remove(gone)
        for step in shelf.steps():
            with milepost.open(Within(store, NAMES[step])) as checkpoint:
                assert checkpoint.verify().ok
                assert torch.equal(checkpoint["frozen"].read().ravel(), torch.arange(120_000.0))
    shelf.remove(4)
    assert all(name.endswith(REMOVED) for name in store.objects)


def test_save_that_is_written_again_keeps_what_it_uses():
    """Where the structure of a rank changed, the first attempt was in vain, and its notes are gone."""
    store, plans = objects(), [milepost.Plans() for _ in range(2)]
    for step in (1, 2, 3):
        receipts = run_ranks(2, lambda comm, s=step: on_ranks(comm, store, s, s - 1 or 19, s, plans[comm.rank]))
        assert (receipts[0].reused_bytes > 0) == (step > 1)
    shelf = Shelf(store)
    shelf.remove(1)
    shelf.remove(2)
    with milepost.open(Within(store, NAMES[3])) as checkpoint:
        assert checkpoint.verify().ok
    shelf.remove(3)
    assert all(name.endswith(REMOVED) for name in store.objects)


def test_incremental_save_takes_few_more_requests():
    store = RequestStore(objects())
    counts = []
    for step in (1, 2, 3):
        store.requests.clear()
        save(store, step, step - 1 or 19)
        counts.append([one for one in store.requests if ".safetensors" not in one])
    assert len(counts[0]) == 6 + 2, "is there a base?"
    for requests in counts[1:]:
        more = len(requests) - 6
        assert more == 2 + 1 + 1 + 1 + 2 + 1, "find the base; read it; note; sign; look; look for the used data"


def test_pass_over_steps_takes_few_requests_for_data_that_stays():
    taken = {}
    for incremental in (False, True):
        store = RequestStore(objects())
        with Checkpointer(store, incremental=incremental, keep_last=2) as keeper:
            for step in range(1, 8):
                store.requests.clear()
                keeper.save(state(step), step)
        taken[incremental] = [one for one in store.requests if ".safetensors" not in one]
    assert data_in(store, 1), "it stays"
    assert len(taken[False]) == 6 + 2 + 1 + 3 + 8, "save, look, the other that is kept, is it whole, remove"
    saving = 4 + 1 + 1 + 1 + 2 + 1  # find the base, read it; note, sign, look; look for the used data
    keeping = 1 + 1 + 3 + 1  # is it whole; signs at step 1, notes of the steps that had them, a dead sign
    assert len(taken[True]) - len(taken[False]) == saving + keeping


def test_run_on_a_real_server(seaweed, monkeypatch, tmp_path):
    """Unchanged data is not uploaded; other ranks read it; it ends with its last user."""
    for key, value in seaweed.environment.items():
        monkeypatch.setenv(key, value)
    with seaweed.place() as url:
        store, counts = Uploads(store_at(url)), []
        with Checkpointer(store, incremental=True) as keeper:
            for step in (1, 2, 3):
                keeper.save(state(step), step)
                counts.append(store.sent)
                store.sent = 0
        assert counts[0] > FROZEN_BYTES > 4 * counts[1]
        assert counts[2] < ADAPTER_BYTES + 8192
        Checkpointer(url).remove(1)
        check(store, 2)
        check(store, 3)
        changes = milepost.diff(below(url, NAMES[2]), below(url, NAMES[3]))
        assert {row.key for row in changes.tensors} == {"adapter"}
        rows = run_ranks(2, lambda comm: load_rows(comm, below(url, NAMES[3])))
        assert torch.equal(torch.cat(rows), state()["frozen"])
        milepost.copy(below(url, NAMES[3]), tmp_path / "home")
        prune(url, Rule(keep_last=1))
        check(store, 3)
        Checkpointer(url).remove(3)
        assert {name for name in store.list("") if not name.endswith(REMOVED)} == set()
        with milepost.open(tmp_path / "home") as checkpoint:
            assert checkpoint.verify().ok


def load_rows(comm, url):
    """This rank's half of the tensor that stays."""
    size = FROZEN_BYTES // 4
    target = {"frozen": milepost.Sharded((size,), {(comm.rank * size // 2,): torch.zeros(size // 2)})}
    milepost.load(target, url, process_group=comm, allow_unexpected=True)
    return target["frozen"].parts[0].data
