"""`python -m milepost.dcp.format_utils`: the command line of torch's, with errors that end in a status."""

import subprocess
import sys

import pytest
import torch

import milepost
from milepost.dcp.format_utils import main


def test_a_file_becomes_a_checkpoint_and_a_file_again(tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3), "step": 7}
    torch.save(state, tmp_path / "model.pt")
    assert main(["torch_to_dcp", str(tmp_path / "model.pt"), str(tmp_path / "run")]) == 0
    assert milepost.open(tmp_path / "run")["step"] == 7
    assert main(["dcp_to_torch", str(tmp_path / "run"), str(tmp_path / "again.pt")]) == 0
    again = torch.load(tmp_path / "again.pt", weights_only=True)
    assert again["step"] == 7
    assert torch.equal(again["w"], state["w"])


def test_what_is_not_there_is_told_with_a_status(tmp_path, capsys):
    for mode in ("torch_to_dcp", "dcp_to_torch"):
        assert main([mode, str(tmp_path / "nothing"), str(tmp_path / "out")]) == 1
        assert f"CheckpointNotFound: there is no checkpoint at {tmp_path}/nothing" in capsys.readouterr().err
        assert not (tmp_path / "out").exists()
    with pytest.raises(SystemExit) as info:
        main(["sideways", "a", "b"])
    assert info.value.code == 2
    assert "torch_to_dcp" in capsys.readouterr().err


@pytest.mark.slow
def test_the_module_runs_on_the_command_line(tmp_path):
    torch.save({"step": 7}, tmp_path / "model.pt")
    arguments = ["-W", "error", "-m", "milepost.dcp.format_utils", "torch_to_dcp", "model.pt", "run"]
    done = subprocess.run([sys.executable, *arguments], cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")
    assert "Converting checkpoint from model.pt to run" in done.stdout
    assert milepost.open(tmp_path / "run")["step"] == 7
