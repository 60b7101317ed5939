"""Accelerate: all of `save_state` in one commit, on real ranks, one process, DDP, FSDP1 and FSDP2."""

import json

import pytest
import torch
from accelerate.utils import ProjectConfiguration

import milepost
from milepost.integrations.accelerate import install, load_state, save_state, training_state
from tests.integrations.accelerators import KINDS, Job, one_process
from tests.integrations.killing import die_in_the_next_commit
from tests.ranks import spawn, spawn_outcomes

NAMING = {"automatic_checkpoint_naming": True, "total_limit": 2}


@pytest.fixture(autouse=True)
def no_state_stays():
    with one_process():
        yield


def trains_and_is_killed(rank, folder):
    found = {}
    for kind in KINDS:
        job = Job(kind, drop=0.3)
        job.train(0, 4)
        save_state(job.accelerator, folder / kind / "exact")
        expected = job.train(4, 9)
        again = Job(kind, drop=0.3, seed=77)
        load_state(again.accelerator, folder / kind / "exact")
        found[kind] = {"exact": [expected, again.train(4, 9)], "seen": again.counter.seen}
    for kind in KINDS:
        job = Job(kind, folder / kind, **NAMING)
        with install(job.accelerator):
            job.train(0, 4)
            job.accelerator.save_state()
            found[kind]["rest"] = job.train(4, 9)
            if kind == KINDS[-1]:
                if rank == 0:
                    (folder / "found.json").write_text(json.dumps(found))
                die_in_the_next_commit(rank, folder)
                job.accelerator.save_state()


def goes_on(rank, folder):
    found = {}
    for kind in KINDS:
        job = Job(kind, folder / kind, seed=77, **NAMING)
        with install(job.accelerator):
            job.accelerator.load_state()
            found[kind] = job.train(4, 9), job.counter.seen, job.accelerator.save_iteration
    return found


@pytest.mark.timeout(600)
def test_job_is_killed_in_a_save_and_goes_on_with_three_ranks(tmp_path):
    assert spawn_outcomes(2, trains_and_is_killed, tmp_path) == [None, None]
    found = json.loads((tmp_path / "found.json").read_text())
    killed = tmp_path / KINDS[-1] / "checkpoints" / "checkpoint_1"
    assert list(killed.rglob("*.safetensors"))  # the files are there, and they are no checkpoint
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(killed)
    for kind in KINDS:
        expected, again = found[kind]["exact"]
        assert again == expected, kind  # to the last bit: dropout, order of the data, schedule
        assert found[kind]["seen"] == list(range(1, 10))
    for resumed in spawn(3, goes_on, tmp_path):
        for kind, (losses, seen, iteration) in resumed.items():
            assert losses == pytest.approx(found[kind]["rest"], rel=1e-4), kind
            assert (seen, iteration) == (list(range(1, 10)), 1)


def test_steps_are_kept_by_the_limit_of_the_project(tmp_path):
    job = Job("plain", tmp_path, drop=0.3, **NAMING)
    with install(job.accelerator, wait=False, background="thread") as installed:
        job.train(0, 8, at_step=lambda step: step % 2 or job.accelerator.save_state())
        installed.wait()
        assert installed.checkpointer.steps() == [2, 3]
    assert "save_state" not in vars(job.accelerator)
    expected = job.train(8, 10)
    again = Job("plain", tmp_path, drop=0.3, seed=5, **NAMING)
    with install(again.accelerator):
        again.accelerator.load_state()
        assert again.train(8, 10) == expected
        assert again.accelerator.save_iteration == 4


def test_folder_that_accelerate_wrote_is_loaded(tmp_path):
    job = Job("plain")
    job.train(0, 3)
    job.accelerator.save_state(str(tmp_path / "old"))
    expected = job.train(3, 5)
    again = Job("plain")
    with install(again.accelerator):
        again.accelerator.load_state(tmp_path / "old")
        assert again.train(3, 5) == expected
        with pytest.raises(milepost.CheckpointNotFound):
            again.accelerator.load_state(tmp_path / "none")
        assert again.accelerator.save_state(tmp_path / "new") == str(tmp_path / "new")
    assert sorted(path.name for path in (tmp_path / "new").iterdir()) == ["data", "manifest-00000001.json"]


def test_nothing_is_pickled_and_a_failed_save_leaves_the_old_one(tmp_path):
    job = Job("plain")
    job.train(0, 1)
    save_state(job.accelerator, tmp_path)
    job.counter.seen = [object()]
    with pytest.raises(milepost.InvalidState, match=r"custom\.0\.seen"):
        save_state(job.accelerator, tmp_path)
    job.counter.seen = []
    load_state(job.accelerator, tmp_path)
    assert job.counter.seen == [1]


def test_what_cannot_be_saved_is_refused(tmp_path):
    job = Job("plain")
    with pytest.raises(milepost.InvalidRequest, match="automatic_checkpoint_naming"):
        install(job.accelerator, keep_last=2)
    with install(job.accelerator), pytest.raises(milepost.InvalidRequest, match="say where to save"):
        job.accelerator.save_state()
    job.accelerator.register_save_state_pre_hook(lambda models, weights, folder: None)
    with pytest.raises(milepost.InvalidRequest, match="register_for_checkpointing"):
        save_state(job.accelerator, tmp_path)


def test_position_of_a_stateful_loader_comes_back(tmp_path):
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader

    def make():
        configuration = DataLoaderConfiguration(use_stateful_dataloader=True)
        accelerator = Accelerator(
            cpu=True, dataloader_config=configuration, project_config=ProjectConfiguration(str(tmp_path))
        )
        return accelerator, accelerator.prepare(DataLoader(torch.arange(8), 2))

    accelerator, loader = make()
    for number, _ in enumerate(loader):
        if number == 1:
            milepost.save(training_state(accelerator), tmp_path / "position")
            break
    accelerator, loader = make()
    load_state(accelerator, tmp_path / "position")
    assert [batch.tolist() for batch in loader] == [[4, 5], [6, 7]]
