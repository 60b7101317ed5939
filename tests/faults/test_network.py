"""Lost replies, stale handles, and two libraries in one folder: the rows hold, and a worse library would be noticed."""

import os
import subprocess
import sys
from functools import partial

import pytest

import milepost
from faults import beside, network
from faults.shim import compiled

PROGRAM = """
import os, sys
folder = os.open(sys.argv[1], os.O_RDONLY)
for call in (
    lambda: os.mkdir("a", dir_fd=folder),
    lambda: os.close(os.open("x", os.O_CREAT | os.O_EXCL | os.O_WRONLY, dir_fd=folder)),
    lambda: os.link("x", "y", src_dir_fd=folder, dst_dir_fd=folder),
    lambda: os.rename(f"{sys.argv[1]}/y", f"{sys.argv[1]}/z"),
    lambda: os.unlink("x", dir_fd=folder),
    lambda: os.preadv(os.open("z", os.O_RDONLY, dir_fd=folder), [bytearray(1)], 0),
    lambda: os.read(os.open("z", os.O_RDONLY, dir_fd=folder), 1),
):
    try:
        call()
        print("done")
    except OSError as error:
        print(error.strerror)
"""


@pytest.fixture(scope="module")
def shim(tmp_path_factory):
    library = compiled(tmp_path_factory.mktemp("shim"))
    if library is None:
        pytest.skip("no C compiler, or no Linux")
    return library


def answers(shim, folder, **settings):
    folder.mkdir()
    environment = {**os.environ, "LD_PRELOAD": str(shim), "SHIM_FOLDER": str(folder), **settings}
    command = [sys.executable, "-c", PROGRAM, str(folder)]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=30, check=True)
    return done.stdout.splitlines(), sorted(os.listdir(folder))


@pytest.mark.parametrize(
    ("call", "said"),
    [
        ("mkdir", "File exists"),
        ("open", "File exists"),
        ("link", "File exists"),
        ("rename", "No such"),
        ("unlink", "No such"),
    ],
)
def test_repeated_call_takes_effect_and_fails(shim, tmp_path, call, said):
    found, names = answers(shim, tmp_path / "f", SHIM_DO="repeat", SHIM_AT="1", SHIM_ONLY=call)
    (refused,) = (line for line in found if line != "done")
    assert refused.startswith(said)
    assert names == ["a", "z"], "everything took effect all the same"


@pytest.mark.parametrize("call", ["openread", "preadv", "read"])
@pytest.mark.parametrize("lasts", ["", "+"])
def test_stale_calls_fail_once_or_always(shim, tmp_path, call, lasts):
    settings = {"SHIM_DO": f"ESTALE{lasts}", "SHIM_AT": "1", "SHIM_ONLY": call, "SHIM_READS": "yes"}
    if call == "openread":  # the first opens the folder itself
        settings["SHIM_AT"] = "2"
    found, _ = answers(shim, tmp_path / "f", **settings)
    assert found.count("Stale file handle") == (2 if call == "openread" and lasts else 1)


@pytest.fixture(scope="module")
def rows(shim, tmp_path_factory):
    return {row.number: row for row in network.rows(False, tmp_path_factory.mktemp("rows"))}


@pytest.mark.slow
@pytest.mark.parametrize("number", [28, 30])
def test_milepost_keeps_its_promise_on_a_network(rows, number):
    assert rows[number].ok, rows[number].milepost.text
    assert rows[number].milepost.trials >= 8


@pytest.mark.slow
def test_the_answers_of_nfs_reach_dcp_too(rows):
    assert rows[28].dcp.of("succeeded, whole") < rows[28].dcp.trials, rows[28].dcp.text
    assert rows[30].dcp.of("once: raised", "always: raised") == rows[30].dcp.trials, rows[30].dcp.text


def test_both_libraries_in_one_folder_never_read_the_older(tmp_path):
    (row,) = beside.rows(False, tmp_path)
    assert row.ok, row.milepost.text
    assert row.milepost.of("Milepost: newest", "DCP: refused") == row.milepost.trials
    assert row.dcp.of("Milepost: refused", "DCP: newest") == row.dcp.trials, row.dcp.text


@pytest.mark.filterwarnings("ignore")
def test_library_that_leaves_the_index_of_dcp_is_noticed(tmp_path):
    def leaves_it(number, place):
        index = place / ".metadata"
        kept = index.read_bytes() if index.exists() else None
        beside.save_by_milepost(number, place)
        if kept is not None:
            index.write_bytes(kept)

    row = beside.both_saved(False, tmp_path, leaves_it)
    assert row.ok is False
    assert row.milepost.of("DCP: older, silently") > 0


def test_restore_that_finds_another_state_is_noticed(tmp_path):
    keeper = milepost.Checkpointer(tmp_path)
    keeper.save(network.small(7), network.NEWEST)
    with pytest.raises(AssertionError):
        network.restore_by_milepost(tmp_path)
    assert network._code(partial(network.restore_by_dcp), tmp_path) == network._RAISED
