"""What `--json` prints is what `milepost schema` says, for every command and for what is hard to spell."""

import json
import shutil

import jsonschema
import pytest
import torch

import milepost as library
from milepost.cli.app import COMMANDS
from tests.cli.conftest import NASTY, WORLD
from tests.cli.running import fine, milepost, process
from tests.steps.numbered import files_of, flip

WITHOUT = ("schema", "completion")
"""Commands that print no record."""


@pytest.fixture(scope="module")
def schemas():
    found = fine("schema").json
    for schema in found.values():
        jsonschema.Draft202012Validator.check_schema(schema)
    return found


@pytest.fixture
def holds(schemas):
    """Run a command with `--json`, and give its output: one document, as its schema says."""

    def run(name, *arguments, status=0):
        done = milepost(name, *arguments, "--json")
        assert done.status == status, done
        jsonschema.validate(done.json, schemas[name])
        assert done.out.endswith("}\n")
        return done.json

    return run


def test_every_command_with_output_has_a_schema(schemas):
    assert schemas.keys() == COMMANDS.keys() - set(WITHOUT)
    for name, schema in schemas.items():
        assert fine("schema", name).json == schema
        assert schema["title"] == f"milepost {name} --json"


def test_json_of_listing_and_contents(holds, run, step):
    found = holds("ls", run)
    assert [(s["step"], s["state"], s["ranks"]) for s in found["steps"]][-1] == (400, "whole", WORLD)
    assert found["newest"] == "step-0000000400"
    assert holds("ls", step)["kind"] == "checkpoint"
    shown = holds("show", step)
    assert (shown["tensors"], shown["ranks"], shown["metadata"]["metrics"]) == (2, WORLD, {"loss": 9.0})
    assert len(shown["statistics"]) == 2
    assert [box["rank"] for box in holds("show", step, "model.w")["boxes"]] == list(range(WORLD))
    assert holds("show", step, "model.w", "--slice", "0,:2")["values"] == [400.0, 401.0]
    assert holds("show", step, "step")["entry"]["value"] == 400
    assert holds("show", step, "rng")["entry"]["ranks"] == "0-2"


def test_json_of_checks_and_plans(holds, run, step, copied):
    assert [one["state"] for one in holds("verify", run)["checkpoints"]] == ["whole"] * 4
    flip(files_of(copied, 200)[1])
    [one] = holds("verify", copied / "step-0000000200", status=4)["checkpoints"]
    assert one["damages"][0]["boxes"]
    found = holds("diff", run / "step-0000000100", step, "--values", status=1)
    assert [(one["key"], one["max_difference"]) for one in found["tensors"]] == [("model.w", 300.0)]
    assert holds("stats", step)["source"] == "recorded"
    assert holds("stats", step, "model.w")["tensors"][0]["max"] == 400.0 + 255 + WORLD - 1
    assert len(holds("explain", step, "--mesh", "dp=2,tp=3", "--rank", "5")["ranks"]) == 6
    assert holds("prune", copied, "--keep-last", "3", "--dry-run")["removed"] == [100]
    assert holds("prune", copied, "--keep-last", "3", "--yes")["done"]


def test_json_of_a_conversion(holds, step, tmp_path):
    assert holds("convert", step, tmp_path / "file.pt")["format"] == "torch"


def test_names_of_every_kind_are_json(holds, nasty):
    keys = {one["key"] for one in holds("show", nasty)["entries"] if one["kind"] == "tensor"}
    assert keys == set(NASTY)
    assert holds("diff", nasty, nasty)["same"]
    for key in (key for key in NASTY if not key.startswith("-")):
        assert holds("show", nasty, key)["entry"]["key"] == key
        assert holds("stats", nasty, key, "--compute")["tensors"][0]["key"] == key
    holds("verify", nasty)
    holds("explain", nasty, "--ranks", "2")


def test_json_holds_nothing_that_a_terminal_obeys(nasty):
    for line in (["show", nasty], ["ls", nasty.parent], ["diff", nasty, nasty], ["verify", nasty]):
        text = fine(*line, "--json").out
        assert all(letter.isprintable() or letter == "\n" for letter in text), line


def test_numbers_that_are_none_are_null(holds, tmp_path):
    state = {"w": torch.tensor([float("nan"), float("inf"), 1.5]), "n": float("nan"), "t": (1, {2: b"x"})}
    library.save(state, tmp_path / "a", metadata={"loss": float("inf")}, statistics=True)
    found = holds("show", tmp_path / "a", "w", "--slice", ":")
    assert found["values"] == [None, None, 1.5]
    entries = {one.get("key"): one for one in holds("show", tmp_path / "a")["entries"]}
    assert entries["n"]["value"] == "nan"
    assert holds("stats", tmp_path / "a")["tensors"][0]["nan"] == 1


@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_output_of_few_letters_is_json(encoding, tmp_path):
    library.save({"\xe9\u6f22\U0001f642": 1}, tmp_path / "a")
    done = process("show", tmp_path / "a", "--json", PYTHONIOENCODING=encoding, PYTHONUTF8="0")
    assert done.out.isascii()
    assert [one["key"] for one in done.json["entries"]][-1] == "\xe9\u6f22\U0001f642"


def test_path_that_is_no_text_is_json(schemas, step, tmp_path):
    place = str(tmp_path / "\udcff")
    shutil.copytree(step, place)
    looks = ["ls", place], ["show", place], ["verify", place], ["view", place, "-o", tmp_path / "page.html"]
    for line in (*looks, ["convert", place, f"{place}.pt"]):
        done = process(*line, "--json")
        jsonschema.validate(json.loads(done.out), schemas[line[0]])
        assert "\\udcff" in done.out
