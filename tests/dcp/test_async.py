"""`async_save`: the copy is saved, beside training and other saves, and errors reach the caller."""

import threading
import time
from concurrent.futures import Future

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
import milepost.dcp
from tests.dcp.programs import run_both, run_ours
from tests.ranks import spawn


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


@pytest.mark.slow
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


@pytest.mark.slow
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


@pytest.mark.slow
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


class Slow(milepost.dcp.DefaultSavePlanner):
    def resolve_data(self, write_item):
        time.sleep(0.2)
        return super().resolve_data(write_item)


@pytest.mark.slow
def test_saves_that_share_a_planner_or_a_writer_take_turns(tmp_path):
    planner, writer = Slow(), milepost.dcp.FileSystemWriter(tmp_path)

    def state(n):
        return {"a": torch.full((3,), float(n)), "b": torch.full((3,), float(n))}

    shared = [{"planner": planner}, {"storage_writer": writer}, {"planner": planner, "storage_writer": writer}]
    futures = [milepost.dcp.async_save(state(n), checkpoint_id=tmp_path / str(n), **shared[n % 3]) for n in range(6)]
    milepost.dcp.save(state(6), checkpoint_id=tmp_path / "6", planner=planner)
    for future in futures:
        future.result(timeout=20)
    for n in range(7):
        found = milepost.open(tmp_path / str(n))
        assert [found[key].read().tolist() for key in "ab"] == [[float(n)] * 3] * 2


def staging_fails(dcp, rank, folder):
    class Fails(Later):
        def stage(self, state_dict):
            if rank == 1:
                raise MemoryError("full")
            return super().stage(state_dict)

    class InFuture(Later):
        def stage(self, state_dict):
            future = super().stage(state_dict)
            if rank == 1:
                future = Future()
                future.set_exception(MemoryError("full"))
            return future

    found = []
    for stager in (Fails, InFuture):
        try:
            dcp.async_save({"w": torch.ones(2)}, checkpoint_id=folder, async_stager=stager()).upload_completion.result()
        except MemoryError:
            found.append("mine")
        except dcp.CheckpointException as error:
            found.append(list(error.failures))
    dcp.async_save({"w": torch.ones(2)}, checkpoint_id=folder).result()
    return found


@pytest.mark.slow
def test_a_stager_that_fails_on_one_rank_fails_the_save_of_all(tmp_path):
    assert spawn(2, run_ours, staging_fails, tmp_path, timeout_s=60) == [[[1], [1]], ["mine", "mine"]]


class OneCopy(Later):
    """A stager that copies into the same memory each time."""

    def __init__(self):
        self.copy = torch.zeros(3)

    def stage(self, state_dict):
        self.copy.copy_(state_dict["a"])
        return {"a": self.copy}


def test_memory_of_a_stager_is_not_used_again_while_a_save_reads_it(tmp_path):
    stager, futures = OneCopy(), []
    for n in range(3):
        state = {"a": torch.full((3,), float(n))}
        futures.append(
            milepost.dcp.async_save(state, checkpoint_id=tmp_path / str(n), planner=Slow(), async_stager=stager)
        )
    for n, future in enumerate(futures):
        future.result(timeout=20)
        assert milepost.open(tmp_path / str(n))["a"].read().tolist() == [float(n)] * 3


def in_a_process(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "plain": torch.ones(3), "n": 1}
    kind = dcp.state_dict_saver.AsyncCheckpointerType.PROCESS
    futures = []
    for n in (1, 2, 3):
        state["n"] = n
        futures.append(dcp.async_save(state, checkpoint_id=folder / str(n), async_checkpointer_type=kind))
        state["plain"].add_(1)
    found = []
    for n in (1, 2, 3):
        assert sorted(futures[n - 1].result(timeout=60).state_dict_metadata) == ["n", "plain", "w"]
        target = target_of(mesh)
        dcp.load(target, checkpoint_id=folder / str(n))
        found.append(shown(target)[1:])
    return found


@pytest.mark.slow
def test_a_process_saves_the_copy(tmp_path):
    expected = [([float(n)] * 3, n) for n in (1, 2, 3)]
    assert spawn(2, run_ours, in_a_process, tmp_path) == [expected] * 2


def test_a_failure_that_nobody_asked_for_is_raised_by_the_next_save(tmp_path):
    (tmp_path / "file").write_text("")
    lost = milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file")
    with pytest.raises(milepost.dcp.api.CheckpointException, match="file"):
        milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "fine")
    assert lost.exception() is not None
    asked = milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "file")
    assert asked.exception(timeout=20) is not None
    milepost.dcp.async_save({"w": torch.ones(2)}, checkpoint_id=tmp_path / "fine").result(timeout=20)
