"""Events of real ranks: who was slow, who is missing, and a failure that all hear of."""

import logging
import time

import pytest
import torch

import milepost
from milepost import events
from milepost.comm import patience
from tests.events.hearing import check_whole, listening, undisturbed
from tests.ranks import spawn


class Slow:
    """Takes its time on one rank, while the state is described."""

    def __init__(self, seconds):
        self.seconds = seconds

    def state_dict(self):
        time.sleep(self.seconds)
        return {"x": 1}

    def load_state_dict(self, state):
        time.sleep(self.seconds)


class Lines(logging.Handler):
    """Keeps what is logged."""

    def __init__(self):
        super().__init__(logging.INFO)
        self.lines = []
        logging.getLogger("milepost").addHandler(self)
        logging.getLogger("milepost").setLevel(logging.INFO)

    def emit(self, record):
        self.lines.append(record.getMessage())


def slow_rank(rank, folder):
    patience.FIRST_S = 0.1
    lines = Lines()
    state = {"w": torch.full((1000,), 1.0), "slow": Slow(1.2 * (rank == 2))}
    with listening() as heard, milepost.Checkpointer(folder) as keeper:
        keeper.save(state, 12)
        keeper.restore(state)
        timings = keeper.open(12).manifest.timings
    for operation in heard.operations():
        check_whole(operation)
    waits = [
        (event.kind, event.meeting, event.ranks, event.missing, event.waited_s) for event in heard.of(events.Waiting)
    ]
    own = {name: seconds for op in heard.operations()[:1] for name, seconds in op[-1].phases.items()}
    committed = heard.of(events.Committed)[0]
    return lines.lines, waits, own, timings, (committed.bytes, committed.generation, committed.timings)


def test_slow_rank_is_named_by_manifest_log_line_and_waits(tmp_path):
    def is_quiet(found):
        """Whether nothing but the slow rank held the others up."""
        works = [one[2]["describing"] for one in found]
        return max(works[:2]) < 1 and works[2] < 10 and all(wait[4] < 0.5 for wait in found[2][1])

    found = undisturbed(lambda attempt: spawn(3, slow_rank, str(tmp_path / str(attempt))), is_quiet)
    timings = {t.phase: t for t in found[0][3]}
    assert timings["describing"].slowest_rank == 2
    assert 1.2 <= timings["describing"].slowest_s < 10
    assert timings["describing"].median_s < 1
    assert timings["waiting"].slowest_s > 0.5, "the others waited for it"
    assert found[0][4] == (4000, 1, found[0][3]), "the coordinator tells the phases of all ranks"
    assert [one[4] for one in found[1:]] == [(4000, 1, ())] * 2
    saved, loaded = found[0][0]
    assert saved.startswith("saved step 12: 4.0 kB in ")
    assert ", slowest rank 2: describing " in saved
    assert loaded.startswith("loaded step 12: ")
    assert loaded.endswith(" on rank 0 of 3")
    assert [one[0] for one in found[1:]] == [[], []], "one line, on the coordinator"
    for rank in (0, 1):
        assert found[rank][2]["waiting"] > 0.5, "where a rank waits, the work of others does not count as its own"
        assert found[rank][2]["describing"] < 1
    longest = max((wait for wait in found[0][1] if wait[0] == "save"), key=lambda wait: wait[4])
    waits = [wait for wait in found[0][1] if wait[:2] == longest[:2]]
    assert waits[-1][2:4] == ((2,), 1), "a busy machine may delay the other rank too, at first"
    assert 2 <= len(waits) <= 6, "after 0.1 s, 0.2 s, 0.4 s, 0.8 s, ..."
    assert [wait[4] for wait in waits] == sorted(wait[4] for wait in waits)
    assert any(wait[0] == "load" and wait[2] == (2,) for wait in found[0][1])
    assert all(wait[4] < 0.5 for wait in found[2][1]), "it did not wait long"


def slow_coordinator(rank, folder):
    patience.FIRST_S = 0.3
    milepost.save({"x": 1}, folder)
    with listening() as heard:
        milepost.save({"x": 1, "slow": Slow(1.2 * (rank == 0))}, folder)
    return {(event.ranks, event.meeting) for event in heard.of(events.Waiting) if event.waited_s > 0.5}


def test_other_ranks_name_the_coordinator_they_wait_for(tmp_path):
    found = undisturbed(
        lambda attempt: spawn(3, slow_coordinator, str(tmp_path / str(attempt))),
        lambda found: found[0] == set() and found[1] == found[2] == {((0,), "starting")},
    )
    assert found[0] == set()
    assert found[1] == found[2] == {((0,), "starting")}


def failing_rank(rank, folder):
    with listening() as heard:
        with pytest.raises(milepost.CheckpointError):
            milepost.save({"x": object() if rank == 1 else 1}, folder)
        with pytest.raises(milepost.CheckpointError):
            milepost.async_save({"x": object() if rank == 1 else 1}, folder).result()
    for operation in heard.operations():
        check_whole(operation)
    return [(type(event).__name__, event.error, event.ranks) for event in heard.of(events.Failed)]


def test_failure_on_one_rank_is_an_event_on_all(tmp_path):
    found = spawn(2, failing_rank, str(tmp_path))
    assert found == [[("Failed", "InvalidState", (1,))] * 2] * 2


def async_by_process(rank, folder):
    lines = Lines()
    part = torch.full((100_000,), float(rank))
    state = {"w": milepost.Sharded((200_000,), {(100_000 * rank,): part})}
    with listening() as heard, milepost.Checkpointer(folder, background="process") as keeper:
        keeper.async_save(state, 5).result()
        timings = keeper.open(5).manifest.timings
    [operation] = heard.operations()
    check_whole(operation)
    return lines.lines, [t.phase for t in timings], {event.pid for event in heard}, operation[-1].bytes


@pytest.mark.slow
def test_writing_processes_of_all_ranks_reach_listeners(tmp_path):
    found = spawn(2, async_by_process, str(tmp_path))
    [line] = found[0][0]
    assert line.startswith("saved step 5: 800 kB in ")
    assert "slowest rank" in line
    assert found[1][0] == []
    assert {"staging", "blocking", "writing", "describing"} <= set(found[0][1])
    pids = [one[2] for one in found]
    assert all(len(one) == 2 for one in pids), "a trainer and its process"
    assert not pids[0] & pids[1]
