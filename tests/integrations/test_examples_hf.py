"""The examples for Accelerate and Transformers run, and go on where they stopped."""

import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parent.parent.parent / "examples"


def run(example, *arguments):
    command = [sys.executable, "-W", "ignore", str(EXAMPLES / example), *map(str, arguments)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=170, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.timeout(400)
def test_accelerate_example_goes_on(tmp_path):
    whole = run("accelerate_job.py", tmp_path / "whole", "--steps", 20).splitlines()
    run("accelerate_job.py", tmp_path / "cut", "--steps", 10)
    assert run("accelerate_job.py", tmp_path / "cut", "--steps", 20).splitlines() == [
        "resumed at step 10 on 1 ranks",
        *whole[2:],
    ]


@pytest.mark.timeout(400)
def test_transformers_example_goes_on(tmp_path):
    run("transformers_job.py", tmp_path, "--steps", 4)
    text = run("transformers_job.py", tmp_path, "--steps", 8)
    assert "'epoch': '1'" in text
    assert sorted(path.name for path in tmp_path.glob("checkpoint-*")) == ["checkpoint-4", "checkpoint-8"]
