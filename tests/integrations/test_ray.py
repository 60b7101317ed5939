"""Ray Train: workers save to one folder and report it; another number of workers resumes, and the loss goes on."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import milepost

EXAMPLE = Path(__file__).parents[2] / "examples" / "ray_train.py"


def losses_without_ray(steps):
    """The losses of the same job in one process, without an interruption."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    found = []
    for step in range(1, steps + 1):
        inputs = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).double()
        loss = (model(inputs) - inputs.sum(1, keepdim=True)).pow(2).mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        found.append(loss.item())
    return found


def run(folder, workers, steps, program=EXAMPLE):
    command = [sys.executable, "-W", "ignore", program, folder, "--workers", str(workers), "--steps", str(steps)]
    environment = os.environ | {"RAY_worker_niceness": "0"}  # Ray lets its workers wait for all others
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.timeout(600)
def test_two_workers_save_and_three_resume(tmp_path):
    run(tmp_path, 2, 4)
    printed = run(tmp_path, 3, 8)
    found = [float(loss) for loss in re.findall(r"^step \d+  loss (\S+)$", printed, re.MULTILINE)]
    assert found == pytest.approx(losses_without_ray(8), rel=1e-9)
    assert "Ray's newest checkpoint: Checkpoint(" in printed
    with milepost.Checkpointer(tmp_path / "steps") as keeper:
        assert keeper.steps() == [6, 8]
        assert keeper.open().world == 3


KILLED = """
import sys
from pathlib import Path

import ray.train

sys.path[:0] = {paths!r}
from examples import ray_train
from tests.integrations.killing import die_in_the_next_commit

train = ray_train.train


def killed_once(config):
    run = Path(config["run"])
    begun = run / f"begun-{{ray.train.get_context().get_world_rank()}}"
    if not begun.exists():
        begun.touch()
        report = ray.train.report

        def die_after_step_2(metrics, **given):
            report(metrics, **given)
            if metrics["step"] == 3:
                die_in_the_next_commit(ray.train.get_context().get_world_rank(), run)

        ray.train.report = die_after_step_2
    train(config)


ray_train.train = killed_once
ray_train.main()
"""


@pytest.mark.timeout(600)
def test_workers_killed_in_a_save_are_started_again(tmp_path):
    """All workers die in the commit of step 4; Ray starts them again, and they go on after step 2."""
    program = tmp_path / "killed.py"
    root = EXAMPLE.parents[1]
    program.write_text(KILLED.format(paths=[str(root), str(root / "src")]))
    printed = run(tmp_path / "run", 2, 6, program)
    found = re.findall(r"^step (\d+)  loss (\S+)$", printed, re.MULTILINE)
    steps = [int(step) for step, _ in found]
    assert steps == [1, 2, 3, 3, 4, 5, 6]
    expected = losses_without_ray(6)
    assert [float(loss) for _, loss in found] == pytest.approx([expected[step - 1] for step in steps], rel=1e-9)
    assert (tmp_path / "run" / "dead").exists()
    with milepost.Checkpointer(tmp_path / "run" / "steps") as keeper:
        assert keeper.steps() == [4, 6]
