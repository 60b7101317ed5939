"""SIGKILL before and after each system call of an incremental save: what is listed is whole, the next save works."""

import os
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.slow
def test_kill_at_every_call_of_an_incremental_save(tmp_path):
    program = Path(__file__).parent / "killed_saves.py"
    done = subprocess.run(
        [sys.executable, str(program), str(tmp_path)],
        env={**os.environ, "OMP_NUM_THREADS": "1"}, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    before, after = map(int, done.stdout.split())
    assert min(before, after) > 40
