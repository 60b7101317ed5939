"""The faults by kills and by ranks run, keep the promise, leave nothing behind, and can see what is not whole."""

import json
import os
import subprocess
import sys

import pytest

from faults import kills
from faults.processes import environment

# In a process of its own: the server that forks the ranks must have what they import, and here another one may run.
SCRIPT = """
import importlib, json, multiprocessing, pathlib, sys
if __name__ == "__main__":
    module, folder = importlib.import_module(sys.argv[1]), pathlib.Path(sys.argv[2])
    for row in module.rows(False, folder):
        print(json.dumps([row.number, row.ok, row.milepost.text, row.dcp.text]), flush=True)
    print(json.dumps([str(child) for child in multiprocessing.active_children() if child.is_alive()]))
"""


@pytest.mark.slow
@pytest.mark.parametrize(("module", "numbers"), [("faults.kills", [1, 2, 3, 24]), ("faults.ranks", [21, 22, 25])])
def test_a_few_trials_of_each_fault_keep_the_promise_and_leave_nothing(module, numbers, tmp_path):
    script, folder = tmp_path / "few.py", tmp_path / "folder"
    script.write_text(SCRIPT)
    folder.mkdir()
    done = subprocess.run(
        [sys.executable, script, module, folder],
        capture_output=True,
        text=True,
        timeout=120,
        env=environment(),
        check=False,
    )
    assert done.returncode == 0, done.stderr
    *found, left = [json.loads(line) for line in done.stdout.splitlines()]
    assert [number for number, *_ in found] == numbers
    assert all(ok for _, ok, *_ in found), found
    assert all(theirs != "not run" for *_, theirs in found)
    assert not left
    assert not list(folder.iterdir())


def test_a_place_whose_values_belong_to_different_saves_is_mixed(tmp_path):
    kills.milepost.save({**kills.target(), "n": 2}, tmp_path)
    assert kills.found_at("milepost", tmp_path) == "mixed"
    assert kills.old_or_new("milepost", tmp_path, 1, 2) == "mixed"


def test_older_content_is_lost_and_damaged_content_is_unloadable(tmp_path):
    kills.milepost.save(kills.target(), tmp_path)
    assert kills.old_or_new("milepost", tmp_path, 0, 1) == "old"
    assert kills.old_or_new("milepost", tmp_path, 1, 2) == "lost"
    os.truncate(next(path for path in tmp_path.glob("data/*/*") if path.is_file()), 100)
    assert kills.old_or_new("milepost", tmp_path, 0, 1) == "unloadable"
    assert kills.old_or_new("milepost", tmp_path / "empty", 0, 1) == "unloadable"


def test_an_earlier_step_that_is_gone_is_lost(tmp_path):
    kills.milepost.save(kills.target() | {"n": 0}, tmp_path / "1")
    assert kills.step_by_step("milepost", tmp_path, 0, 0) == kills.ALL
    assert kills.step_by_step("milepost", tmp_path, 2, 2) == "an earlier one lost"


def test_double_and_absent_winners_of_a_generation_are_reported(tmp_path):
    kills.milepost.save(kills.target(), tmp_path)
    good = "one winner each generation, the newest there"
    assert kills.round_ending("milepost", tmp_path, [("saved", 0, 0, 1), ("conflict", 8, 0)]) == good
    twice = [("saved", 0, 0, 1), ("saved", 8, 0, 1)]
    assert kills.round_ending("milepost", tmp_path, twice) == "two winners of one generation"
    assert kills.round_ending("milepost", tmp_path, [("saved", 8, 0, 2)]) == "the newest lost"


def test_a_rank_counts_as_named_only_where_its_own_number_stands():
    assert kills.names("rank 2 did not come to 'saving' within 3 s", 2)
    assert kills.names("ranks 0, 2 did not come", 2)
    assert kills.names("CheckpointException ranks:dict_keys([2])", 2)
    assert not kills.names("rank 2 did not come to 'saving' within 3 s", 3)
    assert not kills.names("Connection closed by peer [127.0.0.1]:2", 2)


@pytest.mark.slow
def test_dcp_killed_often_enough_leaves_a_partial_checkpoint(tmp_path):
    # One rank each: the ranks that have others import much, where the server has not.
    endings = []
    for i in range(40):
        ended, begun = kills.kill_all("dcp", 1, tmp_path / str(i), 0.003 * i, False)
        endings.append(kills.old_or_new("dcp", tmp_path / str(i), ended, begun))
    assert {"unloadable", "mixed"} & set(endings), endings
