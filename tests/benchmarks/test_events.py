"""The benchmark of events runs, cleans up, and has a row for every bar. Speed is not tested here."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_events_benchmark_has_a_row_for_every_bar_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    command = [sys.executable, str(ROOT / "benchmarks/events.py"), "--quick", "--size-gb", "0.002", "--rounds", "1"]
    done = subprocess.run(
        [*command, "--against", str(ROOT), "--dir", str(work), "--json", str(results)],
        capture_output=True, text=True, timeout=150, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("What events cost where nobody listens")
    assert not list(work.iterdir())
    rows = {row["name"]: row for row in json.loads(results.read_text())}
    barred = {name: row["bar"] for name, row in rows.items() if row["bar"]}
    share = "events without a listener, share of the time"
    assert barred == {
        f"0.002 GB save: {share}": "<= 0.1",
        f"0.002 GB load: {share}": "<= 0.1",
        "tiny save: no listener / before": "<= 1.05",
        "tiny load: no listener / before": "<= 1.05",
    }
    assert rows["tiny save: calls into events"]["value"] > 5
    assert rows["tiny load: 100 listeners"]["value"] > 0
