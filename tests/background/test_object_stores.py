"""Saves in the background to an object store: as to a folder, and credentials stay where they belong."""

from pathlib import Path

import pytest
import torch

import milepost
from faults.proxy import Rule
from faults.servers.seaweed import KEYS, OTHER_KEYS
from milepost.store import CloudOptions, CloudStore
from tests.trainers import Job, begin, holds, open_saver
from tests.urls import below


@pytest.fixture
def url(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        yield url


def with_keys(url):
    """A store whose credentials are nowhere but in its options."""
    return CloudStore(url, CloudOptions(access_key_id=OTHER_KEYS.access, secret_access_key=OTHER_KEYS.secret))


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_a_save_in_the_background_counts_what_it_uploads(url, background):
    seen = []
    state = {"w": torch.arange(3_000_000.0), "step": 1}
    with milepost.AsyncSaver(background=background) as saver:
        saver.save(state, with_keys(url), progress=seen.append).result(60)
        state["w"] += 1
        saver.save(state, below(url, "by-environment")).result(60)
    assert seen[-1].done_bytes == seen[-1].total_bytes >= 12_000_000
    assert torch.equal(milepost.open(with_keys(url))["w"].read() + 1, state["w"])
    assert torch.equal(milepost.open(below(url, "by-environment"))["w"].read(), state["w"])


@pytest.mark.slow
def test_a_process_finishes_the_upload_of_a_killed_trainer(url, s3_proxy):
    store = with_keys(url)
    with Job(1) as job:
        job.call(open_saver)
        s3_proxy.set_rules(Rule("answer", "PUT", times=4, status=503))  # a storm, in which retries go on
        writers = job.call(begin, store, 7)
        shown = [Path(f"/proc/{pid}/{what}").read_bytes() for pid in writers for what in ("cmdline", "environ")]
        job.kill()
        assert job.writers_end(60.0)
    assert holds(store) == 7
    assert not any(OTHER_KEYS.secret.encode() in text for text in shown)
    assert len(list(store.list("data/"))) == 1, "nothing is left of attempts that failed"


@pytest.mark.slow
def test_credentials_of_this_process_alone_are_refused_at_once(url):
    given = {"access_key_id": KEYS.access, "secret_access_key": KEYS.secret}
    store = CloudStore(url, CloudOptions(credentials=lambda: given))
    with milepost.AsyncSaver(background="process") as saver:
        with pytest.raises(milepost.InvalidRequest, match=r"belongs to this one.*thread") as refused:
            saver.save({"step": 1}, store)
        assert KEYS.secret not in str(refused.value)
    with milepost.AsyncSaver(background="thread") as saver:
        saver.save({"step": 2}, store).result(60)
    assert milepost.open(store)["step"] == 2
