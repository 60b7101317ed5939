"""The jobs that `planning.py` plans, and how many of them."""

from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import msgspec
import torch

import milepost
from milepost.core.layout import Grid
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.table import TensorRow
from milepost.testing import on_mesh, simulate_save

SHAPE = (16384, 1024)
STAGES, SHARDS, TENSOR_PARALLEL = 8, 8, 4
FSDP, SCALARS, HSDP, PIPELINE, LONG_PIPELINE = "FSDP", "FSDP + scalars", "HSDP", "3-D", "3-D, all on each rank"
KINDS = (FSDP, SCALARS, HSDP, PIPELINE, LONG_PIPELINE)
BAR_WORLD = 1024
TIMEOUT_S = 300.0


@dataclass(frozen=True, slots=True)
class DcpSize:
    """A job for DCP, and the number of rounds in which it is measured."""

    world: int
    tensors: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    worlds: tuple[int, ...]
    tensors: int
    rounds: int
    save_rounds: int
    dcp: tuple["DcpSize", ...]
    real_worlds: tuple[int, ...]
    real_tensors: int


FULL = Sizes(
    (64, 256, 1024, 4096, 16384),
    1000,
    rounds=5,
    save_rounds=2,
    # A quarter of the tensors for 1,024 ranks: with all of them DCP takes longer than the rest of the benchmark.
    dcp=(DcpSize(64, 1000, 3), DcpSize(256, 1000, 1), DcpSize(1024, 250, 1)),
    real_worlds=(16, 64, 256, 1024),
    real_tensors=10,
)
QUICK = Sizes((64, 1024, 16384), 1000, 1, 1, (DcpSize(64, 250, 1),), (16,), 10)
TINY = Sizes((64, 1024), 48, 1, 1, (DcpSize(64, 48, 1),), (16,), 5)


# The jobs


@dataclass(frozen=True, slots=True)
class Job:
    """A kind of job: for each group of ranks with equal tensors, the names of these and their sharding."""

    kind: str
    world: int
    tensors: int

    @property
    def groups(self) -> dict[str, tuple[list[str], Grid]]:
        """The keys and the sharding of the tensors, by group of ranks."""
        return _groups(self)

    def state(self, rank: int, tiny: bool) -> dict[str, Any]:
        """What a rank passes to `save`. Tiny tensors have one element on each rank; the others take no memory."""
        keys, grid = next(group for members, group in self.groups.items() if rank in unpack_ranks(members))
        shape = _smallest(grid) if tiny else SHAPE
        local = torch.zeros(1).expand(grid.local_shape(shape, rank))
        state: dict[str, Any] = {"model": {key: milepost.Sharded.on_grid(shape, local, grid, rank) for key in keys}}
        if self.kind == SCALARS:
            state["optimizer"] = {key: {"step": torch.tensor(1.0)} for key in keys}
        return state

    def rows(self) -> dict[str, list[TensorRow]]:
        """The same for the simulator."""
        return {
            members: [TensorRow(key, "float32", SHAPE, "tensor", grid) for key in keys]
            for members, (keys, grid) in self.groups.items()
        }


@lru_cache
def _groups(job: Job) -> dict[str, tuple[list[str], Grid]]:
    everyone, names = pack_ranks(range(job.world)), keys_of(0, job.tensors)
    if job.kind in (FSDP, SCALARS):
        return {everyone: (names, on_mesh((job.world,), (0,)))}
    if job.kind == HSDP:
        return {everyone: (names, on_mesh((job.world // SHARDS, SHARDS), (None, 0)))}
    each, count = job.world // STAGES, job.tensors if job.kind == LONG_PIPELINE else job.tensors // STAGES
    found = {}
    for stage in range(STAGES):
        members = pack_ranks(range(stage * each, (stage + 1) * each))
        mesh = on_mesh((each // TENSOR_PARALLEL, TENSOR_PARALLEL), (0, 1), members)
        found[members] = (keys_of(stage * count, count), mesh)
    return found


@lru_cache
def terms_of(job: Job) -> bytes:
    """What the coordinator sends to the ranks of this job."""
    return msgspec.json.encode(simulate_save(job.world, job.rows()).terms)


def keys_of(start: int, count: int) -> list[str]:
    return [f"layers.{i // 7}.block.{i % 7}.weight.{i}" for i in range(start, start + count)]


def _smallest(grid: Grid) -> tuple[int, ...]:
    shape = [1] * len(SHAPE)
    for size, cut in zip(grid.mesh.shape, grid.cuts, strict=True):
        if cut is not None:
            shape[cut.dim] *= size
    return tuple(shape)
