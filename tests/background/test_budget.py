"""Staging memory: within the budget, kept from save to save, and released after it."""

import gc
import threading
import time
import weakref

import pytest
import torch

import milepost
from milepost.core.limits import MIB
from milepost.store import LocalStore
from tests.background.saves import (
    DTYPE_NAMES,
    TIMEOUT_S,
    FailingStore,
    content,
    limited,
    saved_now,
    shared_state,
    spoil,
)
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


HUGE_PAGE = 2 * MIB


def budget_state():
    return {
        "a": random_tensor("float32", 700_000),
        "b": {str(i): random_tensor(DTYPE_NAMES[i % len(DTYPE_NAMES)], 1000 + i, seed=i) for i in range(300)},
        "c": random_tensor("int8", 5 * MIB // 2, seed=1),
        "t": random_tensor("float64", 300, 1000, seed=2).t(),
        "p": milepost.PerRank({"x": random_tensor("int64", 100_000, seed=3)}),
        "l": bytes(100_000),
        "v": [1, 2],
    }


@pytest.mark.slow
@pytest.mark.parametrize("share", [0, 0.3, 0.9, 1])
def test_data_over_the_budget_is_written_before_the_call_returns(saver, tmp_path, share):
    state = budget_state()
    expected = saved_now(state, tmp_path / "now")
    whole = sum(length for length, _ in expected["files"].values())
    budget = int(share * whole)
    with limited(saver, budget) as arena:
        for i in range(2):  # the second one finds plan and memory
            pending = saver.save(state, tmp_path / f"later{i}")
            if i == 1:
                spoil(state)
            assert arena.capacity <= max(-(-budget // HUGE_PAGE), 1) * HUGE_PAGE
            pending.result(TIMEOUT_S)
            assert content(tmp_path / f"later{i}") == expected


def test_the_call_waits_only_for_what_is_not_copied(tmp_path, monkeypatch):
    """It returns when the part that did not fit is in the file, and not when all is."""
    state = {"first": random_tensor("float64", 2 * MIB // 8), "second": random_tensor("int8", 40 * MIB, seed=1)}
    milepost.save(state, tmp_path / "now")
    go = threading.Event()
    written = []

    class Store(LocalStore):
        def writer(self, name, size_bytes, *, direct=True):
            inner = super().writer(name, size_bytes, direct=direct)
            write = inner.write

            def slow(offset, views):
                written.append(sum(map(len, views)))
                if name.startswith("data/") and sum(written) > 41 * MIB:
                    assert go.wait(TIMEOUT_S)
                write(offset, views)

            inner.write = slow
            return inner

    with milepost.AsyncSaver(staging_bytes=10 * MIB) as saver:
        pending = saver.save(state, Store(tmp_path / "later"), transfer=milepost.Transfer(1, MIB))
        assert not pending.done()
        assert saver._engine.stager.arena.capacity <= 10 * MIB
        assert 40 * MIB <= sum(written) < 42 * MIB
        spoil(state)
        go.set()
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later")["files"] == content(tmp_path / "now")["files"]


@pytest.mark.slow
@pytest.mark.parametrize("small", ["first", "last", "all"])
def test_ranks_with_different_budgets_save_together(team, tmp_path, small):
    """Where a process does the work for some ranks and the trainer for others, too."""
    budgets = [
        0 if small == "all" or rank == (0 if small == "first" else team.world - 1) else None
        for rank in range(team.world)
    ]
    states = [shared_state(rank, team.world, 400_000) for rank in range(team.world)]
    team.run(lambda saver, rank: saver.save(states[rank], tmp_path / "now").result(TIMEOUT_S))

    def work(saver, rank):
        with limited(saver, budgets[rank]) as arena:
            for i in range(2):
                state = shared_state(rank, team.world, 400_000)
                pending = saver.save(state, tmp_path / f"later{i}")
                spoil(state)
                pending.result(TIMEOUT_S)
            return arena.capacity

    capacities = team.run(work)
    assert [held > HUGE_PAGE for held in capacities] == [budget is None for budget in budgets]
    for i in range(2):
        assert content(tmp_path / f"later{i}") == content(tmp_path / "now")


@pytest.mark.slow
def test_saver_keeps_its_memory_across_structures(saver, tmp_path):
    arena = saver._engine.stager.arena
    states = {
        "small": lambda: {"a": torch.randn(1000)},
        "grown": lambda: {"a": torch.randn(3 * MIB), "b": [torch.randn(5)]},
        "values only": lambda: {"step": 1, "none": torch.zeros(0, 3)},
        "other dtypes": lambda: {"a": random_tensor("int8", 3 * MIB), "b": torch.randn(7, dtype=torch.float64)},
        "shrunk": lambda: {"a": torch.randn(3)},
        "nothing": dict,
    }
    versions = {}
    for _ in range(2):
        for name, make in states.items():
            state = make()
            expected = saved_now(state, tmp_path / "now")
            pending = saver.save(state, tmp_path / name)
            spoil(state)
            pending.result(TIMEOUT_S)
            assert content(tmp_path / name) == expected, name
            versions.setdefault(name, []).append(arena.version)
    assert len({v for name, seen in versions.items() for v in seen[name == "small" :]}) == 1, "reallocated only to grow"


def test_structure_changed_on_one_rank_is_saved_beside_unstaged_data(team, tmp_path):
    """A rank that let the caller go on could not write again: so it waits until all have the same plan."""

    def state_of(rank, changed):
        cut = 3 if changed and rank == 1 else 2
        parts = {(0,): torch.ones(cut), (cut,): torch.full((5 - cut,), 2.0)} if rank == 1 else {}
        return {"t": milepost.Sharded((5,), parts, torch.float32), "big": torch.arange(9000.0)}

    def work(saver, rank):
        with limited(saver, 0 if rank == 0 else None):
            saver.save(state_of(rank, False), tmp_path).result(TIMEOUT_S)
            state = state_of(rank, True)
            pending = saver.save(state, tmp_path)
            spoil(state)
            return pending.exception(TIMEOUT_S)

    assert set(team.run(work)) == {None}
    with milepost.open(tmp_path) as checkpoint:
        assert torch.equal(checkpoint["big"].read(), torch.arange(9000.0))
        assert checkpoint["t"].read().tolist() == [1, 1, 1, 2, 2]
        assert checkpoint.generation == 2


@pytest.mark.slow
def test_where_no_memory_can_be_had_the_state_is_written_from_where_it_is(saver, tmp_path, monkeypatch, caplog):
    """Once a process wrote what lay in its memory from the save before."""
    saver.save({"a": torch.full((MIB,), 7.0)}, tmp_path / "before").result(TIMEOUT_S)
    state = {"a": torch.full((MIB,), 5.0), "b": random_tensor("int16", 20 * MIB)}
    expected = saved_now(state, tmp_path / "now")
    with monkeypatch.context() as patched:
        patched.setattr(
            "milepost.background.staging.arena.Arena._new_pages", lambda *_: (_ for _ in ()).throw(MemoryError("none"))
        )
        pending = saver.save(state, tmp_path / "later")
        spoil(state)
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected
    assert "no staging memory" in caplog.text
    state = {"a": torch.ones(50)}
    pending = saver.save(state, tmp_path / "later")
    spoil(state)
    pending.result(TIMEOUT_S)
    assert milepost.open(tmp_path / "later")["a"].read().sum() == 50


@pytest.mark.slow
def test_nothing_keeps_the_state_alive_after_the_save(saver, tmp_path):
    state = {"t": torch.ones(1000), "m": torch.nn.Linear(3, 3)}
    watched = [weakref.ref(state["t"]), weakref.ref(state["m"])]
    saver.save(state, tmp_path).result(TIMEOUT_S)
    del state
    time.sleep(0.05)  # the thread ends
    gc.collect()
    assert [ref() for ref in watched] == [None, None]


def test_nothing_keeps_the_state_alive_after_a_save_that_failed(tmp_path):
    state = {"t": torch.ones(1000)}
    watched = weakref.ref(state["t"])
    with milepost.AsyncSaver() as saver:
        assert saver.save(state, FailingStore(tmp_path, "write")).exception(TIMEOUT_S)
        saver.save({"t": torch.zeros(3)}, tmp_path).result(TIMEOUT_S)
        del state
        time.sleep(0.05)
        gc.collect()
        assert watched() is None
