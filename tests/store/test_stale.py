"""ESTALE, which NFS answers for what another machine has removed, means "gone": each call looks once more."""

import errno
import os
import shutil

import pytest
import torch

import milepost
from milepost.store import LocalStore
from milepost.testing import CountingStore, run_ranks


def state(number):
    return {"w": torch.full((5000,), float(number)), "n": number}


class Stale:
    """A function of `os` that answers ESTALE, `times` times, where the path of its first argument has `part` in it."""

    def __init__(self, monkeypatch, call, part, times=10**9):
        self.inner, self.part, self.left, self.met = getattr(os, call), part, times, 0
        monkeypatch.setattr(os, call, self)

    def __call__(self, *args, **options):
        where = [args[0], options.get("dir_fd")]
        paths = [os.readlink(f"/proc/self/fd/{one}") if isinstance(one, int) else str(one) for one in where]
        if self.left and any(self.part in path for path in paths):
            self.left, self.met = self.left - 1, self.met + 1
            raise OSError(errno.ESTALE, "Stale file handle")
        return self.inner(*args, **options)


def read(store, name):
    reader = store.reader(name)
    data = bytearray(reader.size_bytes)
    reader.read(0, [memoryview(data)])
    reader.close()
    return bytes(data)


CALLS = ["open", "fstat", "preadv", "scandir", "unlink", "fsync"]


def use(store, call):
    """Something that makes this call, and its result."""
    if call == "scandir":
        return list(store.list("data/"))
    if call in ("unlink", "fsync"):
        return store.delete("data/x", durable=True)
    return read(store, "data/x")


@pytest.mark.parametrize("call", CALLS)
def test_what_is_stale_once_is_looked_up_again(tmp_path, monkeypatch, call):
    store = LocalStore(tmp_path)
    store.create("data/x", b"content")
    store.create("data/y", b"")
    stale = Stale(monkeypatch, call, "data", times=1)
    found = use(store, call)
    assert stale.met == 1
    assert found in (b"content", None) or sorted(found) == ["data/x", "data/y"]
    assert (tmp_path / "data" / "x").exists() == (call not in ("unlink", "fsync"))


@pytest.mark.parametrize("call", CALLS)
def test_what_stays_stale_is_gone(tmp_path, monkeypatch, call):
    store = LocalStore(tmp_path)
    store.create("data/x", b"content")
    stale = Stale(monkeypatch, call, "data")
    if call in ("open", "fstat", "preadv"):
        with pytest.raises(FileNotFoundError, match="data/x"):
            use(store, call)
    else:
        assert use(store, call) in ([], None)
    assert stale.met == 2


def test_a_stale_store_is_not_an_empty_one(tmp_path, monkeypatch):
    """Nothing can be said about it: to say that there is no checkpoint would start a run from scratch."""
    keeper = milepost.Checkpointer(tmp_path / "run")
    keeper.save(state(1), 1)
    Stale(monkeypatch, "scandir", str(tmp_path / "run"))
    with pytest.raises(milepost.StorageError, match="cannot list"):
        keeper.restore(state(0), default=0)
    with pytest.raises(milepost.StorageError, match="cannot list"):
        list(LocalStore(tmp_path / "run").list(""))


@pytest.mark.parametrize("call", ["open", "fstat", "preadv"])
@pytest.mark.parametrize("part", ["data", "manifest-"])
def test_restore_goes_on_to_another_step(tmp_path, monkeypatch, call, part):
    if call != "preadv" and part == "manifest-":
        part = "step-0000000002"
    keeper = milepost.Checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state(step), step)
    stale = Stale(monkeypatch, call, f"step-0000000002/{part}" if part != "step-0000000002" else part)
    target = state(0)
    monkeypatch.setattr("milepost.commit.find.PATIENCE_S", 0.05)
    assert keeper.restore(target) == 1
    assert stale.met > 0
    assert target["n"] == 1
    assert (target["w"] == 1).all()


def test_load_says_that_the_file_was_removed_and_what_to_do(tmp_path, monkeypatch):
    milepost.save(state(1), tmp_path)
    Stale(monkeypatch, "preadv", "data")
    with pytest.raises(milepost.CheckpointDamaged, match=r"(?s)removed while it was read.*replaced.*open one again"):
        milepost.load(state(0), tmp_path)


def test_a_file_that_comes_back_is_read_on(tmp_path, monkeypatch):
    """A server that was restarted gives new handles."""
    milepost.save(state(1), tmp_path)
    stale = Stale(monkeypatch, "preadv", "data", times=1)
    target = state(0)
    milepost.load(target, tmp_path)
    assert (target["w"] == 1).all()
    assert stale.met == 1


def test_a_save_whose_folder_was_swept_is_a_conflict(tmp_path, monkeypatch):
    milepost.save(state(1), tmp_path)
    inner = os.fsync

    def swept(handle):
        path = os.readlink(f"/proc/self/fd/{handle}")
        if "data/00000002-" in path and os.path.isdir(path):
            shutil.rmtree(path)
            monkeypatch.setattr(os, "fsync", inner)
            milepost.save(state(2), tmp_path)
            raise OSError(errno.ESTALE, "Stale file handle")
        inner(handle)

    monkeypatch.setattr(os, "fsync", swept)
    with pytest.raises(milepost.SaveConflict, match="another job committed generation 2"):
        milepost.save(state(9), tmp_path)
    assert milepost.open(tmp_path)["n"] == 2


class ReplacedAtFirstRead(CountingStore):
    """A store in which a newer save replaces the checkpoint when its data is opened first."""

    replaced = 0

    def before(self, number, call):
        if call.startswith("reader data/") and not self.replaced:
            self.replaced = 1
            milepost.save(state(2), self.inner)


@pytest.mark.parametrize("world", [1, 2])
def test_a_load_takes_the_checkpoint_that_replaced_the_first(tmp_path, world):
    milepost.save(state(1), tmp_path)
    store = ReplacedAtFirstRead(LocalStore(tmp_path))

    def work(comm):
        target = state(0)
        milepost.load(target, store, process_group=comm)
        return target["n"], set(target["w"].tolist())

    assert run_ranks(world, work) == [(2, {2.0})] * world
    assert store.replaced


def test_a_load_that_may_miss_keys_is_not_mixed_of_two(tmp_path):
    milepost.save(state(1), tmp_path)
    with pytest.raises(milepost.CheckpointDamaged, match="replaced"):
        milepost.load(state(0), ReplacedAtFirstRead(LocalStore(tmp_path)), allow_missing=True)
