"""The faults over the life of a job: a few trials keep the promise."""

import pytest

from faults import jobs


def test_interrupted_saves_leave_one_state_and_the_trial_sees_a_mixture(tmp_path):
    tally = jobs._interrupted(3, tmp_path, jobs.milepost_async, jobs.milepost_value)
    assert tally.counts == {jobs.GOOD: 3}
    state = jobs.filled(1.0)
    state["2"][5] = 2.0
    jobs.milepost.save(state, tmp_path / "mixed")
    assert jobs._judged(jobs.milepost_async, tmp_path / "mixed", jobs.milepost_value) == jobs.MIXED


@pytest.mark.slow
def test_process_group_can_begin_again_at_the_same_port(tmp_path):
    """Before, savers and default arguments of torch kept the group, its store and 17 descriptors each time."""
    assert jobs._restarted(3, tmp_path / "job", "milepost").counts == {jobs.AGAIN: 2}


@pytest.mark.slow
def test_saves_leave_no_keys_descriptors_threads_or_objects(tmp_path):
    reports = jobs._run_job("leak", "milepost", 60, tmp_path / "job")
    assert [len(rank) for rank in reports] == [2] * jobs.WORLD
    for first, last in reports:
        for name in jobs.SLACK:
            assert last[name] <= first[name] + jobs.SLACK[name], name
