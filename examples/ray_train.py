"""Ray Train with Milepost: the workers save to one folder, report it, and other numbers of workers resume from it.

    python examples/ray_train.py runs/ray --workers 2 --steps 4
    python examples/ray_train.py runs/ray --workers 3 --steps 8

Ray keeps the path of the checkpoint, and Milepost its content: every worker writes its part, and the commit is atomic.
"""

import argparse
from pathlib import Path
from typing import Any

import ray
import ray.train
import torch
from ray.train import CheckpointUploadMode
from ray.train.torch import TorchTrainer
from torch.distributed.fsdp import fully_shard

import milepost


def train(config: dict[str, Any]) -> None:
    """What each worker runs."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(16, 32), torch.nn.Tanh(), torch.nn.Linear(32, 1)).double()
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    state = {"model": model, "optim": optimizer, "step": 0}
    with milepost.Checkpointer(Path(config["run"]) / "steps", keep_last=2) as keeper:
        keeper.restore(state, default=0)  # the newest whole step, saved by any number of workers
        while state["step"] < config["steps"]:
            step = state["step"] = state["step"] + 1
            inputs = torch.randn(12, 16, generator=torch.Generator().manual_seed(step)).double()
            mine = inputs.chunk(ray.train.get_context().get_world_size())[ray.train.get_context().get_world_rank()]
            loss = (model(mine) - mine.sum(1, keepdim=True)).pow(2).mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            torch.distributed.all_reduce(loss.detach_())
            metrics = {"step": step, "loss": loss.item() / ray.train.get_context().get_world_size()}
            checkpoint = None
            if step % 2 == 0:
                saved = keeper.save(state, step)
                checkpoint = ray.train.Checkpoint.from_directory(saved.url.removeprefix("file://"))
            is_first = ray.train.get_context().get_world_rank() == 0
            # The folder is there already, for all workers: Ray notes its path, once, and copies nothing.
            ray.train.report(
                metrics,
                checkpoint=checkpoint if is_first else None,
                checkpoint_upload_mode=CheckpointUploadMode.NO_UPLOAD,
            )
            if is_first:
                with (Path(config["run"]) / "log.txt").open("a") as log:
                    print(f"step {step}  loss {metrics['loss']!r}", file=log)


def main() -> None:
    """Start or resume, with as many workers as asked for."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", type=Path, help="the folder for this run, which all workers see")
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--steps", type=int, default=4)
    options = parser.parse_args()
    run = options.run.resolve()
    run.mkdir(parents=True, exist_ok=True)
    ray.init(num_cpus=max(options.workers, 2) + 1, include_dashboard=False, logging_level="error")
    trainer = TorchTrainer(
        train,
        train_loop_config={"run": str(run), "steps": options.steps},
        scaling_config=ray.train.ScalingConfig(num_workers=options.workers),
        # Ray notes only checkpoints below its own folder, which is the one of this run.
        run_config=ray.train.RunConfig(
            storage_path=str(run.parent),
            name=run.name,
            failure_config=ray.train.FailureConfig(max_failures=1),  # the workers are started again, and resume
        ),
    )
    result = trainer.fit()
    ray.shutdown()
    print((run / "log.txt").read_text(), end="")
    if result.error is not None:
        raise result.error
    print(f"Ray's newest checkpoint: {milepost.open(result.checkpoint.path)}")


if __name__ == "__main__":
    main()
