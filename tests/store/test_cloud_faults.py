"""An object store whose requests fail: through a proxy that breaks them, on a real server."""

import contextlib
import os

import pytest

import milepost
from faults.proxy import Rule
from milepost.store import CloudOptions, CloudStore

QUICK = CloudOptions(patience_s=3, timeout_s=1)
DATA = os.urandom(3_000_000)


@pytest.fixture
def store(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        yield CloudStore(url, QUICK)


def read(store, name, size_bytes=None):
    reader = store.reader(name, size_bytes=size_bytes)
    found = bytearray(reader.size_bytes)
    reader.read(0, [memoryview(found)[:1000], memoryview(found)[1000:]])
    return bytes(found)


ANSWERS = [
    Rule("answer", status=503, code="SlowDown", times=3),
    Rule("answer", status=429, code="TooManyRequests", times=2),
    Rule("answer", status=500, code="InternalError"),
    Rule("answer", status=409, code="ConditionalRequestConflict"),
    Rule("answer", status=403, code="ExpiredToken"),
]
FAULTS = [
    *ANSWERS,
    Rule("lose_reply"),
    Rule("cut_request"),
    Rule("cut_reply"),
    Rule("stall", seconds=5),
    Rule("stall_reply", seconds=5),
    Rule("short_reply"),
    Rule("long_reply"),
]


def named(rule):
    return f"{rule.fault} {rule.status if rule.fault == 'answer' else ''}".strip()


@pytest.mark.parametrize("rule", FAULTS, ids=named)
def test_requests_are_repeated_until_they_get_through(store, s3_proxy, rule):
    s3_proxy.set_rules(rule)
    with contextlib.suppress(milepost.AlreadyExists):  # the attempt whose reply was lost has made it
        store.create("data/a", DATA[:1000], DATA[1000:])
    s3_proxy.set_rules(rule)
    assert read(store, "data/a") == DATA
    s3_proxy.set_rules(rule)
    assert read(store, "data/a", len(DATA)) == DATA
    s3_proxy.set_rules(rule)
    assert list(store.list("")) == ["data/a"]
    s3_proxy.set_rules(rule)
    assert list(store.list("", shallow=True)) == ["data/"]
    s3_proxy.set_rules(rule)
    store.delete("data/a", "data/b")
    assert list(store.list("")) == []
    assert s3_proxy.traffic().faults >= 3
