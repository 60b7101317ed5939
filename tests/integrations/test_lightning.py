"""Lightning in one process: what `ModelCheckpoint` keeps, async saves and their errors, and what others wrote."""

import logging
import os
import pickle
import threading
from pathlib import Path

import pytest
import torch
from torch.utils.data import DataLoader, TensorDataset

import milepost
from milepost.store.local import LocalWriter

pl = pytest.importorskip("lightning.pytorch")
from milepost.integrations import lightning as ours  # noqa: E402


def line_of(package):
    class Line(package.LightningModule):
        def __init__(self, width=4, extra=None):
            super().__init__()
            self.save_hyperparameters()
            self.net = torch.nn.Sequential(torch.nn.Linear(2, width), torch.nn.Linear(width, 1))
            self.losses = []

        def training_step(self, batch, index):
            x, y = batch
            loss = (self.net(x) - y).square().mean()
            self.losses.append(loss.item())
            self.log("loss", loss)
            return loss

        def configure_optimizers(self):
            return torch.optim.AdamW(self.parameters(), lr=0.05)

    return Line


Line = line_of(pl)


def data():
    x = torch.arange(16.0).view(8, 2) / 16
    return DataLoader(TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)


def trainer(folder, epochs, io=None, package=pl, **keep):
    keep = {"monitor": "loss", "save_top_k": 2, "save_last": True, "filename": "{step}", **keep}
    return package.Trainer(
        accelerator="cpu",
        devices=1,
        plugins=[io] if io is not None else [],
        callbacks=[package.callbacks.ModelCheckpoint(dirpath=folder, **keep)],
        max_epochs=epochs,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def line(**hyper_parameters):
    torch.manual_seed(1)
    return Line(**hyper_parameters)


@pytest.fixture(scope="module")
def losses(tmp_path_factory):
    """The losses of a run of four epochs that nothing interrupts."""
    whole = line()
    trainer(tmp_path_factory.mktemp("whole"), 4, ours.MilepostCheckpointIO()).fit(whole, data())
    return whole.losses


@pytest.mark.parametrize("background", [None, "thread", "process"])
def test_model_checkpoint_keeps_the_best_and_the_last(tmp_path, losses, background):
    first = trainer(tmp_path, 3, ours.MilepostCheckpointIO(background=background))
    first.fit(line(), data())
    assert sorted(os.listdir(tmp_path)) == ["last.ckpt", "step=4.ckpt", "step=6.ckpt"]
    assert all(milepost.open(path).verify().ok for path in tmp_path.iterdir())
    assert ours.newest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")
    again = line()
    trainer(tmp_path, 4, ours.MilepostCheckpointIO()).fit(again, data(), ckpt_path="last")
    assert again.losses == losses[6:]
    best = first.checkpoint_callback.best_model_path
    made = ours.load_from_checkpoint(Line, best, extra="new")
    assert (made.hparams.width, made.hparams.extra) == (4, "new")
    saved = milepost.open(best).state()["state_dict"]
    assert all(torch.equal(saved[key], tensor) for key, tensor in made.state_dict().items())


def test_last_may_be_a_link(tmp_path, losses):
    io = ours.MilepostCheckpointIO()
    trainer(tmp_path, 2, io, save_last="link").fit(line(), data())
    last = tmp_path / "last.ckpt"
    assert last.is_symlink()
    again = line()
    trainer(tmp_path, 4, ours.MilepostCheckpointIO(), save_last="link").fit(again, data(), ckpt_path="last")
    assert again.losses == losses[4:]
    newest = last.resolve()
    io.remove_checkpoint(last)
    assert not last.exists()
    assert milepost.open(newest)["global_step"] == 8


class Gate:
    """Holds every write back until it is opened, or lets it fail."""

    def __init__(self, monkeypatch):
        self.open, self.fails, write = threading.Event(), False, LocalWriter.write

        def waiting(writer, *args):
            assert self.open.wait(60)
            if self.fails:
                raise OSError(28, "No space left on device")
            write(writer, *args)

        monkeypatch.setattr(LocalWriter, "write", waiting)


def test_removal_waits_for_the_save_that_replaces(tmp_path, monkeypatch):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    io = ours.MilepostCheckpointIO(background="thread")
    io.save_checkpoint({"w": torch.ones(3), "global_step": 1}, old)
    io.teardown()
    gate = Gate(monkeypatch)
    io.save_checkpoint({"w": torch.ones(3), "global_step": 2}, new)
    io.remove_checkpoint(old.as_uri())
    assert ours.newest_checkpoint(tmp_path) == str(old), "the new one is not there yet, so the old one is"
    gate.open.set()
    io.teardown()
    assert [path.name for path in tmp_path.iterdir()] == ["new.ckpt"]


@pytest.mark.parametrize("early", [False, True])
def test_removal_does_not_happen_if_the_save_fails(tmp_path, monkeypatch, early):
    old, new = tmp_path / "old.ckpt", tmp_path / "new.ckpt"
    io = ours.MilepostCheckpointIO(background="thread")
    io.save_checkpoint({"w": torch.ones(3), "global_step": 1}, old)
    io.teardown()
    gate = Gate(monkeypatch)
    gate.fails = True
    if early:
        gate.open.set()
    io.save_checkpoint({"w": torch.ones(3), "global_step": 2}, new)
    if early:
        io._saves.join()  # it has failed before the removal is asked for
    io.remove_checkpoint(old)
    gate.open.set()
    with pytest.raises(milepost.StorageError, match="No space left"):
        io.save_checkpoint({"w": torch.ones(3)}, new)
    assert ours.newest_checkpoint(tmp_path) == str(old)
    gate.fails = False
    io.save_checkpoint({"w": torch.ones(3), "global_step": 2}, new)
    io.teardown()
    assert ours.newest_checkpoint(tmp_path) == str(new), "the same call works afterwards"


def test_the_end_of_fit_raises_the_error_of_the_last_save(tmp_path, monkeypatch):
    gate = Gate(monkeypatch)
    gate.fails = True
    gate.open.set()
    try:
        raise ValueError("a program may train while it handles an error")
    except ValueError:
        with pytest.raises(milepost.StorageError, match="No space left"):
            trainer(tmp_path, 1, ours.MilepostCheckpointIO(background="thread"), save_last=False).fit(line(), data())


def test_an_error_of_training_is_not_hidden_by_that_of_a_save(tmp_path, monkeypatch, caplog):
    class Fails(Line):
        def on_train_epoch_start(self):
            if self.current_epoch:
                raise ZeroDivisionError

    gate = Gate(monkeypatch)
    gate.fails = True
    gate.open.set()
    with pytest.raises(ZeroDivisionError):
        trainer(tmp_path, 2, ours.MilepostCheckpointIO(background="thread"), save_last=False).fit(Fails(), data())
    assert "No space left on device" in caplog.text


def test_what_cannot_be_kept_is_refused_by_its_key(tmp_path):
    with pytest.raises(milepost.InvalidState, match=r"hyper_parameters\.extra") as caught:
        trainer(tmp_path, 1, ours.MilepostCheckpointIO()).fit(line(extra=object()), data())
    assert "save_hyperparameters(ignore=[...])" in caught.value.__notes__[0]
    with pytest.raises(milepost.InvalidRequest, match="no option overwite"):
        ours.MilepostCheckpointIO(save_options={"overwite": False})
    with pytest.raises(milepost.InvalidRequest, match="'thread', 'process'"):
        ours.MilepostCheckpointIO(background="tread")


def test_a_run_of_lightning_goes_on_with_milepost(tmp_path, losses, caplog):
    trainer(tmp_path, 2).fit(line(), data())
    theirs = torch.load(tmp_path / "last.ckpt", weights_only=True)["state_dict"]
    made = ours.load_from_checkpoint(Line, tmp_path / "last.ckpt")
    assert all(torch.equal(theirs[key], tensor) for key, tensor in made.state_dict().items())
    again = line()
    with caplog.at_level(logging.WARNING, logger="milepost"):
        trainer(tmp_path, 4, ours.MilepostCheckpointIO()).fit(again, data(), ckpt_path="last")
    assert again.losses == losses[4:]
    assert (tmp_path / "last.before-milepost.ckpt").is_file(), "nothing that Lightning wrote is lost"
    assert (tmp_path / "step=4.ckpt").is_file()
    assert "step=2.ckpt is not a checkpoint of Milepost, so it is not removed" in caplog.text
    assert ours.newest_checkpoint(tmp_path) == str(tmp_path / "last.ckpt")


class Attack:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return Path.touch, (self.path,)


def test_pickles_of_others_are_not_run(tmp_path):
    mark = tmp_path / "mark"
    torch.save({"state_dict": {}, "global_step": 1, "hyper_parameters": {"x": Attack(mark)}}, tmp_path / "evil.ckpt")
    assert ours.newest_checkpoint(tmp_path) == str(tmp_path / "evil.ckpt")
    with pytest.raises(milepost.UnsupportedFormat, match="hyper_parameters"):
        ours.MilepostCheckpointIO().load_checkpoint(tmp_path / "evil.ckpt")
    assert not mark.exists()


def test_what_a_killed_save_left_is_named_and_passed_over(tmp_path):
    (tmp_path / "last.ckpt" / "data").mkdir(parents=True)
    assert ours.newest_checkpoint(tmp_path) is None
    assert ours.newest_checkpoint(tmp_path / "nowhere") is None
    with pytest.raises(milepost.CheckpointNotFound) as caught:
        trainer(tmp_path, 1, ours.MilepostCheckpointIO()).fit(line(), data(), ckpt_path="last")
    assert "newest_checkpoint" in caught.value.__notes__[0]


def test_lightnings_own_async_plugin_may_stand_around_it(tmp_path, losses):
    io = pl.plugins.io.AsyncCheckpointIO(ours.MilepostCheckpointIO())
    trainer(tmp_path, 2, io).fit(line(), data())
    again = line()
    trainer(tmp_path, 4, ours.MilepostCheckpointIO()).fit(again, data(), ckpt_path=ours.newest_checkpoint(tmp_path))
    assert again.losses == losses[4:]


def test_the_plugin_travels_to_processes_that_are_spawned():
    copied = pickle.loads(pickle.dumps(ours.MilepostCheckpointIO(background="process", save_options={"types": []})))
    assert copied._saves.options == {"types": []}


def test_the_other_package_has_the_same(tmp_path, losses):
    other = pytest.importorskip("pytorch_lightning")
    from milepost.integrations import pytorch_lightning as for_other

    assert for_other.__all__ == ours.__all__
    assert issubclass(for_other.MilepostFSDPStrategy, other.strategies.FSDPStrategy)
    assert issubclass(for_other.MilepostModelParallelStrategy, other.strategies.ModelParallelStrategy)
    torch.manual_seed(1)
    kind = line_of(other)
    trainer(tmp_path, 2, for_other.MilepostCheckpointIO(), other).fit(kind(), data())
    again = kind()
    trainer(tmp_path, 4, for_other.MilepostCheckpointIO(), other).fit(again, data(), ckpt_path="last")
    assert again.losses == losses[4:]
    assert for_other.load_from_checkpoint(kind, tmp_path / "last.ckpt").hparams.width == 4
