"""A few trials of ranks that lost each other; each has its own processes."""

import pytest

from faults import rejoin


@pytest.mark.slow
@pytest.mark.parametrize(("victim", "skips"), [(0, False), (2, True)])
def test_the_same_call_works_again_after_a_missed_deadline(tmp_path, victim, skips):
    assert rejoin.one_missed("milepost", victim, skips, tmp_path / "here") == rejoin.WORKS


@pytest.mark.slow
def test_a_job_that_torchrun_starts_again_resumes(tmp_path):
    ending = rejoin.one_restart("milepost", tmp_path / "job")
    assert ending in (rejoin.RESUMES, rejoin.NO_KILL)
