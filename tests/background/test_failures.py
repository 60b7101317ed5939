"""A background save that fails: every rank raises, nothing stays behind, and no error is lost."""

import contextlib
import errno
import os
import signal
import subprocess
import threading
import time

import pytest
import torch

import milepost
from tests.background.saves import (
    PROMPT_S,
    TIMEOUT_S,
    FailingStore,
    FaultyStore,
    Team,
    files_in,
    limited,
    shared_state,
    spoil,
)

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


# ---------------------------------------------------------------- failures


@pytest.mark.parametrize("phase", ["describing", "staging", "writer", "write", "commit", "create"])
def test_a_failure_on_one_rank_is_raised_on_every_rank_and_leaves_nothing(team, tmp_path, phase, monkeypatch):
    place, world = tmp_path / "place", team.world
    team.run(lambda saver, rank: saver.save(shared_state(rank, world), place).result(TIMEOUT_S))
    before, victim = files_in(place), 0 if phase == "create" else world - 1
    reason = {"describing": "'bad' is a builtins.function", "staging": "broken"}.get(phase, "No space left on device")

    def work(saver, rank):
        state = shared_state(rank, world)
        if rank == victim and phase == "describing":
            state["bad"] = lambda: 0
        fails = rank == victim and phase not in ("describing", "staging")
        pending = saver.save(state, FailingStore(place, phase, 2 if phase == "write" else 1) if fails else place)
        error = pending.exception(TIMEOUT_S)
        assert repr(pending) == f"PendingSave({str(place)!r}, failed)"
        with pytest.raises(type(error)):
            pending.result()
        return error

    with monkeypatch.context() as patched:
        if phase == "staging":

            def broken(*_):
                raise ValueError("broken")

            patched.setattr(team.savers[victim]._engine.stager.copier, "copy", broken)
        errors = team.run(work)
    for error in errors:
        assert isinstance(error, milepost.CheckpointError), errors
        assert list(error.failures) == [victim]
        assert reason in str(error)
        assert f"rank {victim}" in str(error)
    assert files_in(place) == before, "the earlier one stands, and nothing of this one remains"
    states = [shared_state(rank, world) for rank in range(world)]
    team.run(lambda saver, rank: saver.save(states[rank], place).result(TIMEOUT_S))
    assert milepost.open(place).generation == 2
    assert milepost.open(place).verify().ok


@pytest.mark.parametrize("call", ["write", "create"])
def test_one_process_raises_the_error_itself(saver, tmp_path, call):
    saver.save({"t": torch.zeros(3)}, tmp_path).result(TIMEOUT_S)
    before = files_in(tmp_path)
    pending = saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, call))
    with pytest.raises(OSError, match="No space left"):
        pending.result(TIMEOUT_S)
    with pytest.raises(milepost.InvalidState, match="'f' is a builtins"):
        saver.save({"f": lambda: 0}, tmp_path)
    assert files_in(tmp_path) == before
    saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S)
    assert milepost.open(tmp_path)["t"].read().tolist() == [1, 1, 1]


def test_callback_runs_on_every_rank_after_the_commit(team, tmp_path):
    def work(saver, rank):
        found = []
        saver.save(
            {"t": torch.ones(2)},
            tmp_path,
            then=lambda comm: found.append((comm.rank, milepost.open(tmp_path).generation)),
        ).result(TIMEOUT_S)
        return found

    assert team.run(work) == [[(rank, 1)] for rank in range(team.world)]


def test_a_failure_of_what_is_called_afterwards_is_raised_on_every_rank(tmp_path):
    team = Team("thread", 2)

    def fail(comm):
        if comm.rank == 1:
            raise ValueError("afterwards")

    try:
        errors = team.run(
            lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path, then=fail).exception(TIMEOUT_S)
        )
    finally:
        team.close()
    assert all("afterwards" in str(e) and "rank 1" in str(e) for e in errors)


@pytest.mark.slow
def test_a_process_that_cannot_be_started_is_told_to_all_ranks_at_once(tmp_path, monkeypatch):
    """It was a bare OSError, while the others waited. The folder that it would start in is gone, which is no reason."""
    popen, refusals = subprocess.Popen, [OSError(errno.EAGAIN, "Resource temporarily unavailable")]

    def refuse_once(*args, **options):
        if refusals:
            raise refusals.pop()
        return popen(*args, **options)

    monkeypatch.setattr(subprocess, "Popen", refuse_once)
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    team = Team("process", 2)
    start = time.monotonic()
    errors = team.run(lambda saver, rank: saver.save({"t": torch.zeros(2)}, tmp_path / "a").exception(TIMEOUT_S))
    assert time.monotonic() - start < PROMPT_S
    assert all(isinstance(error, milepost.WriterDied) and "could not be started" in str(error) for error in errors)
    team.run(lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path / "a").result(TIMEOUT_S))
    assert milepost.open(tmp_path / "a")["t"].read().tolist() == [1, 1]
    team.close()


@pytest.mark.slow
def test_process_death_between_saves_is_raised_on_all_ranks(tmp_path, monkeypatch):
    """Once the others waited for it as long as for a rank that is slow. Once they could not read what it left."""
    team = Team("process", 2)
    team.run(lambda saver, rank: saver.save({"t": torch.ones(2)}, tmp_path).result(TIMEOUT_S))
    first, second = (saver._engine.processes.writers.link for saver in team.savers)
    os.kill(second.pid, signal.SIGKILL)
    time.sleep(0.2)
    left, hand_over = threading.Event(), first.hand_over

    def hand_over_late(order):
        assert left.wait(PROMPT_S)
        hand_over(order)  # now its process finds all that rank 1 left for it

    monkeypatch.setattr(first, "hand_over", hand_over_late)

    def fail(saver, rank):
        error = saver.save({"t": torch.zeros(2)}, tmp_path).exception(TIMEOUT_S)
        if rank == 1:
            left.set()
        return error

    errors = team.run(fail)
    assert all(isinstance(error, milepost.WriterDied) for error in errors), errors
    assert milepost.open(tmp_path)["t"].read().tolist() == [1, 1]
    team.run(lambda saver, rank: saver.save({"t": torch.zeros(2)}, tmp_path).result(TIMEOUT_S))
    assert milepost.open(tmp_path)["t"].read().tolist() == [0, 0]
    team.close()


@pytest.mark.slow
def test_processes_that_lost_each_other_are_started_again(tmp_path):
    """After an error between two steps. A trainer that then writes in its stead must find the others."""
    team = Team("process", 2)

    def save(saver, rank, cut, store):
        parts = {(0,): torch.ones(cut), (cut,): torch.full((5 - cut,), 2.0)} if rank == 1 else {}
        state = {"t": milepost.Sharded((5,), parts, torch.float32), "big": torch.arange(9000.0)}
        return saver.save(state, store).exception(TIMEOUT_S)

    assert team.run(lambda saver, rank: save(saver, rank, 2, tmp_path)) == [None, None]
    errors = team.run(lambda saver, rank: save(saver, rank, 3, FaultyStore(tmp_path)))
    assert all("no error of a store" in str(error) for error in errors), errors

    def again(saver, rank):
        with limited(saver, 0) if rank == 1 else contextlib.nullcontext():
            return save(saver, rank, 3, tmp_path)

    assert team.run(again) == [None, None]
    assert milepost.open(tmp_path)["t"].read().tolist() == [1, 1, 1, 2, 2]
    team.close()


# ---------------------------------------------------------------- no error is lost


@pytest.mark.parametrize("askers", [(), (0,), (1,)])
def test_an_error_that_nobody_asked_for_is_raised_by_the_next_save(team, tmp_path, askers):
    place, world = tmp_path / "place", team.world
    silent = [rank for rank in range(world) if rank not in askers]

    def work(saver, rank):
        store = FailingStore(place, "write") if rank == world - 1 else place
        pending = saver.save(shared_state(rank, world), store)
        if rank in askers:
            assert "No space left" in str(pending.exception(TIMEOUT_S))
        try:
            again = saver.save(shared_state(rank, world), place)
        except milepost.CheckpointError as error:
            return "raised", error
        return "told", again.exception(TIMEOUT_S)

    for rank, (how, error) in enumerate(team.run(work)):
        assert how == ("raised" if rank in silent else "told"), rank
        assert "No space left" in str(error)
        assert isinstance(error, milepost.CheckpointError)
        assert list(error.failures) == ([world - 1] if rank in silent else silent)
    assert not files_in(tmp_path)
    states = [shared_state(rank, world) for rank in range(world)]
    team.run(lambda saver, rank: saver.save(states[rank], place).result(TIMEOUT_S))


def test_unread_error_is_raised_once_by_wait_or_close(saver, tmp_path):
    saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
    with pytest.raises(OSError, match="No space left"):
        saver.wait()
    saver.wait()
    saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S)
    closing = milepost.AsyncSaver()
    closing.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
    with pytest.raises(OSError, match="No space left"):
        closing.close()
    closing.close()
    asked = milepost.AsyncSaver()
    asked.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write")).exception(TIMEOUT_S)
    asked.close()


def test_a_with_block_does_not_hide_the_error_that_leaves_it(tmp_path, caplog):
    with pytest.raises(ZeroDivisionError), milepost.AsyncSaver() as saver:  # noqa: PT012
        saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))
        _ = 1 / 0
    assert "No space left" in caplog.text
    with pytest.raises(OSError, match="No space left"), milepost.AsyncSaver() as saver:
        saver.save({"t": torch.ones(3)}, FailingStore(tmp_path, "write"))


# ---------------------------------------------------------------- ranks that disagree


@pytest.mark.parametrize("what", ["values", "shapes", "replicas", "replicas that are not copied"])
def test_ranks_that_disagree_all_hear_of_it(team, tmp_path, what):
    last = team.world - 1

    def save(saver, rank, **options):
        odd = rank == last
        state = {
            "lr": 0.5 if odd and what == "values" else 0.1,
            "w": torch.zeros(4 if odd and what == "shapes" else 3),
            "buf": torch.full((300_000,), float(odd and what.startswith("replicas"))),
        }
        with limited(saver, 0) if what.endswith("copied") else contextlib.nullcontext():
            pending = saver.save(state, tmp_path, **options)
            spoil(state)
            return pending

    for error in team.run(lambda saver, rank: save(saver, rank).exception(TIMEOUT_S)):
        assert isinstance(error, milepost.RanksDisagree)
        assert {"values": "'lr' is 0.1", "shapes": "'w' is"}.get(what, "'buf'") in str(error)
        assert str(last) in str(error)
    assert not files_in(tmp_path)
    if what != "shapes":
        with pytest.warns(RuntimeWarning, match="'lr'" if what == "values" else "'buf'"):
            team.run(lambda saver, rank: save(saver, rank, on_difference="warn").result(TIMEOUT_S))
        with milepost.open(tmp_path) as checkpoint:
            assert checkpoint["lr"] == 0.1
            assert not checkpoint["buf"].read().any(), "the lowest rank's"
