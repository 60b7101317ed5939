"""Storage by fsspec: Milepost's format and promises, as far as a file system can keep them."""

import pickle
import sys
import uuid

import pytest
import torch

import milepost
import milepost.dcp as dcp
from milepost.store import LocalStore
from tests.dcp.file_systems import Failing, Short

fsspec = pytest.importorskip("fsspec")
fsspec.register_implementation("failing", Failing, clobber=True)
fsspec.register_implementation("short", Short, clobber=True)

from milepost.dcp._fsspec_filesystem import FsspecReader, FsspecWriter  # noqa: E402


def a_state(number):
    return {"w": torch.full((300, 7), float(number)), "step": number}


def read_back(url):
    target = a_state(-1)
    dcp.load(target, storage_reader=FsspecReader(url))
    assert torch.equal(target["w"], a_state(target["step"])["w"])
    return target["step"]


@pytest.mark.parametrize("scheme", ["memory", "file"])
def test_a_url_of_fsspec_is_saved_to_loaded_and_saved_over(scheme, tmp_path):
    url = f"memory://{uuid.uuid4()}" if scheme == "memory" else f"file://{tmp_path}/run"
    for number in (1, 2):
        dcp.save(a_state(number), storage_writer=FsspecWriter(url))
        assert read_back(url) == number
    with pytest.raises(dcp.CheckpointException, match="already"):
        dcp.save(a_state(3), storage_writer=FsspecWriter(url, overwrite=False))
    dcp.async_save(a_state(4), storage_writer=FsspecWriter(url)).result(timeout=60)
    assert read_back(url) == 4
    files = fsspec.core.url_to_fs(url)[0].find(fsspec.core.url_to_fs(url)[1])
    assert len(files) == 2, "one shard file and one manifest: what was replaced is swept"


def test_local_places_are_the_store_with_all_promises(tmp_path):
    for place in (str(tmp_path / "a"), f"file://{tmp_path}/a"):
        assert isinstance(FsspecWriter(place).store, LocalStore)
    dcp.save(a_state(5), storage_writer=FsspecWriter(str(tmp_path / "a")))
    assert milepost.open(tmp_path / "a")["step"] == 5


def test_a_connection_that_breaks_at_any_write_keeps_the_old_checkpoint():
    url = f"failing://{uuid.uuid4()}"
    Failing.break_at(None)
    dcp.save(a_state(1), storage_writer=FsspecWriter(url))
    for number in range(2):  # a shard file, and a manifest
        Failing.break_at(number)
        with pytest.raises(dcp.CheckpointException, match="the connection broke"):
            dcp.save(a_state(2), storage_writer=FsspecWriter(url))
        assert Failing.broken
        assert read_back(url) == 1
    Failing.break_at(2)
    dcp.save(a_state(2), storage_writer=FsspecWriter(url))
    assert not Failing.broken
    assert read_back(url) == 2


def test_a_file_that_did_not_arrive_whole_is_an_error_of_the_save():
    url = f"short://{uuid.uuid4()}"
    with pytest.raises(dcp.CheckpointException, match=r"has \d+ bytes of \d+ after it was written"):
        dcp.save(a_state(1), storage_writer=FsspecWriter(url))
    fs, root = fsspec.core.url_to_fs(url)
    assert fs.find(root) == [], "nothing of it remains"


def test_bytes_that_changed_are_found():
    url = f"memory://{uuid.uuid4()}"
    dcp.save(a_state(1), storage_writer=FsspecWriter(url))
    fs, root = fsspec.core.url_to_fs(url)
    (shard,) = [path for path in fs.find(root) if path.endswith(".safetensors")]
    data = bytearray(fs.cat_file(shard))
    data[len(data) // 2] ^= 1
    fs.pipe_file(shard, bytes(data))
    with pytest.raises(dcp.CheckpointException) as info:
        read_back(url)
    assert isinstance(info.value.failures[0][0], milepost.CheckpointDamaged)


def test_a_store_by_fsspec_can_be_sent_to_another_process():
    store = FsspecWriter(f"memory://{uuid.uuid4()}").store
    store.create("name", b"data")
    again = pickle.loads(pickle.dumps(store))
    assert again.url == store.url
    assert list(again.list("")) == ["name"]


def test_a_url_that_fsspec_does_not_know_is_refused_with_its_name():
    with pytest.raises(milepost.InvalidRequest, match="nowhere"):
        FsspecWriter("nowhere://bucket/run")
    assert not FsspecWriter.validate_checkpoint_id("nowhere://bucket/run")


def test_without_fsspec_the_error_says_what_to_install(monkeypatch):
    monkeypatch.setitem(sys.modules, "fsspec", None)
    assert not FsspecWriter.validate_checkpoint_id("memory://run")
    with pytest.raises(milepost.InvalidRequest, match="pip install fsspec"):
        FsspecWriter("memory://run")
