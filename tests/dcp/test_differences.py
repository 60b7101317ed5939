"""What docs/how-to/from-dcp.md lists: where a program written for DCP sees something else, and what to do then."""

import argparse
import json
import pathlib
import warnings

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp

import milepost
import milepost.dcp as dcp
from milepost.dcp.filesystem import SerializationFormat
from milepost.dcp.format_utils import torch_save_to_dcp
from tests.dcp.programs import run_ours
from tests.ranks import spawn


def original(info):
    return info.value.failures[0][0]


def test_objects_are_refused_unless_pickles_are_allowed_on_both_sides(tmp_path):
    state = {"args": argparse.Namespace(lr=1)}
    with pytest.raises(dcp.CheckpointException, match=r"argparse\.Namespace") as info:
        dcp.save(state, checkpoint_id=tmp_path)
    assert isinstance(original(info), milepost.InvalidState)
    dcp.save(state, checkpoint_id=tmp_path, planner=dcp.DefaultSavePlanner(allow_pickle=True))
    target = {"args": None}
    with pytest.raises(dcp.CheckpointException, match="allow_pickle") as info:
        dcp.load(target, checkpoint_id=tmp_path)
    assert isinstance(original(info), milepost.UnsupportedFormat)
    dcp.load(target, checkpoint_id=tmp_path, planner=dcp.DefaultLoadPlanner(allow_pickle=True))
    assert target == state


def test_floats_are_not_loaded_into_integers(tmp_path):
    dcp.save({"w": torch.tensor([1.5])}, checkpoint_id=tmp_path)
    with pytest.raises(dcp.CheckpointException, match=r"was saved as float32 and the target is torch\.int32"):
        dcp.load({"w": torch.zeros(1, dtype=torch.int32)}, checkpoint_id=tmp_path)
    target = {"w": torch.zeros(1, dtype=torch.bfloat16)}
    dcp.load(target, checkpoint_id=tmp_path)
    assert target["w"].tolist() == [1.5]


def differing(dcp, rank, folder):
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        more = {} if rank == 0 else {"own": torch.ones(3)}
        big = {} if rank == 1 else {"large": torch.ones(1000)}
        dcp.save({"who": rank, "noise": torch.full((2,), float(rank)), "same": 1} | more | big, checkpoint_id=folder)
    return [str(warning.message) for warning in seen]


def test_values_that_differ_between_ranks_are_told_by_the_coordinator(tmp_path):
    told, silent = spawn(2, run_ours, differing, tmp_path)
    assert len(told) == 1
    assert "The lowest rank's was saved" in told[0]
    assert "'who'" in told[0]
    assert silent == []
    # Also where another rank has less to write.
    (folder,) = tmp_path.iterdir()
    checkpoint = milepost.open(folder)
    assert (checkpoint["who"], checkpoint["noise"].read().tolist()) == (0, [0.0, 0.0])


def test_options_about_files_are_taken_and_files_are_those_of_milepost(tmp_path):
    writer = dcp.FileSystemWriter(
        tmp_path,
        single_file_per_rank=False,
        sync_files=False,
        thread_count=2,
        per_thread_copy_ahead=1,
        cache_staged_state_dict=True,
        serialization_format=SerializationFormat.SAFETENSORS,
    )
    dcp.save({"v": torch.ones(2), "w": torch.ones(2)}, storage_writer=writer, use_collectives=False)
    files = sorted(file.name for file in pathlib.Path(tmp_path).rglob("*") if file.is_file())
    assert files == ["00000.safetensors", "manifest-00000001.json"]
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(tmp_path / "nothing")


@pytest.mark.slow
def test_a_process_saves_without_a_process_group(tmp_path):
    kind = dcp.AsyncCheckpointerType.PROCESS
    dcp.async_save({"n": 1}, checkpoint_id=tmp_path, async_checkpointer_type=kind).result(timeout=20)
    assert milepost.open(tmp_path)["n"] == 1


def test_plans_are_kept_by_a_planner_and_not_by_its_class(tmp_path):
    for number, rows in enumerate((2, 3)):
        planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
        dcp.save({"w": torch.ones(rows)}, checkpoint_id=tmp_path / str(number), planner=planner)
        assert milepost.open(tmp_path / str(number))["w"].shape == (rows,)


def test_values_reach_storage_as_json(tmp_path):
    seen = {}

    class Writer(dcp.FileSystemWriter):
        def write_data(self, plan, planner):
            seen.update({item.index.fqn: planner.resolve_data(item).getvalue() for item in plan.items})
            return super().write_data(plan, planner)

    dcp.save({"n": {"lr": 0.5}}, storage_writer=Writer(tmp_path))
    assert json.loads(seen["n.lr"]) == 0.5


def test_torch_planners_see_torch_records(tmp_path):
    seen = []

    def planner_of(base):
        class Planner(base):
            def create_global_plan(self, all_plans):
                seen.extend(type(plan) for plan in all_plans)
                return super().create_global_plan(all_plans)

        return Planner()

    for base in (dcp.DefaultSavePlanner, torch_dcp.DefaultSavePlanner):
        dcp.save({"w": torch.ones(1)}, checkpoint_id=tmp_path, planner=planner_of(base))
    assert seen == [dcp.SavePlan, torch_dcp.SavePlan]


class Evil:
    def __reduce__(self):
        return print, ("this ran",)


def test_a_torch_save_file_that_runs_code_is_refused(tmp_path, capsys):
    torch.save({"w": torch.ones(1), "evil": Evil()}, tmp_path / "evil.pt")
    with pytest.raises(milepost.CheckpointError):
        torch_save_to_dcp(tmp_path / "evil.pt", tmp_path / "out")
    assert "this ran" not in capsys.readouterr().out


def test_saving_without_a_group_and_over_a_checkpoint_does_not_warn(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        for number in range(2):
            dcp.save({"n": number}, checkpoint_id=tmp_path)
        target = {"n": -1}
        dcp.load(target, checkpoint_id=tmp_path)
    assert target == {"n": 1}
