"""`milepost show` and `milepost stats`: what a checkpoint holds, and what its numbers are like."""

import math
import re

import pytest
import torch

import milepost as library
from tests.cli.conftest import NASTY, ROWS, WORLD
from tests.cli.running import fine, milepost, on_terminal, refused


def test_keys_are_shown_with_shapes_layouts_and_values(step):
    done = fine("show", step)
    assert done.lines[0] == f"{step}: generation 1, 2 tensors, 142,160 elements, 555.3 KiB"
    assert done.lines[1].startswith("saved     20")
    assert done.lines[1].endswith(" on 3 ranks")
    assert "metadata  metrics: {'loss': 9.0}" in done.lines
    assert "numbers   all finite" in done.lines
    table = [line.split("  ") for line in done.lines[done.lines.index("") + 1 :]]
    rows = {cells[0]: [cell.strip() for cell in cells[1:] if cell] for cells in table}
    assert rows["model.w"] == ["float32", f"({ROWS}, 256)", "360.0 KiB", "3 boxes on 0-2"]
    assert rows["model.frozen"] == ["float32", "(50000,)", "195.3 KiB", "whole on 0-2"]
    assert rows["step"] == ["value", "400"]
    assert rows["rng"] == ["per rank", "one on each of ranks 0-2"]


def test_run_stands_for_its_newest_whole_step(copied, step):
    for line in (["show"], ["stats"], ["explain", "--ranks", "2"]):
        done = milepost(line[0], copied, *line[1:])
        assert done.status == 0
        assert done.err == f"milepost: {copied} is a run; step-0000000400 is its newest step\n"
    for path in (copied / "step-0000000400").rglob("*.safetensors"):
        path.unlink()
    done = milepost("show", copied, "step")
    assert (done.out, done.err.endswith("its newest step that is whole; step-0000000400 is damaged\n")) == (
        "step: 300\n",
        True,
    )
    for path in copied.rglob("*.safetensors"):
        path.unlink()
    assert "without a step that is whole" in refused(3, "show", copied)


def test_tree_on_a_terminal_and_whole_keys_in_a_pipe(step):
    tree = on_terminal("show", step, TERM="dumb").out
    assert "\nmodel " in tree
    assert "\n  frozen " in tree
    assert "\nmodel.frozen " in on_terminal("show", step, "--flat", TERM="dumb").out
    assert fine("show", step, "--tree").out.splitlines()[-5:] == tree.splitlines()[-5:]


def test_some_keys_or_one_container(step):
    for line in (["--keys", "*.w"], ["model.w"]):
        assert "frozen" not in fine("show", step, *line).out
    by_pattern, by_name = (fine("show", step, *line).out for line in (["--keys", "model.*"], ["model"]))
    assert by_pattern == by_name
    assert "model.w" in by_name
    assert "step" not in by_name.splitlines()[-3:]


def test_one_tensor_tells_where_its_boxes_are(step):
    done = fine("show", step, "model.w")
    assert done.lines[0] == f"model.w: float32 ({ROWS}, 256), 360.0 KiB, 3 boxes on 0-2"
    assert done.lines[1].startswith(f"numbers   {ROWS * 256:,} elements, min 400, max 657, mean ")
    boxes = [re.split(r"  +", line) for line in done.lines[4:]]
    assert [row[:3] for row in boxes] == [[f"({120 * rank}, 0)", "(120, 256)", str(rank)] for rank in range(WORLD)]
    assert all((step / row[3]).exists() for row in boxes)


@pytest.mark.parametrize(
    ("index", "shown"),
    [
        ("0,:3", "tensor([400., 401., 402.])"),
        ("-1,-1", "tensor(657.)"),
        ("::180,0", "tensor([400., 401.])"),
        ("358:99999999999999999999,0", "tensor([402., 402.])"),
        ("-99999999999999999999:1:9999999999999999999,0", "tensor([400.])"),
    ],
)
def test_slice_of_a_tensor_is_printed(index, shown, step):
    assert fine("show", step, "model.w", "--slice", index).lines[-1] == shown


@pytest.mark.parametrize(
    ("line", "told"),
    [
        (["model.ww"], "Did you mean 'model.w'"),
        (["zzz"], "`milepost show` lists the keys"),
        (["model.w", "--slice", "a"], "no index"),
        (["model.w", "--slice", "999"], "does not fit"),
        (["model.w", "--slice", "99999999999999999999"], "does not fit"),
        (["model.w", "--slice", "0,0,0"], "does not fit"),
        (["model", "--slice", "0"], "It is the start of 2 keys"),
        (["step", "--slice", "0"], "no tensor"),
        (["--slice", "0"], "needs the KEY"),
        (["model.w", "--keys", "*"], "not both"),
    ],
)
def test_wrong_keys_and_indices_are_refused(line, told, step):
    assert told in refused(2, "show", step, *line)


def test_slice_of_a_scalar_and_of_numbers_of_four_bits(tmp_path):
    pairs = torch.arange(4, dtype=torch.uint8).view(torch.float4_e2m1fn_x2)
    library.save({"scalar": torch.tensor(2.5), "pairs": pairs}, tmp_path / "a")
    assert fine("show", tmp_path / "a", "scalar", "--slice", "").lines[-1] == "tensor(2.5000)"
    assert "four bits" in refused(2, "show", tmp_path / "a", "pairs", "--slice", ":2")


def test_too_large_a_slice_is_refused(tmp_path):
    library.save({"w": torch.zeros(1100, 1000)}, tmp_path / "a")
    assert "at most 1,000,000" in refused(2, "show", tmp_path / "a", "w", "--slice", ":")
    fine("show", tmp_path / "a", "w", "--slice", ":3")


def test_keys_can_be_typed_as_they_are_shown(nasty):
    shown = [line.split("  ")[0] for line in fine("show", nasty, "--keys", "*").lines if "float32" in line]
    for key, text in zip(NASTY, shown, strict=True):
        if key.strip() and not key.startswith("-"):
            assert fine("show", nasty, text).out == fine("show", nasty, key).out
    assert fine("show", nasty, "--", "-dash").out.startswith("-dash: float32")


# --- stats


def save_numbers(place, **options):
    state = {"a": torch.arange(4.0), "odd": torch.tensor([1.0, math.nan, math.inf]), "b": torch.full((9,), -8.0)}
    library.save({**state, "n": 3, "raw": b"x" * 100_000}, place, **options)
    return place


def test_statistics_are_shown_the_unhealthy_first(tmp_path):
    place = save_numbers(tmp_path / "a", statistics=True)
    done = fine("stats", place)
    assert done.lines[0] == f"{place}: 3 tensors, recorded when it was saved; 1 tensor with NaN or Inf"
    assert [line.split() for line in done.lines[2:]] == [
        ["TENSOR", "NAN", "INF", "MIN", "MAX", "MEAN", "RMS", "ELEMENTS"],
        ["odd", "1", "1", "1", "1", "1", "1", "3"],
        ["a", "0", "3", "1.5", "1.871", "4"],
        ["b", "-8", "-8", "-8", "8", "9"],
    ]
    ordered = [line.split()[0] for line in fine("stats", place, "--sort", "max").lines[3:]]
    assert ordered == ["odd", "b", "a"]
    assert fine("stats", place, "--limit", "1").lines[-1] == "and 2 more; --limit 0 shows all"


def test_statistics_that_nobody_recorded_are_computed_if_asked(tmp_path):
    plain, recorded = save_numbers(tmp_path / "a"), save_numbers(tmp_path / "b", statistics=True)
    done = fine("stats", plain)
    assert done.lines[0] == f"{plain}: no statistics"
    assert done.lines[1].startswith("nothing was recorded of 3 tensors: --compute reads them; milepost.save(")
    assert fine("stats", plain, "--compute").lines[1:] == fine("stats", recorded).lines[1:]


def test_one_tensor_has_a_histogram(tmp_path):
    place = save_numbers(tmp_path / "a", statistics="histogram")
    done = fine("stats", place, "a")
    bins = [line.split() for line in done.lines[6:]]
    assert [row[:3] for row in bins] == [["0", "0", "1"], ["1", "2", "1"], ["2", "4", "2"]]
    assert len(bins[2][3]) == 2 * len(bins[1][3])
    assert "no histogram was recorded" in fine("stats", save_numbers(tmp_path / "b", statistics=True), "a").out
    for key, why in (("n", "no tensor"), ("raw", "bytes"), ("zz", "not there")):
        assert why in refused(2, "stats", place, key)


def test_verdict_of_the_run_is_shown(tmp_path):
    with library.Checkpointer(tmp_path, healthy=True) as keeper:
        keeper.save({"w": torch.tensor([math.nan])}, 1)
    place = tmp_path / "step-0000000001"
    for command in ("show", "stats"):
        assert re.search(r"^health +unhealthy: 1 NaN in 'w'$", fine(command, place).out, re.MULTILINE)


def test_run_without_a_healthy_step_shows_its_newest(tmp_path):
    run = tmp_path / "run"
    with library.Checkpointer(run, healthy=True, keep_last=9) as keeper:
        for step in (1, 2, 3):
            keeper.save({"w": torch.tensor([math.nan])}, step)
    (run / "step-0000000003" / "manifest-00000001.json").write_text("{}")
    told = f"milepost: {run} is a run without a healthy step; this is step-0000000002, its newest unhealthy one: 1 NaN"
    for line in (["show"], ["stats"], ["explain", "--ranks", "2"], ["diff", run / "step-0000000002"]):
        done = milepost(line[0], run, *line[1:])
        assert (done.status, done.err.startswith(told)) == (0, True), done
    assert "a run without a step that is whole and healthy" in refused(3, "convert", run, tmp_path / "out")
    with library.Checkpointer(run, healthy=True) as keeper, pytest.raises(library.CheckpointUnhealthy):
        keeper.restore({"w": torch.zeros(1)})
