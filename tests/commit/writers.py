"""The ways to write a checkpoint: `save`, a planner's save, `milepost.dcp.save`, `convert`, `copy`; bad stores."""

import milepost
import milepost.dcp
from milepost.planning import CheckpointWriter, DefaultSavePlanner
from milepost.store import MemoryStore
from milepost.testing import CountingStore


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


def by_copy(state, place, comm=None):
    assert comm is None or comm.size == 1, "one process copies"
    source = MemoryStore()
    milepost.save(state, source)
    milepost.copy(source, place, overwrite=True)


ON_RANKS = {"save": by_save, "planner": by_planner, "dcp": by_dcp, "convert": by_convert}
WRITERS = {**ON_RANKS, "copy": by_copy}


class SeesNothingNew(CountingStore):
    """The store as a rank sees it whose listings and lookups are old: no manifest of generation 2."""

    def reader(self, name, **expected):
        if name.startswith("manifest-00000002"):
            raise FileNotFoundError(name)
        return super().reader(name, **expected)

    def list(self, prefix, **depth):
        return (name for name in super().list(prefix, **depth) if not name.startswith("manifest-00000002"))


class FailsAfterCommit(CountingStore):
    """A store that fails, or is interrupted, at calls of some kinds once the manifest is there."""

    def __init__(self, inner, calls, error):
        super().__init__(inner)
        self.failing, self.error, self.committed = calls, error, False

    def before(self, number, call):
        if self.committed and call.startswith(self.failing):
            raise self.error

    def after(self, number, call):
        self.committed = self.committed or call == "create manifest-00000002.json"
        self.before(number, call)
