"""Requests that an object store refuses: each one that is made again is an event of the save or load it belongs to."""

import pytest
import torch

import milepost
from faults.proxy import Rule
from milepost import events
from milepost.store import CloudOptions, CloudStore
from milepost.store.cloud import retry
from tests.events.hearing import check_whole, listening


@pytest.mark.slow
def test_retries_belong_to_the_operation_they_delay(seaweed, s3_proxy, monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)
    state = {"w": torch.zeros(6 << 20)}
    with seaweed.place(s3_proxy.endpoint) as url, listening() as heard:
        store = CloudStore(url, CloudOptions(patience_s=120, timeout_s=60))
        s3_proxy.set_rules(Rule("answer", kind="PUT", path="data", status=503, code="SlowDown", times=3))
        milepost.save(state, store)
        s3_proxy.set_rules(Rule("answer", kind="GET", path="data", status=500, code="InternalError", times=2))
        milepost.load(state, store)
    save, load = heard.operations()
    check_whole(save)
    check_whole(load)
    found = [(event.kind, event.request) for event in heard.of(events.Retried)]
    assert found == [("save", "put")] * 3 + [("load", "get")] * 2, "also from the threads that move the data"
    assert (save[-1].retries, load[-1].retries) == (3, 2)
    for event in heard.of(events.Retried):
        assert "data/" in event.name
        assert event.attempt >= 1
        assert 0 < event.pause_s < 1
        assert (
            "503" in event.reason or "SlowDown" in event.reason or "500" in event.reason or "Internal" in event.reason
        )
