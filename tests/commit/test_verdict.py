"""On real processes: the coordinator says whether it committed, and a rank with an old view of the folder obeys."""

import pytest
import torch

import milepost
from milepost.store import LocalStore
from milepost.testing import CountingStore, ReplyLosingStore
from tests.commit.writers import FailsAfterCommit, SeesNothingNew
from tests.ranks import spawn


def gone(folder):
    """A server that is gone once the manifest is there, and has not answered the commit."""
    calls = ("create manifest-", "list manifest-", "reader manifest-")
    return FailsAfterCommit(LocalStore(folder), calls, milepost.StorageError("the server is gone"))


class CannotList(CountingStore):
    """A folder that cannot be listed any more once the manifest is there."""

    committed = False

    def before(self, number, call):
        if self.committed and call.startswith("list"):
            raise milepost.StorageError("cannot list")

    def after(self, number, call):
        self.committed = self.committed or call == "create manifest-00000002.json"


def state(number):
    return {"w": torch.full((1 << 20,), float(number)), "n": number}


def save_with_trouble(rank, folder):
    milepost.save(state(1), folder)
    store = SeesNothingNew(LocalStore(folder)) if rank else gone(folder)
    with pytest.raises(milepost.StorageError, match="the server is gone"):
        milepost.save(state(2), store)
    target = state(0)
    milepost.load(target, folder)
    found = target["n"], float(target["w"].min()), float(target["w"].max())
    milepost.save(state(3), ReplyLosingStore(LocalStore(folder), repeats=True))
    return found


@pytest.mark.slow
def test_committed_data_stays_though_a_rank_does_not_see_it(tmp_path):
    assert spawn(2, save_with_trouble, tmp_path) == [(2, 2.0, 2.0)] * 2
    with milepost.open(tmp_path) as checkpoint:
        assert checkpoint["n"] == 3
        assert len(checkpoint.manifest.files) == 2
        assert checkpoint.verify().ok
    assert len(list(LocalStore(tmp_path).list(""))) == 3


def test_one_process_knows_what_it_committed(tmp_path):
    """It cannot look whose manifest it is, so its data stays."""
    milepost.save(state(1), tmp_path)
    with pytest.raises(milepost.StorageError, match="the server is gone"):
        milepost.save(state(2), gone(tmp_path))
    assert milepost.open(tmp_path).verify().ok
    assert milepost.open(tmp_path)["n"] == 2


def test_failed_listing_after_the_commit_takes_nothing_back(tmp_path, caplog):
    milepost.save(state(1), tmp_path)
    assert milepost.save(state(2), CannotList(LocalStore(tmp_path))).generation == 2
    assert "whether another job has committed a newer one could not be seen: cannot list" in caplog.text
    assert milepost.open(tmp_path).verify().ok
    assert milepost.open(tmp_path)["n"] == 2
