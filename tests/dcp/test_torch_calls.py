"""Torch's own `dcp.save` and `dcp.load` with Milepost's storage."""

import io
import multiprocessing
import os
import pickle

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Shard, distribute_tensor

import milepost
import milepost.dcp
from milepost.comm import Solo
from milepost.dcp import FileSystemWriter, MilepostReader, MilepostWriter
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore::UserWarning:torch.*")


def state_of(number, rows=5):
    mesh = init_device_mesh("cpu", (torch.distributed.get_world_size(),))
    value = torch.arange(rows * 2.0).view(rows, 2) + number
    return {"cut": distribute_tensor(value, mesh, [Shard(0)]), "whole": {"w": value.clone()}, "step": number}


def loaded(target, place, **options):
    torch_dcp.load(target, storage_reader=MilepostReader(place), **options)
    return target["cut"].full_tensor().tolist(), target["whole"]["w"].tolist(), target["step"]


def expected(number, rows=5):
    value = (torch.arange(rows * 2.0).view(rows, 2) + number).tolist()
    return value, value, number


def three_saves(rank, folder, caching, kind):
    writer = kind(folder / "same")
    planner = torch_dcp.DefaultSavePlanner(enable_plan_caching=caching)
    found = []
    for number, rows in enumerate((5, 5, 7)):
        torch_dcp.save(state_of(number, rows), storage_writer=writer, planner=planner)
        found.append(loaded(state_of(9, rows), folder / "same"))
    return found


@pytest.mark.slow
@pytest.mark.parametrize(
    ("world", "caching", "kind"),
    [
        *((1, False, MilepostWriter), (1, True, MilepostWriter), (2, False, MilepostWriter), (2, True, MilepostWriter)),
        (2, True, FileSystemWriter),
    ],
)
def test_three_saves_with_a_change_between_them(tmp_path, world, caching, kind):
    for found in spawn(world, three_saves, tmp_path, caching, kind):
        assert found == [expected(0), expected(1), expected(2, 7)]
    with milepost.open(tmp_path / "same") as checkpoint:
        assert checkpoint["step"] == 2
        assert checkpoint.verify().ok


def async_saves(rank, folder):
    found = []
    for number in range(2):
        state = state_of(number)
        future = torch_dcp.async_save(state, storage_writer=MilepostWriter(folder / str(number)))
        state["whole"]["w"].zero_()  # the copy is saved
        future.result()
        found.append(loaded(state_of(9), folder / str(number)))
    return found


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 2])
def test_async_saves_of_torch(tmp_path, world):
    for found in spawn(world, async_saves, tmp_path):
        assert found == [expected(0), expected(1)]


def saves_by_torchs_process(rank, folder):
    multiprocessing.current_process()._config["daemon"] = False  # those of a test may not start processes
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    kind = AsyncCheckpointerType.PROCESS
    for number, make in enumerate((MilepostWriter, FileSystemWriter)):
        writer = make(folder / str(number), metadata={"number": number})
        future = torch_dcp.async_save(state_of(number), storage_writer=writer, async_checkpointer_type=kind)
        future.result()
    return [loaded(state_of(9), folder / str(number)) for number in range(2)]


@pytest.mark.slow
def test_writers_travel_to_torchs_saving_process(tmp_path):
    for found in spawn(2, saves_by_torchs_process, tmp_path):
        assert found == [expected(0), expected(1)]
    for number in range(2):
        with milepost.open(tmp_path / str(number)) as checkpoint:
            assert checkpoint.verify().ok
            assert checkpoint.metadata["number"] == number


def test_a_writer_into_memory_cannot_travel():
    with pytest.raises(milepost.InvalidRequest, match="memory of this process"):
        pickle.dumps(MilepostWriter("memory://travel"))


def saves_once(rank, folder):
    torch_dcp.save(state_of(4), storage_writer=MilepostWriter(folder))


def loads_all_ways(rank, folder):
    target = state_of(9)
    milepost.dcp.load(target, checkpoint_id=folder)
    again = state_of(9)
    milepost.load(again, folder)
    ours = [(t["cut"].full_tensor().tolist(), t["whole"]["w"].tolist(), t["step"]) for t in (target, again)]
    return [loaded(state_of(9), folder), *ours]


@pytest.mark.slow
def test_what_torch_saved_is_loaded_by_all_on_other_ranks(tmp_path):
    spawn(2, saves_once, tmp_path)
    for found in spawn(3, loads_all_ways, tmp_path):
        assert found == [expected(4)] * 3


def fails(rank, folder):
    class Planner(torch_dcp.DefaultSavePlanner):
        def create_local_plan(self):
            if rank == 1:
                raise ValueError("no")
            return super().create_local_plan()

    try:
        torch_dcp.save(state_of(1), storage_writer=MilepostWriter(folder), planner=Planner())
    except torch_dcp.CheckpointException as error:
        return list(error.failures)


@pytest.mark.slow
def test_a_failure_of_torchs_save_commits_nothing(tmp_path):
    assert spawn(2, fails, tmp_path) == [[1], [1]]
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(tmp_path)


def test_one_process_without_a_group(tmp_path):
    torch_dcp.save({"w": torch.ones(3), "n": 1}, storage_writer=MilepostWriter(tmp_path))
    target = {"w": torch.zeros(3), "n": 0}
    torch_dcp.load(target, storage_reader=MilepostReader(tmp_path))
    assert target["w"].tolist() == [1.0, 1.0, 1.0]
    assert target["n"] == 1


def a_failure_between_cached_plans(rank, folder):
    class Planner(torch_dcp.DefaultSavePlanner):
        fails = False

        def set_up_planner(self, *args, **kwargs):
            if self.fails and rank == 1:
                raise ValueError("no")
            super().set_up_planner(*args, **kwargs)

    planner, writer = Planner(enable_plan_caching=True), MilepostWriter(folder)
    found = []
    for number in range(4):
        planner.fails = number == 1
        try:
            torch_dcp.save(state_of(number), storage_writer=writer, planner=planner)
        except torch_dcp.CheckpointException as error:
            found.append(list(error.failures))
        else:
            found.append(loaded(state_of(9), folder))
    return found


@pytest.mark.slow
def test_saves_with_cached_plans_go_on_after_one_that_failed_on_one_rank(tmp_path):
    for found in spawn(2, a_failure_between_cached_plans, tmp_path):
        assert found == [expected(0), [1], expected(2), expected(3)]
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint.verify().ok


def replaced_between_ranks(rank, folder):
    class Slow(MilepostReader):
        def read_metadata(self, *args, **kwargs):
            if rank == 1:
                torch.distributed.barrier()
                milepost.save({"w": torch.full((3,), 2.0)}, folder, process_group=Solo())
            found = super().read_metadata(*args, **kwargs)
            if rank == 0:
                torch.distributed.barrier()
            return found

    milepost.save({"w": torch.full((3,), 1.0)}, folder)
    try:
        torch_dcp.load({"w": torch.zeros(3)}, storage_reader=Slow(folder))
    except torch_dcp.CheckpointException as error:
        return str(error)


def test_checkpoint_replaced_during_torch_load_is_not_mixed(tmp_path):
    for text in spawn(2, replaced_between_ranks, tmp_path):
        assert "was replaced while the ranks opened it" in text


class Harmful:
    def __reduce__(self):
        return print, ("this was run",)


@pytest.mark.parametrize("protocol", [0, 4])
def test_bytes_that_are_a_harmful_pickle_are_not_run_by_torchs_planner(tmp_path, capsys, protocol):
    state = {"x": io.BytesIO(pickle.dumps(Harmful(), protocol)), "n": 1}
    milepost.save(state, tmp_path, planner=milepost.planning.DefaultSavePlanner(dedup_save_to_lowest_rank=True))
    for load in (
        lambda: torch_dcp.load({"x": 0, "n": 0}, storage_reader=MilepostReader(tmp_path)),
        lambda: milepost.dcp.load({"x": 0}, checkpoint_id=tmp_path, planner=torch_dcp.DefaultLoadPlanner()),
        lambda: milepost.load({"x": 0}, tmp_path, planner=torch_dcp.DefaultLoadPlanner()),
    ):
        with pytest.raises((torch_dcp.CheckpointException, milepost.CheckpointError), match="'x'"):
            load()
    assert "this was run" not in capsys.readouterr().out
