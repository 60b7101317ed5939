"""Incremental saves after damage: what is known to be damaged is not shared, and pushes nothing out."""

import pytest
import torch

import milepost
from milepost import Checkpointer, InvalidRequest
from milepost.planning import DefaultSavePlanner


def state(step):
    return {"body": torch.arange(40_000.0), "head": torch.full((20_000,), float(step)), "step": step}


def target():
    return {"body": torch.zeros(40_000), "head": torch.zeros(20_000), "step": 0}


def spoil(root, step):
    """Change a bit in the middle of the file that this step's own save wrote."""
    place = root / f"step-{step:010}"
    manifest = milepost.open(place).manifest
    [file] = (place / "data" / manifest.save_id).glob("00000.safetensors")
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)


def is_whole(root, step):
    return milepost.open(root / f"step-{step:010}").verify().ok


def test_step_that_was_found_damaged_is_written_anew(tmp_path):
    with Checkpointer(tmp_path, incremental=True) as keeper:
        keeper.save(state(1), 1)
        keeper.save(state(2), 2)
    spoil(tmp_path, 2)
    with Checkpointer(tmp_path, incremental=True, keep_last=2) as keeper:
        assert keeper.restore(target()) == 1
        receipt = keeper.save(state(2), 2)
        assert receipt.data_bytes == 80_000, "the head, which lies in the damaged file"
        assert receipt.reused_bytes == 160_000, "the body, which the restore has read from step 1"
        assert keeper.save(state(3), 3).reused_bytes == 160_000
        assert keeper.steps() == [2, 3]
    assert is_whole(tmp_path, 2)
    assert is_whole(tmp_path, 3)


@pytest.mark.parametrize("background", ["thread", "process"])
def test_nothing_is_shared_with_a_run_of_which_nothing_is_whole(tmp_path, background):
    with Checkpointer(tmp_path, incremental=True) as keeper:
        for step in (1, 2, 3):
            keeper.save(state(step), step)
    spoil(tmp_path, 1)  # all steps share the body in it
    with Checkpointer(tmp_path, incremental=True, background=background) as keeper:
        with pytest.raises(milepost.CheckpointDamaged, match="no step"):
            keeper.restore(target())
        receipt = keeper.async_save(state(4), 4).result()
        assert (receipt.data_bytes, receipt.reused_bytes) == (240_000, 0)
        assert keeper.async_save(state(5), 5).result().reused_bytes == 160_000
    assert is_whole(tmp_path, 5)
    assert Checkpointer(tmp_path).restore(target()) == 5


def test_step_that_was_asked_for_and_is_damaged_is_not_shared(tmp_path):
    with Checkpointer(tmp_path, incremental=True) as keeper:
        keeper.save(state(1), 1)
        spoil(tmp_path, 1)
        with pytest.raises(milepost.CheckpointDamaged):
            keeper.restore(target(), step=1)
        assert keeper.save(state(2), 2).reused_bytes == 0


@pytest.mark.parametrize("incremental", [False, True])
def test_damaged_step_pushes_no_whole_one_out(tmp_path, incremental):
    with Checkpointer(tmp_path, incremental=incremental) as keeper:
        for step in (1, 2):
            keeper.save(state(step), step)
    spoil(tmp_path, 2)
    with Checkpointer(tmp_path, keep_last=2, incremental=incremental) as keeper:
        assert keeper.restore(target()) == 1
        keeper.save(state(3), 3)
        assert keeper.steps() == [1, 2, 3]
        keeper.save(state(2), 2)
        assert keeper.steps() == [2, 3]


def test_one_save_can_write_everything(tmp_path):
    with Checkpointer(tmp_path, incremental=True) as keeper:
        keeper.save(state(1), 1)
        assert keeper.save(state(2), 2, incremental=False).reused_bytes == 0
        assert keeper.async_save(state(3), 3, incremental=False).result().reused_bytes == 0
        assert keeper.save(state(4), 4).reused_bytes == 160_000, "with step 3"
        with pytest.raises(InvalidRequest, match="incremental is True or False"):
            keeper.save(state(5), 5, incremental="no")
    with Checkpointer(tmp_path) as keeper:
        assert keeper.save(state(5), 5, incremental=True).reused_bytes == 160_000
        assert keeper.save(state(6), 6).reused_bytes == 0


class Everything(DefaultSavePlanner):
    """Looks at the plans of all ranks."""

    def create_global_plan(self, all_plans):
        """See `SavePlanner`."""
        return super().create_global_plan(all_plans)


def test_options_that_can_never_work_are_refused_at_once(tmp_path):
    with pytest.raises(InvalidRequest, match="incremental: a planner"):
        Checkpointer(tmp_path, incremental=True, save_planner=Everything())
    with pytest.raises(InvalidRequest, match="256 KiB"):
        Checkpointer(tmp_path, incremental=True, transfer=milepost.Transfer(block_bytes=65536))
    keeper = Checkpointer(tmp_path, incremental=True)
    with pytest.raises(InvalidRequest, match="incremental: a planner"):
        keeper.save(state(1), 1, planner=Everything())
    keeper.save(state(1), 1, planner=Everything(), incremental=False)
