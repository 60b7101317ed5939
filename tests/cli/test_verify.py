"""`milepost verify`: names each damaged block by file, tensor and box, and says by its exit status what it found."""

import os
import re
import signal
import subprocess

import pytest
import torch

import milepost as library
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import manifest_name
from tests.cli.bad_places import flip
from tests.cli.running import LIMIT_S, command, environment, fine, milepost, on_terminal, process, refused
from tests.steps.numbered import files_of

SHOW_CURSOR = "\x1b[?25h"


def test_whole_run_is_told_step_by_step(run):
    done = fine("verify", run)
    assert [line.split()[:2] for line in done.lines] == [["whole", f"{path}:"] for path in sorted(run.iterdir())]
    assert all(re.search(r"3 files, [0-9.]+ KiB in ", line) for line in done.lines)


def test_each_damaged_block_is_named_by_file_tensor_and_box(copied):
    place = copied / "step-0000000300"
    one, other, _ = files_of(copied, 300)
    for path, at in ((one, 0), (one, BLOCK_BYTES), (other, 5)):
        flip(path, at)
    done = milepost("verify", place, copied / "step-0000000400")
    assert (done.status, done.err) == (4, "")
    assert done.lines[0].startswith(f"damaged    {place}: 3 files")
    assert done.lines[-1].startswith(f"whole      {copied / 'step-0000000400'}")
    blocks = [line for line in done.lines if line.startswith("  data/")]
    assert [re.search(r"(data/\S+): block (\d)", line).groups() for line in blocks] == [
        (str(one.relative_to(place)), "0"), (str(one.relative_to(place)), "1"), (str(other.relative_to(place)), "0"),
    ]  # fmt: skip
    boxes = {line.strip() for line in done.lines if line.startswith("    ")}
    assert "model.w[0:120, 0:256]" in boxes
    assert "model.w[120:240, 0:256]" in boxes
    assert boxes == {"model.frozen[0:50000]", "model.w[0:120, 0:256]", "model.w[120:240, 0:256]"}
    found = milepost("verify", place, "--json").json["checkpoints"][0]["damages"]
    assert len(found) == 3
    assert {"key": "model.w", "offset": [120, 0], "shape": [120, 256], "used": True} in found[2]["boxes"]


@pytest.mark.parametrize(
    ("what", "told"),
    [("missing", "is missing"), ("short", "was saved with"), ("table", "table of checksums is not what was saved")],
)
def test_files_that_are_not_as_saved_are_named(what, told, copied):
    shard = files_of(copied, 100)[1]
    if what == "missing":
        shard.unlink()
    elif what == "short":
        os.truncate(shard, 1000)
    else:
        shard.write_bytes(shard.read_bytes()[:-1] + b"?")
    done = milepost("verify", copied)
    assert done.status == 4
    assert [line.split()[0] for line in done.lines if not line.startswith(" ")] == ["damaged", *["whole"] * 3]
    [line] = [line for line in done.lines if line.startswith("  data/")]
    assert shard.name in line
    assert told in line


def test_damage_in_a_file_of_another_library_names_it_once(tmp_path):
    torch.save({"w": torch.arange(10_000.0)}, tmp_path / "file.pt")
    data = bytearray((tmp_path / "file.pt").read_bytes())
    data[20_000] ^= 1
    (tmp_path / "file.pt").write_bytes(data)
    done = milepost("verify", tmp_path / "file.pt")
    assert (done.status, done.lines[1].split(";")[0]) == (4, "  file.pt: the bytes of 'w' are not what was saved")


def test_statuses_tell_the_worst(run, copied, tmp_path):
    assert milepost("verify", run, tmp_path / "nothing").status == 3
    (copied / "step-0000000100" / manifest_name(1)).write_bytes(b"{")
    (tmp_path / "file.txt").write_text("hello")
    assert milepost("verify", tmp_path / "file.txt").status == 5
    done = milepost("verify", copied, tmp_path / "nothing", tmp_path / "file.txt")
    assert done.status == 4
    assert [line.split()[0] for line in done.lines] == ["damaged", *["whole"] * 3, "missing", "unreadable"]


def test_steps_never_finished_are_not_read(copied):
    for step in (100, 200):
        (copied / f"step-0000000{step}" / manifest_name(1)).unlink()
    assert len(fine("verify", copied).lines) == 2
    for step in (300, 400):
        (copied / f"step-0000000{step}" / manifest_name(1)).unlink()
    done = milepost("verify", copied)
    assert (done.status, done.out.split()[0]) == (3, "missing")
    assert "no save was finished" in done.out


def test_places_beside_a_bad_one_are_verified(copied, tmp_path):
    flip(files_of(copied, 200)[0], 7)
    library.save({"w": torch.ones(3)}, tmp_path / "begun" / "step-1")
    (tmp_path / "begun" / "step-1" / manifest_name(1)).unlink()
    (tmp_path / "file").write_text("x")
    done = milepost("verify", tmp_path / "begun", tmp_path / "file" / "below", copied / "step-0000000200")
    assert (done.status, done.err) == (4, "")
    assert [line.split()[0] for line in done.lines if line[0] != " "] == ["missing", "unreadable", "damaged"]


def test_step_that_is_removed_meanwhile_is_told_and_is_no_error(copied):
    code = (
        "import shutil, milepost.cli.commands.verify as verify\n"
        "listed = verify.checkpoints_at\n"
        "def then_removed(root):\n"
        f"    found = listed(root); shutil.rmtree({str(copied / 'step-0000000100')!r}); return found\n"
        "verify.checkpoints_at = then_removed"
    )
    done = process("verify", copied, code=code)
    assert (done.status, done.err) == (0, "")
    assert [line.split()[0] for line in done.lines] == ["removed", *["whole"] * 3]


def test_what_is_verified_can_be_noted(copied, tmp_path):
    flip(files_of(copied, 200)[0], 7)
    assert milepost("verify", copied, "--record").status == 4
    noted = [len(list(path.glob("*.verified-*"))) for path in sorted(copied.iterdir())]
    assert noted == [1, 0, 1, 1]
    torch.save({"w": torch.ones(3)}, tmp_path / "file.pt")
    done = milepost("verify", tmp_path / "file.pt", "--record")
    assert done.status == 0
    assert "not noted" in done.err
    assert "only read" in refused(2, "verify", "https://127.0.0.1:1/a", "--record")


@pytest.fixture(scope="module")
def large(tmp_path_factory):
    """One that takes a while to read, in a folder whose name is markup and moves cursors."""
    place = tmp_path_factory.mktemp("large") / "[red]\x1b[2Ja[/x]"
    library.save({"w": torch.zeros(600, 1 << 18)}, place)
    return place


@pytest.mark.slow
def test_bar_is_drawn_on_a_terminal_only(large):
    at_once = "import milepost.cli.output as output, milepost.data.transfer as transfer\n"
    at_once += "output.MOMENT_S = transfer._REPORT_EVERY_S = 0"
    drawn = on_terminal("verify", large, code=at_once)
    assert drawn.status == 0
    assert all(part in drawn.out for part in ("━", "verify /", "[red]", "whole", SHOW_CURSOR))
    assert "\x1b[2J" not in drawn.out
    for done in (on_terminal("verify", large, code=at_once, TERM="dumb"), process("verify", large, code=at_once)):
        assert (done.status, done.err, done.out.count("\n")) == (0, "", 1)
        assert "\x1b" not in done.out
    assert "━" not in on_terminal("verify", large / "data", large).out


@pytest.mark.slow
def test_ctrl_c_ends_it_at_once_and_quietly(large):
    line = command("verify", *[large] * 400)
    with subprocess.Popen(
        line, env=environment(), stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as running:
        assert running.stdout.readline().startswith("whole")
        running.send_signal(signal.SIGINT)
        out, err = running.communicate(timeout=LIMIT_S)
    assert (running.returncode, err.strip()) == (130, "")
    assert out.count("\n") < 399, "it did not read them all first"
