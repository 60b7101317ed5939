"""Interrupts: whatever ends a call that saves in the background, what is there is whole, and the next call works.

Exceptions are raised at every line of Milepost that the call runs, by a trace function, and at random moments by real
signals, again and again, so that they also hit the code that cleans up.
"""

import contextlib
import os
import random
import signal
import sys
import threading
import time

import pytest
import torch

import milepost
import milepost.dcp
from milepost.store import LocalStore
from tests.background.saves import PROMPT_S, TIMEOUT_S
from tests.interrupts import SOURCE, Interrupt, interrupted_at
from tests.ranks import spawn

SIZE = 50_000
PARTS = 6


@contextlib.contextmanager
def storm(seed, most=6):
    """Real signals at random moments from now on. The first ones raise, if Milepost is at work; the rest do nothing."""
    chance, raised = random.Random(seed), []

    def at_work(frame):
        return frame is not None and (frame.f_code.co_filename.startswith(SOURCE) or at_work(frame.f_back))

    def handle(_, frame):
        if len(raised) < most and at_work(frame):
            raised.append(1)
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))
            raise Interrupt
        if len(raised) < most:
            signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 1e-3))

    unraisable, sys.unraisablehook = sys.unraisablehook, id  # one may come in a destructor, where nothing can catch it
    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, chance.uniform(1e-5, 0.01))
    try:
        yield
    finally:
        raised.extend([1] * most)
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)
        sys.unraisablehook = unraisable


def state_of(value):
    return {"w": [torch.full((SIZE,), float(value)) for _ in range(PARTS)], "step": value}


def value_at(place):
    """The value of the checkpoint. All of it must be of one state."""
    loaded = milepost.load({"w": [torch.zeros(SIZE) for _ in range(PARTS)], "step": 0}, place, process_group=ALONE)
    found = {float(x) for tensor in loaded["w"] for x in (tensor.min(), tensor.max())}
    assert found == {float(loaded["step"])}, found
    return loaded["step"]


ALONE = milepost.comm.Solo()


def spoil(state):
    for tensor in state["w"]:
        tensor.fill_(-1.0)


def open_fds():
    return len(os.listdir("/proc/self/fd"))


WAYS = {
    "saver": lambda saver, state, place: saver.save(state, place),
    "overlap": lambda saver, state, place: saver.save(state, place, stage="overlap"),
    "in part": lambda saver, state, place: saver.save(state, place),
    "planner": lambda saver, state, place: saver.save(state, place, planner=milepost.planning.DefaultSavePlanner()),
    "function": lambda _, state, place: milepost.async_save(state, place),
    "dcp": lambda _, state, place: milepost.dcp.async_save(state, checkpoint_id=place, no_dist=True),
}


def attempt(call, raising):
    """The save that a call gives, or None if it was interrupted."""
    try:
        with raising:
            return call()
    except Interrupt:
        return None


@pytest.mark.slow
@pytest.mark.parametrize(("way", "background"), [*((way, "thread") for way in WAYS), ("saver", "process")])
def test_interrupt_at_any_line_leaves_one_state(tmp_path, way, background):
    """Before, the call was left while the background read the state, and the mixture was committed."""
    budget = 2 * SIZE * 4 if way == "in part" else None
    with milepost.AsyncSaver(background=background, staging_bytes=budget) as saver:
        call = WAYS[way]
        saver.save(state_of(0), tmp_path).result(TIMEOUT_S)
        number, step, ended, chance = 1, 1, False, random.Random(1)
        while not ended:
            state = state_of(step)
            with interrupted_at(number) as lines:
                pending = attempt(lambda state=state: call(saver, state, tmp_path), contextlib.nullcontext())
            ended = len(lines) < number
            if pending is None:
                spoil(state)
            saver.join()
            milepost.close_async() if way == "function" and step % 20 == 0 else None
            if pending is not None:
                pending.result(TIMEOUT_S)
            step += 1
            number += chance.randrange(1, 16 if background == "thread" else 30)
            assert value_at(tmp_path) <= step
        last = call(saver, state_of(step), tmp_path)
        last.result(TIMEOUT_S)
        assert value_at(tmp_path) == step
        assert number > 60, "the trace function saw too little"
    milepost.close_async()


@pytest.mark.slow
@pytest.mark.parametrize("background", ["thread", "process"])
def test_storm_of_signals_leaves_one_state_and_no_locks(tmp_path, background):
    start, stopped = time.monotonic(), 0
    with milepost.AsyncSaver(background=background) as saver:
        saver.save(state_of(0), tmp_path).result(TIMEOUT_S)
        fds, threads = open_fds(), threading.active_count()
        for step in range(1, 50):
            state, pending = state_of(step), None
            with contextlib.suppress(Interrupt), storm(step):
                pending = saver.save(state, tmp_path, stage=("host", "overlap")[step % 2])
                pending.wait_staged()
                pending = None
                time.sleep(0.02)
            if pending is not None:
                stopped += 1
            if pending is None or pending.staged():
                spoil(state)
            saver.join()
            assert value_at(tmp_path) in range(step + 1)
            with contextlib.suppress(milepost.SaveCancelled):
                saver.wait()
        assert saver.save(state_of(200), tmp_path).result(TIMEOUT_S)
        assert value_at(tmp_path) == 200
        assert (open_fds(), threading.active_count()) == (fds, threads)
    assert time.monotonic() - start < PROMPT_S


class SlowCopier:
    """Copies one tensor, and the others when told."""

    def __init__(self, copier, monkeypatch):
        self.reached, self.go, self.reading = threading.Event(), threading.Event(), True
        copy = type(copier).copy

        def slow(copies, moment, check):
            copy(copier, copies[:1], moment, check)
            self.reached.set()
            while not self.go.wait(0.01):
                check()
            copy(copier, copies[1:], moment, check)

        monkeypatch.setattr(copier, "copy", slow)


@pytest.mark.parametrize("where", ["call", "wait_staged", "step"])
def test_ctrl_c_stops_a_copy_before_it_is_raised(tmp_path, where, monkeypatch):
    state = state_of(1)
    optimizer = torch.optim.SGD([torch.nn.Parameter(tensor) for tensor in state["w"]], lr=1.0)
    with milepost.AsyncSaver() as saver:
        saver.save(state_of(0), tmp_path).result(TIMEOUT_S)
        with monkeypatch.context() as patched:
            copier = SlowCopier(saver._engine.stager.copier, patched)

            def interrupt():
                assert copier.reached.wait(TIMEOUT_S)
                time.sleep(0.5)  # until the caller waits: between two calls it would only end the program
                os.kill(os.getpid(), signal.SIGINT)

            threading.Thread(target=interrupt).start()
            with pytest.raises(KeyboardInterrupt):  # noqa: PT012  # whichever of them waits
                if where == "call":
                    saver.save(state, tmp_path, stage="host")
                pending = saver.save(state, tmp_path, stage="overlap", optimizer=optimizer)
                if where == "wait_staged":
                    pending.wait_staged()
                optimizer.step()
            spoil(state)
            copier.go.set()
            saver.join()
        assert value_at(tmp_path) == 0
        assert saver.save(state_of(2), tmp_path).result(TIMEOUT_S).generation == 2
        assert value_at(tmp_path) == 2


def test_a_call_that_ended_without_clean_up_is_withdrawn(tmp_path):
    """A second interrupt can hit the clean-up itself, and its frames live on in a traceback."""
    from milepost.background.ticket import Ticket

    with milepost.AsyncSaver() as saver, pytest.MonkeyPatch.context() as patched:
        saver.save(state_of(0), tmp_path).result(TIMEOUT_S)
        state = state_of(1)
        patched.setattr(Ticket, "release", fail)
        patched.setattr(Ticket, "leave", fail)
        try:
            saver.save(state, tmp_path)
        except Interrupt as error:
            kept = error
        spoil(state)
        patched.undo()
        assert isinstance(saver._engine.current.exception(TIMEOUT_S), milepost.SaveCancelled)
        assert value_at(tmp_path) == 0
        assert saver.save(state_of(2), tmp_path).result(TIMEOUT_S).generation == 2
        del kept


def fail(*_):
    raise Interrupt


def interrupt_one_rank(rank, folder, background, seconds):
    """Rank 0 and 1 in turn are interrupted at a random line. Gives how many saves were stopped, and the slowest."""
    chance, stopped, slowest = random.Random(5), 0, 0.0
    from torch import distributed as dist

    with milepost.AsyncSaver(background=background, timeout_s=TIMEOUT_S) as saver:
        saver.save(state_of(0), folder).result(TIMEOUT_S)
        step, end = 0, time.monotonic() + seconds
        while True:
            step += 1
            number = chance.randrange(1, 200)
            state, victim, start = state_of(step), step % 2, time.monotonic()
            pending = None
            try:
                if rank == victim:
                    with interrupted_at(number, after="_make_room"):  # the call has begun
                        pending = saver.save(state, folder)
                else:
                    pending = saver.save(state, folder)
            except Interrupt:
                spoil(state)
            error = pending.exception(TIMEOUT_S) if pending else None
            assert error is None or isinstance(error, milepost.SaveCancelled), error
            saver.join()
            slowest = max(slowest, time.monotonic() - start)
            stopped += rank == victim and pending is None
            agreed = torch.tensor([int(time.monotonic() > end)])
            dist.broadcast(agreed, 0)
            if rank == 0:
                assert value_at(folder) <= step
            if agreed.item():
                break
        assert saver.save(state_of(step + 1), folder).result(TIMEOUT_S)
    return stopped, slowest


@pytest.mark.slow
@pytest.mark.parametrize("background", ["thread", "process"])
def test_interrupt_on_one_rank_stops_the_save_of_all(tmp_path, background):
    results = spawn(2, interrupt_one_rank, tmp_path, background, 1.5)
    for stopped, slowest in results:
        assert stopped > 1
        assert slowest < PROMPT_S
    assert value_at(tmp_path) > 3


def test_change_during_a_copy_fails_the_save(tmp_path, monkeypatch):
    state = state_of(1)
    with milepost.AsyncSaver() as saver:
        saver.save(state_of(0), tmp_path).result(TIMEOUT_S)
        with monkeypatch.context() as patched:
            copier = SlowCopier(saver._engine.stager.copier, patched)
            pending = saver.save(state, tmp_path, stage="overlap")
            assert copier.reached.wait(TIMEOUT_S)
            state["w"][-1].add_(1.0)
            copier.go.set()
            with pytest.raises(milepost.InvalidState, match=rf"'w.{PARTS - 1}' changed while"):
                pending.result(TIMEOUT_S)
        assert value_at(tmp_path) == 0


def test_step_that_a_graph_may_replay_is_not_overlapped(tmp_path):
    """A replay runs no hook: what such an optimizer owns is copied before the call returns."""
    state = state_of(1)
    parameters = [torch.nn.Parameter(tensor) for tensor in state["w"]]
    for capturable in (False, True):
        optimizer = torch.optim.Adam(parameters, capturable=capturable)
        with milepost.AsyncSaver() as saver, pytest.MonkeyPatch.context() as patched:
            copier = SlowCopier(saver._engine.stager.copier, patched)
            threading.Timer(0.2, copier.go.set).start()
            pending = saver.save(state, tmp_path, stage="overlap", optimizer=optimizer)
            assert pending.staged() is capturable
            pending.result(TIMEOUT_S)


def test_store_is_not_asked_after_an_interrupt(tmp_path):
    """The save ends before it writes: nothing of it is left at the place."""
    with milepost.AsyncSaver() as saver:
        saver.save(state_of(0), LocalStore(tmp_path)).result(TIMEOUT_S)
        before = sorted(tmp_path.rglob("*"))
        state = state_of(1)
        with contextlib.suppress(Interrupt), interrupted_at(90):
            saver.save(state, LocalStore(tmp_path))
        saver.join()
        assert sorted(tmp_path.rglob("*")) == before
