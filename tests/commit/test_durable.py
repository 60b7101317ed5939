"""Durable: everything is synced before the commit that names it. Bounded: little memory beyond the state."""

import errno
import os
import subprocess
import sys

import pytest
import torch

import milepost
from milepost.testing import UnsyncedStore


def test_every_file_and_folder_is_synced_before_the_manifest_that_names_it(tmp_path, monkeypatch):
    calls = []
    fsync, link = os.fsync, os.link

    def record_sync(handle):
        calls.append(("sync", os.readlink(f"/proc/self/fd/{handle}")))
        fsync(handle)

    def record_link(source, target, **options):
        calls.append(("link", str(target)))
        link(source, target, **options)

    monkeypatch.setattr(os, "fsync", record_sync)
    monkeypatch.setattr(os, "link", record_link)
    place = tmp_path / "runs" / "step-1"
    for generation in (1, 2):
        calls.clear()
        save_id = milepost.save({"t": torch.ones(3)}, place).save_id
        commit = calls.index(("link", str(place / f"manifest-{generation:08d}.json")))
        before = [path for verb, path in calls[:commit] if verb == "sync"]
        data = place / "data" / save_id
        for path in (data / "00000.safetensors", data, place / "data", place, place.parent):
            assert str(path) in before, path
        assert any(path.startswith(str(place / "manifest-")) for path in before), "the manifest's own bytes"
        assert before.index(str(data / "00000.safetensors")) < before.index(str(data))
        assert ("sync", str(place)) in calls[commit:], "the commit itself"


class NamesAndFails(UnsyncedStore):
    """A folder in which giving a manifest its name fails after it took effect, before anybody has synced it."""

    breaks = syncs = True

    def _publish(self, temporary, name):
        super()._publish(temporary, name)
        if self.breaks:
            raise milepost.StorageError(f"cannot publish {name}", errno=errno.EIO)

    def delete(self, *names, durable=False):
        if durable and not self.syncs:
            raise milepost.StorageError("cannot sync", errno=errno.EIO)
        super().delete(*names, durable=durable)


@pytest.mark.parametrize("hard_links", [True, False])
def test_manifest_found_after_an_error_is_synced_before_old_data_goes(hard_links):
    store = NamesAndFails(hard_links=hard_links)
    for number in (1, 2):
        milepost.save({"n": number}, store)
        assert milepost.open(store.after_power_cut(lambda _: False))["n"] == number


def test_manifest_that_cannot_be_synced_is_taken_back():
    store = NamesAndFails()
    milepost.save({"n": 1}, store)
    store.syncs, first = False, len(store.journal)
    with pytest.raises(milepost.NotDurable, match="cannot sync; it was taken back"):
        milepost.save({"n": 2}, store)
    assert milepost.open(store)["n"] == 1
    assert {milepost.open(after)["n"] for _, after in store.possible_states(20, first=first)} <= {1, 2}
    store.breaks = False
    assert milepost.save({"n": 3}, store).generation == 2
    assert milepost.open(store)["n"] == 3


@pytest.mark.slow
def test_memory_stays_small_for_tensors_that_must_be_copied(tmp_path):
    program = """
import torch, milepost
def peak():
    return int(next(l for l in open("/proc/self/status") if l.startswith("VmHWM")).split()[1]) // 1024
state = {"t": torch.ones(8192, 16384).t()}
target = {"t": torch.ones(16384, 8192)}
milepost.save({"t": torch.ones(1)}, "warm")
open("/proc/self/clear_refs", "w").write("5")
before = peak()
milepost.save(state, "step")
milepost.load(target, "step")
print(peak() - before)
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=True
    )
    assert int(done.stdout) < 256, "MiB, for a state of 512 that is not contiguous"
