"""`milepost view`: what it writes and where, what it refuses, and how soon it starts."""

import json
import os
import subprocess
import sys

import pytest

from milepost.cli.app import main
from tests.view import jobs


@pytest.fixture
def here(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_it_writes_a_file_and_says_where(here, run, capsys):
    assert main(["view", str(run)]) == 0
    assert capsys.readouterr().out.startswith("wrote milepost-run.html: 6 steps, ")
    assert main(["view", str(run), "--json", "--steps", "2", "-o", "two.html"]) == 0
    found = json.loads(capsys.readouterr().out)
    assert (found["file"], found["steps"]) == ("two.html", 2)
    assert found["size_bytes"] == (here / "two.html").stat().st_size
    assert found["notes"] == ["Only the newest 2 steps are shown."]
    assert sorted(path.name for path in here.iterdir()) == ["milepost-run.html", "two.html"]


def test_it_replaces_its_own_pages_only(here, run, capsys):
    assert main(["view", str(run), "-o", "page.html"]) == 0
    assert main(["view", str(run), "-o", "page.html"]) == 0
    (here / "mine.html").write_text("<p>mine")
    assert main(["view", str(run), "-o", "mine.html"]) == 2
    assert "is not a page of Milepost" in capsys.readouterr().err
    assert (here / "mine.html").read_text() == "<p>mine"
    assert main(["view", str(run), "-o", "mine.html", "--force"]) == 0
    assert main(["view", str(run), "-o", "mine.html"]) == 0
    (here / "mine.html").rename(here / "kept.html")
    (here / "mine.html").symlink_to("kept.html")
    before = (here / "kept.html").stat().st_ino
    assert main(["view", str(run), "-o", "mine.html"]) == 0
    assert (here / "mine.html").is_symlink()
    assert (here / "kept.html").stat().st_ino != before
    os.mkfifo(here / "pipe")
    assert main(["view", str(run), "-o", "pipe"]) == 2, "and it did not wait for a writer"


@pytest.mark.parametrize(
    ("arguments", "status", "message"),
    [
        (["nowhere"], 3, "nowhere"),
        (["RUN", "--compare", "100"], 2, "takes two steps"),
        (["RUN", "--compare", "100:7"], 2, "no step 7"),
        (["RUN", "--steps", "0"], 2, "--steps"),
        (["RUN", "--serve", "-o", "x.html"], 2, "--serve writes no file"),
        (["RUN", "--port", "8000"], 2, "add --serve"),
        (["RUN", "-o", "-"], 2, "not to stdout"),
        (["RUN", "-o", "missing/x.html"], 5, "cannot write"),
        (["RUN", "-o", "."], 2, "is not a file"),
        (["RUN", "-o", "/dev/null", "--force"], 2, "is not a file"),
    ],
)
def test_a_wrong_use_is_one_line(here, run, capsys, arguments, status, message):
    assert main(["view", *(str(run) if one == "RUN" else one for one in arguments)]) == status
    told = capsys.readouterr()
    assert message in told.err
    assert told.err.count("\n") == 1
    assert told.out == ""
    assert list(here.iterdir()) == []


def test_a_damaged_checkpoint_alone_is_an_error(here, run, capsys):
    place = here / "step"
    place.mkdir()
    manifest = next(jobs.folder(run, 100).glob("manifest-00000001.json"))
    (place / manifest.name).write_bytes(manifest.read_bytes()[:-60])
    assert main(["view", str(place)]) == 4
    assert "damaged" in capsys.readouterr().err


def test_names_of_files_are_made_of_the_place(here, run, capsys):
    (here / "a b <i>").symlink_to(run)
    assert main(["view", "a b <i>/"]) == 0
    assert capsys.readouterr().out.startswith("wrote milepost-a-b--i-.html")
    (here / "in").mkdir()
    os.chdir(run)
    assert main(["view", ".", "-o", str(here / "in" / "x.html")]) == 0


def test_it_starts_soon_and_without_torch(run, tmp_path):
    source = "import sys; from milepost.cli.app import main; status = main(sys.argv[1:]); "
    source += "assert 'torch' not in sys.modules; sys.exit(status)"
    command = [sys.executable, "-c", source, "view", str(run), "-o", str(tmp_path / "page.html")]
    subprocess.run(command, check=True, timeout=60, capture_output=True)


def test_help_imports_little():
    """So that it is there in a fifth of a second."""
    source = "import sys; from milepost.cli.app import main; main(['view', '--help']); "
    source += "assert not {'torch', 'numpy', 'http.server', 'milepost.view'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", source], check=True, timeout=60, capture_output=True)
