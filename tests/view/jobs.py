"""Runs and checkpoints for the tests of the page."""

import torch

import milepost
from milepost.core.limits import MIB
from milepost.inspection.verified import record_verified

WIDTH = 64
NAN_KEY = "model.layers.1.w"


def state_of(step):
    """A small model. Layer 0 never changes, half of the embedding does, and the rest all the time."""
    g = torch.Generator().manual_seed(1)
    embedding = torch.randn(4096, WIDTH, generator=g)
    embedding[:2048] += step
    layers = {
        str(i): {"w": torch.randn(WIDTH, WIDTH, generator=g) + step * (i > 0), "b": torch.ones(3)} for i in range(3)
    }
    model = {"embedding": embedding, "layers": layers}
    return {"model": model, "step": step, "config": {"dim": WIDTH, "names": ["a", "b"]}, "fixed": 1}


def save_run(place):
    """Steps 100 to 600: 300 unhealthy, 400 damaged, 600 unfinished; 100 and 200 verified."""
    keeper = milepost.Checkpointer(place, keep_last=10, keep_best=1, best="loss", statistics="histogram", healthy=True)
    with keeper:
        for step in range(100, 600, 100):
            state = state_of(step)
            if step == 300:
                state["model"]["layers"]["1"]["w"][0, :5] = float("nan")
            metrics = {"loss": 1000 / step, "learning_rate": 1e-4 * step}
            keeper.save(state, step, metrics=metrics, metadata={"commit": "4f1c2aa"})
    for step in (100, 200):
        record_verified(folder(place, step), 1)
    victim = next((folder(place, 400) / "data").rglob("*.safetensors"))
    victim.write_bytes(victim.read_bytes()[:-100])
    left = folder(place, 600) / "data" / "00000001-0123456789abcdef"
    left.mkdir(parents=True)
    (left / "00000.safetensors").write_bytes(b"half")


def folder(place, step):
    """The folder of a step."""
    return place / f"step-{step:010}"


def save_meshed(rank, place):
    """On four ranks: even, uneven, strided and replicated tensors, copies that share the writing, and boxes."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))

    def cut(shape, *placements):
        return distribute_tensor(torch.arange(float(torch.Size(shape).numel())).reshape(shape), mesh, placements)

    state = {
        "even": cut((64, 32), Shard(0), Shard(1)),
        "uneven": cut((10, 7), Shard(0), Shard(1)),
        "twice": cut((21, 4), Shard(0), Shard(0)),
        "half": cut((16, 12), Replicate(), Shard(1)),
        "copied": cut((2 * MIB // 4, 2), Replicate(), Replicate()),
        "cube": cut((4, 6, 10), Shard(2), Shard(0)),
        "vector": cut((9,), Shard(0), Replicate()),
        "scalar": torch.tensor(3.5),
        "empty": torch.zeros(0, 4),
        "mine": milepost.PerRank(torch.arange(rank + 1)),
    }
    state["tied"] = state["even"]
    milepost.save(state, place)
