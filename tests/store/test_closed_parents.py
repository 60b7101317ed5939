"""Only what is needed of the folder above is needed: it may be closed to this user, or on another file system."""

import errno
import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

import milepost
from milepost.store import LocalStore, MemoryStore, linux

NOBODY = 65534


@pytest.fixture
def open_to_all():
    """A folder that other users can reach: those of pytest are closed."""
    folder = Path(tempfile.mkdtemp(dir="/tmp"))
    yield folder
    shutil.rmtree(folder)


def as_nobody(work):
    """Run `work` in a child without rights, and give what it raised, or the number that it returned."""
    if os.getuid() != 0:
        pytest.skip("needs root, to give up its rights")
    keeper = milepost.Checkpointer(MemoryStore())  # now all is imported: the child may not read the package
    keeper.save({"n": 1}, 1)
    keeper.restore({"n": 0})
    receiver, sender = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            os.setgroups([])
            os.setgid(NOBODY)
            os.setuid(NOBODY)
            said = str(work())
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(sender, said.encode())
        os._exit(0)
    os.close(sender)
    with open(receiver, "rb") as pipe:
        said = pipe.read().decode()
    os.waitpid(child, 0)
    return said


def counted(monkeypatch):
    calls, inner = [], linux.sync_file_system
    monkeypatch.setattr(linux, "sync_file_system", lambda handle: (calls.append(handle), inner(handle)))
    return calls


def save_twice(place, calls):
    milepost.save({"n": 1}, place)
    milepost.save({"n": 2}, place)
    assert milepost.open(place)["n"] == 2
    return len(calls)


def test_folder_below_one_that_cannot_be_listed_takes_saves(open_to_all, monkeypatch):
    place = open_to_all / "run"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    open_to_all.chmod(0o711)
    calls = counted(monkeypatch)
    assert int(as_nobody(lambda: save_twice(place, calls))) > 0, "the folder's own name was made durable otherwise"


def test_folder_can_be_made_in_one_that_cannot_be_listed(open_to_all, monkeypatch):
    open_to_all.chmod(0o733)
    calls = counted(monkeypatch)
    assert int(as_nobody(lambda: save_twice(open_to_all / "runs" / "a", calls))) > 0


def test_steps_below_a_closed_folder_are_saved_and_restored(open_to_all):
    place = open_to_all / "run"
    place.mkdir()
    os.chown(place, NOBODY, NOBODY)
    open_to_all.chmod(0o711)

    def work():
        keeper = milepost.Checkpointer(place, keep_last=1)
        for step in (1, 2):
            keeper.save({"n": step}, step)
        return keeper.restore({"n": 0}) if keeper.steps() == [2] else keeper.steps()

    assert as_nobody(work) == "2"


def path_of(handle):
    return os.readlink(f"/proc/self/fd/{handle}")


def failing_sync(monkeypatch, number, fails):
    """Syncs of the folders for which `fails` holds fail. Gives the paths of those."""
    failed, fsync = [], os.fsync

    def sync(handle):
        path = path_of(handle)
        if os.path.isdir(path) and fails(path):
            failed.append(path)
            raise OSError(number, os.strerror(number))
        fsync(handle)

    monkeypatch.setattr(os, "fsync", sync)
    return failed


@pytest.mark.parametrize("number", [errno.EINVAL, errno.ENOTSUP, errno.ENOSYS])
def test_file_system_without_syncs_of_folders_is_synced_whole(tmp_path, monkeypatch, number):
    failed, calls = failing_sync(monkeypatch, number, lambda _: True), counted(monkeypatch)
    assert save_twice(tmp_path / "runs" / "a", calls) > 0
    assert len(calls) == len(failed), "each sync that was refused was made up for"


@pytest.mark.parametrize("number", [errno.EIO, errno.ENOSPC, errno.EROFS])
def test_folder_above_that_fails_to_sync_fails_the_save(tmp_path, monkeypatch, number):
    """It holds the name of the checkpoint's folder."""
    failed = failing_sync(monkeypatch, number, lambda path: path == str(tmp_path))
    with pytest.raises(milepost.StorageError, match=os.strerror(number)):
        milepost.save({"n": 1}, tmp_path / "a")
    assert failed
    monkeypatch.undo()
    milepost.save({"n": 1}, tmp_path / "a")


def test_file_system_that_cannot_be_synced_fails_the_save(tmp_path, monkeypatch):
    failing_sync(monkeypatch, errno.EINVAL, lambda _: True)

    def fail(_handle):
        raise OSError(errno.EIO, "Input/output error")

    monkeypatch.setattr(linux, "sync_file_system", fail)
    with pytest.raises(milepost.StorageError, match="Input/output error"):
        milepost.save({"n": 1}, tmp_path / "a")


@pytest.fixture
def mounted(tmp_path):
    place = tmp_path / "mounted"
    place.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "none", place], capture_output=True, check=False).returncode != 0:
        pytest.skip("cannot mount")
    yield place
    subprocess.run(["umount", "-l", place], check=True)


@pytest.mark.parametrize("number", [errno.EINVAL, errno.EIO, errno.EROFS])
def test_root_of_a_file_system_needs_nothing_of_the_folder_above(mounted, monkeypatch, number):
    failed = failing_sync(monkeypatch, number, lambda path: path == str(mounted.parent))
    milepost.save({"n": 1}, mounted)
    assert milepost.open(mounted)["n"] == 1
    assert failed == []


def test_checkpoint_behind_a_link_is_synced_where_it_is(tmp_path, monkeypatch):
    (tmp_path / "real" / "run").mkdir(parents=True)
    (tmp_path / "links").mkdir()
    (tmp_path / "links" / "run").symlink_to(tmp_path / "real" / "run")
    synced, fsync = [], os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(path_of(handle)), fsync(handle)))
    LocalStore(tmp_path / "links" / "run").create("name", b"")
    assert str(tmp_path / "real") in synced
    assert str(tmp_path / "links") not in synced
