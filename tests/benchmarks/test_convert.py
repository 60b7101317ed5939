"""The benchmark of conversions runs, cleans up, and gives rows. Nothing here looks at how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


@pytest.mark.slow
def test_a_small_run_of_the_benchmark_gives_rows_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    small = [
        "--quick",
        "--size-mb",
        "8",
        "--tensors",
        "50",
        "--rounds",
        "1",
        "--dir",
        str(work),
        "--json",
        str(results),
    ]
    benchmark = Path(__file__).parents[2] / "benchmarks" / "convert.py"
    done = subprocess.run(
        [sys.executable, "-W", "ignore", str(benchmark), *small], capture_output=True, text=True, timeout=150
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How fast a checkpoint is converted")
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows) == 26
