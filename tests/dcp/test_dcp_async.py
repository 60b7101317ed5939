"""`async_save`: the copy is saved, beside training and other saves, and errors reach the caller."""

import threading
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from dcp_programs import run_both, run_ours
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost.dcp
from ranks import spawn


def target_of(mesh):
    return {"w": distribute_tensor(torch.zeros(6), mesh, [Shard(0)]), "plain": torch.zeros(3), "n": 0}


def shown(state):
    return state["w"].full_tensor().tolist(), state["plain"].tolist(), state["n"]


def job(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "plain": torch.ones(3), "n": 1}
    future = dcp.async_save(state, storage_writer=dcp.FileSystemWriter(folder))
    state["plain"].fill_(2.0)
    state["n"] = 2
    metadata = future.result()
    target = target_of(mesh)
    dcp.load(target, checkpoint_id=folder)
    return sorted(metadata.state_dict_metadata), shown(target)


def test_the_copy_is_saved(tmp_path):
    for ours, theirs in spawn(2, run_both, job, tmp_path):
        assert ours == theirs == (["n", "plain", "w"], ([0.0, 1.0, 2.0, 3.0, 4.0, 5.0], [1.0] * 3, 1))


def busy_job(dcp, rank, folder):
    """Two saves in the background and one in front, all under way at once, while the ranks use their process group."""
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "plain": torch.ones(3), "n": 1}
    futures = [dcp.async_save(state, checkpoint_id=folder / "1")]
    busy = torch.ones(1)
    dist.all_reduce(busy)
    state["n"] = 2
    futures.append(dcp.async_save(state, checkpoint_id=folder / "2"))
    dist.all_reduce(busy)
    dcp.save(state, checkpoint_id=folder / "3")
    dist.all_reduce(busy)
    found = []
    for place in "321":
        if place != "3":
            futures[int(place) - 1].result()
        target = target_of(mesh)
        dcp.load(target, checkpoint_id=folder / place)
        found.append(shown(target)[2])
    return found


def test_saves_run_beside_training_and_each_other(tmp_path):
    """Torch's meet in the process group, and hang."""
    assert spawn(2, run_ours, busy_job, tmp_path) == [[2, 2, 1]] * 2


def failing(dcp, rank, folder):
    class Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise ValueError("late")
            return super().create_local_plan()

    future = dcp.async_save({"w": torch.ones(2)}, checkpoint_id=folder, planner=Planner())
    error = future.exception()
    return type(error).__name__, list(error.failures), str(error.failures[1][0])


def test_a_failure_in_the_background_reaches_every_rank(tmp_path):
    assert spawn(2, run_ours, failing, tmp_path) == [("CheckpointException", [1], "late")] * 2


def test_a_stager_that_copies_in_the_background_gives_both_futures(tmp_path):
    response = milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=Later())
    response.staging_completion.result(timeout=20)
    assert list(response.upload_completion.result(timeout=20).state_dict_metadata) == ["w"]


class Later:
    """A stager with a thread."""

    should_synchronize_after_execute = False

    def stage(self, state_dict):
        future = Future()
        threading.Timer(0.05, future.set_result, [{k: v.clone() for k, v in state_dict.items()}]).start()
        return future

    def synchronize_staging(self):
        pass

    def close(self):
        pass


def test_a_stager_that_fails_fails_both_futures(tmp_path):
    class Failing(Later):
        def stage(self, state_dict):
            future = Future()
            future.set_exception(MemoryError("full"))
            return future

    response = milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path, async_stager=Failing())
    for future in (response.staging_completion, response.upload_completion):
        with pytest.raises(MemoryError, match="full"):
            future.result(timeout=20)
