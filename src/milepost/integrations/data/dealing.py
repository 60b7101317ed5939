"""Which samples of an epoch are left, and which rank reads which of them: pure functions over orders and counts.

An epoch has one order of all samples. Ranks read it in stretches: one for each number of ranks that the job had during
this epoch. In a stretch, rank r of w reads every w-th sample of what was left, from the r-th on, as torch's
`DistributedSampler` deals them. What all ranks read together defines what is left for the next stretch.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from milepost.errors import InvalidState

Order = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class Stretch:
    """A part of an epoch that a fixed number of ranks read: how many samples each of them took."""

    world: int
    drop_last: bool
    counts: tuple[int, ...]

    def packed(self) -> list[Any]:
        """As plain values. One number stands for equal counts, so that a job of 10,000 ranks has a small record."""
        counts = self.counts[0] if len(set(self.counts)) == 1 else list(self.counts)
        return [self.world, self.drop_last, counts]

    @classmethod
    def unpacked(cls, packed: Sequence[Any]) -> "Stretch":
        """The stretch that `packed` gave."""
        world, drop_last, counts = packed
        return cls(world, drop_last, (counts,) * world if isinstance(counts, int) else tuple(counts))


def share(todo: Order, world: int, rank: int, *, drop_last: bool) -> Order:
    """What one rank reads of `todo`. All ranks get the same number of samples.

    Where `todo` does not divide, its end is left out (`drop_last`) or its start is read twice, as torch's sampler does.
    """
    if drop_last:
        return todo[: len(todo) // world * world][rank::world]
    missing = -len(todo) % world
    padding = np.resize(todo, missing) if len(todo) else todo
    return np.concatenate([todo, padding])[rank::world]


def left(todo: Order, stretch: Stretch) -> Order:
    """What is left of `todo` after a stretch, in the same order. Samples that were only padding were not read."""
    unread = np.ones(len(todo), dtype=bool)
    for rank, count in enumerate(stretch.counts):
        unread[rank : rank + count * stretch.world : stretch.world] = False
    return todo[unread]


@dataclass(frozen=True, slots=True)
class ShardRest:
    """What is left of one shard of a stream, or every `step`-th example of it.

    From the start of the shard, `skip` examples are passed over, one is taken, `step - 1` are passed over, one is
    taken, and so on.
    """

    shard: int
    skip: int = 0
    step: int = 1

    def split(self, ways: int) -> list["ShardRest"]:
        """Units that together hold exactly the examples of this one. Each has to read the whole shard."""
        return [replace(self, skip=self.skip + way * self.step, step=self.step * ways) for way in range(ways)]

    def packed(self) -> list[int]:
        """As plain values."""
        return [self.shard, self.skip, self.step]


def deal_units(units: Sequence[ShardRest], world: int) -> list[list[ShardRest]]:
    """The units of each rank. Those that do not divide evenly are split: each rank takes every `world`-th example."""
    whole = len(units) // world * world
    dealt = [list(units[rank:whole:world]) for rank in range(world)]
    for unit in units[whole:]:
        for rank, part in enumerate(unit.split(world)):
            dealt[rank].append(part)
    return dealt


def one_of_each(records: Sequence[dict[str, Any]], what: str) -> list[dict[str, Any]]:
    """The record of each data rank, in order. Ranks that read the same samples (tensor parallelism) say the same.

    Raises InvalidState where they do not, where one is missing, or where the ranks are not in the same epoch.
    """
    epochs = sorted({record["epoch"] for record in records})
    if len(epochs) > 1:
        raise InvalidState(
            f"the ranks that saved were in different epochs of {what}: {epochs}. What is left of an epoch is defined "
            "only if all are in the same one. Save when all ranks are, for example between two steps of all of them."
        )
    found: dict[int, dict[str, Any]] = {}
    for record in records:
        if found.setdefault(record["rank"], record) != record:
            raise InvalidState(
                f"two ranks that read the same part ({record['rank']}) of {what} had read different amounts of it. "
                "Ranks with the same sampler rank must have made the same number of steps when they save."
            )
    world = records[0]["world"]
    if sorted(found) != list(range(world)):
        missing = sorted(set(range(world)) - set(found))[:10]
        raise InvalidState(f"{what} was read by {world} data ranks, and the checkpoint lacks the part of {missing}")
    return [found[rank] for rank in range(world)]
