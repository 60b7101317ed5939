"""A folder to which both Milepost and torch's DCP saved: nobody reads the older one in silence."""

import logging
import os
import shutil
import warnings

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from milepost.commit.beside import METADATA
from milepost.store import AtGeneration, LocalStore, MemoryStore
from milepost.testing import CountingStore, Crash, CrashingStore, run_ranks
from tests.commit.writers import WRITERS

pytestmark = pytest.mark.filterwarnings("ignore")


def state(number):
    return {"w": torch.full((300,), float(number)), "n": number}


def torch_save(number, folder):
    with warnings.catch_warnings(action="ignore"):
        dcp.save(state(number), checkpoint_id=folder, no_dist=True)


def torch_load(folder):
    target = state(0)
    with warnings.catch_warnings(action="ignore"):
        dcp.load(target, checkpoint_id=folder, no_dist=True)
    assert (target["w"] == target["n"]).all()
    return target["n"]


def load(place):
    target = state(0)
    milepost.load(target, place)
    assert (target["w"] == target["n"]).all()
    return target["n"]


def by_dcp(place):
    milepost.dcp.load(target := state(0), storage_reader=milepost.dcp.FileSystemReader(place))
    return target["n"]


READERS = {
    "open": lambda place: milepost.open(place)["n"],
    "verify": lambda place: milepost.open(place).verify().ok and milepost.open(place)["n"],
    "load": load,
    "explain": lambda place: milepost.explain(state(0), place) and load(place),
    "dcp": by_dcp,
    "convert": lambda place: milepost.convert(place, copy := MemoryStore()) and milepost.open(copy)["n"],
}


@pytest.mark.parametrize("write", WRITERS.values(), ids=WRITERS)
def test_milepost_over_dcp_leaves_torch_nothing_stale(tmp_path, write, caplog):
    torch_save(1, tmp_path)
    with caplog.at_level(logging.WARNING, "milepost"):
        write(state(2), tmp_path)
    with pytest.raises(CheckpointException, match=r"No such file|metadata"):
        torch_load(tmp_path)
    assert "held a checkpoint of torch.distributed.checkpoint" in caplog.text
    for read in READERS.values():
        assert read(tmp_path) == 2
    # Nothing is lost: its index has another name.
    (tmp_path / ".metadata.replaced-by-00000001").rename(tmp_path / METADATA)
    assert torch_load(tmp_path) == 1
    assert load(tmp_path) == 2, "that index is known to be the older one"


@pytest.mark.parametrize("read", READERS.values(), ids=READERS)
def test_dcp_over_milepost_is_refused_with_both_named(tmp_path, read):
    folder, copy = tmp_path / "both", tmp_path / "copy"
    milepost.save(state(1), folder)
    torch_save(2, folder)
    both = r"(?s)two checkpoints: generation 1 of Milepost.*torch.distributed.checkpoint.*AtGeneration"
    with pytest.raises((milepost.AmbiguousCheckpoint, milepost.dcp.api.CheckpointException), match=both):
        read(folder)
    assert read(AtGeneration(folder, 1)) == 1
    shutil.copytree(folder, copy)
    for path in copy.glob("manifest-*"):
        path.unlink()
    assert read(copy) == 2, "without the manifest, the other one is meant"


def test_taking_turns_never_gives_the_older_one(tmp_path):
    for turn in range(1, 7, 2):
        torch_save(turn, tmp_path)
        assert torch_load(tmp_path) == turn
        if turn > 1:
            with pytest.raises(milepost.AmbiguousCheckpoint):
                load(tmp_path)
        milepost.save(state(turn + 1), tmp_path)
        assert load(tmp_path) == turn + 1
        with pytest.raises(CheckpointException, match=r"No such file|metadata"):
            torch_load(tmp_path)


def test_index_of_a_rank_is_retired_as_well(tmp_path):
    """Where there is no index for all ranks, torch takes it."""
    torch_save(1, tmp_path)
    (tmp_path / METADATA).rename(tmp_path / "__0.metadata")
    assert torch_load(tmp_path) == 1
    milepost.save(state(2), tmp_path)
    with pytest.raises(CheckpointException, match=r"No such file|metadata"):
        torch_load(tmp_path)
    assert load(tmp_path) == 2
    torch_save(3, tmp_path)
    (tmp_path / METADATA).rename(tmp_path / "__0.metadata")
    with pytest.raises(milepost.AmbiguousCheckpoint, match=r"__0\.metadata"):
        load(tmp_path)


def test_all_ranks_refuse(tmp_path):
    milepost.save(state(1), tmp_path)
    torch_save(2, tmp_path)

    def work(comm):
        with pytest.raises(milepost.AmbiguousCheckpoint):
            milepost.load(state(0), tmp_path, process_group=comm)

    run_ranks(2, work)


def test_crash_between_commit_and_retirement_gives_the_new_one(tmp_path):
    """At every call of the store: old, or new; and never what torch has, once Milepost has committed."""
    counting = CountingStore(LocalStore(tmp_path / "counted"))
    torch_save(1, tmp_path / "counted")
    milepost.save(state(2), counting)
    seen = set()
    for at in range(1, counting.calls + 1):
        for after in (False, True):
            folder = tmp_path / f"{at}{after}"
            torch_save(1, folder)
            with pytest.raises(Crash):
                milepost.save(state(2), CrashingStore(LocalStore(folder), at, after=after))
            found = load(folder)
            in_torch = torch_load(folder) if (folder / METADATA).exists() else None
            seen.add((found, in_torch))
            milepost.save(state(3), folder)
            assert load(folder) == 3
            assert not (folder / METADATA).exists()
    assert seen == {(1, 1), (2, 1), (2, None)}


def test_save_by_torch_during_a_commit_is_not_retired(tmp_path):
    class Races(CountingStore):
        def after(self, number, call):
            if call.startswith("create manifest-"):
                torch_save(5, tmp_path)

    torch_save(1, tmp_path)
    milepost.save(state(2), Races(LocalStore(tmp_path)))
    assert torch_load(tmp_path) == 5
    with pytest.raises(milepost.AmbiguousCheckpoint):
        load(tmp_path)


def test_index_that_cannot_be_renamed_is_said_and_tried_again(tmp_path, caplog):
    class Keeps(CountingStore):
        def before(self, number, call):
            if call == f"delete {METADATA}":
                raise milepost.StorageError("not now")

    torch_save(1, tmp_path)
    milepost.save(state(2), Keeps(LocalStore(tmp_path)))
    assert "which torch would still load" in caplog.text
    assert load(tmp_path) == 2
    milepost.save(state(3), tmp_path)
    assert not (tmp_path / METADATA).exists()
    assert load(tmp_path) == 3


def test_overwrite_false_sees_the_checkpoint_of_dcp(tmp_path):
    torch_save(1, tmp_path)
    with pytest.raises(milepost.InvalidRequest, match="Checkpoint already exists"):
        milepost.save(state(2), tmp_path, overwrite=False)
    assert torch_load(tmp_path) == 1


@pytest.mark.parametrize("kind", ["text", "empty", "folder", "link", "holes"])
def test_other_things_of_that_name_are_left_alone(tmp_path, kind):
    other = tmp_path / METADATA
    if kind == "folder":
        other.mkdir()
    elif kind == "link":
        other.symlink_to(tmp_path / "elsewhere")
    elif kind == "holes":
        other.write_bytes(b"\x80")
        os.truncate(other, 1 << 40)
    else:
        other.write_bytes(b"notes of another program" if kind == "text" else b"")
    milepost.save(state(1), tmp_path)
    milepost.save(state(2), tmp_path)
    assert load(tmp_path) == 2
    assert other.is_symlink() or other.exists()


def test_step_saved_over_by_torch_is_not_skipped_for_an_older_one(tmp_path):
    keeper = milepost.Checkpointer(tmp_path)
    for step in (1, 2):
        keeper.save(state(step), step)
    torch_save(3, tmp_path / "step-0000000002")
    with pytest.raises(milepost.AmbiguousCheckpoint, match="step-0000000002"):
        keeper.restore(state(0))
    assert keeper.restore(target := state(0), step=1) == 1
    assert target["n"] == 1
    keeper.save(state(4), 2)
    assert keeper.restore(target := state(0)) == 2
    assert target["n"] == 4


# --- conversions into a folder that has a checkpoint of the other kind


def test_conversion_to_dcp_replaces_milepost(tmp_path):
    milepost.save(state(1), tmp_path / "target")
    milepost.save(state(2), tmp_path / "source")
    with pytest.raises(milepost.InvalidRequest, match=r"manifest-00000001\.json.*overwrite=True"):
        milepost.convert(tmp_path / "source", tmp_path / "target", "dcp")
    milepost.convert(tmp_path / "source", tmp_path / "target", "dcp", overwrite=True)
    assert torch_load(tmp_path / "target") == 2
    assert load(tmp_path / "target") == 2
    assert list((tmp_path / "target").glob("manifest-*")) == []
    assert not (tmp_path / "target" / "data").exists()


def test_conversions_in_place_leave_one_checkpoint(tmp_path):
    milepost.save(state(1), tmp_path)
    milepost.convert(tmp_path, tmp_path, "dcp", overwrite=True)
    assert torch_load(tmp_path) == load(tmp_path) == 1
    milepost.convert(tmp_path, tmp_path, "milepost", overwrite=True)
    assert load(tmp_path) == 1
    assert not (tmp_path / METADATA).exists()


def test_weights_beside_a_checkpoint_stay_an_export(tmp_path):
    """Safetensors in the same folder are for other programs: they are neither read nor touched."""
    milepost.save(state(1), tmp_path)
    milepost.convert(tmp_path, tmp_path, "safetensors", drop_values=True)
    before = (tmp_path / "model.safetensors").read_bytes()
    milepost.save(state(2), tmp_path)
    assert load(tmp_path) == 2
    assert (tmp_path / "model.safetensors").read_bytes() == before


@pytest.mark.parametrize("there", ["milepost", "dcp"])
def test_weights_of_another_checkpoint_are_not_hidden_beside_one(tmp_path, there):
    milepost.save(state(1), tmp_path / "old")
    milepost.convert(tmp_path / "old", tmp_path / "target", there)
    milepost.save(state(2), tmp_path / "new")
    with pytest.raises(milepost.InvalidRequest, match="Loads from there would go on reading that one"):
        milepost.convert(tmp_path / "new", tmp_path / "target", "safetensors", drop_values=True, overwrite=True)
    assert not (tmp_path / "target" / "model.safetensors").exists()
    assert load(tmp_path / "target") == 1
