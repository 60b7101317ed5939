"""`async_save` and what it refuses; planners and writers in the background."""

import pytest
import torch
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as TorchSavePlanner

import milepost
from tests.background.saves import TIMEOUT_S, FailingStore, come_to, content, every_form, files_in, other_leaves, spoil

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


@pytest.mark.slow
@pytest.mark.parametrize("background", ["thread", "process"])
def test_the_functions_keep_one_saver_until_it_is_closed(tmp_path, background):
    state = {"t": torch.ones(1000)}
    milepost.prewarm(state, background=background)
    pending = milepost.async_save(state, tmp_path / "a", background=background)
    state["t"].zero_()
    again = milepost.async_save(state, tmp_path / "b", background=background)
    assert pending.done()
    milepost.close_async()
    assert again.done()
    assert milepost.open(tmp_path / "a")["t"].read().sum() == 1000
    milepost.close_async()
    milepost.async_save(state, FailingStore(tmp_path / "c", "write"))
    with pytest.raises(OSError, match="No space left"):
        milepost.close_async()
    milepost.close_async()
    milepost.async_save(state, tmp_path / "c").result(TIMEOUT_S)
    milepost.close_async()


def test_what_cannot_be_is_refused_at_once(saver, tmp_path):
    state = {"t": torch.ones(2)}
    wrong = {
        "background": lambda: milepost.AsyncSaver(background="fork"),
        "stage": lambda: milepost.AsyncSaver(stage="gpu"),
        "when_busy": lambda: milepost.AsyncSaver(when_busy="queue"),
        "staging_bytes": lambda: milepost.AsyncSaver(staging_bytes=-1),
        "stage is one of": lambda: saver.save(state, tmp_path, stage="later"),
        "say where": lambda: saver.save(state),
        "say where: a path": lambda: saver.save(state, planner=milepost.planning.DefaultSavePlanner()),
        "wait, nonsense": lambda: saver.save(state, tmp_path, nonsense=1, wait=2),
        "on_difference": lambda: saver.save(state, tmp_path, on_difference="ignore"),
        "host_memory_bytes": lambda: saver.save(state, tmp_path, host_memory_bytes=1),
    }
    for text, call in wrong.items():
        with pytest.raises(milepost.InvalidRequest) as raised:
            call()
        assert ("nonsense" if "nonsense" in text else text) in str(raised.value)
    if saver._engine._background == "process":
        with pytest.raises(milepost.InvalidRequest, match=r'MemoryStore belongs to this one.*background="thread"'):
            saver.save(state, milepost.store.MemoryStore())
    assert not files_in(tmp_path)
    milepost.save(state, tmp_path)
    refused = saver.save(state, tmp_path, overwrite=False)
    with pytest.raises(milepost.InvalidRequest, match="already"):
        refused.result(TIMEOUT_S)


class SpellingPlanner(milepost.planning.DefaultSavePlanner):
    """One of the user's own, that plans when a gate is open."""

    gate = None

    def create_local_plan(self):
        come_to(self.gate)
        return super().create_local_plan()


class TorchPlanner(TorchSavePlanner):
    gate = None

    def create_local_plan(self):
        come_to(self.gate)
        return super().create_local_plan()


LAZY = [
    milepost.planning.DefaultSavePlanner,
    None,
    SpellingPlanner,  # gets a copy by torch's stager, which forgets that a tensor is a conjugate or negative
]


@pytest.mark.parametrize("kind", LAZY)
def test_planners_save_conjugates_and_negatives_with_their_sign(tmp_path, kind):
    whole = torch.randn(3, 4, dtype=torch.complex64)
    state = {"conj": whole.conj(), "neg": whole.conj().imag}
    planner = kind and kind()
    (tmp_path / "gate").touch()
    SpellingPlanner.gate = tmp_path / "gate"
    with milepost.AsyncSaver() as saver:
        saver.save(state, tmp_path / "it", planner=planner).result(TIMEOUT_S)
    with milepost.open(tmp_path / "it") as checkpoint:
        for key, tensor in state.items():
            assert torch.equal(checkpoint[key].read(), tensor.resolve_conj().resolve_neg()), key


@pytest.mark.parametrize("kind", [milepost.planning.DefaultSavePlanner, SpellingPlanner, TorchPlanner, None])
def test_planners_and_writers_save_the_state_at_the_call(saver, tmp_path, kind):
    forms = {
        f"{a} {b}": tensor
        for a, of in every_form().items()
        if isinstance(of, dict)
        for b, tensor in of.items()
        if not tensor.is_conj() and not tensor.is_neg()
    }
    leaves = {k: v for k, v in other_leaves().items() if k not in ("private", "sharded", "numpy")}
    state = {"forms": forms, **leaves, "m": torch.nn.Linear(3, 3)}
    planner = kind and kind()
    gate = tmp_path / "gate"
    if isinstance(planner, (SpellingPlanner, TorchPlanner)):
        planner.gate = gate
        gate.touch()
        milepost.save(state, tmp_path / "now", planner=planner)
        gate.unlink()
    else:
        milepost.save(state, tmp_path / "now")
    writer = milepost.planning.CheckpointWriter(tmp_path / "later")
    pending = (
        saver.save(state, storage_writer=writer)
        if planner is None
        else saver.save(state, tmp_path / "later", planner=planner)
    )
    module = state.pop("m")
    spoil(state)
    with torch.no_grad():
        module.weight.fill_(0)
    gate.touch()
    receipt = pending.result(TIMEOUT_S)
    assert content(tmp_path / "later") == content(tmp_path / "now")
    assert planner is not None or writer.generation == receipt.generation == 1
