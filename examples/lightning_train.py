"""A Lightning job with FSDP2 that saves while it trains, and resumes by itself on any number of ranks.

    torchrun --nproc-per-node 2 examples/lightning_train.py runs/lightning

Kill it at any moment, and start it again with 3 ranks: it resumes from the newest whole checkpoint.
Only the strategy and `newest_checkpoint` are about Milepost.
"""

import argparse
import os
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.utils.data import DataLoader

from milepost.integrations.lightning import MilepostModelParallelStrategy, newest_checkpoint

GLOBAL_BATCH, WIDTH = 24, 32  # 24 samples divide evenly among 1, 2, 3 and 4 ranks


class Net(pl.LightningModule):
    """Learns the sum of its inputs. Each step has its own samples, of which each rank takes its share."""

    def __init__(self, lr: float = 0.01) -> None:  # noqa: ARG002  # Lightning keeps it
        super().__init__()
        self.save_hyperparameters()
        self.layers = nn.Sequential(nn.Linear(8, WIDTH), nn.GELU(), nn.Linear(WIDTH, 1))

    def configure_model(self) -> None:
        """Shard the model over the ranks; Lightning calls this once the mesh is there."""
        mesh = self.device_mesh["data_parallel"]
        for layer in (self.layers[0], self.layers[2], self):
            fully_shard(layer, mesh=mesh)

    def training_step(self, batch: Tensor, index: int) -> Tensor:
        """The loss of this rank's share."""
        del batch, index
        samples = torch.randn(GLOBAL_BATCH, 8, generator=torch.Generator().manual_seed(self.global_step))
        x = samples[self.trainer.global_rank :: self.trainer.world_size].to(self.device)
        loss = (self.layers(x) - x.sum(1, keepdim=True)).square().mean()
        mean = self.trainer.strategy.reduce(loss.detach())
        if self.trainer.is_global_zero:
            print(f"step {self.global_step + 1}: loss {mean.item():.3f}", flush=True)
        return loss

    def configure_optimizers(self) -> Any:
        """AdamW."""
        return torch.optim.AdamW(self.parameters(), lr=self.hparams["lr"])


def main() -> None:
    """Train until `--steps`, from the newest whole checkpoint."""
    parser = argparse.ArgumentParser()
    parser.add_argument("folder", type=Path)
    parser.add_argument("--steps", type=int, default=6)
    options = parser.parse_args()
    world = int(os.environ.get("WORLD_SIZE", "1"))
    resumed = newest_checkpoint(options.folder)
    if resumed and os.environ.get("RANK", "0") == "0":
        print(f"resuming from {Path(resumed).name}", flush=True)
    pl.seed_everything(0)
    trainer = pl.Trainer(
        strategy=MilepostModelParallelStrategy(data_parallel_size=world, tensor_parallel_size=1, background="thread"),
        callbacks=[ModelCheckpoint(options.folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)],
        devices=world,
        max_steps=options.steps,
        accelerator="gpu" if torch.cuda.device_count() >= world else "cpu",
        use_distributed_sampler=False,
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(Net(), DataLoader(range(10_000)), ckpt_path=resumed)


if __name__ == "__main__":
    main()
