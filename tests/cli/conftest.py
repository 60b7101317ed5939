"""A run and checkpoints to look at. Tests that change one take a copy: `copied`."""

import shutil
from pathlib import Path

import pytest
import torch

import milepost
from milepost.testing import run_ranks

WORLD = 3
STEPS = (100, 200, 300, 400)
ROWS = 120 * WORLD


def state_of(rank, step):
    """A weight that is cut over the ranks and changes with the steps, one that is equal everywhere and always, ..."""
    rows = ROWS // WORLD
    part = torch.full((rows, 256), float(step)) + torch.arange(256.0) + rank
    return {
        "model": {
            "w": milepost.Sharded((ROWS, 256), {(rank * rows, 0): part}, torch.float32),
            "frozen": torch.arange(50_000.0),
        },
        "step": step,
        "rng": milepost.PerRank(rank + 100),
    }


def save_run(root, steps=STEPS, **options):
    """Steps of several ranks, each with a metric that falls, except in the last one."""

    def work(comm):
        with milepost.Checkpointer(root, process_group=comm, statistics=True, **options) as keeper:
            for step in steps:
                loss = 1000 / step if step < steps[-1] else 9.0
                keeper.save(state_of(comm.rank, step), step, metrics={"loss": loss})

    run_ranks(WORLD, work)
    return Path(root)


@pytest.fixture(scope="session")
def run(tmp_path_factory):
    """A run of four steps, as three ranks saved them."""
    return save_run(tmp_path_factory.mktemp("runs") / "a", keep_last=10)


@pytest.fixture(scope="session")
def step(run):
    """Its last step."""
    return run / "step-0000000400"


@pytest.fixture
def copied(run, tmp_path):
    """A copy of the run, to damage or to prune."""
    return Path(shutil.copytree(run, tmp_path / "copy"))


NASTY = [
    "\x1b[31mred\x1b[0m",
    "\x1b]0;title\x07",
    "line\nbreak\r\ttab",
    "\u202eright to left\u2066",
    "<script>alert(1)</script>",
    "back\\slash \\x1b",
    "\x9b31m\x85",
    "zero\u200bwidth\ufeff",
    "wide 漢字 ключ 🙂 e\u0301",
    "[bold]markup[/]",
    "x" * 10_000,
    "-dash",
    "--help",
    "",
    " ",
    "\x00nul",
    "\u2028line\u2029",
]
"""Names that a terminal would obey, and others that are hard to show."""


@pytest.fixture(scope="session")
def nasty(tmp_path_factory):
    """A checkpoint whose keys, values, metadata and folder have such names."""
    place = tmp_path_factory.mktemp("nasty") / "a\x1b[31m[red]\u202e"
    state = {key: torch.full((3,), float(i)) for i, key in enumerate(NASTY)}
    state |= {"values": {key: key for key in NASTY}, "odd": milepost.PerRank("\x1b[2J")}
    milepost.save(state, place, metadata={key: key for key in NASTY})
    return place
