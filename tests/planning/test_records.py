"""The records that planners exchange, and the roles that must be filled completely."""

import pickle

import pytest
import torch
from torch.distributed.checkpoint import metadata as theirs

from milepost import planning
from milepost.planning.default import DefaultLoadPlanner, DefaultSavePlanner
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import (
    BytesIOWriteData,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadItemType,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
    WriteResult,
)

CHUNK = ChunkStorageMetadata(torch.Size([2, 0]), torch.Size([2, 4]))
SHARD = WriteItem(
    MetadataIndex("w", CHUNK.offsets, 1),
    WriteItemType.SHARD,
    tensor_data=TensorWriteData(CHUNK, TensorProperties(torch.bfloat16), torch.Size([4, 4])),
)


def test_the_hint_of_an_index_takes_no_part_in_equality_and_hash():
    assert MetadataIndex("w", (0, 2), 1) == MetadataIndex("w", torch.Size([0, 2]), 7) == MetadataIndex("w", [0, 2])
    assert len({MetadataIndex("w", (0, 2), 1), MetadataIndex("w", (0, 2), 2), MetadataIndex("w", (0, 2))}) == 1
    assert len({MetadataIndex("w"), MetadataIndex("w", (0,)), MetadataIndex("w", (1,)), MetadataIndex("v")}) == 4
    assert isinstance(MetadataIndex("w", [0, 2]).offset, torch.Size)


def test_the_size_of_an_item_is_that_of_its_box_and_not_of_the_tensor():
    assert SHARD.tensor_storage_size() == 2 * 4 * 2
    assert WriteItem(MetadataIndex("v"), WriteItemType.BYTE_IO).tensor_storage_size() is None
    scalar = planning.create_write_item_for_tensor("s", torch.tensor(1.0, dtype=torch.float64))
    assert scalar.tensor_storage_size() == 8


@pytest.mark.parametrize(
    "record",
    [
        CHUNK,
        TensorStorageMetadata(TensorProperties(torch.int8), torch.Size([4]), [CHUNK]),
        BytesStorageMetadata(),
        StorageMeta("here", "a", "b", ["m"]),
        Metadata({"v": BytesStorageMetadata()}, {"v": ("v",)}, {"more": 1}, StorageMeta(), "1"),
        MetadataIndex("w", (1, 2), 3),
        BytesIOWriteData(3),
        SHARD,
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex("w", (1,), 2),
            torch.Size([0]),
            MetadataIndex("w", (0,)),
            torch.Size([1]),
            torch.Size([1]),
        ),
        SavePlan([SHARD], 1, {"w": ("w",)}, usable=False),
        LoadPlan([], 1, 2),
        WriteResult(MetadataIndex("w"), 8, "file"),
    ],
    ids=lambda record: type(record).__name__,
)
def test_every_record_travels_as_a_pickle(record):
    for protocol in range(2, pickle.HIGHEST_PROTOCOL + 1):
        back = pickle.loads(pickle.dumps(record, protocol))
        assert back == record
        assert type(back) is type(record)
    if isinstance(record, MetadataIndex):
        assert back.index == record.index


@pytest.mark.parametrize(
    "memory", [torch.contiguous_format, torch.channels_last, torch.channels_last_3d, torch.preserve_format]
)
def test_properties_with_any_memory_format_travel_as_a_pickle(memory):
    properties = TensorProperties(torch.float16, torch.strided, True, memory, True)
    assert pickle.loads(pickle.dumps(properties)) == properties


def test_properties_are_those_that_torch_finds():
    for tensor in (torch.zeros(2, dtype=torch.int16), torch.zeros(2, requires_grad=True)):
        ours, other = TensorProperties.create_from_tensor(tensor), theirs.TensorProperties.create_from_tensor(tensor)
        assert (ours.dtype, ours.layout, ours.requires_grad) == (other.dtype, other.layout, other.requires_grad)
        assert (ours.memory_format, ours.pin_memory) == (other.memory_format, other.pin_memory)
    assert TensorProperties().dtype == torch.get_default_dtype()


@pytest.mark.parametrize("role", [SavePlanner, LoadPlanner, StorageWriter, StorageReader])
def test_incomplete_role_is_refused_with_what_is_missing(role):
    needed = sorted(role.__abstractmethods__)
    filled = {name: lambda self, *args, **kwargs: None for name in needed}
    for left_out in needed:
        partly = type("Partly", (role,), {name: method for name, method in filled.items() if name != left_out})
        with pytest.raises(TypeError, match=left_out):
            partly()
    with pytest.raises(TypeError, match=needed[0]):
        role()
    type("Whole", (role,), filled)()


def test_the_default_planners_fill_their_roles():
    assert isinstance(DefaultSavePlanner(), SavePlanner)
    assert DefaultLoadPlanner().resolve_bytes(None).getvalue() == b""


def test_every_public_name_is_there_once_and_explained():
    assert len(planning.__all__) == len(set(planning.__all__))
    for name in planning.__all__:
        found = getattr(planning, name)
        if callable(found) and getattr(found, "__module__", "").startswith("milepost"):
            assert found.__doc__, name
