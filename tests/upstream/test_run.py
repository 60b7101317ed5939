"""The runner of PyTorch's own tests: it fetches them whole, finds Milepost in torch's place, and counts honestly."""

import io
import json
import os
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from tests.upstream import fetch, run

PROGRAM = """
import pickle
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.metadata import MetadataIndex
from milepost.planning import torch_adapters
print(dcp.save.__module__, MetadataIndex.__module__)
print(torch_adapters.their_storage.StorageWriter.__module__ != dcp.StorageWriter.__module__)
print(type(pickle.loads(pickle.dumps(MetadataIndex("w")))) is MetadataIndex)
"""


def archive(path, members):
    with tarfile.open(path, "w:gz") as file:
        for name, text in members.items():
            about = tarfile.TarInfo(f"pytorch-1/{name}")
            about.size = len(text)
            file.addfile(about, io.BytesIO(text.encode()))
    return path.as_uri()


def test_tests_are_fetched_once_and_whole(tmp_path, monkeypatch):
    inside = {f"{fetch.INSIDE}test_a.py": "a", f"{fetch.INSIDE}e2e/test_b.py": "b", "test/test_c.py": "c"}
    monkeypatch.delenv("UPSTREAM_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setenv("UPSTREAM_URL", archive(tmp_path / "empty.tar.gz", {"test/test_c.py": "c"}))
    with pytest.raises(SystemExit, match="holds no"):
        fetch.tests_folder()
    monkeypatch.setenv("UPSTREAM_URL", archive(tmp_path / "whole.tar.gz", inside))
    folder = fetch.tests_folder()
    assert sorted(str(path.relative_to(folder)) for path in folder.rglob("*.py")) == ["e2e/test_b.py", "test_a.py"]
    monkeypatch.setenv("UPSTREAM_URL", "file:///nothing")
    assert fetch.tests_folder() == folder
    assert [path.name for path in folder.parent.iterdir()] == [folder.name]


def test_an_archive_that_cannot_be_fetched_is_told(tmp_path, monkeypatch):
    monkeypatch.delenv("UPSTREAM_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("UPSTREAM_URL", "file:///nothing")
    with pytest.raises(SystemExit, match="UPSTREAM_DIR"):
        fetch.tests_folder()
    monkeypatch.setenv("UPSTREAM_DIR", str(tmp_path))
    with pytest.raises(SystemExit, match="there are no tests"):
        fetch.tests_folder()


def test_one_failure_of_a_test_counts(tmp_path):
    report = tmp_path / "report.jsonl"
    records = [("a", "passed"), ("a", "failed"), ("b", "failed"), ("b", "passed"), ("c", "passed")]
    lines = [{"kind": "run", "test": test, "outcome": outcome, "text": ""} for test, outcome in records]
    report.write_text("".join(json.dumps(line) + "\n" for line in lines))
    found = {test: outcome for test, (outcome, _) in run.outcomes(report).items()}
    assert found == {"": "failed", "a": "failed", "b": "failed", "c": "passed"}
    assert set(run.outcomes(tmp_path / "nothing")) == {""}


def test_the_baseline_has_all_tests_but_experimental_ones():
    assert sum(map(len, run.BASELINE.values())) == 208
    assert not [file for file in run.BASELINE if file.startswith("_experimental")]


@pytest.mark.slow
def test_the_name_of_torch_leads_to_milepost(tmp_path):
    root = Path(__file__).parents[2]
    path = [str(root / "tests" / "upstream" / "shim"), str(root / "src"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM],
        env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, path)), "UPSTREAM_HOW": "alias"},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.stdout.splitlines() == ["milepost.dcp.state_dict_saver milepost.planning.records", "True", "True"], done
