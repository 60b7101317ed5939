"""The benchmark of object stores runs, cleans up, and has a row for every bar. Speed is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from faults.servers import SeaweedFS

OBJECT_STORE = Path(__file__).parents[2] / "benchmarks" / "object_store.py"
SAVE, LOAD = "save, 1 process, 1 ms away", "load, 2 -> 4 ranks, 1 ms away"
SMALL = "save, 40 tensors of 4 KB"
OPEN, NEWEST = "open a checkpoint, 1 ms away", "newest of 7 steps, 1 ms away"
CASES = (SAVE, LOAD, SMALL, OPEN, NEWEST)


def command(folder: Path, *more: str) -> list[str]:
    small = ["--quick", "--size-gb", "0.008", "--tensors", "40", "--steps", "7", "--latency-ms", "1"]
    return [sys.executable, "-W", "ignore", str(OBJECT_STORE), *small, "--dir", str(folder), *more]


def barred_rows() -> dict[str, str]:
    """Every row that has a bar, and the bar."""
    rows = {f"{case}: Milepost, memory beyond the state, largest rank": "<= 512" for case in CASES}
    for case in (SAVE, LOAD):
        rows[f"{case}: Milepost, share of raw's speed"] = ">= 0.9"
        rows[f"{case}: Milepost / DCP + s3fs, speed"] = ">= 5" if case == SAVE else ">= 6"
    rows[f"{LOAD}: Milepost, bytes read / needed"] = "<= 1.05"
    rows[f"{SAVE}: Milepost, requests"] = "<= 15"
    rows[f"{SMALL}: Milepost / DCP + s3fs, speed"] = ">= 10"
    rows[f"{OPEN}: Milepost, requests"] = "<= 3"
    rows[f"{NEWEST}: Milepost, requests"] = "<= 5"
    return rows


@pytest.mark.slow
@pytest.mark.skipif(SeaweedFS.why_not() is not None, reason=str(SeaweedFS.why_not()))
def test_object_store_gives_a_row_for_every_bar_and_cleans_up(tmp_path):
    pytest.importorskip("obstore")
    pytest.importorskip("s3fs")
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    cases = ["far-save-1", "far-load-2-to-4", "small-save", "open", "newest"]
    done = subprocess.run(
        command(work, "--only", *cases, "--json", str(results)),
        capture_output=True,
        text=True,
        timeout=170,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How fast saves and loads are in an object store")
    assert not list(work.iterdir())

    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all((row["bar"] is None) == (row["ok"] is None) for row in rows)
    worst = [row for row in rows if row["name"].startswith("memory beyond the state, worst of all")]
    assert {row["name"]: row["bar"] for row in rows if row["bar"] and row not in worst} == barred_rows()

    values = {row["name"]: row["value"] for row in rows}
    for case in (SAVE, LOAD, SMALL):
        for who in ("raw, 2 threads", "raw, 8 threads", "Milepost", "DCP + s3fs"):
            assert values[f"{case}: {who}, wall"] > 0
    assert values[f"{LOAD}: raw, 8 threads, bytes read / needed"] == pytest.approx(1, abs=0.02)
    assert values[f"{LOAD}: Milepost, bytes read / needed"] >= 1
    assert values[f"{SAVE}: raw, 2 threads, requests"] == 1
    assert values[f"{SAVE}: Milepost, requests"] <= 15
    assert values[f"{OPEN}: Milepost, requests"] <= 3
    assert values[f"{NEWEST}: Milepost, requests"] <= 5


def test_an_object_store_case_that_does_not_exist_is_refused(tmp_path):
    done = subprocess.run(command(tmp_path, "--only", "lode"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no case begins with lode" in done.stderr
