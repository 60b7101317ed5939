"""The default planners, played through the whole protocol on simulated ranks, with a dict as storage."""

import dataclasses
import io
import os
import pickle
from collections import OrderedDict
from enum import Enum
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch.distributed.checkpoint import _nested_dict as torch_nested
from torch.distributed.checkpoint import _traverse as torch_traverse

from milepost.errors import InvalidRequest, InvalidState, UnsafeCheckpoint, UnsupportedFormat
from milepost.planning.default import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    flatten_sharded_tensors,
)
from milepost.planning.global_plan import create_default_local_metadata
from milepost.planning.records import BytesStorageMetadata, LoadItemType, Metadata, MetadataIndex, SavePlan
from milepost.planning.value_bytes import pack_value
from milepost.state.tensors import Sharded
from milepost.state.values import Codec
from tests.ranks import spawn


class Pair(NamedTuple):
    left: Any
    right: Any


class Colour(Enum):
    RED = 1


@dataclasses.dataclass
class Saved:
    """What a save left behind: the data by index, the metadata, and the plans that travelled."""

    data: dict
    metadata: Metadata
    sent: list
    final: list


def travelled(record):
    return pickle.loads(pickle.dumps(record))


def save(planners, states, goal=None):
    """Play a save on as many ranks as there are planners; each item goes into a dict by its index."""
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, None, rank == 0)
    sent = [travelled(planner.unless_unchanged(planner.create_local_plan())) for planner in planners]
    plans, metadata = planners[0].create_global_plan(sent)
    assert metadata.storage_data is None
    plans = [dataclasses.replace(plan, storage_data=goal) for plan in plans]  # as storage does
    final = [planner.finish_plan(travelled(plan)) for planner, plan in zip(planners, plans, strict=True)]
    data = {}
    for planner, plan in zip(planners, final, strict=True):
        assert plan.usable
        assert plan.storage_data == goal
        for item in plan.items:
            assert item.index not in data, "written twice"
            found = planner.resolve_data(item)
            if item.tensor_data is not None:
                assert (found.shape, found.dtype) == (item.tensor_data.chunk.sizes, item.tensor_data.properties.dtype)
            data[item.index] = found.getvalue() if isinstance(found, io.BytesIO) else found.detach().clone()
    metadata.storage_data = goal  # as storage does
    return Saved(data, travelled(metadata), sent, final)


def load(planners, states, saved):
    """Play a load: each item is cut out of the dict."""
    for rank, (planner, state) in enumerate(zip(planners, states, strict=True)):
        planner.set_up_planner(state, saved.metadata, rank == 0)
    plans = planners[0].create_global_plan([travelled(planner.create_local_plan()) for planner in planners])
    for planner, plan in zip(planners, plans, strict=True):
        for item in planner.finish_plan(travelled(plan)).items:
            source = saved.data[item.storage_index]
            if item.type is LoadItemType.BYTE_IO:
                planner.load_bytes(item, io.BytesIO(source))
                continue
            for dim, (start, length) in enumerate(zip(item.storage_offsets, item.lengths, strict=True)):
                source = source.narrow(dim, start, length)
            target = planner.resolve_tensor(item).detach()
            assert target.shape == source.shape
            target.copy_(source)
            planner.commit_tensor(item, target)


def rows(rank, world, whole):
    """Row blocks of a tensor, one for each rank."""
    part = torch.tensor_split(whole, world)[rank].clone()
    start = sum(len(block) for block in torch.tensor_split(whole, world)[:rank])
    return Sharded(tuple(whole.shape), {(start, *(0,) * (whole.dim() - 1)): part})


def whole_of(states, key):
    return torch.cat([state[key].parts[0].data for state in states])


def equal(one, other):
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, np.ndarray):
        return isinstance(other, np.ndarray) and np.array_equal(one, other)
    if type(one) is not type(other):
        return False
    if isinstance(one, dict):
        return list(one) == list(other) and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, (list, tuple)):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


def nested(fill):
    """A state with everything in it; `fill` 0 is the empty form of it."""
    return {
        "model": {"w": torch.full((4, 2), float(fill)), "scalar": torch.tensor(fill)},
        "optim": {"state": {0: {"step": fill, "m": torch.full((3,), fill)}, 7: {"step": fill + 1}}, "groups": [fill]},
        "tuple": (torch.full((2,), fill), fill, (torch.full((1,), -fill),)),
        "pair": Pair(torch.full((2,), fill), f"text {fill}"),
        "list": [fill, [torch.full((2,), fill)], {"deep": {"value": (fill, "x")}}],
        "array": np.full((2, 2), fill),
        "ordered": OrderedDict(b=fill, a=torch.full((1,), fill)),
        "values": {"none": None, "flag": bool(fill), "size": torch.Size([fill]), "type": torch.bfloat16, "raw": b"1"},
        5: fill,
    }


# ---- round trips


@pytest.mark.parametrize("world", [1, 3])
def test_nested_states_come_back_in_place_with_their_types_and_int_keys(world):
    saved = save([DefaultSavePlanner() for _ in range(world)], [nested(3) for _ in range(world)])
    targets = [nested(0) for _ in range(world)]
    kept = [target["model"]["w"] for target in targets]
    load([DefaultLoadPlanner() for _ in range(world)], targets, saved)
    for target, tensor in zip(targets, kept, strict=True):
        assert equal(target, nested(3))
        assert target["model"]["w"] is tensor


def test_boxes_are_read_from_any_other_cut():
    whole = torch.arange(70.0).reshape(7, 10)
    for before, after in [(1, 3), (3, 2), (4, 4), (2, 7)]:
        saved = save(
            [DefaultSavePlanner() for _ in range(before)], [{"w": rows(r, before, whole)} for r in range(before)]
        )
        targets = [{"w": rows(r, after, torch.zeros(7, 10))} for r in range(after)]
        load([DefaultLoadPlanner() for _ in range(after)], targets, saved)
        assert torch.equal(whole_of(targets, "w"), whole)
        flat = {"w": torch.zeros(7, 10)}
        load([DefaultLoadPlanner()], [flat], saved)
        assert torch.equal(flat["w"], whole)


def test_what_all_ranks_hold_is_written_once_and_spread_over_them():
    state = {f"w{i}": torch.full((10,), float(i)) for i in range(8)} | {"v": 1}
    saved = save([DefaultSavePlanner() for _ in range(4)], [state] * 4)
    assert sorted(len([i for i in plan.items if i.tensor_data]) for plan in saved.final) == [2, 2, 2, 2]
    saved = save([DefaultSavePlanner(dedup_save_to_lowest_rank=True) for _ in range(4)], [state] * 4)
    assert [len(plan.items) for plan in saved.final] == [9, 0, 0, 0]


def test_without_flattening_top_level_values_come_back_and_nested_tensors_are_refused():
    for options in ({}, {"flatten_sharded_tensors": False}):
        saved = save([DefaultSavePlanner(False)], [{"a": torch.ones(2), "b": {"c": [1, 2]}}])
        assert saved.metadata.planner_data is None
        target = {"a": torch.zeros(2), "b": None}
        load([DefaultLoadPlanner(False, **options)], [target], saved)
        assert equal(target, {"a": torch.ones(2), "b": {"c": [1, 2]}})
    with pytest.raises(InvalidState, match=r"'b.c' is a torch.Tensor"):
        save([DefaultSavePlanner(False)], [{"b": {"c": torch.ones(2)}}])


def test_meta_tensors_of_the_target_get_memory():
    saved = save([DefaultSavePlanner()], [{"a": [torch.arange(3)]}])
    target = {"a": [torch.empty(3, dtype=torch.int64, device="meta")]}
    load([DefaultLoadPlanner()], [target], saved)
    assert target["a"][0].tolist() == [0, 1, 2]


def test_ranks_with_different_keys_are_described_together():
    saved = save([DefaultSavePlanner() for _ in range(2)], [{"a": {"x": torch.ones(1)}}, {"b": [torch.zeros(1), 5]}])
    assert set(saved.metadata.state_dict_metadata) == {"a.x", "b.0", "b.1"}
    assert saved.metadata.planner_data == {"a.x": ("a", "x"), "b.0": ("b", 0), "b.1": ("b", 1)}
    target = {}
    load([EmptyStateDictLoadPlanner()], [target], saved)
    assert equal(target, {"a": {"x": torch.ones(1)}, "b": [torch.zeros(1), 5]})


# ---- checks


@pytest.mark.parametrize(
    ("other", "text"),
    [
        (torch.zeros(4, dtype=torch.float16), "torch.float32 .4,. on rank 0 and torch.float16 .4,. on rank 1"),
        (torch.zeros(5), r"\(4,\) on rank 0 and torch.float32 \(5,\) on rank 1"),
        (5, "on rank 0 and a value on rank 1"),
        (Sharded((4,), {(2,): torch.zeros(2)}), "overlapping chunks"),
    ],
)
def test_a_key_that_ranks_describe_in_two_ways_is_refused_and_not_taken_from_one_of_them(other, text):
    for caching in (False, True):
        planners = [DefaultSavePlanner(enable_plan_caching=caching) for _ in range(2)]
        with pytest.raises(ValueError, match=f"Failed to validate global plan: key:w .*{text}"):
            save(planners, [{"w": torch.zeros(4)}, {"w": other}])


def test_a_hole_is_refused():
    states = [{"w": Sharded((4,), {(0,): torch.zeros(1)})}, {"w": Sharded((4,), {(2,): torch.zeros(2)})}]
    with pytest.raises(ValueError, match="key:w invalid fill tensor-volume: 4 chunks-volume: 3"):
        save([DefaultSavePlanner() for _ in range(2)], states)


def test_missing_keys_are_told_at_once_and_left_alone_in_a_partial_load():
    saved = save([DefaultSavePlanner()], [{"a": {"x": 1}, "w": torch.ones(2)}])
    target = {"a": {"x": 0, "y": 5}, "w": torch.zeros(2), "v": torch.zeros(1)}
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: a\.y, v\.$"):
        load([DefaultLoadPlanner()], [target], saved)
    load([DefaultLoadPlanner(allow_partial_load=True)], [target], saved)
    assert equal(target, {"a": {"x": 1, "y": 5}, "w": torch.ones(2), "v": torch.zeros(1)})


def test_other_sizes_are_refused():
    saved = save([DefaultSavePlanner()], [{"w": torch.ones(2)}])
    with pytest.raises(ValueError, match=r"^Size mismatch between saved"):
        load([DefaultLoadPlanner()], [{"w": torch.ones(3)}], saved)


def test_a_planner_without_metadata_says_so():
    planner = DefaultLoadPlanner()
    planner.set_up_planner({})
    with pytest.raises(InvalidRequest, match="needs the metadata"):
        planner.create_local_plan()
    with pytest.raises(InvalidRequest, match="needs the metadata"):
        EmptyStateDictLoadPlanner().set_up_planner({})


# ---- plans that are kept


def cached(world=3, kind=DefaultSavePlanner):
    return [kind(enable_plan_caching=True) for _ in range(world)]


def state_of(rank, fill, world=3, dtype=torch.float32):
    whole = torch.full((6, 2), float(fill), dtype=dtype)
    return {
        "s": rows(rank, world, whole),
        "w": torch.full((4,), fill),
        "own": {f"{rank}": torch.full((2,), fill)},
        "v": fill,
    }


def states_of(fill, world=3):
    return [state_of(rank, fill, world) for rank in range(world)]


def check(saved, states):
    """What was saved is what all ranks hold, and is described as such."""
    expected = save([DefaultSavePlanner() for _ in states], states)
    assert saved.metadata.state_dict_metadata == expected.metadata.state_dict_metadata
    assert saved.metadata.planner_data == expected.metadata.planner_data
    assert equal(dict(sorted(saved.data.items(), key=str)), dict(sorted(expected.data.items(), key=str)))


def usable(saved):
    return [plan.usable for plan in saved.sent]


def test_ranks_whose_plan_did_not_change_send_nothing_and_write_the_new_data_to_the_new_place():
    planners = cached()
    check(save(planners, states_of(1), goal="first"), states_of(1))
    for fill in (2, 3):
        saved = save(planners, states_of(fill), goal=f"save {fill}")
        assert saved.sent == [SavePlan([], usable=False)] * 3
        assert saved.metadata.storage_data == f"save {fill}"
        check(saved, states_of(fill))


@pytest.mark.parametrize(
    "change",
    [
        {"own": {"1": torch.full((2,), 2, dtype=torch.int8)}},
        {"own": {"1": torch.full((3,), 2)}},
        {"own": {"new": torch.full((2,), 2)}},
        {"own": {}},
        {"own": [torch.full((2,), 2)]},
        {"more": 5},
    ],
    ids=["dtype", "shape", "name", "less", "container", "more"],
)
def test_a_change_on_one_rank_is_noticed_and_sent_by_that_rank_alone(change):
    planners = cached()
    save(planners, states_of(1))
    states = states_of(2)
    states[1] |= change
    saved = save(planners, states)
    assert usable(saved) == [False, True, False]
    check(saved, states)
    again = save(planners, states)
    assert usable(again) == [False] * 3
    check(again, states)
    check(save(planners, states_of(4)), states_of(4))


def test_a_key_that_stands_elsewhere_in_the_state_is_noticed_though_it_is_spelled_the_same():
    planners = cached(1)
    for state in ({"a": {"b.c": torch.ones(2)}}, {"a.b": {"c": torch.ones(2)}}):
        check(save(planners, [state]), [state])


def test_another_cut_of_one_tensor_and_another_type_on_all_ranks_are_noticed():
    planners = cached(2)
    first = [{"s": Sharded((4,), {(0,): torch.ones(2)})}, {"s": Sharded((4,), {(2,): torch.ones(2)})}]
    second = [{"s": Sharded((4,), {(0,): torch.ones(3)})}, {"s": Sharded((4,), {(3,): torch.ones(1)})}]
    third = [{"s": Sharded((4,), {(0,): torch.ones(3).half()})}, {"s": Sharded((4,), {(3,): torch.ones(1).half()})}]
    for states in (first, second, third, first):
        saved = save(planners, states)
        assert usable(saved) == [True, True]
        check(saved, states)


def test_a_rank_whose_share_changes_because_of_another_gets_its_new_plan():
    planners = cached(2)
    shared = {f"w{i}": torch.ones(100) for i in range(4)}
    check(save(planners, [shared, shared]), [shared, shared])
    heavy = shared | {"own": torch.ones(100_000)}
    saved = save(planners, [shared, heavy])
    assert usable(saved) == [False, True]
    assert [len(plan.items) for plan in saved.final] == [4, 1]
    check(saved, [shared, heavy])


def test_after_a_save_that_failed_the_next_one_works():
    planners = cached()
    for fill in (1, 2):
        wrong = states_of(fill)
        wrong[2]["w"] = torch.zeros(9)
        with pytest.raises(ValueError, match="key:w"):
            save(planners, wrong)
        check(save(planners, states_of(fill)), states_of(fill))
        check(save(planners, states_of(fill + 5)), states_of(fill + 5))


def test_a_rank_that_did_not_come_to_the_end_of_a_save_does_not_refer_to_an_older_one():
    class Stumbles(DefaultSavePlanner):
        stumbles = False

        def finish_plan(self, new_plan):
            if self.stumbles:
                raise OSError("no")
            return super().finish_plan(new_plan)

    planners = cached(2, Stumbles)
    small, large = [{"w": torch.ones(2)}, {"x": torch.ones(2)}], [{"w": torch.ones(2)}, {"x": torch.ones(3)}]
    save(planners, small)
    planners[1].stumbles = True
    with pytest.raises(OSError, match="no"):
        save(planners, large)
    planners[1].stumbles = False
    saved = save(planners, small)
    assert usable(saved) == [False, True]
    check(saved, small)


def test_two_planners_do_not_share_what_they_keep():
    one, other = cached(), cached()
    save(one, states_of(1))
    saved = save(other, states_of(1))
    assert usable(saved) == [True] * 3
    small = [{"w": torch.ones(1)}] * 3
    check(save(other, small), small)
    check(save(one, states_of(2)), states_of(2))


def test_a_coordinator_that_was_not_part_of_the_last_save_says_so():
    planners = cached()
    save(planners, states_of(1))
    for newcomer in (DefaultSavePlanner(enable_plan_caching=True), DefaultSavePlanner()):
        with pytest.raises(InvalidRequest, match=r"ranks \[1, 2\] say .* Give every rank a new planner"):
            save([newcomer, *planners[1:]], states_of(1))
        check(save(planners, states_of(1)), states_of(1))


def test_planners_that_are_used_with_another_number_of_ranks_say_so_once_and_then_plan_anew():
    planners, state = cached(4), {"w": torch.ones(2), "v": 1}
    save(planners[:2], [state] * 2)
    with pytest.raises(InvalidRequest, match="an earlier save"):
        save(planners, [state] * 4)
    check(save(planners, [state] * 4), [state] * 4)
    check(save(planners[:3], states_of(1)), states_of(1))


class Half(DefaultSavePlanner):
    """Saves floats in half precision, while it is told to: the example that people write."""

    half = True

    def create_local_plan(self):
        plan = super().create_local_plan()
        return dataclasses.replace(plan, items=[self._changed(item) for item in plan.items])

    def _changed(self, item):
        data = item.tensor_data
        if not self.half or data is None or not data.properties.dtype.is_floating_point:
            return item
        properties = dataclasses.replace(data.properties, dtype=torch.float16)
        return dataclasses.replace(item, tensor_data=dataclasses.replace(data, properties=properties))

    def transform_object(self, write_item, value):
        value = super().transform_object(write_item, value)
        return value.to(write_item.tensor_data.properties.dtype) if write_item.tensor_data else value


def test_a_planner_that_changes_the_plan_is_cached_by_what_it_made_also_when_it_changes_its_mind():
    planners = cached(2, Half)
    states = [state_of(rank, 1, 2) for rank in range(2)]
    for half, sends in [(True, True), (True, False), (False, True), (False, False), (True, True)]:
        for planner in planners:
            planner.half = half
        saved = save(planners, states)
        assert usable(saved) == [sends, sends]
        described = saved.metadata.state_dict_metadata["s"].properties.dtype
        assert described == (torch.float16 if half else torch.float32)
        assert {saved.data[i].dtype for i in saved.data if i.fqn == "s"} == {described}


# ---- rebuilding a state


def test_a_state_is_rebuilt_from_the_metadata_alone():
    saved = save([DefaultSavePlanner() for _ in range(2)], [nested(2)] * 2)
    target = {}
    load([EmptyStateDictLoadPlanner()], [target], saved)
    assert equal(target["model"], nested(2)["model"])
    assert target["tuple"][0].tolist() == [2.0, 2.0]
    assert target["optim"]["state"]["0"]["step"] == 2
    assert target["list"][2] == {"deep": {"value": (2, "x")}}
    assert target["values"] == nested(2)["values"]


@pytest.mark.parametrize(
    ("keys", "expected"),
    [
        (["optim"], {"optim": {"lr": 1, "m": [torch.ones(1)]}}),
        ("optim", {"optim": {"lr": 1, "m": [torch.ones(1)]}}),
        ({"model.layer"}, {"model": {"layer": {"w": torch.ones(2)}}}),
        (["model.layer.w", "optim.lr"], {"model": {"layer": {"w": torch.ones(2)}}, "optim": {"lr": 1}}),
        ([], {}),
    ],
)
def test_some_keys_or_all_below_a_name_are_rebuilt(keys, expected):
    state = {
        "model": {"layer": {"w": torch.ones(2)}, "layers": torch.ones(1)},
        "optim": {"lr": 1, "m": [torch.ones(1)]},
        "optimum": 5,
    }
    saved = save([DefaultSavePlanner()], [state])
    target = {}
    load([EmptyStateDictLoadPlanner(keys)], [target], saved)
    assert equal(target, expected)


def test_keys_that_select_nothing_are_told_unless_a_partial_load_is_wanted():
    saved = save([DefaultSavePlanner()], [{"a": 1}])
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: b, c\.$"):
        load([EmptyStateDictLoadPlanner(["a", "b", "c"])], [{}], saved)
    target = {}
    load([EmptyStateDictLoadPlanner(["a", "b"], allow_partial_load=True)], [target], saved)
    assert target == {"a": 1}
    with pytest.raises(InvalidRequest, match="fills an empty dict"):
        load([EmptyStateDictLoadPlanner()], [{"a": 1}], saved)


def test_a_tensor_too_large_to_be_had_is_refused():
    metadata = create_default_local_metadata({"w": torch.empty(2**50, device="meta")})
    with pytest.raises(UnsafeCheckpoint, match="cannot be had"):
        EmptyStateDictLoadPlanner().set_up_planner({}, metadata)


# ---- keys and values of other layouts


def as_torch_saved(state, flatten):
    """A checkpoint of a state as another version of torch lays it out, values as files of torch.save."""
    flat, paths = flatten(state)
    data = {}
    for key, value in flat.items():
        if isinstance(value, torch.Tensor):
            data[MetadataIndex(key, [0] * value.dim())] = value.clone()
        else:
            stream = io.BytesIO()
            torch.save(value, stream)
            data[MetadataIndex(key)] = stream.getvalue()
    metadata = create_default_local_metadata(flat)
    metadata.planner_data = paths
    return Saved(data, metadata, [], [])


def flat_of_2_3(state):
    flat, paths = {}, {}

    def visit(path, value):
        key = ".".join(map(str, path))
        flat[key], paths[key] = value, path

    torch_traverse.traverse_state_dict_v_2_3(state, visit)
    return flat, paths


@pytest.mark.parametrize("flatten", [torch_nested.flatten_state_dict, flat_of_2_3], ids=["2.4", "2.3"])
def test_checkpoints_in_torchs_layouts_are_found_with_closed_tuples_and_mappings(flatten):
    def state(fill):
        return {
            "model": {"w": torch.full((2,), fill)},
            "groups": {"lr": fill, "betas": (fill, 0.5)},
            "moments": (torch.full((2,), fill), torch.full((3,), fill)),
            "deep": {"only": {"values": [fill]}},
        }

    saved = as_torch_saved(state(2.0), flatten)
    for partial in (False, True):
        target = state(0.0)
        load([DefaultLoadPlanner(allow_partial_load=partial)], [target], saved)
        assert equal(target, state(2.0))
    target = state(0.0) | {"more": 1}
    load([DefaultLoadPlanner(allow_partial_load=True)], [target], saved)
    assert equal(target, state(2.0) | {"more": 1})
    with pytest.raises(RuntimeError, match=r"^Missing key in checkpoint state_dict: more\.$"):
        load([DefaultLoadPlanner()], [target], saved)
    target = {}
    load([EmptyStateDictLoadPlanner()], [target], saved)
    assert equal(target, state(2.0))


def test_a_planner_that_renames_keeps_its_own_names():
    class Renames(DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata=None, is_coordinator=False):
            super().set_up_planner(state_dict, metadata, is_coordinator)
            self.state_dict = {f"old.{key}": value for key, value in self.state_dict.items()}
            self.mappings = {f"old.{key}": path for key, path in self.mappings.items()}

    saved = save([DefaultSavePlanner()], [{"old": {"a": {"w": torch.ones(2)}, "v": 5}}])
    target = {"a": {"w": torch.zeros(2)}, "v": 0}
    load([Renames()], [target], saved)
    assert equal(target, {"a": {"w": torch.ones(2)}, "v": 5})
    saved = save([DefaultSavePlanner()], [{"old": {"v": 6}, "t": 7}])
    target = {"v": 0, "t": (torch.zeros(1),)}
    load([Renames(allow_partial_load=True)], [target], saved)
    assert equal(target, {"v": 6, "t": (torch.zeros(1),)})


# ---- values


def test_values_are_json_and_never_pickles():
    saved = save([DefaultSavePlanner(types=[Colour])], [{"v": {"a": (1, None)}, "c": Colour.RED, "list": [1.5]}])
    assert all(data[:1] in b'{["-0123456789ntf' for data in saved.data.values())
    target = {"v": {"a": 0}, "c": None, "list": None}
    load([DefaultLoadPlanner(types=[Colour])], [target], saved)
    assert target == {"v": {"a": (1, None)}, "c": Colour.RED, "list": [1.5]}
    with pytest.raises(UnsupportedFormat, match=r"types=.Colour"):
        load([DefaultLoadPlanner()], [dict(target)], saved)
    with pytest.raises(InvalidState, match="'c'"):
        save([DefaultSavePlanner()], [{"c": Colour.RED}])


class Hostile:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return os.mkdir, (self.path,)


@pytest.mark.parametrize("how", ["zip", "legacy", "pickle", "milepost"])
def test_a_hostile_blob_is_refused_and_runs_nothing_unless_pickles_are_allowed(tmp_path, how):
    folder = tmp_path / "made by the blob"
    stream = io.BytesIO()
    if how == "pickle":
        pickle.dump(Hostile(str(folder)), stream, 2)
    elif how == "milepost":
        stream.write(pack_value(Hostile(str(folder)), Codec(allow_pickle=True), "v").getvalue())
    else:
        torch.save(Hostile(str(folder)), stream, _use_new_zipfile_serialization=how == "zip")
    saved = Saved({MetadataIndex("v"): stream.getvalue()}, Metadata({"v": BytesStorageMetadata()}), [], [])
    refusal = UnsupportedFormat if how == "milepost" else UnsafeCheckpoint
    for planner, target in [(DefaultLoadPlanner(), {"v": 0}), (EmptyStateDictLoadPlanner(), {})]:
        with pytest.raises(refusal, match="allow_pickle=True"):
            load([planner], [target], saved)
    assert not folder.exists()
    if how != "pickle":
        load([DefaultLoadPlanner(allow_pickle=True)], [{"v": 0}], saved)
        assert folder.exists()


@pytest.mark.parametrize(
    "data", [b"", b"{", b"\xff", b"PK\x03\x04 no zip", b"\x80", b'{"tuple": 5}', b"[1]", b"[" * 9999]
)
def test_bytes_that_are_no_value_are_told_with_their_key(data):
    saved = Saved({MetadataIndex("v"): data}, Metadata({"v": BytesStorageMetadata()}), [], [])
    with pytest.raises((InvalidState, UnsafeCheckpoint), match="'v'"):
        load([DefaultLoadPlanner()], [{"v": 0}], saved)


def test_bytes_that_a_program_made_itself_pass_through():
    saved = save([DefaultSavePlanner()], [{"raw": io.BytesIO(b"\xff[any")}])
    assert saved.data == {MetadataIndex("raw"): b"\xff[any"}
    target = {"raw": io.BytesIO()}
    load([DefaultLoadPlanner()], [target], saved)
    assert target["raw"].getvalue() == b"\xff[any"


# ---- real ranks


def _work(rank):
    import torch.distributed as dist
    from torch.distributed._shard.sharded_tensor import Shard as LocalShard
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
    from torch.distributed.tensor.placement_types import _StridedShard

    mesh = init_device_mesh("cpu", (2,))
    alone = [dist.new_group([0]), dist.new_group([1])][rank]
    whole = torch.arange(24.0).reshape(6, 4)

    def state(fill):
        data = whole * fill
        local = torch.cat([data[:3].chunk(2)[rank], data[3:].chunk(2)[rank]])
        like = {"shape": data.shape, "stride": data.stride()}
        strided = DTensor.from_local(local, mesh, [_StridedShard(0, split_factor=2)], run_check=False, **like)
        shard = LocalShard.from_tensor_and_offsets(data[3 * rank : 3 * rank + 3].clone(), [3 * rank, 0], rank)
        return {
            "rows": distribute_tensor(data, mesh, [Shard(0)]),
            "copied": {"w": distribute_tensor(data, mesh, [Replicate()])},
            "empty": distribute_tensor(data[:0], mesh, [Shard(0)]),
            "one": distribute_tensor(data[:1], mesh, [Shard(0)]),
            "strided": strided,
            "shards": init_from_local_shards([shard], 6, 4),
            "wrapped": wrapped(data),
        }

    def wrapped(data):
        """What FSDP1 over tensor parallelism makes: a shard of rows that is itself one shard of columns."""
        local = data[3 * rank : 3 * rank + 3].clone()
        inner = init_from_local_shards(
            [LocalShard.from_tensor_and_offsets(local, [0, 0], rank)], 3, 4, process_group=alone
        )
        outer = init_from_local_shards([LocalShard.from_tensor_and_offsets(local, [3 * rank, 0], rank)], 6, 4)
        outer._local_shards[0] = LocalShard(inner, outer._local_shards[0].metadata)
        return outer

    def exchanged(value):
        every = [None, None]
        dist.all_gather_object(every, value)
        return every

    planner = DefaultSavePlanner(enable_plan_caching=True)
    for fill in (1.0, 2.0):
        planner.set_up_planner(state(fill), None, rank == 0)
        sent = exchanged(planner.create_local_plan())
        made = exchanged(planner.create_global_plan(sent) if rank == 0 else None)[0]
        plan = planner.finish_plan(made[0][rank])
        data = {item.index: planner.resolve_data(item).detach().clone() for item in plan.items}
        merged = {}
        for part in exchanged(data):
            assert not merged.keys() & part.keys()
            merged |= part
    assert not any(plan.usable for plan in sent)
    saved = Saved(merged, made[1], [], [])
    target, flat = state(0.0), {}
    load([DefaultLoadPlanner()], [target], saved)
    load([EmptyStateDictLoadPlanner()], [flat], saved)
    assert flatten_sharded_tensors(target).keys() == target.keys()
    expected = state(2.0)
    assert all(
        torch.equal(target[key].to_local(), expected[key].to_local()) for key in ("rows", "empty", "one", "strided")
    )
    assert torch.equal(target["shards"].local_shards()[0].tensor, expected["shards"].local_shards()[0].tensor)
    inner = target["wrapped"].local_shards()[0].tensor.local_shards()[0].tensor
    assert torch.equal(inner, 2 * whole[3 * rank : 3 * rank + 3])
    return {key: value.tolist() for key, value in (flat | {"copied": flat["copied"]["w"]}).items()}


def test_tensors_of_two_ranks_are_saved_and_loaded_and_seen_whole_by_one():
    whole = torch.arange(24.0).reshape(6, 4) * 2
    expected = {"one": whole[:1].tolist(), "empty": []}
    for found in spawn(2, _work):
        assert found == {key: expected.get(key, whole.tolist()) for key in found}
        assert set(found) == {"rows", "copied", "empty", "one", "strided", "shards", "wrapped"}
