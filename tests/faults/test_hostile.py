"""Hostile checkpoints, bombs and fuzzed input, a few of each; and that the harness would notice if one got through."""

import os
from pathlib import Path

import pytest

from faults import hostile

pytestmark = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")  # the forks only read and end


@pytest.mark.timeout(120)
def test_hostile_rows_keep_the_promise_and_dcp_wakes_the_canary(tmp_path):
    rows = {row.number: row for row in hostile.rows(False, tmp_path)}
    assert list(rows) == [17, 19, 20]
    for row in rows.values():
        assert row.ok, f"{row.milepost.text}: {row.note}"
    # Else the canary would prove nothing.
    assert rows[17].dcp.counts == {"executed": len(hostile.WAYS)}
    assert rows[19].dcp.of("tried to allocate it") > 0
    assert rows[20].milepost.of("accepted and sound") > 100
    assert rows[20].milepost.trials >= hostile.QUICK_INPUTS * 0.99


def report(*seen, **outcomes):
    return {"name": "x", "seen": list(seen), "outcomes": outcomes}


def test_an_attack_that_gets_through_is_no_good_ending():
    ending = hostile.corpus_ending
    assert ending(report("the canary: code was executed", open="right")) == "executed"
    assert ending(report("os.system ('touch x',)", open="refused A: b")) == "executed"
    assert ending(report("open ['/outside/x']", open="right")) == "outside touched"
    assert ending(report(open="refused A: b", load="KeyError: c")) == "KeyError"
    assert ending(report(open="right", load="wrong: a tensor is wrong")) == "wrong"
    assert ending(report(open="right", load="refused A: b")) == "refused"
    assert ending(report(open="right")) == "read without harm"


def test_a_reader_that_runs_its_input_is_seen(tmp_path):
    def make(path):
        path.write_text(f"touch {path.parent}/canary")

    assert hostile.way_ending(make, lambda path: os.system(path.read_text()), tmp_path / "a" / "x") == "executed"
    assert hostile.way_ending(make, Path.read_text, tmp_path / "b" / "x") == "read without harm"


def test_a_reader_that_allocates_what_is_claimed_is_seen(tmp_path):
    def greedy(_path):
        return len(bytearray(1 << 40))

    ending, _, _ = hostile.in_a_fork(lambda: hostile.measured(greedy, tmp_path))
    assert ending == "tried to allocate it"


def test_memory_that_is_taken_within_the_limit_is_measured(tmp_path):
    def takes(_path):
        return bytearray(100 << 20).count(1)

    ending, cpu_s, grown = hostile.in_a_fork(lambda: hostile.measured(takes, tmp_path))
    assert ending == "read without harm"
    assert cpu_s > 0
    assert grown > 90 << 20


def test_a_process_that_dies_or_does_not_end_is_seen():
    assert hostile.in_a_fork(lambda: os.kill(os.getpid(), 9)) == "died with -9"
    assert hostile.in_a_fork(lambda: os._exit(3)) == "died with 3"
    assert hostile.in_a_fork(lambda: os.read(os.pipe()[0], 1), limit_s=0.1) == "no end in 0.1 s"
    assert hostile.in_a_fork(lambda: 7) == 7
