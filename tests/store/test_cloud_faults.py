"""An object store whose requests fail: through a proxy that breaks them, on a real server."""

import contextlib
import dataclasses
import os
import signal
import threading
import time

import pytest
import torch

import milepost
from faults.proxy import Rule
from milepost.store import CloudOptions, CloudStore
from milepost.store.cloud import retry

QUICK = CloudOptions(patience_s=3, timeout_s=1)
DATA = os.urandom(300_000)


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch):
    monkeypatch.setattr(retry, "FIRST_PAUSE_S", 0.01)


@pytest.fixture
def brief(seaweed, s3_proxy):
    """A store that gives up soon."""
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(patience_s=0.3, timeout_s=1))
        store.check()
        yield store


@pytest.fixture
def store(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, QUICK)
        store.check()
        yield store


def read(store, name, size_bytes=None):
    reader = store.reader(name, size_bytes=size_bytes)
    found = bytearray(reader.size_bytes)
    reader.read(0, [memoryview(found)[:1000], memoryview(found)[1000:]])
    return bytes(found)


FAULTS = [
    Rule("answer", status=503, code="SlowDown"),
    Rule("answer", status=429, code="TooManyRequests"),
    Rule("answer", status=500, code="InternalError"),
    Rule("answer", status=409, code="ConditionalRequestConflict"),
    Rule("answer", status=403, code="ExpiredToken"),
    Rule("lose_reply"),
    Rule("cut_request"),
    Rule("cut_reply"),
    Rule("flip_request", kind="PUT"),
    Rule("short_reply"),
    Rule("long_reply"),
    pytest.param(Rule("stall"), marks=pytest.mark.slow),
    pytest.param(Rule("stall_reply"), marks=pytest.mark.slow),
]


def name_of(rule):
    return f"{rule.fault} {rule.status if rule.fault == 'answer' else ''}".strip()


@pytest.mark.parametrize("rule", FAULTS, ids=name_of)
def test_requests_are_repeated_until_they_get_through(store, s3_proxy, rule):
    if rule.fault.startswith("stall"):
        store = CloudStore(store.url, dataclasses.replace(store.options, timeout_s=0.3))
    s3_proxy.traffic(reset=True)
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
    s3_proxy.heal()
    assert list(store.list("")) == []
    assert s3_proxy.traffic().faults >= (1 if rule.kind else 2)


def test_a_create_without_an_answer_is_no_reply_and_can_come_late(brief, s3_proxy):
    """The request waits on its way, and takes effect after the call has raised."""
    store = brief
    memory = bytearray(b"mine")
    s3_proxy.set_rules(Rule("late", kind="PUT", times=None))
    with pytest.raises(milepost.NoReply, match="whether the object was written, or still will be"):
        store.create("manifest", memory)
    memory.clear()
    s3_proxy.heal()
    assert list(store.list("")) == []
    assert min(s3_proxy.release()) == 200
    assert read(store, "manifest") == b"mine"
    with pytest.raises(milepost.AlreadyExists):
        store.create("manifest", b"other")


@pytest.mark.parametrize("fault", [pytest.param("stall", marks=pytest.mark.slow), "cut_request", "lose_reply"])
def test_memory_is_free_after_a_failure(brief, s3_proxy, fault):
    brief.check()
    s3_proxy.set_rules(Rule(fault, kind="PUT", times=None))
    brief = CloudStore(brief.url, dataclasses.replace(brief.options, timeout_s=0.1))
    memory = bytearray(20_000)
    with pytest.raises(milepost.NoReply):
        brief.create("data/a", memory, memoryview(memory)[5:])
    memory.clear()


def test_an_answer_that_cannot_be_is_an_error_and_no_data(brief, s3_proxy):
    brief.create("a", DATA)
    for fault in ("short_reply", "cut_reply"):
        s3_proxy.set_rules(Rule(fault, kind="GET", times=None))
        with pytest.raises(milepost.StorageError, match="cannot read"):
            read(brief, "a", len(DATA))


def test_a_server_that_comes_back_is_waited_for(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(patience_s=20, timeout_s=1))
        store.create("a", b"1")
        s3_proxy.set_rules(Rule("answer", status=503, times=None))
        threading.Timer(0.7, s3_proxy.heal).start()
        began = time.monotonic()
        store.create("b", b"2")
        assert time.monotonic() - began > 0.7
        assert sorted(store.list("")) == ["a", "b"]


def test_a_storm_lowers_the_number_of_requests_at_once(store, s3_proxy):
    s3_proxy.set_rules(Rule("answer", status=503, chance=0.3, times=None))
    made = []

    def create(k):
        store.create(f"{k:02}", b"x")
        made.append(k)

    threads = [threading.Thread(target=create, args=(k,)) for k in range(24)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(made) == list(range(24)), "all got through"
    assert store._asker.service.pace.bound < QUICK.requests


def test_an_object_of_another_size_is_damage(store):
    store.create("a", DATA)
    for wrong in (len(DATA) - 1, len(DATA) + 1, 10 * len(DATA)):
        with pytest.raises(milepost.CheckpointDamaged, match=f"has {len(DATA)} bytes and should have {wrong}"):
            store.reader("a", size_bytes=wrong).read(0, [memoryview(bytearray(10))])
    with pytest.raises(milepost.CheckpointDamaged):
        store.reader("a", size_bytes=10 * len(DATA)).read(2 * len(DATA), [memoryview(bytearray(10))])
    store.create("empty")
    store.reader("empty", size_bytes=0).read(0, [])
    with pytest.raises(FileNotFoundError):
        store.reader("absent", size_bytes=0).read(0, [])


def test_one_object_that_cannot_be_deleted_keeps_no_other(store, s3_proxy):
    for name in "abc":
        store.create(name, b"")
    s3_proxy.set_rules(
        Rule("answer", path="?delete", status=501, code="NotImplemented", times=None),
        Rule("answer", kind="DELETE", path="/b", status=403, code="AccessDenied", times=None),
    )
    with pytest.raises(milepost.StorageError, match=r"/b: 403 AccessDenied.*s3:DeleteObject"):
        store.delete("a", "b", "c")
    assert list(store.list("")) == ["b"], "and a service without deletions of many gets them one by one"


@pytest.mark.parametrize("unsigned", [False, True])
def test_what_changes_on_the_way_is_refused_by_the_service(seaweed, s3_proxy, unsigned):
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(unsigned=unsigned, patience_s=3, timeout_s=1))
        store.check()
        s3_proxy.set_rules(Rule("flip_request", kind="PUT", times=2))
        store.create("a", DATA)
        assert read(store, "a") == DATA
        assert s3_proxy.traffic().faults == 2


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PUT", "GET"])
def test_ctrl_c_ends_a_call_whose_requests_all_stall(seaweed, s3_proxy, kind):
    """It waits for the requests under way, at most. Patience is no reason to ask again."""
    state = {"w": torch.arange(3_000_000), "v": torch.arange(3_000_000)}
    small = milepost.Transfer(threads=3, block_bytes=1 << 20)
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(patience_s=120, timeout_s=2))
        milepost.save(state, store, transfer=small)
        s3_proxy.set_rules(Rule("stall", kind=kind, path="data/", times=None))
        began = time.monotonic()
        threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT)).start()
        with pytest.raises(KeyboardInterrupt):
            (milepost.save if kind == "PUT" else milepost.load)(state, store, transfer=small)
        assert time.monotonic() - began < 30
        s3_proxy.heal()
        target = {key: torch.zeros_like(value) for key, value in state.items()}
        milepost.save(state, store, transfer=small)
        milepost.load(target, store)
        assert all(torch.equal(target[key], value) for key, value in state.items())


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["PUT", "GET"])
def test_the_last_requests_of_a_call_are_repeated_too(seaweed, s3_proxy, kind):
    """When no job is left for another thread, those under way still need their retries."""
    state = {"w": torch.arange(3_000_000), "v": torch.arange(3_000_000)}
    small = milepost.Transfer(threads=8, block_bytes=8 << 20)
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, QUICK)
        milepost.save(state, store, transfer=small)
        s3_proxy.set_rules(Rule("answer", kind=kind, path="data/", times=8))
        (milepost.save if kind == "PUT" else milepost.load)(state, store, transfer=small)
        assert s3_proxy.traffic().faults == 8


def test_a_save_whose_requests_all_fail_can_be_cancelled(seaweed, s3_proxy):
    state = {"w": torch.arange(300_000), "v": torch.arange(300_000)}
    small = milepost.Transfer(threads=3, block_bytes=1 << 20)
    with seaweed.place(s3_proxy.endpoint) as url:
        store = CloudStore(url, CloudOptions(patience_s=60))
        milepost.save(state, store, transfer=small)
        s3_proxy.set_rules(Rule("answer", kind="PUT", path="data/", times=None))
        with milepost.AsyncSaver() as saver:
            pending = saver.save(state, store, transfer=small)
            while not s3_proxy.traffic().faults:
                time.sleep(0.05)
            began = time.monotonic()
            assert pending.cancel(timeout_s=20)
            assert time.monotonic() - began < 10
        s3_proxy.heal()
        assert milepost.save(state, store, transfer=small).generation == 2
