"""The life of a saver: saves in turn, cancelled saves, callbacks, and the end of the interpreter."""

import os
import signal
import subprocess
import sys
import threading

import pytest
import torch

import milepost
from milepost.core.limits import MIB
from milepost.store import LocalStore
from milepost.testing import CountingStore
from tests.background.saves import TIMEOUT_S, GatedStore, Team, come_to, files_in, shared_state
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


# ---------------------------------------------------------------- two at once, and one that is called off


def test_a_second_save_waits_for_the_first(saver, tmp_path):
    store = GatedStore(tmp_path / "first", tmp_path / "gate")
    state = {"t": torch.ones(1000), "step": [1]}
    first = saver.save(state, store)
    first.wait_staged(TIMEOUT_S)
    assert repr(first).endswith("writing)")
    with pytest.raises(TimeoutError, match="has not ended after"):
        first.result(0.05)
    with pytest.raises(TimeoutError):
        first.exception(0.05)
    state["t"].fill_(2)
    state["step"].append(2)
    store.open_after(0.3)
    second = saver.save(state, tmp_path / "second")
    assert first.done()
    state["t"].fill_(3)
    second.result(TIMEOUT_S)
    assert repr(second).endswith("saved)")
    for place, value, steps in (("first", 1, [1]), ("second", 2, [1, 2])):
        with milepost.open(tmp_path / place) as checkpoint:
            assert checkpoint["t"].read().unique().tolist() == [value]
            assert checkpoint["step"] == steps


@pytest.mark.parametrize("slow", [0, 2])
def test_refused_save_is_refused_on_all_ranks(tmp_path, slow):
    """The coordinator's own word counts: where another rank is slower, that one waits."""
    team, go = Team("thread", 3, when_busy="refuse"), threading.Event()

    def work(saver, rank):
        if rank == slow:
            real = saver._engine._save
            saver._engine._save = lambda *work: (real(*work), go.wait(TIMEOUT_S))[0]
        first = saver.save({"t": torch.ones(3)}, tmp_path / "first")
        if rank != slow:
            first.result(TIMEOUT_S)
        if slow != 0 and rank == slow:
            threading.Timer(0.3, go.set).start()
        try:
            saver.save({"t": torch.ones(3)}, tmp_path / "second").result(TIMEOUT_S)
        except milepost.SaveInFlight as error:
            return str(error)
        return "saved"

    for result in team.run(work):
        assert f"the save to {tmp_path / 'first'} is under way" in result if slow == 0 else result == "saved"
    go.set()
    team.run(lambda saver, _: saver.wait())
    team.run(lambda saver, _: saver.save({"t": torch.ones(3)}, tmp_path / "third").result(TIMEOUT_S))
    team.close()


@pytest.mark.parametrize("when", ["staging", "writing"])
def test_one_rank_can_cancel_for_all(team, tmp_path, when, monkeypatch):
    place, world = tmp_path / "place", team.world
    team.run(lambda saver, rank: saver.save(shared_state(rank, world), place).result(TIMEOUT_S))
    before, canceller = files_in(place), world - 1
    store = GatedStore(place, tmp_path / "gate")

    def slow(*_):
        come_to(store.gate)

    def work(saver, rank):
        pending = saver.save(shared_state(rank, world), store, stage="overlap")
        if rank != canceller:
            return pending.exception(TIMEOUT_S)
        store.wait_reached()
        store.open_after(0.4)
        return pending.cancel(TIMEOUT_S), saver._engine.current.exception()

    with monkeypatch.context() as patched:
        if when == "staging":
            patched.setattr(team.savers[canceller]._engine.stager.copier, "copy", slow)
        results = team.run(work)
    told, own = results.pop(canceller)
    assert told is True
    for error in [*results, own]:
        assert isinstance(error, milepost.SaveCancelled)
        assert list(error.failures) == [canceller]
    assert files_in(place) == before

    def too_late(saver, rank):
        pending = saver.save(shared_state(rank, world), place)
        pending.result(TIMEOUT_S)
        return pending.cancel()

    assert team.run(too_late) == [False] * world
    assert milepost.open(place).generation == 2


def test_a_save_that_is_cancelled_alone_leaves_nothing(saver, tmp_path):
    store = GatedStore(tmp_path / "place", tmp_path / "gate")
    pending = saver.save({"t": torch.ones(3)}, store)
    store.wait_reached()
    with pytest.raises(TimeoutError, match="has not ended"):
        pending.cancel(0.3)
    store.gate.touch()
    assert pending.cancel(TIMEOUT_S) is True
    with pytest.raises(milepost.SaveCancelled):
        pending.result()
    assert not files_in(tmp_path / "place")
    saver.save({"t": torch.ones(3)}, tmp_path / "place").result(TIMEOUT_S)


# ---------------------------------------------------------------- the life of a saver


def test_a_closed_saver_has_waited_and_freed_its_memory_and_takes_no_more(tmp_path):
    store = GatedStore(tmp_path / "place", tmp_path / "gate")
    saver = milepost.AsyncSaver()
    pending = saver.save({"t": torch.ones(1000)}, store)
    arena = saver._engine.stager.arena
    assert arena.capacity
    store.open_after(0.2)
    saver.close()
    assert pending.done()
    assert not arena.capacity
    saver.close()
    for call in (lambda: saver.save({}, tmp_path), lambda: saver.prewarm({}), saver.wait):
        with pytest.raises(milepost.InvalidRequest, match="closed"):
            call()
    assert milepost.open(tmp_path / "place")["t"].read().sum() == 1000


def test_a_saver_that_gets_no_thread_saves_in_front_and_says_so(tmp_path, monkeypatch, caplog):
    saver, start = milepost.AsyncSaver(), threading.Thread.start

    def refused(thread):
        if thread.name == "milepost-save":
            raise RuntimeError("can't start new thread")
        start(thread)

    with monkeypatch.context() as patched:
        patched.setattr(threading.Thread, "start", refused)
        pending = saver.save({"t": torch.ones(3)}, tmp_path)
        assert pending.done()
        assert pending.result(TIMEOUT_S).generation == 1
    assert "in the foreground" in caplog.text
    assert saver.save({"t": torch.ones(3)}, tmp_path).result(TIMEOUT_S).generation == 2
    saver.close()


def test_fork_of_the_trainer_leaves_its_saves_alone(tmp_path):
    go_on, inner = threading.Event(), LocalStore(tmp_path)

    class Held(CountingStore):
        def before(self, number, call):
            if call.startswith("create manifest"):
                assert go_on.wait(TIMEOUT_S)

    saver = milepost.AsyncSaver()
    pending = saver.save({"t": torch.ones(3)}, Held(inner))
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(10)  # where it hangs, it must not hang for ever
            saver.join()
            try:
                saver.save({"t": torch.zeros(3)}, tmp_path)
            except milepost.InvalidRequest as error:
                code = 0 if "fork" in str(error) else 2
            saver.close()
        finally:
            os._exit(code)
    assert os.waitpid(child, 0)[1] == 0
    go_on.set()
    assert pending.result(TIMEOUT_S).generation == 1
    saver.close()


def test_after_prewarm_a_save_makes_no_memory(saver, tmp_path):
    arena = saver._engine.stager.arena
    state = {"t": torch.ones(arena.capacity // 4 + MIB), "u": random_tensor("int8", 999)}
    version = arena.version
    saver.prewarm(state)
    assert arena.version == version + 1
    writers = saver._engine.processes and saver._engine.processes.writers
    saver.save(state, tmp_path).result(TIMEOUT_S)
    assert arena.version == version + 1
    assert (saver._engine.processes and saver._engine.processes.writers) is writers


def test_callbacks_are_called_when_it_has_ended(saver, tmp_path):
    store, calls = GatedStore(tmp_path / "place", tmp_path / "gate"), []
    pending = saver.save({"t": torch.ones(3)}, store)
    called = threading.Event()
    pending.add_done_callback(lambda ended: calls.append((ended, ended.done(), threading.current_thread().name)))
    pending.add_done_callback(lambda _: called.set())
    assert not calls
    store.gate.touch()
    assert called.wait(TIMEOUT_S)
    assert calls == [(pending, True, "milepost-save")]
    pending.add_done_callback(lambda ended: calls.append(ended))
    assert calls[-1] is pending


def test_progress_is_told_and_cannot_stop_the_work(saver, tmp_path):
    """In a process, a callback that raised once ended the save for the trainer, while the process went on with it."""
    told = []
    state = {"t": torch.ones(2 * MIB)}
    receipt = saver.save(state, tmp_path, progress=told.append).result(TIMEOUT_S)
    assert told[-1].finished
    assert told[-1].total_bytes == receipt.data_bytes == 8 * MIB
    assert [p.done_bytes for p in told] == sorted(p.done_bytes for p in told)

    def broken(progress):
        raise ValueError("no screen")

    assert saver.save(state, tmp_path, progress=broken).result(TIMEOUT_S).generation == 2
    assert milepost.open(tmp_path).generation == 2


# ---------------------------------------------------------------- the end of the interpreter


PROGRAM = """
import sys, time, torch, milepost
from milepost.comm import BoardComm, MemoryBoard

place, how, background = sys.argv[1:]

class Slow(milepost.store.LocalStore):
    def writer(self, name, size_bytes, *, direct=True):
        time.sleep(0.5)
        if how == "fails":
            raise milepost.StorageError("No space left on device")
        return super().writer(name, size_bytes, direct=direct)

state = {"t": torch.arange(100_000.0), "step": [1]}
options = {"process_group": BoardComm(MemoryBoard(), 0, 2, 3.0), "timeout_s": 3.0} if how == "dead peer" else {}
store = Slow(place) if background == "thread" else place
milepost.async_save(state, store, background=background, **options)
state["t"].zero_()
state["step"].append(2)
print("end", flush=True)
"""


@pytest.mark.slow
def test_interpreter_exit_waits_for_the_save_and_logs_unread_errors(tmp_path):
    runs = [("works", "thread"), ("works", "process"), ("fails", "thread"), ("dead peer", "thread")]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(sys.path)}
    programs = {}
    for how, background in runs:
        command = [sys.executable, "-c", PROGRAM, str(tmp_path / how / background), how, background]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True}
        programs[how, background] = subprocess.Popen(command, env=environment, **pipes)
    for (how, background), program in programs.items():
        out, err = program.communicate(timeout=TIMEOUT_S)
        place = tmp_path / how / background
        assert (program.returncode, out) == (0, "end\n"), err
        if how == "works":
            assert not err
            with milepost.open(place) as checkpoint:
                assert torch.equal(checkpoint["t"].read(), torch.arange(100_000.0))
                assert checkpoint["step"] == [1]
                assert checkpoint.verify().ok
        else:
            assert f"the save to {place} failed in the background" in err
            assert ("No space left" if how == "fails" else "rank 1 did not come") in err
            assert "Traceback" in err
            assert not files_in(place)
