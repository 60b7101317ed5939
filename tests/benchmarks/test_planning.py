"""The benchmark of planning runs and gives rows that make sense. Nothing here looks at how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

PLANNING = Path(__file__).parents[2] / "benchmarks" / "planning.py"
KINDS = ("FSDP", "FSDP + scalars", "HSDP", "3-D")


@pytest.mark.slow
def test_a_small_run_of_planning_gives_rows_for_both_systems_and_a_figure(tmp_path):
    results, figure = tmp_path / "rows.json", tmp_path / "planning.png"
    done = subprocess.run(
        [sys.executable, str(PLANNING), "--quick", "--tiny", "--json", str(results), "--figure", str(figure)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What planning a checkpoint costs")
    assert figure.stat().st_size > 0

    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all((row["bar"] is None) == (row["ok"] is None) for row in rows)
    values = {row["name"]: row["value"] for row in rows}
    assert all(value >= 0 for value in values.values())
    for kind in KINDS:
        first, steady = (
            values[f"Milepost, {kind}, 1024 ranks: sent and read in all, {when}"] for when in ("first", "steady")
        )
        assert 0 < steady < first
        assert values[f"Milepost, {kind}, 1024 ranks: lead, first"] >= values[f"Milepost, {kind}, 1024 ranks: one rank"]
    assert values["Milepost, FSDP, 64 ranks: manifest"] < values["DCP, FSDP, 64 ranks, 48 tensors: metadata bytes"]


@pytest.mark.slow
def test_ranks_that_stand_in_for_others_send_what_all_of_them_would(tmp_path):
    program = (
        "from planning_jobs import FSDP, Job\n"
        "from planning_measure import real_bytes, save_twice\n"
        "job = Job(FSDP, 12, 3)\n"
        "print(*real_bytes(job), *save_twice(job).bytes)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=PLANNING.parent, capture_output=True, text=True, timeout=100, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    first, steady, first_by_few, steady_by_few = map(int, done.stdout.split())
    # A rank that finds an announcement there already reads it twice, so the totals depend on who is first.
    assert first_by_few == pytest.approx(first, rel=0.35)
    assert steady_by_few == pytest.approx(steady, rel=0.35)
