"""Items of plans: reads against brute force and against torch, and every kind of tensor on real ranks."""

import io
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint import planner as torch_planner
from torch.distributed.checkpoint import planner_helpers as torch_helpers

from milepost.core.box import Box
from milepost.planning.items import (
    box_of,
    chunk_of,
    create_chunk_list,
    create_read_items,
    create_read_items_for_chunk_list,
    create_write_items,
    find_shard,
    find_state_dict_object,
    init_state_dict,
    iterate_state_dict,
)
from milepost.planning.records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    WriteItemType,
)
from milepost.state.tensors import Sharded
from tests.ranks import spawn
from tests.strategies import boxes_in, count_cover, examples, numbered, shapes, tilings


class Pair(NamedTuple):
    left: Any
    right: Any


def tensor_of(shape, boxes):
    return TensorStorageMetadata(TensorProperties(torch.float32), torch.Size(shape), [chunk_of(box) for box in boxes])


def told(item):
    """All of a read item, ours or torch's."""
    return (
        item.type.name,
        *(
            (index.fqn, tuple(index.offset), index.index, tuple(offsets))
            for index, offsets in (
                (item.dest_index, item.dest_offsets),
                (item.storage_index, item.storage_offsets),
            )
        ),
        tuple(item.lengths),
    )


def torch_reads(shape, saved, wanted):
    def chunks(boxes):
        return [torch_metadata.ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes]

    stored = torch_metadata.TensorStorageMetadata(torch_metadata.TensorProperties(), torch.Size(shape), chunks(saved))
    return torch_helpers.create_read_items_for_chunk_list("w", stored, chunks(wanted))


# ---- reading


@examples(250)
@given(st.data(), shapes(max_dims=3, max_size=9))
def test_reads_are_those_of_torch_and_fill_every_wanted_element_once(data, shape):
    saved = data.draw(tilings(shape))
    wanted = data.draw(st.lists(boxes_in(shape), max_size=4))
    items = create_read_items_for_chunk_list("w", tensor_of(shape, saved), [chunk_of(box) for box in wanted])
    expected = [item for item in torch_reads(shape, saved, wanted) if 0 not in item.lengths]
    assert {told(item) for item in items} == {told(item) for item in expected}
    assert len(items) == len(expected)

    whole = numbered(shape)
    targets = [np.full(box.shape, -1) for box in wanted]
    filled = [[] for _ in wanted]
    for item in items:
        source = whole[saved[item.storage_index.index].slices]
        region, there = (
            Box(tuple(item.dest_offsets), tuple(item.lengths)),
            Box(tuple(item.storage_offsets), tuple(item.lengths)),
        )
        targets[item.dest_index.index][region.slices] = source[there.slices]
        filled[item.dest_index.index].append(region)
    for box, target, regions in zip(wanted, targets, filled, strict=True):
        assert (target == whole[box.slices]).all()
        assert (count_cover(regions, box.shape) == 1).all()


@pytest.mark.parametrize("shape", [(2000, 3), (2000, 100_000), (100_000, 2000)])
def test_many_boxes_are_not_compared_pairwise(monkeypatch, shape):
    count = 2000
    dim = shape.index(2000)
    rows = [Box.whole(shape).narrow(dim, i, 1) for i in range(count)]
    calls = 0
    original = Box.intersect

    def counted(self, other):
        nonlocal calls
        calls += 1
        return original(self, other)

    monkeypatch.setattr(Box, "intersect", counted)
    wanted = [chunk_of(box) for box in reversed(rows)]
    items = create_read_items_for_chunk_list("w", tensor_of(shape, rows), wanted)
    assert len(items) == count
    assert calls <= 3 * count


def test_a_grid_of_boxes_is_compared_row_by_row(monkeypatch):
    side = 45
    boxes = [Box((i, j), (1, 1)) for i in range(side) for j in range(side)]
    calls = 0
    original = Box.intersect

    def counted(self, other):
        nonlocal calls
        calls += 1
        return original(self, other)

    monkeypatch.setattr(Box, "intersect", counted)
    items = create_read_items_for_chunk_list("w", tensor_of((side, side), boxes), [chunk_of(box) for box in boxes])
    assert len(items) == side * side
    assert calls <= 3 * side**3


def test_a_value_is_read_as_bytes_and_a_tensor_never_into_a_value():
    (item,) = create_read_items("v", BytesStorageMetadata(), 5)
    (expected,) = torch_helpers._create_read_items("v", torch_metadata.BytesStorageMetadata(), 5)
    assert (item.type.name, tuple(item.lengths)) == (expected.type.name, tuple(expected.lengths))
    with pytest.raises(ValueError, match=r"Invalid checkpoint metadata for w.*a str there"):
        create_read_items("w", tensor_of((2,), [Box.whole((2,))]), "text")


# ---- writing, and finding what an item names


@pytest.mark.parametrize("tensor", [torch.zeros(3, 4), torch.tensor(1.0), torch.zeros(0, 4), torch.zeros(2).int()])
def test_a_plain_tensor_is_one_item_as_in_torch(tensor):
    (item,), (expected,) = create_write_items("w", tensor), torch_helpers._create_write_items("w", tensor)
    assert item.type.name == expected.type.name == "TENSOR"
    assert (item.index.fqn, item.index.offset) == (expected.index.fqn, expected.index.offset)
    ours, other = item.tensor_data, expected.tensor_data
    assert (ours.chunk.offsets, ours.chunk.sizes, ours.size) == (other.chunk.offsets, other.chunk.sizes, other.size)
    assert ours.properties.dtype == other.properties.dtype
    assert find_state_dict_object({"w": tensor}, item.index) is tensor


def test_values_are_bytes_and_know_their_size_where_they_have_one():
    (item,) = create_write_items("v", {"a": 1})
    assert (item.type, item.index, item.bytes_io_data) == (WriteItemType.BYTE_IO, MetadataIndex("v"), None)
    (item,) = create_write_items("v", io.BytesIO(b"12345"))
    assert item.bytes_io_data.nbytes == 5


def test_arrays_are_tensors_and_are_read_into_unless_they_cannot_be():
    array = np.arange(6).reshape(2, 3)
    (item,) = create_write_items("a", array)
    assert item.tensor_data.properties.dtype == torch.int64
    find_state_dict_object({"a": array}, item.index)[1, 2] = 70
    assert array[1, 2] == 70
    saved = tensor_of((2, 3), [Box.whole((2, 3))])
    assert len(create_read_items("a", saved, array)) == 1
    array.flags.writeable = False
    with pytest.raises(ValueError, match="a is an array that cannot be read into"):
        create_read_items("a", saved, array)


def test_what_is_not_there_is_named():
    state = {"w": torch.zeros(4), "v": 5, "s": Sharded((4,), {(2,): torch.zeros(2)})}
    for index, text in [
        (MetadataIndex("x"), "Could not find FQN: 'x'"),
        (MetadataIndex("w", (2,)), "'w' is not a ShardedTensor"),
        (MetadataIndex("v", (0,)), "'v' is not a ShardedTensor"),
        (MetadataIndex("s"), "no offset was provided"),
        (MetadataIndex("s", (0,)), "Could not find shard at"),
    ]:
        with pytest.raises(ValueError, match=text):
            find_state_dict_object(state, index)
    with pytest.raises(ValueError, match=r"Unsupported Type.*str"):
        create_chunk_list("text")


def test_sharded_boxes_are_found_by_offset_not_by_hint():
    parts = {(0,): torch.zeros(2), (4,): torch.ones(2)}
    value = Sharded((6,), parts)
    items = create_write_items("s", value)
    assert [item.type for item in items] == [WriteItemType.SHARD] * 2
    for offset, part in parts.items():
        for hint in (None, 0, 1, 7, -1):
            assert find_shard(value, MetadataIndex("s", offset, hint)).data_ptr() == part.data_ptr()


def test_empty_box_does_not_hide_one_at_the_same_offset():
    value = Sharded((4,), {(4,): torch.zeros(0)}, torch.float32)
    assert create_write_items("s", value) == []
    assert create_chunk_list(value) == []


def test_a_sharded_tensor_without_elements_is_still_written():
    for value in (Sharded((0, 4), {}, torch.int8), Sharded((0, 4), {(0, 0): torch.zeros(0, 4).to(torch.int8)})):
        (item,) = create_write_items("s", value)
        assert item.tensor_data.size == item.tensor_data.chunk.sizes == torch.Size([0, 4])
        found = find_state_dict_object({"s": value}, item.index)
        assert (found.shape, found.dtype) == ((0, 4), torch.int8)


# ---- torch's own protocol


class Rows(torch.Tensor):
    """A tensor that says in torch's records that it is two rows of a tensor of four, saved one by one."""

    def __create_write_items__(self, fqn, value):
        assert value is self
        return [
            torch_planner.WriteItem(
                index=torch_metadata.MetadataIndex(fqn, chunk.offsets),
                type=torch_planner.WriteItemType.SHARD,
                tensor_data=torch_planner.TensorWriteData(
                    chunk, torch_metadata.TensorProperties(self.dtype), torch.Size([4, self.shape[1]])
                ),
            )
            for chunk in self.__create_chunk_list__()
        ]

    def __create_chunk_list__(self):
        row = torch.Size([1, self.shape[1]])
        return [torch_metadata.ChunkStorageMetadata(torch.Size([2 + i, 0]), row) for i in range(2)]

    def __get_tensor_shard__(self, index):
        assert isinstance(index, torch_metadata.MetadataIndex)
        return self.as_subclass(torch.Tensor)[index.offset[0] - 2 : index.offset[0] - 1]


def test_tensors_that_plan_for_themselves_in_torchs_records_are_understood():
    value = torch.arange(6.0).reshape(2, 3).as_subclass(Rows)
    items = create_write_items("r", value)
    assert [type(item).__module__ for item in items] == ["milepost.planning.records"] * 2
    assert [box_of(item.tensor_data.chunk) for item in items] == [Box((2, 0), (1, 3)), Box((3, 0), (1, 3))]
    assert items[0].type is WriteItemType.SHARD
    assert items[0].tensor_data.size == torch.Size([4, 3])
    assert isinstance(items[0].tensor_data.properties, TensorProperties)
    assert all(isinstance(chunk, ChunkStorageMetadata) for chunk in create_chunk_list(value))
    assert find_state_dict_object({"r": value}, items[1].index).tolist() == [[3.0, 4.0, 5.0]]
    reads = create_read_items("r", tensor_of((4, 3), [Box.whole((4, 3))]), value)
    assert [tuple(read.storage_offsets) for read in reads] == [(2, 0), (3, 0)]


# ---- states


def test_tensors_are_replaced_in_place_and_nothing_else_is_touched():
    inner, size = [torch.zeros(1), 2], torch.Size([3])
    state = {"a": inner, "b": (1, 2), "c": Pair(torch.ones(1), 5), "d": size, "e": {"f": torch.zeros(2)}}
    before = state["b"]
    iterate_state_dict(state, None, None, lambda tensor: tensor + 1)
    assert state["a"] is inner
    assert inner[0].tolist() == [1.0]
    assert state["b"] is before
    assert type(state["c"]) is Pair
    assert state["c"].left.tolist() == [2.0]
    assert state["d"] is size
    assert state["e"]["f"].tolist() == [1.0, 1.0]


def test_meta_tensors_get_memory_and_others_stay_what_they_are():
    kept = torch.zeros(2)
    state = {"a": [torch.empty(3, 2, device="meta", dtype=torch.bfloat16)], "b": kept}
    state["p"] = torch.nn.Parameter(torch.empty(2, device="meta"))
    init_state_dict(state)
    made = state["a"][0]
    assert (made.device.type, made.shape, made.dtype) == ("cpu", (3, 2), torch.bfloat16)
    assert isinstance(state["p"], torch.nn.Parameter)
    assert state["b"] is kept


# ---- real ranks


def _work(rank):
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    whole = torch.arange(24.0).reshape(6, 4)
    uneven = torch.arange(3.0)
    sub = dist.device_mesh.DeviceMesh("cpu", [1])
    local = torch.cat([whole[0:3].chunk(2)[rank], whole[3:6].chunk(2)[rank]])
    state = {
        "rows": distribute_tensor(whole, mesh, [Shard(0)]),
        "columns": distribute_tensor(whole, mesh, [Shard(1)]),
        "copied": distribute_tensor(whole, mesh, [Replicate()]),
        "empty": distribute_tensor(torch.zeros(0, 4), mesh, [Shard(0)]),
        "one": distribute_tensor(torch.arange(1.0), mesh, [Shard(0)]),
        "uneven": distribute_tensor(uneven, mesh, [Shard(0)]),
        "elsewhere": DTensor.from_local(torch.zeros(2), sub, [Replicate()], run_check=False),
        "strided": DTensor.from_local(
            local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, shape=whole.shape, stride=whole.stride()
        ),
        "shards": init_from_local_shards(
            [LocalShard.from_tensor_and_offsets(whole[3 * rank : 3 * rank + 3].clone(), [3 * rank, 0], rank)], 6, 4
        ),
        "meta": distribute_tensor(torch.empty(6, 4, device="meta"), mesh, [Shard(0)]),
    }
    found, expected = {}, {}
    for key, value in state.items():
        if key == "elsewhere" and rank == 0:
            continue
        items = create_write_items(key, value)
        assert [box_of(i.tensor_data.chunk) for i in items] == [box_of(c) for c in create_chunk_list(value)], key
        data = [] if key == "meta" else [find_state_dict_object(state, item.index).tolist() for item in items]
        found[key] = [box_of(item.tensor_data.chunk) for item in items], data, items[0].tensor_data.size if items else 0
        theirs = torch_helpers._create_write_items(key, value) if key != "strided" else []
        boxes = [Box(tuple(i.tensor_data.chunk.offsets), tuple(i.tensor_data.chunk.sizes)) for i in theirs]
        expected[key] = [box for box in boxes if box.elements]
    init_state_dict(state)
    meta = state["meta"]
    return found, expected, (meta.device.type, meta.to_local().device.type, meta.placements, tuple(meta.shape))


def test_every_tensor_kind_gives_the_boxes_and_data_of_torch():
    results = spawn(2, _work)
    whole, uneven = torch.arange(24.0).reshape(6, 4), torch.arange(3.0)
    wholes = {"one": torch.arange(1.0), "uneven": uneven, "elsewhere": torch.zeros(2), "empty": torch.zeros(0, 4)}
    for rank, (found, expected, meta) in enumerate(results):
        for key, (boxes, data, _) in found.items():
            if key not in {"strided", "empty"}:
                assert boxes == expected[key], (rank, key)
            for box, values in zip(boxes, data, strict=key != "meta"):
                assert torch.tensor(values).reshape(box.shape).equal(wholes.get(key, whole)[box.slices]), (rank, key)
        assert meta[:2] == ("cpu", "cpu")
        assert meta[3] == (6, 4)
        assert found["empty"][0] == [Box((0, 0), (0, 4))]
    assert results[0][0]["strided"][0] == [Box((0, 0), (2, 4)), Box((3, 0), (2, 4))]
    assert results[1][0]["strided"][0] == [Box((2, 0), (1, 4)), Box((5, 0), (1, 4))]
    assert results[1][0]["one"][0] == []
