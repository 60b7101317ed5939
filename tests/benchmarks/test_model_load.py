"""The benchmark of loads into one GPU runs, on a CPU too, and cleans up. Speed is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

BENCHMARK = Path(__file__).parents[2] / "benchmarks" / "model_load.py"


@pytest.mark.slow
def test_model_load_benchmark_checks_what_it_loads_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    command = [sys.executable, str(BENCHMARK), "--quick", "--device", "cpu", "--disk", str(work), "--shm", str(work)]
    done = subprocess.run([*command, "--json", str(results)], capture_output=True, text=True, timeout=150, check=False)
    assert done.returncode == 0, done.stderr
    assert "The bars are for a GPU" in done.stdout
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    names = {row["name"].partition(", ")[0] for row in rows}
    assert {
        f"{place}: {who}" for place in ("page cache", "tmpfs", "cold") for who in ("Milepost", "safetensors")
    } <= names
    assert all(row["value"] > 0 and row["bar"] is None for row in rows)
