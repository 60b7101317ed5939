"""One checkpoint is copied as it is, or not at all: between all kinds of places, damaged, replaced and refused ones."""

import json
import shutil
import struct
import threading
from pathlib import Path

import pytest
import torch

import milepost
from faults.power import Disk, NotHere
from milepost.copying.equality import holds_the_same
from milepost.core.limits import MIB
from milepost.data.read import Files
from milepost.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, SaveConflict, StorageError
from milepost.store import AtGeneration, HttpStore, LocalStore, MemoryStore, Traits, Within
from milepost.testing import CountingStore, run_ranks
from tests.commit.object_places import objects
from tests.web import Web, busy, cut, hang_up

GOLDEN = Path(__file__).parent.parent / "golden"
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
COARSE = Traits(part_bytes=1 << 20, range_bytes=1 << 18, requests=4, is_current=True)


def state(number=1.0):
    return {"w": torch.full((700, 300), number), "b": torch.arange(5) + int(number), "step": int(number)}


def save_on_ranks(place, number=1.0):
    """A checkpoint of three ranks that has everything a manifest can have."""

    def save(comm):
        sharded = milepost.Sharded((300, 70), {(100 * comm.rank, 0): torch.randn(100, 70)})
        everything = {**state(number), "cut": sharded, "own": milepost.PerRank(comm.rank)}
        options = {"metadata": {"loss": number}, "statistics": "histogram", "healthy": True}
        milepost.save(everything, place, process_group=comm, **options)

    run_ranks(3, save)
    return place


def files_of(store):
    return Files(store, milepost.open(store).manifest)


def told(manifest):
    """What a manifest says, without the place and what follows from it."""
    fields = {name: getattr(manifest, name) for name in manifest.__struct_fields__}
    return {k: v for k, v in fields.items() if k not in ("generation", "save_id", "files", "replaced")}


def assert_copied(source, target):
    """Whole, with the same bytes and the same words."""
    with milepost.open(source) as mine, milepost.open(target) as theirs:
        assert theirs.verify().ok
        assert told(theirs.manifest) == told(mine.manifest)
        assert theirs.manifest.save_id != mine.manifest.save_id
        for file in mine.manifest.files:
            one, other = mine._files.of(file.rank), theirs._files.of(file.rank)
            assert one.data(0, one.header.data_bytes) == other.data(0, other.header.data_bytes)
            assert list(one.header.entries.items()) == list(other.header.entries.items())


@pytest.mark.parametrize("golden", ["v1", "v1-parts"])
@pytest.mark.parametrize("kind", ["folder", "objects", "large objects", "within"])
def test_copy_holds_the_same_bytes_and_words(tmp_path, golden, kind):
    target = {
        "folder": LocalStore(tmp_path / "copy"),
        "objects": objects(),
        "large objects": MemoryStore(traits=COARSE),
        "within": Within(MemoryStore(), "a/b"),
    }[kind]
    done = milepost.copy(GOLDEN / golden, target)
    assert [(step.state, step.generation) for step in done.steps] == [("copied", 1)]
    assert_copied(GOLDEN / golden, target)
    assert milepost.copy(target, tmp_path / "back").steps[0].state == "copied"
    assert_copied(GOLDEN / golden, tmp_path / "back")


def test_files_of_a_copy_differ_in_the_save_id_only(tmp_path):
    milepost.copy(GOLDEN / "v1", tmp_path)
    for mine, theirs in zip(sorted(GOLDEN.glob("v1/data/*/*")), sorted(tmp_path.glob("data/*/*")), strict=True):
        one, other = mine.read_bytes(), theirs.read_bytes()
        heads = [data[8 : 8 + struct.unpack("<Q", data[:8])[0]] for data in (one, other)]
        assert one[8 + len(heads[0]) :] == other[8 + len(heads[1]) :]
        first, second = map(json.loads, heads)
        assert first["__metadata__"].pop("save_id") == mine.parent.name
        assert second["__metadata__"].pop("save_id") == theirs.parent.name
        assert list(first.items()) == list(second.items())


def test_statistics_health_times_and_metadata_survive(tmp_path):
    save_on_ranks(tmp_path / "a")
    store = objects()
    milepost.copy(tmp_path / "a", store)
    assert_copied(tmp_path / "a", store)
    with milepost.open(store) as copied, milepost.open(tmp_path / "a") as original:
        assert (copied.metadata, copied.health, copied.world) == ({"loss": 1.0}, original.health, 3)
        assert copied.statistics == original.statistics != {}
        assert copied.manifest.timings != ()
        assert copied["own"] == {0: 0, 1: 1, 2: 2}


def test_what_is_there_already_is_not_copied_again(tmp_path):
    save_on_ranks(tmp_path / "a")
    shutil.copytree(tmp_path / "a", tmp_path / "by other means")
    store = objects()
    milepost.copy(tmp_path / "a", store)
    for place in (store, tmp_path / "by other means"):
        counting = CountingStore(place if place is store else LocalStore(place))
        made = []
        counting.before = lambda _, call, made=made: made.append(call.split()[0])
        assert milepost.copy(tmp_path / "a", counting, overwrite=True).steps[0].state == "there"
        assert {"create", "writer", "delete"}.isdisjoint(made)


@pytest.mark.parametrize("change", ["value", "metadata", "lost file", "damaged table"])
def test_what_only_looks_the_same_is_another_checkpoint(tmp_path, change):
    save_on_ranks(tmp_path / "a")
    milepost.copy(tmp_path / "a", tmp_path / "b")
    [first, *_] = sorted((tmp_path / "b").glob("data/*/*"))
    if change == "lost file":
        first.unlink()
    elif change == "damaged table":
        data = bytearray(first.read_bytes())
        data[-1] ^= 1
        first.write_bytes(data)
    else:
        other = state(2.0 if change == "value" else 1.0)
        shutil.rmtree(tmp_path / "b")
        milepost.save(other, tmp_path / "b", metadata={"other": 1})
    with pytest.raises(InvalidRequest, match=r"holds another checkpoint.*--overwrite"):
        milepost.copy(tmp_path / "a", tmp_path / "b")
    assert milepost.copy(tmp_path / "a", tmp_path / "b", overwrite=True).steps[0].state == "copied"
    assert_copied(tmp_path / "a", tmp_path / "b")


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_any_changed_byte_is_named_and_nothing_is_committed(tmp_path, store_of):
    save_on_ranks(tmp_path / "a")
    [_, file, _] = sorted((tmp_path / "a").glob("data/*/*"))
    good = file.read_bytes()
    for at in [0, 9, 60, 4096, len(good) // 2, len(good) - 9, len(good) - 1]:
        file.write_bytes(good[:at] + bytes([good[at] ^ 4]) + good[at + 1 :])
        store = store_of()
        with pytest.raises(CheckpointDamaged) as caught:
            milepost.copy(tmp_path / "a", store)
        assert "00001.safetensors" in str(caught.value)
        if 4096 <= at < len(good) - 8:
            assert "they hold" in str(caught.value)
            assert "'cut[100:200,0:70]'" in str(caught.value)
        assert list(store.list("")) == []
        file.write_bytes(good)
    milepost.copy(tmp_path / "a", store)
    assert_copied(tmp_path / "a", store)


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize("changes", ["replaced", "removed"])
def test_source_that_changes_meanwhile_is_opened_again_or_named(store_of, changes):
    source, target = save_on_ranks(store_of()), MemoryStore()

    class Changing(CountingStore):
        manifests = 0

        def before(self, number, call):
            self.manifests += call.startswith("reader manifest-00000001")
            if call.startswith("reader data/") and self.manifests == 2:  # to copy it; the first was to look at it
                self.manifests += 1
                if changes == "replaced":
                    milepost.save(state(2.0), self.inner)
                else:
                    self.inner.delete(*self.inner.list(""))

    if changes == "removed":
        with pytest.raises(CheckpointNotFound, match="was removed while it was copied"):
            milepost.copy(Changing(source), target)
        assert list(target.list("")) == []
        return
    milepost.copy(Changing(source), target)
    assert milepost.open(target)["step"] == 2
    assert [name for name in target.list("data/") if milepost.open(target).manifest.save_id not in name] == []


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_of_two_copies_to_one_place_one_wins(tmp_path, store_of):
    save_on_ranks(tmp_path / "a")
    save_on_ranks(tmp_path / "b", 2.0)
    store, start, outcomes = store_of(), threading.Barrier(2), {}

    class Together(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                start.wait(60)

    def run(name):
        try:
            milepost.copy(tmp_path / name, Together(store))
            outcomes[name] = "copied"
        except SaveConflict as error:
            outcomes[name] = str(error)

    threads = [threading.Thread(target=run, args=(name,)) for name in "ab"]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    [winner] = [name for name, outcome in outcomes.items() if outcome == "copied"]
    [told_to_other] = [outcome for outcome in outcomes.values() if outcome != "copied"]
    assert "another job committed" in told_to_other
    assert_copied(tmp_path / winner, store)
    assert all(milepost.open(store).manifest.save_id in name for name in store.list("data/"))


def test_full_disk_is_an_error_and_leaves_nothing(tmp_path):
    milepost.save({f"w{i}": torch.randn(MIB // 4) for i in range(6)}, tmp_path / "a")
    try:
        with Disk(tmp_path, "tmpfs", 4 * MIB) as disk:
            with pytest.raises(StorageError, match=r"No space left.*Free some space"):
                milepost.copy(tmp_path / "a", disk.path / "b")
            assert [path for path in disk.path.rglob("*") if path.is_file()] == []
    except NotHere as error:
        pytest.skip(str(error))


@pytest.mark.parametrize("fault", [busy, cut, hang_up])
def test_copy_from_the_web_outlives_faults(tmp_path, fault):
    save_on_ranks(tmp_path / "a")
    with Web(tmp_path) as web:
        url = f"{web.url}/a"
        holder = HttpStore(url)
        milepost.open(holder)
        web.faults = [fault, lambda _: False] * 8
        milepost.copy(url, tmp_path / "b")
        assert_copied(tmp_path / "a", tmp_path / "b")
        with pytest.raises(InvalidRequest, match="only read"):
            milepost.copy(tmp_path / "b", f"{web.url}/c")


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_interrupted_copy_leaves_nothing(store_of):
    class Interrupted(CountingStore):
        done = 0

        def after(self, number, call):
            if call.startswith(("commit data/", "create data/")):
                self.done += 1
                if self.done == 2:
                    raise KeyboardInterrupt

    source, target = save_on_ranks(MemoryStore()), store_of()
    with pytest.raises(KeyboardInterrupt):
        milepost.copy(source, Interrupted(target))
    assert list(target.list("")) == []


def test_older_generation_and_empty_states_are_copied(tmp_path):
    milepost.save({}, tmp_path / "empty")
    milepost.copy(tmp_path / "empty", tmp_path / "still empty")
    assert milepost.open(tmp_path / "still empty").state() == {}
    milepost.save(state(1.0), tmp_path / "a")
    store = AtGeneration(tmp_path / "a", 1)
    milepost.copy(store, tmp_path / "b")
    assert milepost.open(tmp_path / "b")["step"] == 1


def test_what_makes_no_sense_is_refused(tmp_path):
    milepost.save(state(), tmp_path / "a")
    (tmp_path / "link").symlink_to(tmp_path / "a")
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        keeper.save(state(), 1)
    torch.save({"w": torch.ones(2)}, tmp_path / "w.pt")
    refused = [
        ("a", "a", "cannot be copied to itself"),
        ("a", "link", "cannot be copied to itself"),
        ("run", "run/inside", "cannot be copied into itself"),
        ("a", "run", "is a run: it has a checkpoint in step-0000000001. Say which step the copy becomes"),
        ("run", "a", "is a checkpoint, and a run is copied into a folder"),
        ("w.pt", "b", "a checkpoint of the format torch.*milepost convert"),
    ]
    for source, target, words in refused:
        with pytest.raises(InvalidRequest, match=words):
            milepost.copy(tmp_path / source, tmp_path / target)
    with pytest.raises(InvalidRequest, match="one checkpoint, not a run"):
        milepost.copy(tmp_path / "a", tmp_path / "b", newest=True)
    with pytest.raises(CheckpointNotFound, match="Nothing was saved here"):
        milepost.copy(tmp_path / "nothing", tmp_path / "b")
    memory = MemoryStore()
    with pytest.raises(InvalidRequest, match="to itself"):
        milepost.copy(Within(memory, "a"), Within(memory, "a"))
    assert not (tmp_path / "b").exists()


def test_checkpoint_of_another_library_is_replaced_only_if_asked(tmp_path):
    import torch.distributed.checkpoint as dcp

    milepost.save(state(), tmp_path / "a")
    dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path / "b", no_dist=True)
    with pytest.raises(InvalidRequest, match="holds another checkpoint"):
        milepost.copy(tmp_path / "a", tmp_path / "b")
    milepost.copy(tmp_path / "a", tmp_path / "b", overwrite=True)
    assert_copied(tmp_path / "a", tmp_path / "b")
    assert not (tmp_path / "b" / ".metadata").exists()


def test_equality_looks_at_entries_and_checksums(tmp_path):
    one, other = save_on_ranks(MemoryStore()), MemoryStore()
    milepost.copy(one, other)
    assert holds_the_same(files_of(one), files_of(other), other)
    third = save_on_ranks(MemoryStore())
    assert not holds_the_same(files_of(one), files_of(third), third)
