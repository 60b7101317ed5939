"""After ranks lost each other, the same call at the same place works: the ranks join again."""

import contextlib
import threading
import time

import pytest
import torch

import milepost
from milepost.comm import BoardComm, Call, Channel, MemoryBoard, calling, together
from milepost.comm.channel import Presence
from milepost.testing import TroubledComm, run_ranks
from tests.ranks import spawn

WORLD, TIMEOUT_S = 3, 0.5
LATE_S = 2.5 * TIMEOUT_S
SAVE = ["starting", "describing the state", "writing"]
LOAD = ["opening", "matching", "applying"]


def until_it_works(comm, call, tries=6):
    """Call again at the same place until it works. Gives the errors on the way."""
    met = []
    for _ in range(tries):
        try:
            call(comm)
        except milepost.CheckpointError as error:
            met.append(error)
        else:
            return met
    raise AssertionError(f"rank {comm.rank} never succeeded: {met}")


def once(act):
    """A hook that acts the first time only."""
    todo = [act]
    return lambda: todo.pop()() if todo else None


def vanish():
    raise MemoryError("left without a word")


def save_here(store, number):
    return lambda comm: milepost.save({"n": number, "t": torch.full((4,), number)}, store, process_group=comm)


def load_here(store, number):
    def load(comm):
        assert milepost.load({"n": 0, "t": torch.zeros(4, dtype=torch.int64)}, store, process_group=comm)["n"] == number

    return load


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", SAVE + LOAD)
def test_the_same_call_works_after_a_rank_was_late_in_any_step(victim, step):
    store = milepost.store.MemoryStore()
    milepost.save({"n": 1, "t": torch.full((4,), 1)}, store)
    call = save_here(store, 2) if step in SAVE else load_here(store, 1)
    trouble = {victim: {step: once(lambda: time.sleep(LATE_S))}}
    began = time.monotonic()
    met = run_ranks(WORLD, lambda comm: until_it_works(comm, call), TIMEOUT_S, trouble)
    assert any(isinstance(error, milepost.RanksMissing) for errors in met for error in errors)
    assert all(len(errors) <= 3 for errors in met)
    assert time.monotonic() - began < 8 * LATE_S
    assert milepost.open(store)["n"] == (2 if step in SAVE else 1)


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("late_s", [1.2 * TIMEOUT_S, 2.5 * TIMEOUT_S])
def test_the_same_call_works_after_a_rank_skipped_one(victim, late_s):
    store = milepost.store.MemoryStore()

    def work(comm):
        save_here(store, 1)(comm)
        if comm.rank == victim:
            time.sleep(late_s)  # the others give up on it
        else:
            with pytest.raises(milepost.CheckpointError):
                save_here(store, 2)(comm)
        met = until_it_works(comm, save_here(store, 3))
        save_here(store, 4)(comm)
        return len(met)

    assert all(count <= 2 for count in run_ranks(WORLD, work, TIMEOUT_S))
    assert milepost.open(store)["n"] == 4


@pytest.mark.parametrize("victim", [0, 1])
@pytest.mark.parametrize("step", ["describing the state", "writing"])
def test_ctrl_c_while_waiting_is_told_at_once_and_the_next_call_works(victim, step):
    store = milepost.store.MemoryStore()

    class Waiting(TroubledComm):
        """Ctrl-C arrives while this rank waits for the others in a step."""

        interrupted = False

        def meet(self, phase, payload, decide):
            if phase.step != step or self.interrupted:
                return self._inner.meet(phase, payload, decide)
            self.interrupted = True
            raise KeyboardInterrupt

    def work(comm):
        if comm.rank == victim:
            comm = Waiting(comm, {})
            with pytest.raises(KeyboardInterrupt):
                save_here(store, 1)(comm)
        else:
            with pytest.raises(milepost.CheckpointError) as caught:
                save_here(store, 1)(comm)
            assert [f.kind for f in caught.value.failures.values()] == ["KeyboardInterrupt"]
        save_here(store, 2)(comm)

    began = time.monotonic()
    run_ranks(WORLD, work, 30.0)
    assert time.monotonic() - began < 10
    assert milepost.open(store)["n"] == 2


@pytest.mark.parametrize("victim", [0, 1])
def test_what_a_rank_meets_between_two_steps_reaches_all_at_once(victim):
    """Nothing may leave a call in silence: the others would wait until the deadline."""
    call = Call("testing", "here")

    def work(comm):
        def steps():
            with calling(comm, call):
                together(comm, call, "first", bytes)
                if comm.rank == victim:
                    raise ZeroDivisionError("between")
                together(comm, call, "second", bytes)

        with pytest.raises(ZeroDivisionError if comm.rank == victim else milepost.CheckpointError, match="between"):
            steps()
        together(comm, call, "again", bytes)

    began = time.monotonic()
    run_ranks(WORLD, work, 30.0)
    assert time.monotonic() - began < 10


@pytest.mark.parametrize("odd", [0, 1])
@pytest.mark.parametrize("kind", ["path", "step", "no path"])
def test_ranks_with_other_arguments_are_told_on_all_ranks_at_once(tmp_path, odd, kind):
    def work(comm):
        run = milepost.Checkpointer(tmp_path, process_group=comm)
        where = tmp_path / ("odd" if comm.rank == odd and kind == "path" else "even")
        calls = {
            "path": lambda: milepost.save({"n": 1}, where, process_group=comm),
            "step": lambda: run.save({"n": 1}, -1 if comm.rank == odd else 7),
            "no path": lambda: milepost.load({"n": 1}, None if comm.rank == odd else where, process_group=comm),
        }
        milepost.save({"n": 0}, tmp_path / "even", process_group=comm)
        with pytest.raises(milepost.CheckpointError) as caught:
            calls[kind]()
        milepost.save({"n": 2}, tmp_path / "even", process_group=comm)
        run.save({"n": 2}, 8)
        return str(caught.value)

    began = time.monotonic()
    texts = run_ranks(WORLD, work, 30.0)
    assert time.monotonic() - began < 10
    assert milepost.open(tmp_path / "even")["n"] == 2
    if kind == "path":
        assert all("Do all ranks make the same calls" in text for text in texts)
    else:
        assert all(f"rank {odd}" in texts[rank] for rank in range(WORLD) if rank != odd)


def test_late_rank_still_hears_the_end_of_the_call_before():
    """It was in time for that: its outcome is not replaced by the verdict on the next call."""
    board, heard, slept = MemoryBoard(), {}, threading.Event()

    class Slow(MemoryBoard):
        """The board as rank 1 sees it: it falls asleep before it reads the outcome of its first meeting."""

        def read(self, names, timeout_s):
            if names == ["1/all"] and timeout_s and not slept.is_set():
                slept.set()
                time.sleep(LATE_S)
            return board.read(names, timeout_s)

        def __getattribute__(self, name):
            own = ("read", "__class__")
            return object.__getattribute__(self, name) if name in own else getattr(board, name)

    def work(rank):
        comm = BoardComm(Slow() if rank == 1 else board, rank, 2, TIMEOUT_S)
        for number in (1, 2):
            with contextlib.suppress(milepost.RanksMissing):
                together(comm, Call("saving to", "here"), f"step {number}", bytes)
                heard.setdefault(rank, []).append(number)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert heard == {0: [1], 1: [1]}


def join_all(board, versions=(None, None), stale=None, timeout_s=5.0):
    """Two ranks that join, each as a new process would: what each raised, or the number of notes that are left."""
    found = {}

    def work(rank):
        channel = Channel(board, rank, 2, fresh=False)
        comm = BoardComm(board, rank, 2, timeout_s, channel=channel)
        try:
            together(comm, Call("saving to", "here"), "writing", bytes)
            found[rank] = "met"
        except milepost.CheckpointError as error:
            found[rank] = str(error)

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return found


def test_new_processes_do_not_meet_the_notes_of_dead_ones():
    """A job that is started again in the same store finds what its predecessor left there, at every moment."""
    board = MemoryBoard()
    for death_s in (0.0, 0.02, 0.05, 0.1):
        dead = BoardComm(board, 1, 2, death_s, channel=Channel(board, 1, 2, fresh=False))
        with pytest.raises(milepost.RanksMissing):
            together(dead, Call("loading", "here"), "opening", bytes)
        board.pin("hello/1", b"0123456789abcdef")  # what a killed process leaves
        board.pin("1/all", b"." + b"stale!" + b"stale")
        board.count("count/0", 3)
        assert join_all(board) == {0: "met", 1: "met"}


def test_new_processes_are_not_told_that_dead_ones_came_too_late():
    """Rank 1 was dead, rank 0 gave up, and both were started again: the verdict was on the dead process."""
    board = MemoryBoard()
    alone = BoardComm(board, 0, 2, 0.1, channel=Channel(board, 0, 2, fresh=False))
    with pytest.raises(milepost.RanksMissing):
        together(alone, Call("saving to", "here"), "writing", bytes)
    assert join_all(board) == {0: "met", 1: "met"}


def test_ranks_of_different_versions_are_told_so(monkeypatch):
    seen = iter(["0.1.0", "0.2.0"])
    monkeypatch.setattr("milepost.comm.channel.Presence", lambda wire, calls, _: Presence(wire, calls, next(seen)))
    found = join_all(MemoryBoard())
    assert all("different versions of Milepost" in text and "0.2.0" in text for text in found.values())


def test_the_board_stays_as_it_is_over_many_calls_and_channels():
    board = MemoryBoard()
    kept = {}

    def work(rank):
        comm = BoardComm(board, rank, 2, 20, channel=Channel(board, rank, 2, fresh=False))
        for number in range(60):
            beside = comm.secondary("a")
            for _ in range(number):
                beside.announce(Call("a", "b").at("c"), b"" if rank == 0 else None)
            together(beside, Call("a", "b"), "d", bytes)
            beside.close()
        kept[rank] = comm

    threads = [threading.Thread(target=work, args=(rank,)) for rank in (0, 1)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    boards = [board, *board._named.values()]
    assert sum(len(one._notes) + len(one._counts) for one in boards) < 12


def one_is_late(rank, where, victim):
    """A rank comes to its first save after the others gave up, and all try again at the same place."""
    if rank == victim:
        time.sleep(3.0)
    met = 0
    for _ in range(5):
        try:
            milepost.save({"n": 1, "t": torch.ones(4)}, where, timeout_s=2.0)
        except milepost.CheckpointError:
            met += 1
        else:
            return met
    return "never"


@pytest.mark.slow
@pytest.mark.parametrize("victim", [0, 1])
def test_real_ranks_save_at_the_same_place_after_a_missed_deadline(tmp_path, victim):
    met = spawn(2, one_is_late, str(tmp_path / "here"), victim)
    assert all(isinstance(count, int) and count <= 2 for count in met)
    assert milepost.open(tmp_path / "here")["n"] == 1


@pytest.mark.slow
@pytest.mark.parametrize("late_s", [1.5 * TIMEOUT_S, 2.5 * TIMEOUT_S, 4.5 * TIMEOUT_S])
@pytest.mark.parametrize("victim", [0, 1])
def test_a_late_rank_does_not_take_part_in_a_later_call_of_the_others(victim, late_s):
    """It may hold the state of an earlier step. All shards would be valid, and the checkpoint a mixture."""
    store, seen = milepost.store.MemoryStore(), []

    def work(comm):
        for number in range(1, 9):
            if number == 2 and comm.rank == victim:
                time.sleep(late_s)  # comes to its second call while the others wait in a later one
            half = milepost.Sharded((WORLD,), {(comm.rank,): torch.full((1,), float(number))})
            try:
                milepost.save({"w": half}, store, process_group=comm)
            except milepost.CheckpointError:
                continue
            if comm.rank == 0:
                seen.append(milepost.open(store)["w"].read().tolist())

    run_ranks(WORLD, work, TIMEOUT_S)
    assert seen[0] == [1.0] * WORLD
    assert all(len(set(values)) == 1 for values in seen)
    assert seen[-1] == [8.0] * WORLD
