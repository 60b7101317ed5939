"""Runs whose steps share data: what each command says of it, and of damage to what is shared."""

import os
import re
import shutil
from pathlib import Path

import pytest

from tests.cli.bad_places import flip
from tests.cli.conftest import save_run
from tests.cli.running import fine, milepost, on_terminal, rows

WORD = 50_000 * 4
"""What never changes, in bytes."""


@pytest.fixture(scope="module")
def shared(tmp_path_factory):
    """Four steps of three ranks; `model.frozen` lies in the first one's file."""
    return save_run(tmp_path_factory.mktemp("shared") / "a", incremental=True, keep_last=10)


def older_of(step):
    """The file of an earlier save in the folder of a step."""
    [found] = [path for path in step.rglob("*.safetensors") if "-" in path.stem]
    return found


def test_ls_shows_what_is_new_in_each_step(shared, run):
    titles, found = rows(fine("ls", shared).out)
    assert titles == ["STEP", "STATE", "SIZE", "NEW", "AGE", "RANKS", "METRICS", "KEPT"]
    assert [found[step][2] for step in (100, 200, 300, 400)] == ["555.6 KiB", *["360.3 KiB"] * 3]
    assert "NEW" not in rows(fine("ls", run).out)[0]
    told = fine("ls", shared, "--json").json
    assert [step["data_bytes"] - step["new_bytes"] for step in told["steps"]] == [0, WORD, WORD, WORD]


def test_total_of_a_run_counts_what_is_shared_once(shared):
    files = {path.stat().st_ino: path.stat().st_size for path in shared.rglob("*") if path.is_file()}
    assert fine("ls", shared, "--json").json["file_bytes"] == sum(files.values())
    last = on_terminal("ls", shared).lines[-1]
    assert f"4 steps, {sum(files.values()) / 1024**2:.1f} MiB; " in last


def test_narrow_terminal_keeps_the_steps(shared):
    done = on_terminal("ls", shared, columns=40)
    assert done.status == 0
    table = [re.sub(r"\x1b\[[0-9]*m", "", line) for line in done.lines[:5]]
    assert max(map(len, table)) <= 40
    assert [line.split()[:2] for line in table[1:5]] == [[str(step), "whole"] for step in (100, 200, 300, 400)]
    assert all("KiB" in line for line in table[1:5])


def test_show_says_how_much_is_of_earlier_saves(shared, step):
    out = fine("show", shared / "step-0000000400").out
    assert "reused    195.3 KiB in 1 file of 1 earlier save, 3 saves ago\n" in out
    assert "reused" not in fine("show", shared / "step-0000000100").out
    assert "reused" not in fine("show", step).out
    told = fine("show", shared / "step-0000000400", "--json").json["older"]
    assert told == {"data_bytes": WORD, "files": 1, "saves": 1, "oldest_age": 3}


def test_files_of_one_key_are_those_that_hold_it(shared):
    place = shared / "step-0000000300"
    older = older_of(place).relative_to(place)
    assert f"(50000,)     0  {older}\n" in fine("show", place, "model.frozen").out
    assert str(older) not in fine("show", place, "model.w").out
    [box] = fine("show", place, "model.frozen", "--json").json["boxes"]
    assert (place / box["file"]).stat().st_nlink == 4
    listed = fine("explain", place, "--ranks", "1", "--rank", "0", "--keys", "*frozen").lines
    assert listed[-1].split() == [str(older), "195.3", "KiB", "1"]


def test_diff_reads_nothing_of_what_is_shared(shared):
    told = fine("diff", shared / "step-0000000200", shared / "step-0000000300", "--keys", "model.frozen", "--json").json
    assert (told["same"], told["equal_tensors"], told["by_tables"]) == (True, 1, 1)
    assert told["bytes_read"] < WORD / 4


def test_prune_says_what_stays_because_it_is_shared(tmp_path):
    linked = save_run(tmp_path / "a", incremental=True, keep_last=10)
    line = ("prune", linked, "--keep-last", "1")
    plan = fine(*line, "--dry-run")
    assert re.fullmatch(r"would remove 3 steps, [0-9.]+ KiB; 1 stay", plan.lines[-2])
    assert plan.lines[-1] == "319.5 KiB more stays: other steps share it"
    done = fine(*line, "--yes")
    assert done.lines[-2:] == [plan.lines[-2].replace("would remove", "removed"), plan.lines[-1]]
    assert fine("verify", linked).out.startswith("whole")


def test_damage_to_a_shared_file_is_named_in_each_step(tmp_path):
    place = save_run(tmp_path / "a", incremental=True)
    victim = older_of(place / "step-0000000300")
    with victim.open("r+b") as file:  # in all steps: they have one file
        file.seek(-5000, os.SEEK_END)
        file.write(bytes(64))
    done = milepost("verify", place)
    assert done.status == 4
    assert [line.split()[0] for line in done.lines if line.startswith(("whole", "damaged"))] == ["damaged"] * 4
    assert done.out.count("model.frozen[0:50000]") == 4
    for step in (200, 300, 400):
        folder = place / f"step-{step:010}"
        assert str(older_of(folder).relative_to(folder)) in done.out


def test_damage_beside_what_is_shared_is_told_apart(shared, tmp_path):
    """An old file may hold more than a step uses of it."""
    place = Path(shutil.copytree(shared, tmp_path / "copy"))
    flip(older_of(place / "step-0000000300"), 1000)
    done = milepost("verify", place)
    assert done.status == 4
    assert [line.split()[0] for line in done.lines if not line.startswith(" ")] == ["whole"] * 2 + ["damaged", "whole"]
    assert done.lines[-2] == "    model.w[0:120,0:256] of an earlier save, which is not used here"
    told = milepost("verify", place / "step-0000000300", "--json").json["checkpoints"][0]["damages"]
    assert [box["used"] for one in told for box in one["boxes"]] == [False]


@pytest.mark.parametrize("how", ["gone", "short"])
def test_step_without_a_file_of_an_earlier_save_is_damaged(shared, tmp_path, how):
    place = Path(shutil.copytree(shared, tmp_path / "copy"))
    victim = older_of(place / "step-0000000400")
    if how == "gone":
        victim.unlink()
    else:
        os.truncate(victim, victim.stat().st_size - 1)
    done = fine("ls", place)
    assert [rows(done.out)[1][step][0] for step in (100, 200, 300, 400)] == ["whole"] * 3 + ["damaged"]
    [reason] = [line for line in done.lines if line.startswith("step-0000000400: ")]
    assert victim.name in reason
    told = milepost("verify", place / "step-0000000400")
    assert told.status == 4
    assert victim.name in told.out + told.err
    assert milepost("show", place, "step").out.startswith("step: 300")
