"""A training job in an object store: it saves while it trains, keeps its last steps, and resumes after a kill.

    torchrun --nproc-per-node 2 examples/object_store.py s3://my-bucket/runs/a
    torchrun --nproc-per-node 3 examples/object_store.py s3://my-bucket/runs/a      after a kill, on other ranks

The URL may be that of any place: `gs://...`, `az://...`, or a folder. Credentials come from the environment, as for
other tools (docs/how-to/object-stores.md).
"""

import argparse
import time

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard

import milepost


def make_state() -> dict[str, nn.Module | torch.optim.Optimizer]:
    """A sharded model and its optimizer."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 256), nn.ReLU(), nn.Linear(256, 64))
    fully_shard(model)
    return {"model": model, "optim": torch.optim.AdamW(model.parameters(), lr=1e-3)}


def train_step(state: dict[str, nn.Module | torch.optim.Optimizer], step: int) -> float:
    """One step. The data depends on the step alone, so that a resumed job sees what the killed one would have seen."""
    model, optimizer = state["model"], state["optim"]
    assert isinstance(model, nn.Module)
    assert isinstance(optimizer, torch.optim.Optimizer)
    data = torch.randn(16, 64, generator=torch.Generator().manual_seed(step))
    loss = nn.functional.mse_loss(model(data), data.flip(1))
    loss.backward()
    optimizer.step()
    optimizer.zero_grad()
    return loss.item()


def main() -> None:
    """Resume from the newest whole step, if there is one, and train to the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("place", help="the URL or folder for this run's checkpoints")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--save-every", type=int, default=10)
    parser.add_argument("--pause-s", type=float, default=0.0, help="how long a step takes at least")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    state = make_state()
    is_first = dist.get_rank() == 0
    with milepost.Checkpointer(options.place, keep_last=2) as keeper:
        start = keeper.restore(state, default=0)
        if is_first:
            print(f"starts after step {start} on {dist.get_world_size()} ranks", flush=True)
        for step in range(start + 1, options.steps + 1):
            loss = train_step(state, step)
            time.sleep(options.pause_s)
            if step % options.save_every == 0:
                keeper.async_save(state, step, metrics={"loss": loss})  # waits for the save before, if need be
                if is_first:
                    print(f"step {step}  loss {loss:.6f}", flush=True)
        keeper.wait()
        if is_first:
            print(f"kept {keeper.steps()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
