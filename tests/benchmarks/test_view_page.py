"""The benchmark of the page runs, cleans up, and gives rows. Nothing here looks at how fast anything is."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests import browser


@pytest.mark.slow
@pytest.mark.skipif(bool(browser.why_not()), reason=browser.why_not())
def test_a_small_run_of_the_benchmark_gives_rows_and_cleans_up(tmp_path):
    work, results = tmp_path / "work", tmp_path / "rows.json"
    work.mkdir()
    script = Path(__file__).parents[2] / "benchmarks" / "view_page.py"
    command = [sys.executable, str(script), "--quick", "--rounds", "1", "--dir", str(work), "--json", str(results)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=150)
    assert done.returncode == 0, done.stderr
    assert not list(work.iterdir())
    rows = json.loads(results.read_text())
    assert all(set(row) == {"name", "value", "unit", "bar", "ok"} for row in rows)
    assert [row["bar"] for row in rows if row["bar"]] == ["< 2.0", "< 20.0"]
    assert len({row["name"] for row in rows}) == len(rows) == 27
