"""Object stores: how many requests a save, an open and a removal cost, beside those for data."""

import time

import pytest
import torch

import milepost
from milepost.commit.find import look_whole
from milepost.commit.removal import remove_checkpoint
from milepost.store import AtGeneration
from milepost.testing import run_ranks
from tests.commit.object_places import OBJECTS, FoldersStay, RequestStore, objects

WIDE = 5 * OBJECTS.part_bytes


def state(number):
    return {"w": torch.full((WIDE // 4,), float(number)), "n": number}


def test_save_takes_at_most_ten_requests_beside_its_data():
    store = RequestStore(objects())
    counts = []
    for number in (1, 2, 3):
        milepost.save(state(number), store)
        counts.append(len(store.taken()))
    assert counts == [6, 10, 10]
    with pytest.raises(milepost.InvalidRequest, match="already exists"):
        milepost.save(state(4), store, overwrite=False)
    assert len(store.taken()) == 1


def test_save_of_several_ranks_takes_no_more():
    store = RequestStore(objects())
    for _ in range(2):
        run_ranks(3, lambda comm: milepost.save(state(1), store, process_group=comm))
        requests = store.taken()
        assert len(requests) <= 10, requests


def test_opening_takes_two_requests():
    store = RequestStore(objects())
    milepost.save(state(1), store)
    store.taken()
    with milepost.open(store) as checkpoint:
        assert store.taken() == ["list  shallow", "get manifest-00000001.json"]
        assert (checkpoint["w"][:3] == 1).all()
    store.taken()
    milepost.open(AtGeneration(store, 1))
    assert len(store.taken()) == 2


def test_opening_where_there_is_nothing_waits_for_nothing():
    store = RequestStore(objects())
    start = time.monotonic()
    with pytest.raises(milepost.CheckpointNotFound, match="Nothing was saved here"):
        milepost.open(store)
    assert time.monotonic() - start < 2
    assert len(store.taken()) <= 4


def test_look_at_a_whole_checkpoint_takes_three_requests():
    store = RequestStore(objects())
    milepost.save(state(1), store)
    store.taken()
    look_whole(store)
    assert len(store.taken()) == 3
    inner = store.inner
    inner.delete(next(name for name in inner.objects if name.endswith("-00003")))
    with pytest.raises(milepost.CheckpointDamaged, match="safetensors-00003 is missing"):
        look_whole(store)


def test_removal_deletes_in_batches():
    store = RequestStore(objects())
    milepost.save(state(1), store)
    data = [name for name in store.inner.objects if name.startswith("data/")]
    assert len(data) > 5
    store.taken()
    remove_checkpoint(store)
    requests = store.taken()
    assert len(requests) == 8, requests
    assert requests.count("delete") == 2, "the manifest, and then all data"
    assert not list(store.list("data/"))


def test_index_of_torch_is_seen_by_the_same_listing():
    store = RequestStore(objects())
    milepost.save(state(1), store)
    store.inner.create(".metadata", b"\x80index")
    store.taken()
    with pytest.raises(milepost.AmbiguousCheckpoint):
        milepost.open(store)
    assert len(store.taken()) == 3
    milepost.save(state(2), store)
    assert [name for name in store.inner.objects if name.startswith(".metadata")] == [".metadata.replaced-by-00000002"]
    assert (milepost.open(store)["w"][:2] == 2).all()


def test_folders_that_stay_listed_cost_no_requests():
    store = FoldersStay(objects())
    for number in range(8):
        milepost.save(state(number), store)
        assert len(store.taken()) <= 10
    assert len(list(store.list("data/", shallow=True))) == 8
    assert {name.split("/")[1] for name in store.inner.list("data/")} == {milepost.open(store).manifest.save_id}
