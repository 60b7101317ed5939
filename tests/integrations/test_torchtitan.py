"""The real Trainer of torchtitan, on gloo ranks, with `milepost.integrations.torchtitan`."""

import dataclasses
import inspect
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

import milepost
from milepost.store import LocalStore
from tests.integrations.titan import Ranks, trainer_for
from tests.trainers import until

if find_spec("torchtitan") is None:
    pytest.skip("torchtitan is not installed", allow_module_level=True)

STEPS = 6
ROOT = Path(__file__).parents[2]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run"]


@pytest.fixture(scope="module")
def ranks():
    server = Ranks()
    yield server
    server.close()


def manager_of(kind, **fields):
    """A configuration of Milepost's manager, or of torchtitan's own."""
    from torchtitan.components.checkpoint import CheckpointManager as TitanManager

    from milepost.integrations.torchtitan import CheckpointManager

    fields = {"enable": True, "interval": 2, "last_save_model_only": False, **fields}
    return (TitanManager if kind == "titan" else CheckpointManager).Config(**fields)


def train(rank, folder, steps=STEPS, kind="milepost", die_at=None, fields=None, job=None):
    """Train and give the losses by step. With `die_at`, rank 1 is killed when it begins to write that step."""
    trainer = trainer_for(folder, steps, manager_of(kind, **(fields or {})), **(job or {}))
    if die_at and rank == 1:
        real = LocalStore.writer

        def writer(self, *args, **options):
            made = real(self, *args, **options)
            if trainer.step >= die_at:
                os.kill(os.getpid(), signal.SIGKILL)
            return made

        LocalStore.writer = writer
    trainer.train()
    trainer.close()
    return trainer.losses


def steps_in(folder):
    return milepost.Checkpointer(Path(folder) / "checkpoint", names="step-{step}").steps()


@pytest.fixture(scope="module")
def straight(ranks, tmp_path_factory):
    """The losses of a run that is never stopped."""
    return ranks.run(2, train, tmp_path_factory.mktemp("straight"))[0]


@pytest.mark.parametrize("mode", ["disabled", "async"])
def test_killed_save_resumes_from_last_whole_step(ranks, straight, tmp_path, mode):
    fields = {"async_mode": mode}
    assert ranks.outcomes(2, train, tmp_path, STEPS, "milepost", 4, fields)[1] is None
    assert (tmp_path / "checkpoint" / "step-4").exists()
    assert steps_in(tmp_path) == [2]
    losses = ranks.run(2, train, tmp_path, STEPS, "milepost", None, fields)
    assert losses == [{step: straight[step] for step in (3, 4, 5, 6)}] * 2
    assert steps_in(tmp_path) == [2, 4, 6]


def train_and_die(rank, folder):
    """Save in processes. After step 5, when step 4 is staged and its parameters have changed, all ranks are killed."""
    trainer = trainer_for(folder, STEPS, manager_of("milepost", async_mode="async_with_pinned_mem"))
    real, write = trainer.train_step, LocalStore.writer

    def writer(self, *args, **options):
        time.sleep(60 if trainer.step >= 4 else 0)  # the trainer itself would not be done in time
        return write(self, *args, **options)

    LocalStore.writer = writer

    def train_step(data):
        real(data)
        if trainer.step == 5:
            os.kill(os.getpid(), signal.SIGKILL)

    trainer.train_step = train_step
    trainer.train()


def test_process_finishes_the_step_of_killed_trainers(ranks, straight, tmp_path):
    assert ranks.outcomes(2, train_and_die, tmp_path) == [None, None]
    assert until(lambda: steps_in(tmp_path) == [2, 4], within_s=60)
    losses = ranks.run(2, train, tmp_path)
    assert losses == [{step: straight[step] for step in (5, 6)}] * 2


def test_other_ranks_and_meshes_go_on(ranks, straight, tmp_path):
    """2 ranks of FSDP, then 4, then 2 x 2 with tensor parallelism, on data whose position fits any of them."""
    ranks.run(2, train_on_any, tmp_path, 2, {})
    four = ranks.run(4, train_on_any, tmp_path, 4, {"local_batch_size": 1})[0]
    mesh = ranks.run(4, train_on_any, tmp_path, 6, {"tensor_parallel_degree": 2})[0]
    assert [*four, *mesh] == [3, 4, 5, 6]
    assert {**four, **mesh} == pytest.approx({step: straight[step] for step in (3, 4, 5, 6)}, abs=2e-4)


def test_replicas_of_shards_go_on(ranks, straight, tmp_path):
    """2 ranks of FSDP, then HSDP: 2 replicas of 2 shards, which then save; then 2 ranks again."""
    ranks.run(2, train_on_any, tmp_path, 2, {})
    replicas = {"data_parallel_replicate_degree": 2, "data_parallel_shard_degree": 2, "local_batch_size": 1}
    hybrid = ranks.run(4, train_on_any, tmp_path, 4, replicas)[0]
    with milepost.open(tmp_path / "checkpoint" / "step-4") as checkpoint:
        assert checkpoint.world == 4
    again = ranks.run(2, train_on_any, tmp_path, 6, {})[0]
    assert [*hybrid, *again] == [3, 4, 5, 6]
    assert {**hybrid, **again} == pytest.approx({step: straight[step] for step in (3, 4, 5, 6)}, abs=2e-4)


def train_on_any(rank, folder, steps, parallelism):
    """Train with a data loader whose state says how many numbers all ranks have taken together."""
    from examples.torchtitan_train import NumbersLoader

    class AnyRanks(NumbersLoader):
        @dataclasses.dataclass(kw_only=True, slots=True)
        class Config(NumbersLoader.Config):
            pass

        def state_dict(self):
            return {"numbers": self.dataset.taken * self.dp_world_size}

        def load_state_dict(self, state_dict):
            self.dataset.taken = state_dict["numbers"] // self.dp_world_size

    return train(rank, folder, steps, job={"loader": AnyRanks.Config(), **parallelism})


def test_positions_of_other_data_ranks_are_refused(ranks, tmp_path):
    ranks.run(2, train, tmp_path, 2)
    for ok, text in ranks.outcomes(3, train, tmp_path, 4):
        assert not ok
        assert re.search(r"InvalidState: (.|\n)*2 data-parallel ranks, and there are 3", text), text
    losses = ranks.run(3, train, tmp_path, 4, "milepost", None, {"data_on_other_ranks": "restart"})
    assert [list(each) for each in losses] == [[3, 4]] * 3


class Desk:
    """A trainer on one rank, and managers of any configuration for it. `save` and `load` are with the step's number."""

    def __init__(self, folder, **parallelism):
        self.trainer = trainer_for(folder, STEPS, manager_of("milepost"), **parallelism)
        self.trainer.close()
        self.folder = Path(folder) / "checkpoint"

    def manager(self, kind="milepost", ft_manager=None, **fields):
        trainer = self.trainer
        more = {} if ft_manager is None else {"ft_manager": ft_manager}
        return manager_of(kind, **fields).build(
            dataloader=trainer.dataloader,
            model_parts=trainer.model_parts,
            optimizers=trainer.optimizers,
            lr_schedulers=trainer.lr_schedulers,
            states={"train_state": trainer},
            sd_adapter=trainer.checkpointer.sd_adapter,
            base_folder=str(self.folder.parent),
            **more,
        )

    def save(self, manager, step, **options):
        self.trainer.step = step
        return manager.save(step, **options)

    def load(self, manager, step=-1):
        """Where training goes on, or None if nothing was loaded."""
        self.trainer.step = self.trainer.ntokens_seen = -1
        return self.trainer.step if manager.load(step) else None

    def weights(self):
        """All parameters, in one row."""
        return torch.cat([p.detach().full_tensor().flatten() for p in self.trainer.model_parts[0].parameters()])

    def change(self, value):
        """Give all parameters this value."""
        with torch.no_grad():
            for parameter in self.trainer.model_parts[0].parameters():
                parameter.fill_(value)

    def steps(self):
        return steps_in(self.folder.parent)


def pass_on(rank, folder):
    """Load step 2 into two pipeline stages, and save them as step 4."""
    whole = dict.fromkeys(("pipeline_parallel_first_stage_less_layers", "pipeline_parallel_last_stage_less_layers"), 0)
    desk = Desk(folder, pipeline_parallel_degree=2, local_batch_size=4, **whole)
    manager = desk.manager(data_on_other_ranks="restart")
    assert desk.load(manager) == 2
    assert desk.save(manager, 4)
    return len(desk.trainer.model_parts[0].state_dict())


def test_pipeline_stages_are_saved_by_name(ranks, tmp_path):
    ranks.run(2, train, tmp_path, 2)
    counts = ranks.run(2, pass_on, tmp_path)
    before, after = (milepost.open(tmp_path / "checkpoint" / name) for name in ("step-2", "step-4"))
    assert set(before.tensors) == set(after.tensors)
    assert sum(counts) == sum(not key.startswith("optimizer.") for key in before.tensors)
    for key, tensor in before.tensors.items():
        assert tensor[...].equal(after[key][...]), key


def choose_steps(rank, folder):
    desk = Desk(folder)
    ours, titan = desk.manager(), desk.manager("titan")
    assert desk.load(ours) is None
    assert desk.save(titan, 2)
    assert desk.load(ours) == 2  # a step of DCP
    assert not desk.save(ours, 3)
    assert desk.save(ours, 4)
    assert desk.load(ours) == 4  # the newest wins
    assert desk.save(titan, 6)
    assert desk.load(ours) == 6
    assert desk.load(ours, 2) == 2  # `load_step`
    (desk.folder / "step-8").mkdir()
    (desk.folder / "step-8" / "__0_0.distcp").touch()  # DCP was killed here
    assert desk.load(ours) == 6
    (desk.folder / "step-6" / ".metadata").write_bytes(b"damaged")
    assert desk.load(ours) == 4
    with pytest.raises(milepost.CheckpointNotFound, match=r"step-5\b"):
        desk.load(ours, 5)
    shard = max((desk.folder / "step-4").rglob("*.safetensors"), key=lambda path: path.stat().st_size)
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert desk.load(ours) == 2  # what is damaged is skipped
    shutil.rmtree(desk.folder / "step-2")
    with pytest.raises(milepost.CheckpointDamaged, match=r"no step .* is whole"):
        desk.load(ours)


def test_newest_whole_step_of_either_format_wins(ranks, tmp_path):
    ranks.run(1, choose_steps, tmp_path)


def keep_steps(rank, folder):
    desk = Desk(folder)
    start = desk.weights()
    ours = desk.manager(keep_latest_k=2, enable_first_step_checkpoint=True, interval=10)
    assert [step for step in (1, 2, 10, 15, 20, 30) if desk.save(ours, step)] == [1, 10, 20, 30]
    assert desk.steps() == [20, 30]
    assert not desk.save(desk.manager(load_only=True), 40)
    assert not desk.manager(enable=False).save(50, last_step=True)
    assert not desk.manager(enable=False).load()
    assert desk.save(desk.manager(keep_latest_k=0), 40)
    assert desk.steps() == [20, 30, 40]
    without = desk.manager(exclude_from_loading=["train_state", "lr_scheduler"])
    desk.change(3.0)
    assert desk.load(without) == -1  # as it was
    assert desk.weights().equal(start)
    first = {"initial_load_path": str(desk.folder / "step-20"), "initial_load_model_only": False}
    assert desk.load(desk.manager(**first)) == 40  # steps of the folder come first
    assert desk.load(desk.manager(**first, folder="new")) == 20
    plain = desk.manager(folder="plain")
    plain.states["notes"] = 7
    assert desk.save(plain, 10)
    plain.states["notes"] = 0
    assert desk.load(plain) == 10
    assert plain.states["notes"] == 7


def test_steps_are_kept_and_parts_left_out(ranks, tmp_path):
    ranks.run(1, keep_steps, tmp_path)


def fail_and_go_on(rank, folder):
    desk, real = Desk(folder), LocalStore.writer
    ours, threaded = desk.manager(), desk.manager(async_mode="async")

    def fails(error):
        def writer(*_, **__):
            raise error

        LocalStore.writer = writer

    fails(KeyboardInterrupt)
    with pytest.raises(KeyboardInterrupt):
        desk.save(ours, 2)
    LocalStore.writer = real
    assert desk.steps() == []
    assert desk.save(ours, 2)  # the same call works
    fails(OSError(28, "No space left on device"))
    assert desk.save(threaded, 4)
    assert threaded.save_future is not None
    with pytest.raises(milepost.StorageError, match="No space left"):
        desk.save(threaded, 6)
    LocalStore.writer = real
    assert desk.save(threaded, 6)
    threaded.maybe_wait_for_staging()
    threaded.maybe_wait_for_saving()
    assert threaded.save_future is None
    threaded.close()
    assert desk.steps() == [2, 6]


def test_interrupts_and_full_disks_are_told_and_survived(ranks, tmp_path):
    ranks.run(1, fail_and_go_on, tmp_path)


class OwnReader(HuggingFaceStorageReader):
    """Stands for a reader of an adapter, such as the one that dequantizes."""

    @classmethod
    def of(cls, path, from_quantized):
        return cls(path)


def export(rank, folder):
    """The last step, as a model of another type and as Hugging Face names it, and back."""
    desk = Desk(folder)
    start = desk.weights()
    assert desk.save(desk.manager(), 2)
    desk.change(2.0)
    last = desk.manager(last_save_model_only=True, export_dtype="bfloat16")
    assert desk.save(last, 3, last_step=True)
    with pytest.raises(milepost.InvalidState, match="holds the model only"):
        desk.load(last)
    assert desk.load(desk.manager(), 2) == 2
    assert desk.weights().equal(start)
    again = {"initial_load_path": str(desk.folder / "step-3"), "folder": "other"}
    assert desk.load(desk.manager(**again)) == -1  # the model only
    assert desk.weights().eq(2).all()
    with pytest.raises(milepost.InvalidState, match="holds the model only"):
        desk.load(desk.manager(**again, initial_load_model_only=False))
    names = desk.trainer.checkpointer.sd_adapter.to_hf(desk.trainer.model_parts[0].state_dict())
    desk.save(desk.manager(interval=1), 5)  # of an earlier run
    desk.save(desk.manager(last_save_model_only=True, last_save_in_hf=True), 5, last_step=True)
    with pytest.raises(milepost.InvalidState, match="and initial_load_in_hf"):
        desk.load(desk.manager())
    desk.change(0.0)
    hf = {"initial_load_path": str(desk.folder / "step-5"), "initial_load_in_hf": True, "folder": "third"}
    assert desk.load(desk.manager(**hf)) == -1
    assert desk.weights().eq(2).all()
    adapter = desk.trainer.checkpointer.sd_adapter
    real, adapter.get_hf_storage_reader = adapter.get_hf_storage_reader, OwnReader.of
    desk.change(0.0)
    assert desk.load(desk.manager(**hf, initial_load_in_hf_quantized=True)) == -1  # by the adapter's reader
    assert desk.weights().eq(2).all()
    adapter.get_hf_storage_reader = real
    with pytest.raises(milepost.InvalidRequest, match="cannot read quantized"):
        desk.load(desk.manager(**hf, initial_load_in_hf_quantized=True))
    with pytest.raises(milepost.InvalidRequest, match="there is no folder"):
        desk.load(desk.manager(**{**hf, "initial_load_path": "/nowhere"}))
    broken = desk.manager(folder="broken")
    desk.save(broken, 2)
    for manifest in desk.folder.parent.glob("broken/step-2/manifest-*") if rank == 0 else []:
        manifest.write_bytes(b"damaged")
    with pytest.raises(milepost.CheckpointDamaged, match=r"no step .* is whole"):  # on both ranks
        desk.load(broken)
    return sorted(names)


def test_last_step_is_exported_and_loaded_again(ranks, tmp_path):
    names = ranks.run(2, export, tmp_path)[0]
    saved = load_file(tmp_path / "checkpoint" / "step-5" / "model.safetensors")
    assert sorted(saved) == names
    assert saved["lm_head.weight"].dtype == torch.float32
    assert milepost.open(tmp_path / "checkpoint" / "step-3")["norm.weight"].dtype == torch.bfloat16


def seed(rank, folder):
    desk = Desk(folder)
    desk.change(5.0)
    assert desk.save(desk.manager(create_seed_checkpoint=True, last_save_model_only=True), 0, last_step=True)
    desk.change(0.0)
    assert desk.load(desk.manager()) == -1
    return bool(desk.weights().eq(5).all())


def test_seed_checkpoint_is_loaded_as_a_model(ranks, tmp_path):
    assert ranks.run(1, seed, tmp_path) == [True]


def refuse(rank, folder):
    from torchtitan.components.checkpoint import CheckpointManager as TitanManager
    from torchtitan.experiments.torchft.checkpoint import TorchFTCheckpointManager

    from milepost.integrations import torchtitan as integration
    from milepost.integrations.torchtitan import manager, settings

    desk, config = Desk(folder), integration.CheckpointManager.Config
    for fields, text in [
        ({"async_mode": "sometimes"}, "async_mode is one of"),
        ({"data_on_other_ranks": "guess"}, "data_on_other_ranks is one of"),
        ({"timeout_s": -1}, "timeout_s"),
        ({"folder": "https://host/run"}, "checkpoint.folder: https://host/run is only read"),
        ({"folder": "s3:/bucket/run"}, "checkpoint.folder: 's3:/bucket/run' is not a URL"),
        ({"initial_load_path": "nowhere://run"}, "checkpoint.initial_load_path"),
        ({"create_seed_checkpoint": True, "load_only": True}, "load_only allows no save"),
        ({"create_seed_checkpoint": True, "last_save_in_hf": True}, "last_save_in_hf=False"),
        ({"keep_latest_k": 1}, "at least 2"),
    ]:
        with pytest.raises(ValueError, match=re.escape(text)):
            config(enable=True, **fields)
    with pytest.raises(ValueError, match="no state is named nothing; there are dataloader, lr_scheduler"):
        desk.manager(exclude_from_loading=["nothing"])
    desk.trainer.checkpointer.sd_adapter = None
    with pytest.raises(ValueError, match="no state dict adapter"):
        desk.manager(last_save_in_hf=True, last_save_model_only=True)
    with pytest.raises(ValueError, match="torchft is enabled"):
        desk.manager(ft_manager=types.SimpleNamespace(enabled=True))
    with pytest.raises(ValueError, match="enable_ft_dataloader_checkpoints"):
        integration.use_milepost(TorchFTCheckpointManager.Config())
    made = integration.use_milepost(TitanManager.Config(interval=7, async_mode="async"), timeout_s=60)
    assert (type(made), made.interval, made.async_mode, made.timeout_s) == (config, 7, "async", 60)
    source = inspect.getsource(manager) + inspect.getsource(settings)
    read_by_titan = {"load_step"}
    fields = {field.name for field in dataclasses.fields(TitanManager.Config)}
    assert fields | {"data_on_other_ranks", "timeout_s"} == settings.HONOURED
    return [name for name in fields - read_by_titan if not re.search(rf"\b(config|self)\.{name}\b", source)]


def test_what_cannot_be_honoured_is_refused(ranks, tmp_path):
    assert ranks.run(1, refuse, tmp_path) == [[]]


def run_example(rank, folder, *options):
    from examples import torchtitan_train

    sys.argv = ["torchtitan_train.py", str(folder), *options]
    torchtitan_train.main()


def test_example_runs_and_goes_on(ranks, tmp_path):
    ranks.run(2, run_example, tmp_path, "--steps", "4", "--override")
    assert milepost.open(tmp_path / "checkpoint" / "step-4").format == "milepost"
    ranks.run(2, run_example, tmp_path, "--steps", "6")
    assert steps_in(tmp_path) == [4, 6]


def test_missing_torchtitan_says_what_to_install():
    code = "import sys; sys.modules['torchtitan'] = None; import milepost.integrations.torchtitan"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert "pip install 'torchtitan>=0.3'" in done.stderr


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_trainer_on_a_gpu_goes_on(tmp_path):
    def losses(folder, steps):
        command = [*TORCHRUN, "--nproc-per-node", "1", "examples/torchtitan_train.py", str(folder), "--steps", steps]
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        return re.findall(r"step: +(\d+) +loss: +([\d.]+)", done.stderr + done.stdout)

    straight = losses(tmp_path / "straight", "6")
    assert losses(tmp_path / "stopped", "4") + losses(tmp_path / "stopped", "6") == straight
