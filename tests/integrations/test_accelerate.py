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


def many_parts(seed):
    """Two models, an optimizer for each and one for both, a scaler, and a stateful loader."""
    from accelerate import Accelerator, DataLoaderConfiguration
    from torch.utils.data import DataLoader

    Job("plain")  # the state of Accelerate anew, with the ranks of this job
    accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_stateful_dataloader=True))
    accelerator.scaler = torch.amp.GradScaler("cpu", init_scale=2.0 ** (5 + seed), growth_interval=2)
    torch.manual_seed(seed)
    models = [torch.nn.Linear(3, 3) for _ in range(2)]
    optimizers = [torch.optim.AdamW(models[0].parameters(), lr=0.1 * seed)]
    optimizers += [torch.optim.SGD(models[1].parameters(), lr=0.1 * seed, momentum=0.9)]
    optimizers += [torch.optim.RMSprop([*models[1].parameters(), *models[0].parameters()], lr=0.01 * seed)]
    *prepared, loader = accelerator.prepare(*models, *optimizers, DataLoader(torch.arange(24), 2))
    return accelerator, prepared[:2], prepared[2:], loader


def step_of_many(accelerator, models, optimizers, _loader):
    loss = models[1](models[0](torch.ones(2, 3))).square().mean()
    accelerator.backward(loss)
    for optimizer in optimizers:
        optimizer.step()
    for optimizer in optimizers:
        optimizer.zero_grad()
    return loss.item(), accelerator.scaler.get_scale()


def saves_many_parts(rank, folder):
    job = many_parts(1)
    for number, _ in enumerate(job[3]):
        step_of_many(*job)
        if number == 2:
            save_state(job[0], folder)
            break
    return [step_of_many(*job) for _ in range(4)]


def loads_many_parts(rank, folder):
    job = many_parts(2)
    with pytest.raises(milepost.InvalidState, match=r"2 ranks .* has 3.*data=False.*integrations\.data\.Loader"):
        load_state(job[0], folder)
    found = []
    for call in (lambda job: load_state(job[0], folder, data=False), load_installed(folder)):
        job = many_parts(2)
        call(job)
        found.append([step_of_many(*job) for _ in range(4)])
        assert len(list(job[3])) == 4  # all of the data: 12 batches for 3 ranks
    return found


def load_installed(folder):
    def call(job):
        with install(job[0]):
            with pytest.raises(milepost.InvalidRequest, match="strict"):
                job[0].load_state(folder, strict=False)
            job[0].load_state(folder, data=False)

    return call


def trains_and_is_killed(rank, folder):
    found = {"many": saves_many_parts(rank, folder / "many")}
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
    return found, loads_many_parts(rank, folder / "many")


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
    for resumed, many in spawn(3, goes_on, tmp_path):
        assert many == [[pytest.approx(step) for step in found["many"]]] * 2
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


def test_run_that_starts_anew_does_not_save_below_an_older_one(tmp_path):
    first = Job("plain", tmp_path, **NAMING)
    with install(first.accelerator):
        first.train(0, 5, at_step=lambda step: first.accelerator.save_state())
    second = Job("plain", tmp_path, seed=2, **NAMING)
    with install(second.accelerator) as installed:
        second.train(0, 1)
        for _ in range(2):
            with pytest.raises(milepost.InvalidRequest, match=r"steps up to 4, .* step 0: .*iteration = 5"):
                second.accelerator.save_state()
        second.accelerator.load_state(tmp_path / "checkpoints" / "checkpoint_3")
        with pytest.raises(milepost.InvalidRequest, match="would save step 4"):
            second.accelerator.save_state()
        second.accelerator.project_configuration.iteration = 5
        second.accelerator.save_state()
        assert installed.checkpointer.steps() == [4, 5]
    third = Job("plain", tmp_path, **NAMING)
    with install(third.accelerator) as installed:
        for path in (tmp_path / "checkpoints" / "checkpoint_5").rglob("*.safetensors"):
            path.write_bytes(b"damaged")
        third.accelerator.load_state()  # the one before; its successor may be saved over the damaged one
        third.accelerator.save_state()
        assert installed.checkpointer.steps() == [4, 5]


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


def test_project_that_accelerate_began_goes_on(tmp_path):
    job = Job("plain", tmp_path, **NAMING)
    for step in range(3):
        job.train(step, step + 1)
        job.accelerator.save_state()
    expected = job.train(3, 5)
    again = Job("plain", tmp_path, **NAMING)
    with install(again.accelerator) as installed:
        again.accelerator.load_state()
        assert again.train(3, 5) == expected
        again.accelerator.save_state()
        assert installed.checkpointer.latest() == 3
        again.train(5, 6)
        again.accelerator.load_state()  # now it is Milepost's
        assert again.counter.seen == [1, 2, 3, 4, 5]


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
