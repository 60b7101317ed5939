"""Finding the newest checkpoint: old listings, a newest one that is damaged, and a chosen generation."""

import time

import pytest
import torch

import milepost
from milepost.commit import find as find_module
from milepost.commit.find import find
from milepost.commit.removal import remove_unfinished
from milepost.core.manifest import manifest_name
from milepost.store import AtGeneration, LocalStore, MemoryStore
from milepost.testing import CountingStore, run_ranks


def state(number):
    return {"w": torch.full((300,), float(number)), "n": number}


class OldListing(CountingStore):
    """A store whose listing stays as it was when this object was made, for some calls."""

    def __init__(self, inner, lasts=10**9):
        super().__init__(inner)
        self.names, self.left = list(inner.list("")), lasts

    def list(self, prefix, **depth):
        self.left -= 1
        names = self.names if self.left >= 0 else self.inner.list("")
        return iter([name for name in names if name.startswith(prefix)])


@pytest.mark.parametrize("later", [1, 2, 9])
def test_old_listing_does_not_hide_what_can_be_opened(later):
    inner = MemoryStore()
    milepost.save(state(1), inner)
    store = OldListing(inner)
    for number in range(2, 2 + later):
        milepost.save(state(number), inner)
    assert find(store)[0] == 1 + later
    assert milepost.open(store)["n"] == 1 + later


def test_old_listing_makes_no_committed_save_an_unfinished_one():
    inner = MemoryStore()
    milepost.save(state(1), inner)
    store = OldListing(inner)
    store.names.remove(manifest_name(1))
    assert remove_unfinished(store) is None
    assert milepost.open(inner).verify().ok


def test_first_checkpoint_is_found_though_the_listing_is_empty():
    inner = MemoryStore()
    store = OldListing(inner)
    milepost.save(state(1), inner)
    assert milepost.open(store)["n"] == 1


def test_newest_is_taken_though_a_listing_shows_the_one_before():
    """Before its sweep, both can be opened."""

    class NoSweep(MemoryStore):
        def delete(self, *names, durable=False):
            raise milepost.StorageError("not now")

    inner = NoSweep()
    milepost.save(state(1), inner)
    store = OldListing(inner)
    milepost.save(state(2), inner)
    assert find(store)[0] == 2


def test_listing_that_comes_right_is_waited_for():
    """Many generations later: far above what is tried by name."""
    inner = MemoryStore()
    milepost.save(state(1), inner)
    store = OldListing(inner, lasts=4)
    for number in range(2, 40):
        milepost.save(state(number), inner)
    assert milepost.open(store)["n"] == 39


def test_listing_that_stays_wrong_is_said_after_some_time(monkeypatch):
    monkeypatch.setattr(find_module, "PATIENCE_S", 0.3)
    inner = MemoryStore()
    milepost.save(state(1), inner)
    store = OldListing(inner)
    inner.objects.clear()
    start = time.monotonic()
    with pytest.raises(
        milepost.CheckpointNotFound, match=r"lists manifest-00000001.json, which cannot be opened.*again"
    ):
        milepost.open(store)
    assert time.monotonic() - start >= 0.3
    assert store.calls < 1000, "it paused"


def test_save_with_an_old_listing_aims_above_what_is_there():
    inner = MemoryStore()
    empty = OldListing(inner)
    milepost.save(state(1), inner)
    with pytest.raises(milepost.InvalidRequest, match="Checkpoint already exists"):
        milepost.save(state(0), empty, overwrite=False)
    store = OldListing(inner, lasts=1)
    for number in (2, 3):
        milepost.save(state(number), inner)
    assert milepost.save(state(4), store).generation == 4
    assert milepost.open(inner)["n"] == 4


def test_save_goes_above_a_manifest_that_cannot_be_opened(tmp_path):
    (tmp_path / manifest_name(4)).symlink_to(tmp_path / "elsewhere")
    assert milepost.save(state(1), tmp_path).generation == 5
    assert milepost.open(tmp_path)["n"] == 1


# --- the newest is damaged, and an older one is whole


def two_generations(folder):
    """Generation 1, which was not swept, and 2."""
    milepost.save(state(1), folder)
    first = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    milepost.save(state(2), folder)
    for path, data in first.items():
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(data)


def lose_data(folder):
    for path in folder.glob("data/00000002-*/*"):
        path.unlink()


def cut_data(folder):
    for path in folder.glob("data/00000002-*/*"):
        path.write_bytes(path.read_bytes()[:100])


def damage_manifest(folder):
    path = folder / manifest_name(2)
    path.write_bytes(path.read_bytes().replace(b'"world"', b'"wrld" '))


DAMAGES = [lose_data, cut_data, damage_manifest]
WAYS = {
    "open": milepost.open,
    "load": lambda place: milepost.load(state(0), place),
    "explain": lambda place: milepost.explain(state(0), place),
    "convert": lambda place: milepost.convert(place, MemoryStore()),
    "dcp": lambda place: milepost.dcp.load(state(0), storage_reader=milepost.dcp.FileSystemReader(place)),
}


@pytest.mark.parametrize("damage", DAMAGES)
@pytest.mark.parametrize("way", WAYS.values(), ids=WAYS)
def test_older_generation_is_named_and_not_taken(tmp_path, damage, way):
    two_generations(tmp_path)
    damage(tmp_path)
    named = r"(?s)00000002.*Generation 1.*looks whole.*AtGeneration\(.*, 1\)"
    with pytest.raises((milepost.CheckpointDamaged, milepost.dcp.api.CheckpointException), match=named):
        way(tmp_path)
    target = state(0)
    milepost.load(target, AtGeneration(tmp_path, 1))
    assert target["n"] == 1
    assert (target["w"] == 1).all()
    milepost.save(state(3), tmp_path)
    assert milepost.open(tmp_path)["n"] == 3


def test_whole_newest_generation_is_read_beside_an_older_one(tmp_path):
    two_generations(tmp_path)
    assert milepost.open(tmp_path)["n"] == 2


def test_restore_goes_on_to_another_step_and_names_the_older(tmp_path, caplog):
    keeper = milepost.Checkpointer(tmp_path)
    keeper.save(state(1), 1)
    two_generations(tmp_path / "step-0000000002")
    lose_data(tmp_path / "step-0000000002")
    target = state(0)
    assert keeper.restore(target) == 1
    assert target["n"] == 1
    assert "Generation 1, which is older" in caplog.text


def test_all_ranks_hear_of_the_older_generation(tmp_path):
    two_generations(tmp_path)
    lose_data(tmp_path)

    def work(comm):
        with pytest.raises(milepost.CheckpointDamaged, match="Generation 1"):
            milepost.load(state(0), tmp_path, process_group=comm)

    run_ranks(2, work)


@pytest.mark.parametrize("place", ["local", "memory"])
def test_chosen_generation_reads_like_a_place_and_refuses_to_write(tmp_path, place):
    store = LocalStore(tmp_path) if place == "local" else MemoryStore()
    milepost.save(state(1), store)
    chosen = AtGeneration(store, 1)
    assert milepost.open(chosen).verify().ok
    target = state(0)
    milepost.load(target, chosen)
    assert target["n"] == 1
    milepost.convert(chosen, copy := MemoryStore())
    assert milepost.open(copy)["n"] == 1
    with pytest.raises(milepost.InvalidRequest, match="only read; save to the path itself"):
        milepost.save(state(2), chosen)
    with pytest.raises(milepost.CheckpointNotFound, match=r"no generation 2 at .*; the newest is 1\."):
        milepost.open(AtGeneration(store, 2))
    assert milepost.open(store)["n"] == 1
