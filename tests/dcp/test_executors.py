"""The executors behind `async_save`, run by a program: a failure ends one save, not the process that does the next."""

import os
import signal
import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist

import milepost
import milepost.dcp as dcp
from milepost.dcp import _async_process_executor as processes
from milepost.dcp import _async_thread_executor as threads
from milepost.dcp._engine.save_process import GroupPlace, SaveProcess
from milepost.errors import WriterDied
from tests.ranks import spawn


class FailsOnce(dcp.FileSystemWriter):
    """Fails on one rank while there is no file of that name, which it makes; says in which process it wrote."""

    def __init__(self, path, mark, rank):
        super().__init__(path)
        self.mark, self.rank = mark, rank

    def write_data(self, plan, planner):
        assert dist.get_world_size() == 2  # a process group of their own
        if self.rank == dist.get_rank() and not self.mark.exists():
            self.mark.touch()
            raise OSError("the disk says no")
        (self.mark.parent / f"pid{dist.get_rank()}").write_text(str(os.getpid()))
        return super().write_data(plan, planner)


class Hangs(dcp.FileSystemWriter):
    """Writes for ever, after it said in which process."""

    def write_data(self, plan, planner):
        (self.path.parent / f"hangs{dist.get_rank()}").write_text(str(os.getpid()))
        time.sleep(600)


class Unknown:
    """A value that no process can be sent."""

    def __reduce__(self):
        raise TypeError("it stays here")


def loaded(path):
    state = {"w": torch.zeros(3), "n": 0}
    dcp.load(state, checkpoint_id=path)
    return state["w"].tolist(), state["n"]


def error_of(future):
    error = future.exception(120)
    return f"{type(error).__name__}: {error}" if error is not None else None


def wait_for(path):
    deadline = time.monotonic() + 60
    while not path.exists() or not path.read_text():
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(path.read_text())


def process_job(rank, folder):
    def save(state, place, **options):
        # A new executor each time, as `async_save` of DCP makes them: the process stays.
        executor = processes._ProcessBasedAsyncCheckpointExecutor()
        return executor.execute_save(state, checkpoint_id=folder / place, **options)

    failed = error_of(save({"w": torch.ones(3), "n": 1}, "a", storage_writer=FailsOnce(folder, folder / "mark", 1)))
    good = save({"w": torch.full((3,), 2.0), "n": 2}, "a", storage_writer=FailsOnce(folder, folder / "mark", 1))
    metadata = good.result(120)
    first = loaded(folder / "a")
    pid = wait_for(folder / f"pid{rank}")
    staging = Future()
    if rank:
        staging.set_exception(ValueError("no memory left to stage"))
    else:
        staging.set_result({"w": torch.ones(3), "n": 3})
    unstaged = error_of(save(staging, "a"))
    unsent = error_of(save({"w": torch.ones(3), "n": Unknown() if rank else 3}, "a"))
    kept = loaded(folder / "a")
    hanging = save({"w": torch.ones(3), "n": 3}, "b", storage_writer=Hangs(folder / "b"))
    if rank:
        os.kill(wait_for(folder / "hangs1"), signal.SIGKILL)
    died = error_of(hanging)
    save({"w": torch.full((3,), 4.0), "n": 4}, "a", storage_writer=FailsOnce(folder, folder / "mark", 1)).result(120)
    return {
        "failed": failed,
        "keys": sorted(metadata.state_dict_metadata),
        "first": first,
        "same process": pid,
        "unstaged": unstaged,
        "unsent": unsent,
        "kept": kept,
        "died": died,
        "again": loaded(folder / "a"),
        "new process": int((folder / f"pid{rank}").read_text()) != pid != os.getpid(),
    }


@pytest.mark.slow
def test_a_process_goes_on_after_failures_and_is_replaced_after_death(tmp_path):
    for found in spawn(2, process_job, tmp_path):
        assert "the disk says no" in found["failed"]
        assert found["keys"] == ["n", "w"]
        assert found["first"] == found["kept"] == ([2.0] * 3, 2)
        assert "no memory left to stage" in found["unstaged"]
        assert "it stays here" in found["unsent"]
        assert "WriterDied" in found["died"]
        assert found["again"] == ([4.0] * 3, 4)
        assert found["new process"]


def thread_job(rank, folder):
    executor = threads._ThreadBasedAsyncCheckpointExecutor()
    staging = Future()
    future = executor.execute_save(staging, checkpoint_id=folder / "a")
    dcp.save({"w": torch.ones(3), "n": 1}, checkpoint_id=folder / "b")  # in front, meanwhile
    if rank:
        staging.set_exception(ValueError("no memory left to stage"))
    else:
        staging.set_result({"w": torch.ones(3), "n": 2})
    failed = error_of(future)
    executor.execute_save({"w": torch.full((3,), 3.0), "n": 3}, checkpoint_id=folder / "a").result(60)
    return failed, loaded(folder / "a"), loaded(folder / "b")


@pytest.mark.slow
def test_a_thread_saves_beside_the_calls_in_front(tmp_path):
    for failed, after, front in spawn(2, thread_job, tmp_path):
        assert "no memory left to stage" in failed
        assert after == ([3.0] * 3, 3)
        assert front == ([1.0] * 3, 1)


class Local:
    """A class that is not defined in the saving process before it has imported this module."""

    def __init__(self, n):
        self.n = n

    def state_dict(self):
        return {"n": self.n}

    def load_state_dict(self, state):
        self.n = state["n"]


@pytest.mark.slow
def test_a_process_works_alone_without_a_process_group(tmp_path):
    executor = processes._ProcessBasedAsyncCheckpointExecutor()
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True, dedup_save_to_lowest_rank=True)
    for n in (1, 2):
        state = {"own": Local(n), "w": torch.full((2,), float(n))}
        executor.execute_save(state, checkpoint_id=tmp_path, planner=planner, no_dist=True).result(120)
        assert milepost.open(tmp_path)["w"][...].tolist() == [n, n]
        assert milepost.open(tmp_path)["own.n"] == n


def test_a_process_that_cannot_start_says_why():
    with pytest.raises(ValueError, match="port -1"):
        SaveProcess(GroupPlace(0, 1, "localhost", -1, None))


@pytest.mark.slow
def test_a_process_that_is_killed_between_saves_is_noticed():
    process = SaveProcess(None)
    assert process.is_alive
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(WriterDied, match="ended with code -9"):
        process.outcome(60)
    assert not process.is_alive
    process.close()
