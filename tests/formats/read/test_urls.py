"""Every format is read at a URL as in a folder, by few requests; a listing stays at the top of its place."""

import shutil
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import milepost
from milepost.store import MemoryStore, Within, store_at
from tests import golden
from tests.formats.foreign_states import rich_state, same
from tests.urls import below, upload
from tests.web import Web

SMALL = 400


@pytest.fixture
def url(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        yield url


@pytest.fixture(scope="module")
def foreign(tmp_path_factory):
    """One state in every format, by its own library where that is torch; and many small tensors."""
    folder = tmp_path_factory.mktemp("foreign")
    state = {f"w{i}": torch.full((16, 4), float(i)) for i in range(SMALL)} | {"large": torch.randn(1500, 1000)}
    with pytest.warns(UserWarning, match="single process"):
        torch_dcp.save(state, checkpoint_id=folder / "dcp")
    torch.save(state, folder / "state.pt")
    milepost.export_safetensors(state, folder / "hf", max_shard_bytes=4_000_000)
    milepost.export_safetensors(state, folder / "single")
    shutil.copy(folder / "single" / "model.safetensors", folder / "alone.safetensors")
    milepost.save(state, folder / "own")
    return folder, state


@pytest.mark.parametrize("kind", ["own", "dcp", "state.pt", "hf", "single", "alone.safetensors"])
def test_a_format_is_read_at_a_url_by_few_requests(kind, foreign, url, s3_proxy):
    folder, state = foreign
    place = upload(folder / kind, below(url, kind))
    upload(folder / "own", below(url, f"{kind}/beside/it") if (folder / kind).is_dir() else below(url, "beside"))
    s3_proxy.traffic(reset=True)
    with milepost.open(place) as checkpoint:
        opened = s3_proxy.traffic(reset=True).total
        assert torch.equal(checkpoint["large"][1000:1010], state["large"][1000:1010])
        assert checkpoint.verify().ok
    assert opened <= 20, "not a request for each tensor"
    target = {key: torch.zeros_like(value) for key, value in state.items()}
    assert milepost.explain(target, place).fits()
    s3_proxy.traffic(reset=True)
    milepost.load(target, place)
    assert s3_proxy.traffic().total <= 40, "not a request for each tensor"
    assert all(torch.equal(target[key], value) for key, value in state.items())
    with Web(folder) as web:
        assert torch.equal(milepost.open(f"{web.url}/{kind}")["large"].read(), state["large"])


def test_a_rich_state_is_the_same_at_a_url(url, tmp_path):
    state = rich_state()
    torch.save(state, tmp_path / "rich.pt")
    place = upload(tmp_path / "rich.pt", below(url, "rich.pt"))
    assert same(milepost.open(tmp_path / "rich.pt", allow_pickle=True).state(), state)
    assert same(milepost.open(place, allow_pickle=True).state(), state)
    milepost.convert(place, below(url, "converted"), allow_pickle=True)
    assert same(milepost.open(below(url, "converted"), allow_pickle=True).state()["model"], state["model"])


@pytest.mark.parametrize("name", ["zero3", "universal"])
def test_a_run_of_deepspeed_is_read_at_a_url(name, url):
    folder = Path(golden.__file__).parent / "deepspeed" / name
    place = upload(folder, below(url, name))
    with milepost.open(folder) as local, milepost.open(place) as there:
        assert there.format == "deepspeed"
        assert any(key.startswith("optimizer.state") for key in there)
        assert same(there.state(), local.state())


def test_what_is_absent_is_said_by_few_requests(url, s3_proxy):
    s3_proxy.traffic(reset=True)
    with pytest.raises(milepost.CheckpointNotFound, match="Nothing was saved here"):
        milepost.open(below(url, "absent"))
    assert s3_proxy.traffic().total <= 5


def test_a_listing_stays_at_the_top(tmp_path):
    class Listed(MemoryStore):
        """A store that gives no listing of everything."""

        def list(self, prefix, *, shallow=False):
            assert shallow or prefix, "a whole bucket is listed"
            return super().list(prefix, shallow=shallow)

    torch.save({"w": torch.ones(3)}, tmp_path / "x.pt")
    store = Listed()
    store.create("runs/x.pt", (tmp_path / "x.pt").read_bytes())
    assert milepost.open(Within(store, "runs/x.pt"))["w"].read().tolist() == [1, 1, 1]
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(store)
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(Within(store, "runs"))
    assert store_at(store) is store
