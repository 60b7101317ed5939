"""How a command starts: fast, without what it does not need; and how one finds out what there is."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from milepost.cli.app import COMMANDS
from milepost.cli.statuses import Status
from milepost.version import __version__
from tests.cli.running import LIMIT_S, ROOT, environment, fine, milepost, process, refused

COMPLETED = {"bash": ("BASH_VERSION", "plain,"), "zsh": ("compdef", "plain\n"), "fish": ("complete", "plain,")}
LIGHT = ("ls", "show", "verify", "diff", "stats", "explain", "prune")
"""Those that look at checkpoints without torch; the others need the parts that write."""


def line_of(name, run, step):
    """What a command is usually called with."""
    return {
        "diff": [name, run / "step-0000000100", step],
        "explain": [name, step, "--ranks", "2"],
        "prune": [name, run, "--keep-last", "2", "--dry-run"],
    }.get(name, [name, run])


@pytest.mark.parametrize("name", ["--help", "--version", "completion", "schema", *LIGHT])
def test_command_imports_only_what_it_needs(name, run, step):
    line = {"completion": [name, "bash"], "schema": [name, "ls"], "--help": [name], "--version": [name]}.get(name)
    after = (
        "import atexit, sys\n"
        "atexit.register(lambda: print(*sorted({'torch', 'numpy', 'rich', 'fsspec', 'obstore'} & sys.modules.keys()),"
        "len(sys.modules), file=sys.stderr))"
    )
    done = process(*(line or line_of(name, run, step)), code=after)
    assert done.status in (0, 1), done.err
    *heavy, count = done.err.splitlines()[-1].split()
    assert heavy == []
    assert int(count) < (200 if name in ("--help", "--version", "completion") else 350)


def test_every_command_helps(run, step):
    told = fine("--help").out
    for name, first in COMMANDS.items():
        assert re.search(rf"^  {name} +{re.escape(first)}", told, re.MULTILINE)
        assert first in " ".join(fine(name, "--help").out.split())


def test_module_and_entry_point_are_the_same(run):
    by_module = process("ls", run)
    entry = Path(sys.executable).parent / "milepost"
    done = subprocess.run([entry, "ls", run], capture_output=True, text=True, env=environment(), check=False)
    assert (by_module.status, by_module.err) == (done.returncode, done.stderr) == (0, "")
    age = re.compile(r" +([0-9]+ (s|min))? *")  # the second look is later, and its column may be wider
    assert age.sub(" ", by_module.out) == age.sub(" ", done.stdout)
    assert process("--version").out == f"milepost {__version__}\n"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["lss", "x"], "No such command 'lss'"),
        (["ls"], "Missing argument 'PATH'. See: milepost ls --help"),
        (["ls", "x", "--jsn"], "See: milepost ls --help"),
        (["diff", "x"], "Missing argument 'B'"),
        (["prune", "x", "--keep-last", "0"], "--keep-last"),
        (["convert", "x", "y", "--to", "zip"], "'zip' is not one of"),
        (["schema", "completion"], "no command with --json"),
        (["schema", "lss"], "no command with --json"),
    ],
)
def test_wrong_use_is_told_in_one_line(line, told):
    assert told in refused(2, *line)


def test_no_command_shows_all(run):
    done = milepost()
    assert (done.status, done.out) == (2, "")
    assert "Commands:" in done.err


def test_debug_shows_where_an_error_came_from(tmp_path):
    for line in (["--debug", "ls", tmp_path], ["ls", tmp_path, "--debug"]):
        done = milepost(*line)
        assert done.status == 3
        assert done.err.startswith("Traceback")
        assert done.err.splitlines()[-1].startswith("milepost: there is no checkpoint at")


def test_fault_of_ours_is_told_as_one(run):
    """Not an error that we foresaw: the command's own code breaks."""
    broken = "import sys, milepost.inspection.runs as runs\nruns.names_at = None"
    done = process("ls", run, code=broken)
    assert done.status == 70
    assert done.err.startswith("milepost: a fault of Milepost, please report it: TypeError: ")
    assert done.err.count("\n") == 1


@pytest.mark.parametrize("shell", COMPLETED)
def test_completion_script_is_one_that_the_shell_takes(shell):
    script = fine("completion", shell).out
    assert f"{shell}_complete" in script
    assert "_MILEPOST_COMPLETE" in script
    if shell == "bash":
        subprocess.run(["bash", "-n"], input=script, text=True, check=True, timeout=LIMIT_S)


def completed(words, **further):
    """What bash is offered for the last of these words."""
    line = " ".join(words)
    done = process(_MILEPOST_COMPLETE="bash_complete", COMP_WORDS=line, COMP_CWORD=len(words) - 1, **further)
    assert done.err == ""
    return [row.partition(",")[2] for row in done.out.splitlines() if row]


def test_shell_completes_commands_options_and_keys(step):
    assert completed(["milepost", "c"]) == ["convert", "cp", "completion"]
    assert {"--keep-last", "--keep-best", "--keep-every"} == set(completed(["milepost", "prune", "--keep"]))
    assert completed(["milepost", "show", str(step), "model.f"]) == ["model.frozen"]
    assert completed(["milepost", "stats", str(step.parent), "model."]) == ["model.w", "model.frozen"]
    assert completed(["milepost", "show", "/nowhere", "mod"]) == []
    assert completed(["milepost", "schema", "st"]) == ["stats"]


def test_bash_itself_completes(step, tmp_path):
    script = fine("completion", "bash").out
    (tmp_path / "milepost").write_text(f'#!/bin/sh\nexec {sys.executable} -m milepost "$@"\n')
    (tmp_path / "milepost").chmod(0o755)
    asks = f"""{script}
        COMP_WORDS=(milepost show {step} model.f); COMP_CWORD=3; COMPREPLY=()
        _milepost_completion milepost; echo "${{COMPREPLY[@]}}"
    """
    done = subprocess.run(
        ["bash", "-c", asks],
        env=environment(PATH=f"{tmp_path}:{Path('/usr/bin')}:/bin"),
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["model.frozen"], done.stderr


def test_sources_of_commands_are_all_listed():
    files = {path.stem for path in (ROOT / "src/milepost/cli/commands").glob("*.py")} - {"__init__"}
    assert files == set(COMMANDS)


PAGE = (ROOT / "docs/reference/cli.md").read_text()


@pytest.mark.parametrize("name", ["", *COMMANDS])
def test_reference_has_the_help_of_every_command(name, monkeypatch):
    """`python -m tests.pages docs/reference/cli.md` writes it."""
    monkeypatch.setenv("COLUMNS", "80")
    line = [*name.split(), "--help"]
    assert f"```console\n$ milepost {' '.join(line)}\n{fine(*line).out}```\n" in PAGE
    assert not name or f"\n## `milepost {name}`\n" in PAGE


def test_reference_has_every_exit_status():
    table = PAGE.partition("## Exit statuses")[2].partition("\n## ")[0]
    assert {int(found) for found in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)} == set(Status)
