"""Forks during a save: a child gets its garbage collection back, holds no lock of the parent, and can save."""

import gc
import os
import signal
import subprocess
import sys
import threading
import time

import pytest
import torch
import torch.distributed as dist

import milepost
import milepost.dcp
from milepost.background.shared import SharedSavers
from milepost.data import collection_pause
from milepost.data.collection_pause import CollectionPaused
from milepost.data.threads import Crew, Latch
from milepost.dcp._engine.shared import TURNS

TIMEOUT_S = 60.0


def in_fork(work):
    """Whether `work()` is true in a fork of this process."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            signal.alarm(20)  # where it hangs, it must not hang for ever
            code = 0 if work() else 2
        finally:
            os._exit(code)
    return os.waitpid(child, 0)[1] == 0


def test_fork_during_a_pause_has_its_collector():
    """Before, the collector stayed off in data-loader workers that began during a save, for ever."""
    paused, go = threading.Event(), threading.Event()

    def pause():
        with CollectionPaused():
            paused.set()
            go.wait(TIMEOUT_S)

    thread = threading.Thread(target=pause)
    thread.start()
    assert paused.wait(TIMEOUT_S)

    def nested():
        with CollectionPaused():
            inside = gc.isenabled()
        return gc.isenabled() and not inside

    try:
        assert not gc.isenabled()
        assert in_fork(gc.isenabled)
        assert in_fork(nested)
        with CollectionPaused():
            child_ends_the_block = os.fork()
            if child_ends_the_block == 0:
                CollectionPaused().__exit__(None, None, None)
                os._exit(0 if gc.isenabled() and not collection_pause._pauses else 1)
            assert os.waitpid(child_ends_the_block, 0)[1] == 0
    finally:
        go.set()
        thread.join()
    assert gc.isenabled()


def test_fork_does_not_inherit_held_locks(tmp_path):
    savers = SharedSavers()
    with savers._lock, TURNS._lock, collection_pause._lock:
        held = [savers.close, lambda: TURNS.wait(object()), lambda: CollectionPaused().__enter__()]
        for call in held:
            assert in_fork(lambda call=call: call() is None)


def test_fork_can_save_in_the_background(tmp_path):
    milepost.async_save({"w": torch.ones(3)}, tmp_path / "parent").result(TIMEOUT_S)

    def save():
        receipt = milepost.async_save({"w": torch.zeros(3)}, tmp_path / "child").result(TIMEOUT_S)
        milepost.close_async()
        return receipt.generation == 1

    assert in_fork(save)
    assert milepost.async_save({"w": torch.ones(3)}, tmp_path / "parent").result(TIMEOUT_S).generation == 2
    milepost.close_async()


PINNED = """
import torch.distributed as dist
dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
import weakref, torch, milepost, milepost.dcp
known = weakref.ref(dist.group.WORLD)
place = milepost.store.MemoryStore("memory://pinned")
milepost.async_save({"w": torch.ones(2)}, place).result()
milepost.async_save({"w": torch.ones(2)}, place, planner=milepost.planning.DefaultSavePlanner()).result()
keeper = milepost.Checkpointer("memory://steps")
keeper.save({"w": torch.ones(2)}, 1)
keeper.async_save({"w": torch.ones(2)}, 2).result()
keeper.close()
from torch.distributed.nn import functional
assert functional.broadcast.__defaults__ == (None,)
dist.destroy_process_group()
assert known() is None, "something keeps the process group"
"""


@pytest.mark.slow
def test_nothing_keeps_a_process_group_that_was_destroyed():
    """In a process of its own: what torch imports after `init_process_group` must not be there before."""
    done = subprocess.run(
        [sys.executable, "-c", PINNED], capture_output=True, text=True, timeout=TIMEOUT_S, check=False
    )
    assert done.returncode == 0, done.stderr


def test_latch_and_crew():
    latch, seen = Latch(), []
    crew = Crew(lambda: (latch.wait(), seen.append(1)), "crew", 3)
    assert crew.start() == 3
    assert not crew.join(0.05)
    assert not latch.wait(0.01)
    latch.set()
    assert crew.join(TIMEOUT_S)
    assert (len(seen), latch.is_set(), latch.wait()) == (3, True, True)
    unstarted = Crew(lambda: seen.append(2), "crew")
    assert unstarted.join()
    unstarted.start()
    time.sleep(0.05)
    assert 2 not in seen
    assert not dist.is_initialized()
