"""`milepost cp`: what it prints, how it ends, and that Ctrl-C and damage leave nothing that looks whole."""

import signal
import subprocess
import sys
import threading
import time

import jsonschema
import pytest
import torch

import milepost as library
from milepost.steps.shelf import step_name
from tests.cli.bad_places import made
from tests.cli.running import fine, milepost, refused
from tests.steps.numbered import files_of, flip
from tests.web import Web


@pytest.fixture
def run(tmp_path):
    """A run of three steps."""
    with library.Checkpointer(tmp_path / "run") as keeper:
        for step in (1, 20, 300):
            keeper.save({"a": torch.full((3, 5), float(step)), "n": step}, step)
    return tmp_path / "run"


def json_of(*arguments, status=0):
    """What a command prints as JSON, checked against its schema."""
    done = milepost(*arguments, "--json")
    assert done.status == status, done
    jsonschema.validate(done.json, fine("schema", arguments[0]).json)
    return done.json


def test_run_is_copied_and_the_steps_are_listed(run, tmp_path):
    rows = fine("cp", run, tmp_path / "copy", "--steps", "1,20-100").lines
    assert [row.split()[:2] for row in rows[1:3]] == [["1", "copied"], ["20", "copied"]]
    found = json_of("cp", run, tmp_path / "copy")
    assert found["kind"] == "run"
    assert [(step["step"], step["state"]) for step in found["steps"]] == [(1, "there"), (20, "there"), (300, "copied")]
    assert "1 step: 1 there already" in fine("cp", run, tmp_path / "copy", "--newest").out
    found = json_of("cp", run, tmp_path / "third", "--dry-run")
    assert {step["state"] for step in found["steps"]} == {"planned"}
    assert not (tmp_path / "third").exists()


def test_one_checkpoint_is_copied_and_another_generation_named(run, tmp_path):
    step = run / step_name(20)
    assert fine("cp", step, tmp_path / "one").lines[0] == f"{tmp_path / 'one'}: copied, 60 B"
    library.save({"n": 21}, tmp_path / "one")
    assert "holds another checkpoint; pass --overwrite to replace it" in refused(2, "cp", step, tmp_path / "one")
    fine("cp", f"{step}@1", tmp_path / "one", "--overwrite")
    assert library.open(tmp_path / "one")["n"] == 20


@pytest.mark.parametrize(
    ("arguments", "status", "words"),
    [
        (["run", "copy", "--steps", "1-x"], 2, "--steps is like 100,200-300,1000-"),
        (["run", "copy", "--steps", "9-3"], 2, "ends before it starts"),
        (["run", "copy", "--steps", "2,400-"], 3, "has no step 2, from 400 on"),
        (["nothing", "copy"], 3, "Nothing was saved here"),
        (["run", "run"], 2, "cannot be copied to itself"),
        (["run", "https://example.org/a"], 2, "is only read"),
        (["run"], 2, "Missing argument 'TARGET'"),
    ],
)
def test_wrong_uses_are_told_in_one_line(run, tmp_path, monkeypatch, arguments, status, words):
    monkeypatch.chdir(tmp_path)
    assert words in refused(status, "cp", *arguments)
    assert not (tmp_path / "copy").exists()


def test_damaged_step_ends_with_its_own_status(run, tmp_path):
    flip(files_of(run, 20)[0])
    found = json_of("cp", run, tmp_path / "copy", status=4)
    states = {step["step"]: (step["state"], step["reason"]) for step in found["steps"]}
    assert {number: state for number, (state, _) in states.items()} == {1: "copied", 20: "damaged", 300: "copied"}
    assert "00000.safetensors" in states[20][1]
    assert "'a'" in states[20][1]
    made("newer manifest", tmp_path).rename(run / step_name(400))
    found = json_of("cp", run, tmp_path / "other", status=4)
    assert [step["state"] for step in found["steps"]] == ["copied", "damaged", "copied", "unreadable"]


def test_ctrl_c_leaves_nothing_that_looks_whole(run, tmp_path):
    ended = threading.Event()

    def stall(handler):
        if ".safetensors" in handler.path:
            ended.wait(120)
        return False

    with Web(run / step_name(20)) as web:
        web.faults = [stall] * 100
        command = [sys.executable, "-m", "milepost", "cp", web.url, tmp_path / "copy"]
        process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        deadline = time.monotonic() + 60
        while not any(".safetensors" in one for one in web.requests) and time.monotonic() < deadline:
            time.sleep(0.01)
        process.send_signal(signal.SIGINT)
        out, err = process.communicate(timeout=60)  # it does not wait for the server, which says nothing until then
        ended.set()
    assert process.returncode == 130, err
    assert (out, err.strip()) == ("", "")
    assert not list(tmp_path.glob("copy/manifest-*"))


def test_cp_needs_no_torch(run, tmp_path):
    code = (
        "import sys; from milepost.cli.app import main; "
        f"assert main(['cp', {str(run)!r}, {str(tmp_path / 'copy')!r}]) == 0; assert 'torch' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60, stdout=subprocess.DEVNULL)


@pytest.mark.parametrize(("steps", "status"), [("1-20", 0), ("1,20", 3), ("20", 3), ("2-20", 3)])
def test_step_that_is_named_and_not_finished_ends_with_3(run, tmp_path, steps, status):
    for manifest in (run / step_name(20)).glob("manifest-*"):
        manifest.unlink()
    done = milepost("cp", run, tmp_path / "copy", "--steps", steps)
    assert done.status == status
    assert "1 not finished" in done.out
    assert ("were not copied" in done.err) == bool(status)


@pytest.mark.parametrize("overwrite", [[], ["--overwrite"]])
def test_file_is_no_target(run, tmp_path, overwrite):
    (tmp_path / "file").write_text("mine")
    told = f"{tmp_path / 'file'} is a file, not a folder; "
    for source in (run, run / step_name(1)):
        assert refused(2, "cp", source, tmp_path / "file", *overwrite) == f"{told}copy elsewhere"
    for to in ("milepost", "dcp", "safetensors"):
        line = ["convert", run / step_name(1), tmp_path / "file", "--to", to, *overwrite]
        assert refused(2, *line) == f"{told}convert to another place"
    assert (tmp_path / "file").read_text() == "mine"
