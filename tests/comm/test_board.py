"""Ranks that talk through a board: exchange, deadlines, late ranks, and ranks that make different calls."""

import threading
import time

import pytest

import milepost
from milepost.comm import (
    Announcement,
    BoardComm,
    Bytes,
    Call,
    Meeting,
    MemoryBoard,
    Solo,
    broadcast,
    calling,
    depart,
    meet,
    together,
)
from milepost.comm.base import Comm
from milepost.testing import run_ranks

CALL = Call("saving to", "somewhere")
TELLING = Announcement("telling", Bytes())
JOINING = Meeting("meeting", Bytes(), Bytes())
MEETING = CALL.at("meeting")


def phase(step):
    return CALL.at(str(step))


def test_coordinator_hears_all_in_order_and_every_rank_hears_it():
    for world in (1, 2, 7, 64):
        results = run_ranks(
            world, lambda comm: [comm.meet(phase(i), bytes([comm.rank, i]), b"|".join) for i in range(3)]
        )
        assert results == [[b"|".join(bytes([r, i]) for r in range(world)) for i in range(3)]] * world


def test_any_rank_can_be_the_coordinator():
    board = MemoryBoard()
    heard = {}

    def work(rank, lead):
        comm = BoardComm(board, rank, 4, 10, coordinator=lead)
        note = broadcast(comm, CALL, TELLING, lambda: f"from {lead}".encode())
        heard[rank] = note, meet(comm, CALL, JOINING, lambda: bytes([rank]), b"".join)

    for lead in range(4):
        threads = [threading.Thread(target=work, args=(r, lead)) for r in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert heard == dict.fromkeys(range(4), (f"from {lead}".encode(), bytes(range(4))))


def test_the_board_does_not_fill_up():
    board = MemoryBoard()

    def work(rank):
        comm = BoardComm(board, rank, 4, 10)
        for i in range(50):
            comm.announce(phase("telling"), b"y" * 100 if rank == 0 else None)
            comm.meet(phase(i), b"x" * 100, b"".join)

    threads = [threading.Thread(target=work, args=(r,)) for r in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(board._notes) < 10


def test_missing_ranks_are_named_by_all_others_and_a_late_one_is_told():
    board = MemoryBoard()
    texts = {}

    def come(rank, timeout_s=0.3):
        try:
            BoardComm(board, rank, 5, timeout_s).meet(MEETING, b"", b"".join)
        except milepost.RanksMissing as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=come, args=(r,)) for r in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("ranks 2, 4 did not come to 'saving to somewhere: meeting'" in texts[r] for r in (0, 1, 3))
    come(4)
    assert "this rank came too late" in texts[4]


def test_when_the_coordinator_is_missing_the_others_name_it():
    board = MemoryBoard()
    with pytest.raises(milepost.RanksMissing, match=r"rank 0 did not come"):
        run_pair(board)


def run_pair(board):
    errors = []

    def come(rank):
        try:
            BoardComm(board, rank, 3, 0.3).meet(MEETING, b"", b"".join)
        except milepost.RanksMissing as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(r,)) for r in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise errors[0]


def told_missing(world, delays_s, timeout_s):
    """What each rank that comes, after its delay, says of those that did not."""
    board, texts = MemoryBoard(), {}

    def come(rank, delay_s):
        time.sleep(delay_s)
        try:
            BoardComm(board, rank, world, timeout_s).meet(MEETING, b"", b"".join)
        except milepost.RanksMissing as error:
            texts[rank] = str(error).partition(" did not come")[0]

    threads = [threading.Thread(target=come, args=one) for one in delays_s.items()]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return texts


def test_ranks_without_a_coordinator_name_all_that_are_absent():
    """The one that gives up first must not look missing to the next."""
    assert told_missing(4, {1: 0.0, 2: 0.3}, 0.3) == dict.fromkeys((1, 2), "ranks 0, 3")


def test_ranks_wait_longer_than_the_coordinator():
    assert told_missing(3, {0: 0.3, 1: 0.0}, 0.6) == dict.fromkeys((0, 1), "rank 2")


def test_ranks_that_make_different_calls_are_told_so():
    def work(comm):
        with pytest.raises(milepost.CheckpointError, match="Do all ranks make the same calls"):
            comm.meet(phase("saving" if comm.rank else "loading"), b"", b"".join)

    run_ranks(2, work)


def test_a_rank_that_leaves_tells_the_others_why_at_once():
    def work(comm):
        def leave():
            if comm.rank == victim:
                raise KeyboardInterrupt("ctrl-c")
            return b""

        try:
            together(comm, CALL, "meeting", leave)
        except KeyboardInterrupt:
            return "left"
        except milepost.CheckpointError as error:
            return error.failures[victim].kind
        return "?"

    for victim in (0, 1):
        results = run_ranks(3, work, timeout_s=30)
        assert results == ["left" if r == victim else "KeyboardInterrupt" for r in range(3)]


def test_alone_nothing_is_exchanged():
    assert isinstance(Solo(), Comm)
    assert meet(Solo(), CALL, JOINING, lambda: b"x", lambda all_of_us: all_of_us[0] * 2) == b"xx"
    assert broadcast(Solo(), CALL, TELLING, lambda: b"y") == b"y"
    for call in (
        lambda: meet(Solo(), CALL, JOINING, lambda: 1 / 0, b"".join),
        lambda: together(Solo(), CALL, "meeting", lambda: 1 / 0),
        lambda: broadcast(Solo(), CALL, TELLING, lambda: 1 / 0),
    ):
        with pytest.raises(ZeroDivisionError):
            call()


def test_where_a_missing_rank_was_last_seen_is_told():
    board = MemoryBoard()
    texts = {}

    def come(rank):
        comm = BoardComm(board, rank, 3, 0.4)
        try:
            with calling(comm, CALL):
                comm.announce(phase("starting"), b"" if rank == 0 else None)
                if rank == 2:
                    return
                comm.meet(phase("writing"), b"", b"".join)
        except milepost.RanksMissing as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=come, args=(r,)) for r in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert set(texts) == {0, 1}
    assert all("rank 2 last seen at 'starting'" in text for text in texts.values())


def test_a_decision_that_fails_on_the_coordinator_fails_on_all():
    def work(comm):
        def decide(payloads):
            raise RuntimeError("no")

        with pytest.raises(milepost.CheckpointError, match=r"rank 0: RuntimeError: no") as caught:
            meet(comm, CALL, JOINING, bytes, decide)
        assert list(caught.value.failures) == [0]

    run_ranks(3, work)


def test_coordinator_interrupted_while_it_decides_tells_why():
    def interrupted(_):
        raise KeyboardInterrupt

    def work(comm):
        with pytest.raises(KeyboardInterrupt if comm.rank == 0 else milepost.CheckpointError) as caught:
            meet(comm, CALL, JOINING, lambda: b"", interrupted)
        return caught.value

    _, *others = run_ranks(3, work, timeout_s=2)
    assert [error.failures[0].kind for error in others] == ["KeyboardInterrupt"] * 2


def test_coordinator_interrupted_before_its_note_tells_why():
    def interrupted():
        raise KeyboardInterrupt

    def work(comm):
        with pytest.raises(KeyboardInterrupt if comm.rank == 0 else milepost.CheckpointError) as caught:
            broadcast(comm, CALL, TELLING, interrupted)
        return caught.value

    _, *others = run_ranks(3, work, timeout_s=2)
    assert [error.failures[0].kind for error in others] == ["KeyboardInterrupt"] * 2


def test_failures_of_different_kinds_are_raised_as_none_of_them():
    """An `except` for one kind must not catch the other."""
    kinds = [milepost.InvalidState, milepost.StorageError, milepost.InvalidState]

    def work(comm):
        def fail():
            raise kinds[comm.rank]("no")

        with pytest.raises(milepost.CheckpointError) as caught:
            together(comm, CALL, "meeting", fail)
        assert type(caught.value) is milepost.CheckpointError
        assert [caught.value.failures[rank].kind for rank in range(3)] == [kind.__name__ for kind in kinds]
        assert "ranks 0, 2: InvalidState: no" in str(caught.value)

    run_ranks(3, work)


def test_failures_of_a_thousand_ranks_travel_as_a_few():
    def work(comm):
        def fail():
            raise RuntimeError("disk" if comm.rank % 2 else "memory")

        with pytest.raises(milepost.CheckpointError, match=r"ranks 0, 2, 4") as caught:
            together(comm, CALL, "meeting", fail)
        assert len(caught.value.failures) == 200
        assert len(str(caught.value)) < 1000

    run_ranks(200, work)


def test_calls_aside_do_not_meet_those_of_others():
    def work(comm):
        first, second = comm.secondary("a"), comm.secondary("a")
        in_thread = []
        thread = threading.Thread(
            target=lambda: in_thread.extend(second.meet(phase(i), bytes([comm.rank]), b"2".join) for i in range(20))
        )
        thread.start()
        here = [comm.meet(phase(i), bytes([comm.rank]), b"0".join) for i in range(20)]
        there = [first.meet(phase(i), bytes([comm.rank]), b"1".join) for i in range(20)]
        thread.join()
        return here, there, in_thread

    expected = tuple([mark.join([b"\0", b"\1", b"\2"])] * 20 for mark in (b"0", b"1", b"2"))
    assert run_ranks(3, work) == [expected] * 3


def test_a_posted_note_is_seen_by_all_without_a_meeting():
    def work(comm):
        beside = comm.secondary("a")
        together(beside, CALL, "beginning", bytes)
        assert beside.look(["2"], 0.0) == [None]
        comm.meet(phase("all have looked"), b"", b"".join)
        if comm.rank == 2:
            beside.post("2", b"old")
            beside.post("2", b"new")
            beside.post("end", b"")
        assert beside.look(["end"], 10.0) == [b""]
        assert comm.look(["2"], 0.0) == [None]
        return beside.look(["2", "never"], 0.1)

    assert run_ranks(3, work) == [[b"new", None]] * 3
    assert run_ranks(3, work, trouble={0: {}, 2: {}}) == [[b"new", None]] * 3
    assert Solo().look(["2"], 10.0) == [None]


@pytest.mark.parametrize(("gone", "counted"), [(0, False), (1, False), (2, False), (2, True)])
def test_a_rank_that_is_gone_is_named_in_the_next_call_whatever_that_is(gone, counted):
    def work(comm):
        together(comm, CALL, "before", bytes)
        if comm.rank == gone:
            if counted:  # killed on its way to a meeting
                comm._board.count(f"count/{gone}", 2)
            depart(comm, ValueError("my trainer died"))
            return "gone"

        def next_call():
            broadcast(comm, CALL, Announcement("a", Bytes()), bytes)
            together(comm, CALL, "b", bytes)

        with pytest.raises(milepost.CheckpointError, match=f"rank {gone}.*my trainer died") as caught:
            next_call()
        return sorted(caught.value.failures)

    began = time.monotonic()
    assert run_ranks(3, work, timeout_s=30) == ["gone" if rank == gone else [gone] for rank in range(3)]
    assert time.monotonic() - began < 10
