"""Power cuts and full disks: the model loses what it should, does what LocalStore does, and finds no lost save."""

import errno
import os
import re
from collections import Counter
from pathlib import Path

import pytest
import torch

import milepost
from faults import power
from milepost.store import LocalStore, Store, linux
from milepost.testing import Crash, UnsyncedStore


def state(number):
    return {"a": torch.full((16, 16), float(number)), "n": number}


def found_in(store):
    """The number of the save that a store holds, or what is wrong with it."""
    try:
        with milepost.open(store) as checkpoint:
            values = checkpoint.state()
            assert checkpoint.verify().ok
    except milepost.CheckpointNotFound:
        return 0
    except milepost.CheckpointError:
        return "unloadable"
    assert (values["a"] == values["n"]).all()
    return values["n"]


def lose_all(_call):
    return False


def keep_all(_call):
    return True


# The model.


def test_what_is_not_synced_is_visible_and_may_be_lost():
    store = UnsyncedStore()
    assert isinstance(store, Store)
    writer = store.writer("x/y", 1024)
    writer.write(0, [b"a" * 1024])
    assert store.reader("x/y").size_bytes == 1024
    assert store.after_power_cut(lose_all).objects == {}
    assert store.after_power_cut(keep_all).objects == {"x/y": b"a" * 1024}
    writer.commit()
    assert store.after_power_cut(lose_all).objects == {"x/y": b"a" * 1024}
    store.delete("x/y")
    assert list(store.list("")) == []
    assert store.after_power_cut(keep_all).objects == {}
    assert store.after_power_cut(lose_all).objects == {"x/y": b"a" * 1024}, "a removal is not durable either"


def test_a_sync_of_a_folder_covers_its_own_names_only():
    store = UnsyncedStore()
    for name in ("x/y", "x/z", "w"):
        store.create(name, b"1")
    store.delete("x/y")
    store.delete("w")
    store.create("other", b"")
    found = {name for name in store.after_power_cut(lose_all).objects if not name.endswith(".tmp")}
    assert found == {"other", "x/y", "x/z"}, "w is gone, x/y is back"


def test_of_a_write_any_blocks_may_arrive():
    store = UnsyncedStore(block_bytes=4)
    store.writer("x", 0).write(2, [b"abcdefg"])
    blocks = [found.objects.get("x") for _, found in store.possible_states(10_000, first=len(store.journal))]
    assert set(blocks) >= {b"", b"\0\0ab", b"\0\0\0\0cdef", b"\0\0\0\0\0\0\0\0g", b"\0\0ab\0\0\0\0g", b"\0\0abcdefg"}
    assert len(blocks) == 2 ** (1 + 3), "a name and three blocks, and the folder was synced"


def test_a_file_whose_room_was_not_synced_may_be_found_empty():
    store = UnsyncedStore()
    store.writer("x", 1024)
    found = [store.after_power_cut(lambda call, lost=lost: not call.startswith(lost)) for lost in ("fallocate", "-")]
    assert [one.objects for one in found] == [{"x": b""}, {"x": bytes(1024)}]


def test_the_same_seed_gives_the_same_states():
    store = UnsyncedStore()
    milepost.save(state(1), store)
    first, again = ([found.objects for _, found in store.possible_states(50, seed=7)] for _ in range(2))
    other = [found.objects for _, found in store.possible_states(50, seed=8)]
    assert first == again != other


@pytest.mark.parametrize("hard_links", [True, False])
def test_it_makes_the_system_calls_of_local_store(tmp_path, monkeypatch, hard_links):
    """So what holds for the model holds for LocalStore, and a sync that one of them leaves out is noticed."""
    if not hard_links:
        monkeypatch.setattr(os, "link", refuse)
    root, calls = tmp_path / "root", []
    record_calls(monkeypatch, root, calls)
    model, real = UnsyncedStore(hard_links=hard_links), LocalStore(root)
    for store in (model, real):
        store.writer("first/try", 8).abort()
        for number in (1, 2, 3):
            milepost.save(state(number), store)
        with pytest.raises(milepost.AlreadyExists):
            store.create("manifest-00000003.json", b"late")
        store.writer("deep/down/there", 8).abort()
        store.create("deep/down/here", b"1")
        for _ in range(2):
            store.delete("deep/down/here", durable=True)
    expected = [o.call for o in model.journal if not o.call.startswith("fallocate")]
    assert list(map(without_chance, calls)) == list(map(without_chance, expected))


def refuse(*_):
    raise PermissionError(errno.EPERM, "there are no links here")


def record_calls(monkeypatch, root, calls):
    def where(path, dir_fd=None):
        folder = os.readlink(f"/proc/self/fd/{dir_fd}") if dir_fd is not None else ""
        return os.path.relpath(os.path.join(folder, path), root)

    def recorded(name, text):
        inner = getattr(os, name)

        def call(*args, **options):
            said = text(args, options)  # before: the folder may be gone after
            result = inner(*args, **options)
            if said:
                calls.append(said)
            return result

        monkeypatch.setattr(os, name, call)

    def opened(args, options):
        return f"create {where(args[0], options.get('dir_fd'))}" if args[1] & os.O_CREAT else None

    recorded("open", opened)
    recorded("symlink", lambda args, _: f"create {where(args[1])}")  # a claim
    for name in ("mkdir", "unlink", "rmdir"):
        recorded(name, lambda args, options, name=name: f"{name} {where(args[0], options.get('dir_fd'))}")
    for name in ("link", "rename"):
        recorded(name, lambda args, _, name=name: f"{name} {where(args[1])}")
    monkeypatch.setattr(linux, "rename_to_free_name", os.rename)
    recorded("fsync", lambda args, _: f"fsync {where('', args[0])}")
    recorded("pwritev", lambda args, _: f"write {where('', args[0])}")


def without_chance(call):
    return re.sub(r"-[0-9a-f]{16}|\.[0-9a-f]{16}\.", "-x.", call).rstrip("/")


@pytest.mark.slow
def test_every_state_of_a_save_is_old_or_new_and_new_once_it_returned():
    store = UnsyncedStore()
    milepost.save(state(1), store)
    first = len(store.journal)
    milepost.save(state(2), store)
    last = len(store.journal)
    milepost.save(state(3), store)
    seen = Counter()
    for at, found in store.possible_states(1_000, first=first):
        number = found_in(found)
        assert number in ({1, 2} if at < last else {2, 3})
        seen[number] += 1
    assert set(seen) == {1, 2, 3}
    finished = [found_in(found) for _, found in store.possible_states(100_000, first=len(store.journal))]
    assert finished == [3] * len(finished)
    assert len(finished) == 2**5, "all of them: a temporary name, a manifest, a file and its folder, a file in none"


class Forgetful(UnsyncedStore):
    """Leaves out the syncs of some files or folders."""

    def __init__(self, skipped):
        super().__init__()
        self.skipped = re.compile(skipped)

    def sync(self, path, inode):
        if not self.skipped.fullmatch(path):
            super().sync(path, inode)


@pytest.mark.parametrize(
    "skipped",
    [r"data/.*safetensors", r"data/[^/]*", r"data", r"\.", r"\.\.", r"manifest-.*tmp"],
    ids=["data files", "a save's folder", "data", "the checkpoint's folder", "the folder above", "manifest"],
)
def test_a_store_that_leaves_out_a_sync_is_caught(skipped):
    store = Forgetful(skipped)
    milepost.save(state(1), store)
    assert found_in(store) == 1
    endings = {found_in(found) for _, found in store.possible_states(500, first=len(store.journal))}
    assert endings & {0, "unloadable"}, "lost, though the save had returned"
    assert 1 in endings


def test_a_process_that_dies_within_a_save_leaves_what_it_did():
    store = UnsyncedStore()
    store.dies_at = 9
    with pytest.raises(Crash):
        milepost.save(state(1), store)
    assert len(store.journal) == 9
    store.dies_at = None
    assert len(list(store.list("data/"))) == 1
    milepost.save(state(2), store)
    assert found_in(store) == found_in(store.after_power_cut(lose_all)) == 2


# The rows.


@pytest.mark.slow
def test_the_rows_keep_the_promise_where_they_ran(tmp_path):
    rows = list(power.rows(False, tmp_path))
    assert {row.number for row in rows} == {6, 7, 9, 10}
    for row in rows:
        assert row.ok or "not run" in row.note, f"{row.number} {row.fault}: {row.milepost.text}"
    assert next(row for row in rows if row.number == 9).ok
    assert str(tmp_path) not in Path("/proc/mounts").read_text()
    assert list(tmp_path.iterdir()) == []


def test_without_root_it_says_so(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    six, seven = power._power_rows("ext4", False, tmp_path)
    ten = power._full_disk_row(False, tmp_path)
    for row in (six, seven, ten):
        assert row.ok is None
        assert "not run: only root may mount" in row.note


def test_a_mount_is_undone_when_it_is_interrupted(tmp_path):
    try:
        with power.Disk(tmp_path, "tmpfs", 1 << 20) as disk:
            assert os.path.ismount(disk.path)
            raise KeyboardInterrupt
    except power.NotHere as error:
        pytest.skip(str(error))
    except KeyboardInterrupt:
        pass
    assert not os.path.ismount(disk.path)
