"""Steps on a real S3 server, with real ranks: resume, retention, and a commit whose request comes late."""

import os

import pytest
import torch

import milepost
from faults.proxy import Rule
from milepost import Checkpointer
from milepost.steps.shelf import step_name
from milepost.store import store_at
from tests.ranks import spawn
from tests.steps.numbered import holds, state

pytestmark = pytest.mark.slow


def wide(number):
    return state(number) | {"wide": torch.full((100_000,), float(number))}


def save_on_ranks(rank, url, environment, steps, expected):
    os.environ.update(environment)
    with Checkpointer(url, keep_last=2) as keeper:
        found = wide(0)
        assert keeper.restore(found, default=0) == expected
        assert holds(found, expected)
        outcomes = []
        for step in steps:
            try:
                keeper.save(wide(step), step)
                outcomes.append(f"saved {step}")
            except milepost.NoReply as error:
                outcomes.append(f"{step}: {'may still take effect' in str(error)}")
        return outcomes, keeper.steps()


def test_ranks_resume_from_s3_and_a_late_commit_appears_whole(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint, patience_s="2", timeout_s="1") as url:
        job = (save_on_ranks, url, seaweed.environment)
        assert spawn(2, *job, (1, 2, 3), 0) == [(["saved 1", "saved 2", "saved 3"], [2, 3])] * 2
        s3_proxy.set_rules(Rule("late", "PUT", path=f"{step_name(4)}/manifest-", times=None))
        assert spawn(2, *job, (4,), 3) == [(["4: True"], [2, 3])] * 2
        assert len(list(store_at(url).list(f"{step_name(4)}/data/"))) == 2, "what both ranks wrote"
        s3_proxy.heal()
        assert 200 in s3_proxy.release()
        assert spawn(2, *job, (5,), 4) == [(["saved 5"], [4, 5])] * 2


def test_copy_of_a_deletion_that_comes_late_hits_no_newer_step(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint, timeout_s="1") as url, Checkpointer(url) as keeper:
        keeper.save(state(1), 1)
        keeper.save(state(2), 2)
        s3_proxy.set_rules(*(Rule("late", kind) for kind in ("DELETE", "POST")))
        keeper.remove(2)  # the first request for each deletion is late, and is sent again
        s3_proxy.heal()
        keeper.save(state(3), 2)
        assert s3_proxy.release()
        assert keeper.steps() == [1, 2]
        assert keeper.restore(found := state(0)) == 2
        assert holds(found, 3)
