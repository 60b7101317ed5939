"""Preemption: a signal on any rank stops all ranks at one step, without deadlock, and one last save is made of it."""

import math
import os
import random
import signal
import threading
import time

import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st

import milepost
from milepost.comm import BoardComm, Call, MemoryBoard, together
from milepost.steps import preemption
from milepost.steps.preemption import PreemptionGuard
from milepost.testing import run_ranks
from tests.ranks import spawn, spawn_outcomes


@pytest.fixture
def hurried(monkeypatch):
    """The same, with looks and margins that are over sooner."""
    monkeypatch.setattr(preemption, "_LOOK_S", 0.01)
    monkeypatch.setattr(preemption, "_MARGIN_S", 0.5)


@pytest.fixture
def by_hand():
    """A handler of the test's own, so that a signal which the guard does not take ends no test run."""
    calls = []
    before = signal.signal(signal.SIGTERM, lambda number, frame: calls.append(number))
    yield calls
    signal.signal(signal.SIGTERM, before)


def wait_until(condition, timeout_s=10.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.005)


# The protocol, with ranks that are threads.


class Run:
    """Ranks that train at their own pace, with or without a collective in each step, and signals from outside."""

    def __init__(self, world, steps, collective, signals, seed):
        self.steps, self.seed = steps, seed
        self.barrier = threading.Barrier(world) if collective else None
        self.guards, self.ready = {}, threading.Barrier(world + 1)
        self.signals = signals
        self.stopped = None
        self.world = world

    def train(self, comm):
        pace = random.Random(self.seed * 100 + comm.rank)
        slow_s = pace.choice([0.0, 0.0005, 0.003])
        with PreemptionGuard(process_group=comm, signals=()) as guard:
            self.guards[comm.rank] = guard
            self.ready.wait()
            for step in self.steps:
                time.sleep(pace.uniform(0, slow_s))
                if self.barrier is not None:
                    self.barrier.wait(timeout=20)  # a deadlock breaks it
                if guard.reached(step):
                    assert guard.reached(step + 1)
                    return step
        return None

    def send(self):
        self.ready.wait()
        began = time.monotonic()
        for rank, at_s in sorted(self.signals, key=lambda s: s[1]):
            time.sleep(max(0.0, began + at_s - time.monotonic()))
            self.guards[rank]._signalled()

    def results(self):
        sender = threading.Thread(target=self.send)
        sender.start()
        found = run_ranks(self.world, self.train)
        sender.join()
        return found


@st.composite
def runs(draw):
    world = draw(st.integers(2, 6))
    count = draw(st.sampled_from([0, 3, 2000]))
    gaps = draw(st.lists(st.integers(1, 9), min_size=1, max_size=4))
    steps, at = [], draw(st.integers(0, 5))
    for i in range(count):
        steps.append(at)
        at += gaps[i % len(gaps)]
    moment = st.tuples(st.integers(0, world - 1), st.floats(0, 0.05))
    signals = draw(st.lists(moment, min_size=1, max_size=4))
    return Run(world, steps, draw(st.booleans()), signals, draw(st.integers(0, 10**6)))


@pytest.mark.slow
@pytest.mark.usefixtures("hurried")
def test_all_ranks_stop_at_the_same_step():
    stopped = []

    @settings(max_examples=60, deadline=None, database=None)
    @given(runs())
    def check(run):
        found = run.results()
        assert len(set(found)) == 1, found
        assert found[0] is None or found[0] in run.steps
        stopped.append(found[0])

    check()
    assert any(step is not None for step in stopped)


@pytest.mark.usefixtures("hurried")
def test_a_rank_that_is_behind_trains_on_while_the_one_ahead_waits():
    ahead = threading.Event()

    def work(comm):
        with PreemptionGuard(process_group=comm, signals=()) as guard:
            if comm.rank == 0:
                for step in range(7):
                    assert not guard.reached(step)
                ahead.set()
            ahead.wait(10)
            if comm.rank == 1:
                guard._signalled()
            wait_until(lambda: not guard._lookout._calm)
            first = 7 if comm.rank == 0 else 0
            return [step for step in range(first, 9) if guard.reached(step)]

    assert run_ranks(3, work) == [[7, 8]] * 3


@pytest.mark.usefixtures("hurried")
def test_what_a_rank_knows_and_how_much_time_it_has():
    def work(comm):
        with PreemptionGuard(20, process_group=comm, signals=()) as guard:
            before = guard.preempted, guard.seconds_left
            comm.meet(milepost.comm.Call("testing", "here").at("before"), b"", b"".join)
            if comm.rank == 2:
                guard._signalled()
            wait_until(lambda: guard.preempted)
            return before, 5 < guard.seconds_left <= 20

    assert run_ranks(3, work) == [((False, None), True)] * 3


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("gone", [0, 2])
def test_a_rank_that_leaves_with_an_error_is_named_at_once(gone):
    def work(comm):
        began = time.monotonic()
        if comm.rank == gone:
            with pytest.raises(ZeroDivisionError), PreemptionGuard(process_group=comm, signals=()) as guard:
                guard.reached(1 // 0)
            return
        with PreemptionGuard(process_group=comm, signals=()) as guard:
            guard._signalled()
            with pytest.raises(milepost.RanksMissing, match=f"rank {gone} left the guard with an error"):
                until_stopped(guard)
            assert not guard.reached(10**9)  # told once; and there is no step at which all could stop
        assert time.monotonic() - began < 10

    run_ranks(3, work)


def until_stopped(guard):
    for step in range(10**6):
        if guard.reached(step):
            return step
        time.sleep(0.001)
    return None


@pytest.mark.usefixtures("hurried")
@pytest.mark.parametrize("gone", [0, 2])
def test_absent_rank_is_named_within_the_deadline(gone):
    def work(comm):
        if comm.rank == gone:
            # As a rank does that makes its guard and dies.
            together(comm.secondary("preemption"), Call("making", "a preemption guard"), "starting", lambda: None)
            return
        with PreemptionGuard(60, process_group=comm, signals=(), timeout_s=0.5) as guard:
            if comm.rank == 1:
                guard._signalled()
            with pytest.raises(milepost.RanksMissing, match=f": rank {gone} did not") as caught:
                until_stopped(guard)
            assert "rank 1" not in str(caught.value)

    began = time.monotonic()
    run_ranks(3, work)
    assert time.monotonic() - began < 15


class Lone(BoardComm):
    """A rank whose peers made their guards, and are never heard of again."""

    def secondary(self, _):
        return self

    def meet(self, _, payload, decide):
        return decide([payload])


class BoardThatEnds(MemoryBoard):
    gone = False

    def read(self, names, timeout_s):
        if self.gone:
            raise milepost.RanksMissing("the key-value store of the job does not answer")
        return super().read(names, timeout_s)

    def named(self, name):
        del name
        return self


@pytest.mark.usefixtures("hurried")
def test_a_store_that_is_gone_is_told_by_the_next_step_once(caplog):
    board = BoardThatEnds()
    for asked in (True, False):
        board.gone = False
        with PreemptionGuard(process_group=Lone(board, 1, 2, 10), signals=()) as guard:
            assert not guard.reached(1)
            board.gone = True
            wait_until(lambda: not guard._lookout._thread.is_alive())
            if asked:
                with pytest.raises(milepost.RanksMissing, match="does not answer"):
                    guard.reached(2)
                assert not guard.reached(3)
                assert not caplog.records
    assert "could not reach the other ranks" in caplog.text


@pytest.mark.usefixtures("hurried")
def test_the_thread_ends_with_the_guard_also_while_it_waits_for_others():
    for signalled in (False, True):
        for rank in (0, 1):
            guard = PreemptionGuard(process_group=Lone(MemoryBoard(), rank, 2, 10), signals=())
            if signalled:
                guard._signalled()
                wait_until(lambda guard=guard: not guard._lookout._calm)
            began = time.monotonic()
            guard.close()
            guard.close()
            assert time.monotonic() - began < 5
            assert not guard._lookout._thread.is_alive()


def test_nothing_is_asked_of_the_store_in_a_step_and_little_in_between():
    class Counting(BoardThatEnds):
        reads = 0

        def read(self, names, timeout_s):
            self.reads += 1
            return super().read(names, timeout_s)

    board = Counting()
    with PreemptionGuard(process_group=Lone(board, 1, 2, 10), signals=()) as guard:
        began = time.monotonic()
        times = []
        for step in range(50_000):
            before = time.perf_counter()
            guard.reached(step)
            times.append(time.perf_counter() - before)
        time.sleep(0.6)
        assert 1 <= board.reads <= (time.monotonic() - began) / 0.5
    assert sorted(times)[len(times) // 2] < 10e-6
    assert preemption._Lookout(BoardComm(board, 1, 10_000, 10), 10)._pause_s == 5.0


# Signals.


@pytest.mark.usefixtures("by_hand")
def test_alone_the_first_step_after_the_signal_is_the_one():
    with PreemptionGuard(30) as guard:
        assert [guard.reached(step) for step in (1, 2)] == [False, False]
        assert (guard.preempted, guard.seconds_left) == (False, None)
        os.kill(os.getpid(), signal.SIGTERM)
        assert guard.reached(3)
        assert guard.preempted
        left = guard.seconds_left
        os.kill(os.getpid(), signal.SIGTERM)
        assert 25 < guard.seconds_left <= left
        assert guard.reached(4)


def test_a_handler_that_was_there_is_called_too_and_comes_back(by_hand):
    mine = signal.getsignal(signal.SIGTERM)
    with PreemptionGuard() as guard:
        os.kill(os.getpid(), signal.SIGTERM)
        assert by_hand == [signal.SIGTERM]
        assert guard.preempted
    assert signal.getsignal(signal.SIGTERM) is mine


@pytest.mark.usefixtures("by_hand")
@pytest.mark.parametrize("before", [signal.SIG_IGN, signal.SIG_DFL])
def test_what_a_signal_does_by_default_is_not_done_and_comes_back(before):
    signal.signal(signal.SIGTERM, before)
    guard = PreemptionGuard()
    os.kill(os.getpid(), signal.SIGTERM)
    assert guard.reached(0)
    guard.close()
    assert signal.getsignal(signal.SIGTERM) == before


@pytest.mark.usefixtures("by_hand")
def test_other_signals_can_be_taken_and_ctrl_c_is_then_no_error():
    with PreemptionGuard(signals=(signal.SIGINT, signal.SIGUSR1)) as guard:
        os.kill(os.getpid(), signal.SIGINT)
        assert guard.preempted
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


@pytest.mark.usefixtures("by_hand")
def test_a_handler_that_came_later_stays():
    def later(number, frame):
        pass

    with PreemptionGuard():
        signal.signal(signal.SIGTERM, later)
    assert signal.getsignal(signal.SIGTERM) is later


def forked_child_is_told_to_end(rank):
    with PreemptionGuard() as guard:
        ready, say_ready = os.pipe()
        child = os.fork()
        if child == 0:
            os.write(say_ready, b".")
            time.sleep(30)
            os._exit(0)
        os.read(ready, 1)  # Python forgets signals that come while it forks
        os.kill(child, signal.SIGTERM)
        _, status = os.waitpid(child, 0)
        return os.WTERMSIG(status), guard.preempted


@pytest.mark.slow
def test_a_forked_child_ends_at_the_signal_as_it_would_without_a_guard():
    assert spawn(1, forked_child_is_told_to_end) == [(signal.SIGTERM, False)]


def test_requests_that_make_no_sense_are_refused(by_hand):
    mine = signal.getsignal(signal.SIGTERM)
    for options in (
        {"grace_s": 0},
        {"grace_s": math.nan},
        {"timeout_s": -1},
        {"signals": (signal.SIGTERM, signal.SIGKILL)},
    ):
        with pytest.raises(milepost.InvalidRequest):
            PreemptionGuard(**options)
        assert signal.getsignal(signal.SIGTERM) is mine
    with pytest.raises(milepost.InvalidRequest, match="main thread"):
        run_ranks(1, lambda _: PreemptionGuard())
    with PreemptionGuard() as guard, pytest.raises(milepost.InvalidRequest, match="once"):
        guard.__enter__()
    with pytest.raises(milepost.InvalidRequest, match="closed"):
        guard.reached(1)
    with pytest.raises(milepost.InvalidRequest, match="once"), guard:
        pass
    with PreemptionGuard(process_group=Lone(MemoryBoard(), 1, 2, 10)) as guard:
        guard.reached(7)
        with pytest.raises(milepost.InvalidRequest, match="step 6 comes after step 7"):
            guard.reached(6)
        with pytest.raises(milepost.InvalidRequest, match="whole number"):
            guard.reached(7.5)


# The last save.


class Slow:
    """A save under way that is committed after some time, or fails."""

    def __init__(self, takes_s, error=None):
        self.ends, self.error = time.monotonic() + takes_s, error

    def result(self, timeout_s=None):
        left = self.ends - time.monotonic()
        time.sleep(max(0.0, min(left, timeout_s)))
        if left > timeout_s:
            raise TimeoutError
        if self.error:
            raise self.error


@pytest.mark.parametrize("signalled", [False, True])
def test_a_pending_save_is_waited_for_as_long_as_the_grace_period_lasts(caplog, signalled):
    with PreemptionGuard(0.4, signals=()) as guard:
        if signalled:
            guard._signalled()
        assert guard.finish(Slow(0.05))
        assert guard.error is None
        assert not caplog.records
        assert not guard.finish(Slow(0.0, ValueError("disk on fire")))
        assert isinstance(guard.error, ValueError)
        assert "disk on fire" in caplog.text
        began = time.monotonic()
        assert not guard.finish(Slow(30))
        assert time.monotonic() - began < 5
        assert isinstance(guard.error, TimeoutError)
        assert "TimeoutError" in caplog.text
        assert guard.finish(Slow(0))  # also once it is over: this one is committed already


def test_a_save_that_works_is_in_time_or_is_not(caplog):
    with PreemptionGuard(0.3, signals=()) as guard:
        assert guard.save(lambda: None)
        guard._signalled()
        assert guard.save(lambda: None)
        assert not guard.save(lambda: Slow(30))  # it returns, but it is not committed
        assert isinstance(guard.error, TimeoutError)
        caplog.clear()
        assert not guard.save(lambda: time.sleep(0.05))
        assert guard.error is None
        assert "took longer than the grace period" in caplog.text


def test_a_save_that_fails_is_logged_and_kept_and_ctrl_c_goes_through(caplog):
    with PreemptionGuard(signals=()) as guard:
        guard._signalled()
        assert not guard.save(lambda: 1 // 0)
        assert isinstance(guard.error, ZeroDivisionError)
        assert "the save is not committed" in caplog.text
        assert guard.save(lambda: None)
        assert guard.error is None

        def interrupted():
            raise KeyboardInterrupt

        with pytest.raises(KeyboardInterrupt):
            guard.save(interrupted)


# Real ranks.


def train_until_preempted(rank, folder, victim):
    state = {"w": torch.zeros(8), "step": 0}
    with milepost.Checkpointer(folder) as keeper, PreemptionGuard(30) as guard:
        for step in range(10_000):
            mine = torch.ones(8)
            dist.all_reduce(mine)
            state["w"] += mine
            state["step"] = step
            if rank == victim and step == 20:
                os.kill(os.getpid(), signal.SIGTERM)
            if guard.reached(step):
                return step, guard.save(lambda: keeper.save(state, step))  # noqa: B023
            time.sleep(0.002 * rank)
    return None


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 3])
def test_one_of_four_real_ranks_is_signalled_and_all_save_the_same_step(tmp_path, victim):
    found = spawn(4, train_until_preempted, tmp_path, victim)
    step, _ = found[0]
    assert found == [(step, True)] * 4
    assert step > 20
    checkpoint = milepost.open(tmp_path / f"step-{step:010}")
    assert torch.equal(checkpoint["w"].read(), torch.full((8,), 4.0 * (step + 1)))
    loaded = {"w": torch.zeros(8), "step": 0}
    assert milepost.Checkpointer(tmp_path).restore(loaded) == step
    assert loaded["step"] == step


def train_without_one_that_died(rank):
    with PreemptionGuard(8, timeout_s=2) as guard:
        if rank == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        if rank == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        try:
            return until_stopped(guard)
        except milepost.RanksMissing as error:
            return str(error)


@pytest.mark.slow
def test_a_real_rank_that_died_is_named_within_the_grace_period():
    began = time.monotonic()
    found = spawn_outcomes(3, train_without_one_that_died)
    assert time.monotonic() - began < 15
    assert found[1] is None
    for outcome in (found[0], found[2]):
        assert outcome[0]
        assert "rank 1 did not report" in outcome[1]
