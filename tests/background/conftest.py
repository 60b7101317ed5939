"""Savers, kept over many tests: a process takes seconds to start."""

import pytest

import milepost
from tests.background.saves import Team, shared_state


@pytest.fixture(scope="package", params=["thread", "process"])
def saver(request):
    with milepost.AsyncSaver(background=request.param) as made:
        yield made


@pytest.fixture(scope="package", params=["thread", "process"])
def team(request):
    made = Team(request.param, 4 if request.param == "thread" else 2)
    # Processes start here, so that no test waits for them.
    made.run(lambda saver, rank: saver.prewarm(shared_state(rank, made.world)))
    yield made
    made.close()
