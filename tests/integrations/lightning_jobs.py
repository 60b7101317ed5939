"""Jobs of Lightning for tests: each function runs on one rank. The loss does not depend on the number of ranks."""

import contextlib
import io
import json
import os
import runpy
import signal
import sys
from pathlib import Path

import lightning.pytorch as pl
import torch
from lightning.fabric import Fabric
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, FSDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

import milepost
from milepost.integrations.lightning import (
    MilepostCheckpointIO,
    MilepostFabricModelParallelStrategy,
    MilepostFSDPStrategy,
    MilepostModelParallelStrategy,
)
from milepost.store.local import LocalStore, LocalWriter

GLOBAL_BATCH = 12
STEPS = 6
EXAMPLE = Path(__file__).parents[2] / "examples" / "lightning_train.py"


class Net(pl.LightningModule):
    """Every step has its own data, of which each rank takes its share."""

    def __init__(self, width=12, lr=0.05):
        super().__init__()
        self.save_hyperparameters()
        self.first = torch.nn.Linear(4, width)
        self.last = torch.nn.Linear(width, 1)
        self.losses = {}

    def training_step(self, batch, index):
        chance = torch.Generator().manual_seed(self.global_step)
        x = torch.randn(GLOBAL_BATCH, 4, generator=chance)[self.trainer.global_rank :: self.trainer.world_size]
        x = x.to(self.device)
        loss = (self.last(torch.tanh(self.first(x))) - x.sum(1, keepdim=True)).square().mean()
        self.losses[self.global_step] = self.trainer.strategy.reduce(loss.detach()).item()
        self.log("loss", self.losses[self.global_step])
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2, 0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": scheduler, "interval": "step"}}


class ShardedNet(Net):
    def configure_model(self):
        if not isinstance(self.first, torch.distributed.fsdp.FSDPModule):
            mesh = self.device_mesh["data_parallel"]
            for part in (self.first, self.last, self):
                fully_shard(part, mesh=mesh)

    def on_save_checkpoint(self, checkpoint):
        if isinstance(self.trainer.strategy, MilepostModelParallelStrategy):  # others would pickle one rank's shard
            checkpoint["average"] = {"first": self.first.weight.detach().clone(), "rank": self.global_rank}

    def on_load_checkpoint(self, checkpoint):
        self.loaded = checkpoint.get("average")

    def test_step(self, batch, index):
        self.log("size", sum(parameter.full_tensor().square().sum() for parameter in self.parameters()))


class OnCPU:
    """FSDP1 asks for an accelerator unless it is told to use the CPU, which Lightning does not tell it."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), sharding_strategy=self.sharding_strategy, **self.kwargs
        )


class OurFSDPStrategy(OnCPU, MilepostFSDPStrategy):
    pass


class TheirFSDPStrategy(OnCPU, FSDPStrategy):
    pass


def as_rank(rank, world):
    """Let Lightning see the ranks of the test, as torchrun would show them."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip


def trainer_of(kind, world, folder, *, steps=STEPS, **saving):
    """A trainer for CPU ranks that saves every second step. Kinds in capitals save as Lightning does."""
    plugins = []
    if kind == "ddp":
        strategy, plugins = DDPStrategy(), [MilepostCheckpointIO(**saving)]
    elif kind == "DDP":
        strategy = DDPStrategy()
    elif kind == "fsdp":
        strategy = OurFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, **saving)
    elif kind == "FSDP":
        strategy = TheirFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, state_dict_type="sharded")
    elif kind == "MODEL":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    else:
        strategy = MilepostModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, **saving)
    return trainer_with(strategy, world, folder, steps, plugins)


def trainer_with(strategy, world, folder, steps=STEPS, plugins=(), accelerator="cpu"):
    return pl.Trainer(
        accelerator=accelerator,
        devices=world,
        strategy=strategy,
        plugins=list(plugins),
        callbacks=[ModelCheckpoint(dirpath=folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
        max_steps=steps,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )


def train(rank, world, kind, folder, ckpt_path=None, **options):
    """Train, and give the loss of each step."""
    as_rank(rank, world)
    pl.seed_everything(1, verbose=False)
    net = ShardedNet() if kind.lower() == "model" else Net()
    trainer = trainer_of(kind, world, folder, **options)
    trainer.fit(net, DataLoader(range(100)), ckpt_path=ckpt_path)
    return net.losses


def train_each(rank, world, jobs):
    """Train several jobs one after the other, and give their losses by name."""
    return {name: train(rank, world, *args, **options) for name, (args, options) in jobs.items()}


def train_and_die(rank, world, kind, folder, victim, **options):
    """Train; one rank is killed in the middle of writing its part of step 4."""
    write = LocalWriter.write

    def write_or_die(self, *args):
        write(self, *args)
        if rank == victim and "step=4" in str(self._path):
            os.kill(os.getpid(), signal.SIGKILL)

    LocalWriter.write = write_or_die
    return train(rank, world, kind, folder, **options)


def train_with_full_disk(rank, world, folder, **options):
    """Train; rank 1 cannot write step 2. Gives the error, what is left, and the losses of a second try."""
    writer = LocalStore.writer

    def refuse(self, name, *args, **kwargs):
        if rank == 1 and "step=2" in str(self.root):
            raise OSError(28, "No space left on device")
        return writer(self, name, *args, **kwargs)

    LocalStore.writer = refuse
    try:
        train(rank, world, "model", folder, steps=4, **options)
    except milepost.CheckpointError as error:
        text = str(error)
    LocalStore.writer = writer
    whole = [path.name for path in Path(folder).glob("*.ckpt") if list(path.glob("manifest-*.json"))]
    torch.distributed.barrier()
    return text, whole, train(rank, world, "model", f"{folder}-again", **options)


def train_on_gpu(kind, folder):
    """Train on one GPU with the strategies as they are, then again from step 4. Prints the losses of both."""
    found = []
    for ckpt_path in (None, f"{folder}/step=4.ckpt"):
        if kind == "fsdp":
            strategy = MilepostFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, background="thread")
        else:
            strategy = MilepostModelParallelStrategy(background="thread")
        pl.seed_everything(1, verbose=False)
        net = Net() if kind == "fsdp" else ShardedNet()
        trainer = trainer_with(strategy, 1, folder, accelerator="gpu")
        trainer.fit(net, DataLoader(range(100)), ckpt_path=ckpt_path)
        found.append(net.losses)
        assert net.first.weight.device.type == "cuda"
    print(json.dumps(found))


def use_fabric(rank, world, path, load):
    """Train two steps with Fabric and save; or load, and train one more. Gives the last loss and what was left."""
    as_rank(rank, world)
    strategy = MilepostFabricModelParallelStrategy(_shard, data_parallel_size=world, tensor_parallel_size=1)
    fabric = Fabric(accelerator="cpu", devices=world, strategy=strategy)
    fabric.launch()
    torch.manual_seed(3)
    model = fabric.setup_module(torch.nn.Sequential(torch.nn.Linear(4, 12), torch.nn.Linear(12, 1)))
    optimizer = fabric.setup_optimizers(torch.optim.AdamW(model.parameters(), lr=0.1))
    state = {"model": model, "optimizer": optimizer, "step": 0}
    left = fabric.load(path, state) if load else {}
    for step in range(state["step"], state["step"] + (1 if load else 3)):
        if step == 2 and not load:
            fabric.save(path, {**state, "step": step, "name": "two"})
        loss = model(torch.full((2, 4), float(step + 1))).square().mean()
        fabric.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    return loss.item(), left


def _shard(model, mesh):
    for part in (*model, model):
        fully_shard(part, mesh=mesh["data_parallel"])
    return model


def evaluate(rank, world, path):
    """Load for `trainer.test`, without optimizers. Gives the sum of squares of all parameters."""
    as_rank(rank, world)
    trainer = trainer_of("model", world, None)
    return trainer.test(ShardedNet(), DataLoader(range(1)), ckpt_path=path, verbose=False)[0]["size"]


def run_example(rank, world, folder, steps):
    """Run the example as torchrun would. Gives what it printed about the run."""
    as_rank(rank, world)
    sys.argv = [str(EXAMPLE), folder, f"--steps={steps}"]
    printed = io.StringIO()
    with contextlib.redirect_stdout(printed):
        runpy.run_path(str(EXAMPLE), run_name="__main__")
    return [line for line in printed.getvalue().splitlines() if line.startswith(("step ", "resuming"))]
