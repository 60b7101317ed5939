"""Programs for torch.distributed.checkpoint give the URL of an object store where they gave a path."""

import os

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import milepost
import milepost.dcp as dcp
from milepost.dcp._checkpointer import _Checkpointer
from milepost.dcp._fsspec_filesystem import FsspecReader, FsspecWriter
from milepost.dcp.filesystem import FileSystemReader, FileSystemWriter
from milepost.dcp.format_utils import dcp_to_torch_save, torch_save_to_dcp
from milepost.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from milepost.store import CloudStore
from tests.ranks import spawn
from tests.urls import below
from tests.web import Web


@pytest.fixture
def url(seaweed):
    with seaweed.place() as url:
        yield url


def a_state(number):
    return {"model": {"w": torch.full((300, 7), float(number))}, "step": number}


def assert_holds(url, number, **storage):
    target = a_state(-1)
    dcp.load(target, checkpoint_id=None if storage else url, **storage)
    assert torch.equal(target["model"]["w"], a_state(number)["model"]["w"])
    assert target["step"] == number


def test_save_load_and_async_save_take_a_url(url):
    dcp.save(a_state(1), checkpoint_id=url)
    assert_holds(url, 1)
    dcp.async_save(a_state(2), checkpoint_id=url).result(timeout=60)
    assert_holds(url, 2)
    assert milepost.open(url).generation == 2
    assert milepost.open(url).format == "milepost"


def test_storage_classes_take_a_url(url):
    for number, (writer, reader) in enumerate([(FileSystemWriter, FileSystemReader), (FsspecWriter, FsspecReader)]):
        place = below(url, f"run-{number}")
        storage = writer(place)
        assert isinstance(storage.store, CloudStore)
        dcp.save(a_state(number), storage_writer=storage)
        assert_holds(place, number, storage_reader=reader(place))
        storage.reset(below(url, "other"))
        assert storage.checkpoint_id == below(url, "other")
        with pytest.raises(dcp.CheckpointException, match="already exists"):
            dcp.save(a_state(3), storage_writer=writer(place, overwrite=False))
    kept = _Checkpointer(FileSystemWriter(below(url, "kept")), FileSystemReader(below(url, "kept")), no_dist=True)
    kept.save(a_state(5))
    kept.async_save(a_state(6)).result(timeout=60)
    target = a_state(-1)
    kept.load(target)
    assert target["step"] == 6


def test_files_of_torch_are_converted_at_urls(url, tmp_path):
    torch.save(a_state(4), tmp_path / "state.pt")
    torch_save_to_dcp(tmp_path / "state.pt", url)
    assert_holds(url, 4)
    dcp_to_torch_save(url, tmp_path / "again.pt")
    assert torch.load(tmp_path / "again.pt")["step"] == 4
    with pytest.raises(milepost.InvalidRequest, match=r"written to a path.*copy"):
        dcp_to_torch_save(url, below(url, "state.pt"))


def test_torchs_own_functions_save_to_urls_once_installed(url):
    with milepost.dcp.install():
        torch_dcp.save(a_state(7), checkpoint_id=url)
        target = a_state(-1)
        torch_dcp.load(target, checkpoint_id=url)
        torch_dcp.save(a_state(8), storage_writer=torch_dcp.FileSystemWriter(below(url, "b")))
    assert target["step"] == 7
    assert milepost.open(url)["model.w"].read()[0, 0] == 7
    assert milepost.open(below(url, "b"))["step"] == 8


def test_hugging_face_storage_and_the_web_say_what_to_do(url, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for make in (HuggingFaceStorageReader, HuggingFaceStorageWriter):
        with pytest.raises(milepost.InvalidRequest, match="folder on a file system, not s3://"):
            make(path=url)
    with pytest.raises(milepost.InvalidRequest, match="not s3://"):
        HuggingFaceStorageReader(path=str(tmp_path)).reset(url)
    dcp.save(a_state(9), checkpoint_id=tmp_path / "a")
    with Web(tmp_path) as web:
        assert_holds(f"{web.url}/a", 9)
        with pytest.raises(RuntimeError, match=r"only read.*over HTTP"):
            dcp.save(a_state(1), checkpoint_id=f"{web.url}/a")
    assert os.listdir(tmp_path) == ["a"], "no folder named s3:"


def save_and_load(rank, url, environment):
    os.environ.update(environment)
    whole = torch.arange(800.0).view(8, 100)
    mesh = torch.distributed.init_device_mesh("cpu", (2,))
    split = torch.distributed.tensor.distribute_tensor(whole, mesh, [torch.distributed.tensor.Shard(0)])
    dcp.save({"w": split, "step": 1}, checkpoint_id=url)
    target = {
        "w": torch.distributed.tensor.zeros(8, 100, device_mesh=mesh, placements=[torch.distributed.tensor.Shard(1)]),
        "step": 0,
    }
    dcp.load(target, checkpoint_id=url)
    assert torch.equal(target["w"].full_tensor(), whole)
    dcp.async_save({"w": split, "step": 2}, checkpoint_id=url).result(timeout=60)
    return milepost.open(url)["step"], rank


@pytest.mark.slow
def test_two_ranks_save_to_one_url(url, seaweed):
    assert spawn(2, save_and_load, url, seaweed.environment) == [(2, 0), (2, 1)]
