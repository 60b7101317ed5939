"""What is at a place: steps in every state, other formats, and nothing."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp

import milepost
from milepost.commit.removal import remove_checkpoint
from milepost.core.manifest import manifest_name
from milepost.errors import CheckpointNotFound
from milepost.inspection.runs import SeenSteps, StepSummary, look_at, why_kept
from milepost.inspection.verified import record_verified
from milepost.steps.names import step_in
from milepost.steps.retention import Rule
from milepost.store import MemoryStore, Traits, Within
from milepost.testing import CountingStore
from tests.steps.numbered import files_of, state

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")


def by_step(place):
    return {step.step: step for step in look_at(place).steps}


def run(root, steps, **options):
    with milepost.Checkpointer(root, **options) as keeper:
        for step in steps:
            keeper.save(state(step), step, metrics={"loss": 10.0 / (step + 1)})
    return root


def test_run_lists_its_steps(tmp_path):
    run(tmp_path, [0, 100, 200])
    found = look_at(tmp_path)
    assert (found.kind, found.url) == ("run", str(tmp_path))
    assert [(s.step, s.name, s.state, s.looked_at) for s in found.steps] == [
        (step, f"step-{step:010}", "whole", "files") for step in (0, 100, 200)
    ]
    last = found.steps[-1]
    files = [p for p in (tmp_path / last.name).rglob("*") if p.is_file()]
    assert last.file_bytes == sum(p.stat().st_size for p in files)
    assert last.data_bytes == 3 * 5 * 4 + 7 * 8
    assert (last.ranks, last.generation, last.format, last.metrics) == (1, 1, "milepost", {"loss": 10.0 / 201})
    assert last.age_s is not None
    assert -1 <= last.age_s < 600


def test_every_state_is_told_apart(tmp_path):
    run(tmp_path, range(1, 7))
    folders = {step: tmp_path / f"step-{step:010}" for step in range(1, 7)}
    (folders[1] / manifest_name(1)).unlink()
    [shard] = files_of(tmp_path, 2)
    os.truncate(shard, shard.stat().st_size - 1)
    (folders[3] / manifest_name(1)).write_bytes(b"half a manifest")
    manifest = folders[4] / manifest_name(1)
    manifest.rename(f"{manifest}.removed")
    files_of(tmp_path, 5)[0].unlink()
    found = by_step(tmp_path)
    states = ["unfinished", "damaged", "damaged", "removed", "damaged", "whole"]
    assert [found[step].state for step in range(1, 7)] == states
    assert "never finished" in found[1].reason
    assert "was saved with" in found[2].reason
    assert "checksum" in found[3].reason
    assert "is missing" in found[5].reason


def test_other_formats_are_steps_too(tmp_path):
    run(tmp_path, [3])
    torch.save(state(1), tmp_path / "model-1.pt")
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "global_step2", no_dist=True)
    (tmp_path / "logs").mkdir()
    (tmp_path / "logs" / "data").mkdir()
    (tmp_path / "step-0000000009").mkdir()
    found = look_at(tmp_path).steps
    assert [(s.step, s.format, s.state) for s in found] == [
        (1, "torch", "whole"), (2, "dcp", "whole"), (3, "milepost", "whole")
    ]  # fmt: skip
    one = look_at(tmp_path / "global_step2")
    assert (one.kind, one.steps[0].format, one.steps[0].data_bytes, one.steps[0].ranks) == ("checkpoint", "dcp", 12, 1)
    assert look_at(tmp_path / "model-1.pt").steps[0].format == "torch"


def test_dcp_save_without_index_is_unfinished(tmp_path):
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "step-4", no_dist=True)
    (tmp_path / "step-4" / ".metadata").unlink()
    [step] = look_at(tmp_path).steps
    assert (step.step, step.state, step.format) == (4, "unfinished", "dcp")


@pytest.mark.parametrize("inside", [None, "", "x", "data/x"])
def test_nothing_is_said_to_be_nothing(tmp_path, inside):
    place = tmp_path / "a"
    if inside is not None:
        (place / inside).mkdir(parents=True)
    found = look_at(place)
    assert (found.kind, found.steps) == ("nothing", ())
    assert str(place) in found.reason


def test_one_checkpoint_is_told_from_a_run(tmp_path):
    milepost.save({"w": torch.ones(4)}, tmp_path / "final")
    found = look_at(tmp_path / "final")
    assert (found.kind, len(found.steps), found.steps[0].name, found.steps[0].step) == ("checkpoint", 1, ".", None)


def test_place_that_both_libraries_saved_to_is_unreadable(tmp_path):
    run(tmp_path, [1])
    dcp.save({"a": torch.ones(3)}, checkpoint_id=tmp_path / "step-0000000001", no_dist=True)
    [step] = look_at(tmp_path).steps
    assert step.state == "unreadable"
    assert "two checkpoints" in step.reason


def test_step_is_kept_for_a_reason():
    steps = [
        StepSummary(step=n, name=f"step-{n:010}", url="", state="whole", metrics={"loss": loss})
        for n, loss in [(1000, 3.0), (1500, 1.0), (1700, 9.0), (1800, 2.0), (1900, 4.0)]
    ]
    rule = Rule(keep_last=2, keep_every=1000, keep_best=1, best="loss")
    assert why_kept(rule, steps) == {
        "step-0000001900": ("last 2",),
        "step-0000001800": ("last 2",),
        "step-0000001000": ("every 1000",),
        "step-0000001500": ("best 1 by loss",),
    }
    assert why_kept(None, steps) == {}
    assert why_kept(Rule(), steps)["step-0000001000"] == ("no rule removes it",)


def test_reason_comes_from_the_metadata_of_the_newest_step(tmp_path):
    for n in (1, 2, 3):
        place, rule = tmp_path / f"step-{n:010}", {"keep_last": 2, "new_field": 1}
        milepost.save(state(n), place, metadata={"retention": rule, "metrics": {"loss": 1.0 / n}})
    found = look_at(tmp_path)
    assert found.retention == {"keep_last": 2}
    assert [s.kept for s in found.steps] == [(), ("last 2",), ("last 2",)]
    milepost.save(state(4), tmp_path / "step-0000000004", metadata={"retention": {"keep_last": -1}})
    assert look_at(tmp_path).retention == {"keep_last": 2}


def test_health_is_shown(tmp_path):
    from milepost.commit.attempt import Attempt, Contents, take_aim
    from milepost.core.statistics import Health
    from milepost.store import LocalStore

    milepost.save(state(1), tmp_path / "step-0000000001")
    store = LocalStore(tmp_path / "step-0000000002")
    attempt = Attempt(store, take_aim(store), 0, 1, decides=True)
    tree = milepost.open(tmp_path / "step-0000000001").manifest.tree[:1]
    health = Health(ok=False, reason="'w' has 3 NaN")
    attempt.commit(Contents({"dict": []}, (), (), tree, (), (), (), health=health))
    found = by_step(tmp_path)
    assert (found[1].state, found[2].state, found[2].reason) == ("whole", "unhealthy", "'w' has 3 NaN")


def test_step_in_names():
    names = {
        "step-0000000012": 12,
        "checkpoint-500": 500,
        "v2-iter_000030": 30,
        "epoch=3-step=40.ckpt": 40,
        "best": None,
    }
    assert {name: step_in(name) for name in names} == names


def test_memory_store_and_prefix():
    store = MemoryStore()
    milepost.save(state(1), Within(store, "step-0000000001"))
    assert [s.state for s in look_at(store).steps] == ["whole"]


def test_verified_note_is_shown_and_goes_with_the_checkpoint(tmp_path):
    run(tmp_path, [1, 2])
    place = tmp_path / "step-0000000002"
    when = record_verified(place, 1)
    assert record_verified(place, 1) >= when
    assert [s.verified is not None for s in look_at(tmp_path).steps] == [False, True]
    assert milepost.open(place)["n"] == 2
    milepost.save(state(3), place)
    assert look_at(place).steps[0].verified is None
    assert [p.name for p in sorted(place.iterdir())] == ["data", manifest_name(2)]
    record_verified(place, 2)
    keeper = milepost.Checkpointer(tmp_path)
    keeper.remove(2)
    assert not place.exists()
    with pytest.raises(CheckpointNotFound, match="replaced or removed"):
        record_verified(place, 2)
    assert not place.exists()


@pytest.mark.slow
def test_thousand_steps_are_listed_in_seconds(tmp_path):
    tensors = {f"layer.{i}.weight": torch.zeros(2) for i in range(300)}
    milepost.save(tensors, tmp_path / "step-0000000000")
    for n in range(1, 1000):
        shutil.copytree(tmp_path / "step-0000000000", tmp_path / f"step-{n:010}")
    code = (
        "import sys, time; from milepost.inspection.runs import look_at\n"
        "start = time.process_time(); found = look_at(sys.argv[1])\n"
        "assert len(found.steps) == 1000 and {s.state for s in found.steps} == {'whole'}\n"
        "print(time.process_time() - start); assert 'torch' not in sys.modules"
    )
    done = subprocess.run([sys.executable, "-c", code, tmp_path], capture_output=True, text=True, timeout=120)
    assert float(done.stdout) < 3.0, done.stderr


class Noting(MemoryStore):
    """Memory that notes which objects are opened, and which folders are listed."""

    def __init__(self, **options):
        super().__init__(**options)
        self.noted = []

    def reader(self, name, *, size_bytes=None):
        self.noted.append(name)
        return super().reader(name, size_bytes=size_bytes)

    def list(self, prefix, *, shallow=False):
        self.noted.append(f"{prefix}*")
        return super().list(prefix, shallow=shallow)


@pytest.mark.parametrize(("changes", "found"), [("replaced", ["whole", "whole"]), ("removed", ["removed", "whole"])])
def test_step_that_changes_during_a_look_is_not_damaged(changes, found):
    class Changing(CountingStore):
        def before(self, number, call):
            place = Within(self.inner, "step-0000000001")
            if call.startswith("reader step-0000000001/data/") and milepost.open(place).generation == 1:
                if changes == "replaced":
                    milepost.save(state(5), place)
                else:
                    remove_checkpoint(place)

    store = run(MemoryStore(), [1, 2])
    steps = look_at(Changing(store)).steps
    assert [step.state for step in steps] == found
    assert steps[0].generation == (2 if changes == "replaced" else 1)


def test_another_look_reads_only_what_is_new():
    store, seen = Noting(), SeenSteps()
    run(store, [1, 2, 3], keep_last=3)
    first = look_at(store, seen)
    store.noted.clear()
    assert by_name(look_at(store, seen)) == by_name(first)
    assert [name for name in store.noted if not name.endswith("*")] == []
    run(store, [4], keep_last=3)
    record_verified(Within(store, "step-0000000002"), 1)
    store.noted.clear()
    found = look_at(store, seen)
    assert [(step.step, step.kept) for step in found.steps] == [(n, ("last 3",)) for n in (2, 3, 4)]
    assert [step.verified is not None for step in found.steps] == [True, False, False]
    opened = {name.split("/")[0] for name in store.noted if not name.endswith("*")}
    assert opened == {"step-0000000002", "step-0000000004"}


def test_where_a_listing_is_a_request_most_old_steps_rest():
    store, seen = Noting(traits=Traits(is_current=True, requests=4)), SeenSteps()
    run(store, range(1, 61))
    look_at(store, seen)
    store.noted.clear()
    assert len(look_at(store, seen).steps) == 60
    listed = {name for name in store.noted if name.startswith("step-")}
    assert 16 <= len(listed) <= 20
    assert {f"step-{step:010}/*" for step in range(45, 61)} <= listed
    for _ in range(16):
        look_at(store, seen)
    assert len({name for name in store.noted if name.startswith("step-")}) == 60


def by_name(found):
    """What does not depend on the time of the look."""
    return {step.name: (step.state, step.kept, step.file_bytes, step.metrics) for step in found.steps}


@pytest.mark.slow
def test_steps_in_a_bucket(seaweed):
    with seaweed.place() as url:
        run(url, [1, 2, 3])
        store = milepost.store.store_at(url)
        doomed = [n for n in store.list("step-0000000001/") if n.endswith("safetensors")]
        store.delete(*doomed, "step-0000000002/" + manifest_name(1))
        record_verified(Within(store, "step-0000000003"), 1)
        found = by_step(url)
    assert [found[n].state for n in (1, 2, 3)] == ["damaged", "unfinished", "whole"]
    assert found[3].verified is not None
    assert Path(found[3].url).name == "step-0000000003"
