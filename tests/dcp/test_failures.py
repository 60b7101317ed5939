"""What fails on one rank fails on all, with the original exception, and can be caught like any other."""

import functools
import pickle
import traceback

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import milepost
import milepost.dcp
from milepost.dcp.api import _is_wrapped_exception, _wrap_exception
from milepost.dcp.utils import _DistWrapper, _get_failure_dict
from tests.dcp.programs import OURS, THEIRS, run, run_both, run_ours
from tests.ranks import spawn


class Odd(Exception):
    """Cannot be unpickled: its arguments are not those of its `__init__`."""

    def __init__(self, first, second):
        super().__init__(first)
        self.second = second


def caught(dcp, call):
    """The type, failing ranks and text of what a call raised."""
    try:
        call()
    except dcp.CheckpointException as error:
        failures = {r: pair for r, pair in error.failures.items() if _is_wrapped_exception(pair)}
        return {r: (type(e).__name__, str(e)) for r, (e, _) in failures.items()}, str(error)
    return None


def steps_fail(dcp, rank, folder):
    def failing_at(step, where):
        class Planner(dcp.DefaultSavePlanner):
            def create_local_plan(self):
                if step == "local" and rank == where:
                    raise ValueError("local")
                return super().create_local_plan()

            def create_global_plan(self, all_plans):
                if step == "global":
                    raise KeyError("global")
                return super().create_global_plan(all_plans)

            def finish_plan(self, new_plan):
                if step == "finish" and rank == where:
                    raise OSError(28, "finish")
                return super().finish_plan(new_plan)

            def resolve_data(self, write_item):
                if step == "resolve" and rank == where:
                    raise TypeError("resolve")
                return super().resolve_data(write_item)

        return Planner()

    places = [("local", 1), ("global", 0), ("finish", 1), ("resolve", 1)]
    state = {"w": torch.ones(4), "v": torch.ones(5)}
    found = []
    for step, where in places:
        save = functools.partial(dcp.save, state, checkpoint_id=folder / step, planner=failing_at(step, where))
        found.append(caught(dcp, save)[0])
    return found


def test_planner_error_on_one_rank_is_raised_on_all(tmp_path):
    for ours, theirs in spawn(2, run_both, steps_fail, tmp_path):
        assert ours == theirs
        assert [list(failures) for failures in ours] == [[1], [0], [1], [1]]


def local_steps_fail(dcp, rank, folder):
    """Planners that do not override the global plan: plans are not gathered then."""

    def failing_at(step):
        class Planner(dcp.DefaultSavePlanner):
            def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
                if step == "set_up" and rank == 1:
                    raise ValueError("set_up")
                super().set_up_planner(state_dict, storage_meta, is_coordinator)

            def create_local_plan(self):
                if step == "local" and rank == 1:
                    raise LookupError("local")
                return super().create_local_plan()

            def resolve_data(self, write_item):
                if step == "resolve" and rank == 1:
                    raise TypeError("resolve")
                return super().resolve_data(write_item)

        return Planner()

    state = {f"rank{rank}": torch.ones(4), "w": torch.ones(3)}
    saves = [
        functools.partial(dcp.save, state, checkpoint_id=folder / step, planner=failing_at(step))
        for step in ("set_up", "local", "resolve")
    ]
    return [caught(dcp, save)[0] for save in saves]


def test_planners_that_plan_for_their_rank_only_fail_alike(tmp_path):
    for ours, theirs in spawn(2, run_both, local_steps_fail, tmp_path):
        assert ours == theirs
        assert ours == [{1: ("ValueError", "set_up")}, {1: ("LookupError", "local")}, {1: ("TypeError", "resolve")}]


def both_fail(dcp, rank, folder):
    class Planner(dcp.DefaultLoadPlanner):
        def create_local_plan(self):
            raise RuntimeError(f"rank {rank}")

    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder)
    return caught(dcp, lambda: dcp.load({"w": torch.ones(2)}, checkpoint_id=folder, planner=Planner()))[0]


def test_the_failures_of_all_ranks_are_told(tmp_path):
    for ours, theirs in spawn(2, run_both, both_fail, tmp_path):
        assert ours == theirs == {0: ("RuntimeError", "rank 0"), 1: ("RuntimeError", "rank 1")}


def odd_fails(dcp, rank, folder):
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise Odd("odd", 2)
            return super().create_local_plan()

    try:
        dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, planner=Planner())
    except Exception as error:
        return (
            isinstance(error, dcp.CheckpointException),
            str(error.failures[1][0]),
            type(error.failures[1][0]).__name__,
        )


def test_an_exception_that_cannot_travel_is_told_in_words(tmp_path):
    outcomes = spawn(2, run_ours, odd_fails, tmp_path)
    assert outcomes == [(True, "Odd: odd", "CheckpointError"), (True, "odd", "Odd")]


def after_a_failure(dcp, rank, folder):
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise ValueError("once")
            return super().create_local_plan()

    state = {"w": torch.full((2,), 1.0)}
    dcp.save(state, checkpoint_id=folder / "kept")
    state["w"].fill_(2.0)
    assert caught(dcp, lambda: dcp.save(state, checkpoint_id=folder / "kept", planner=Planner()))
    target = {"w": torch.zeros(2)}
    dcp.load(target, checkpoint_id=folder / "kept")
    return target["w"].tolist()


def test_ranks_stay_in_step_after_a_failed_save(tmp_path):
    assert spawn(2, run_ours, after_a_failure, tmp_path) == [[1.0, 1.0]] * 2


def missing(dcp, rank, folder):
    dcp.save({"w": torch.ones(2), "n": 1}, checkpoint_id=folder)
    return caught(dcp, lambda: dcp.load({"w": torch.ones(2), "gone": torch.ones(1)}, checkpoint_id=folder))


def mismatch(dcp, rank, folder):
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=folder)
    return caught(dcp, lambda: dcp.load({"w": torch.ones(3, 2)}, checkpoint_id=folder))


def no_tensor(dcp, rank, folder):
    dcp.save({"w": torch.ones(2, 3)}, checkpoint_id=folder)
    return caught(dcp, lambda: dcp.load({"w": "text"}, checkpoint_id=folder))


@pytest.mark.parametrize(
    ("program", "kind", "text"),
    [
        (missing, "RuntimeError", "Missing key in checkpoint state_dict: gone."),
        (
            mismatch,
            "ValueError",
            "Size mismatch between saved torch.Size([2, 3]) and current: torch.Size([3, 2]) for w",
        ),
        (no_tensor, "ValueError", "Invalid checkpoint metadata for w"),
    ],
)
@pytest.mark.parametrize("name", [OURS, THEIRS])
def test_the_texts_that_programs_look_for_are_in_the_error(tmp_path, program, kind, text, name):
    failures, shown = run(program, name, tmp_path)
    assert failures[0][0] == kind
    assert text in shown


def test_unsavable_state_is_refused_with_the_words_of_torch(tmp_path):
    for outcome in spawn(2, run_ours, holes, tmp_path):
        assert "Failed to validate global plan" in outcome


def holes(dcp, rank, folder):
    state = {"w": milepost.Sharded((8,), {(4 * rank,): torch.ones(2)})}
    try:
        dcp.save(state, checkpoint_id=folder)
    except dcp.CheckpointException as error:
        return str(error)


def test_ours_is_an_exception_and_an_error_of_milepost(tmp_path):
    with pytest.raises(Exception, match="Missing key") as info:
        missing_from(tmp_path)
    assert type(info.value) is milepost.dcp.CheckpointException
    assert isinstance(info.value, milepost.CheckpointError)
    assert isinstance(info.value.__cause__, RuntimeError)
    assert not issubclass(torch_dcp.CheckpointException, Exception), "torch's is not"


def missing_from(folder):
    milepost.dcp.save({"a": torch.ones(1)}, checkpoint_id=folder)
    milepost.dcp.load({"b": torch.ones(1)}, checkpoint_id=folder)


def test_a_checkpoint_that_is_not_there_raises_too(tmp_path):
    with pytest.raises(milepost.dcp.CheckpointException) as info:
        milepost.dcp.load({"b": torch.ones(1)}, checkpoint_id=tmp_path / "nothing")
    assert isinstance(info.value.failures[0][0], milepost.CheckpointNotFound)


def test_the_error_can_be_pickled_and_equal_failures_are_shown_once():
    try:
        raise ValueError("why")
    except ValueError as error:
        pair = _wrap_exception(error)
    error = milepost.dcp.CheckpointException("plan", dict.fromkeys(range(1000), pair))
    again = pickle.loads(pickle.dumps(error))
    assert str(again) == str(error)
    assert str(error).count("why") == 2, "the source line, and the error"
    assert "(RANKS 0-999)" in str(error)
    assert list(again.failures) == list(range(1000))


def test_wrapped_exceptions_are_those_of_torch():
    pair = _wrap_exception(ValueError("x"))
    assert _is_wrapped_exception(pair)
    assert not any(map(_is_wrapped_exception, [1, (1, 2), (ValueError(), 2), [ValueError(), traceback.StackSummary()]]))
    assert _get_failure_dict([1, pair, 2]) == {1: pair}


def test_calls_of_all_ranks_raise_our_exception():
    wrapper = _DistWrapper(None, use_dist=False, coordinator_rank=0)
    assert wrapper.all_reduce("step", lambda: 2, sum) == 2
    assert wrapper.reduce_scatter("step", lambda: 2, lambda found: [found[0] + 1]) == 3
    assert wrapper.all_gather("step", lambda: 2) == [2]
    assert wrapper.broadcast("step", lambda: 2) == 2
    for call in (
        lambda: wrapper.all_reduce("step", raising, sum),
        lambda: wrapper.reduce_scatter("step", raising, list),
        lambda: wrapper.all_gather("step", raising),
        lambda: wrapper.broadcast("step", raising),
    ):
        with pytest.raises(milepost.dcp.CheckpointException, match="why") as info:
            call()
        assert list(info.value.failures) == [0]


def raising():
    raise ValueError("why")


def test_a_save_that_fails_in_one_process_leaves_no_data_behind(tmp_path):
    class Writer(milepost.dcp.FileSystemWriter):
        def finish(self, metadata, results):
            raise ValueError("not today")

    with pytest.raises(milepost.dcp.CheckpointException, match="not today"):
        milepost.dcp.save({"w": torch.ones(3)}, storage_writer=Writer(tmp_path))
    assert [file for file in tmp_path.rglob("*") if file.is_file()] == []


def test_failed_second_save_of_one_writer_keeps_the_first(tmp_path):
    """The writer still knows the goal of the first save when the second one fails before it has one of its own."""

    class Disagreeing:
        def state_dict(self):
            raise milepost.RanksDisagree("on purpose")

        def load_state_dict(self, state_dict):
            pass

    class GlobalPlanner(milepost.planning.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            return super().create_global_plan(all_plans)

    writer, reader = milepost.dcp.FileSystemWriter(tmp_path), milepost.dcp.FileSystemReader(tmp_path)
    keeper = milepost.dcp._checkpointer._Checkpointer(writer, reader, no_dist=True, save_planner=GlobalPlanner())
    keeper.save({"w": torch.ones(3)})
    with pytest.raises(milepost.CheckpointError):
        keeper.save({"w": torch.zeros(3), "bad": Disagreeing()})
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint["w"].read(), torch.ones(3))
