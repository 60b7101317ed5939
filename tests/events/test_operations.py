"""Each kind of operation tells its story: begun, phases with bytes, committed or failed, ended."""

import os
import signal

import pytest
import torch

import milepost
from milepost import events
from milepost.planning import DefaultSavePlanner
from tests.events.hearing import check_whole, listening

BYTES = 4 * 300_000
NOT_WORK = {"waiting", "blocking"}


def new_state():
    return {"w": torch.arange(300_000, dtype=torch.float32), "step": 3}


def test_save_tells_phases_and_keeps_them_in_the_manifest(tmp_path):
    with listening() as heard:
        milepost.save(new_state(), tmp_path)
    [operation] = heard.operations()
    check_whole(operation)
    assert heard.phases("save") == {"describing", "planning", "writing", "comparing", "committing"}
    [committed] = heard.of(events.Committed)
    assert (committed.generation, committed.bytes, committed.kind) == (1, BYTES, "save")
    timings = milepost.open(tmp_path).manifest.timings
    assert committed.timings == timings
    ended = heard[-1].phases
    assert {t.phase for t in timings} == ended.keys() - {"committing"}
    for timing in timings:
        assert timing.slowest_s == pytest.approx(ended[timing.phase], rel=0.2, abs=0.002), "of this save, not made up"
        assert timing.slowest_rank == 0
    [writing] = [event for event in heard.of(events.PhaseEnded) if event.phase == "writing"]
    assert writing.bytes == BYTES


def test_load_verify_and_removal_tell_what_they_moved(tmp_path):
    milepost.save(new_state(), tmp_path / "step-0000000007")
    with listening() as heard, milepost.Checkpointer(tmp_path) as keeper:
        assert keeper.restore(new_state(), verify_first=True) == 7
        assert keeper.open(7).verify().ok
        keeper.remove(7)
    for operation in heard.operations():
        check_whole(operation)
    restore, *inside, verify, removal = heard.operations()
    assert [one[0].kind for one in (restore, *inside, verify, removal)] == [
        "restore",
        "verify",
        "load",
        "verify",
        "remove",
    ]
    assert all(one[0].parent == restore[0].operation and one[0].step == 7 for one in inside)
    assert inside[1][-1].bytes == BYTES
    assert verify[-1].bytes > BYTES, "headers and tables too"
    assert {"opening", "matching", "reading", "applying"} <= inside[1][-1].phases.keys()
    [removed] = heard.of(events.Removed)
    assert (removed.step, removed.generation) == (7, 1)
    assert removed.bytes > BYTES


def test_restore_tells_which_steps_it_skipped_and_why(tmp_path):
    with milepost.Checkpointer(tmp_path) as keeper:
        for step in (1, 2):
            keeper.save(new_state(), step)
        [data] = (tmp_path / "step-0000000002").glob("data/*/*")
        data.write_bytes(data.read_bytes()[:-1])
        with listening() as heard:
            assert keeper.restore(new_state()) == 1
    [skipped] = heard.of(events.Skipped)
    assert skipped.skipped == 2
    assert skipped.kind == "restore"
    assert "step-0000000002" in skipped.reason
    assert [(one[0].kind, one[0].step, one[-1].ok) for one in heard.operations()] == [
        ("restore", None, True),
        ("load", 2, False),
        ("load", 1, True),
    ]


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_async_save_is_one_operation_from_call_to_commit(tmp_path, background):
    with milepost.Checkpointer(tmp_path, background=background, keep_last=1) as keeper:
        keeper.prewarm(new_state())
        keeper.async_save(new_state(), 1).result()
        with listening() as heard:
            keeper.async_save(new_state(), 2).result()
        timings = {t.phase: t for t in keeper.open(2).manifest.timings}
    save, removal = heard.operations()
    check_whole(save)
    check_whole(removal)
    assert (save[0].kind, save[0].step, removal[0].kind, removal[0].step) == ("save", 2, "remove", 1)
    assert removal[0].parent == save[0].operation
    assert {"describing", "staging", "blocking", "writing", "committing"} <= heard.phases("save")
    assert {"describing", "staging", "blocking", "writing"} <= timings.keys()
    ended = save[-1].phases
    assert timings["staging"].slowest_s == pytest.approx(ended["staging"], rel=0.2, abs=0.002)
    assert ended["blocking"] <= save[-1].seconds
    writing = next(event for event in save if isinstance(event, events.PhaseEnded) and event.phase == "writing")
    assert writing.bytes == BYTES
    assert (writing.pid != os.getpid()) == (background == "process"), "the writing process tells of itself"
    [committed] = heard.of(events.Committed)
    assert committed.step == 2
    assert committed.timings == tuple(timings.values())


@pytest.mark.parametrize("background", [None, "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_verdict_of_the_health_gate_is_told_and_logged_once(tmp_path, background, caplog):
    sick = {"w": torch.tensor([float("nan")])}
    with milepost.Checkpointer(tmp_path, background=background or "thread", healthy=True) as keeper:
        with listening() as heard:
            keeper.async_save(sick, 7).result() if background else keeper.save(sick, 7)
        keeper.async_save(sick, 8).result() if background else keeper.save(sick, 8)
    [committed] = heard.of(events.Committed)
    assert committed.health == milepost.Health(ok=False, reason="1 NaN in 'w'")
    assert caplog.messages == [f"step {step} is unhealthy: 1 NaN in 'w'" for step in (7, 8)], "with a listener or not"


def test_planner_saves_and_conversions_have_times_too(tmp_path):
    class Own(DefaultSavePlanner):
        def create_global_plan(self, plans):
            return super().create_global_plan(plans)

    with listening() as heard:
        milepost.save(new_state(), tmp_path / "a", planner=Own())
        milepost.load(new_state(), tmp_path / "a", planner=milepost.planning.DefaultLoadPlanner())
        milepost.dcp.save(new_state(), checkpoint_id=tmp_path / "b")
        milepost.convert(tmp_path / "a", tmp_path / "c", "milepost")
    for operation in heard.operations():
        check_whole(operation)
    assert [one[0].kind for one in heard.operations()] == ["save", "load", "save", "convert"]
    assert [event.bytes >= BYTES for event in heard.of(events.Committed)] == [True, True, True]
    for name in "abc":
        phases = {t.phase: t.slowest_s for t in milepost.open(tmp_path / name).manifest.timings}
        assert phases["writing"] > 0, name


def test_failed_save_tells_error_and_leaves_the_next_one_clean(tmp_path):
    with listening() as heard:
        with pytest.raises(milepost.InvalidState):
            milepost.save({"bad": object()}, tmp_path)
        milepost.save(new_state(), tmp_path)
    failed, fine = heard.operations()
    check_whole(failed)
    check_whole(fine)
    [event] = heard.of(events.Failed)
    assert event.error == "InvalidState"
    assert "bad" in event.text
    assert (failed[-1].ok, fine[-1].ok) == (False, True)


def test_refused_async_save_is_told_once(tmp_path):
    with milepost.AsyncSaver() as saver, listening() as heard:
        with pytest.raises(milepost.InvalidRequest):
            saver.save(new_state(), tmp_path, stage="nowhere")
        saver.save(new_state(), tmp_path).result()
    assert [one[-1].ok for one in heard.operations()] == [False, True]
    assert len(heard.of(events.Failed)) == 1


def test_saves_inside_a_state_dict_are_operations_of_their_own(tmp_path):
    class Nested:
        def state_dict(self):
            milepost.save({"inner": 1}, tmp_path / "inner")
            return {"x": 1}

        def load_state_dict(self, state):
            pass

    with listening() as heard:
        milepost.save({"nested": Nested()}, tmp_path / "outer")
        milepost.async_save({"nested": Nested()}, tmp_path / "outer").result()
    urls = [os.path.basename(one[0].url) for one in heard.operations()]
    assert urls == ["outer", "inner", "outer", "inner"]
    assert [os.path.basename(event.url) for event in heard.of(events.Committed)] == ["inner", "outer"] * 2
    for operation in heard.operations():
        check_whole(operation)


def test_an_interrupt_anywhere_does_not_join_two_saves(tmp_path, monkeypatch):
    """As by a signal handler that raises while the first save leaves: it could not say that it had ended."""

    def save_interrupted():
        with events.operation.operating("save", "lost"):
            raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(events.operation._Tracking, "__exit__", lambda *_: None)
        with pytest.raises(KeyboardInterrupt):
            save_interrupted()
    assert events.operation.current() is not None, "it is left behind"
    with listening() as heard:
        milepost.save(new_state(), tmp_path)
    [operation] = heard.operations()
    check_whole(operation)
    assert operation[0].parent == ""
    assert events.operation.current() is None


def test_preemption_is_told_with_the_step():
    with listening() as heard, milepost.PreemptionGuard(grace_s=60) as guard:
        assert not guard.reached(1)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.reached(2)
        assert guard.reached(3)
    [event] = heard
    assert isinstance(event, events.Preempted)
    assert event.step == 2
    assert 0 < event.seconds_left <= 60
