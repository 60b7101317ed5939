"""Copies to, from and between real object stores: the same bytes, and faults of the network on the way."""

import pytest
import torch

import milepost
from faults.proxy import Rule
from milepost.copying.equality import holds_the_same
from milepost.data.read import Files
from milepost.errors import CheckpointDamaged, NoReply
from milepost.store import store_at
from tests.urls import below

STATE = {"w": torch.arange(3 << 20, dtype=torch.float32), "b": torch.arange(5), "step": 7}


@pytest.fixture(autouse=True)
def credentials(request, monkeypatch):
    for name in ("seaweed", "azurite"):
        if name in request.fixturenames:
            for key, value in request.getfixturevalue(name).environment.items():
                monkeypatch.setenv(key, value)


def assert_same(one, other):
    stores = store_at(one), store_at(other)
    files = [Files(store, milepost.open(store).manifest) for store in stores]
    assert holds_the_same(*files, stores[1])
    assert milepost.open(other).verify().ok


def test_checkpoint_goes_through_object_stores_and_comes_home(seaweed, tmp_path):
    milepost.save(STATE, tmp_path / "a", metadata={"loss": 1})
    with seaweed.place() as url:
        milepost.copy(tmp_path / "a", below(url, "a"))
        milepost.copy(below(url, "a"), below(url, "b"))
        milepost.copy(below(url, "b"), tmp_path / "b")
        assert_same(tmp_path / "a", below(url, "b"))
        with pytest.raises(milepost.InvalidRequest, match="to itself"):
            milepost.copy(below(url, "a"), below(url, "a"))
    assert_same(tmp_path / "a", tmp_path / "b")


@pytest.mark.slow
def test_run_goes_from_one_provider_to_another(seaweed, azurite, tmp_path):
    with milepost.Checkpointer(tmp_path / "a") as keeper:
        for step in (1, 2):
            keeper.save(STATE, step, metrics={"loss": 1.0})
    with seaweed.place() as s3, azurite.place() as azure:
        milepost.copy(tmp_path / "a", s3)
        milepost.copy(s3, azure)
        assert [step.state for step in milepost.copy(s3, azure).steps] == ["there", "there"]
        milepost.copy(azure, tmp_path / "b", newest=True)
    assert_same(tmp_path / "a" / "step-0000000002", tmp_path / "b" / "step-0000000002")


ONCE = [
    Rule("flip_reply", "GET", path="/data/"),
    Rule("cut_reply", "GET", path="/data/"),
    Rule("flip_reply", "GET", path="manifest"),
    Rule("lose_reply", "PUT", path="/data/"),
    Rule("flip_request", "PUT", path="/data/"),
    Rule("lose_reply", "PUT", path="manifest"),
    Rule("answer", "PUT", path="/data/", times=3),
]


@pytest.mark.slow
@pytest.mark.parametrize("rule", ONCE, ids=lambda rule: f"{rule.fault} {rule.kind} {rule.path}")
def test_one_fault_on_the_way_changes_nothing(seaweed, s3_proxy, tmp_path, rule):
    milepost.save(STATE, tmp_path / "a")
    with seaweed.place(s3_proxy.endpoint) as url:
        milepost.copy(tmp_path / "a", below(url, "a"))
        s3_proxy.set_rules(rule)
        s3_proxy.traffic(reset=True)
        milepost.copy(below(url, "a"), below(url, "b"))
        assert s3_proxy.traffic().faults > 0
        s3_proxy.heal()
        assert_same(tmp_path / "a", below(url, "b"))


def test_byte_that_always_arrives_changed_is_named(seaweed, s3_proxy, tmp_path):
    milepost.save(STATE, tmp_path / "a")
    with seaweed.place(s3_proxy.endpoint) as url:
        milepost.copy(tmp_path / "a", below(url, "a"))
        s3_proxy.set_rules(Rule("flip_reply", "GET", path="/data/", times=None))
        with pytest.raises(CheckpointDamaged, match=r"00000\.safetensors"):
            milepost.copy(below(url, "a"), tmp_path / "b")
        s3_proxy.heal()
    assert [path for path in tmp_path.glob("b/**/*") if path.is_file()] == []


@pytest.mark.slow
def test_commit_without_a_reply_is_told_and_the_same_call_works(seaweed, s3_proxy, tmp_path):
    milepost.save(STATE, tmp_path / "a")
    with seaweed.place(s3_proxy.endpoint, patience_s="12", timeout_s="6") as url:
        s3_proxy.set_rules(Rule("late", "PUT", path="manifest-", times=None))
        with pytest.raises(NoReply, match="not known"):
            milepost.copy(tmp_path / "a", below(url, "a"))
        s3_proxy.heal()
        s3_proxy.release()
        assert milepost.copy(tmp_path / "a", below(url, "a")).steps[0].state in ("there", "copied")
        assert_same(tmp_path / "a", below(url, "a"))
