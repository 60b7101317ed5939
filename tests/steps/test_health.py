"""The health gate: unhealthy steps are kept and marked, passed over by restore, and push no healthy one out."""

import itertools
import math
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost import Checkpointer, CheckpointNotFound, CheckpointUnhealthy, InvalidRequest
from milepost.steps.retention import Rule
from milepost.steps.shelf import step_name
from milepost.store import MemoryStore, Traits
from milepost.testing import Crash, CrashingStore, UnsyncedStore, run_ranks
from tests.ranks import spawn
from tests.steps.numbered import files_of, flip
from tests.steps.power import states_of
from tests.strategies import examples

RULES = {
    "keep_last": st.none() | st.integers(1, 3),
    "keep_every": st.none() | st.integers(2, 4),
    "keep_best": st.none() | st.integers(1, 2),
}
OBJECTS = Traits(is_current=True, part_bytes=1 << 16)


def state(number, healthy=True):
    return {"w": torch.tensor([float(number), 1.0 if healthy else math.nan]), "n": number}


def blank():
    return state(-1)


def restored(keeper, **given):
    found = blank()
    step = keeper.restore(found, **given)
    assert found["n"] == found["w"][0] == step
    return step


def run(place, *healthy, **given):
    """A run that saves a step for each of these, from 1 on."""
    keeper = Checkpointer(place, healthy=True, **given)
    for step, is_healthy in enumerate(healthy, 1):
        assert keeper.save(state(step, is_healthy), step).health.ok == is_healthy
    return keeper


# ---- what restore takes


@pytest.mark.parametrize("verify_first", [False, True])
def test_restore_takes_the_newest_healthy_step(tmp_path, caplog, verify_first):
    keeper = run(tmp_path, True, True, False, False)
    assert (keeper.steps(), keeper.latest(), keeper.latest_healthy()) == ([1, 2, 3, 4], 4, 2)
    assert "step 3 is unhealthy: 1 NaN in 'w'" in caplog.messages
    caplog.clear()
    assert restored(keeper, verify_first=verify_first) == 2
    skipped = [line for line in caplog.messages if line.startswith("skipping step")]
    assert len(skipped) == 2
    assert skipped[0].startswith("skipping step 4: ")
    assert skipped[0].endswith("was unhealthy when it was saved: 1 NaN in 'w'")


def test_an_unhealthy_step_is_loaded_where_it_is_asked_for(tmp_path, caplog):
    keeper, place = run(tmp_path, True, False), tmp_path / step_name(2)
    assert restored(keeper, step=2) == 2
    assert restored(keeper, allow_unhealthy=True) == 2
    assert restored(Checkpointer(tmp_path, allow_unhealthy=True)) == 2
    assert milepost.load(blank(), place)["n"] == 2
    assert sum("was unhealthy when it was saved" in line for line in caplog.messages) == 4, "each load says so"
    with pytest.raises(CheckpointUnhealthy, match="1 NaN in 'w'"):
        milepost.load(blank(), place, allow_unhealthy=False)
    with pytest.raises(CheckpointUnhealthy):
        keeper.restore(blank(), step=2, allow_unhealthy=False)
    assert keeper.open().health == milepost.Health(ok=False, reason="1 NaN in 'w'"), "looking inside is free"
    assert keeper.open(1).health.ok


def test_a_run_without_a_healthy_step_does_not_begin_anew(tmp_path):
    keeper = Checkpointer(tmp_path, healthy=True)
    assert keeper.restore(blank(), default=0) == 0
    keeper = run(tmp_path, False, False)
    assert keeper.latest_healthy() is None
    with pytest.raises(CheckpointUnhealthy, match=r"(?s)step 2: .*step 1: .*restore\(state, step=\.\.\.\)"):
        keeper.restore(blank(), default=0)


def test_damage_in_the_newest_healthy_step_leads_to_an_older_healthy_one(tmp_path):
    keeper = run(tmp_path, True, True, False, True, False)
    flip(files_of(tmp_path, 4)[0])
    assert restored(keeper) == 2
    for step in (1, 2):
        flip(files_of(tmp_path, step)[0])
    with pytest.raises(CheckpointUnhealthy, match=r"(?s)step 5: .*NaN.*step 4: .*not what was saved.*step 1: "):
        keeper.restore(blank())


def test_a_step_that_is_saved_again_has_the_new_verdict(tmp_path):
    keeper = run(tmp_path, True, False, keep_last=1)
    keeper.save(state(2), 2)
    assert (keeper.steps(), restored(keeper)) == ([2], 2)
    keeper.save(state(2, healthy=False), 2)
    assert (keeper.steps(), keeper.latest_healthy()) == ([2], None)


# ---- what the rules keep


@examples(400)
@given(
    scores=st.dictionaries(st.integers(0, 40), st.none() | st.sampled_from([1.0, 2.0, math.nan]), max_size=14),
    unhealthy=st.sets(st.integers(0, 40)),
    given_rule=st.fixed_dictionaries(RULES),
)
def test_unhealthy_steps_change_nothing_for_healthy_ones(scores, unhealthy, given_rule):
    rule = Rule(**given_rule, best="loss")
    healthy = {step: score for step, score in scores.items() if step not in unhealthy}
    kept = rule.kept(scores, unhealthy)
    assert kept - unhealthy == rule.kept(healthy)
    marked = sorted(scores.keys() & unhealthy)
    bounded = set(marked[-(rule.keep_last or 1) :]) | {s for s in marked if rule.keep_every and not s % rule.keep_every}
    assert kept & unhealthy == (bounded if rule.is_set else set(marked))


@examples(60)
@given(
    saves=st.lists(st.tuples(st.integers(1, 3), st.booleans(), st.sampled_from([None, 1.0, 2.0])), max_size=10),
    given_rule=st.fixed_dictionaries(RULES),
    traits=st.sampled_from([Traits(), OBJECTS]),
)
def test_a_run_keeps_the_healthy_steps_of_a_run_without_the_others(saves, given_rule, traits):
    whole = Checkpointer(MemoryStore(traits=traits), healthy=True, best="loss", **given_rule)
    healthy_only = Checkpointer(MemoryStore(traits=traits), best="loss", **given_rule)
    unhealthy = set()
    for step, (_, is_healthy, loss) in zip(itertools.accumulate(gap for gap, _, _ in saves), saves, strict=True):
        metrics = {} if loss is None else {"loss": loss}
        whole.save(state(step, is_healthy), step, metrics=metrics)
        unhealthy |= set() if is_healthy else {step}
        if is_healthy:
            healthy_only.save(state(step), step, metrics=metrics)
        assert set(whole.steps()) - unhealthy == set(healthy_only.steps())
        assert step in whole.steps()
        assert whole.best() == healthy_only.best()
        assert whole.latest_healthy() == healthy_only.latest()


def damage(store, step, how):
    """Make a step that is not whole: its data gone or too short, or its manifest none."""
    names = store.list(f"{step_name(step)}/")
    name = max(name for name in names if ("data/" in name) == (how == "data") and not name.endswith(".removed"))
    store.delete(name)
    if how == "garbage" or not store.traits.is_current:  # an object is there whole, or not at all
        store.create(name, b"{}")


@examples(80)
@given(data=st.data(), traits=st.sampled_from([Traits(), OBJECTS]))
def test_the_newest_healthy_whole_step_survives_any_history(data, traits):
    """Of healthy, unhealthy and damaged steps, saved in any order and again, by rules that change."""
    store = MemoryStore(traits=traits)
    verdicts, whole = {}, set()
    for _ in range(data.draw(st.integers(1, 9))):
        if verdicts and data.draw(st.integers(0, 3)) == 0:
            step = data.draw(st.sampled_from(sorted(verdicts)))
            if step in whole:
                damage(store, step, data.draw(st.sampled_from(["data", "garbage"])))
                whole.remove(step)
        step, is_healthy = data.draw(st.integers(0, 9)), data.draw(st.booleans())
        keeper = Checkpointer(store, healthy=True, best="loss", **data.draw(st.fixed_dictionaries(RULES)))
        keeper.save(state(step, is_healthy), step, metrics={"loss": data.draw(st.sampled_from([1.0, 2.0]))})
        verdicts[step] = is_healthy
        whole.add(step)
        best = max((s for s in whole if verdicts[s]), default=None)
        there = Checkpointer(store).steps()
        assert best is None or best in there
        assert set(there) >= {step}
        whole &= set(there)
        if best is not None:
            assert restored(keeper) == best
        else:
            with pytest.raises(CheckpointUnhealthy):
                keeper.restore(blank(), default=0)


def test_a_whole_unhealthy_step_does_not_vouch_for_a_damaged_healthy_one(tmp_path):
    run(tmp_path, True, True)
    [data] = files_of(tmp_path, 2)
    data.write_bytes(data.read_bytes()[:-1])
    keeper = Checkpointer(tmp_path, healthy=True, keep_last=1)
    keeper.save(state(3, healthy=False), 3)
    assert (keeper.steps(), restored(keeper)) == ([1, 2, 3], 1)


@pytest.mark.parametrize("healthy", [(True, False, False, False), (True, False, True, False)])
def test_a_run_that_dies_at_any_call_keeps_a_healthy_step(healthy):
    calls = itertools.count(1)
    for at in calls:
        inner = MemoryStore()
        store, done = CrashingStore(inner, at), 0
        try:
            for step, is_healthy in enumerate(healthy, 1):
                Checkpointer(store, keep_last=1, healthy=True).save(state(step, is_healthy), step)
                done = step
        except Crash:
            pass
        committed = [step for step in range(1, done + 1) if healthy[step - 1]]
        if committed:
            assert restored(Checkpointer(inner)) >= max(committed)
        if done == len(healthy):
            assert at > 20
            return


@pytest.mark.slow
def test_power_cuts_leave_a_healthy_step():
    store = UnsyncedStore()
    ends = [0]
    healthy = (True, False, True, False, False)
    for step, is_healthy in enumerate(healthy, 1):
        Checkpointer(store, keep_last=1, healthy=True).save(state(step, is_healthy), step)
        ends.append(len(store.journal))
    for at, found in states_of(store, ends[1], 1):
        done = max(step for step, end in enumerate(ends) if end <= at)
        committed = max(step for step in range(1, done + 1) if healthy[step - 1])
        assert restored(Checkpointer(found)) >= committed


# ---- rules


def test_default_rule_counts_all_tensors_and_names_the_first(tmp_path):
    fine, bad = torch.ones(100_000), torch.tensor([math.inf, 1.0])
    keeper = Checkpointer(tmp_path, healthy=True)
    receipt = keeper.save({"fine": fine, **{f"t{i}": bad for i in range(1)}, "nan": torch.full((3,), math.nan)}, 1)
    assert receipt.health.reason == "3 NaN and 1 infinite in 't0', 'nan'"
    many = {f"t{i}": torch.full((2,), math.inf) for i in range(6)}
    assert keeper.save(many, 2).health.reason == "12 infinite in 't0', 't1', 't2', 't3', ..."
    assert keeper.save({"ints": torch.arange(9), "empty": torch.zeros(0)}, 3).health.ok
    assert keeper.open(2).statistics == {}, "a verdict alone takes no statistics"


def raising(check):
    raise ZeroDivisionError(f"at step {check.step}")


@pytest.mark.parametrize("background", [None, "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_rules_that_fail_or_talk_nonsense_find_it_unhealthy(tmp_path, background, caplog):
    expected = {
        raising: "the rule for healthy checkpoints failed: ZeroDivisionError: at step 1",
        (lambda check: False): "the rule for healthy checkpoints said no",
        (lambda check: None): "the rule for healthy checkpoints gave None, not True, False or a reason",
        (lambda check: ""): "the rule for healthy checkpoints gave '', not True, False or a reason",
        (lambda check: "a \ud800 " * 1000): ("a ? " * 1000)[:1000],
        (lambda check: torch.tensor(True)): "the rule for healthy checkpoints gave tensor(True), not True, False",
    }
    few = list(expected.items())[: 2 if background == "process" else None]
    for rule, reason in few:
        with Checkpointer(tmp_path, healthy=rule, background=background or "thread") as keeper:
            receipt = keeper.async_save(state(1), 1).result() if background else keeper.save(state(1), 1)
            assert not receipt.health.ok
            assert receipt.health.reason.startswith(reason)
            assert keeper.latest_healthy() is None
    assert any(record.exc_info for record in caplog.records), "the traceback of the rule is in the log"


@pytest.mark.parametrize("background", [None, "thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_rule_is_told_all_that_is_known(tmp_path, background):
    seen, process = [], threading.get_ident

    def rule(check):
        seen.append((check, process()))
        return check.metrics["loss"] < 3 or f"loss {check.metrics['loss']}"

    with Checkpointer(tmp_path, healthy=rule, background=background or "thread", keep_last=1) as keeper:
        for step, loss in ((5, torch.tensor(2.0)), (6, 4)):
            given = {"metrics": {"loss": loss}}
            pending = (
                keeper.async_save(state(step), step, **given) if background else keeper.save(state(step), step, **given)
            )
            health = pending.result().health if background else pending.health
        assert health == milepost.Health(ok=False, reason="loss 4.0")
        assert (keeper.steps(), restored(keeper)) == ([5, 6], 5)
        assert keeper.open(6).statistics["w"].max == 6.0, "a rule of one's own takes statistics"
    check = seen[0][0]
    assert (check.step, check.metrics, check.nan, check.inf, check.keys) == (5, {"loss": 2.0}, 0, 0, ())
    assert check.statistics["w"].mean == 3.0


def test_wrong_rules_are_refused_when_the_run_is_made(tmp_path):
    for wrong in ("finite", 1, None):
        with pytest.raises(InvalidRequest, match="healthy"):
            Checkpointer(tmp_path, healthy=wrong)


# ---- ranks, and other places


def test_only_the_coordinators_rule_counts(tmp_path):
    asked = []

    def work(comm):
        def rule(check):
            asked.append(comm.rank)
            return "never"

        healthy = {0: True, 1: rule, 2: False}[comm.rank]
        keeper = Checkpointer(tmp_path, healthy=healthy, process_group=comm, keep_last=1)
        state_ = {"w": torch.tensor([1.0, math.nan if comm.rank == 1 else 1.0]), "n": 1}
        state_["w"] = milepost.Sharded((6,), {(2 * comm.rank,): state_["w"]})
        first = keeper.save({**state_, "n": 1}, 1)
        state_["w"].parts[0].data.fill_(2.0)
        return [first.health, keeper.save({**state_, "n": 2}, 2).health, keeper.latest_healthy(), keeper.steps()]

    found = run_ranks(3, work)
    assert found == [[milepost.Health(False, "1 NaN in 'w'"), milepost.Health(True), 2, [1, 2]]] * 3
    assert not asked


def on_real_rank(rank, root):
    def rule(check):
        return check.metrics["loss"] < 3 and not check.nan

    with Checkpointer(root, healthy=rule, background="process", keep_last=1) as keeper:
        for step, loss, value in ((1, 1.0, 0.0), (2, 9.0, 0.0), (3, 1.0, math.nan)):
            part = torch.full((10,), value if rank else 1.0)
            given = {"metrics": {"loss": loss}} if rank == 0 else {}
            health = keeper.async_save({"w": milepost.Sharded((20,), {(10 * rank,): part}), "n": step}, step, **given)
            health = health.result().health
        found = {"w": milepost.Sharded((20,), {(10 * rank,): torch.zeros(10)}), "n": 0}
        return keeper.restore(found), found["n"], keeper.steps(), health.ok


@pytest.mark.slow
def test_real_ranks_with_writing_processes_ask_their_trainers_rule(tmp_path):
    assert spawn(2, on_real_rank, str(tmp_path)) == [(1, 1, [1, 3], False)] * 2


TRAINER = """
import os, signal, sys, torch, milepost
def rule(check):
    os.kill(os.getpid(), signal.SIGKILL)
with milepost.Checkpointer(sys.argv[1], background="process", healthy=rule) as keeper:
    keeper.async_save({"w": torch.tensor([1.0, float(sys.argv[2])])}, 1).result()
"""


@pytest.mark.slow
@pytest.mark.parametrize("value", ["2.0", "nan"])
def test_a_trainer_that_dies_when_it_is_asked_leaves_the_default_verdict(tmp_path, value):
    done = subprocess.run([sys.executable, "-c", TRAINER, tmp_path, value], timeout=100, check=False)
    assert done.returncode == -signal.SIGKILL
    keeper, deadline = Checkpointer(tmp_path), time.monotonic() + 30
    while keeper.latest() is None and time.monotonic() < deadline:
        time.sleep(0.05)
    assert keeper.open(1).health.ok == (value == "2.0")
    assert keeper.open(1).statistics["w"].count == 2


@pytest.mark.slow
def test_health_gate_in_an_object_store(seaweed):
    with seaweed.place() as url:
        keeper = run(url, True, False, True, False, False, keep_last=1)
        assert keeper.steps() == [3, 5]
        assert restored(Checkpointer(url)) == 3
        assert Checkpointer(url).latest_healthy() == 3


def test_steps_of_other_programs_have_no_verdict(tmp_path):
    torch.save(state(7, healthy=False), tmp_path / "other-7.pt")
    keeper = run(tmp_path, True, False, keep_last=1, also_read=["other-{step}.pt"])
    assert keeper.latest_healthy() == 7
    assert restored(keeper) == 7
    with pytest.raises(CheckpointNotFound):
        keeper.restore(blank(), step=8)
