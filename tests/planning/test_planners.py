"""Planners through `save` and `load`: the order of calls, the five patterns, kept plans and lazy data."""

import sys
import weakref
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard, distribute_tensor

import milepost
import milepost.dcp
from milepost.planning import CheckpointReader, CheckpointWriter, DefaultLoadPlanner, DefaultSavePlanner
from milepost.store import MemoryStore
from milepost.testing import TroubledComm, run_ranks
from tests.planning.states import WHOLE, Central, assert_full, blank, state_of
from tests.ranks import spawn

sys.path.insert(0, str(Path(__file__).parents[2] / "examples"))


# ---- one format for all planners


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Central, type("Local", (DefaultSavePlanner,), {}), None])
@pytest.mark.parametrize("world", [1, 3])
def test_planned_checkpoint_loads_with_and_without_a_planner(planner, world):
    store = MemoryStore()
    receipts = run_ranks(
        world,
        lambda comm: milepost.save(
            state_of(comm.rank, world), store, planner=planner and planner(), process_group=comm
        ),
    )
    checkpoint = milepost.open(store)
    assert {(r.generation, r.save_id, r.world, r.data_bytes) for r in receipts} == {
        (1, checkpoint.manifest.save_id, world, WHOLE.nbytes + WHOLE[0].nbytes + 3 * 8 + 2 * 2)
    }
    assert checkpoint.verify().ok
    assert torch.equal(checkpoint["cut"].read(), WHOLE)
    assert checkpoint.state()["pair"] == (1, 2)
    written = sum(file.size_bytes - file.header_bytes for file in checkpoint.manifest.files)
    assert written < WHOLE.nbytes + WHOLE[0].nbytes + 100  # nothing twice
    for ranks in (1, 2):
        for planned in (False, True):

            def load(comm, ranks=ranks, planned=planned):
                state = blank(comm.rank, ranks)
                milepost.load(state, store, process_group=comm, planner=DefaultLoadPlanner() if planned else None)
                assert_full(state, comm.rank, ranks)

            run_ranks(ranks, load)


def test_plans_are_gathered_only_where_someone_wants_to_see_them():
    def steps_of(planner):
        seen = []

        def run(comm):
            class Watched(TroubledComm):
                def meet(self, phase, payload, decide):
                    seen.append((phase.step, len(payload)))
                    return super().meet(phase, payload, decide)

            state = {f"t{i}": torch.ones(4) for i in range(200)}
            milepost.save(state, store, planner=planner(), process_group=Watched(comm, {}))
            milepost.load(dict(state), store, planner=DefaultLoadPlanner(), process_group=Watched(comm, {}))

        store = MemoryStore()
        run_ranks(2, run)
        return seen

    local = steps_of(type("Local", (DefaultSavePlanner,), {}))
    assert "planning" not in {step for step, _ in local}
    central = steps_of(Central)
    assert max(size for step, size in central if step == "planning") > 10_000


def _examples(rank, folder):
    import planners

    return planners.run(folder)


def test_the_five_patterns_of_the_documentation_run_on_three_ranks(tmp_path):
    results = spawn(3, _examples, str(tmp_path))
    for found in results:
        assert found["keys"] == ["ema_weight", "ema_bias", "ema_step"]
        assert found["renamed"] == {"weight": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "bias": [1.0, 1.0], "step": 3}
        assert found["half"] == "float16"
        assert found["writers"] == 2  # two tensors; the third rank's turn is the value, which needs no file
        assert found["notes"] == [{"rank": r, "seen": 100 * r} for r in range(3)]
        assert found["made"] == ["weight"]
        assert found["model"] == [[0.0, 1.0, 2.0], [3.0, 4.0, 5.0]]


def _dtensors(rank, folder, world, dims):
    mesh = init_device_mesh("cpu", (world,))
    save_dim, load_dim = dims
    whole = torch.arange(7 * 5, dtype=torch.float32).view(7, 5)
    state = {"w": distribute_tensor(whole, mesh, [Shard(save_dim)]), "b": torch.ones(3), "step": 4}
    for name, planner in (("central", Central()), ("half", __import__("planners").Half())):
        milepost.save(state, f"{folder}/{name}", planner=planner)
    target = {"w": distribute_tensor(torch.zeros(7, 5), mesh, [Shard(load_dim)]), "b": torch.zeros(3), "step": 0}
    milepost.load(target, f"{folder}/central", planner=DefaultLoadPlanner())
    assert torch.equal(target["w"].full_tensor(), whole)
    milepost.load(target, f"{folder}/half", planner=DefaultLoadPlanner())  # float16 into float32
    assert torch.equal(target["w"].full_tensor(), whole)
    assert target["step"] == 4
    assert isinstance(target["w"], DTensor)


@pytest.mark.slow
@pytest.mark.parametrize("dims", [(0, 1), (1, 0)])
def test_dtensors_by_plans_onto_another_dimension(tmp_path, dims):
    spawn(3, _dtensors, str(tmp_path), 3, dims)
    with milepost.open(tmp_path / "half") as checkpoint:
        assert checkpoint.tensors["w"].dtype == torch.float16
        assert type(checkpoint.tensors["w"].layout).__name__ == "Grid"  # described by its layout, not by its boxes


@pytest.mark.parametrize("module", ["milepost", "milepost.dcp"])
def test_data_that_a_planner_sends_with_its_local_plan_is_not_lost(module):
    class Notes(DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return plan if self.note is None else replace(plan, planner_data={f"note {self.note}": 5})

    store = MemoryStore()

    def save(comm):
        planner = Notes()
        planner.note = comm.rank if comm.rank < 2 else None  # the third has none
        state = {"a": torch.ones(3), "n": {"b": 4}}
        if module == "milepost":
            milepost.save(state, store, planner=planner, process_group=comm)
        else:
            milepost.dcp.save(state, storage_writer=CheckpointWriter(store), planner=planner, process_group=comm)

    run_ranks(3, save)
    found = CheckpointReader(store).read_metadata().planner_data
    assert (found["note 0"], found["note 1"]) == (5, 5)
    assert torch.equal(milepost.open(store)["a"].read(), torch.ones(3))


# ---- plan caching


def test_unchanged_plans_are_not_sent_and_changes_are_noticed():
    store = MemoryStore()
    planners = [Central(enable_plan_caching=True) for _ in range(3)]

    def save(change):
        def run(comm):
            state = {"a": torch.full((4,), 1.0 + change), f"own{comm.rank}": torch.ones(2)}
            if change == 2 and comm.rank == 1:
                state["own1"] = torch.ones(2, dtype=torch.bfloat16)
            milepost.save(state, store, planner=planners[comm.rank], process_group=comm)

        run_ranks(3, run)
        return planners[0].seen

    assert save(0) == [True, True, True]
    assert save(1) == [False, False, False]
    assert torch.equal(milepost.open(store)["a"].read(), torch.full((4,), 2.0))
    assert save(2) == [False, True, False]
    assert milepost.open(store).tensors["own1"].dtype == torch.bfloat16
    assert save(2) == [False, False, False]
    assert milepost.open(store).verify().ok


@pytest.mark.parametrize("failing", [0, 1])
def test_plans_that_are_kept_survive_a_rank_that_failed_after_planning(failing):
    class Fails(Central):
        fail = False

        def finish_plan(self, new_plan):
            if self.fail:
                raise ZeroDivisionError("a bug of the planner")
            return super().finish_plan(new_plan)

    store, planners = MemoryStore(), [Fails(enable_plan_caching=True) for _ in range(2)]

    def save(number, fail=False):
        def run(comm):
            planners[comm.rank].fail = fail and comm.rank == failing
            state = {"a": torch.full((3,), float(number)), f"own{comm.rank}": torch.ones(2)}
            milepost.save(state, store, planner=planners[comm.rank], process_group=comm)

        run_ranks(2, run)

    save(1)
    with pytest.raises(milepost.CheckpointError, match="a bug of the planner"):
        save(2, fail=True)
    for number in (3, 4):
        save(number)
        assert milepost.open(store)["a"].read().tolist() == [number] * 3
    assert planners[0].seen == [False, False]


# ---- lazy data


@pytest.mark.parametrize("base", [DefaultSavePlanner, Central])
def test_data_is_made_when_it_is_written_and_let_go_then(tmp_path, base):
    alive, most = weakref.WeakSet(), []

    class Copies(base):
        def transform_object(self, write_item, object):  # noqa: A002
            made = super().transform_object(write_item, object)
            if isinstance(made, torch.Tensor):
                made = made.clone()
                alive.add(made)
                most.append(len(alive))
            return made

    state = {f"t{i}": torch.full((300_000,), float(i)) for i in range(60)}
    milepost.save(state, tmp_path, planner=Copies(), transfer=milepost.Transfer(2, 1 << 20))
    assert len(most) == 60  # each once: a tensor that lies in several blocks is not made for each of them
    assert max(most) <= 8
    with milepost.open(tmp_path) as checkpoint:
        assert all(torch.equal(checkpoint[key].read(), value) for key, value in state.items())
