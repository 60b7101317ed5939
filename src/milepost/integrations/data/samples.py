"""Positions in map-style datasets: a `StatefulDataLoader` over a distributed sampler."""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from milepost.errors import InvalidState
from milepost.integrations.data.dealing import Order, Stretch, left, one_of_each, share


@dataclass(frozen=True, slots=True)
class _Begun:
    """Where an iteration begins: the epoch, what earlier stretches of it read, what this rank read of its share."""

    epoch: int
    seed: int
    shuffle: bool
    stretches: tuple[Stretch, ...] = ()
    read: int = 0


class _Walk(Iterator[int]):
    """One iteration over the samples of a rank. It begins when its first sample is asked for, as samplers do."""

    def __init__(self, owner: "ResumingSampler") -> None:
        self._owner = owner
        self._samples: Iterator[int] | None = None
        self.begun: _Begun | None = None
        self.length = 0

    def begin(self, begun: _Begun, length: int, samples: Iterator[int] | None = None) -> None:
        """Say what this iteration reads."""
        self.begun, self.length, self._samples = begun, length, samples

    def __next__(self) -> int:
        if self._samples is None:
            self._owner.begin(self)
        assert self._samples is not None
        return next(self._samples)


class ResumingSampler(Sampler[int]):
    """Stands before a distributed sampler: gives the rest of an epoch first, and whole epochs from then on."""

    def __init__(self, sampler: Any) -> None:
        self.sampler = sampler
        self.rest: _Begun | None = None
        self.over: _Begun | None = None  # an epoch that was over when its position was saved
        self.walk: _Walk | None = None

    def __iter__(self) -> Iterator[int]:
        self.walk = _Walk(self)
        return self.walk

    def __len__(self) -> int:
        return len(self.sampler)

    def now(self) -> _Begun:
        """Where an iteration would begin now."""
        return self.rest or _Begun(self.sampler.epoch, self.sampler.seed, self.sampler.shuffle)

    def begin(self, walk: _Walk) -> None:
        """Begin an iteration: with the rest of an epoch if there is one."""
        begun = self.now()
        if begun.epoch != self.sampler.epoch:
            raise InvalidState(
                f"the checkpoint was saved in the middle of epoch {begun.epoch}, and the sampler is set to epoch "
                f"{self.sampler.epoch}: the rest of epoch {begun.epoch} would be lost. Begin with that one: "
                "`for epoch in range(loader_state.epoch, epochs)`, or do not load the position of the loader."
            )
        self.over = None
        if self.rest is None:
            walk.begin(begun, len(self.sampler), iter(self.sampler))
            return
        self.rest = None
        mine = self._share(begun)
        walk.begin(begun, len(mine), iter(mine.tolist()))

    def _share(self, begun: _Begun) -> Order:
        sampler = self.sampler
        todo = self.order(begun)
        for stretch in begun.stretches:
            todo = left(todo, stretch)
        mine = share(todo, sampler.num_replicas, sampler.rank, drop_last=sampler.drop_last)
        return mine[begun.read :]

    def order(self, begun: _Begun) -> Order:
        """All samples of an epoch in their order, from torch's own sampler for one rank."""
        samples = range(len(self.sampler.dataset))
        whole: Any = DistributedSampler(samples, 1, 0, shuffle=begun.shuffle, seed=begun.seed)  # type: ignore[arg-type]
        whole.set_epoch(begun.epoch)
        return np.fromiter(whole, np.int64, len(samples))


class SamplePosition:
    """How far a rank has read a loader over a distributed sampler: what `Loader` saves and loads."""

    def __init__(self, loader: Any) -> None:
        self._loader = loader
        sampler = loader.batch_sampler.sampler
        if isinstance(sampler, ResumingSampler):
            self._sampler = sampler
            return
        self._sampler = loader.batch_sampler.sampler = ResumingSampler(sampler)
        if _is_reading(loader):  # it was begun before Milepost knew of it: by the sampler itself
            self._sampler.walk = _Walk(self._sampler)
            self._sampler.walk.begin(self._sampler.now(), len(sampler), iter(()))

    @property
    def epoch(self) -> int:
        """The epoch to go on with."""
        record = self.state_dict()
        return int(record["epoch"]) + bool(record["finished"])

    def state_dict(self) -> dict[str, Any]:
        """A small record of plain values: what this rank read of the epoch, and what was read before it began."""
        sampler = self._sampler.sampler
        begun, read, finished = self._now()
        return {
            "kind": "samples",
            "samples": len(sampler.dataset),
            "epoch": begun.epoch,
            "seed": begun.seed,
            "shuffle": begun.shuffle,
            "stretches": [stretch.packed() for stretch in begun.stretches],
            "world": sampler.num_replicas,
            "rank": sampler.rank,
            "drop_last": sampler.drop_last,
            "read": read,
            "finished": finished,
        }

    def _now(self) -> tuple[_Begun, int, bool]:
        """Where the iteration that runs began, the samples of its share that this rank read, whether it is over."""
        walk, iterator = self._sampler.walk, self._loader._iterator  # noqa: SLF001  # torchdata shows it nowhere else
        now = self._sampler.now()
        begun = walk.begun if walk is not None and iterator is not None else None
        if begun is None or walk is None or begun.epoch != self._sampler.sampler.epoch:
            over = self._sampler.over
            if over is not None and over.epoch == self._sampler.sampler.epoch:
                return over, over.read, True
            return now, now.read, False  # not begun, or given up for another epoch
        batches: int = iterator._num_yielded  # noqa: SLF001
        given = min(batches * self._loader.batch_sampler.batch_size, walk.length)
        return begun, begun.read + given, iterator._finished  # noqa: SLF001

    def load_state_dict(self, record: dict[str, Any]) -> None:
        """Go on from a record: the next iteration gives the rest of its epoch."""
        self.check(record)
        self._loader.load_state_dict({})  # whatever was being iterated is given up
        sampler = self._sampler
        sampler.walk = None
        sampler.sampler.set_epoch(record["epoch"])
        stretches = tuple(Stretch.unpacked(packed) for packed in record["stretches"])
        begun = _Begun(record["epoch"], record["seed"], record["shuffle"], stretches, record["read"])
        sampler.over = begun if record["finished"] else None
        sampler.rest = begun if not record["finished"] and (stretches or begun.read) else None

    def check(self, record: Any) -> None:
        """Raise InvalidState for a record that does not belong to this loader."""
        if not isinstance(record, dict) or record.get("kind") != "samples":
            raise InvalidState(
                "what was saved is not the position of a loader over a distributed sampler. Load it into the kind of "
                "object that saved it, or take the key out of the state."
            )
        samples = len(self._sampler.sampler.dataset)
        if record["samples"] != samples:
            raise InvalidState(
                f"the dataset had {record['samples']} samples when the position of its loader was saved, and has "
                f"{samples} now, so the rest of the epoch is not defined. Load it with the same dataset, or take the "
                "key out of the state and begin a new epoch."
            )

    def fits(self, record: Any) -> bool:
        """Whether this rank goes on from its own record: it reads the same share as the rank that saved it."""
        self.check(record)
        sampler = self._sampler.sampler
        mine = {"world": sampler.num_replicas, "rank": sampler.rank, "drop_last": sampler.drop_last}
        return mine == {name: record[name] for name in mine}

    def remap(self, records: list[Any], rank: int, world: int) -> dict[str, Any]:
        """The record from which a rank of another number of ranks goes on."""
        del rank, world  # of the job; the sampler's own are what counts
        for record in records:
            self.check(record)
        old = one_of_each(records, "the loader")
        finished = all(record["finished"] for record in old)
        first, sampler = old[0], self._sampler.sampler
        for record in old:
            differ = [name for name in ("seed", "shuffle", "drop_last", "stretches") if record[name] != first[name]]
            if differ:
                raise InvalidState(
                    f"the samplers of data ranks 0 and {record['rank']} differed in {', '.join(differ)}, so they read "
                    "different orders of the dataset. Give the samplers of all ranks the same settings."
                )
        stretch = Stretch(first["world"], first["drop_last"], tuple(record["read"] for record in old))
        new = {"world": sampler.num_replicas, "rank": sampler.rank, "drop_last": sampler.drop_last}
        return {**first, **new, "stretches": [*first["stretches"], stretch.packed()], "read": 0, "finished": finished}


def _is_reading(loader: Any) -> bool:
    iterator = loader._iterator  # noqa: SLF001
    return iterator is not None and iterator._num_yielded > 0  # noqa: SLF001
