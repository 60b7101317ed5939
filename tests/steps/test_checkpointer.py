"""A Checkpointer saves and restores steps; damaged ones are skipped."""

import logging

import numpy as np
import pytest
import torch

import milepost
from milepost import CheckpointDamaged, Checkpointer, CheckpointNotFound, InvalidRequest, StateMismatch
from milepost.core.manifest import manifest_name
from milepost.steps.names import MAX_STEP
from milepost.steps.shelf import step_name
from milepost.store import LocalStore, MemoryStore
from milepost.testing import run_ranks
from tests.steps.numbered import files_of, flip, holds, state


def places(tmp_path, kind):
    return LocalStore(tmp_path / "run") if kind == "local" else MemoryStore("memory://run")


# ---- saving and restoring


@pytest.mark.parametrize("kind", ["local", "memory"])
def test_what_was_saved_last_is_restored_and_its_step_given(tmp_path, kind):
    keeper = Checkpointer(places(tmp_path, kind))
    for step in (2, 10, 9):
        receipt = keeper.save(state(step), step, metrics={"loss": torch.tensor(0.5)}, metadata={"note": "x"})
    assert receipt.url.endswith("run/step-0000000009")
    found = state(0)
    assert keeper.restore(found) == 10
    assert holds(found, 10)
    assert keeper.restore(found, step=np.int64(2)) == 2
    assert holds(found, 2)
    assert (keeper.steps(), keeper.latest()) == ([2, 9, 10], 10)
    with keeper.open() as newest, keeper.open(9) as older:
        assert newest.metadata == {"note": "x", "metrics": {"loss": 0.5}}
        assert older["n"] == 9


def test_where_nothing_was_saved_the_default_is_given_or_an_error_says_so(tmp_path):
    keeper = Checkpointer(tmp_path / "none")
    assert keeper.restore(state(0), default=0) == 0
    assert (keeper.steps(), keeper.latest()) == ([], None)
    with pytest.raises(CheckpointNotFound, match=r"nothing was saved at .*none yet"):
        keeper.restore(state(0))
    with pytest.raises(CheckpointNotFound, match="nothing was saved"):
        keeper.open()
    keeper.save(state(4), 4)
    with pytest.raises(CheckpointNotFound, match=r"no step 7 at .* there are: 4"):
        keeper.restore(state(0), step=7, default=0)


def test_a_step_that_exists_is_replaced_unless_that_is_refused(tmp_path):
    keeper = Checkpointer(tmp_path)
    keeper.save(state(1), 1)
    assert keeper.save(state(2), 1).generation == 2
    with pytest.raises(InvalidRequest, match="overwrite=True"):
        keeper.save(state(3), 1, overwrite=False)
    found = state(0)
    assert keeper.restore(found) == 1
    assert holds(found, 2)


def test_from_the_second_save_on_there_is_no_planning(tmp_path):
    planned = []

    def work(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        for step in (1, 2, 3):
            keeper.save(state(step), step)

    run_ranks(2, work, trouble={1: {"describing the state": lambda: planned.append(1)}})
    assert planned == [1]


def test_options_go_to_every_call_that_has_them(tmp_path):
    seen = []
    keeper = Checkpointer(tmp_path, progress=lambda p: seen.append(p.action), convert_dtype=True, on_difference="warn")
    keeper.save({"w": torch.ones(3)}, 1)
    assert keeper.restore({"w": torch.ones(3, dtype=torch.float64)}) == 1
    assert set(seen) == {"save", "load"}
    with pytest.raises(StateMismatch):
        keeper.restore({"w": torch.ones(3, dtype=torch.float64)}, convert_dtype=False)


@pytest.mark.parametrize(
    ("options", "text"),
    [
        ({"keep_last": 0}, "keep_last is a whole number from 1"),
        ({"keep_last": True}, "keep_last"),
        ({"keep_every": -5}, "keep_every"),
        ({"keep_best": 1.5, "best": "loss"}, "keep_best"),
        ({"keep_best": 2}, "keep_best needs the name of a metric"),
        ({"best": "loss", "mode": "largest"}, 'mode is "min" or "max"'),
        ({"colour": 1}, "colour: no option of every save or load"),
        ({"plans": None}, "plans"),
        ({"planner": None}, "pass save_planner or load_planner"),
    ],
)
def test_wrong_rules_and_options_are_refused(tmp_path, options, text):
    with pytest.raises(InvalidRequest, match=text):
        Checkpointer(tmp_path, **options)


def test_wrong_calls_are_refused_and_leave_nothing(tmp_path):
    keeper = Checkpointer(tmp_path)
    for step in (-1, MAX_STEP + 1, 1.0, "1", True, None):
        with pytest.raises(InvalidRequest, match="a step is a whole number from 0"):
            keeper.save(state(1), step)
    for metrics in ({"loss": "low"}, {"loss": torch.ones(2)}, {3: 1.0}):
        with pytest.raises(InvalidRequest, match="metric"):
            keeper.save(state(1), 1, metrics=metrics)
    with pytest.raises(InvalidRequest, match="pass `metrics=`"):
        keeper.save(state(1), 1, metadata={"metrics": {}})
    with pytest.raises(InvalidRequest, match="allow_missing: a save has no such option"):
        keeper.save(state(1), 1, allow_missing=True)
    with pytest.raises(InvalidRequest, match="a step is a whole number"):
        keeper.restore(state(0), step=-3)
    with pytest.raises(InvalidRequest, match="which metric"):
        keeper.best()
    with pytest.raises(InvalidRequest, match="put it into a dict"):
        keeper.restore((torch.ones(1), 0))
    assert list(tmp_path.iterdir()) == []


def test_a_closed_one_refuses_calls(tmp_path):
    with Checkpointer(tmp_path) as keeper:
        keeper.save(state(1), 1)
        keeper.wait()
    keeper.close()
    for call in (keeper.steps, keeper.latest, keeper.wait, lambda: keeper.save(state(2), 2)):
        with pytest.raises(InvalidRequest, match="is closed"):
            call()


def test_foreign_folders_are_ignored_and_never_touched(tmp_path):
    names = ["notes", "step-abc", "step-5", "step-00000000001", "step-0000000001.bak", "tensorboard"]
    for name in names:
        (tmp_path / name).mkdir()
        (tmp_path / name / "manifest-00000001.json").write_text("mine")
    (tmp_path / "step-0000000007").write_text("a file")
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "step-0000000008").symlink_to(tmp_path / "elsewhere")
    keeper = Checkpointer(tmp_path, keep_last=1)
    for step in (1, 2, 3):
        keeper.save(state(step), step)
    assert keeper.steps() == [3]
    assert sorted(p.name for p in tmp_path.iterdir()) == sorted(
        [*names, "step-0000000007", "step-0000000008", "elsewhere", "step-0000000003"]
    )
    for name in names:
        assert (tmp_path / name / "manifest-00000001.json").read_text() == "mine"


# ---- damage


def test_damaged_steps_are_skipped_with_a_warning_that_says_why(tmp_path, caplog):
    keeper = Checkpointer(tmp_path)
    for step in (1, 2, 3, 4, 5):
        keeper.save(state(step), step)
    flip(files_of(tmp_path, 2)[0])
    files_of(tmp_path, 3)[0].unlink()
    manifest = tmp_path / step_name(4) / manifest_name(1)
    manifest.write_bytes(manifest.read_bytes()[:-9])
    (tmp_path / step_name(5) / manifest_name(1)).unlink()
    found = state(0)
    with caplog.at_level(logging.WARNING, "milepost"):
        assert keeper.restore(found) == 1
    assert holds(found, 1)
    texts = [record.getMessage() for record in caplog.records]
    assert [step_name(s) in t for s, t in zip((4, 3, 2), texts, strict=True)] == [True] * 3
    assert "is damaged" in texts[0]
    assert "is missing" in texts[1]
    assert "not what was saved" in texts[2]
    with pytest.raises(CheckpointDamaged, match="not what was saved"):
        keeper.restore(found, step=2)


def test_where_no_step_is_whole_all_reasons_are_raised(tmp_path):
    keeper = Checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state(step), step)
        flip(files_of(tmp_path, step)[0])
    with pytest.raises(CheckpointDamaged, match=r"(?s)no step at .* is whole.*step 2: .*step 1: "):
        keeper.restore(state(0), default=0)


def test_a_state_that_does_not_fit_is_an_error_and_not_a_reason_to_go_back(tmp_path):
    keeper = Checkpointer(tmp_path)
    keeper.save({"a": torch.zeros(3)}, 1)
    keeper.save({"b": torch.zeros(3)}, 2)
    with pytest.raises(StateMismatch):
        keeper.restore({"a": torch.ones(3)})


@pytest.mark.parametrize("options", [{"verify_first": True}, {"allow_missing": True}])
def test_with_verify_first_a_damaged_step_leaves_nothing_in_the_state(tmp_path, options):
    keeper = Checkpointer(tmp_path)
    keeper.save({"a": torch.full((50_000,), 1.0)}, 1)
    keeper.save({"a": torch.full((50_000,), 2.0), "b": torch.full((50_000,), 2.0)}, 2)
    path = files_of(tmp_path, 2)[0]
    data = bytearray(path.read_bytes())
    data[-5000] ^= 1  # in one of the last blocks: the first ones would be loaded
    path.write_bytes(data)
    found = {"a": torch.zeros(50_000), "b": torch.zeros(50_000)}
    if "allow_missing" not in options:
        with pytest.raises(CheckpointDamaged, match="damaged blocks"):
            keeper.restore(found, step=2, **options)
        assert not found["a"].any()
        assert not found["b"].any()
        return
    assert keeper.restore(found, **options) == 1
    assert (found["a"] == 1).all()
    assert not found["b"].any(), "nothing of step 2 is left in it"


# ---- planners, storage, and who decides


class Doubling(milepost.planning.DefaultSavePlanner):
    """Takes part in the global plan, and counts."""

    plans = 0

    def create_global_plan(self, all_plans):
        type(self).plans += 1
        return super().create_global_plan(all_plans)

    def transform_object(self, write_item, object):  # noqa: A002
        found = super().transform_object(write_item, object)
        return found if write_item.tensor_data is None else found * 2


class Halving(milepost.planning.DefaultLoadPlanner):
    def commit_tensor(self, read_item, tensor):
        tensor.div_(2)


def test_planners_and_another_coordinator_are_used_for_every_step(tmp_path):
    Doubling.plans = 0

    def run(comm):
        state = {"w": torch.full((3,), 7.0), "step": 1}
        board = comm._board
        other = milepost.testing.ranks.BoardComm(board, comm.rank, comm.size, 60.0, coordinator=1)
        keeper = milepost.Checkpointer(
            tmp_path, keep_last=1, process_group=other, save_planner=Doubling(), load_planner=Halving()
        )
        keeper.save(state, 1)
        keeper.save(state, 2)
        target = {"w": torch.zeros(3), "step": 0}
        assert keeper.restore(target) == 2
        assert torch.equal(target["w"], state["w"])
        assert keeper.steps() == [2]

    run_ranks(2, run)
    assert Doubling.plans == 2
    assert torch.equal(milepost.open(tmp_path / "step-0000000002")["w"].read(), torch.full((3,), 14.0))


def test_a_checkpointer_of_storage_saves_and_loads_with_what_it_was_given(tmp_path):
    keeper = milepost.StorageCheckpointer(
        milepost.planning.CheckpointWriter(tmp_path),
        milepost.planning.CheckpointReader(tmp_path),
        no_dist=True,
        save_planner=Doubling(),
        load_planner=Halving(),
    )
    for number in (3.0, 4.0):
        state = {"w": torch.full((3,), number), "n": int(number)}
        assert keeper.save(state).url == str(tmp_path)
        found = keeper.load({"w": torch.zeros(3), "n": 0})
        assert torch.equal(found["w"], state["w"])
        assert found["n"] == int(number)


@pytest.mark.parametrize("metrics", [{"loss": 10**400}, ["loss"]])
def test_metrics_that_are_none_are_refused_on_all_ranks(tmp_path, metrics):
    def work(comm):
        keeper = milepost.Checkpointer(tmp_path, process_group=comm)
        with pytest.raises(milepost.CheckpointError, match="rank 0"):
            keeper.save({"a": torch.ones(2)}, 1, metrics=metrics if comm.rank == 0 else None)
        keeper.save({"a": torch.ones(2)}, 2)

    run_ranks(2, work, timeout_s=20)
