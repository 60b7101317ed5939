"""The benchmark of the command line runs, cleans up, and gives rows. Nothing here looks at how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "command_line.py"


@pytest.mark.slow
def test_a_small_run_of_the_benchmark_gives_rows_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    small = ["--quick", "--size-mb", "16", "--steps", "2", "--rounds", "1", "--dir", work, "--json", results]
    done = subprocess.run([sys.executable, BENCHMARK, *small], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How fast the command line starts")
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    values = {row["name"]: row["value"] for row in rows}
    assert len(values) == len(rows)
    assert values["milepost diff A B: bytes of the two"] == pytest.approx(2 * (16 << 20) / 1e9, rel=0.01)
    assert {row["name"] for row in rows if row["bar"] == "< 0.3"} >= {
        f"milepost {command}: wall" for command in ("--help", "ls RUN", "show STEP", "diff A B")
    }
