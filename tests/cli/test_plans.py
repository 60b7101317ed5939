"""`milepost explain`, which plans a load on other ranks, and `milepost convert`."""

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import Replicate, Shard, distribute_tensor

import milepost as library
from milepost.testing import run_ranks
from tests.cli.conftest import ROWS, WORLD, state_of
from tests.cli.running import fine, milepost, refused
from tests.ranks import spawn

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
CASES = {
    "--ranks 4": ((4,), [Shard(0)]),
    "--mesh dp=2,tp=2": ((2, 2), [Replicate(), Shard(0)]),
    "--mesh 2x2 --cuts shard0,shard1": ((2, 2), [Shard(0), Shard(1)]),
    "--mesh dp=2,tp=2 --cuts tp=shard1 --rule *.frozen:replicate,shard0": ((2, 2), [Replicate(), Shard(1)]),
}


def explained_by_ranks(rank, place, cases):
    """What `milepost.explain` says that each rank would read, for each mesh and placements."""
    found = []
    for shape, placements in cases:
        mesh = init_device_mesh("cpu", shape)
        rows = [Replicate(), Shard(0)] if placements == [Replicate(), Shard(1)] else placements
        along = [one if one != Shard(1) else Replicate() for one in rows]  # one dimension has no second to cut
        state = {
            "model": {
                "w": distribute_tensor(torch.zeros(ROWS, 256), mesh, placements),
                "frozen": distribute_tensor(torch.zeros(50_000), mesh, along),
            }
        }
        found.append(library.explain(state, place, process_group=dist.group.WORLD).read_bytes)
    return found


@pytest.mark.slow
def test_plan_is_what_real_ranks_would_read(step):
    found, *others = spawn(4, explained_by_ranks, str(step), list(CASES.values()))
    assert all(other == found for other in others)
    for line, read in zip(CASES, found, strict=True):
        plan = fine("explain", step, *line.split(), "--json").json
        assert [rank["bytes"] for rank in plan["ranks"]] == list(read), line
        assert plan["read_bytes"] == sum(read)


def test_plan_for_the_same_ranks_is_what_they_read(step):
    read = run_ranks(WORLD, lambda comm: library.explain(state_of(comm.rank, 0), step, process_group=comm).read_bytes)
    plan = fine("explain", step, "--ranks", str(WORLD), "--keys", "model.w", "--json").json
    frozen = 50_000 * 4  # which that state holds whole
    assert [rank["bytes"] + frozen for rank in plan["ranks"]] == list(read[0])


def test_plan_in_words_groups_ranks_that_read_alike(step):
    done = fine("explain", step, "--mesh", "dp=2,tp=3", "--rank", "4")
    assert done.lines[0] == f"{step}: saved on 3 ranks"
    assert done.lines[1] == "loaded on 6 ranks: mesh dp=2 x tp=3, cuts replicate, shard0"
    assert [line.split()[0] for line in done.lines[3:7]] == ["RANKS", "0,3", "1,4", "2,5"]
    assert "all ranks together read 1.1 MiB: 2.00 x the 2 tensors of 555.3 KiB" in done.out
    files = [line.split()[0] for line in done.lines if line.startswith("data/")]
    assert len(files) == int(done.lines[5].split()[-1])


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ([], "--ranks 6, or --mesh"),
        (["--mesh", "2y3"], "no mesh"),
        (["--mesh", "2x3", "--ranks", "5"], "6 ranks, not 5"),
        (["--ranks", "4", "--cuts", "shard0,shard1"], "2 cuts"),
        (["--ranks", "4", "--cuts", "slice"], "no list of cuts"),
        (["--mesh", "dp=2", "--cuts", "tp=shard0"], "it has dp"),
        (["--mesh", "dp=2,tp=2", "--cuts", "dp=shard0,dp=shard1"], "each once"),
        (["--mesh", "dp=2,dp=2"], "each axis once"),
        (["--ranks", "4", "--rule", "model"], "PATTERN:CUTS"),
        (["--ranks", "4", "--rank", "4"], "no rank 4"),
        (["--ranks", "999999999999"], "from 1 to"),
    ],
)
def test_bad_meshes_are_refused(line, told, step):
    assert told in refused(2, "explain", step, *line)


def test_rank_that_reads_nothing_is_told(tmp_path):
    library.save({"w": torch.zeros(2)}, tmp_path / "a")
    assert fine("explain", tmp_path / "a", "--ranks", "4", "--rank", "3").out.endswith("\n\nrank 3 reads nothing\n")


def test_rule_may_hold_a_colon(tmp_path):
    library.save({"a:b": torch.zeros(8, 8), "c": torch.zeros(8, 8)}, tmp_path / "a")
    plan = fine("explain", tmp_path / "a", "--ranks", "2", "--rule", "a:*:replicate", "--json").json
    assert plan["read_bytes"] == (2 + 1) * 256


def test_convert_to_every_format_and_back(step, tmp_path):
    weight, kept = library.open(step)["model.w"].read(), library.open(step)["model.frozen"].read()
    for name, more in {
        "dcp": ["--to", "dcp"],
        "file.pt": [],
        "hf": ["--to", "safetensors", "--drop-values"],
        "ours": ["--without", "rng"],
    }.items():
        done = fine("convert", step, tmp_path / name, *more)
        form = {"file.pt": "torch", "hf": "safetensors", "ours": "milepost"}.get(name, name)
        assert done.out == f"{tmp_path / name}: {form}, 2 tensors, 555.3 KiB\n"
        copy = library.open(tmp_path / name)
        assert copy.format == form
        assert torch.equal(copy["model.w"].read(), weight)
        assert milepost("diff", step, tmp_path / name, "--keys", "model.*").status == 0
        fine("convert", tmp_path / name, tmp_path / f"{name}-back")
        assert milepost("diff", step, tmp_path / f"{name}-back", "--keys", "model.*").status == 0
    state = {"model": {"w": torch.zeros(ROWS, 256), "frozen": torch.zeros(50_000)}}
    dcp.load(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    assert torch.equal(state["model"]["w"], weight)
    assert torch.equal(torch.load(tmp_path / "file.pt")["model"]["frozen"], kept)


def test_convert_takes_some_keys_under_shorter_names(step, tmp_path):
    line = ["convert", step, tmp_path / "hf", "--to", "safetensors", "--keys", "model.*", "--strip", "model."]
    fine(*line)
    assert list(library.open(tmp_path / "hf")) == ["frozen", "w"]
    told = refused(2, *line)
    assert "already" in told
    assert told.endswith("pass --overwrite to replace it")
    fine(*line, "--overwrite")
    assert refused(2, "convert", step, tmp_path / "ours").endswith("'rng'. Leave them out: --without KEY.")
    library.save({"model.a": 1, "a": 2}, tmp_path / "both")
    told = refused(2, "convert", tmp_path / "both", tmp_path / "one.pt", "--strip", "model.")
    assert told == "--strip gives one key to several: 'a': 'model.a', 'a'"


def test_convert_takes_pickles_only_if_asked(tmp_path):
    library.save({"w": torch.ones(2), "odd": library.PerRank}, tmp_path / "a", allow_pickle=True)
    line = ["convert", tmp_path / "a", tmp_path / "b", "--to", "dcp"]
    assert "--allow-pickle" in refused(5, *line)
    fine(*line, "--allow-pickle")
    assert "pickled" in fine("show", tmp_path / "a", "odd").out


def test_wrong_source_leaves_no_target(step, tmp_path):
    refused(3, "convert", tmp_path / "nothing", tmp_path / "b")
    refused(2, "convert", step, "memory-of://b")
    refused(2, "convert", step, "s3://bucket/b", "--to", "torch")
    assert list(tmp_path.iterdir()) == []


def test_error_of_several_lines_is_told_in_one(step, tmp_path):
    told = refused(2, "convert", step, tmp_path / "hf", "--to", "safetensors")
    assert told.endswith(" are neither: 'rng' (dict); Pass --drop-values, or leave them out: --without KEY.")
    assert "\\" not in told


def test_plan_says_what_is_read_beside_and_when_ranks_swap(tmp_path):
    library.save({"w": torch.zeros(1024, 1 << 15)}, tmp_path)
    rows = fine("explain", tmp_path, "--ranks", "4")
    assert "beside" not in rows.out
    columns = fine("explain", tmp_path, "--ranks", "4", "--cuts", "shard1")
    assert " MiB beside that is read too" in columns.out
    assert "ranks of several machines read each byte once instead" in columns.out
    plan = fine("explain", tmp_path, "--ranks", "4", "--cuts", "shard1", "--json").json
    assert plan["extra_bytes"] == pytest.approx(3 << 27, rel=0.01)
    assert plan["swaps"]
