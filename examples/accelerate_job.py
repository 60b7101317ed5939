"""A training job with Accelerate that saves regularly and resumes by itself, on any number of ranks.

    torchrun --nproc-per-node 2 examples/accelerate_job.py runs/a --steps 20
    torchrun --nproc-per-node 3 examples/accelerate_job.py runs/a --steps 40

Kill it at any moment and start it again: it goes on from the newest whole checkpoint. The lines about checkpoints are
the `with install(...)` and the calls of `save_state` and `load_state`, as in any program with Accelerate.
"""

import argparse

import torch
from accelerate import Accelerator, DataLoaderConfiguration, skip_first_batches
from accelerate.utils import ProjectConfiguration, set_seed
from torch.utils.data import DataLoader, TensorDataset

from milepost.integrations.accelerate import install

BATCH, ROWS, WIDTH = 12, 96, 16  # 12 rows divide evenly among 1, 2, 3 and 4 ranks


class Progress:
    """How far the training is: registered, so that it is saved with the rest."""

    def __init__(self) -> None:
        self.step = 0

    def state_dict(self) -> dict[str, int]:
        """The number of steps that were made."""
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Go on after this step."""
        self.step = state["step"]


def main() -> None:
    """Train up to `--steps`, from wherever the last run stopped."""
    parser = argparse.ArgumentParser()
    parser.add_argument("project")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--save-every", type=int, default=5)
    arguments = parser.parse_args()

    accelerator = Accelerator(
        cpu=not torch.cuda.is_available(),
        dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True, data_seed=1, split_batches=True),
        project_config=ProjectConfiguration(arguments.project, automatic_checkpoint_naming=True, total_limit=2),
    )
    set_seed(1)
    model = torch.nn.Sequential(torch.nn.Linear(WIDTH, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
    rows = torch.randn(ROWS, WIDTH, generator=torch.Generator().manual_seed(0))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
    model, optimizer, loader = accelerator.prepare(
        model, optimizer, DataLoader(TensorDataset(rows, rows.sum(1, keepdim=True)), BATCH, shuffle=True)
    )
    progress = Progress()
    accelerator.register_for_checkpointing(progress)

    with install(accelerator, wait=False) as installed:
        if installed.checkpointer.latest() is not None:
            accelerator.load_state()
            accelerator.print(f"resumed at step {progress.step} on {accelerator.num_processes} ranks")
        while progress.step < arguments.steps:
            epoch, within = divmod(progress.step, ROWS // BATCH)
            loader.set_epoch(epoch)
            for inputs, targets in skip_first_batches(loader, within):
                loss = torch.nn.functional.mse_loss(model(inputs), targets)
                accelerator.backward(loss)
                optimizer.step()
                optimizer.zero_grad()
                progress.step += 1
                if progress.step % arguments.save_every == 0:
                    accelerator.save_state()
                    mean = accelerator.reduce(loss.detach(), "mean").item()
                    accelerator.print(f"step {progress.step} loss {mean:.5f}")
                if progress.step == arguments.steps:
                    break
    accelerator.end_training()


if __name__ == "__main__":
    main()
