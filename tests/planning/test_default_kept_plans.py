"""Default planners that keep their plans: every change is noticed, and only what changed is sent."""

import dataclasses

import pytest
import torch

from milepost.errors import InvalidRequest
from milepost.planning.default import (
    DefaultSavePlanner,
)
from milepost.planning.records import SavePlan
from milepost.state.tensors import Sharded
from tests.planning.play import equal, rows, save


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


def test_unchanged_plan_sends_nothing_and_writes_new_data():
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


def test_moved_key_of_the_same_name_is_noticed():
    planners = cached(1)
    for state in ({"a": {"b.c": torch.ones(2)}}, {"a.b": {"c": torch.ones(2)}}):
        check(save(planners, [state]), [state])


def test_changed_cut_and_changed_type_are_noticed():
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


def test_interrupted_rank_does_not_refer_to_an_older_save():
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


def test_changed_rank_count_is_reported_once_then_planned_anew():
    planners, state = cached(4), {"w": torch.ones(2), "v": 1}
    save(planners[:2], [state] * 2)
    with pytest.raises(InvalidRequest, match="an earlier save"):
        save(planners, [state] * 4)
    check(save(planners, [state] * 4), [state] * 4)
    check(save(planners[:3], states_of(1)), states_of(1))


class Half(DefaultSavePlanner):
    """Saves floats in half precision while `half` is set: the planner that people write."""

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


def test_planner_that_edits_its_plan_is_cached_by_the_result():
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
