"""A rank that is interrupted in a foreground call: the others are told at once, and the next call works."""

import contextlib
import threading
import time

import pytest
import torch

import milepost
from milepost.comm import BoardComm, MemoryBoard
from milepost.data.threads import Crew
from tests.interrupts import Interrupt, interrupted_at

WORLD, TIMEOUT_S, PROMPT_S = 3, 20.0, 5.0


class Ranks:
    """Threads that make the same calls, one of which is interrupted at a line of each second call."""

    def __init__(self, kind, victim, coordinator, stride):
        self.kind, self.victim, self.coordinator, self.stride = kind, victim, coordinator, stride
        self.store, self.board = milepost.store.MemoryStore(), MemoryBoard()
        self.barrier, self.ended, self.count, self.wrong = threading.Barrier(WORLD), False, 0, []
        milepost.save({"n": 0, "t": torch.zeros(4)}, self.store)
        threads = [threading.Thread(target=self.work, args=(rank,), daemon=True) for rank in range(WORLD)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10 * TIMEOUT_S)
            assert not thread.is_alive(), "a rank hangs"

    def call(self, comm, number):
        state = {"n": number, "t": torch.full((4,), float(number))}
        if self.kind == "save":
            milepost.save(state, self.store, process_group=comm)
        else:
            milepost.load(state, self.store, process_group=comm)

    def work(self, rank):
        comm = BoardComm(self.board, rank, WORLD, TIMEOUT_S, coordinator=self.coordinator)
        line = 1
        while not self.ended:
            self.barrier.wait()
            began, lines = time.monotonic(), []
            # The others may succeed, if the interrupt comes when all is done, or raise it.
            with contextlib.suppress(Interrupt, milepost.CheckpointError):
                if rank == self.victim:
                    with interrupted_at(line, after="_start") as lines:
                        self.call(comm, line)
                else:
                    self.call(comm, line)
            if time.monotonic() - began > PROMPT_S:
                self.wrong.append((line, rank, "was told late"))
            self.barrier.wait()
            if rank == self.victim:
                self.ended, self.count = len(lines) < line, self.count + 1
            try:
                self.call(comm, line + 1)
            except BaseException as error:
                self.wrong.append((line, rank, repr(error)))
            line += self.stride
            self.barrier.wait()


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "coordinator"), [(0, 0), (1, 0), (0, 2)])
@pytest.mark.parametrize("kind", ["save", "load"])
def test_interrupt_at_any_line_of_a_call_is_told_at_once(kind, victim, coordinator):
    """Before, one at the first lines broke every later call, and one at the last lines the next call of three ranks."""
    stride = 29 if kind == "save" else 37
    for part in (Ranks(kind, victim, coordinator, stride), FirstLines(kind, victim, coordinator, 1)):
        assert not part.wrong, part.wrong[:5]
        assert part.count > 20, "the trace function saw too little"


class FirstLines(Ranks):
    """At every one of the first lines: there the call is begun."""

    def call(self, comm, number):
        super().call(comm, number)
        self.ended = self.ended or number > 40


def test_interrupted_wait_for_threads_that_were_not_started_ends():
    for number in range(1, 12):
        crew = Crew(bytes, "crew", 0)
        with contextlib.suppress(Interrupt), interrupted_at(number):
            crew.join()
        again = threading.Thread(target=crew.join, daemon=True)
        again.start()
        again.join(PROMPT_S)
        assert not again.is_alive()
