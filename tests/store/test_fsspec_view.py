"""What fsspec reaches is read like any other place, and nothing is saved there."""

import pickle
import sys
import uuid

import pytest
import torch

import milepost
from milepost.store import FsspecView, LocalStore, store_at
from tests.dcp.file_systems import Moving

fsspec = pytest.importorskip("fsspec")
fsspec.register_implementation("moving", Moving, clobber=True)


def uploaded(folder):
    """The URL of a copy of a folder."""
    url = f"moving://{uuid.uuid4()}/run/a"
    fs, root = fsspec.core.url_to_fs(url)
    fs.put(str(folder), root, recursive=True)
    return url


def test_all_formats_are_read_at_a_url_of_fsspec(tmp_path):
    state = {"w": torch.arange(6000.0).view(60, 100), "b": torch.ones(3)}
    milepost.save(state, tmp_path / "own" / "x")
    milepost.convert(tmp_path / "own" / "x", tmp_path / "dcp" / "x", "dcp")
    milepost.convert(tmp_path / "own" / "x", tmp_path / "hf" / "x", "safetensors", max_shard_bytes=1000)
    torch.save(state, tmp_path / "state.pt")
    (tmp_path / "pt").mkdir()
    (tmp_path / "state.pt").rename(tmp_path / "pt" / "x")
    for kind in ("own", "dcp", "hf", "pt"):
        url = uploaded(tmp_path / kind) + "/x"
        target = {"w": torch.zeros(60, 100), "b": torch.zeros(3)}
        milepost.load(target, url)
        assert torch.equal(target["w"], state["w"]), kind
        assert milepost.open(pickle.loads(pickle.dumps(store_at(url)))).verify().ok
        with pytest.raises(milepost.InvalidRequest, match="only read"):
            milepost.save(target, url)


def test_a_listing_stays_in_its_folder(tmp_path):
    for name in ("a/one", "a/in/two", "ab/three"):
        LocalStore(tmp_path).create(name, b"x")
    store = FsspecView(uploaded(tmp_path))
    assert set(store.list("a")) == {"a/one", "a/in/two", "ab/three"}
    assert set(store.list("a", shallow=True)) == {"a/", "ab/"}
    assert set(store.list("a/", shallow=True)) == {"a/one", "a/in/"}
    assert list(store.list("absent/", shallow=True)) == []


def test_unknown_places_say_what_to_do(monkeypatch):
    with pytest.raises(milepost.InvalidRequest, match="no kind of place called 'nowhere'"):
        store_at("nowhere://me:secret@a/b")
    for module, scheme, package in (("smbclient", "smb", "smbprotocol"), ("huggingface_hub", "hf", "huggingface-hub")):
        monkeypatch.setitem(sys.modules, module, None)
        with pytest.raises(milepost.InvalidRequest, match=f"cannot be read yet: .*: pip install {package}$"):
            store_at(f"{scheme}://me:secret@a/b?key=secret")
    monkeypatch.setitem(sys.modules, "fsspec", None)
    with pytest.raises(milepost.InvalidRequest, match="pip install fsspec"):
        store_at("hf://org/model")
    assert "secret" not in FsspecView("sftp://me:secret@host/a").url
