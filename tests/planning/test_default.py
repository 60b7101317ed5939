"""The default planners, played through the whole protocol on simulated ranks, with a dict as storage."""

import pytest
import torch

from milepost.errors import InvalidRequest, InvalidState
from milepost.planning.default import (
    DefaultLoadPlanner,
    DefaultSavePlanner,
    EmptyStateDictLoadPlanner,
    flatten_sharded_tensors,
)
from milepost.state.tensors import Sharded
from tests.planning.play import Saved, equal, load, nested, rows, save
from tests.ranks import spawn


def whole_of(states, key):
    return torch.cat([state[key].parts[0].data for state in states])


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


def test_unflattened_states_refuse_nested_tensors():
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
def test_key_described_in_two_ways_is_refused(other, text):
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


@pytest.mark.slow
def test_tensors_of_two_ranks_are_saved_and_loaded_and_seen_whole_by_one():
    whole = torch.arange(24.0).reshape(6, 4) * 2
    expected = {"one": whole[:1].tolist(), "empty": []}
    for found in spawn(2, _work):
        assert found == {key: expected.get(key, whole.tolist()) for key in found}
        assert set(found) == {"rows", "copied", "empty", "one", "strided", "shards", "wrapped"}
