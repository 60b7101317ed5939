"""Jobs of Lightning for tests: each function runs on one rank. The loss does not depend on the number of ranks."""

import os
import signal

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.strategies import DDPStrategy, ModelParallelStrategy
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.utils.data import DataLoader

from milepost.integrations.lightning import MilepostCheckpointIO, MilepostFSDPStrategy, MilepostModelParallelStrategy
from milepost.store import LocalStore

GLOBAL_BATCH = 12
STEPS = 6


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


class CPUFSDPStrategy(MilepostFSDPStrategy):
    """FSDP1 asks for an accelerator unless it is told to use the CPU, which Lightning does not tell it."""

    def _setup_model(self, model):
        return FullyShardedDataParallel(
            model, device_id=torch.device("cpu"), sharding_strategy=self.sharding_strategy, **self.kwargs
        )


def as_rank(rank, world):
    """Let Lightning see the ranks of the test, as torchrun would show them."""
    os.environ.update(
        RANK=str(rank), LOCAL_RANK=str(rank), GROUP_RANK="0", WORLD_SIZE=str(world), LOCAL_WORLD_SIZE=str(world),
        TORCHELASTIC_RUN_ID="test", MASTER_ADDR="127.0.0.1", MASTER_PORT="0",
    )  # fmt: skip


def trainer_of(kind, world, folder, *, steps=STEPS, plugins=(), keep=None, **saving):
    """A trainer for CPU ranks that saves every second step."""
    if kind == "ddp":
        strategy, plugins = DDPStrategy(), [MilepostCheckpointIO(**saving), *plugins]
    elif kind == "fsdp":
        strategy = CPUFSDPStrategy(auto_wrap_policy={torch.nn.Linear}, **saving)
    elif kind == "lightning's own":
        strategy = ModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1)
    else:
        strategy = MilepostModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, **saving)
    keep = keep or {"every_n_train_steps": 2, "save_top_k": -1}
    return pl.Trainer(
        accelerator="cpu",
        devices=world,
        strategy=strategy,
        plugins=list(plugins),
        callbacks=[ModelCheckpoint(dirpath=folder, **keep)],
        max_steps=steps,
        logger=False,
        use_distributed_sampler=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        log_every_n_steps=1,
    )


def net_of(kind):
    pl.seed_everything(1, verbose=False)
    return Net() if kind in ("ddp", "fsdp") else ShardedNet()


def train(rank, world, kind, folder, ckpt_path=None, **options):
    """Train, and give the loss of each step."""
    as_rank(rank, world)
    net = net_of(kind)
    trainer = trainer_of(kind, world, folder, **options)
    trainer.fit(net, DataLoader(range(100)), ckpt_path=ckpt_path)
    return net.losses
