"""Directories for torch.distributed.checkpoint: torch's own reader gives what was saved."""

import io
import pickle
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save
from torch.distributed.checkpoint.metadata import MetadataIndex

import milepost
from milepost.core.box import Box
from milepost.core.dtypes import DTYPES
from milepost.data.new_files import committed
from milepost.data.transfer import Meter, Transfer
from milepost.formats.write.content import write_range
from milepost.formats.write.dcp import DcpFile, bytes_of_value, chunks_of, metadata_bytes, tensor_record
from milepost.formats.write.torchfile import TensorStub
from milepost.formats.write.zip import endings
from milepost.store import LocalStore
from tests.formats.write.conversions import random_bits, same, training_state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def blank(value):
    if isinstance(value, torch.Tensor):
        return torch.full_like(value, 1) if value.numel() else value.clone()
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, list):
        return [blank(item) for item in value]
    return value


def test_nested_states_with_an_optimizer_come_back_through_dcp_load(tmp_path):
    state = training_state()
    del state["ordered"]  # torch makes a dict of it
    state["more"] = state["more"][:1]
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    target = blank(state)
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    target["model"] = state["model"].__class__(target["model"])
    same(target, state)


def test_torch_turns_the_directory_into_the_state_that_was_saved(tmp_path):
    state = {"a": {"w": torch.ones(3, 2), "n": 4}, "l": [torch.zeros(2), torch.arange(3)], "t": (torch.ones(1), 5)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    dcp_to_torch_save(tmp_path / "dcp", tmp_path / "a.pt")
    same(torch.load(tmp_path / "a.pt", weights_only=False), state)


@pytest.mark.parametrize("dtype", [name for name in DTYPES if hasattr(torch, name)])
def test_every_dtype_keeps_its_bits(tmp_path, dtype):
    state = {"a": random_bits(dtype, 5, 6), "b": random_bits(dtype, 1)[0], "c": random_bits(dtype, 0, 2)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    for key, tensor in state.items():
        (place,) = [info for index, info in metadata.storage_data.items() if index.fqn == key]
        with (tmp_path / "dcp" / place.relative_path).open("rb") as file:
            file.seek(place.offset)
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")  # complex32 is experimental
                same(torch.load(io.BytesIO(file.read(place.length)), weights_only=True), tensor)


def test_large_tensors_are_cut_along_the_first_dimension():
    assert chunks_of("float32", (10, 4), 64) == [Box((0, 0), (4, 4)), Box((4, 0), (4, 4)), Box((8, 0), (2, 4))]
    assert len(chunks_of("float32", (3, 1000), 64)) == 3
    assert chunks_of("float32", (), 64) == [Box((), ())]
    assert chunks_of("float32", (0, 5), 64) == [Box((0, 0), (0, 5))]


def test_chunks_come_back_as_one_tensor(tmp_path, monkeypatch):
    monkeypatch.setattr("milepost.formats.write.dcp.chunks_of", lambda d, s: chunks_of(d, s, 1 << 16))
    state = {"w": torch.randn(300, 700), "v": torch.randn(100_000)}
    milepost.save(state, tmp_path / "source")
    milepost.convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    target = {"w": torch.zeros(300, 700), "v": torch.zeros(100_000)}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    same(target, state)
    metadata = pickle.loads((tmp_path / "dcp" / ".metadata").read_bytes())
    assert len(metadata.state_dict_metadata["w"].chunks) > 10


def write_file(store, content):
    with committed(store.writer(content.name, content.size_bytes)) as writer:
        sums = write_range(writer, content, 0, content.size_bytes, Transfer(), Meter("save", store.url))
        for at, data in endings(content, sums):
            writer.write(at, [data])


def test_plans_can_be_written_without_a_conversion(tmp_path):
    store, file = LocalStore(tmp_path / "dcp"), DcpFile("__0_0.distcp")
    strided = torch.arange(600_000.0).view(300, 2000).t()
    places = {
        MetadataIndex("w", (0, 0)): file.add(TensorStub.of(strided, "w")),
        MetadataIndex("s", ()): file.add(TensorStub.of(torch.tensor(3, dtype=torch.int16), "s")),
        MetadataIndex("v"): file.add(bytes_of_value({"x": 1})),
    }
    write_file(store, file.content)
    items = {
        "w": tensor_record("float32", (2000, 300), [Box.whole((2000, 300))]),
        "s": tensor_record("int16", (), [Box.whole(())]),
        "v": dcp.metadata.BytesStorageMetadata(),
    }
    store.create(".metadata", metadata_bytes(items, places, {key: (key,) for key in items}, store.url))
    target = {"w": torch.zeros(2000, 300), "s": torch.tensor(0, dtype=torch.int16), "v": None}
    dcp.load(target, checkpoint_id=tmp_path / "dcp")
    same(target, {"w": strided, "s": torch.tensor(3, dtype=torch.int16), "v": {"x": 1}})


def test_a_list_at_the_root_is_refused(tmp_path):
    milepost.save([torch.ones(2)], tmp_path / "source")
    with pytest.raises(milepost.InvalidRequest, match="a DCP checkpoint is a dict"):
        milepost.convert(tmp_path / "source", tmp_path / "dcp", "dcp")
    assert not (tmp_path / "dcp").exists()
