"""What a save leaves behind when a rank never comes."""

import pytest
import torch

import milepost
from milepost.store import LocalStore, MemoryStore
from milepost.testing import run_ranks


def leave():
    raise MemoryError("this rank is gone")


@pytest.mark.parametrize("kind", ["memory", "folder"])
def test_coordinator_keeps_no_data_of_a_save_that_it_did_not_commit(tmp_path, kind):
    store = MemoryStore() if kind == "memory" else LocalStore(tmp_path / "run")
    milepost.save({"w": torch.zeros(4)}, store)
    before = sorted(store.list(""))

    def work(comm):
        halves = milepost.Sharded((8,), {(4 * comm.rank,): torch.ones(4)})
        with pytest.raises((milepost.RanksMissing, MemoryError)):
            milepost.save({"w": halves}, store, process_group=comm)

    run_ranks(2, work, timeout_s=0.5, trouble={1: {"writing": leave}})
    # The coordinator knows that it has not committed. The other rank is gone, and a later save sweeps what it wrote.
    assert [name for name in sorted(store.list("")) if not name.endswith("/00001.safetensors")] == before
    assert milepost.open(store)["w"].shape == (4,)


def test_other_ranks_keep_their_data_while_the_coordinator_may_commit():
    store = MemoryStore()

    def work(comm):
        halves = milepost.Sharded((8,), {(4 * comm.rank,): torch.ones(4)})
        with pytest.raises((milepost.RanksMissing, MemoryError)):
            milepost.save({"w": halves}, store, process_group=comm)

    run_ranks(2, work, timeout_s=0.5, trouble={0: {"writing": leave}})
    assert [name for name in store.list("data/") if "00001" in name.rsplit("/", 1)[1]]
