"""A small training job that saves regularly and resumes by itself, on any number of ranks.

    torchrun --nproc-per-node 4 examples/train.py runs/a
    torchrun --nproc-per-node 4 examples/train.py s3://my-bucket/runs/a

Kill it at any moment, and start it again with 2 or 3 ranks: it resumes from the newest whole checkpoint.
Only `resume` and the one call of `milepost.save` are about checkpoints.
"""

import argparse
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F  # noqa: N812  # the usual name
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

import milepost

State = dict[str, Any]

VOCABULARY, WIDTH, HEADS, BLOCKS = 64, 96, 4, 3
GLOBAL_BATCH, LENGTH = 24, 16  # 24 sequences divide evenly among 1, 2, 3 and 4 ranks


class Block(nn.Module):
    """Attention and an MLP, each with a residual connection."""

    def __init__(self) -> None:
        super().__init__()
        self.norm_1, self.norm_2 = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.qkv, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.mlp = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU(), nn.Linear(4 * WIDTH, WIDTH))

    def forward(self, x: Tensor) -> Tensor:
        """The output, with the shape of `x`: sequences, positions, width."""
        q, k, v = self.qkv(self.norm_1(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        attended = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(attended.transpose(1, 2).flatten(-2))
        return x + self.mlp(self.norm_2(x))


class Transformer(nn.Module):
    """A language model of 350,000 parameters."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(BLOCKS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: Tensor) -> Tensor:
        """The logits of the next token, one row for each position of each sequence."""
        x = self.tokens(tokens) + self.positions(torch.arange(tokens.shape[1]))
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x).flatten(0, 1))


def batch(step: int) -> tuple[Tensor, Tensor]:
    """The inputs and targets of this rank. The global batch depends on the step alone, not on the number of ranks."""
    generator = torch.Generator().manual_seed(step)
    rows = [torch.randint(VOCABULARY, (GLOBAL_BATCH,), generator=generator)]
    for _ in range(LENGTH):
        surprise = torch.rand(GLOBAL_BATCH, generator=generator) < 0.1
        anything = torch.randint(VOCABULARY, (GLOBAL_BATCH,), generator=generator)
        rows.append(torch.where(surprise, anything, (5 * rows[-1] + 3) % VOCABULARY))
    mine = torch.stack(rows, dim=1).chunk(dist.get_world_size())[dist.get_rank()]
    return mine[:, :-1], mine[:, 1:]


def make_state(steps: int) -> State:
    """Everything that a checkpoint holds: the objects themselves, not copies of them."""
    torch.manual_seed(0)
    # In float64, another division of the batch changes only the last digits of the loss.
    model = Transformer().to(torch.float64)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    for block in model.blocks:
        fully_shard(block, mesh=mesh)
    fully_shard(model, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=steps)
    return {"model": model, "optim": optimizer, "sched": scheduler, "step": 0}


def checkpoint_at(run: str, step: int) -> str:
    """The place of the checkpoint of a step."""
    return f"{run}/step-{step:04d}"


def steps_of(run: str) -> list[int]:
    """The steps that were saved, or begun, in a folder or an object store."""
    folders = milepost.store.store_at(run).list("step-", shallow=True)
    return sorted(int(folder.strip("/").removeprefix("step-")) for folder in folders)


def newest_whole(run: str) -> int | None:
    """The newest committed step. Skips what a killed job left unfinished."""
    for step in reversed(steps_of(run)):
        try:
            milepost.open(checkpoint_at(run, step)).close()
        except milepost.CheckpointNotFound:
            print(f"skipped step-{step:04d}: unfinished", flush=True)
        else:
            return step
    return None


def resume(state: State, run: str) -> int | None:
    """Load the newest whole checkpoint into `state`, from any number of ranks. Returns its step, or None."""
    # One rank looks and broadcasts what it finds: on a network file system, ranks might see different files.
    found = [newest_whole(run) if dist.get_rank() == 0 else None]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        milepost.load(state, checkpoint_at(run, found[0]))
        say(f"resumed from step-{found[0]:04d} on {dist.get_world_size()} ranks")
    return found[0]


def train(
    state: State, run: str, steps: int, save_every: int, place: Callable[[str, int], milepost.Store | str]
) -> None:
    """Train from the step of `state` to step `steps`. `place(run, step)` returns where a step is saved."""
    model, optimizer, scheduler = state["model"], state["optim"], state["sched"]
    while state["step"] < steps:
        step = state["step"] = state["step"] + 1
        inputs, targets = batch(step)
        loss = F.cross_entropy(model(inputs), targets.flatten())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
        say(f"step {step}  loss {global_mean(loss)!r}")
        if step % save_every == 0:
            milepost.save(state, place(run, step))


def global_mean(loss: Tensor) -> float:
    """The mean over the global batch; every rank has an equal part of it."""
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def say(text: str) -> None:
    """Print once, not once per rank."""
    if dist.get_rank() == 0:
        print(text, flush=True)


def main() -> None:
    """Start or resume, and train to the end."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("run", help="the folder, or the URL, for this run's checkpoints")
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--save-every", type=int, default=4)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    state = make_state(options.steps)
    resume(state, options.run)
    train(state, options.run, options.steps, options.save_every, checkpoint_at)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
