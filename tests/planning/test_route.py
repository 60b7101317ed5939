"""Which path a save takes, and that each path keeps what the writer was given."""

import pytest
import torch
import torch.distributed.checkpoint as their_dcp

import milepost
from milepost.planning import CheckpointWriter, DefaultSavePlanner, SavePlan
from milepost.planning.route import GlobalPlanner, LocalPlanner, NoPlanner, route
from milepost.store import MemoryStore


class Renaming(DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"new.{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


class Global(DefaultSavePlanner):
    def create_global_plan(self, all_plans):
        return super().create_global_plan(all_plans)


class WithOwnData(Renaming):
    def create_local_plan(self):
        plan = super().create_local_plan()
        return SavePlan(plan.items, plan.storage_data, {"note": "of this planner"})


class OwnWriter(CheckpointWriter):
    def finish(self, metadata, results):
        super().finish(metadata, results)


class OfTorch(their_dcp.DefaultSavePlanner):
    """A planner of a program, made for torch."""


ROUTES = [
    (CheckpointWriter, None, NoPlanner),
    (CheckpointWriter, DefaultSavePlanner, NoPlanner),
    (CheckpointWriter, lambda: DefaultSavePlanner(flatten_state_dict=False), LocalPlanner),
    (CheckpointWriter, Renaming, LocalPlanner),
    (CheckpointWriter, lambda: DefaultSavePlanner(dedup_save_to_lowest_rank=True), GlobalPlanner),
    (CheckpointWriter, Global, GlobalPlanner),
    (OwnWriter, None, GlobalPlanner),
    (CheckpointWriter, their_dcp.DefaultSavePlanner, NoPlanner),  # it becomes Milepost's own
    (CheckpointWriter, OfTorch, GlobalPlanner),
    (lambda _: their_dcp.FileSystemWriter("unused"), None, GlobalPlanner),
]


@pytest.mark.parametrize(("writer", "planner", "expected"), ROUTES)
def test_route_of_writer_and_planner(writer, planner, expected):
    chosen = route(writer(MemoryStore()), planner and planner())
    assert type(chosen) is expected
    assert isinstance(chosen.writer, milepost.planning.StorageWriter)
    assert isinstance(chosen.planner, milepost.planning.SavePlanner)


def test_a_falsy_planner_is_used():
    class Sized(Renaming):
        def __len__(self):
            return 0

    planner = Sized()
    assert route(CheckpointWriter(MemoryStore()), planner).planner is planner


@pytest.mark.parametrize("planner", [DefaultSavePlanner, Renaming, Global, WithOwnData])
def test_every_path_keeps_metadata_and_notes_the_save_on_the_writer(planner):
    """By local plans, the metadata of the writer was once lost."""
    writer = CheckpointWriter(MemoryStore(), metadata={"run": "a"})
    receipt = milepost.save({"w": torch.ones(3)}, storage_writer=writer, planner=planner())
    assert (receipt.generation, receipt.save_id) == (writer.generation, writer.save_id)
    assert milepost.open(writer.store).metadata["run"] == "a"


def test_agreements_of_a_caching_planner_are_its_own():
    planner, other = Renaming(enable_plan_caching=True), Renaming()
    writer = CheckpointWriter(MemoryStore())
    for one in (planner, other):
        milepost.save({"w": torch.ones(3)}, storage_writer=writer, planner=one)
    assert (len(planner.agreements), len(other.agreements)) == (1, 0)
