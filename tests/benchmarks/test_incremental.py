"""The benchmark of incremental saves runs, cleans up, and has a row for every bar. Speed is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "incremental.py"


@pytest.mark.slow
def test_incremental_benchmark_has_a_row_for_every_bar_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    command = [sys.executable, str(BENCHMARK), "--quick", "--size-gb", "0.008", "--tensors", "100"]
    done = subprocess.run(
        [*command, "--disk", str(work), "--json", str(results)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What incremental saves cost and save")
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert len([row for row in rows if row["bar"]]) == 8
    written = {row["name"]: row["value"] for row in rows if "bytes written per step" in row["name"]}
    assert len(written) == 2
    assert all(1 <= value < 1.5 for value in written.values()), "counted, not timed"
