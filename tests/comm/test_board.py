"""Ranks that talk through a board: exchange, deadlines, late ranks, and ranks that make different calls."""

import threading

import pytest

import milepost
from milepost.comm import BoardComm, MemoryBoard, Solo, together
from milepost.comm.base import Comm
from milepost.testing import run_ranks


def test_every_rank_gets_the_payloads_of_all_in_order():
    for world in (1, 2, 7, 64):
        results = run_ranks(world, lambda comm: [comm.exchange(f"p{i}", bytes([comm.rank, i])) for i in range(3)])
        assert results == [[[bytes([r, i]) for r in range(world)] for i in range(3)]] * world


def test_the_board_does_not_fill_up():
    board = MemoryBoard()

    def work(rank):
        comm = BoardComm(board, rank, 4, 10)
        for i in range(50):
            comm.exchange(f"{i}", b"x" * 100)

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
            BoardComm(board, rank, 5, timeout_s).exchange("meeting", b"")
        except milepost.RanksMissing as error:
            texts[rank] = str(error)

    threads = [threading.Thread(target=come, args=(r,)) for r in (0, 1, 3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all("ranks 2, 4 did not come to 'meeting'" in texts[r] for r in (0, 1, 3))
    come(4)
    assert "this rank came too late" in texts[4]


def test_when_the_lead_is_missing_the_others_name_it():
    board = MemoryBoard()
    with pytest.raises(milepost.RanksMissing, match=r"rank 0 did not come"):
        run_pair(board)


def run_pair(board):
    errors = []

    def come(rank):
        try:
            BoardComm(board, rank, 3, 0.3).exchange("meeting", b"")
        except milepost.RanksMissing as error:
            errors.append(error)

    threads = [threading.Thread(target=come, args=(r,)) for r in (1, 2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    raise errors[0]


def test_ranks_that_make_different_calls_are_told_so():
    def work(comm):
        with pytest.raises(milepost.CheckpointError, match="do all ranks make the same calls"):
            comm.exchange("saving" if comm.rank else "loading", b"")

    run_ranks(2, work)


def test_a_rank_that_leaves_tells_the_others_why_at_once():
    def work(comm):
        def leave():
            if comm.rank == victim:
                raise KeyboardInterrupt("ctrl-c")
            return b""

        try:
            together(comm, "work", leave)
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
    assert together(Solo(), "work", lambda: b"x") == [b"x"]
    with pytest.raises(ZeroDivisionError):
        together(Solo(), "work", lambda: 1 / 0)
