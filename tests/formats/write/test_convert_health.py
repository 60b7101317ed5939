"""What a rule said of a checkpoint, and what was recorded of its numbers, in a conversion of it."""

import logging

import pytest
import torch

import milepost
from milepost.steps.shelf import step_name
from tests.cli.running import milepost as command

NAN = float("nan")


def run_with_a_bad_step(root):
    with milepost.Checkpointer(root, healthy=True, statistics=True) as keeper:
        keeper.save({"m.w": torch.ones(4), "b": torch.zeros(2)}, 1)
        keeper.save({"m.w": torch.tensor([1.0, NAN]), "b": torch.zeros(2)}, 2)
    return root


@pytest.mark.parametrize("in_place", [True, False])
def test_converted_unhealthy_step_is_not_restored(tmp_path, in_place):
    run = run_with_a_bad_step(tmp_path / "run")
    source, target = run / step_name(2), run / step_name(2 if in_place else 3)
    before = milepost.open(source)
    milepost.convert(source, target, overwrite=in_place)
    after = milepost.open(target)
    assert after.health == before.health == milepost.Health(ok=False, reason="1 NaN in 'm.w'")
    assert after.statistics == before.statistics
    state = {"m.w": torch.zeros(4), "b": torch.ones(2)}
    with milepost.Checkpointer(run, healthy=True) as keeper:
        assert keeper.restore(state) == 1
    assert torch.equal(state["m.w"], torch.ones(4))


def test_renamed_tensors_keep_what_was_recorded(tmp_path):
    run = run_with_a_bad_step(tmp_path / "run")
    strip = lambda key: key.removeprefix("m.") if key != "b" else None  # noqa: E731
    milepost.convert(run / step_name(1), tmp_path / "good", rename=strip)
    milepost.convert(run / step_name(2), tmp_path / "part", rename={"m.w": None})
    good, part = milepost.open(tmp_path / "good"), milepost.open(tmp_path / "part")
    assert (list(good.statistics), good.statistics["w"].mean, good.health.ok) == (["w"], 1.0, True)
    assert (list(part.statistics), part.health.ok) == (["b"], False)


@pytest.mark.parametrize("to", ["dcp", "torch", "safetensors"])
def test_format_without_a_verdict_is_told(tmp_path, caplog, to):
    run = run_with_a_bad_step(tmp_path / "run")
    caplog.set_level(logging.WARNING, "milepost")
    caplog.clear()
    milepost.convert(run / step_name(1), tmp_path / "fine", to)
    assert not caplog.records
    milepost.convert(run / step_name(2), tmp_path / "out", to)
    [record] = caplog.records
    assert f"1 NaN in 'm.w'. {tmp_path / 'out'} is of the format {to}, which does not say so" in record.getMessage()
    done = command("convert", run / step_name(2), tmp_path / "again", "--to", to)
    assert done.status == 0
    assert "was unhealthy when it was saved" in done.err
