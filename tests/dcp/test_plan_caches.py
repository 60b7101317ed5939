"""Plans that planners keep, under DCP's names: found by programs, and never those of another planner or job."""

import copy
import gc
import pickle

import pytest
import torch
import torch.distributed as dist

import milepost
import milepost.dcp as dcp
from milepost.dcp.default_planner import DefaultSavePlanner
from milepost.dcp.planner import SavePlan, SavePlanner
from tests.ranks import spawn

CACHES = (
    "_cached_save_plan",
    "_cached_final_save_plan",
    "_cached_all_plans",
    "_cached_global_plan",
    "_cached_metadata",
)


class Counting(DefaultSavePlanner):
    """Needs the plans of all ranks, and counts how often it sent its own plan."""

    def __init__(self):
        super().__init__(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
        self.sent = 0

    def finish_plan(self, new_plan):
        self.sent += self._sent_whole
        return super().finish_plan(new_plan)


def shown(planner):
    return {name: planner._cached_plans_key in getattr(SavePlanner, name) for name in CACHES}


def found_at(path):
    checkpoint = milepost.open(path)
    return {key: checkpoint[key][...].tolist() for key in checkpoint}


def jobs(rank, folder):
    """One planner serves two groups of ranks by turns, and a second one another state of the same job."""
    groups = {name: dist.new_group(ranks) for name, ranks in {"low": [0, 1], "high": [1, 2]}.items()}
    own = [name for name, ranks in {"low": [0, 1], "high": [1, 2]}.items() if rank in ranks]
    shared, second = Counting(), Counting()
    for step in range(3):
        for name in own:
            # What rank 1 plans for the one group it plans next for the other, which has not heard of it.
            length = step + (2 if name == "high" else 1) if rank == 1 else 3
            state = {"w": torch.full((4,), step), f"of{rank}": torch.full((length,), 10 * step + rank)}
            dcp.save(state, checkpoint_id=folder / f"{name}{step}", planner=shared, process_group=groups[name])
        state = {"v": torch.full((2,), step), f"of{rank}": torch.full((1,), step)}
        dcp.save(state, checkpoint_id=folder / f"all{step}", planner=second)
    dist.barrier()
    return shared.sent, second.sent, shown(second)


@pytest.mark.slow
def test_one_planner_for_two_groups_and_another_for_the_job(tmp_path):
    results = spawn(3, jobs, tmp_path)
    for step in range(3):
        for name, other, length in (("low", 0, step + 1), ("high", 2, step + 2)):
            expected = {"of1": [10 * step + 1] * length, f"of{other}": [10 * step + other] * 3}
            assert found_at(tmp_path / f"{name}{step}") == {"w": [step] * 4} | expected
        expected = {f"of{rank}": [step] for rank in range(3)}
        assert found_at(tmp_path / f"all{step}") == {"v": [step] * 2} | expected
    # The plans of a planner with one group are sent once. Rank 1 changes groups each time, and sends each time.
    assert [second for _, second, _ in results] == [1, 1, 1]
    assert results[1][0] == 6
    assert all(found["_cached_save_plan"] and found["_cached_final_save_plan"] for _, _, found in results)
    assert [found["_cached_all_plans"] for _, _, found in results] == [True, False, False]


def test_caches_of_two_planners_are_apart_and_go_with_them(tmp_path):
    one, other = Counting(), Counting()
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "1", planner=one)
    assert all(shown(one).values())
    assert not any(shown(other).values())
    dcp.save({"x": torch.ones(3)}, checkpoint_id=tmp_path / "2", planner=other)
    dcp.save({"w": torch.zeros(2)}, checkpoint_id=tmp_path / "3", planner=one)
    assert (found_at(tmp_path / "2"), found_at(tmp_path / "3")) == ({"x": [1.0] * 3}, {"w": [0.0] * 2})
    assert (one.sent, other.sent) == (1, 1)
    key, others_key = one._cached_plans_key, other._cached_plans_key
    assert [item.index.fqn for item in SavePlanner._cached_final_save_plan[key].items] == ["w"]
    del one
    gc.collect()
    assert key not in SavePlanner._cached_save_plan
    assert others_key in SavePlanner._cached_save_plan


def test_a_plan_that_a_program_drops_is_planned_anew(tmp_path):
    planner = Counting()
    for name in CACHES:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
        getattr(SavePlanner, name).pop(planner._cached_plans_key)
        assert not shown(planner)[name]
        dcp.save({"w": torch.full((2,), 2.0)}, checkpoint_id=tmp_path, planner=planner)
        assert found_at(tmp_path) == {"w": [2.0, 2.0]}
        assert all(shown(planner).values())


def test_caches_hold_what_planners_of_others_put_there():
    SavePlanner._cached_save_plan["Mine"] = SavePlan([])
    try:
        assert SavePlanner._cached_save_plan["Mine"] == SavePlan([])
        assert "Mine" in list(SavePlanner._cached_save_plan)
    finally:
        assert SavePlanner._cached_save_plan.pop("Mine", None) == SavePlan([])
    assert "Mine" not in SavePlanner._cached_save_plan


def test_a_copied_planner_is_another_and_a_key_can_be_shared():
    planner = Counting()
    for copied in (copy.deepcopy(planner), pickle.loads(pickle.dumps(planner))):
        assert copied._cached_plans_key != planner._cached_plans_key
    partner = Counting()
    partner._cached_plans_key = planner._cached_plans_key
    planner.set_up_planner({"w": torch.ones(2)}, None, True)
    planner.finish_plan(planner.create_local_plan())
    partner.set_up_planner({"w": torch.ones(2)}, None, True)
    assert not partner.create_local_plan().usable


def test_a_failed_check_leaves_nothing_behind(tmp_path, monkeypatch):
    planner = Counting()
    monkeypatch.setattr("milepost.dcp.default_planner._validate_global_plan", lambda plans, metadata: ["no"])
    with pytest.raises(dcp.CheckpointException, match="Failed to validate global plan: no"):
        dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
    assert not any(shown(planner).values())
    monkeypatch.undo()
    dcp.save({"w": torch.ones(2)}, checkpoint_id=tmp_path, planner=planner)
    assert found_at(tmp_path) == {"w": [1.0, 1.0]}
