"""The benchmark of statistics runs, cleans up, and has a row for every bar. Speed is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "tensor_statistics.py"


def run(folder, *more):
    command = [sys.executable, str(BENCHMARK), "--quick", "--size-gb", "0.008", "--tensors", "100"]
    return subprocess.run(
        [*command, "--disk", str(folder), *more], capture_output=True, text=True, timeout=150, check=False
    )


@pytest.mark.slow
def test_statistics_benchmark_has_a_row_for_every_bar_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    done = run(work, "--json", str(results))
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What statistics of tensors and the health gate cost")
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    barred = [row["name"] for row in rows if row["bar"] == "<= 5"]
    assert len(barred) == 16
    for case in ("save, bfloat16, 1 process", "save, float32, 4 ranks", "save, 100 bfloat16 tensors of 4 KB"):
        assert f"{case}: statistics=True, slow-down" in barred
        assert f"{case}: healthy=True, slow-down" in barred


def test_a_case_that_does_not_exist_is_refused(tmp_path):
    done = run(tmp_path, "--only", "lode")
    assert done.returncode == 2
    assert "no case begins with lode" in done.stderr
