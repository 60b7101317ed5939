"""Every kind of place that `open` takes: other formats, object stores, the web."""

import json
import os
import shutil

import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import save_file

import milepost as library
from tests.cli.conftest import save_run
from tests.cli.running import fine, milepost, process, refused
from tests.urls import below, upload
from tests.web import Web

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
STATE = {"w": torch.arange(30_000.0).view(300, 100), "b": torch.tensor([1.0, float("nan")])}
FORMATS = ("dcp", "torch", "safetensors", "milepost")


@pytest.fixture(scope="module")
def formats(tmp_path_factory):
    """The same state in each format; of safetensors as a file, and as a folder."""
    root = tmp_path_factory.mktemp("formats")
    dcp.save(STATE, checkpoint_id=root / "dcp", no_dist=True)
    torch.save(STATE, root / "torch")
    save_file(STATE, root / "safetensors")
    library.convert(root / "torch", root / "folder", "safetensors")
    library.save(STATE, root / "milepost")
    return root


@pytest.mark.parametrize("name", [*FORMATS, "folder"])
def test_other_formats_are_looked_at_like_ours(name, formats):
    place, form = formats / name, "safetensors" if name == "folder" else name
    [listed] = fine("ls", place, "--json").json["steps"]
    assert (listed["state"], listed["format"], listed["data_bytes"]) == ("whole", form, 120_008)
    shown = fine("show", place, "--json").json
    assert {one["key"]: one["shape"] for one in shown["entries"] if one["key"]} == {"w": [300, 100], "b": [2]}
    assert fine("show", place, "w", "--slice", "1,:2").lines[-1] == "tensor([100., 101.])"
    assert fine("verify", place).lines[0].startswith("whole")
    computed = fine("stats", place, "--compute", "--json").json["tensors"]
    assert [(row["key"], row.get("nan", 0)) for row in computed] == [("b", 1), ("w", 0)]
    assert fine("explain", place, "--ranks", "3", "--json").json["read_bytes"] == 120_008
    assert refused(2, "prune", place, "--keep-last", "1", "--dry-run")
    for other in FORMATS:
        assert milepost("diff", place, formats / other, "--keys", "[wb]").status == 0


def test_other_format_is_whole_only_if_its_files_are_there(formats, tmp_path):
    place = shutil.copytree(formats / "dcp", tmp_path / "dcp")
    [file] = place.glob("*.distcp")
    os.truncate(file, file.stat().st_size // 2)
    done = milepost("ls", place)
    assert (done.status, done.lines[1].split()[0]) == (4, "damaged")
    assert "should hold ends at" in done.lines[2]
    file.unlink()
    assert (milepost("ls", place).status, milepost("verify", place).status) == (4, 4)
    assert fine("ls", formats / "torch", "--json").json["steps"][0]["age_s"] >= 0


def test_run_of_other_formats_is_a_run(formats, tmp_path):
    for step in (1, 2):
        torch.save(STATE, tmp_path / f"model-{step}.pt")
    dcp.save(STATE, checkpoint_id=tmp_path / "checkpoint-3", no_dist=True)
    assert [step["step"] for step in fine("ls", tmp_path, "--json").json["steps"]] == [1, 2, 3]
    assert len(fine("verify", tmp_path).lines) == 3
    done = milepost("show", tmp_path, "w")
    assert (done.status, "checkpoint-3 is its newest step" in done.err) == (0, True)


@pytest.mark.slow
def test_bucket_is_a_place_like_any(run, tmp_path, seaweed):
    """The settings are in the URL, so that a place in a run must keep them."""
    with seaweed.place() as url:
        place = upload(run, below(url, "run"))
        assert [step["state"] for step in fine("ls", place, "--json").json["steps"]] == ["whole"] * 4
        done = milepost("show", place, "--json")
        assert done.json["url"].endswith("run/step-0000000400")
        assert len(fine("verify", place).lines) == 4
        last = below(place, "step-0000000400")
        assert fine("show", last, "model.w", "--slice", "0,0").lines[-1] == "tensor(400.)"
        assert milepost("diff", place, run).status == 0
        found = milepost("diff", below(place, "step-0000000100"), last, "--json")
        assert (found.status, [one["key"] for one in found.json["tensors"]]) == (1, ["model.w"])
        assert fine("stats", last, "--json").json["source"] == "recorded"
        fine("convert", last, tmp_path / "file.pt")
        fine("verify", last, "--record")
        assert fine("ls", place, "--json").json["steps"][-1]["verified"]
        assert fine("prune", place, "--keep-last", "2", "--yes", "--json").json["removed"] == [100, 200]
        assert len(fine("ls", place, "--json").json["steps"]) == 2
        refused(3, "show", below(url, "nothing"))
        light = process("ls", place, code="import atexit; atexit.register(lambda: print('torch' in sys.modules))")
        assert light.lines[-1] == "False"


def test_web_is_read(run, step, formats):
    with Web(run.parent) as web:
        place = f"{web.url}/{run.name}/{step.name}?token=secret"
        [listed] = fine("ls", place, "--json").json["steps"]
        assert (listed["state"], listed["ranks"]) == ("whole", 3)
        assert fine("show", place, "model.w", "--slice", "0,0").lines[-1] == "tensor(400.)"
        done = fine("verify", place)
        assert done.lines[0].startswith("whole")
        assert "secret" not in done.out
        assert milepost("diff", place, step).status == 0
        assert "only read" in refused(2, "verify", place, "--record")
        assert "only read" in refused(2, "convert", step, place)
        assert "only read" in refused(2, "prune", f"{web.url}/{run.name}", "--keep-last", "1", "--yes")
        assert "of the file itself. Is the path right?" in refused(3, "show", f"{web.url}/nothing")
    with Web(formats) as web:
        assert json.loads(fine("ls", f"{web.url}/torch", "--json").out)["steps"][0]["format"] == "torch"


def test_place_in_memory_is_one(run):
    library.save({"w": torch.ones(3)}, "memory://on-the-command-line")
    assert (
        fine("show", "memory://on-the-command-line").lines[0].startswith("memory://on-the-command-line: generation 1")
    )


@pytest.mark.slow
def test_run_in_a_bucket_is_found_by_few_requests(seaweed, s3_proxy):
    with seaweed.place(s3_proxy.endpoint) as url:
        save_run(url, range(1, 11))
        before = s3_proxy.traffic().total
        assert milepost("show", url, "step").out == "step: 10\n"
        assert s3_proxy.traffic().total - before <= 12
