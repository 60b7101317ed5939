"""What a diagnosis says of good places and of bad ones, and that nothing of it remains."""

import os
import signal
import subprocess
import sys

import pytest
import torch

import milepost
from faults.power import Disk, NotHere
from milepost.cli.app import main
from milepost.core.limits import KIB, MIB
from milepost.doctor.diagnose import diagnose
from milepost.doctor.mounts import file_system_of
from milepost.doctor.scratch import scratch_in
from milepost.inspection.runs import look_at
from milepost.steps.shelf import step_name
from milepost.store import LocalStore, MemoryStore
from milepost.testing import CountingStore
from tests.commit.object_places import objects
from tests.store.direct_files import does_direct

FOLDER_CHECKS = {
    "reachable", "file system", "limits", "writable", "links", "sync", "space", "atomic create", "listing", "delete",
    "small writes", "clock", "names", "direct I/O", "memory map", "large writes", "reads", "held",
}  # fmt: skip


def checks_of(found):
    return {check.name: check for check in found.checks}


def look(place):
    """A quick diagnosis."""
    return diagnose(place, size_bytes=256 * KIB)


def state(number=1.0):
    return {"w": torch.full((10,), number)}


@pytest.mark.places("here", "network", "network without links")
def test_fit_folder_is_told_so_and_nothing_remains(tmp_path, place):
    found = look(tmp_path / "runs" / "a")
    checks = checks_of(found)
    assert found.fit, [check for check in found.checks if check.state == "fail"]
    assert set(checks) == FOLDER_CHECKS
    assert "it would be made in" in checks["reachable"].found
    assert ("no hard links" in checks["links"].found) == (place == "network without links")
    if place != "here":
        assert "fuse" in checks["file system"].found
    assert list(tmp_path.iterdir()) == []
    if place == "here":
        assert checks["direct I/O"].numbers["works"] == does_direct(tmp_path)
        assert all(check.state == "ok" for name, check in checks.items() if name not in ("file system", "space"))


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
def test_any_store_is_checked_through_its_port(store_of):
    store = store_of()
    milepost.save(state(), store)
    before = set(store.list(""))
    found = look(store)
    assert found.fit
    assert {"atomic create", "listing", "delete", "small writes", "large writes", "reads"} <= set(checks_of(found))
    assert checks_of(found)["held"].found == "a checkpoint of the format milepost, whole"
    assert set(store.list("")) == before


class Overwrites(CountingStore):
    """A store that forgets to look whether a name is free."""

    def create(self, name, *data):
        self.inner.delete(name)
        self.inner.create(name, *data)


class ListsLate(CountingStore):
    """A store whose listings miss what was created in the last moments."""

    def list(self, prefix, **how):
        return (name for name in self.inner.list(prefix, **how) if "listed" not in name)


@pytest.mark.parametrize(
    ("kind", "store_of", "name"),
    [(Overwrites, MemoryStore, "atomic create"), (ListsLate, objects, "listing"), (ListsLate, MemoryStore, "listing")],
)
def test_store_that_breaks_a_promise_is_not_fit(kind, store_of, name, monkeypatch):
    monkeypatch.setattr("milepost.doctor.store_checks._LISTED_WITHIN_S", 0.2)
    found = look(kind(store_of()))
    assert not found.fit
    [failed] = [check for check in found.checks if check.state == "fail"]
    assert failed.name == name
    assert failed.advice


def test_memory_read_only_and_full_file_systems_are_told(tmp_path):
    try:
        with Disk(tmp_path, "tmpfs", 4 * MIB) as disk:
            small = look(disk.path / "a")
            (disk.path / "filler").write_bytes(bytes(4 * MIB - 8 * KIB))
            full = look(disk.path / "a")
            (disk.path / "filler").unlink()
            subprocess.run(["mount", "-o", "remount,ro", disk.path], check=True)
            frozen = look(disk.path / "a")
            status = main(["doctor", str(disk.path / "a")])
    except NotHere as error:
        pytest.skip(str(error))
    checks = checks_of(small)
    assert checks["file system"].state == "warn"
    assert "a reboot loses it" in checks["file system"].advice
    assert checks["space"].state == "fail", "no room for a GB"
    assert not full.fit
    said = " ".join(check.found for check in full.checks)
    assert ("No space left" in said, "None" in said) == (True, False)
    assert not frozen.fit
    assert "mounted read-only" in checks_of(frozen)["writable"].found
    assert checks_of(frozen)["further checks"].state == "skipped"
    assert status == 1


def test_file_in_the_way_is_told(tmp_path):
    (tmp_path / "a").write_bytes(b"1")
    for path in (tmp_path / "a", tmp_path / "a" / "b"):
        found = look(path)
        assert not found.fit
        assert f"{tmp_path / 'a'} is no folder" in checks_of(found)["reachable"].found


def test_what_is_there_already_is_told(tmp_path):
    with milepost.Checkpointer(tmp_path) as keeper:
        for step in (1, 2, 3):
            keeper.save(state(step), step)
    (tmp_path / step_name(3) / "manifest-00000001.json").unlink()
    (tmp_path / step_name(1) / "manifest-00000001.json").write_bytes(b"?")
    (tmp_path / ".milepost-doctor-012345").mkdir()
    held = checks_of(look(tmp_path))["held"]
    assert held.state == "warn"
    assert f"a run of 3 steps, the newest that is whole is {step_name(2)}" in held.found
    for words in (f"damaged: {step_name(1)}", f"unfinished: {step_name(3)}", "killed: .milepost-doctor-012345"):
        assert words in held.found


def test_no_reader_takes_the_corner_for_a_checkpoint(tmp_path):
    with scratch_in(LocalStore(tmp_path), "doctor") as corner:
        for name in ("race/0", "large", "rank-00001"):
            corner.store.create(name, b"1")
        assert look_at(tmp_path).kind == "nothing"
        assert milepost.Checkpointer(tmp_path).steps() == []
        with pytest.raises(milepost.CheckpointNotFound, match="Nothing was saved here"):
            milepost.open(tmp_path)


INTERRUPTED = """
import os, sys, threading, time

def watch(folder, number):
    while not any("large" in names for _, _, names in os.walk(folder)):
        time.sleep(0.002)
    os.kill(os.getpid(), int(number))

threading.Thread(target=watch, args=sys.argv[1:3], daemon=True).start()
from milepost.cli.app import main
sys.exit(main(sys.argv[3:]))
"""
"""A command that gets a signal while it writes much. It sends that itself: another process might be late."""


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_doctor_leaves_nothing(tmp_path, number):
    place = tmp_path / "runs" / "a"
    command = [sys.executable, "-c", INTERRUPTED, tmp_path, str(int(number)), "doctor", place, "--size", "3G"]
    done = subprocess.run(command, capture_output=True, timeout=120, check=False)
    assert done.returncode == 128 + number, done.stderr
    assert list(tmp_path.iterdir()) == []


MOUNTS = """\
22 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw
31 22 0:30 / /scratch rw - lustre 10.0.0.1@o2ib:/fs rw,flock
32 22 0:31 / /home\\040of\\040all rw - nfs4 server:/home rw,soft,vers=4.2
33 22 0:32 / /scratch/local rw - tmpfs tmpfs rw
34 33 0:33 / /scratch/local rw - ext4 /dev/nvme0n1 rw
35 22 0:34 / /bucket rw - fuse.gcsfuse gcsfuse rw
"""


def test_mounts_are_understood(tmp_path):
    mounts = tmp_path / "mountinfo"
    mounts.write_text(MOUNTS)
    found = {
        path: file_system_of(path, mounts)
        for path in ("/data", "/scratch/a", "/home of all/x", "/scratch/local/x", "/bucket/a", "/scratchy")
    }
    assert {path: (one.kind, one.nature) for path, one in found.items()} == {
        "/data": ("ext4", "disk"),
        "/scratch/a": ("lustre", "network"),
        "/home of all/x": ("nfs4", "network"),
        "/scratch/local/x": ("ext4", "disk"),
        "/bucket/a": ("fuse.gcsfuse", "objects"),
        "/scratchy": ("ext4", "disk"),
    }
    assert "soft" in found["/home of all/x"].options
    assert file_system_of(tmp_path, tmp_path / "missing") is None
    assert os.path.ismount(file_system_of(tmp_path).mounted_at)
