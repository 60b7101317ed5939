"""Real processes: a rank raises, is late, or is killed in each step of a save and a load. The others name it."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist

import milepost
from milepost.comm.distributed import ranks_of
from milepost.testing import CountingStore, TroubledComm
from tests.ranks import spawn, spawn_outcomes

WORLD = 3
VICTIM = 1
SAVE = ["starting", "describing the state", "agreeing on the layout", "writing"]
LOAD = ["opening", "matching", "reading", "applying"]


def state(rank, number):
    """Rank 2 holds one tensor more, so that the ranks have something to agree on."""
    mesh = torch.distributed.device_mesh.init_device_mesh("cpu", (WORLD,))
    local = torch.full((2,), float(number))
    cut = torch.distributed.tensor.DTensor.from_local(local, mesh, [torch.distributed.tensor.Shard(0)])
    return {"cut": cut, "n": number, **({"more": torch.ones(1)} if rank == 2 else {})}


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def oversleep():
    time.sleep(3)


def meet_trouble(rank, where, step, kind):
    """Save once in peace, then with trouble on one rank; give what this rank met, and whether all meet again."""
    milepost.save(state(rank, 1), where)
    hook = {"die": die, "late": oversleep}[kind]
    comm = ranks_of(None, 1.0)
    troubled = TroubledComm(comm, {step: hook}) if rank == VICTIM else comm
    began, met = time.monotonic(), ""
    try:
        if step in SAVE:
            milepost.save(state(rank, 2), where, process_group=troubled)
        else:
            milepost.load(state(rank, 0), where, process_group=troubled)
    except milepost.RanksMissing as error:
        met = str(error)
    took = time.monotonic() - began
    if kind == "late":
        time.sleep(max(4 - took, 0))  # until the late one is back
        milepost.save(state(rank, 3), where + "-again")
    return met, took


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["die", "late"])
@pytest.mark.parametrize("step", SAVE + LOAD)
def test_a_rank_that_dies_or_is_late_in_any_step_is_named_by_all_others(tmp_path, step, kind):
    where = str(tmp_path / "step-1")
    outcomes = spawn_outcomes(WORLD, meet_trouble, where, step, kind)
    for rank in (0, 2):
        assert outcomes[rank] is not None, "only the victim dies"
        fine, (met, took) = outcomes[rank]
        assert fine
        # A step in which only the coordinator speaks is left before anyone notices: the next one tells.
        assert f"rank {VICTIM} did not come to" in met, met
        assert took < 4, "no rank waits longer than the deadline and the grace"
    if kind == "die":
        assert outcomes[VICTIM] is None
    else:
        assert "this rank came too late" in outcomes[VICTIM][1][0]
        assert milepost.open(where + "-again")["n"] == 3, "after the failure all meet again"
    assert milepost.open(where)["n"] == 1, "nothing was committed without the rank"


class Broken(CountingStore):
    """Fails where a call's text starts with `word`."""

    def __init__(self, inner, word):
        super().__init__(inner)
        self.word = word

    def before(self, number, call):
        if call.startswith(self.word):
            raise OSError(5, "Input/output error")


class Refusing:
    def state_dict(self):
        raise RuntimeError("no state today")

    def load_state_dict(self, state):
        raise RuntimeError("I do not take this")


def fail_in(rank, where, victim, word):
    place = milepost.store.LocalStore(where)
    milepost.save(state(rank, 1), place)
    broken = Broken(place, word) if rank == victim else place
    target = state(rank, 2)
    if rank == victim and word == "describe":
        target["n"] = Refusing()
    call = milepost.load if word.startswith("reader data") else milepost.save
    with pytest.raises(milepost.CheckpointError) as caught:
        call(target, broken)
    assert list(caught.value.failures) == [victim], caught.value
    assert f"rank {victim}" in str(caught.value)
    if rank == victim:
        assert caught.value.__cause__ is not None
    assert "Traceback" in caught.value.failures[victim].traceback
    milepost.save(state(rank, 4), place)
    return str(caught.value)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("victim", "word"),
    [
        (0, "list"),
        (1, "describe"),
        (2, "writer"),
        (1, "write data"),
        (2, "commit data"),
        (0, "create"),
        (1, "reader data"),
    ],
)
def test_error_reaches_every_rank_and_the_next_save_works(tmp_path, victim, word):
    texts = spawn(WORLD, fail_in, str(tmp_path), victim, word)
    assert len({texts[r] for r in range(WORLD) if r != victim}) == 1
    assert milepost.open(tmp_path)["n"] == 4


def steady(rank, where):
    plans = milepost.Plans()
    for number in range(1, 4):
        milepost.save(state(rank, number), f"{where}/{number}", plans=plans)
    changed = {**state(rank, 4), **({"new": torch.zeros(3)} if rank == 1 else {})}
    milepost.save(changed, f"{where}/4", plans=plans)
    return len(plans)


@pytest.mark.slow
def test_a_rank_that_comes_with_another_structure_is_noticed_and_saved(tmp_path):
    assert spawn(WORLD, steady, str(tmp_path)) == [1, 2, 1]
    for number in range(1, 5):
        with milepost.open(tmp_path / str(number)) as checkpoint:
            assert checkpoint.verify().ok
            assert checkpoint["cut"].read().tolist() == [float(number)] * 2 * WORLD
            assert ("new" in checkpoint) == (number == 4)


@pytest.mark.slow
def test_no_collective_of_a_process_group_is_used(tmp_path):
    assert spawn(WORLD, forbid_collectives, str(tmp_path)) == [1, 1, 1]


def forbid_collectives(rank, where):
    def refuse(*_args, **_kwargs):
        raise AssertionError("a collective was used")

    for name in ("all_gather", "all_gather_object", "broadcast", "broadcast_object_list", "barrier", "all_reduce"):
        setattr(dist, name, refuse)
    milepost.save({"n": 1, "t": torch.ones(4)}, where)
    return milepost.load({"n": 0, "t": torch.zeros(4)}, where)["n"]
