"""`transformers.Trainer` with Milepost's checkpoints, on real ranks and in one process."""

import json
import shutil

import pytest
import transformers

import milepost
from tests.integrations.killing import die_in_the_next_commit
from tests.integrations.trainers import StopAt, losses, make
from tests.ranks import spawn, spawn_outcomes

KINDS = ("plain", "fsdp1", "fsdp2")


def steps(folder):
    return sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))


def trains_and_is_killed(rank, folder):
    found = {}
    for kind in KINDS:
        trainer = make(folder / f"{kind}-whole", kind)
        trainer.train()
        found[kind] = losses(trainer)
    if rank == 0:
        (folder / "found.json").write_text(json.dumps(found))
    for kind in KINDS:
        trainer = make(folder / kind, kind)
        trainer.add_callback(StopAt(5))
        with pytest.raises(KeyboardInterrupt):
            trainer.train()
    trainer = make(folder / KINDS[-1], KINDS[-1])
    trainer.add_callback(AtStep(4, lambda: die_in_the_next_commit(rank, folder)))
    trainer.train(resume_from_checkpoint=True)


class AtStep(transformers.TrainerCallback):
    def __init__(self, step, call):
        self.step, self.call = step, call

    def on_step_begin(self, args, state, control, **kwargs):
        if state.global_step == self.step:
            self.call()


def goes_on(rank, folder, name):
    found = {}
    for kind in KINDS:
        trainer = make(folder / name / kind, kind)
        trainer.train(resume_from_checkpoint=True)
        found[kind] = losses(trainer)
    return found


@pytest.mark.timeout(600)
def test_job_is_killed_in_a_save_and_goes_on_with_three_ranks(tmp_path):
    assert spawn_outcomes(2, trains_and_is_killed, tmp_path) == [None, None]
    killed = tmp_path / KINDS[-1] / "checkpoint-6"
    assert list(killed.rglob("*.safetensors"))  # the files are there, and they are no checkpoint
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(killed)
    for world in (2, 3):
        for kind in KINDS:
            shutil.copytree(tmp_path / kind, tmp_path / str(world) / kind)
    expected = json.loads((tmp_path / "found.json").read_text())
    assert spawn(2, goes_on, tmp_path, "2") == [expected] * 2  # to the last bit
    for found in spawn(3, goes_on, tmp_path, "3"):
        for kind in KINDS:
            assert found[kind] == pytest.approx(expected[kind], rel=1e-4)
    assert steps(tmp_path / "3" / "fsdp2") == [6, 8]


def test_interrupted_training_goes_on_exactly(tmp_path):
    whole = make(tmp_path / "whole", drop=0.1)
    whole.train()
    trainer = make(tmp_path / "cut", drop=0.1, made_with={"async_saves": True})
    trainer.add_callback(StopAt(7))
    with pytest.raises(KeyboardInterrupt):
        trainer.train()
    assert steps(tmp_path / "cut") == [4, 6]
    assert [path.name for path in (tmp_path / "cut" / "checkpoint-6").glob("*.*")] == ["manifest-00000001.json"]
    again = make(tmp_path / "cut", drop=0.1, made_with={"async_saves": True})
    again.train(resume_from_checkpoint=True)
    assert losses(again) == losses(whole)
    assert steps(tmp_path / "cut") == [6, 8]
    other = make(tmp_path / "other", drop=0.1)
    other.train(resume_from_checkpoint=str(tmp_path / "cut" / "checkpoint-6"))
    assert losses(other) == losses(whole)


def test_best_model_is_kept_and_loaded(tmp_path):
    trainer = make(
        tmp_path,
        eval_strategy="steps",
        eval_steps=2,
        load_best_model_at_end=True,
        metric_for_best_model="eval_loss",
        greater_is_better=True,  # so that an early one is the best
        save_total_limit=1,
    )
    trainer.train()
    best = max((entry["eval_loss"], entry["step"]) for entry in trainer.state.log_history if "eval_loss" in entry)
    assert steps(tmp_path) == sorted({best[1], 8})
    assert trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best[1]}")
    assert trainer.evaluate()["eval_loss"] == pytest.approx(best[0])
    trainer.save_model(str(tmp_path / "export"))
    loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path / "export")
    assert loaded.lm_head.weight.equal(trainer.model.lm_head.weight)


def test_best_model_is_that_of_this_training(tmp_path, caplog):
    """An earlier training in the folder left steps with higher numbers, and a best among them."""

    def trained(scores, **arguments):
        made_with = {"compute_metrics": lambda _: {"score": scores.pop(0)}}
        evaluated = {"eval_strategy": "steps", "eval_steps": 2, "metric_for_best_model": "score"}
        trainer = make(
            tmp_path, made_with=made_with, load_best_model_at_end=True, save_total_limit=1, **evaluated, **arguments
        )
        trainer.train()
        return trainer

    trained([1, 2, 3, 4])
    assert "starts anew" not in caplog.text
    trainer = trained([3, 2, 1], max_steps=6, learning_rate=0.02)
    assert f"starts anew, and {tmp_path / 'checkpoint-8'} is there" in caplog.text
    assert trainer.state.best_model_checkpoint == str(tmp_path / "checkpoint-2")
    with milepost.open(tmp_path / "checkpoint-2") as best:
        assert best["model.transformer.wte.weight"].read().equal(trainer.model.transformer.wte.weight)


def test_checkpoints_of_the_trainer_itself_are_resumed(tmp_path):
    whole = make(tmp_path / "whole", make_trainer=transformers.Trainer)
    whole.train()
    old = make(tmp_path / "run", make_trainer=transformers.Trainer)
    old.add_callback(StopAt(5))
    with pytest.raises(KeyboardInterrupt):
        old.train()
    (tmp_path / "run" / "checkpoint-6").mkdir()  # a save that did not end
    trainer = make(tmp_path / "run")
    trainer.train(resume_from_checkpoint=True)
    assert losses(trainer) == losses(whole)


def test_damaged_checkpoint_is_passed_over(tmp_path, caplog):
    whole = make(tmp_path)
    whole.train()
    for path in (tmp_path / "checkpoint-8").rglob("*.safetensors"):
        path.write_bytes(b"damaged")
    again = make(tmp_path)
    again.train(resume_from_checkpoint=True)
    assert f"skipping {tmp_path / 'checkpoint-8'}: " in caplog.text
    assert losses(again) == losses(whole)
    assert milepost.open(tmp_path / "checkpoint-8").verify().ok


def test_nothing_to_resume_is_said(tmp_path):
    (tmp_path / "checkpoint-6").mkdir(parents=True)
    with pytest.raises(ValueError, match="No valid checkpoint"):
        make(tmp_path).train(resume_from_checkpoint=True)


def test_model_alone_is_saved_and_resumed(tmp_path):
    make(tmp_path, save_only_model=True).train()
    assert not any(key.startswith("optimizer") for key in milepost.open(tmp_path / "checkpoint-8"))
    trainer = make(tmp_path, save_only_model=True, max_steps=9)
    trainer.train(resume_from_checkpoint=True)
    assert trainer.state.global_step == 9


def test_uploads_of_each_checkpoint_are_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(transformers.Trainer, "init_hf_repo", lambda self, *args, **kwargs: None)
    with pytest.raises(milepost.InvalidRequest, match="hub_strategy"):
        make(tmp_path, push_to_hub=True, hub_strategy="every_save")
