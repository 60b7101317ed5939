"""Folders of a LocalStore: what a store made for something that came to nothing goes again, and nothing else does."""

import errno
import os
import threading

import pytest
import torch

import milepost
from milepost.core.manifest import shard_name
from milepost.store import LocalStore, Within, linux
from milepost.testing import UnsyncedStore, run_ranks


def no_room(*_args, **_options):
    raise OSError(errno.ENOSPC, "No space left on device")


@pytest.fixture
def full_disk(monkeypatch):
    """No file can be given its size; folders can be made."""
    monkeypatch.setattr(linux, "preallocate", no_room)


def everything_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("place", ["step", "runs/a/step"])
def test_a_failed_first_save_leaves_no_folder_that_it_made(tmp_path, full_disk, place):
    with pytest.raises(milepost.StorageError, match="No space left"):
        milepost.save({"t": torch.ones(3)}, tmp_path / place)
    assert everything_in(tmp_path) == []


def test_failed_file_leaves_no_folder_made_for_it(tmp_path):
    with pytest.raises(milepost.StorageError, match="File name too long"):
        LocalStore(tmp_path / "runs" / "a").writer("data/" + 300 * "x", 8)
    assert everything_in(tmp_path) == []


@pytest.mark.parametrize("refused", ["mkdir", "open", "fsync", "link"])
def test_whatever_call_fails_first_no_folder_is_left(tmp_path, monkeypatch, refused):
    """Each call of a first save in turn; a folder may also be made just before the call that fails."""
    inner, calls = getattr(os, refused), [0]
    for fails_at in range(1, 30):
        calls[0] = 0

        def call(*args, fails_at=fails_at, **options):
            writes = refused != "open" or args[1] & os.O_CREAT
            calls[0] += bool(writes)
            if writes and calls[0] == fails_at:
                no_room()
            return inner(*args, **options)

        with monkeypatch.context() as patched:
            patched.setattr(os, refused, call)
            try:
                milepost.save({"t": torch.ones(3)}, tmp_path / "runs" / "a")
            except milepost.NotDurable:
                assert everything_in(tmp_path)[:2] == ["runs", "runs/a"], "its data stays: the manifest may come back"
                return
            except milepost.StorageError:
                assert everything_in(tmp_path) == [], f"{refused} number {fails_at}"
                continue
        assert fails_at > 1, "all calls were tried"
        return
    pytest.fail("more calls than expected")


def test_folders_that_were_there_before_stay(tmp_path, full_disk):
    (tmp_path / "runs" / "a").mkdir(parents=True)
    with pytest.raises(milepost.StorageError):
        milepost.save({"t": torch.ones(3)}, tmp_path / "runs" / "a")
    with pytest.raises(milepost.StorageError):
        milepost.save({"t": torch.ones(3)}, tmp_path / "runs" / "b")
    assert everything_in(tmp_path) == ["runs", "runs/a"]


def test_folders_in_which_something_else_lies_stay(tmp_path, monkeypatch):
    def log_and_fail(*_):
        (tmp_path / "runs" / "log").write_text("mine")
        no_room()

    monkeypatch.setattr(linux, "preallocate", log_and_fail)
    with pytest.raises(milepost.StorageError):
        milepost.save({"t": torch.ones(3)}, tmp_path / "runs" / "a")
    assert everything_in(tmp_path) == ["runs", "runs/log"]


def test_once_something_was_created_in_it_the_folder_stays(tmp_path):
    keeper = milepost.Checkpointer(tmp_path / "run")
    keeper.save({"n": 1}, 1)
    keeper.remove(1)
    assert everything_in(tmp_path) == ["run"]


def test_a_failed_first_save_of_a_step_leaves_no_root(tmp_path, full_disk):
    with pytest.raises(milepost.StorageError):
        milepost.Checkpointer(tmp_path / "runs" / "a").save({"t": torch.ones(3)}, 1)
    assert everything_in(tmp_path) == []


def test_a_save_that_ranks_disagree_on_leaves_at_most_empty_folders(tmp_path):
    """The rank that made the folder may be done before another has removed its file."""

    def work(comm):
        with pytest.raises(milepost.RanksDisagree):
            milepost.save({"t": torch.full((4,), float(comm.rank))}, tmp_path / "a", process_group=comm)

    run_ranks(2, work)
    assert everything_in(tmp_path) in ([], ["a"])
    milepost.save({"n": 1}, tmp_path / "a")
    assert milepost.open(tmp_path / "a")["n"] == 1


def test_stores_sharing_a_folder_do_not_disturb_each_other(tmp_path):
    """A file that is created is there when `writer` returns, though others remove the folders that they leave empty."""
    problems, start = [], threading.Barrier(4)

    def come_and_go(number):
        start.wait()
        try:
            for turn in range(150):
                store = Within(LocalStore(tmp_path / "runs" / "a"), "step")
                writer = store.writer(shard_name(f"{turn:08d}-0123456789abcdef", number), 8)
                writer.write(0, [b"12345678"])
                if turn % 3 == 0:
                    writer.commit()
                    assert store.reader(shard_name(f"{turn:08d}-0123456789abcdef", number)).size_bytes == 8
                writer.abort()
        except BaseException as error:
            problems.append(repr(error))

    threads = [threading.Thread(target=come_and_go, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems == []
    assert not any(path.is_file() for path in tmp_path.rglob("*"))


def test_the_model_of_a_disk_removes_the_folder_that_it_made_too():
    store = UnsyncedStore()
    store.writer("x/y", 8).abort()
    assert [operation.call for operation in store.journal][-3:] == ["unlink x/y", "rmdir x", "rmdir ."]
    store.create("a", b"1")
    store.delete("a")
    assert store.journal[-1].call == "unlink a"


@pytest.mark.parametrize("kind", ["local", "unsynced"])
def test_a_durable_deletion_syncs_the_folder_though_the_name_is_gone(tmp_path, monkeypatch, kind):
    store = LocalStore(tmp_path / "s") if kind == "local" else UnsyncedStore()
    for name in ("x/y", "x/z"):
        store.create(name, b"1")
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda fd: (synced.append(os.readlink(f"/proc/self/fd/{fd}")), fsync(fd)))

    def syncs():
        if kind == "local":
            return [os.path.relpath(path, tmp_path / "s") for path in synced]
        return [o.call.removeprefix("fsync ") for o in store.journal[begun:] if o.call.startswith("fsync")]

    begun = 0 if kind == "local" else len(store.journal)
    store.delete("x/z")
    assert syncs() == []
    store.delete("x/z", durable=True)
    assert syncs() == ["x"]
    store.delete("x/y", durable=True)
    assert syncs() == ["x", "x"]
    store.delete("x/y", durable=True)
    assert syncs() == ["x", "x", "."], "the folder went: it is gone from the one above"


def test_a_place_that_is_a_link_to_nothing_is_named(tmp_path):
    (tmp_path / "link").symlink_to(tmp_path / "gone")
    with pytest.raises(milepost.StorageError, match="link is a link to nothing"):
        milepost.save({"t": torch.ones(3)}, tmp_path / "link" / "step")


def test_a_path_that_starts_at_a_removed_folder_is_refused(tmp_path, monkeypatch):
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    with pytest.raises(milepost.InvalidRequest, match="absolute path"):
        milepost.save({"t": torch.ones(3)}, "step")
