"""Checkpoints that a job replaces or removes while they are verified or compared are not damaged."""

import pytest
import torch

import milepost
from milepost.errors import CheckpointNotFound
from milepost.inspection.verification import verify_one
from milepost.store import MemoryStore
from milepost.testing import CountingStore
from tests.commit.object_places import objects


class Changing(CountingStore):
    """A place at which a job saves again, or removes everything, before the first byte of data is read."""

    changes = ""

    def before(self, number, call):
        del number
        if call.startswith("reader data/") and self.changes:
            changes, self.changes = self.changes, ""
            if changes == "replaced":
                milepost.save({"w": torch.zeros(9)}, self.inner)
            else:
                self.inner.delete(*self.inner.list(""))


def changing(store, changes):
    milepost.save({"w": torch.arange(100_000.0)}, store)
    place = Changing(store)
    place.changes = changes
    return place


@pytest.mark.parametrize("store_of", [MemoryStore, objects])
@pytest.mark.parametrize(("changes", "state"), [("replaced", "whole"), ("removed", "missing")])
def test_checkpoint_that_changes_while_it_is_verified_is_not_damaged(store_of, changes, state):
    found = verify_one(changing(store_of(), changes))
    assert (found.state, found.damages) == (state, ())


@pytest.mark.parametrize("changes", ["replaced", "removed"])
def test_checkpoint_that_changes_while_it_is_compared_is_not_damaged(changes):
    milepost.save({"w": torch.ones(100_000)}, "memory://unchanged")
    with pytest.raises(CheckpointNotFound, match="replaced or removed while it was compared"):
        milepost.diff("memory://unchanged", changing(MemoryStore(), changes))
