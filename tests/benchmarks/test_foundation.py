"""The benchmarks run, clean up, and give rows that make sense. Nothing here looks at how fast anything is."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

FOUNDATION = Path(__file__).parents[2] / "benchmarks" / "foundation.py"
CASES = {
    "save, 1 process",
    "load, 1 process",
    "save, 100 tensors of 4 KB",
    "load, 100 tensors of 4 KB",
    "save, 2 ranks",
    "load, 2 -> 4 ranks",
    "save, 4 ranks",
    "load, 4 ranks",
    "load, Shard(0) -> Shard(1), 4 ranks",
    "load, 4 -> 2 ranks",
}


def command(folder: Path, *more: str) -> list[str]:
    small = ["--quick", "--size-mb", "8", "--tensors", "100", "--rounds", "1"]
    return [sys.executable, str(FOUNDATION), *small, "--dir", str(folder), *more]


@pytest.mark.slow
def test_foundation_gives_rows_for_every_case_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    done = subprocess.run(
        command(work, "--json", str(results)), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How long a durable save and a warm load take")
    assert not list(work.iterdir())

    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert {row["name"].split(":")[0] for row in rows} == CASES
    # CPU time comes in ticks on some systems, and Milepost may take no memory that counts: these can be zero.
    assert all(row["value"] > 0 or row["unit"] == "MiB" or row["name"].endswith("CPU") for row in rows)
    assert all((row["bar"] is None) == (row["ok"] is None) for row in rows)
    values = {row["name"]: row["value"] for row in rows}
    for case in CASES:
        assert {f"{case}: {who}, wall" for who in ("raw", "DCP", "Milepost")} <= values.keys()
        if case.startswith("load"):
            assert values[f"{case}: raw, bytes read / needed"] == pytest.approx(1, abs=0.05)
            assert values[f"{case}: Milepost, bytes read / needed"] >= 1


@pytest.mark.slow
def test_an_interrupted_run_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(command(tmp_path), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    try:
        process.stderr.readline()  # the first case is done
        process.send_signal(signal.SIGINT)
        process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130
    deadline = time.monotonic() + 10
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())
