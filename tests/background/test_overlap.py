"""Copies that overlap with training: the optimizer waits for its own tensors, and for nothing else."""

import threading

import numpy as np
import pytest
import torch

import milepost
from milepost.background.staging import snapshot
from milepost.background.staging.copying import Copier
from tests.background.saves import TIMEOUT_S, GatedStore, content, one_step, saved_now, spoil, trained

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


@pytest.fixture
def slow_copies(monkeypatch):
    """Copying starts when this is set; tells when it was asked for."""
    go = threading.Event()
    copy = Copier.copy

    def slow(self, copies, moment, check):
        if copies:
            assert go.wait(TIMEOUT_S)
        copy(self, copies, moment, check)

    monkeypatch.setattr(Copier, "copy", slow)
    yield go
    go.set()


def test_the_optimizer_waits_for_the_copy_and_only_until_then(tmp_path, slow_copies):
    model, optimizer, scheduler = trained()
    state = {"params": dict(model.named_parameters()), "optim": dict(enumerate(optimizer.state.values()))}
    expected = saved_now(state, tmp_path / "now")
    store = GatedStore(tmp_path / "later", tmp_path / "gate")
    with milepost.AsyncSaver(stage="overlap") as saver:
        pending = saver.save(state, store, optimizer=[optimizer])
        assert not pending.staged()
        assert repr(pending) == f"PendingSave({str(store.root)!r}, staging)"
        before = model.part.detach().clone()
        with pytest.raises(TimeoutError, match="not copied yet"):
            pending.wait_staged(0.05)
        stepping = threading.Thread(target=one_step, args=(model, optimizer, scheduler))
        stepping.start()
        stepping.join(0.3)
        assert stepping.is_alive(), "forward and backward ran; the step waits"
        assert torch.equal(model.part, before)
        slow_copies.set()
        stepping.join(TIMEOUT_S)
        assert not torch.equal(model.part, before)
        assert pending.staged()
        assert not pending.done(), "the step did not wait for the writing"
        store.gate.touch()
        pending.result(TIMEOUT_S)
        saver.save(state, tmp_path / "again", optimizer=optimizer).result(TIMEOUT_S)
        assert len(optimizer._optimizer_step_pre_hooks) == 1
    assert not optimizer._optimizer_step_pre_hooks, "removed"
    assert content(tmp_path / "later") == expected


@pytest.mark.slow
@pytest.mark.parametrize("background", ["thread", "process"])
def test_the_optimizer_does_not_wait_for_what_was_copied_on_the_gpu(tmp_path, slow_copies, monkeypatch, background):
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda _: True)  # as if this were one
    monkeypatch.setattr(snapshot, "_chosen", lambda *_: "device")
    model, optimizer, scheduler = trained()
    state = {"model": model, "optim": optimizer, "ema": torch.ones(5)}
    expected = saved_now(state, tmp_path / "now")
    with milepost.AsyncSaver(background=background) as saver:
        pending = saver.save(state, tmp_path / "later", optimizer=optimizer)
        stepping = threading.Thread(target=one_step, args=(model, optimizer, scheduler))
        stepping.start()
        stepping.join(TIMEOUT_S)
        assert not stepping.is_alive()
        assert not pending.staged()
        state["ema"].zero_()
        slow_copies.set()
        pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == expected


def test_only_what_the_optimizer_owns_is_copied_after_the_call(tmp_path, monkeypatch):
    """The rest may change at once: so it is copied before the call returns, even if the optimizer's takes long."""
    model, optimizer, _ = trained()
    optimizer.param_groups[0]["lr"] = rate = torch.tensor(0.25)
    ema = torch.ones(5)
    state = {"model": model, "optim": optimizer, "ema": ema, "tied": ema.detach(), "empty": ema[:0], "np": np.ones(3)}
    expected = saved_now(state, tmp_path / "now")
    go, calls = threading.Event(), []
    copy = Copier.copy

    def slow(self, copies, moment, check):
        calls.append(len(copies))
        if len(calls) == 2:
            assert go.wait(TIMEOUT_S)
        copy(self, copies, moment, check)

    monkeypatch.setattr(Copier, "copy", slow)
    with milepost.AsyncSaver(stage="overlap") as saver:
        pending = saver.save(state, tmp_path / "later", optimizer=optimizer)
        assert not pending.staged()
        spoil([state["ema"], state["np"], rate, list(model.buffers())])
        state["ema"].add_(1)  # a change that torch counts: it must not fail the save, for it was copied before
        go.set()
        pending.result(TIMEOUT_S)
    now, later = calls
    assert later == 5 + 5 * 3, "the parameters, of which two are one, and what AdamW keeps for each"
    assert now > 0
    assert content(tmp_path / "later") == expected


def test_tied_tensors_may_change_once_one_is_copied_on_the_device(tmp_path, monkeypatch):
    """They are copied there once, under one of their names. Here the host's memory stands for that of the device."""
    monkeypatch.setattr(snapshot, "_is_on_gpu", lambda _: True)
    monkeypatch.setattr(snapshot, "_chosen", lambda *_: "device")
    monkeypatch.setattr(snapshot, "clone_on_devices", lambda tensors: [tensor.clone() for tensor in tensors])
    weight, go, copy = torch.ones(5), threading.Event(), Copier.copy
    monkeypatch.setattr(Copier, "copy", lambda *args: go.wait(TIMEOUT_S) and copy(*args))
    with milepost.AsyncSaver() as saver:
        pending = saver.save({"up": weight.detach(), "down": weight.detach()}, tmp_path)
        weight.fill_(7.0)
        go.set()
        pending.result(TIMEOUT_S)
    assert milepost.open(tmp_path)["down"].read().tolist() == [1.0] * 5
