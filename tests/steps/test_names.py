"""Steps under other names: patterns, and the checkpoints of other programs."""

import json
import shutil

import pytest
import torch
import torch.distributed.checkpoint as torch_dcp
from hypothesis import given
from hypothesis import strategies as st
from safetensors.torch import save_file

import milepost
from milepost import Checkpointer, InvalidRequest
from milepost.steps.names import StepNames, StepPattern
from milepost.store import MemoryStore, Within
from milepost.testing import run_ranks
from tests.strategies import examples

COMMON = [
    "step-{step}",
    "step_{step}",
    "checkpoint-{step}",
    "global_step{step}",
    "iter_{step:07}",
    "epoch=*-step={step}.ckpt",
]


def state(number=0):
    return {"w": torch.full((3,), float(number)), "n": number}


def restored(keeper, **options):
    target = {"w": torch.zeros(3)}
    step = keeper.restore(target, allow_unexpected=True, **options)
    assert target["w"].tolist() == [float(step)] * 3
    return step


# ---- patterns


@st.composite
def patterns(draw):
    around = st.text(st.sampled_from("ab-_=.0 1\xe9"), max_size=6)
    field = draw(st.sampled_from(["{step}", "{step:01}", "{step:03}", "{step:010}", "{step:012d}"]))
    return StepPattern(draw(around) + field + draw(around))


@examples(200)
@given(patterns(), st.integers(0, 9_999_999_999), st.integers(0, 9_999_999_999))
def test_each_step_has_one_name_and_each_name_one_step(pattern, step, other):
    name = pattern.name(step)
    assert pattern.step(name) == step
    assert (pattern.name(other) == name) == (other == step)
    # Another spelling of the number is not its name: two folders must not be one step.
    before, after = pattern._around
    for digits in (f"0{pattern.digits(step)}", f"+{step}", f" {step}", f"{step}_0", "\u0663"):
        found = pattern.step(before + digits + after)
        assert found is None or pattern.name(found) == before + digits + after


@pytest.mark.parametrize(
    ("pattern", "name", "step"),
    [
        ("step-{step}", "step-1", 1),
        ("step-{step}", "step-01", None),
        ("step-{step:010}", "step-0000000100", 100),
        ("step-{step:03}", "step-1000", 1000),
        ("step-{step:03}", "step-0999", None),
        ("checkpoint-{step}", "checkpoint-500-old", None),
        ("global_step{step}", "global_step500", 500),
        ("epoch=*-step={step}.ckpt", "epoch=3-step=1000.ckpt", 1000),
        ("epoch=*-step={step}.ckpt", "epoch=3-step=1000.ckpt.tmp", None),
        ("epoch=*-step={step}.ckpt", "epoch=3-step=1000-v1.ckpt", None),
        ("{step}", "7", 7),
        ("{step}", "\u0667", None),
    ],
)
def test_patterns_read_names(pattern, name, step):
    assert StepPattern(pattern).step(name) == step


@pytest.mark.parametrize(
    "bad", ["", "step", "{step}{step}", "{steps}", "{step:>5}", "{step:5}", "{step:0}", "a{", "{step}/x", "..{x}"]
)
def test_patterns_that_name_no_step_are_refused(bad, tmp_path):
    for options in ({"names": bad}, {"also_read": [bad]}):
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            Checkpointer(tmp_path, **options)


def test_patterns_that_are_not_patterns_are_refused(tmp_path):
    wrong = [{"names": None}, {"names": 7}, {"names": "a*-{step}"}, {"also_read": "step-{step}"}, {"also_read": [7]}]
    wrong += [{"names": "\0{step}"}, {"names": "x" * 250 + "{step}"}, {"also_read": ["*{step}"]}, {"also_read": None}]
    for options in wrong:
        with pytest.raises(InvalidRequest, match=next(iter(options))):
            Checkpointer(tmp_path, **options)


def test_a_name_with_two_steps_is_refused():
    with pytest.raises(InvalidRequest, match="step 1 and step 2"):
        StepNames(others=["*s={step}-*"]).step_of("a-s=1-s=2-b", file=False)


# ---- saving


@pytest.mark.parametrize("root", ["folder", "memory"])
def test_a_pattern_of_your_own_names_saves_and_is_read(tmp_path, root):
    where = tmp_path if root == "folder" else MemoryStore()
    keeper = Checkpointer(where, names="checkpoint-{step}", keep_last=2)
    for step in (9, 10, 100):
        keeper.save(state(step), step)
    assert keeper.steps() == [10, 100], "by number, not by name"
    assert restored(keeper) == 100
    assert restored(keeper, step=10) == 10
    listed = {name.split("/")[0] for name in keeper._shelf.root.list("")}
    assert listed == {"checkpoint-10", "checkpoint-100"}
    assert Checkpointer(where).steps() == [], "the default names are others"


# ---- reading what others saved


def save_elsewhere(root):
    """Steps of several libraries under the names that they use."""
    milepost.save(state(1), root / "step-1")
    torch_dcp.save(state(1000), checkpoint_id=root / "step_1000")
    (root / "checkpoint-500").mkdir()
    save_file({"w": torch.full((3,), 500.0)}, root / "checkpoint-500" / "model.safetensors")
    torch.save({"w": torch.full((3,), 1200.0)}, root / "epoch=3-step=1200.ckpt")
    # What looks like a step and is none: unfinished, empty, or of another kind.
    (root / "step_2000").mkdir()
    (root / "step_2000" / "__0_0.distcp").write_bytes(b"unfinished")
    (root / "checkpoint-3000").mkdir()
    save_file({"w": torch.zeros(3)}, root / "checkpoint-3000" / "model-00001-of-00002.safetensors")
    (root / "checkpoint-3001").mkdir()
    (root / "checkpoint-3001" / "trainer_state.json").write_text(json.dumps({"step": 3001}))
    (root / "checkpoint-4000").symlink_to(root / "checkpoint-500")


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_steps_of_other_programs_are_listed_and_restored(tmp_path):
    save_elsewhere(tmp_path)
    assert Checkpointer(tmp_path).steps() == [], "only on request"
    keeper = Checkpointer(tmp_path, also_read=COMMON)
    assert keeper.steps() == [1, 500, 1000, 1200]
    assert [restored(keeper, step=step) for step in (1, 500, 1000)] == [1, 500, 1000]
    assert restored(keeper) == keeper.latest() == 1200
    assert keeper.open(1000)["w"].read().tolist() == [1000.0] * 3
    assert restored(keeper, step=500, verify_first=True) == 500
    with pytest.raises(milepost.CheckpointNotFound, match="no step 3000"):
        keeper.restore(state(), step=3000)


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_rules_neither_count_nor_remove_what_others_saved(tmp_path):
    save_elsewhere(tmp_path)
    before = sorted(str(path) for path in tmp_path.rglob("*"))
    keeper = Checkpointer(tmp_path, also_read=COMMON, keep_last=1)
    for step in (1300, 1400):
        keeper.save(state(step), step)
    assert keeper.steps() == [1, 500, 1000, 1200, 1400]
    assert set(before) <= {str(path) for path in tmp_path.rglob("*")}
    with pytest.raises(InvalidRequest, match="delete it by hand"):
        keeper.remove(1000)
    keeper.remove(1)  # in Milepost's format, and asked for
    assert keeper.steps() == [500, 1000, 1200, 1400]


@pytest.mark.filterwarnings("ignore::UserWarning")
def test_other_formats_under_the_names_of_saves_are_restored(tmp_path):
    torch_dcp.save(state(5), checkpoint_id=tmp_path / "step-5")
    keeper = Checkpointer(tmp_path, names="step-{step}", keep_last=1)
    assert restored(keeper) == 5
    keeper.save(state(6), 6)
    keeper.save(state(7), 7)
    assert keeper.steps() == [5, 7], "not made by a save of ours, so not removed"


def test_a_step_of_ours_counts_before_that_of_another(tmp_path):
    keeper = Checkpointer(tmp_path, also_read=["checkpoint-{step}", "step_{step}"])
    milepost.save(state(0), tmp_path / "checkpoint-7")
    keeper.save(state(7), 7)
    assert restored(keeper) == 7
    milepost.save(state(8), tmp_path / "checkpoint-8")
    shutil.copytree(tmp_path / "checkpoint-8", tmp_path / "step_8")
    for call in (lambda: keeper.restore(state()), lambda: keeper.open(8), lambda: keeper.remove(8)):
        with pytest.raises(InvalidRequest, match=r"'checkpoint-8', 'step_8'"):
            call()
    assert restored(keeper, step=7) == 7


def test_ranks_restore_the_folder_that_the_coordinator_chose():
    store = MemoryStore()
    milepost.save(state(3), Within(store, "checkpoint-3"))

    def work(comm):
        with Checkpointer(store, also_read=["checkpoint-{step}"], process_group=comm) as keeper:
            return restored(keeper), restored(keeper, allow_missing=True)

    assert run_ranks(2, work) == [(3, 3)] * 2


def test_generation_is_no_place_for_steps(tmp_path):
    with Checkpointer(tmp_path) as keeper:
        keeper.save({"x": 1}, 3)
    with pytest.raises(InvalidRequest, match="a generation belongs to one checkpoint"):
        Checkpointer(milepost.store.AtGeneration(tmp_path, 1))
    with pytest.raises(InvalidRequest, match="a generation is a whole number"):
        milepost.store.AtGeneration(tmp_path, "1")


@pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
def test_best_step_stays_where_torch_saved_into_its_folder(tmp_path):
    def keeper():
        return Checkpointer(tmp_path, keep_last=1, keep_best=1, best="loss")

    for step, loss in ((1, 0.1), (2, 0.5)):
        keeper().save({"x": torch.full((2,), loss)}, step, metrics={"loss": loss})
    folder = tmp_path / "step-0000000001"
    torch_dcp.save({"x": torch.ones(2)}, checkpoint_id=folder, no_dist=True)
    assert keeper().best() == 1
    keeper().save({"x": torch.zeros(2)}, 3, metrics={"loss": 0.7})
    assert keeper().steps() == [1, 3]
    assert milepost.open(milepost.store.AtGeneration(folder, 1))["x"][0] == torch.tensor(0.1)
    with pytest.raises(milepost.AmbiguousCheckpoint):
        keeper().restore({"x": torch.zeros(2)}, 1)
