"""Faults at system calls: Milepost keeps its promise at each, and the harness would notice if it did not."""

import os
import signal
import subprocess
import sys

import pytest

from faults import shim as faults_shim
from faults.shim import Call, read_log, violations

IN_ORDER = """\
mkdir /r/step
fsync /r
open /r/step/data new
fallocate /r/step/data
pwritev2 /r/step/data
sync_file_range /r/step/data
fsync /r/step/data
close /r/step/data
open /r/step/manifest-1.tmp new
pwrite /r/step/manifest-1.tmp
fsync /r/step/manifest-1.tmp
close /r/step/manifest-1.tmp
fsync /r/step
link /r/step/manifest-1.tmp /r/step/manifest-00000001.json
fsync /r/step
unlink /r/step/manifest-1.tmp
unlink /r/step/old
"""
PROGRAM = """
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
os.mkdir("a", dir_fd=folder)
with open("aside", "w") as file:
    file.write("not watched")
file = os.open("a/x", os.O_CREAT | os.O_WRONLY, dir_fd=folder)
try:
    os.pwritev(file, [b"1", b"2"], 0)
    os.pwrite(file, b"3", 2)
    os.write(file, b"0")
except OSError as error:
    print(error.strerror)
os.fsync(file)
os.close(file)
os.link("a/x", "a/y", src_dir_fd=folder, dst_dir_fd=folder)
os.rename(f"{sys.argv[1]}/a/y", f"{sys.argv[1]}/z")
os.unlink("a/x", dir_fd=folder)
os.rmdir(f"{sys.argv[1]}/a")
"""
VERBS = ["mkdir", "open", "pwritev2", "pwrite", "write", "fsync", "close", "link", "rename", "unlink", "rmdir"]


def calls(text):
    lines = (line.split() for line in text.splitlines())
    return [Call(n, verb, 0, 0, *paths) for n, (verb, *paths) in enumerate(lines, 1)]


def kinds(text):
    return [kind for kind, _ in violations(calls(text))]


def test_a_log_in_order_has_no_violations():
    assert violations(calls(IN_ORDER)) == []


@pytest.mark.parametrize("line", [i for i, line in enumerate(IN_ORDER.splitlines()) if line.startswith("fsync")])
def test_a_log_without_one_of_its_syncs_has_a_violation(line):
    lines = IN_ORDER.splitlines()
    assert kinds("\n".join(lines[:line] + lines[line + 1 :])), lines[line]


def test_a_sync_that_failed_is_none():
    log = [call._replace(error=5) if call.path == "/r/step/data" else call for call in calls(IN_ORDER)]
    assert violations(log) == [], "nothing was written either"
    log = [call._replace(error=5 * (call.number == 7)) for call in calls(IN_ORDER)]
    assert violations(log) == [("bytes not synced", "/r/step/data")]


def test_bytes_that_are_written_after_the_sync_are_a_violation():
    late = IN_ORDER.replace("close /r/step/data", "pwritev2 /r/step/data")
    assert violations(calls(late)) == [("bytes not synced", "/r/step/data")]


def test_syncing_only_data_does_not_sync_names():
    assert "name not synced" in kinds(IN_ORDER.replace("fsync /r\n", "fdatasync /r\n"))


def test_old_data_is_touched_only_after_a_durable_commit():
    lines = IN_ORDER.splitlines()
    for at in range(len(lines) - 2):
        early = [*lines[:at], "unlink /r/step/old", *lines[at:]]
        assert kinds("\n".join(early)) == ["old one removed first"], early
        early = [*lines[:at], "open /r/step/old trunc", "fsync /r/step/old", *lines[at:]]
        assert kinds("\n".join(early)) == ["old one overwritten"], early


def test_a_log_without_a_commit_has_a_violation():
    assert kinds(IN_ORDER.replace("manifest-00000001.json", "elsewhere")) == ["old one removed first", "no commit"]


def test_a_commit_by_rename_takes_unsynced_bytes_along():
    log = "open /r/.metadata.tmp new\nwrite /r/.metadata.tmp\nrename /r/.metadata.tmp /r/.metadata\nfsync /r"
    assert violations(calls(log)) == [("bytes not synced", "/r/.metadata.tmp")]


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = faults_shim.compiled(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler, or no Linux")
    return library


def run(shim, folder, **settings):
    watched = folder / "watched"
    watched.mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_FOLDER": str(watched), **settings}
    return subprocess.run(
        [sys.executable, "-c", PROGRAM, str(watched)],
        env=environment, cwd=folder, capture_output=True, text=True, timeout=30, check=False,
    )  # fmt: skip


def test_the_shim_records_every_call_below_its_folder_and_no_other(shim, tmp_path):
    log = tmp_path / "log"
    done = run(shim, tmp_path, SHIM_LOG=str(log))
    assert done.returncode == 0, done.stderr
    found = read_log(log.read_text())
    assert [call.verb for call in found] == VERBS
    assert [call.number for call in found] == list(range(1, len(VERBS) + 1))
    watched = str(tmp_path / "watched")
    assert found[1][2:] == (found[1].result, 0, f"{watched}/a/x", "new")
    assert [call.result for call in found[2:5]] == [2, 1, 1]
    assert found[8][2:] == (0, 0, f"{watched}/a/y", f"{watched}/z")
    assert (tmp_path / "watched" / "z").read_bytes() == b"023"


def test_the_shim_fails_the_call_that_it_is_told_to_and_goes_on(shim, tmp_path):
    log = tmp_path / "log"
    done = run(shim, tmp_path, SHIM_LOG=str(log), SHIM_AT="2", SHIM_DO="ENOSPC", SHIM_ONLY="pwrite")
    assert (done.returncode, done.stdout) == (0, "No space left on device\n"), done.stderr
    assert (tmp_path / "watched" / "z").read_bytes() == b"12"
    assert [call.verb for call in read_log(log.read_text()) if call.error] == ["pwrite"]


@pytest.mark.parametrize("at", range(1, len(VERBS) + 1))
def test_the_shim_kills_before_the_call_that_it_is_told_to(shim, tmp_path, at):
    log = tmp_path / "log"
    done = run(shim, tmp_path, SHIM_LOG=str(log), SHIM_AT=str(at), SHIM_DO="kill")
    assert done.returncode == -signal.SIGKILL
    assert len(log.read_text().splitlines()) == at - 1


def test_the_shim_kills_after_a_call_where_it_is_told_so(shim, tmp_path):
    assert run(shim, tmp_path, SHIM_AT="2", SHIM_DO="kill-after").returncode == -signal.SIGKILL
    assert (tmp_path / "watched" / "a" / "x").exists()


@pytest.fixture(scope="module")
def rows(shim, tmp_path_factory):
    return {row.number: row for row in faults_shim.rows(False, tmp_path_factory.mktemp("rows"))}


@pytest.mark.slow
@pytest.mark.parametrize("number", [4, 5, 8, 11, 12])
def test_milepost_keeps_its_promise_at_every_fault(rows, number):
    assert rows[number].ok, rows[number].milepost.text


@pytest.mark.slow
def test_milepost_leaves_and_claims_only_whole_checkpoints(rows):
    whole = ("raised, old loads", "raised, nothing there", "raised, new loads", "succeeded, whole")
    for number in (5, 11, 12):
        assert rows[number].milepost.of(*whole) == rows[number].milepost.trials, rows[number].milepost.text


@pytest.mark.slow
def test_the_faults_really_happen(rows):
    assert rows[4].dcp.of("unloadable") > 0, rows[4].dcp.text
    assert rows[5].milepost.of("raised, old loads") > 0
    assert rows[5].milepost.of("raised, nothing there") > 0
    assert rows[8].dcp.of("name not synced", "commit not synced") > 0, rows[8].dcp.text
    assert rows[11].dcp.of("succeeded, damaged") > 0, rows[11].dcp.text
    for row in rows.values():
        assert not row.dcp.of("no fault", "not killed"), row.dcp.text


def test_without_a_compiler_the_rows_say_so(monkeypatch, tmp_path):
    monkeypatch.setattr(faults_shim.shutil, "which", lambda name: None)
    found = list(faults_shim.rows(False, tmp_path))
    assert [row.number for row in found] == [4, 5, 8, 11, 12]
    assert all(row.ok is None and row.note for row in found)
