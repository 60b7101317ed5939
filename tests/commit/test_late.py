"""Object stores: requests that take effect late, or twice. A reader still finds old or new, whole, and one wins."""

import contextlib
import random
from functools import partial

import pytest
import torch

import milepost
from milepost.commit.attempt import take_aim
from milepost.commit.find import REMOVED, generations, missing_objects, parse, read_manifest
from milepost.commit.removal import finish_removal, forget_removal, remove_checkpoint, remove_unfinished
from milepost.core.manifest import manifest_name
from milepost.testing import LateStore, ReplyLosingStore, run_ranks
from tests.commit.object_places import OBJECTS, Turns, objects
from tests.commit.writers import WRITERS, by_copy


def state(number):
    return {"a": torch.full((OBJECTS.part_bytes // 3,), float(number)), "n": number}


def read(place):
    with milepost.open(place) as checkpoint:
        assert checkpoint.verify().ok
        assert (checkpoint["a"].read() == checkpoint["n"]).all()
        return checkpoint["n"]


def late_manifest(call):
    return "late" if call.startswith("create manifest") else None


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
@pytest.mark.parametrize("arrives", ["before the next save", "during it", "after it", "never"])
def test_save_without_a_reply_may_appear_at_any_time(write, arrives):
    inner = objects()
    milepost.save(state(1), inner)
    store = LateStore(inner, late_manifest)

    def work(comm):
        with pytest.raises((milepost.NoReply, milepost.dcp.api.CheckpointException), match="may still take effect"):
            write(state(2) | {"wide": torch.ones(1 << 20)}, store if comm.rank == comm.coordinator else inner, comm)

    run_ranks(1 if write is by_copy else 2, work, timeout_s=60)
    assert read(inner) == 1
    if arrives == "before the next save":
        store.arrive()
        assert read(inner) == 2, "it is whole: no rank has removed its data"

    class During(LateStore):
        def before(self, number, call):
            if call.startswith("create manifest") and arrives == "during it":
                store.arrive()
                assert read(inner) == 2

    write(state(3), During(inner, lambda _: None))
    assert read(inner) == 3
    if arrives == "after it":
        store.arrive()
        assert read(inner) == 3
    write(state(4), inner)
    assert read(inner) == 4
    kept = milepost.open(inner).manifest
    assert {name for name in inner.objects if kept.save_id not in name} == {manifest_name(kept.generation)}


def test_reply_that_never_came_says_what_to_do():
    store = LateStore(objects(), late_manifest)
    with pytest.raises(milepost.NoReply, match=r"generation 1 of memory://.*appears, whole.*Saving again is safe"):
        milepost.save(state(1), store)
    with pytest.raises(milepost.CheckpointNotFound, match="never finished"):
        milepost.open(store)


def test_save_that_may_not_overwrite_never_replaces_a_late_one():
    inner = objects()
    store = LateStore(inner, late_manifest)
    with pytest.raises(milepost.NoReply):
        milepost.save(state(1), store, overwrite=False)
    store.fate = lambda _: None

    class During(LateStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                store.arrive()

    with pytest.raises(milepost.SaveConflict, match="generation 1"):
        milepost.save(state(2), During(inner, lambda _: None), overwrite=False)
    assert read(inner) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt, RuntimeError, milepost.StorageError])
def test_interrupt_between_request_and_reply_keeps_the_data(error):
    """Ctrl-C, or an error of a client that nobody translated, while the request is under way: it may still arrive."""
    inner, interrupted = objects(), error is not milepost.StorageError

    class Interrupted(LateStore):
        def after(self, number, call):
            if call.startswith("create manifest"):
                raise error("refused")

    store = Interrupted(inner, late_manifest)
    with pytest.raises(error):
        milepost.save(state(1), store)
    assert bool(inner.objects) == interrupted, "what was refused leaves nothing"
    store.arrive()
    assert not interrupted or read(inner) == 1


def test_late_copy_of_a_deletion_hits_no_newer_checkpoint():
    """The request that deleted a manifest was sent twice. The second copy comes when the step was saved again."""
    inner = objects()
    store = LateStore(inner, lambda call: "twice" if call.startswith("delete") else None)
    for number in (1, 2, 3):
        milepost.save(state(number), store)
        marker = remove_checkpoint(store).marker
        with pytest.raises(milepost.CheckpointNotFound, match="It was removed"):
            milepost.open(store)
        assert [name for name in inner.objects if not name.endswith(REMOVED)] == []
        milepost.save(state(10 + number), store)
        store.arrive()
        assert read(store) == 10 + number
        assert marker not in inner.objects, "the save has swept it"


def test_manifest_that_comes_after_the_removal_is_no_checkpoint():
    inner = objects()
    store = LateStore(inner, late_manifest)
    with pytest.raises(milepost.NoReply):
        milepost.save(state(1), store, overwrite=False)
    milepost.save(state(2), inner, overwrite=False)
    assert milepost.open(inner).generation == 1
    marker = remove_checkpoint(inner).marker
    store.arrive()
    with pytest.raises(milepost.CheckpointNotFound, match="It was removed"):
        milepost.open(inner)
    assert take_aim(inner).generation == 2
    forget_removal(inner, marker)
    assert generations(inner) == [], "its data is gone: without the marker it would be a checkpoint again"
    finish_removal(inner, [marker])
    assert inner.objects.keys() == {marker}
    forget_removal(inner, marker)
    assert not inner.objects


def test_copy_of_a_manifest_that_comes_after_the_removal_is_no_checkpoint():
    """The copy is of an older generation than the one that was removed."""
    inner = objects()
    store = LateStore(inner, lambda call: "twice" if call == f"create {manifest_name(1)}" else None)
    milepost.save(state(1), store)
    milepost.save(state(2), store)
    remove_checkpoint(store)
    store.arrive()
    assert manifest_name(1) in inner.objects
    with pytest.raises(milepost.CheckpointNotFound, match="It was removed"):
        milepost.open(inner)
    milepost.save(state(3), inner, overwrite=False)
    assert read(inner) == 3
    assert manifest_name(1) not in inner.objects


def test_lost_reply_to_the_marker_does_not_stop_a_removal():
    inner = objects()
    for call in (remove_checkpoint, remove_unfinished):
        milepost.save(state(1), inner)
        if call is remove_unfinished:
            inner.delete(manifest_name(2), manifest_name(1) + REMOVED)
        marker = call(ReplyLosingStore(inner, ["create"], repeats=True)).marker
        assert inner.objects.keys() == {marker}


def test_saver_whose_number_was_used_and_removed_is_told():
    inner = objects()

    class Slow(LateStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                milepost.save(state(2), inner, overwrite=False)
                remove_checkpoint(inner)

    with pytest.raises(milepost.SaveConflict):
        milepost.save(state(1), Slow(inner, lambda _: None), overwrite=False)
    assert generations(inner) == []


def whole(store):
    """Generation and number of the newest checkpoint, zeros if there is none. Fails if it is not whole."""
    numbers = generations(store)
    if not numbers:
        return 0, 0
    manifest = parse(store.url, numbers[0], read_manifest(store, numbers[0]))
    assert missing_objects(store, manifest) == {}, "a checkpoint without its data"
    return numbers[0], next(value.value for value in manifest.values if value.key == "n")


def save_each(place, numbers):
    """Save these numbers, one after the other, and say how each ended. Multiples of 4 may not overwrite."""
    outcomes = {}
    for number in numbers:
        try:
            milepost.save(state(number), place, overwrite=number % 4 != 0)
            outcomes[number] = "saved"
        except milepost.CheckpointError as error:
            outcomes[number] = type(error).__name__
    return outcomes


def remove_some(place):
    for _ in range(3):
        with contextlib.suppress(milepost.CheckpointError):
            remove_checkpoint(place)


@pytest.mark.parametrize("seed", range(40))
def test_savers_in_any_order_with_late_requests(seed):
    """Two jobs save to one place, call by call in turn; often a third removes. Many requests come late, or twice."""
    chance, inner, seen = random.Random(seed), objects(), [(0, 0)]
    store = LateStore(inner, lambda _: chance.choices([None, "late", "twice"], [2, 1, 1])[0])

    def watch():
        seen.append(whole(inner))
        while store.waiting and chance.random() < 0.1:
            store.arrive(chance.randrange(store.waiting))
            seen.append(whole(inner))

    turns = Turns(seed, watch)
    jobs = [partial(save_each, turns.store(store), numbers) for numbers in ((1, 2, 3, 4), (11, 12, 13, 14))]
    jobs += [partial(remove_some, turns.store(store))] * (seed % 2)
    outcomes = {number: how for found in turns.run(*jobs)[:2] for number, how in found.items()}
    assert seed % 2 or seen == sorted(seen, key=lambda one: one[0]), "the newest was never replaced by an older one"
    for number, how in outcomes.items():
        was_there = number in {one for _, one in seen}
        assert how in ("saved", "NoReply", "SaveConflict", "InvalidRequest")
        assert was_there if how == "saved" else how != "InvalidRequest" or not was_there
    milepost.save(state(99), inner)
    assert read(inner) == 99
    store.arrive()
    assert read(inner) == 99
    milepost.save(state(100), inner)
    last = milepost.open(inner).manifest
    assert {name for name in inner.objects if last.save_id not in name} == {manifest_name(last.generation)}
