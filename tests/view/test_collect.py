"""What the page holds is what the manifests say, for every kind of place, and it takes no torch to make it."""

import base64
import hashlib
import re
import subprocess
import sys
import zlib
from pathlib import Path

import msgspec
import pytest
import torch

import milepost
from milepost.view import collect, make_page, write_page
from milepost.view.page import asset, data_of


@pytest.fixture
def run(tmp_path):
    with milepost.Checkpointer(tmp_path / "run") as keeper:
        for step in (1, 2, 3):
            state = {"w": torch.full((4, 3), float(step)), "step": step, "fixed": "<b>"}
            keeper.save(state, step, metrics={"loss": 1 / step})
    return tmp_path / "run"


def test_a_run_has_its_steps_once_its_structure_and_each_value(run):
    page = collect(run)
    assert page.is_run
    assert [(step.step, step.state, step.metrics) for step in page.steps] == [
        (1, "whole", {"loss": 1.0}),
        (2, "whole", {"loss": 0.5}),
        (3, "whole", {"loss": 1 / 3}),
    ]
    assert len(page.structures) == len(page.files) == 1
    assert page.structures[0].tensors.keys == ["w"]
    # Only what differs from the next newer step.
    assert [step.values for step in page.steps] == [{0: "1"}, {0: "2"}, {0: "3", 1: "<b>"}]


def test_damage_and_unfinished_saves_are_shown_and_stop_nothing(run):
    manifest = next((run / "step-0000000002").glob("manifest-*.json"))
    manifest.write_bytes(manifest.read_bytes()[:-60])
    (run / "step-0000000004" / "data" / "00000001-0123456789abcdef").mkdir(parents=True)
    (run / "step-0000000004" / "data" / "00000001-0123456789abcdef" / "00000.safetensors").write_bytes(b"half")
    page = collect(run)
    assert [(step.step, step.state) for step in page.steps] == [
        (1, "whole"),
        (2, "damaged"),
        (3, "whole"),
        (4, "unfinished"),
    ]
    assert "checksum" in page.steps[1].reason


def test_other_formats_show_their_tree_and_their_files(tmp_path):
    torch.save({"w": torch.ones(2, 2), "epoch": 3}, tmp_path / "model.pt")
    page = collect(tmp_path / "model.pt")
    assert (page.is_run, page.steps[0].format, page.files[0].names) == (False, "torch", ["model.pt"])
    assert page.structures[0].value_keys == ["epoch"]


def test_nothing_there_says_so(tmp_path):
    with pytest.raises(milepost.CheckpointNotFound, match="no checkpoint at"):
        collect(tmp_path)


def test_the_page_holds_no_text_of_the_checkpoint_outside_its_data(run, tmp_path):
    text = make_page(collect(run)).decode()
    assert "<b>" not in text.split("<script>")[0].split("milepost-page")[0]
    [held] = re.findall(r'id="milepost-page">([^<]*)<', text)
    found = msgspec.json.decode(zlib.decompress(base64.b64decode(held)))
    assert found["steps"][2]["values"] == {"0": "3", "1": "<b>"}


def test_the_policy_names_each_script_and_style_by_its_hash(run):
    text = make_page(collect(run)).decode()
    [policy] = re.findall(r'Content-Security-Policy" content="([^"]*)"', text)
    blocks = re.findall(r"<(?:style|script|script type=\"module\")>(.*?)</(?:style|script)>", text, re.DOTALL)
    assert len(blocks) == 3
    for block in blocks:
        assert f"sha256-{base64.b64encode(hashlib.sha256(block.encode()).digest()).decode()}" in policy
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy


def test_the_vendored_library_is_the_one_that_was_checked():
    found = hashlib.sha256(asset("vendor/echarts.min.js").encode()).hexdigest()
    assert f"`{found}`" in asset("vendor/README.md")


def test_writing_a_page_imports_no_torch_and_replaces_the_file(run, tmp_path):
    target = tmp_path / "page.html"
    target.write_text("old")
    source = f"import sys; from milepost.view import write_page; write_page({str(run)!r}, {str(target)!r}); "
    subprocess.run([sys.executable, "-c", source + "assert 'torch' not in sys.modules"], check=True, timeout=60)
    assert target.read_bytes().startswith(b"<!doctype html>")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["page.html", "run"]


def test_a_page_that_cannot_be_written_leaves_nothing(run, tmp_path):
    (tmp_path / "file").touch()
    for above in ("missing", "file"):
        with pytest.raises(milepost.StorageError, match="cannot write"):
            write_page(run, tmp_path / above / "page.html")
    assert not (tmp_path / "missing").exists()


def test_every_script_of_the_folder_is_in_the_page(run):
    from milepost.view.page import SCRIPTS, STYLES

    folder = Path(sys.modules["milepost.view.page"].__file__).parent / "assets"
    assert sorted(SCRIPTS + STYLES) == sorted(path.name for path in folder.iterdir() if path.suffix in (".js", ".css"))
    assert data_of(collect(run)).keys() == {"page", "statistics", "changes"}


def test_a_run_elsewhere_is_shown_as_one_in_a_folder(run):
    with milepost.Checkpointer("memory://elsewhere") as keeper:
        for step in (1, 2, 3):
            keeper.save({"w": torch.full((4, 3), float(step)), "step": step, "fixed": "<b>"}, step)
    here, there = collect(run), collect("memory://elsewhere")
    assert [(one.step, one.state, one.values) for one in there.steps] == [
        (one.step, one.state, one.values) for one in here.steps
    ]
    assert there.structures == here.structures
    assert there.source == "memory://elsewhere"
    assert [change.changed_bytes for change in there.changes] == [48, 48, 48]
