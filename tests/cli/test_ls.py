"""`milepost ls`: every state of a step, why it is kept, and which one a job resumes from."""

import math
import os
import re

import pytest
import torch
import torch.distributed.checkpoint as dcp

import milepost as library
from milepost.core.manifest import manifest_name
from tests.cli.conftest import save_run
from tests.cli.running import fine, milepost, on_terminal, refused, rows
from tests.steps.numbered import files_of

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def test_steps_are_listed_with_metrics_and_reasons(run):
    titles, found = rows(fine("ls", run).out)
    assert titles == ["STEP", "STATE", "SIZE", "AGE", "RANKS", "METRICS", "KEPT"]
    assert list(found) == [100, 200, 300, 400]
    state, size, _, ranks, metrics, kept = found[300]
    assert (state, ranks, metrics, kept) == ("whole", "3", "loss 3.333", "last 10")
    assert size.endswith(" KiB")


def test_every_state_is_shown_with_its_reason(tmp_path):
    root = save_run(tmp_path / "run", range(1, 7), keep_last=9)
    place = {n: root / f"step-{n:010}" for n in range(1, 9)}
    (place[1] / manifest_name(1)).unlink()
    shard = files_of(root, 2)[1]
    os.truncate(shard, shard.stat().st_size - 1)
    (place[3] / manifest_name(1)).write_bytes((place[3] / manifest_name(1)).read_bytes()[:900])
    (place[4] / manifest_name(1)).rename(place[4] / f"{manifest_name(1)}.removed")
    with library.Checkpointer(root, healthy=True, keep_last=9) as keeper:
        keeper.save({"w": torch.tensor([float("nan")])}, 7)
    torch.save({"w": torch.ones(2)}, root / "epoch-8.pt")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=root / "dcp-9", no_dist=True)
    done = fine("ls", root)
    titles, found = rows(done.out)
    states = ["unfinished", "damaged", "damaged", "removed", "whole", "whole", "unhealthy", "whole", "whole"]
    assert [found[n][0] for n in range(1, 10)] == states
    assert {"FORMAT", "NAME"} <= set(titles)
    reasons = dict(line.split(": ", 1) for line in done.lines[10:])
    assert reasons.keys() == {place[n].name for n in (1, 2, 3, 4, 7)}
    assert "never finished" in reasons[place[1].name]
    assert "was saved with" in reasons[place[2].name]
    assert "checksum" in reasons[place[3].name]
    assert reasons[place[7].name] == "1 NaN in 'w'"
    assert found[6][-1] == "last 9"
    assert found[7][-1] == "last 9 unhealthy"


def test_newest_whole_step_is_told_on_a_terminal(copied):
    files_of(copied, 400)[0].unlink()
    assert fine("ls", copied, "--json").json["newest"] == "step-0000000300"
    assert "the newest that is whole is step-0000000300" in on_terminal("ls", copied, TERM="dumb").out


def test_verified_when_is_shown(copied):
    assert "VERIFIED" not in fine("ls", copied).out
    assert milepost("verify", copied / "step-0000000300", "--record").status == 0
    _, found = rows(fine("ls", copied).out)
    assert re.fullmatch(r"\d{4}-\d\d-\d\d", found[300][-1])
    verified = {step["step"]: step["verified"] for step in fine("ls", copied, "--json").json["steps"]}
    assert [step for step, when in verified.items() if when] == [300]


def test_status_says_whether_the_one_checkpoint_can_be_used(copied):
    place = copied / "step-0000000100"
    assert fine("ls", place).lines[0].startswith("STEP")
    files_of(copied, 100)[0].unlink()
    done = milepost("ls", place)
    assert (done.status, done.err) == (4, "")
    assert done.lines[1].split()[1] == "damaged"
    assert done.lines[2].startswith("step-0000000100: ")
    (place / manifest_name(1)).write_bytes(b"{}")
    assert milepost("ls", place).status == 4
    (copied / "notes.txt").write_text("hello")
    assert milepost("ls", copied / "notes.txt").status == 5
    assert fine("ls", copied).lines[1].split()[1] == "damaged"


def test_place_without_a_checkpoint_says_where_to_look(run, tmp_path):
    assert refused(3, "ls", tmp_path / "nothing" / "here").endswith(f"To see what there is: milepost ls {tmp_path}")
    (tmp_path / "empty").mkdir()
    assert "Nothing was saved here" in refused(3, "ls", tmp_path / "empty")


def test_metrics_that_are_not_finite_are_shown_as_they_are(tmp_path):
    with library.Checkpointer(tmp_path, keep_best=1, best="acc", mode="max", keep_last=1) as keeper:
        for step, value in ((1, math.inf), (2, -math.inf), (3, math.nan)):
            keeper.save({"n": step}, step, metrics={"acc": value})
        assert keeper.steps() == [1, 3]
    found = rows(fine("ls", tmp_path).out)[1]
    shown = [(step, row[-2:]) for step, row in found.items()]
    assert shown == [(1, ["acc inf", "best 1 by acc"]), (3, ["acc nan", "last 1"])]
    assert [step["metrics"] for step in fine("ls", tmp_path, "--json").json["steps"]] == [{"acc": None}] * 2
