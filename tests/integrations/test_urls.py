"""Frameworks with the URL of an object store in place of a folder: they work, or say at the start that they do not."""

import os
import re
import subprocess
import sys
from importlib.util import find_spec

import pytest
import torch

import milepost
from tests.urls import below, upload


@pytest.fixture
def url(seaweed):
    with seaweed.place() as url:
        yield url


@pytest.fixture
def plain_url(seaweed, url, monkeypatch):
    """The same place without settings, for frameworks that put names behind it."""
    monkeypatch.setenv("AWS_ENDPOINT_URL", seaweed.endpoint)
    return url.partition("?")[0]


def fit(pl, url, epochs, io, **options):
    """Train a line with Lightning. Gives the module, and how many steps it took."""

    class Line(pl.LightningModule):
        steps = 0

        def __init__(self, width=4):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Linear(2, width)

        def training_step(self, batch, index):
            self.steps += 1
            loss = self.net(batch).square().mean()
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    module = Line()
    keep = pl.callbacks.ModelCheckpoint(url, monitor="loss", save_top_k=2, save_last=True, filename="{step}")
    quiet = {"logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    trainer = pl.Trainer(accelerator="cpu", devices=1, plugins=[io], callbacks=[keep], max_epochs=epochs, **quiet)
    trainer.fit(module, torch.utils.data.DataLoader(torch.arange(16.0).view(8, 2), batch_size=4), **options)
    return module


def test_lightning_keeps_the_best_and_goes_on(plain_url):
    pytest.importorskip("s3fs", reason="Lightning itself looks there by fsspec")
    pl = pytest.importorskip("lightning.pytorch")
    from milepost.integrations import lightning as ours

    module = fit(pl, plain_url, 4, ours.MilepostCheckpointIO(background="thread"))
    kept = {name.split("/")[0] for name in milepost.store.store_at(plain_url).list("") if name.endswith(".json")}
    assert len(kept) == 3, "the best two, and the last"
    newest = ours.newest_checkpoint(plain_url)
    assert newest in [f"{plain_url}/{name}" for name in kept]
    again = ours.load_from_checkpoint(type(module), newest)
    assert torch.equal(again.net.weight, module.net.weight)
    resumed = fit(pl, plain_url, 5, ours.MilepostCheckpointIO(), ckpt_path=newest)
    assert resumed.steps == 2, "one epoch more"


def test_accelerate_saves_states_and_steps(url, tmp_path, monkeypatch):
    pytest.importorskip("accelerate")
    from milepost.integrations.accelerate import install
    from tests.integrations.accelerators import Job, one_process

    monkeypatch.chdir(tmp_path)
    with one_process():
        job = Job("plain", url, drop=0.3, automatic_checkpoint_naming=True, total_limit=2)
        with install(job.accelerator) as installed:
            job.train(0, 6, at_step=lambda step: step % 2 or job.accelerator.save_state())
            assert installed.checkpointer.steps() == [1, 2]
        expected = job.train(6, 8)
        again = Job("plain", url, drop=0.3, seed=5, automatic_checkpoint_naming=True, total_limit=2)
        with install(again.accelerator):
            again.accelerator.load_state()
            assert again.train(6, 8) == expected
            again.accelerator.load_state(below(url, "checkpoints/checkpoint_1"))
    assert not os.listdir(tmp_path), "no folder named s3:"


def test_transformers_refuses_a_url_before_training(plain_url, tmp_path, monkeypatch):
    pytest.importorskip("transformers")
    from tests.integrations.trainers import StopAt, losses, make

    monkeypatch.chdir(tmp_path)
    with pytest.raises(milepost.InvalidRequest, match=r"output_dir='s3://.*it is a folder"):
        make(plain_url, "plain")
    assert "s3:" not in os.listdir(tmp_path)
    whole = make(tmp_path / "whole", "plain")
    whole.train()
    first = make(tmp_path / "first", "plain")
    first.add_callback(StopAt(5))
    with pytest.raises(KeyboardInterrupt):
        first.train()
    upload(tmp_path / "first" / "checkpoint-4", plain_url)
    second = make(tmp_path / "second", "plain")
    second.train(resume_from_checkpoint=plain_url)
    assert losses(second)[-2:] == losses(whole)[-2:]


def test_torchtitan_saves_steps_and_refuses_exports_at_once(plain_url, tmp_path):
    if find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed")
    job = f"""
import examples.torchtitan_train
from tests.integrations.titan import trainer_for
from milepost.integrations.torchtitan import CheckpointManager
for steps in (4, 6):
    config = CheckpointManager.Config(
        enable=True, interval=2, folder={plain_url!r}, keep_latest_k=2, last_save_model_only=False, async_mode="async"
    )
    trainer = trainer_for({str(tmp_path)!r}, steps, config)
    trainer.train()
    trainer.close()
    print("trained", trainer.step, sorted(trainer.losses))
try:
    trainer_for({str(tmp_path)!r}, 6, CheckpointManager.Config(enable=True, folder={plain_url!r}, last_save_in_hf=True))
except Exception as error:
    print("refused", error)
"""
    environment = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
    ran = subprocess.run(
        [sys.executable, "-c", job], env=os.environ | environment, text=True, capture_output=True, timeout=200
    )
    assert "trained 4 [1, 2, 3, 4]" in ran.stdout, ran.stderr[-3000:]
    assert "trained 6 [5, 6]" in ran.stdout
    assert re.search("refused .*last_save_in_hf", ran.stdout)
    assert milepost.Checkpointer(plain_url, names="step-{step}").steps() == [4, 6]
