"""`milepost prune`: removes what a Checkpointer with these rules would, and nothing else."""

import io
import itertools
import json
import shutil
import subprocess

import pytest
import torch

import milepost as library
from milepost.core.manifest import manifest_name
from tests.cli.conftest import save_run
from tests.cli.running import LIMIT_S, command, environment, fine, milepost, on_terminal, refused
from tests.steps.numbered import files_of

RULES = [
    {"keep_last": 1},
    {"keep_last": 3},
    {"keep_every": 200},
    {"keep_best": 1, "best": "loss"},
    {"keep_best": 2, "best": "loss", "mode": "max"},
    {"keep_last": 1, "keep_every": 300, "keep_best": 1, "best": "loss"},
]


def options(rule):
    return list(itertools.chain(*((f"--{name.replace('_', '-')}", str(value)) for name, value in rule.items())))


def tree_of(folder):
    """All files, with their content and the time of their change."""
    return {
        str(path.relative_to(folder)): (path.stat().st_mtime_ns, path.read_bytes() if path.is_file() else None)
        for path in sorted(folder.rglob("*"))
    }


class Answers(io.StringIO):
    """What somebody types at a terminal."""

    def isatty(self):
        return True


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: "-".join(rule))
def test_prune_leaves_what_a_checkpointer_leaves(rule, copied, tmp_path):
    other = shutil.copytree(copied, tmp_path / "other")
    (copied / "logs").mkdir()
    torch.save({"w": torch.ones(1)}, copied / "step-50.pt")
    before = tree_of(copied)
    plan = fine("prune", copied, *options(rule), "--dry-run", "--json").json
    assert tree_of(copied) == before
    done = fine("prune", copied, *options(rule), "--yes", "--json").json
    with library.Checkpointer(other, **rule) as keeper:
        keeper.save({"w": torch.ones(1)}, 99, metrics={"loss": 1e9 if rule.get("mode") != "max" else -1e9})
        left = sorted(set(keeper.steps()) - {99})
    assert [step["step"] for step in done["steps"] if step["keep"]] == left
    assert done["removed"] == plan["removed"] == [step for step in (100, 200, 300, 400) if step not in left]
    assert sorted(path.name for path in copied.iterdir()) == sorted(
        ["logs", "step-50.pt", *(f"step-{step:010}" for step in left)]
    )
    assert fine("prune", copied, *options(rule), "--yes", "--json").json["removed"] == []


def test_prune_says_why_and_how_much(copied):
    done = fine("prune", copied, "--keep-last", "1", "--keep-best", "1", "--best", "loss", "--dry-run")
    kept = {line.split()[0]: line.split("  ")[-1] for line in done.lines if " keep " in line}
    assert kept == {"300": "best 1 by loss", "400": "last 1"}
    assert done.lines[-1].startswith("would remove 2 steps, ")
    assert done.lines[-1].endswith("; 2 stay")


def test_step_of_another_format_stays_and_does_not_count(copied):
    (copied / "step-0000000500").mkdir()
    (copied / "step-0000000500" / ".metadata").write_bytes(b"x")
    found = fine("prune", copied, "--keep-last", "1", "--yes", "--json").json
    assert found["removed"] == [100, 200, 300]
    assert [(one["step"], one["why"]) for one in found["steps"][-2:]] == [
        (400, ["last 1"]),
        (500, ["of another format"]),
    ]


def test_prune_asks_on_a_terminal(copied):
    before = tree_of(copied)
    done = milepost("prune", copied, "--keep-last", "3", stdin=Answers("n\n"))
    assert (done.status, done.out) == (1, "")
    assert tree_of(copied) == before
    assert "nothing was removed" in done.err
    assert "removed 1 step" in on_terminal("prune", copied, "--keep-last", "3", typed="y\n").out
    assert len(fine("ls", copied, "--json").json["steps"]) == 3


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([], "say what to keep: --keep-last 3"),
        (["--keep-last", "3"], "pass --yes to remove, or --dry-run"),
        (["--keep-best", "1", "--yes"], "--best loss"),
        (["--best", "loss", "--yes"], "--keep-best 2"),
        (["--mode", "max", "--yes"], "--keep-best 2"),
        (["--keep-best", "1", "--best", "los", "--yes"], "has the metric 'los'; they have 'loss'"),
        (["--keep-last", "-1", "--yes"], "--keep-last"),
        (["--keep-last", "1", "--names", "x", "--yes"], "{step}"),
        (["--keep-last", "1", "--names", "run-{step}", "--yes"], "no steps with names like run-100"),
    ],
)
def test_bad_rules_are_refused_and_remove_nothing(line, told, copied):
    before = tree_of(copied)
    assert told in refused(2, "prune", copied, *line)
    assert tree_of(copied) == before


def test_nothing_goes_unless_the_newest_that_stays_is_whole(copied):
    files_of(copied, 400)[0].unlink()
    done = milepost("prune", copied, "--keep-last", "1", "--yes", "--json")
    assert done.json["removed"] == [100, 200]
    assert "does not count when old steps are removed" in done.err
    assert [step["step"] for step in fine("ls", copied, "--json").json["steps"]] == [300, 400]


def test_unhealthy_steps_take_no_place(tmp_path):
    with library.Checkpointer(tmp_path, healthy=True) as keeper:
        for step in range(1, 7):
            keeper.save({"w": torch.tensor([float("nan") if step > 3 else 1.0])}, step)
    done = fine("prune", tmp_path, "--keep-last", "2", "--yes", "--json").json
    assert {step["step"]: step["why"] for step in done["steps"] if step["keep"]} == {
        2: ["last 2"], 3: ["last 2"], 5: ["last 2 unhealthy"], 6: ["last 2 unhealthy"],
    }  # fmt: skip
    assert done["removed"] == [1, 4]


def test_leftovers_go_only_if_asked_for(copied):
    (copied / "step-0000000100" / manifest_name(1)).unlink()
    manifest = copied / "step-0000000200" / manifest_name(1)
    save_id = json.loads(manifest.read_bytes())["save_id"]
    manifest.unlink()
    manifest.with_name(f"{manifest.name}.removed").write_text(save_id)
    plan = fine("prune", copied, "--keep-last", "9", "--dry-run", "--json").json
    assert (plan["unfinished"], plan["cut_short"], plan["removed"]) == ([], [200], [])
    fine("prune", copied, "--keep-last", "9", "--yes")
    assert sorted(path.name[-3:] for path in copied.iterdir()) == ["100", "300", "400"]
    assert fine("prune", copied, "--unfinished", "--yes", "--json").json["unfinished"] == [100]
    assert sorted(path.name[-3:] for path in copied.iterdir()) == ["300", "400"]


@pytest.mark.slow
def test_two_prunes_at_once_leave_what_one_leaves(tmp_path):
    root = save_run(tmp_path / "run", range(1, 41))
    line = command("prune", root, "--keep-last", "3", "--yes", "--json")
    running = [
        subprocess.Popen(line, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment())
        for _ in range(2)
    ]
    ended = [one.communicate(timeout=LIMIT_S) for one in running]
    assert [one.returncode for one in running] == [0, 0], ended
    assert sorted(path.name for path in root.iterdir()) == [f"step-{step:010}" for step in (38, 39, 40)]
    assert fine("verify", root).out.count("whole") == 3
