"""The benchmark of asynchronous saves runs, cleans up, and has a row for each bar. Speed is not tested here."""

import json
import signal
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
ASYNC_SAVE = BENCHMARKS / "async_save.py"


@pytest.fixture
def benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    import async_save

    return async_save


def command(folder: Path, *more: str) -> list[str]:
    small = ["--quick", "--device", "cpu", "--size-gb", "0.02", "--rounds", "1", "--folder", str(folder)]
    return [sys.executable, str(ASYNC_SAVE), *small, *more]


def outcome_of(benchmark, key: str, **more):
    """A first save that stalls 2 s; two later ones during steps of 0.125 s, which take 0.1 s otherwise."""
    save = benchmark.Save(returned_s=0.5, staged_s=0.5, done_s=4.0)
    busy = benchmark.Busy([save], [0.3], [0.125] * 4, [0.1] * 10)
    found = benchmark.Outcome(key, 1_000_000_000, first=benchmark.Save(2.0, 2.0, 6.0), busy=[busy, busy])
    found.idle, found.limits_s, found.syncs_s = [save, save], [0.4, 0.5], [4.0, 4.0]
    found.host_bytes = 1_050_000_000
    for name, value in more.items():
        setattr(found, name, value)
    return found


def values_of(rows):
    return {row.name.split(": ")[1]: (row.value, row.bar, row.ok) for row in rows if row.bar}


# The arithmetic


def test_the_stall_is_the_call_and_what_the_first_step_takes_longer(benchmark):
    save = benchmark.Save(0.5, 0.6, 4.0)
    busy = benchmark.Busy([save, save], [0.3, 0.05], [0.1], [0.1, 0.1, 0.7])
    assert busy.stalls_s == pytest.approx([0.7, 0.5])  # a quick first step gives nothing back


def test_the_slow_down_is_the_share_of_steps_that_were_not_made(benchmark):
    busy = benchmark.Busy([], [], [0.125] * 4, [0.1] * 10)
    assert busy.slow_down_percent == pytest.approx(20)


def test_too_few_steps_tell_no_slow_down(benchmark):
    assert benchmark.Busy([], [], [0.125] * 2, [0.1] * 10).slow_down_percent is None


def test_an_outcome_survives_json(benchmark):
    outcome = outcome_of(benchmark, "thread-host")
    assert benchmark.Outcome.from_dict(json.loads(json.dumps(outcome.as_dict()))) == outcome


def test_every_bar_compares_what_was_measured(benchmark):
    outcomes = [outcome_of(benchmark, "dcp-default"), outcome_of(benchmark, "thread-host")]
    assert values_of(benchmark.rows_of(outcomes, "cuda")) == {
        "Milepost thread/host, staged, later saves / limit": (pytest.approx(1.125), "<= 1.15", True),
        # DCP's usual stall of 0.5 s, since that of its first save was longer.
        "Milepost thread/host, first save / stall of DCP's default": (pytest.approx(4), "<= 0.5", False),
        "Milepost thread/host, training slow-down": (pytest.approx(20), "< 2", False),
        "Milepost thread/host, total / synchronous save": (pytest.approx(1), "<= 1.1", True),
        "Milepost thread/host, host memory / state": (pytest.approx(1.05), "<= 1.1", True),
    }


def test_a_short_stall_is_asked_of_copies_on_the_gpu_and_overlapped_ones(benchmark):
    for key, device, bar in (
        ("thread-device", "cuda", "< 10"),
        ("thread-overlap", "cuda", "< 20"),
        ("thread-overlap", "cpu", None),
        ("process-host", "cuda", None),
    ):
        rows = benchmark.rows_of([outcome_of(benchmark, key)], device)
        stall = next(row for row in rows if row.name.endswith("stall per save"))
        assert (stall.value, stall.bar) == (pytest.approx(700), bar)


def test_names_of_rows_are_unique_and_the_tables_show_every_contender(benchmark):
    outcomes = [outcome_of(benchmark, key) for key in benchmark.CONTENDERS]
    rows = benchmark.rows_of(outcomes, "cuda")
    assert len({row.name for row in rows}) == len(rows)
    for contender in benchmark.CONTENDERS.values():
        assert f"\n{contender.name}  " in benchmark.saves_table(outcomes)
        assert f"\n{contender.name}  " in benchmark.training_table(outcomes)


def test_a_contender_that_failed_has_a_note_and_no_bars(benchmark):
    failed = benchmark.Outcome("thread-host", 1_000, notes=["failed in the first save: OSError: no"])
    broken = replace(outcome_of(benchmark, "dcp-thread"), busy=[], idle=[], notes=["failed in round 1"])
    assert "none" in benchmark.saves_table([failed, broken])
    assert benchmark.rows_of([failed], "cpu") == []
    assert "Milepost thread/host: failed in the first save: OSError: no" in benchmark.notes_of([failed, broken])


def test_the_model_has_the_size_that_was_asked_for(monkeypatch):
    monkeypatch.syspath_prepend(str(BENCHMARKS))
    from training import BYTES_OF_A_PARAMETER, dimensions

    for size in (20_000_000, 250_000_000, 1_000_000_000, 8_000_000_000, 13_000_000_000):
        width, layers, vocabulary = dimensions(size)
        matrices = width * (12 * layers * width + vocabulary)
        assert matrices * BYTES_OF_A_PARAMETER == pytest.approx(size, rel=0.01)


# The real thing


@pytest.mark.slow
def test_a_small_run_gives_rows_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    done = subprocess.run(
        command(work, "--only", "thread-host", "dcp-default", "--json", str(results)),
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What an asynchronous save costs a training loop")
    assert "failed" not in done.stdout
    assert not list(work.iterdir())

    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert all((row["bar"] is None) == (row["ok"] is None) for row in rows)
    assert len({row["name"] for row in rows}) == len(rows)
    names = {row["name"]: row for row in rows}
    ours, dcp = "async save, cpu: Milepost thread/host", "async save, cpu: DCP default"
    # The slow-down has a bar too, but such a save may be over before the second step is.
    assert {name for name in names if names[name]["bar"]} - {f"{ours}, training slow-down"} == {
        f"{ours}, staged, later saves / limit",
        f"{ours}, first save / stall of DCP's default",
        f"{ours}, total / synchronous save",
        f"{ours}, host memory / state",
    }
    for who in (ours, dcp):
        for what in ("first save, until control returns", "until committed, training", "stall per save"):
            assert names[f"{who}, {what}"]["value"] > 0


@pytest.mark.slow
def test_ctrl_c_leaves_nothing_behind(tmp_path):
    process = subprocess.Popen(
        command(tmp_path, "--only", "dcp-default"), stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True
    )
    try:
        deadline = time.monotonic() + 60
        while not list(tmp_path.glob("*/*/checkpoint")) and time.monotonic() < deadline:
            time.sleep(0.05)
        process.send_signal(signal.SIGINT)
        _, errors = process.communicate(timeout=60)
    finally:
        process.kill()
        process.wait()
    assert process.returncode == 130, errors
    assert not list(tmp_path.iterdir())


def test_a_contender_that_does_not_exist_is_refused(tmp_path):
    done = subprocess.run(command(tmp_path, "--only", "dpc"), capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 2
    assert "no contender begins with dpc" in done.stderr


@pytest.mark.slow
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_the_benchmark_says_so(tmp_path):
    results = tmp_path / "rows.json"
    done = subprocess.run(
        [*command(tmp_path), "--device", "cuda", "--json", str(results)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "there is none on this machine" in done.stdout
    assert json.loads(results.read_text()) == []
