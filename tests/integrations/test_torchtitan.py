"""The real Trainer of torchtitan, on gloo ranks, with `milepost.integrations.torchtitan`."""

import dataclasses
import inspect
import os
import re
import shutil
import signal
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

import milepost
from milepost.store import LocalStore
from tests.integrations.titan import Ranks, trainer_for

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

STEPS = 6
LATE = dict.fromkeys(range(5, STEPS + 1))


@pytest.fixture(scope="module")
def ranks():
    server = Ranks()
    yield server
    server.close()


def manager_of(kind, **fields):
    """A configuration of Milepost's manager, or of torchtitan's own."""
    from milepost.integrations.torchtitan import CheckpointManager
    from torchtitan.components.checkpoint import CheckpointManager as TitanManager

    fields = {"enable": True, "interval": 2, "last_save_model_only": False, **fields}
    return (TitanManager if kind == "titan" else CheckpointManager).Config(**fields)


def train(rank, folder, steps=STEPS, kind="milepost", die_at=None, fields=None, job=None):
    """Train and give the losses by step. With `die_at`, rank 1 is killed while it writes the first file of that step."""
    trainer = trainer_for(folder, steps, manager_of(kind, **(fields or {})), **(job or {}))
    if die_at and rank == 1:
        real = LocalStore.writer

        def writer(self, *args, **options):
            made = real(self, *args, **options)
            if trainer.step >= die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        LocalStore.writer = writer
    trainer.train()
    trainer.close()
    return trainer.losses


def steps_in(folder):
    return milepost.Checkpointer(Path(folder) / "checkpoint", names="step-{step}").steps()


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory):
    """The losses of a run that is never stopped."""
    return ranks.run(2, train, tmp_path_factory.mktemp("straight"))[0]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_killed_save_resumes_from_last_whole_step(ranks, straight, tmp_path, mode):
    fields = {"async_mode": mode}
    assert ranks.outcomes(2, train, tmp_path, STEPS, "milepost", 4, fields)[1] is None
    assert (tmp_path / "checkpoint" / "step-4").exists()
    assert steps_in(tmp_path) == [2]
    losses = ranks.run(2, train, tmp_path, STEPS, "milepost", None, fields)
    assert losses == [{step: straight[step] for step in (3, 4, 5, 6)}] * 2
    assert steps_in(tmp_path) == [2, 4, 6]
