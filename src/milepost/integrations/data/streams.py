"""Positions in streams: Hugging Face streaming datasets, shard by shard, so that any rank can take over any shard.

A position is a number of examples of a shard. It is not the `state_dict` of the dataset: with `datasets` 4.7, resuming
from that one skips examples after a `map` or `filter` over Arrow data. So a shard that was read in part is read from
its start again, and what was given already is passed over.
"""

import hashlib
from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch.utils.data import IterableDataset, get_worker_info

from milepost.errors import InvalidState
from milepost.integrations.data.dealing import ShardRest, deal_units, one_of_each


def split_dataset_by_node(
    dataset: Any, rank: int, world_size: int, *, shuffle_shards: bool = False, seed: int = 0
) -> "ShardStream":
    """The part of a Hugging Face streaming dataset that one rank reads, with a position that can move to other ranks.

    Use it where you would use the function of this name in `datasets`. Each rank reads whole shards; those that do not
    divide evenly are read by all ranks, each taking every `world_size`-th example. With `shuffle_shards`, each epoch
    (`set_epoch`) has another order of shards. Steps of the dataset that draw random numbers need a `seed`.
    """
    return ShardStream(dataset, rank, world_size, shuffle_shards=shuffle_shards, seed=seed)


class ShardStream(IterableDataset[Any]):
    """One rank's part of a streaming dataset. Iterate it, or give it to a `StatefulDataLoader` with any workers."""

    def __init__(
        self, dataset: Any, rank: int, world_size: int, *, shuffle_shards: bool = False, seed: int = 0
    ) -> None:
        _check_kind(dataset)
        if not 0 <= rank < world_size:
            raise InvalidState(f"rank {rank} is not one of {world_size} ranks")
        self.rank, self.world_size = rank, world_size
        self._dataset, self._shuffle, self._seed = dataset, shuffle_shards, seed
        # Shared memory: workers that live on must see the epoch, and whoever has begun the rest says so, to all.
        self._epoch = _shared(torch.zeros(1, dtype=torch.int64, device="cpu"))
        self._waiting = _shared(torch.zeros(1, dtype=torch.bool, device="cpu"))
        self._rest: tuple[int, list[ShardRest]] | None = None
        self._over: int | None = None
        self._place: dict[str, Any] | None = None

    @property
    def epoch(self) -> int:
        """The epoch that an iteration reads."""
        return int(self._epoch.item())

    def set_epoch(self, epoch: int) -> None:
        """Choose the order of shards of the next iteration."""
        self._epoch.fill_(epoch)

    @property
    def num_shards(self) -> int:
        """Of the whole dataset."""
        return int(self._dataset.num_shards)

    def order(self) -> str:
        """A digest of what the order of examples depends on besides the files: equal digests, equal orders."""
        steps = _steps(self._dataset._ex_iterable)  # noqa: SLF001
        drawn = [g.bit_generator.state for g in (getattr(step, "generator", None) for step in steps) if g is not None]
        return hashlib.sha256(repr([self._shuffle, self._seed, drawn]).encode()).hexdigest()[:16]

    def __iter__(self) -> Iterator[Any]:
        self._place = self._start()
        return self._read(self._place, _worker()[0])

    def _start(self) -> dict[str, Any]:
        """The place at which an iteration by this process would begin."""
        worker, _ = _worker()
        rest = self._rest is not None and worker < len(self._waiting) and bool(self._waiting[worker])
        return {"rest": rest, "epoch": self.epoch, "done": 0, "unit": None, "begun": False, "ended": False}

    def _read(self, place: dict[str, Any], worker: int) -> Iterator[Any]:
        units = self.units(place)
        if place["rest"]:
            self._waiting[worker] = False
        place["begun"] = True
        self._over = None
        for unit in units[worker :: _worker()[1]]:
            yield from self._read_unit(unit, place)
            place["unit"] = None
            place["done"] += 1
        place["ended"] = True

    def _read_unit(self, unit: ShardRest, place: dict[str, Any]) -> Iterator[Any]:
        shard = self._dataset.shard(self.num_shards, unit.shard)
        shard.set_epoch(place["epoch"])
        # Not `iter(shard)`: in a worker that would give this one shard to one of the workers only.
        for number, batch in enumerate(shard.iter(batch_size=1)):
            if number >= unit.skip and (number - unit.skip) % unit.step == 0:
                place["unit"] = [unit.shard, number + unit.step, unit.step]
                yield {name: column[0] for name, column in batch.items()} if isinstance(batch, dict) else batch

    def units(self, place: dict[str, Any]) -> list[ShardRest]:
        """All units of this rank in an iteration."""
        if place["rest"]:
            assert self._rest is not None
            epoch, units = self._rest
            if epoch != place["epoch"]:
                raise InvalidState(
                    f"the checkpoint was saved in the middle of epoch {epoch}, and the stream is set to epoch "
                    f"{place['epoch']}: the rest of epoch {epoch} would be lost. Begin with that one, or do not load "
                    "the position of the stream."
                )
            return units
        order: Sequence[int] = range(self.num_shards)
        if self._shuffle:
            generator = torch.Generator(device="cpu").manual_seed(self._seed + place["epoch"])
            order = torch.randperm(self.num_shards, generator=generator, dtype=torch.int64, device="cpu").tolist()
        return deal_units([ShardRest(shard) for shard in order], self.world_size)[self.rank]

    def state_dict(self) -> dict[str, Any]:
        """How far this process has read its units. Torchdata collects it from its workers."""
        return dict(self._place or self._start())

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Not the way: a position is loaded by `Loader`, for all ranks and workers together."""
        del state_dict
        raise InvalidState("load the position of a stream with `milepost.integrations.data.Loader`, not by itself")

    def go_on(self, epoch: int, units: list[ShardRest] | None, workers: int, *, over: bool) -> None:
        """Let the next iteration of each worker read these units, and whole epochs after that."""
        self.set_epoch(epoch)
        self._rest = None if units is None else (epoch, units)
        waiting = torch.full((max(workers, 1),), units is not None, dtype=torch.bool, device="cpu")
        self._waiting = _shared(waiting)
        self._place = None
        self._over = epoch if over else None

    def is_over(self) -> bool:
        """Whether the epoch was over when it was saved, and nothing was read since."""
        return self._over == self.epoch


class ShardPosition:
    """How far a rank has read its part of a stream: what `Loader` saves and loads."""

    def __init__(self, stream: ShardStream, loader: Any = None) -> None:
        self._stream, self._loader = stream, loader

    @property
    def epoch(self) -> int:
        """The epoch to go on with."""
        record = self.state_dict()
        return int(record["epoch"]) + bool(record["finished"])

    def state_dict(self) -> dict[str, Any]:
        """A record of plain values: the units that are left."""
        places, finished = self._places()
        stream = self._stream
        if places[0]["epoch"] != stream.epoch:  # given up for another epoch
            places, finished = [{"rest": False, "epoch": stream.epoch, "done": 0, "unit": None, "begun": False}], False
        units, begun = [], any(place["begun"] or place["rest"] for place in places)
        for number, place in enumerate(places):
            mine = stream.units(place)[number :: len(places)][place["done"] :]
            units += [ShardRest(*place["unit"]), *mine[1:]] if place["unit"] is not None else mine
        return {
            "kind": "shards",
            "shards": stream.num_shards,
            "order": stream.order(),
            "epoch": stream.epoch,
            "world": stream.world_size,
            "rank": stream.rank,
            "begun": begun,
            "units": [unit.packed() for unit in ([] if finished else units)],
            "finished": finished,
        }

    def _places(self) -> tuple[list[dict[str, Any]], bool]:
        """How far each worker has read (the process itself where there are none), and whether all is read."""
        iterator = None if self._loader is None else self._loader._iterator  # noqa: SLF001  # shown nowhere else
        if iterator is None or self._loader.num_workers == 0:
            place = self._stream.state_dict()
            ended = place["ended"] if self._loader is None else iterator is not None and iterator._finished  # noqa: SLF001
            return [place], ended or self._stream.is_over()
        state = iterator.state_dict()
        workers = state["_snapshot"]["_worker_snapshots"]
        places = [workers[f"worker_{number}"]["dataset_state"] for number in range(self._loader.num_workers)]
        return places, state["_iterator_finished"]

    def load_state_dict(self, record: dict[str, Any]) -> None:
        """Go on from a record: the next iteration gives the rest of its epoch."""
        self.check(record)
        workers = 0
        if self._loader is not None:
            self._loader.load_state_dict({})  # whatever was being iterated is given up
            workers = self._loader.num_workers
        rest = record["begun"] and not record["finished"]
        units = [ShardRest(*unit) for unit in record["units"]] if rest else None
        self._stream.go_on(record["epoch"], units, workers, over=record["finished"])

    def check(self, record: Any) -> None:
        """Raise InvalidState for a record that does not belong to this stream."""
        if not isinstance(record, dict) or record.get("kind") != "shards":
            raise InvalidState(
                "what was saved is not the position of a stream of shards. Load it into the kind of object that saved "
                "it, or take the key out of the state."
            )
        if record["shards"] != self._stream.num_shards:
            raise InvalidState(
                f"the dataset had {record['shards']} shards when its position was saved, and has "
                f"{self._stream.num_shards} now, so the rest of the epoch is not defined. Load it with the same files."
            )
        if record["order"] != self._stream.order() and record["begun"] and not record["finished"]:
            raise InvalidState(
                "the examples came in another random order when the position of the stream was saved, so the rest of "
                "the epoch is not defined. Give a seed, the same on all ranks and in all runs, to each step that draws "
                "random numbers (`.shuffle(seed=...)`, `interleave_datasets(..., seed=...)`, `split_dataset_by_node`)."
            )

    def fits(self, record: Any) -> bool:
        """Whether this rank goes on from its own record."""
        self.check(record)
        return bool(record["world"] == self._stream.world_size and record["rank"] == self._stream.rank)

    def remap(self, records: list[Any], rank: int, world: int) -> dict[str, Any]:
        """The record from which a rank of another number of ranks goes on."""
        del rank, world  # of the job; the stream's own are what counts
        for record in records:
            self.check(record)
        old = one_of_each(records, "the stream")
        units = [ShardRest(*unit) for record in old for unit in record["units"]]
        mine = deal_units(units, self._stream.world_size)[self._stream.rank]
        return {
            **old[0],
            "world": self._stream.world_size,
            "rank": self._stream.rank,
            "begun": any(record["begun"] for record in old),
            "units": [unit.packed() for unit in mine],
            "finished": all(record["finished"] for record in old),
        }


def _shared(tensor: torch.Tensor) -> torch.Tensor:
    """The tensor in memory that the workers of a loader share."""
    tensor.share_memory_()  # type: ignore[no-untyped-call]
    return tensor


def _worker() -> tuple[int, int]:
    """The number of this worker of a loader, and how many there are."""
    info = get_worker_info()
    return (info.id, info.num_workers) if info is not None else (0, 1)


def _check_kind(dataset: Any) -> None:
    """Refuse what is not a whole stream of shards."""
    if not hasattr(dataset, "_ex_iterable") or not hasattr(dataset, "shard"):
        raise InvalidState(
            f"split_dataset_by_node takes a Hugging Face IterableDataset (load_dataset(..., streaming=True)), not "
            f"{type(dataset).__name__}. For a map-style dataset, use a StatefulDataLoader with a DistributedSampler."
        )
    if dataset._distributed:  # noqa: SLF001  # `datasets` shows it nowhere else
        raise InvalidState(
            "this dataset was split by the function of `datasets` already, and a rank cannot take over what another "
            "one left of it. Give `milepost.integrations.data.split_dataset_by_node` the dataset before the split."
        )


def _steps(step: Any) -> Iterator[Any]:
    """All steps of a dataset's pipeline."""
    yield step
    for inner in [getattr(step, "ex_iterable", None), *getattr(step, "ex_iterables", [])]:
        if inner is not None:
            yield from _steps(inner)
