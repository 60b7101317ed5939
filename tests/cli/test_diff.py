"""`milepost diff`: what it says, how it ends, and what it reads."""

import json

import pytest
import torch

import milepost as library
from milepost.testing import run_ranks
from tests.cli.conftest import ROWS, WORLD, state_of
from tests.cli.running import milepost, process, refused


def differing(*line):
    """The output of a diff that finds a difference."""
    done = milepost("diff", *line)
    assert (done.status, done.err) == (1, ""), done
    return done


def test_steps_of_a_run_differ_in_what_was_trained(run, step):
    done = differing(run / "step-0000000300", step, "--values")
    lines = [line.split("  ") for line in done.lines]
    assert done.lines[0].startswith(f"A  {run / 'step-0000000300'}: generation 1, 3 ranks, ")
    [row] = [cells for cells in lines if cells[0] == "model.w"]
    assert [cell.strip() for cell in row if cell] == [
        "model.w", "100 %", "100", "100", "float32", f"({ROWS}, 256)", "360.0 KiB",
    ]  # fmt: skip
    assert ["step", "300", "400"] in [[cell.strip() for cell in cells if cell.strip()] for cells in lines]
    assert any(line.startswith("metrics   {'loss': 3.33") and line.endswith("{'loss': 9.0}") for line in done.lines)
    assert done.lines[-2].startswith("1 tensor differs; 1 value differs; 1 entry of the metadata differs; 1 tensor is")
    assert done.lines[-1].endswith("2 compared by checksums")


def test_status_is_that_of_diff(run, step, tmp_path):
    same = milepost("diff", step, step)
    assert (same.status, same.lines[-2]) == (0, "no differences: 2 tensors are equal")
    for one, other, status in ((step, step, 0), (step, run / "step-0000000100", 1)):
        quiet = milepost("diff", "-q", one, other)
        assert (quiet.status, quiet.out, quiet.err) == (status, "", "")
    assert milepost("diff", run / "step-0000000100", step, "--keys", "model.frozen").status == 0
    refused(3, "diff", step, tmp_path / "nothing")
    (tmp_path / "file").write_bytes(b"no checkpoint")
    refused(5, "diff", step, tmp_path / "file")


def test_every_kind_of_difference_has_its_place(tmp_path):
    shared = torch.ones(3)
    one = {"gone": torch.ones(2), "dtype": torch.ones(4), "shape": torch.ones(4), "a": shared, "b": shared, "v": 1}
    other = {
        "new": 5,
        "dtype": torch.ones(4).half(),
        "shape": torch.ones(2, 2),
        "a": shared,
        "b": torch.ones(3),
        "v": {},
    }
    library.save({**one, "own": library.PerRank(1)}, tmp_path / "a")
    library.save({**other, "own": library.PerRank(2)}, tmp_path / "b")
    out = differing(tmp_path / "a", tmp_path / "b", "--values").out
    sections = dict(block.split("\n", 1) for block in out.split("\n\n")[1:])
    assert sections["ONLY IN A"].split() == ["gone", "v"]
    assert sections["ONLY IN B"].split() == ["new"]
    [tensors] = [rows for title, rows in sections.items() if title.startswith("TENSOR")]
    rows = {line.split()[0]: line for line in tensors.splitlines()}
    assert rows.keys() == {"dtype", "shape", "b"}
    assert "float32 -> float16" in rows["dtype"]
    assert "(4,) -> (2, 2)" in rows["shape"]
    assert rows["b"].split()[1] == "tied"
    assert sections["VALUE OF EACH RANK  DIFFERS ON RANKS"].split() == ["own", "0"]


def test_lists_are_cut_and_sorted_as_asked(tmp_path):
    state = {f"t{i}": torch.zeros(3) for i in range(9)}
    library.save(state, tmp_path / "a")
    library.save({key: torch.full((3,), float(i % 5)) for i, key in enumerate(state)}, tmp_path / "b")
    done = differing(tmp_path / "a", tmp_path / "b", "--sort", "max", "--limit", "3")
    rows = [line.split()[0] for line in done.lines if line.startswith("t")]
    assert rows == ["t4", "t3", "t8"]
    assert "and 4 more; --limit 0 shows all" in done.lines
    assert (
        len([line for line in differing(tmp_path / "a", tmp_path / "b", "--limit", "0").lines if line[0:1] == "t"]) == 7
    )


def test_other_meshes_and_formats_compare_equal(step, tmp_path):
    whole = {"model": {"w": library.open(step)["model.w"].read(), "frozen": torch.arange(50_000.0)}, "step": 400}

    def save(comm):
        state = {**state_of(0, 400), "model": {**whole["model"], "w": rows_of(whole["model"]["w"], comm)}}
        library.save(state, tmp_path / "other", process_group=comm)

    def rows_of(tensor, comm):
        size = ROWS // comm.size
        return library.Sharded((ROWS, 256), {(size * comm.rank, 0): tensor[size * comm.rank :][:size]}, tensor.dtype)

    run_ranks(2, save)
    torch.save(whole, tmp_path / "file.pt")
    done = milepost("diff", step, tmp_path / "other", "--keys", "[ms]*")
    assert done.status == 0
    assert f"1 tensor is cut another way: {WORLD} boxes on 0-2 in A, 2 boxes on 0-1 in B" in done.lines
    assert milepost("diff", step, tmp_path / "file.pt", "--keys", "[ms]*").status == 0
    whole["model"]["w"][7, 7] += 1
    torch.save(whole, tmp_path / "file.pt")
    found = milepost("diff", tmp_path / "file.pt", step, "--keys", "model.*", "--values", "--json").json
    assert [(one["key"], one["max_difference"]) for one in found["tensors"]] == [("model.w", 1.0)]


def test_older_generation_is_compared_by_its_number(tmp_path):
    place = tmp_path / "a"
    library.save({"w": torch.ones(3)}, place)
    assert milepost("diff", f"{place}@1", place).status == 0
    assert f"there is no generation 7 at {place}; the newest is 1." in refused(3, "diff", f"{place}@7", place)
    assert milepost("show", f"{place}@1").status == 0


def test_run_stands_for_its_newest_step(run, step):
    done = milepost("diff", run, step)
    assert (done.status, done.err) == (0, f"milepost: {run} is a run; step-0000000400 is its newest step\n")


@pytest.mark.slow
def test_few_bytes_are_read_where_layouts_agree(tmp_path):
    """By the kernel's own count: all reads of a process that compares large ones, without those of small ones."""
    for name, changed in (("a", 0), ("b", 1)):
        library.save({"w": torch.arange(40_000_000) + changed, "v": torch.ones(10_000)}, tmp_path / "large" / name)
        library.save({"w": torch.arange(40) + changed, "v": torch.ones(10)}, tmp_path / "small" / name)
    after = (
        "import atexit, pathlib\n"
        "count = lambda: pathlib.Path('/proc/self/io').read_text().split('rchar:')[1].split()[0]\n"
        "atexit.register(lambda: print(count(), file=sys.stderr))"
    )
    told, counted = [], []
    for size in ("large", "small"):
        done = process("diff", tmp_path / size / "a", tmp_path / size / "b", "--json", code=after)
        told.append(json.loads(done.out)["bytes_read"])
        counted.append(int(done.err.split()[-1]))
    assert told[0] - told[1] == pytest.approx(counted[0] - counted[1], abs=2000)
    shared_block = 2 * 65536  # with the end of one tensor and the start of the other
    assert told[0] < 0.0002 * 2 * 40_000_000 * 8 + shared_block
