"""What a terminal of any width gets, what a pipe gets, and how a command ends when nobody reads on."""

import re
import subprocess
import sys

import pytest

import milepost as library
from milepost.cli.escape import meant, shown
from milepost.cli.fit import width_of
from milepost.core.printable import printable
from tests.cli.conftest import NASTY
from tests.cli.running import ESCAPE, command, environment, fine, milepost, on_terminal, process

COLOUR = re.compile(r"\x1b\[[0-9;]*m")
TABLES = {"ls": [], "show": [], "stats": [], "explain": ["--ranks", "3"]}


def tables_of(text):
    """The lines of the tables: below a row of titles, up to an empty line."""
    lines, found = COLOUR.sub("", text).splitlines(), []
    for start, line in enumerate(lines):
        if re.fullmatch(r" *[A-Z]{3,}( +[A-Z]+)*", line):
            found += lines[start : lines.index("", start) if "" in lines[start:] else len(lines)]
    return found


@pytest.mark.parametrize("columns", [40, 80])
@pytest.mark.parametrize("name", TABLES)
def test_table_fits_the_terminal(name, columns, run, step):
    done = on_terminal(name, run if name == "ls" else step, *TABLES[name], columns=columns)
    assert done.status == 0
    assert ESCAPE in done.out
    lines = tables_of(done.out)
    assert len(lines) > 2
    assert max(map(width_of, lines)) <= columns


def test_narrow_terminal_leaves_out_columns_and_cuts_names(run, nasty):
    wide, narrow = (tables_of(on_terminal("ls", run, columns=columns).out)[0].split() for columns in (120, 30))
    assert wide == ["STEP", "STATE", "SIZE", "AGE", "RANKS", "METRICS", "KEPT"]
    assert narrow == wide[: len(narrow)] != wide
    cut = [line for line in tables_of(on_terminal("show", nasty, "--flat", columns=40).out) if line.startswith("xxx")]
    assert "…" in cut[0]
    assert len(cut[0]) <= 40


def test_narrow_terminal_shows_the_names_of_steps_without_numbers(tmp_path):
    for name in ("best", "latest"):
        library.save({"n": 1}, tmp_path / name)
    rows = tables_of(on_terminal("ls", tmp_path, columns=30).out)
    assert [row.split()[-1] for row in rows] == ["NAME", "best", "latest"]


@pytest.mark.parametrize("further", [{"TERM": "dumb"}, {"TERM": ""}, {"NO_COLOR": "1"}])
def test_plain_terminal_gets_plain_text(further, run):
    done = on_terminal("ls", run, **further)
    assert ESCAPE not in done.out
    assert done.out.startswith("STEP")


def test_plain_terminal_gets_no_progress(run, tmp_path):
    slow = "import milepost.cli.output as output; output.MOMENT_S = 0.0"
    for term, drawn in (("dumb", False), ("xterm", True)):
        line = ["view", run, "-o", tmp_path / "page.html"]
        done = on_terminal(*line, code=slow, TERM=term, NO_COLOR="1")
        assert done.status == 0
        assert (ESCAPE in done.out, "reading step" in done.out) == (drawn, drawn)
        assert done.out.endswith(f"wrote {tmp_path / 'page.html'}: 4 steps, {done.out.rpartition(', ')[2]}")
        assert ESCAPE not in on_terminal(*line, TERM=term, NO_COLOR="1").out


def test_pipe_gets_plain_text_of_any_width(nasty, run):
    assert ESCAPE not in process("ls", run, COLUMNS="20").out
    row = next(line for line in fine("show", nasty).lines if line.startswith("xxx"))
    assert row.startswith("x" * 10_000 + "  float32")


@pytest.mark.parametrize("columns", [0, 1, 7])
def test_absurd_widths_are_borne(columns, run, nasty):
    for line in (["ls", run], ["show", nasty], ["diff", run, nasty]):
        done = on_terminal(*line, columns=columns)
        assert done.status in (0, 1)


def test_nothing_from_a_checkpoint_reaches_the_terminal(nasty):
    lines = (
        ["ls", nasty.parent],
        ["show", nasty],
        ["show", nasty, "odd"],
        ["show", nasty, NASTY[0]],
        ["show", nasty, "values." + NASTY[0]],
        ["stats", nasty, "--compute"],
        ["verify", nasty],
        ["diff", nasty, nasty.parent / "nothing\x1b[31m"],
        ["explain", nasty, "--ranks", "2"],
        ["prune", nasty.parent, "--keep-last", "1", "--dry-run"],
        ["show", nasty, "\x1b[31mno such key\x9b"],
        ["show", nasty.parent / "nothing\x1b[31m", "--debug"],
        ["\x1b[31mcommand"],
    )
    for line in lines:
        done = milepost(*line)
        text = done.out + done.err
        assert text
        assert all(letter.isprintable() or letter == "\n" for letter in text), line
    drawn = COLOUR.sub("", on_terminal("show", nasty).out)
    assert all(letter.isprintable() or letter == "\n" for letter in drawn)


def test_escaped_names_can_be_read_back():
    for name in (*NASTY, "\\x1b", "\\\\x1b", "\x1b\\", "\udcff", "\U000e0001tag"):
        assert meant(shown(name)) == name
        assert shown(name).isprintable()
        assert printable(shown(name)) == shown(name)
    assert len({shown(name) for name in NASTY}) == len(NASTY)


def test_terminal_of_few_letters_gets_all_text(nasty):
    done = process("show", nasty, PYTHONIOENCODING="ascii", PYTHONUTF8="0")
    assert (done.status, done.err) == (0, "")
    assert "wide \\u6f22\\u5b57" in done.out


def test_streams_that_cannot_be_written_change_no_status(run, tmp_path):
    nothing = tmp_path / "nothing"
    for streams, line, status in (
        ("<&- >&- 2>&-", ["ls", run], 0),
        ("2>/dev/full", ["show", run], 0),
        ("2>&-", ["ls", nothing], 3),
        ("2>/dev/full", ["diff", run, nothing], 3),
        (">/dev/full", ["ls", run], 5),
        (">/dev/full", ["--help"], 5),
        (">/dev/full", ["ls", "--help"], 5),
        (">/dev/full", ["--version"], 5),
        (">/dev/full", ["schema"], 5),
        (">/dev/full", ["completion", "bash"], 5),
        (">/dev/full", ["verify", run], 5),
    ):
        script = f"{subprocess.list2cmdline(command(*line))} {streams}"
        for unbuffered in ("", "1"):
            further = environment(PYTHONUNBUFFERED=unbuffered)
            done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=further, check=False)
            assert done.returncode == status, (script, done)
            assert done.stderr.count("\n") <= 1
            if status == 5:
                assert done.stderr == "milepost: cannot write the output: No space left on device\n"


def test_output_that_a_full_disk_takes_in_part_is_an_error(nasty, tmp_path):
    line = subprocess.list2cmdline(command("show", nasty, "--json"))
    for unbuffered in ("", "1"):  # ulimit counts blocks of 1,024 bytes
        script = f"ulimit -f 4; {line} > {tmp_path / 'out'}"
        further = environment(PYTHONUNBUFFERED=unbuffered)
        done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=further, check=False)
        assert (done.returncode, done.stderr) == (5, "milepost: cannot write the output: File too large\n"), done


def test_pipe_that_nobody_reads_is_no_error(nasty):
    line = subprocess.list2cmdline([*command("show", nasty.parent), "--flat"])
    script = f"set -o pipefail; {line} | head -1; echo ${{PIPESTATUS[0]}}"
    done = subprocess.run(["bash", "-c", script], capture_output=True, text=True, env=environment(), check=False)
    assert done.stdout.splitlines()[-1] in ("141", "0")
    assert "Traceback" not in done.stderr
    closed = (
        "import os, subprocess, sys\n"
        "read, write = os.pipe(); os.close(read)\n"
        f"sys.exit(subprocess.run({command('show', nasty.parent)!r}, stdout=write).returncode)"
    )
    ended = subprocess.run(
        [sys.executable, "-c", closed], capture_output=True, text=True, env=environment(), check=False
    )
    assert ended.returncode == 141
    assert [line for line in ended.stderr.splitlines() if "is a run" not in line] == []
