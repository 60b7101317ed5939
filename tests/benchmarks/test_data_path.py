"""The benchmark of the data path runs, cleans up, and has a row for every bar. Speed is not tested here."""

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch

DATA_PATH = Path(__file__).parents[2] / "benchmarks" / "data_path.py"
SAVES = ("save, disk, 1 process", "save, disk, 4 ranks", "save, tmpfs, 1 process", "save, tmpfs, 4 ranks")
SAME_CUT = ("load, warm, 1 process", "load, warm, 4 ranks", "load, cold, 1 process", "load, cold, 4 ranks")
OTHER_CUT = ("load, 2 -> 4 ranks", "load, 4 -> 2 ranks", "load, Shard(0) -> Shard(1), 4 ranks")
SMALL = ("save, 100 tensors of 4 KB", "load, 100 tensors of 4 KB")
TINY = [f"{kind}, 4 tensors of 4 KB, {ranks}" for kind in ("save", "load") for ranks in ("1 process", "4 ranks")]
CASES = (*SAVES, *SAME_CUT, *OTHER_CUT, *SMALL)


def command(folder: Path, *more: str) -> list[str]:
    small = ["--quick", "--size-gb", "0.008", "--tensors", "100", "--disk", str(folder), "--shm", str(folder)]
    return [sys.executable, str(DATA_PATH), *small, *more]


def barred_rows() -> dict[str, str]:
    """Every row that has a bar, and the bar."""
    rows = {f"{case}: Milepost, memory beyond the state, largest rank": "<= 512" for case in (*CASES, *TINY)}
    for case in SAVES:
        disk = "disk" in case
        rows[f"{case}: Milepost / raw"] = "<= 1.15" if disk else "<= 1.25"
        rows[f"{case}: DCP / Milepost"] = ">= 1.6" if disk else ">= 1.5"
        if disk:
            rows[f"{case}: checksums, share of the time"] = "< 10"
    rows["save, disk, 1 process: safetensors / Milepost"] = ">= 1.0"
    for case in SAME_CUT:
        warm = "warm" in case
        rows[f"{case}: Milepost / raw"] = ("<= 1.2" if "1 process" in case else "<= 1.3") if warm else "<= 1.15"
        rows[f"{case}: DCP / Milepost"] = ">= 5" if warm else ">= 2.5"
        rows[f"{case}: checksums, share of the time"] = "< 40" if warm else "< 5"
        if warm:
            rows[f"{case}: Milepost, unverified / raw"] = "<= 1.1"
    for case, bar in zip((*OTHER_CUT, *SMALL), (8, 4, 6, 10, 25), strict=True):
        rows[f"{case}: DCP / Milepost"] = f">= {bar}"
    for case, bar in zip(OTHER_CUT, (1.3, 1.3, 2), strict=True):
        rows[f"{case}: Milepost / raw"] = f"<= {bar}"
        rows[f"{case}: Milepost, bytes read / needed"] = "<= 1.05"
    rows[f"{OTHER_CUT[2]}: Milepost, read once, bytes read / needed"] = "<= 1.05"
    return rows


@pytest.mark.slow
def test_data_path_gives_a_row_for_every_bar_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    done = subprocess.run(
        command(work, "--json", str(results)), capture_output=True, text=True, timeout=150, check=False
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("How close saves and loads come")
    assert not list(work.iterdir())

    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    assert all((row["bar"] is None) == (row["ok"] is None) for row in rows)
    worst = [row for row in rows if row["name"].startswith("memory beyond the state, worst of all")]
    assert [row["bar"] for row in worst] == ["<= 512"]
    assert {row["name"]: row["bar"] for row in rows if row["bar"] and row not in worst} == barred_rows()

    values = {row["name"]: row["value"] for row in rows}
    for case in CASES:
        for who in ("raw", "DCP", "Milepost"):
            assert values[f"{case}: {who}, wall"] > 0
            assert values[f"{case}: {who}, CPU"] >= 0
        if case.startswith("load"):
            assert values[f"{case}: raw, bytes read / needed"] == pytest.approx(1, abs=0.05)
            assert values[f"{case}: Milepost, bytes read / needed"] >= 1
    assert all(values[f"{case}: {who}, wall"] > 0 for case in TINY for who in ("DCP", "Milepost"))
    assert values["load, warm, 1 process: torch.load, wall"] > 0
    assert values["load, warm, 1 process: safetensors, wall"] > 0


@pytest.mark.slow
def test_one_case_can_be_asked_for_and_ctrl_c_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, "--only", "save-tmpfs-1", "load-warm-1", "--rounds", "1000"),
        stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/saved")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    while list(tmp_path.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not list(tmp_path.iterdir())


def test_a_case_that_does_not_exist_is_refused(tmp_path):
    done = subprocess.run(command(tmp_path, "--only", "lode"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no case begins with lode" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_of_gpu_memory_says_so(tmp_path):
    results = tmp_path / "rows.json"
    done = subprocess.run(
        command(tmp_path, "--device", "cuda", "--json", str(results)),
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "there is none on this machine" in done.stdout
    assert json.loads(results.read_text()) == []
