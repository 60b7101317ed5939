"""A run as large jobs leave it, without its data: manifests of any number of steps, tensors and ranks.

Every manifest is sealed by Milepost itself, with the division of work that a real save would have. Data files have the
right size and no content: what is simulated is what a viewer reads. Torch is not needed.
"""

import math
import os
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from functools import cached_property
from pathlib import Path
from random import Random
from typing import Any

from milepost.core.division import share_out
from milepost.core.dtypes import size_bytes
from milepost.core.history import PhaseTime
from milepost.core.layout import Cut, Grid, Layout, Mesh, Whole
from milepost.core.manifest import (
    Manifest,
    ShardFile,
    Value,
    manifest_name,
    new_manifest,
    seal,
    shard_name,
)
from milepost.core.save_id import make_save_id
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.table import TensorRow
from milepost.core.tree import nodes_of
from milepost.inspection.runs import MOST_FILES
from milepost.steps.shelf import step_name

WIDTH, VOCABULARY, RANKS_OF_A_GROUP = 4096, 128_256, 8
WEIGHTS: dict[str, tuple[int, ...]] = {
    "attention.wq.weight": (WIDTH, WIDTH),
    "attention.wk.weight": (WIDTH // 4, WIDTH),
    "attention.wv.weight": (WIDTH // 4, WIDTH),
    "attention.wo.weight": (WIDTH, WIDTH),
    "feed_forward.w1.weight": (4 * WIDTH, WIDTH),
    "feed_forward.w2.weight": (WIDTH, 4 * WIDTH),
    "feed_forward.w3.weight": (4 * WIDTH, WIDTH),
    "attention_norm.weight": (WIDTH,),
    "ffn_norm.weight": (WIDTH,),
}
MOMENTS = ("exp_avg", "exp_avg_sq")
PHASES = {"describing": 0.05, "agreeing": 0.2, "writing": 6.0, "syncing": 1.5, "committing": 0.1}
START = datetime(2026, 3, 1, tzinfo=UTC)
EVERY_S = 600
HEADER_BYTES = 8192


@dataclass(frozen=True, slots=True)
class RunSize:
    """How much to simulate, and of what every so many steps is unhealthy, unfinished or damaged (0: none is)."""

    steps: int = 1000
    tensors: int = 10_000
    ranks: int = 1024
    unhealthy_every: int = 97
    unfinished_every: int = 149
    damaged_every: int = 211
    statistics: bool = True


class SimulatedRun:
    """The manifests of a run. Steps differ in times, metrics, statistics and save id; the tensors are the same."""

    def __init__(self, size: RunSize) -> None:
        self.size = size
        self._rows = list(_rows(size))
        self._tensors, self._layouts = share_out(
            self._rows, {row.key: _layout(row, size.ranks) for row in self._rows}, size.ranks
        )

    @cached_property
    def _tree(self) -> tuple[Any, ...]:
        paths = {row.key: tuple(row.key.split(".")) for row in self._rows}
        leaves: dict[str, Any] = dict.fromkeys(paths, "tensor") | {"step": "value"}
        return nodes_of({**paths, "step": ("step",)}, leaves)

    @cached_property
    def data_bytes(self) -> int:
        """What the tensors of one step take."""
        return sum(size_bytes(row.dtype, row.shape) for row in self._rows)

    def manifest(self, number: int) -> Manifest:
        """The manifest of the step with this number, from 1."""
        random = Random(number)
        step = 100 * number
        loss = 1.8 + 9 * math.exp(-number / (0.2 * self.size.steps + 1)) + random.gauss(0, 0.05)
        bad = _is_each(number, self.size.unhealthy_every)
        metrics = {
            "loss": loss,
            "accuracy": 1 / (1 + loss),
            "learning_rate": 3e-4 * (1 - number / (self.size.steps + 1)),
        }
        spelled = [["metrics", {"dict": [[name, value] for name, value in metrics.items()]}]]
        spelled.append(["retention", {"dict": [["keep_last", self.size.steps]]}])
        share = -(-self.data_bytes // self.size.ranks) + HEADER_BYTES + 4096
        return new_manifest(
            1,
            make_save_id(1, f"{number:016x}"),
            (START + timedelta(seconds=EVERY_S * number)).isoformat(timespec="seconds"),
            "milepost 0.1.0, torch 2.13.0",
            self.size.ranks,
            metadata={"dict": spelled},
            layouts=self._layouts,
            tensors=self._tensors,
            tree=self._tree,
            values=(Value("step", step),),
            per_rank=(),
            files=tuple(
                ShardFile(rank, share, HEADER_BYTES, f"{number * rank:016x}") for rank in range(self.size.ranks)
            ),
            timings=tuple(_phases(random, self.size.ranks)),
            statistics=tuple(self._statistics(random, bad)) if self.size.statistics else (),
            health=Health(ok=False, reason="3 tensors are not finite") if bad else Health(ok=True),
        )

    def _statistics(self, random: Random, bad: bool) -> Iterator[TensorStatistics]:
        for index, row in enumerate(self._rows):
            nan = 7 if bad and index % (len(self._rows) // 3 + 1) == 0 else 0
            noise = random.random()  # so that the numbers compress no better than real ones
            rms = (0.02 + index % 17 / 1000) * (1 + 0.1 * noise)
            low, high, mean = -(5 + noise) * rms, (5 + noise * noise) * rms, (noise - 0.5) * rms / 100
            yield TensorStatistics(row.key, math.prod(row.shape), nan, 0, low, high, mean, rms)

    def write(self, folder: Path) -> None:
        """Write all steps into a folder: good ones, unhealthy ones, unfinished ones, and damaged ones."""
        for number in range(1, self.size.steps + 1):
            place = folder / step_name(100 * number)
            place.mkdir(parents=True)
            manifest = self.manifest(number)
            if _is_each(number, self.size.unfinished_every):
                left = place / shard_name(manifest.save_id, 0)
                left.parent.mkdir(parents=True)
                left.write_bytes(b"cut off")
                continue
            if (self.size.steps - number) * self.size.ranks < MOST_FILES:  # a viewer looks for no more files than that
                _write_files(place, manifest)
            data = seal(manifest)
            whole = not _is_each(number, self.size.damaged_every)
            (place / manifest_name(1)).write_bytes(data if whole else data[: len(data) // 2])


def _write_files(place: Path, manifest: Manifest) -> None:
    """Files of the right size, which take no room: all are links to one file without content."""
    first, *others = (place / shard_name(manifest.save_id, file.rank) for file in manifest.files)
    first.parent.mkdir(parents=True)
    with first.open("wb") as file:
        file.truncate(manifest.files[0].size_bytes)
    for other in others:
        os.link(first, other)


def _is_each(number: int, every: int) -> bool:
    return bool(every) and number % every == 0


def _rows(size: RunSize) -> Iterator[TensorRow]:
    """The tensors of a transformer in training: weights in bf16, each with two moments in fp32."""
    count = 0
    for key, shape in _weights():
        for name, dtype in (
            (f"model.{key}", "bfloat16"),
            *((f"optim.state.model.{key}.{m}", "float32") for m in MOMENTS),
        ):
            if count == size.tensors:
                return
            count += 1
            yield TensorRow(name, dtype, shape, "tensor", None)


def _weights() -> Iterator[tuple[str, tuple[int, ...]]]:
    yield "tok_embeddings.weight", (VOCABULARY, WIDTH)
    yield "norm.weight", (WIDTH,)
    yield "output.weight", (VOCABULARY, WIDTH)
    layer = 0
    while True:
        for name, shape in WEIGHTS.items():
            yield f"layers.{layer}.{name}", shape
        layer += 1


def _layout(row: TensorRow, ranks: int) -> Layout:
    """Matrices are cut by both axes of a mesh, vectors by one and copied by the other. One process holds all."""
    if ranks == 1:
        return Whole("0")
    group = min(RANKS_OF_A_GROUP, ranks)
    mesh = Mesh.of((ranks // group, group), range(ranks // group * group))
    if len(row.shape) == 1:
        return Grid(mesh, (None, Cut(0)))
    by_column = "wo." in row.key or "w2." in row.key
    return Grid(mesh, (Cut(0), Cut(1 if by_column else 0)))


def _phases(random: Random, ranks: int) -> Iterator[PhaseTime]:
    for phase, usual_s in PHASES.items():
        median_s = usual_s * random.uniform(0.9, 1.3)
        slowest_s = median_s * random.uniform(1, 2.5)
        yield PhaseTime(phase, round(median_s, 6), round(slowest_s, 6), random.randrange(ranks))
