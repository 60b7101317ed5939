"""The savers behind `async_save`: kept from call to call, closed together, and gone with their process group."""

import gc
import weakref

import pytest
import torch
import torch.distributed as dist

import milepost
from milepost.background.saver import SaveRequest, begin_save
from milepost.background.shared import SharedSavers
from milepost.background.ticket import unless_interrupted
from milepost.comm import BoardComm, MemoryBoard
from milepost.store import MemoryStore
from milepost.testing import CountingStore

TIMEOUT_S = 60.0


def save(engine, state, place):
    return unless_interrupted(lambda ticket: begin_save(engine, ticket, SaveRequest(state, place), {}))


class Full(CountingStore):
    def before(self, number, call):
        if call.startswith("create"):
            raise milepost.StorageError("No space left on device")


@pytest.fixture
def savers():
    made = SharedSavers()
    yield made
    made.close()


@pytest.fixture
def job():
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    if dist.is_initialized():
        dist.destroy_process_group()


def test_one_saver_for_each_group_and_way_of_working(savers):
    comm, other = (BoardComm(MemoryBoard(), 0, 1, TIMEOUT_S) for _ in range(2))
    found = [savers.get(None, "thread", 1.0), savers.get(comm, "thread", 1.0), savers.get(other, "thread", 1.0)]
    assert len(set(map(id, found))) == 3
    assert savers.get(comm, "thread", 1.0) is found[1]
    assert savers.get(comm, "thread", 2.0) is not found[1]


@pytest.mark.usefixtures("job")
def test_a_process_group_is_not_kept_alive_and_its_saver_goes_with_it(savers):
    group = dist.new_group([0])
    known = weakref.ref(group)
    saver = savers.get(group, "thread", TIMEOUT_S)
    save(saver, {"t": torch.ones(1000)}, MemoryStore()).result(TIMEOUT_S)
    arena = saver.stager.arena
    assert arena.capacity
    assert savers.get(group, "thread", TIMEOUT_S) is saver
    dist.destroy_process_group(group)
    del group
    gc.collect()
    assert known() is None
    assert savers.get(None, "thread", TIMEOUT_S) is not saver
    assert not arena.capacity
    with pytest.raises(milepost.InvalidRequest, match="closed"):
        saver.check_open()


@pytest.mark.usefixtures("job")
def test_saver_of_a_destroyed_group_goes_while_it_is_referenced(savers):
    group = dist.new_group([0])
    saver = savers.get(group, "thread", TIMEOUT_S)
    dist.destroy_process_group(group)
    savers.get(None, "thread", TIMEOUT_S)
    with pytest.raises(milepost.InvalidRequest, match="closed"):
        saver.check_open()


@pytest.mark.usefixtures("job")
def test_an_error_outlives_the_group_of_its_save(savers):
    pending = save(savers.get(None, "thread", TIMEOUT_S), {"t": torch.ones(3)}, Full(MemoryStore()))
    pending.join()
    dist.destroy_process_group()
    gc.collect()
    savers.get(None, "thread", TIMEOUT_S)
    with pytest.raises(milepost.StorageError, match="No space left"):
        savers.close()
    savers.close()


def test_close_raises_one_error_and_logs_the_others(savers, caplog):
    comms = [BoardComm(MemoryBoard(), 0, 1, TIMEOUT_S) for _ in range(2)]
    for number, comm in enumerate(comms):
        save(savers.get(comm, "thread", 1.0), {"n": number}, Full(MemoryStore(f"memory://{number}")))
    with pytest.raises(milepost.StorageError, match="No space left"):
        savers.close()
    assert "failed too" in caplog.text
    savers.close()
