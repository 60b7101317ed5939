"""Plans of all ranks: freed of what is double, described, checked, compared and merged."""

import copy
import dataclasses
import pickle

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.checkpoint import default_planner as torch_default
from torch.distributed.checkpoint import metadata as torch_metadata

from milepost.core.box import Box
from milepost.planning.global_plan import (
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_metadata,
    create_default_local_save_plan,
    dedup_save_plans,
    merged_planner_data,
    overlapping,
    validate_global_plan,
)
from milepost.planning.items import chunk_of
from milepost.planning.kept_plans import compare_save_plans, contains_usable_plan, merge_delta_local_plans
from milepost.planning.records import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    SavePlan,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from tests.strategies import boxes_in, examples, shapes, tilings


def shard(fqn, box, shape, dtype=torch.float32):
    data = TensorWriteData(chunk_of(box), TensorProperties(dtype), torch.Size(shape))
    return WriteItem(MetadataIndex(fqn, box.offset), WriteItemType.SHARD, tensor_data=data)


def whole(fqn, elements, dtype=torch.float32):
    item = shard(fqn, Box.whole((elements,)), (elements,), dtype)
    return dataclasses.replace(item, type=WriteItemType.TENSOR)


def value(fqn):
    return WriteItem(MetadataIndex(fqn), WriteItemType.BYTE_IO)


def described(shape, boxes, dtype=torch.float32):
    return TensorStorageMetadata(TensorProperties(dtype), torch.Size(shape), [chunk_of(box) for box in boxes])


# ---- what several ranks would write


@st.composite
def plans_of_ranks(draw):
    """Plans of some ranks that hold some of the same items: values, small tensors, boxes of large ones."""
    pool = [value("v"), value("u")]
    pool += [whole(f"w{i}", draw(st.integers(0, 50))) for i in range(3)]
    pool += [shard("s", Box((i, 0), (1, 8)), (1000, 8)) for i in range(4)]
    world = draw(st.integers(1, 5))
    return [SavePlan(draw(st.lists(st.sampled_from(pool), unique_by=lambda item: item.index))) for _ in range(world)]


@examples(200)
@given(plans_of_ranks(), st.booleans())
def test_each_item_is_written_once_by_a_holder(plans, lowest):
    before = pickle.dumps(plans)
    result = dedup_save_plans(plans, lowest)
    assert pickle.dumps(plans) == before
    assert len(result) == len(plans)
    written = [item.index for plan in result for item in plan.items]
    assert len(written) == len(set(written))
    assert set(written) == {item.index for plan in plans for item in plan.items}
    for plan, held in zip(result, plans, strict=True):
        assert [item for item in held.items if item in plan.items] == plan.items
    if lowest:
        for index in written:
            holders = [rank for rank, plan in enumerate(plans) if index in [item.index for item in plan.items]]
            assert index in [item.index for item in result[holders[0]].items]


@examples(100)
@given(st.lists(st.integers(1, 100), min_size=1, max_size=30), st.integers(1, 6))
def test_what_all_ranks_hold_is_balanced_by_bytes(sizes, world):
    items = [whole(f"w{i}", size) for i, size in enumerate(sizes)]
    result = dedup_save_plans([SavePlan(items)] * world)
    loads = [sum(item.tensor_storage_size() for item in plan.items) for plan in result]
    assert max(loads) - min(loads) <= max(sizes) * 4


def test_the_bytes_of_a_box_count_and_not_those_of_its_tensor():
    # Rank 0 has one small box of a huge tensor of its own: it still has nearly nothing to do.
    own = shard("huge", Box((0, 0), (1, 1)), (10_000, 10_000))
    shared = [whole(f"w{i}", 100) for i in range(8)]
    result = dedup_save_plans([SavePlan([own, *shared]), SavePlan(shared)])
    assert [len(plan.items) for plan in result] == [1 + 4, 4]


def test_what_only_one_rank_holds_counts_before_the_rest_is_given_out():
    shared = [whole("a", 10), whole("b", 10)]
    result = dedup_save_plans([SavePlan([*shared, whole("own", 1000)]), SavePlan(shared)])
    assert [[item.index.fqn for item in plan.items] for plan in result] == [["own"], ["a", "b"]]


def test_large_items_are_assigned_before_small_ones():
    items = [whole("a", 10), whole("b", 10), whole("c", 20)]
    loads = [sum(item.tensor_storage_size() for item in plan.items) for plan in dedup_save_plans([SavePlan(items)] * 2)]
    assert loads == [80, 80]


def test_other_fields_of_a_plan_are_kept():
    plan = SavePlan([value("v"), value("v")], "storage", {"v": ("v",)})
    (result,) = dedup_save_plans([plan])
    assert result == dataclasses.replace(plan, items=[value("v")])


# ---- the global plan


def test_hints_tell_the_place_of_each_box_in_the_metadata_as_in_torch():
    boxes = [Box((i,), (2,)) for i in (0, 2, 4)]
    plans = [SavePlan([shard("s", boxes[2], (6,)), value("v")]), SavePlan([shard("s", boxes[0], (6,)), whole("w", 3)])]
    plans += [SavePlan([shard("s", boxes[1], (6,))], planner_data={"s": ("s",)})]
    before = copy.deepcopy(plans)
    result, metadata = create_default_global_save_plan(plans)
    assert plans == before
    assert all(item.index.index is None for plan in plans for item in plan.items)
    assert [[item.index.index for item in plan.items] for plan in result] == [[0, None], [1, 0], [2]]
    for plan in result:
        for item in plan.items:
            if item.tensor_data is not None:
                chunks = metadata.state_dict_metadata[item.index.fqn].chunks
                assert chunks[item.index.index] == item.tensor_data.chunk
    assert result[2].planner_data == {"s": ("s",)}
    assert metadata.state_dict_metadata["v"] == BytesStorageMetadata()
    unhinted, again = create_default_global_save_plan(plans, rewrite_index_hints=False)
    assert [item.index.index for plan in unhinted for item in plan.items] == [None] * 5
    assert again == metadata


def test_what_is_written_twice_is_refused():
    for items in ([whole("w", 2)] * 2, [value("w")] * 2, [whole("w", 2), value("w")]):
        with pytest.raises(AssertionError, match="w is written twice"):
            create_default_global_save_plan([SavePlan([item]) for item in items])


def test_planner_data_of_all_ranks_is_merged_and_the_first_counts():
    plans = [SavePlan([], planner_data=data) for data in ({"a": 1}, None, {"a": 2, "b": 3})]
    assert merged_planner_data(plans) == {"a": 1, "b": 3}


def test_the_metadata_of_a_state_is_that_of_torch():
    state = {"w": torch.zeros(2, 3), "i": torch.zeros(4, dtype=torch.int8), "v": 5}
    ours, other = create_default_local_metadata(state), torch_default._create_default_local_metadata(state)
    assert list(ours.state_dict_metadata) == list(other.state_dict_metadata)
    for key in ("w", "i"):
        mine, its = ours.state_dict_metadata[key], other.state_dict_metadata[key]
        assert (mine.size, mine.properties.dtype) == (its.size, its.properties.dtype)
        assert [(c.offsets, c.sizes) for c in mine.chunks] == [(c.offsets, c.sizes) for c in its.chunks]
    assert create_default_local_save_plan(state, True) == create_default_local_save_plan(state, False)


# ---- checking


@examples(250)
@given(st.data(), shapes(max_dims=3, max_size=6))
def test_overlaps_are_exactly_those_that_comparing_each_with_each_finds(data, shape):
    boxes = data.draw(st.lists(boxes_in(shape), max_size=8))
    expected = [
        (i, j) for j in range(len(boxes)) for i in range(j) if boxes[i].elements and boxes[i].intersect(boxes[j])
    ]
    assert overlapping(boxes) == sorted(expected)


@examples(250)
@given(st.data(), shapes(max_dims=3, max_size=6).filter(len))
def test_a_plan_is_valid_when_torch_finds_it_valid(data, shape):
    boxes = data.draw(st.one_of(tilings(shape), st.lists(boxes_in(shape, min_size=1), max_size=4)))
    boxes = [box for box in boxes if box.elements]
    plans = [SavePlan([])] * data.draw(st.integers(1, 2))
    theirs = torch_metadata.TensorStorageMetadata(
        torch_metadata.TensorProperties(),
        torch.Size(shape),
        [torch_metadata.ChunkStorageMetadata(torch.Size(b.offset), torch.Size(b.shape)) for b in boxes],
    )
    expected = torch_default._validate_global_plan(plans, torch_metadata.Metadata({"w": theirs}))
    found = validate_global_plan(plans, Metadata({"w": described(shape, boxes)}))
    if isinstance(expected, bool):  # older versions of torch only say whether it is valid
        assert (not found) == expected
    else:
        assert len(found) == len(expected)


def test_all_that_is_wrong_is_told_at_once():
    chunk = ChunkStorageMetadata(torch.Size([3]), torch.Size([2]))
    outside = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [chunk])
    odd = TensorStorageMetadata(TensorProperties(), torch.Size([4]), [ChunkStorageMetadata(torch.Size([0, 0]), (4,))])
    metadata = Metadata(
        {
            "outside": outside,
            "odd": odd,
            "negative": TensorStorageMetadata(
                TensorProperties(), torch.Size([4]), [ChunkStorageMetadata(torch.Size([-1]), torch.Size([2]))]
            ),
            "overlap": described((4,), [Box((0,), (3,)), Box((2,), (2,))]),
            "scalar": described((), [Box((), ()), Box((), ())]),
            "hole": described((4,), [Box((0,), (3,))]),
            "fine": described((4,), [Box((0,), (3,)), Box((3,), (1,))]),
            "v": BytesStorageMetadata(),
        }
    )
    plans = [
        SavePlan([shard("dtype", Box((0,), (2,)), (4,)), whole("size", 2), whole("kind", 2)]),
        SavePlan([shard("dtype", Box((2,), (2,)), (4,), torch.float16), whole("size", 3), value("kind")]),
    ]
    errors = validate_global_plan(plans, metadata)
    for key, text in [
        ("outside", "out of bounds"),
        ("odd", "out of bounds"),
        ("negative", "out of bounds"),
        ("overlap", "overlapping chunks"),
        ("scalar", "overlapping chunks"),
        ("hole", "tensor-volume: 4 chunks-volume: 3"),
        ("dtype", r"is torch.float32 (4,) on rank 0 and torch.float16 (4,) on rank 1"),
        ("size", "(2,) on rank 0 and torch.float32 (3,) on rank 1"),
        ("kind", "on rank 0 and a value on rank 1"),
    ]:
        assert any(f"key:{key} " in error and text in error for error in errors), key
    assert not any("key:fine" in error for error in errors)
    assert not validate_global_plan([SavePlan([])], Metadata({"hole": described((4,), [Box((0,), (3,))])}))


@pytest.mark.parametrize("shape", [(2000, 3), (2000, 100_000)])
def test_checking_many_boxes_does_not_compare_each_with_each(monkeypatch, shape):
    calls = 0
    original = Box.intersect

    def counted(self, other):
        nonlocal calls
        calls += 1
        return original(self, other)

    rows = [Box.whole(shape).narrow(0, i, 1) for i in range(2000)]
    metadata = Metadata({"w": described(shape, rows)})
    monkeypatch.setattr(Box, "intersect", counted)
    assert validate_global_plan([SavePlan([])] * 2, metadata) == []
    assert calls < 2000
    metadata.state_dict_metadata["w"].chunks.append(chunk_of(Box((1000, 2), (1, 1))))
    assert len(validate_global_plan([SavePlan([])], metadata)) == 1


# ---- plans that did not change


def test_plans_are_equal_only_if_they_write_the_same():
    plan = SavePlan([shard("s", Box((0,), (2,)), (4,)), value("v")])
    same = pickle.loads(pickle.dumps(plan))
    assert compare_save_plans(plan, same)
    hinted = dataclasses.replace(plan.items[0], index=MetadataIndex("s", (0,), 3))
    for items in (
        [shard("s", Box((0,), (2,)), (4,), torch.bfloat16), value("v")],
        [shard("s", Box((0,), (2,)), (5,)), value("v")],
        [shard("s", Box((0,), (3,)), (4,)), value("v")],
        [shard("s", Box((1,), (2,)), (4,)), value("v")],
        [shard("t", Box((0,), (2,)), (4,)), value("v")],
        [dataclasses.replace(plan.items[0], type=WriteItemType.TENSOR), value("v")],
        [hinted, value("v")],
        plan.items[:1],
        plan.items[::-1],
        [],
    ):
        assert not compare_save_plans(plan, SavePlan(items))
    assert not compare_save_plans(plan, dataclasses.replace(plan, usable=False))


def test_changed_plan_replaces_the_old_one_for_this_save():
    old = [SavePlan([value("a")], "old"), SavePlan([value("b")], "old"), SavePlan([value("c")], "old")]
    unchanged = SavePlan([], usable=False)
    delta = [unchanged, SavePlan([value("d")]), dataclasses.replace(unchanged, storage_data="new")]
    merged = merge_delta_local_plans(old, delta)
    assert merged == [old[0], delta[1], SavePlan([value("c")], "new")]
    assert contains_usable_plan(delta)
    assert not contains_usable_plan([unchanged, unchanged])


# ---- loads


def test_missing_keys_are_told_all_at_once_unless_a_partial_load_is_wanted():
    metadata = Metadata({"w": described((2,), [Box.whole((2,))])})
    state = {"x": 1, "w": torch.zeros(2), "y": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: x, y\.$"):
        create_default_local_load_plan(state, metadata)
    assert [item.dest_index.fqn for item in create_default_local_load_plan(state, metadata, False).items] == ["w"]
    many = {f"k{i}": i for i in range(80)}
    with pytest.raises(RuntimeError, match="k49 and 30 more"):
        create_default_local_load_plan(many, metadata)


def test_other_sizes_and_kinds_are_told_all_at_once():
    metadata = Metadata({key: described((2,), [Box.whole((2,))]) for key in "abc"})
    with pytest.raises(ValueError, match="Size mismatch between saved") as caught:
        create_default_local_load_plan({"a": torch.zeros(3), "b": torch.zeros(2, 1), "c": "text"}, metadata)
    assert str(caught.value).splitlines()[:2] == [
        "Size mismatch between saved torch.Size([2]) and current: torch.Size([3]) for a",
        "Size mismatch between saved torch.Size([2]) and current: torch.Size([2, 1]) for b",
    ]
    assert "Invalid checkpoint metadata for c" in str(caught.value)
