"""Atomic: whatever dies, at any call, a reader sees the old checkpoint or the new one, whole."""

import errno
import os
import subprocess
import sys
import threading

import pytest
import torch
import xxhash

import milepost
from milepost.commit.find import generations, parse, read_manifest
from milepost.commit.publish import sweep
from milepost.core.limits import MAX_MANIFEST_BYTES
from milepost.core.manifest import manifest_name, seal
from milepost.store import LocalStore, MemoryStore
from milepost.testing import CountingStore, Crash, CrashingStore, run_ranks
from tests.commit.object_places import objects

MEMORY = {"memory": MemoryStore, "objects": objects}


def state(number):
    return {"a": torch.full((3, 5), float(number)), "b": {"c": torch.full((7,), number)}, "n": number}


def read(store):
    with milepost.open(store) as checkpoint:
        found = checkpoint.state()
        assert checkpoint.verify().ok
    assert (found["a"] == found["n"]).all()
    assert (found["b"]["c"] == found["n"]).all()
    return found["n"]


@pytest.mark.parametrize("kind", ["memory", "objects", "local"])
@pytest.mark.parametrize("earlier", [0, 1])
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_around_any_store_call_leaves_old_or_new(tmp_path, kind, earlier, after):
    def fresh(number):
        store = LocalStore(tmp_path / f"{number}") if kind == "local" else MEMORY[kind]()
        if earlier:
            milepost.save(state(1), store)
        return store

    counting = CountingStore(fresh("count"))
    milepost.save(state(2), counting)
    assert counting.calls >= 6
    seen = set()
    for at in range(1, counting.calls + 1):
        inner = fresh(at)
        with pytest.raises(Crash):
            milepost.save(state(2), CrashingStore(inner, at, after=after))
        try:
            seen.add(read(inner))
        except milepost.CheckpointNotFound:
            assert not earlier
            seen.add(0)
        milepost.save(state(3), inner)
        assert read(inner) == 3
        leftovers = [name for name in inner.list("data/") if milepost.open(inner).manifest.save_id not in name]
        # On a network file system: what the dead save has still open, since it died in this process.
        leftovers = [name for name in leftovers if "/.nfs" not in name]
        assert leftovers == [], "the next save sweeps what the dead one left"
        assert len(list(inner.list("manifest-"))) == 1
    assert seen == {earlier, 2}, "both outcomes were met"


@pytest.mark.parametrize("kind", MEMORY)
@pytest.mark.parametrize("after", [False, True])
def test_a_crash_of_one_of_three_ranks_around_any_call_leaves_old_or_new(after, kind):
    seen = set()
    for victim in range(3):
        at = 1
        while True:
            inner = MEMORY[kind]()
            milepost.save(state(1), inner)
            crashing = CrashingStore(inner, at, after=after)

            def work(comm, crashing=crashing, inner=inner, victim=victim):
                cut = {"s": milepost.Sharded((3,), {(comm.rank,): torch.ones(1)}), **state(2)}
                place = crashing if comm.rank == victim else inner
                try:
                    milepost.save(cut, place, process_group=comm)
                except (Crash, milepost.CheckpointError) as error:
                    return type(error).__name__
                return "saved"

            results = run_ranks(3, work, timeout_s=30)
            seen.add(read(inner))
            if results[victim] == "saved":
                break
            assert results[victim] == "Crash"
            at += 1
        assert at > (3 if kind == "memory" or victim == 0 else 1), "a rank's data may be one request"
    assert seen == {1, 2}


@pytest.mark.places("here", "network", "network without links")
def test_of_racing_savers_one_wins_each_round_and_the_others_are_told(tmp_path):
    for round_number in range(5):
        store = LocalStore(tmp_path)
        outcomes, start = {}, threading.Barrier(6)

        def race(i, store=store, outcomes=outcomes, start=start, base=round_number * 10):
            start.wait()
            try:
                outcomes[i] = milepost.save(state(base + i), store).generation
            except milepost.SaveConflict as error:
                outcomes[i] = str(error)

        threads = [threading.Thread(target=race, args=(i,)) for i in range(6)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        winners = {i: g for i, g in outcomes.items() if isinstance(g, int)}
        assert len(set(winners.values())) == len(winners), "no generation is committed twice"
        newest = max(winners, key=winners.get)
        assert read(store) == round_number * 10 + newest
        assert all("another job committed" in o for o in outcomes.values() if isinstance(o, str))


def test_a_save_under_way_is_not_disturbed_by_the_sweep_of_another(tmp_path):
    """The slow save aims at the generation after the quick one. The quick one's sweep must not touch its data."""
    store = LocalStore(tmp_path)
    milepost.save(state(1), store)

    class Slow(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest-00000003"):
                # Everything is written and aims at 3. A sweep of generation 2 must not touch it.
                sweep(store, milepost.open(store).manifest)

    milepost.save(state(2), store)
    milepost.save(state(3), Slow(store))
    assert read(store) == 3


@pytest.mark.parametrize("kind", MEMORY)
def test_sweep_keeps_the_data_of_an_existing_manifest(kind):
    class Watched(CountingStore):
        swept = 0

        def after(self, number, call):
            if call.startswith("delete"):
                self.swept += 1
                names = set(self.inner.list("data/"))
                for generation in generations(self.inner):
                    manifest = parse(self.url, generation, read_manifest(self.inner, generation))
                    assert {manifest.file_name(file.rank) for file in manifest.files} <= names

    store = Watched(MEMORY[kind]())
    milepost.save(state(1), store)
    milepost.save(state(2), store)
    assert store.swept == 2, "a manifest and its data"


@pytest.mark.places("here", "network")
def test_overwrite_false_refuses_and_leaves_the_old_one(tmp_path):
    milepost.save(state(1), tmp_path, overwrite=False)
    with pytest.raises(milepost.InvalidRequest, match="overwrite=True"):
        milepost.save(state(2), tmp_path, overwrite=False)
    assert read(tmp_path) == 1
    assert milepost.save(state(2), tmp_path).generation == 2


@pytest.mark.places("here", "network", "network without links")
def test_leftovers_are_not_a_checkpoint(tmp_path):
    (tmp_path / "data" / "00000001-0123456789abcdef").mkdir(parents=True)
    (tmp_path / "data" / "00000001-0123456789abcdef" / "00000.safetensors").write_bytes(b"x")
    with pytest.raises(milepost.CheckpointNotFound, match="never finished"):
        milepost.open(tmp_path)
    with pytest.raises(milepost.CheckpointNotFound, match="Nothing was saved here"):
        milepost.open(tmp_path / "empty")
    (tmp_path / "manifest-00000001.json.claim").write_bytes(b"")
    with pytest.raises(milepost.CheckpointNotFound, match="never finished"):
        milepost.open(tmp_path)
    milepost.save(state(2), tmp_path)
    assert read(tmp_path) == 2
    assert sorted(p.name for p in tmp_path.iterdir()) == ["data", "manifest-00000002.json"]


def test_after_the_last_generation_that_has_a_name_a_save_is_refused(tmp_path):
    (tmp_path / "manifest-99999999.json").write_bytes(b"")
    with pytest.raises(milepost.InvalidRequest, match="generation 99999999, the last that has a name"):
        milepost.save(state(1), tmp_path)


def test_a_renamed_manifest_is_damage(tmp_path):
    milepost.save(state(1), tmp_path)
    (tmp_path / "manifest-00000001.json").rename(tmp_path / "manifest-00000007.json")
    with pytest.raises(milepost.CheckpointDamaged, match="was it renamed"):
        milepost.open(tmp_path)


def test_a_manifest_that_is_absurdly_large_is_refused_before_it_is_read(tmp_path):
    milepost.save(state(1), tmp_path)
    os.truncate(tmp_path / "manifest-00000001.json", MAX_MANIFEST_BYTES + 1)
    with pytest.raises(milepost.CheckpointDamaged, match=f"has {MAX_MANIFEST_BYTES + 1} bytes; a manifest has at most"):
        milepost.open(tmp_path)


def test_what_no_reader_would_accept_is_not_committed(tmp_path):
    milepost.save(state(1), tmp_path)
    manifest = milepost.open(tmp_path).manifest
    with pytest.raises(ValueError, match="files"):
        seal(type(manifest)(**{f: getattr(manifest, f) for f in manifest.__struct_fields__} | {"files": ()}))


def test_too_many_tensors_are_refused_before_writing(tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.core.shardfile.MAX_ENTRIES", 6)
    milepost.save({f"k{i}": torch.ones(2) for i in range(4)}, tmp_path)
    with pytest.raises(milepost.InvalidState, match=r"00000\.safetensors cannot be written: 7 entries.* fewer tensors"):
        milepost.save({f"k{i}": torch.ones(2) for i in range(5)}, tmp_path)
    assert len(milepost.open(tmp_path).state()) == 4


POOR = """
import resource, sys
from pathlib import Path
from milepost.commit.find import parse
from milepost.errors import UnsafeCheckpoint
data = Path(sys.argv[1]).read_bytes()
mapped = 1024 * int(Path("/proc/self/status").read_text().split("VmSize:")[1].split()[0])
resource.setrlimit(resource.RLIMIT_AS, (mapped + 64 * 2**20,) * 2)
try:
    parse("here", 1, data)
except UnsafeCheckpoint as error:
    print(error)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_a_manifest_that_takes_more_memory_than_there_is_is_refused(tmp_path):
    body = b'{"tree": [' + b",".join([b'[0,0,""]'] * 2_000_000) + b"]"
    path = tmp_path / "manifest"
    path.write_bytes(body + f',\n"checksum": "{xxhash.xxh3_64(body).hexdigest()}"\n}}\n'.encode())
    command = [sys.executable, "-c", POOR, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True)
    assert "takes more memory to read than there is" in done.stdout


@pytest.mark.places("here", "network", "network without links")
@pytest.mark.slow
def test_opening_while_saves_go_on_always_finds_a_whole_checkpoint(tmp_path):
    milepost.save(state(0), tmp_path)
    done = threading.Event()

    def keep_saving():
        for number in range(1, 60):
            milepost.save(state(number), tmp_path)
        done.set()

    saver = threading.Thread(target=keep_saving)
    saver.start()
    opened, last = 0, -1
    while not done.is_set():
        with milepost.open(tmp_path) as checkpoint:
            number = checkpoint["n"]
        assert number >= last
        opened, last = opened + 1, number
    saver.join()
    assert opened > 20


@pytest.mark.places("here", "network")
def test_a_commit_that_cannot_be_synced_is_taken_back_and_its_data_stays(tmp_path, monkeypatch):
    """The last syncs of a save, of the folders, after the manifest has its name."""
    milepost.save({"n": 1, "t": torch.ones(3)}, tmp_path)
    link, fsync, linked = os.link, os.fsync, []

    def note(*args, **options):
        link(*args, **options)
        linked.append(args)

    def fail(handle):
        if linked:
            raise OSError(errno.EIO, "Input/output error")
        fsync(handle)

    with monkeypatch.context() as patched:
        patched.setattr(os, "link", note)
        patched.setattr(os, "fsync", fail)
        with pytest.raises(milepost.NotDurable, match=r"manifest-00000002.*Input/output error.*taken back") as caught:
            milepost.save({"n": 2, "t": torch.ones(3)}, tmp_path)
        assert caught.value.errno == errno.EIO
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint["n"] == 1
    # A power cut may bring the manifest back, and then it must find what it names.
    assert len(list((tmp_path / "data").iterdir())) == 2
    milepost.save({"n": 3, "t": torch.ones(3)}, tmp_path)
    assert milepost.open(tmp_path)["n"] == 3
    assert len(list((tmp_path / "data").iterdir())) == 1


@pytest.mark.parametrize("kind", ["local", *MEMORY])
def test_a_saver_that_is_overtaken_twice_is_told(tmp_path, kind):
    """The one that took its number was replaced, and its manifest swept: so that name is free again."""
    inner = LocalStore(tmp_path) if kind == "local" else MEMORY[kind]()

    class Late(CountingStore):
        def before(self, number, call):
            if call == "create manifest-00000002.json":
                milepost.save({"n": 2}, self.inner)
                milepost.save({"n": 3}, self.inner)

    milepost.save({"n": 1}, inner)
    with pytest.raises(milepost.SaveConflict, match="generation 2"):
        milepost.save({"n": "late", "t": torch.ones(3)}, Late(inner))
    with milepost.open(inner) as checkpoint:
        # In an object store the others go above the number of a save that is under way.
        assert (checkpoint["n"], checkpoint.generation) == (3, 4 if kind == "objects" else 3)
        assert list(inner.list("manifest-")) == [manifest_name(checkpoint.generation)]
    milepost.save({"n": 4}, inner)
    assert milepost.open(inner)["n"] == 4


@pytest.mark.places("here", "network")
def test_a_saver_whose_unfinished_manifest_is_swept_is_told(tmp_path, monkeypatch):
    milepost.save({"n": 1}, tmp_path)
    link, others = os.link, []

    def late(*args, **options):
        if not others:
            others.append(1)
            milepost.save({"n": 2}, tmp_path)
            milepost.save({"n": 3}, tmp_path)
        return link(*args, **options)

    monkeypatch.setattr(os, "link", late)
    with pytest.raises(milepost.SaveConflict):
        milepost.save({"n": "late"}, tmp_path)
    assert milepost.open(tmp_path)["n"] == 3


@pytest.mark.parametrize("kind", MEMORY)
def test_saver_that_lost_its_generation_and_manifest_raises(kind):
    """Such a store misses what it was about to name, before it sees that the name is taken."""

    class Late(CountingStore):
        def before(self, number, call):
            if call == "create manifest-00000002.json":
                milepost.save({"n": 2}, self.inner)
                raise FileNotFoundError("manifest-00000002.json.tmp")

    inner = MEMORY[kind]()
    milepost.save({"n": 1}, inner)
    with pytest.raises(milepost.SaveConflict, match="generation 2"):
        milepost.save({"n": "late"}, Late(inner))
    assert milepost.open(inner)["n"] == 2
