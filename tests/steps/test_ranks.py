"""Steps of several ranks: all ranks save, remove and restore the same ones."""

import pytest
import torch

import milepost
from milepost import CheckpointDamaged, Checkpointer, CheckpointNotFound, InvalidRequest
from milepost.core.layout import Cut, Grid, Mesh
from milepost.testing import run_ranks
from tests.ranks import spawn
from tests.steps.numbered import files_of, flip, state

GRID = {world: Grid(Mesh.of((world,), range(world)), (Cut(0),)) for world in (1, 2, 3)}


def sharded(number, rank, world):
    (piece,) = GRID[world].pieces((6, 4), rank)
    local = torch.full(piece.box.shape, float(number))
    return {"w": milepost.Sharded.on_grid((6, 4), local, GRID[world], rank), "n": number}, local


@pytest.mark.parametrize("world", [2, 3])
def test_ranks_save_remove_and_restore_the_same_steps(tmp_path, world):
    def work(comm):
        keeper = Checkpointer(tmp_path, keep_last=2, keep_best=1, best="loss", process_group=comm)
        assert keeper.restore(sharded(0, comm.rank, world)[0], default=-1) == -1
        for step in range(1, 6):
            metrics = {"loss": abs(step - 2)} if comm.rank == comm.coordinator else None
            keeper.save(sharded(step, comm.rank, world)[0], step, metrics=metrics)
            assert keeper.latest() == step
        assert keeper.steps() == [2, 4, 5]
        found, local = sharded(0, comm.rank, world)
        return keeper.restore(found), found["n"], set(local.flatten().tolist()), keeper.best()

    assert run_ranks(world, work) == [(5, 5, {5.0}, 2)] * world


@pytest.mark.parametrize("world", [2, 3])
@pytest.mark.parametrize("verify_first", [False, True])
def test_damage_in_one_ranks_file_takes_all_ranks_to_the_same_older_step(tmp_path, world, verify_first):
    def save(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        for step in (1, 2, 3):
            keeper.save(sharded(step, comm.rank, world)[0], step)

    def restore(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        found, local = sharded(0, comm.rank, world)
        step = keeper.restore(found, verify_first=verify_first)
        with pytest.raises(CheckpointDamaged):
            keeper.restore(sharded(0, comm.rank, world)[0], step=3)
        return step, found["n"], set(local.flatten().tolist())

    run_ranks(world, save)
    flip(files_of(tmp_path, 3)[-1])
    files_of(tmp_path, 2)[0].unlink()
    assert run_ranks(world, restore) == [(1, 1, {1.0})] * world


def test_errors_reach_all_ranks(tmp_path):
    def work(comm):
        keeper = Checkpointer(tmp_path, process_group=comm)
        errors = []
        for call in (
            lambda: keeper.save(state(1), 1, metrics={"loss": "low"} if comm.rank == comm.coordinator else None),
            lambda: keeper.restore(state(0)),
            lambda: keeper.remove(3),
            lambda: keeper.restore(state(0), step=3),
        ):
            with pytest.raises(milepost.CheckpointError) as caught:
                call()
            errors.append(type(caught.value))
        keeper.save(state(1), 1)
        return errors

    expected = [InvalidRequest, CheckpointNotFound, CheckpointNotFound, CheckpointNotFound]
    assert run_ranks(2, work, timeout_s=10) == [expected] * 2


def test_what_the_ranks_say_to_each_other_does_not_pile_up(tmp_path):
    boards = {}

    def work(comm):
        boards[comm.rank] = comm._board
        keeper = Checkpointer(tmp_path, keep_last=1, process_group=comm)
        counts = []
        for step in range(6):
            keeper.save(state(step), step)
            counts.append(len(comm._board._notes))
        return counts

    counts = run_ranks(2, work)
    assert len(boards[0]._notes) < 6, counts


def real_work(rank, root):
    keeper = Checkpointer(root, keep_last=2)
    for step in (10, 20, 30):
        keeper.save(sharded(step, rank, 2)[0], step)
    if rank == 0:
        flip(files_of(root, 30)[1])
    torch.distributed.barrier()
    found, local = sharded(0, rank, 2)
    return keeper.restore(found), found["n"], set(local.flatten().tolist()), keeper.steps()


def test_real_ranks_fall_back_to_the_same_step(tmp_path):
    assert spawn(2, real_work, str(tmp_path)) == [(20, 20, {20.0}, [20, 30])] * 2
