"""Bad places: every command says in one line what is wrong and what to do, with the status of that kind."""

import os
import shutil
import subprocess
import tempfile
from pathlib import Path

import pytest

from tests.cli.bad_places import made
from tests.cli.running import command, environment, milepost, process
from tests.steps.numbered import files_of

COMMANDS = {
    "ls": [],
    "show": [],
    "stats": [],
    "stats --compute": [],
    "verify": [],
    "explain": ["--ranks", "2"],
    "diff": [],
    "prune": ["--keep-last", "1", "--dry-run"],
    "convert": [],
}


WHAT = {
    "nothing": (3, "no such file or folder"),
    "below a file": (5, "Not a directory"),
    "long name": (5, "Choose a shorter path"),
    "text": (5, "neither a file of torch.save nor a safetensors file"),
    "empty file": (5, "neither a file of torch.save nor a safetensors file"),
    "old torch file": (5, "before version 1.6"),
    "half a torch file": (4, "place"),
    "empty folder": (3, "Nothing was saved here"),
    "other folder": (3, "Nothing was saved here"),
    "half a manifest": (4, "its checksum does not fit"),
    "damaged manifest": (4, "its checksum does not fit"),
    "newer manifest": (5, "Update Milepost"),
    "unfinished": (3, "never finished"),
    "truncated shard": (4, "was saved with"),
}
READS_NO_DATA = ("show", "stats", "explain")
"""These look at the manifest only, so that they work where a file is damaged."""


@pytest.mark.parametrize("name", COMMANDS)
@pytest.mark.parametrize("what", WHAT)
def test_bad_place_is_told_in_one_line(what, name, tmp_path):
    status, told = WHAT[what]
    place = made(what, tmp_path)
    before = sorted(tmp_path.rglob("*"))
    line = [*name.split(), place, *({"diff": [place], "convert": [tmp_path / "target"]}.get(name, COMMANDS[name]))]
    done = milepost(*line)
    if what == "truncated shard" and name in READS_NO_DATA:
        assert (done.status, done.err) == (0, "")
        return
    if name == "prune" and (status != 3 or what == "unfinished") and what not in ("below a file", "long name"):
        status, told = 2, "holds no steps"
    if what == "unfinished" and name in ("ls", "prune"):
        status = 0 if name == "ls" else 2  # it is listed, as unfinished
    assert done.status == status, done
    text = done.err or done.out
    assert told.lower() in text.lower()
    if name not in ("ls", "verify"):  # those tell it in their table
        assert (done.out, done.err.count("\n")) == ("", 1)
        assert done.err.startswith("milepost: ")
    assert "Traceback" not in text
    assert sorted(tmp_path.rglob("*")) == before


@pytest.mark.parametrize(
    ("url", "status", "told"),
    [
        ("foo://bucket/a", 2, "there is no kind of place called 'foo'"),
        ("s3://", 2, "not the name of a bucket"),
        ("s3:/bucket/a", 2, "'s3://bucket/a'"),
        ("file://host/a", 2, "three slashes"),
        ("", 2, "not ''"),
        ("~nobody-of-this-name/a", 2, "home folder"),
        ("a\0b", 2, "null character"),
        ("memory://nothing", 3, "Nothing was saved here"),
    ],
)
@pytest.mark.parametrize("name", ["ls", "show", "verify", "diff", "prune"])
def test_bad_url_is_told_in_one_line(name, url, status, told):
    line = {"diff": ["diff", url, url], "prune": ["prune", url, "--keep-last", "1", "--dry-run"]}.get(name, [name, url])
    done = milepost(*line)
    assert done.status == status, done
    assert told in done.err or told in done.out
    assert (done.err + done.out).count("\n") == 1


MISSING = "import sys\nsys.modules[{module!r}] = None"


@pytest.mark.parametrize(
    ("module", "url", "told"),
    [
        ("obstore", "s3://bucket/a", 'pip install "milepost[cloud]"'),
        ("fsspec", "hf://bert-base-cased", "pip install fsspec"),
    ],
)
def test_url_without_its_extra_says_what_to_install(module, url, told):
    done = process("ls", url, code=MISSING.format(module=module))
    assert done.status == 2
    assert told in done.err
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_server_that_does_not_answer_is_told_after_a_moment():
    line = command("ls", "http://127.0.0.1:9/run")
    with subprocess.Popen(line, env=environment(), stderr=subprocess.PIPE, text=True) as running:
        told = running.stderr.readline()
        running.terminate()
    assert told.startswith("milepost: no answer from http://127.0.0.1:9/run/manifest-00000001.json for ")
    assert "refused" in told


@pytest.fixture
def open_folder():
    """A folder that others may pass through. Not one of pytest, which closes those of all its runs when it starts."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o755)
        yield Path(folder)


OTHER_USER = (
    "import importlib, os, milepost.cli.app as app\n"
    "for name in app.COMMANDS: importlib.import_module(f'milepost.cli.commands.{name}')\n"
    "os.setuid(65534)"
)


@pytest.mark.slow
@pytest.mark.skipif(os.getuid() != 0, reason="only root can become another user here")
def test_no_permission_is_told(run, open_folder):
    copied = Path(shutil.copytree(run, open_folder / "run"))
    place = copied / "step-0000000400"
    place.chmod(0o700)
    for line in (["show", place], ["diff", place, place], ["stats", place], ["explain", place, "--ranks", "2"]):
        done = process(*line, code=OTHER_USER)
        assert (done.status, done.out, done.err.count("\n")) == (5, "", 1), done
        assert "Permission denied" in done.err
    assert process("verify", place, code=OTHER_USER).status == 5
    assert process("ls", place / "below", code=OTHER_USER).err.startswith(f"milepost: cannot list {place / 'below'}: ")
    done = process("ls", copied, code=OTHER_USER)
    assert done.status == 0
    assert [row.split()[1] for row in done.lines[1:5]] == ["whole"] * 3 + ["unreadable"]
    for shard in files_of(copied, 300):
        shard.chmod(0o000)
    done = process("verify", copied / "step-0000000300", code=OTHER_USER)
    assert (done.status, done.out.split()[0]) == (5, "unreadable")
    assert "Permission denied" in done.out
    done = process("prune", copied, "--keep-last", "1", "--yes", code=OTHER_USER)
    assert done.status == 5
    assert len(list(copied.iterdir())) == 4
    place.chmod(0o755)
    done = process("prune", copied, "--keep-last", "1", "--yes", code=OTHER_USER)
    assert (done.status, [row.split()[1] for row in done.lines[1:5]]) == (5, ["left"] * 3 + ["keep"])
    done = process("verify", copied / "step-0000000100", "--record", code=OTHER_USER)
    assert (done.status, done.out.split()[0]) == (5, "whole")
    assert "not noted: cannot create" in done.err


def test_target_that_cannot_be_written_is_told(step, tmp_path):
    (tmp_path / "file").write_text("x")
    done = milepost("convert", step, tmp_path / "file" / "below")
    assert done.status in (2, 5)
    assert done.err.count("\n") == 1


@pytest.mark.slow
def test_interpreter_without_torch_can_look(run):
    """Looking works where torch cannot be imported at all."""
    for line in (["ls", run], ["show", run], ["verify", run], ["diff", run, run], ["stats", run]):
        assert process(*line, code=MISSING.format(module="torch")).status == 0
