"""Where a conversion is refused, because it would hide or disturb other checkpoints; and where it is not."""

import pytest
import torch

import milepost
from milepost.steps.shelf import step_name
from tests.cli.running import fine, refused
from tests.cli.running import milepost as command
from tests.formats.write.conversions import FORMATS, files_in

FOLDERS = [one for one in FORMATS if one != "torch"]


@pytest.fixture
def run(tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        for step in (1, 2):
            keeper.save({"w": torch.full((3,), float(step))}, step)
    return tmp_path / "run"


@pytest.mark.parametrize("to", FOLDERS)
@pytest.mark.parametrize("own", [True, False])
def test_run_is_no_target(run, tmp_path, to, own):
    milepost.save({"w": torch.ones(3)}, tmp_path / "other")
    source, before = run / step_name(2) if own else tmp_path / "other", files_in(run)
    with pytest.raises(milepost.InvalidRequest, match="is a run: it has a checkpoint in step-"):
        milepost.convert(source, run, to, overwrite=True)
    assert "is a run" in refused(2, "convert", source, run, "--to", to, "--overwrite")
    assert files_in(run) == before


def test_run_of_another_library_is_no_target(run, tmp_path):
    milepost.convert(run / step_name(1), tmp_path / "theirs" / "step-1", "dcp")
    with pytest.raises(milepost.InvalidRequest, match="it has a checkpoint in step-1"):
        milepost.convert(run / step_name(2), tmp_path / "theirs", "dcp")


@pytest.mark.parametrize("to", FORMATS)
def test_folder_in_the_source_is_no_target(run, to):
    source, before = run / step_name(1), files_in(run)
    with pytest.raises(milepost.InvalidRequest, match="lies in the checkpoint that is converted"):
        milepost.convert(source, source / "inside", to)
    assert files_in(run) == before


def test_run_named_as_source_and_target_is_refused(run):
    before = files_in(run)
    found = command("convert", run, run, "--overwrite")
    assert found.status == 2
    assert "is a run" in found.err.splitlines()[-1]
    assert files_in(run) == before


def test_checkpoint_becomes_another_format_in_its_place(run):
    step = run / step_name(2)
    fine("convert", step, step, "--overwrite")
    fine("convert", step, run / "model.pt")
    fine("convert", step, run / "step-3")
    fine("convert", step, step, "--to", "dcp", "--overwrite")
    assert torch.equal(milepost.open(step)["w"].read(), torch.full((3,), 2.0))
    assert milepost.open(step).format == "dcp"
