"""Lightning on real ranks: DDP, FSDP2 and FSDP1 go on after a kill, on another number of ranks, with the same loss."""

import json
import multiprocessing as mp
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

import milepost
from tests.ranks import spawn, spawn_outcomes

JOBS = "tests.integrations.lightning_jobs"
ROOT = Path(__file__).parent.parent.parent
STEP_4 = "step=4.ckpt"


@pytest.fixture(autouse=True, scope="module")
def preloaded():
    """Let the fork server import Lightning once, unless it runs already."""
    mp.set_forkserver_preload(["torch", "torch.distributed.tensor", "milepost.api", "tests.ranks", JOBS])


def on_rank(rank, work, *args, **options):
    from tests.integrations import lightning_jobs

    return getattr(lightning_jobs, work)(rank, *args, **options)


def after(losses, step):
    return {number: pytest.approx(loss, rel=1e-5) for number, loss in losses.items() if number >= step}


@pytest.mark.timeout(600)
def test_losses_go_on_over_other_ranks_and_strategies(tmp_path):
    folders = {kind: str(tmp_path / f"{kind} saved") for kind in ("ddp", "model", "fsdp", "DDP", "MODEL", "FSDP")}
    background = {"ddp": "thread", "model": "thread", "fsdp": None}
    first = {
        kind: ((kind, folder), {"background": background[kind]} if kind in background else {})
        for kind, folder in folders.items()
    }
    whole = spawn(2, on_rank, "train_each", 2, first, timeout_s=300)[0]
    for losses in whole.values():
        assert losses == after(whole["ddp"], 0), "every strategy trains the same"
    resumed = {
        f"{saved} to {kind}": ((kind, str(tmp_path / f"{saved} to {kind}"), os.path.join(folders[saved], STEP_4)), {})
        for kind, saved in (
            ("ddp", "ddp"), ("model", "model"), ("fsdp", "fsdp"), ("model", "ddp"), ("ddp", "model"), ("fsdp", "model"),
            ("model", "DDP"), ("model", "MODEL"), ("ddp", "MODEL"), ("fsdp", "FSDP"),
        )
    }  # fmt: skip
    for losses in spawn(3, on_rank, "train_each", 3, resumed, timeout_s=300):
        assert {name: losses[name] for name in resumed} == dict.fromkeys(resumed, after(whole["ddp"], 4))
    with milepost.open(os.path.join(folders["model"], STEP_4)) as checkpoint:
        state = checkpoint.state()
        assert checkpoint.generation == 1, "one commit"
        assert checkpoint.verify().ok
    assert state["global_step"] == 4
    assert state["hyper_parameters"] == {"width": 12, "lr": 0.05}
    assert {"callbacks", "loops", "lr_schedulers", "optimizer_states", "state_dict"} <= state.keys()
    assert state["average"]["rank"] == 0, "of what is not sharded, rank 0's counts"
    assert torch.equal(state["average"]["first"], state["state_dict"]["first.weight"]), "of shards, those of all"
    size = sum(tensor.square().sum().item() for tensor in state["state_dict"].values())
    step_4 = os.path.join(folders["model"], STEP_4)
    assert spawn(3, on_rank, "evaluate", 3, step_4, timeout_s=300) == pytest.approx([size] * 3, rel=1e-5)
    assert list(state["optimizer_states"][0]["state"]) == list(state["state_dict"]), "by the names of the parameters"


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("kind", "background", "victim"), [("model", None, 1), ("ddp", "thread", 0)])
def test_a_rank_killed_in_a_save_leaves_the_last_whole_one(tmp_path, kind, background, victim):
    from milepost.integrations.lightning_shared.reading import newest_checkpoint

    folder = str(tmp_path / "run")
    outcomes = spawn_outcomes(2, dying_rank, kind, folder, victim, background)
    assert outcomes[victim] is None, "killed"
    assert STEP_4 in os.listdir(folder), "the save had begun"
    newest = newest_checkpoint(folder)
    assert os.path.basename(newest) == "step=2.ckpt"
    [losses, whole] = spawn(3, after_the_kill, kind, folder, newest, timeout_s=300)[0]
    assert losses == after(whole, 2)
    assert os.path.basename(newest_checkpoint(folder)) == "step=6.ckpt"


def dying_rank(rank, kind, folder, victim, background):
    return on_rank(rank, "train_and_die", 2, kind, folder, victim, background=background, save_timeout_s=3)


def after_the_kill(rank, kind, folder, newest):
    resumed = on_rank(rank, "train", 3, kind, folder, newest)
    return resumed, on_rank(rank, "train", 3, kind, f"{folder}-whole")


@pytest.mark.timeout(600)
def test_an_error_in_the_background_stops_the_trainer(tmp_path):
    outcomes = spawn(2, full_disk, str(tmp_path / "run"), timeout_s=300)
    for text, whole, losses in outcomes:
        assert "No space left on device" in text
        assert "rank 1" in text
        assert whole == [], "the save of step 4 was refused, too"
        assert losses == outcomes[0][2]
        assert len(losses) == 6, "the same call works afterwards"


def full_disk(rank, folder):
    return on_rank(rank, "train_with_full_disk", 2, folder, background="thread")


@pytest.mark.timeout(600)
def test_fabric_saves_and_loads_on_other_ranks(tmp_path):
    path = str(tmp_path / "fabric")
    saved = spawn(2, on_rank, "use_fabric", 2, path, False, timeout_s=300)
    loaded = spawn(3, on_rank, "use_fabric", 3, path, True, timeout_s=300)
    assert [loss for loss, _ in loaded] == pytest.approx([saved[0][0]] * 3, rel=1e-5)
    assert [left for _, left in loaded] == [{"name": "two"}] * 3


def odd_optimizers(rank, path, load):
    """Two groups, a frozen parameter, one without a gradient, a second optimizer with another kind of state."""
    from milepost.integrations.lightning_shared import parts, reading

    torch.manual_seed(9 if load else 0)
    model = torch.nn.Sequential()
    for name in ("first", "frozen", "unused", "other"):
        model.add_module(name, torch.nn.Linear(3, 5).requires_grad_(name != "frozen"))
    fully_shard(model)
    named = {name: list(part.parameters()) for name, part in model.named_children()}
    groups = [{"params": named["first"] + named["frozen"]}, {"params": named["unused"], "lr": 0.5}]
    adam = torch.optim.AdamW(groups, amsgrad=True)
    sgd = torch.optim.SGD(named["other"], momentum=0.9)
    keys = [("optimizer_states", 0), ("optimizer_states", 1)]
    if load:
        saved = reading.read_parts(path, reading.Trusted(), reading.trainer_parts)
        owned = {key: (model, optimizer) for key, optimizer in zip(keys, (adam, sgd), strict=True)}
        parts.fill(saved, {("state_dict",): model}, owned, parts.Filling(reading.Trusted()))
    else:
        for parameter in (*named["first"], *named["other"]):
            parameter.grad = parameter.detach() * 2
        for optimizer in (adam, sgd):
            optimizer.step()
        states = [parts.optimizer_state(model, optimizer) for optimizer in (adam, sgd)]
        milepost.save({"state_dict": parts.model_state(model), "optimizer_states": states}, path)
    found = [model.state_dict(), adam.state_dict(), sgd.state_dict()]
    return torch.utils._pytree.tree_map_only(DTensor, DTensor.full_tensor, found)


def test_optimizers_come_back_as_they_were(tmp_path):
    saved, *_ = spawn(2, odd_optimizers, str(tmp_path), False)
    for loaded in spawn(3, odd_optimizers, str(tmp_path), True):
        assert str(loaded) == str(saved)
        torch.testing.assert_close(loaded, saved, rtol=0, atol=0)
    assert sorted(saved[1]["state"]) == [0, 1], "the frozen ones and the unused ones have no state"


@pytest.mark.timeout(600)
def test_the_example_resumes_on_other_ranks(tmp_path):
    first = spawn(2, on_rank, "run_example", 2, str(tmp_path / "run"), 6, timeout_s=300)[0]
    shutil.rmtree(tmp_path / "run" / "step=6.ckpt")
    resumed = spawn(3, on_rank, "run_example", 3, str(tmp_path / "run"), 6, timeout_s=300)[0]
    assert len(first) == 6
    assert resumed == ["resuming from step=4.ckpt", *first[4:]]


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="no GPU")
@pytest.mark.parametrize("kind", ["fsdp", "model"])
def test_losses_go_on_on_a_gpu(tmp_path, kind):
    code = f"from {JOBS} import train_on_gpu; train_on_gpu({kind!r}, {str(tmp_path)!r})"
    paths = [str(ROOT / "src"), str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, text=True, stdout=subprocess.PIPE, check=True)
    whole, resumed = json.loads(done.stdout.splitlines()[-1])
    assert resumed == {step: pytest.approx(whole[step], rel=1e-5) for step in ("4", "5")}
