"""The four ways to write a checkpoint: `save`, a planner's save, `milepost.dcp.save`, and `convert`."""

import milepost
import milepost.dcp
from milepost.planning import CheckpointWriter, DefaultSavePlanner
from milepost.store import MemoryStore


class GlobalPlanner(DefaultSavePlanner):
    """A planner with a global plan of its own, so that the save takes the whole protocol."""

    def create_global_plan(self, all_plans):
        return super().create_global_plan(all_plans)


def by_save(state, place, comm=None):
    milepost.save(state, place, process_group=comm)


def by_planner(state, place, comm=None):
    milepost.save(state, storage_writer=CheckpointWriter(place), planner=GlobalPlanner(), process_group=comm)


def by_dcp(state, place, comm=None):
    milepost.dcp.save(state, storage_writer=milepost.dcp.FileSystemWriter(place), process_group=comm)


def by_convert(state, place, comm=None):
    source = MemoryStore()
    milepost.save(state, source)
    milepost.convert(source, place, overwrite=True, process_group=comm)


WRITERS = {"save": by_save, "planner": by_planner, "dcp": by_dcp, "convert": by_convert}
