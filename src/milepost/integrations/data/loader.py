"""`Loader`: the position of a data loader as a part of a state."""

from typing import Any

from torch.utils.data import IterableDataset
from torch.utils.data.distributed import DistributedSampler

from milepost.errors import InvalidState
from milepost.integrations.data.samples import ResumingSampler, SamplePosition
from milepost.integrations.data.streams import ShardPosition, ShardStream
from milepost.state.take_apart import PerRank

_BY_HAND = "`milepost.PerRank(loader)` resumes it on the same number of ranks."


class Loader(PerRank[Any]):
    """The position of a data loader, for `save` and `load`, on any number of ranks.

    `loader`: torchdata's `StatefulDataLoader` over a map-style dataset with a distributed sampler, or over a stream
    that `split_dataset_by_node` of this module gave; or such a stream itself. What all ranks have read of the epoch
    defines what is left of it. A load deals that out among the ranks that there are now, and the next iteration reads
    it. Later epochs are whole ones.

    Raises InvalidState for loaders whose position cannot move to another rank exactly; the error says why.

    ```python
    import milepost
    from milepost.integrations.data import Loader
    from torchdata.stateful_dataloader import StatefulDataLoader
    from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler

    samples = list(range(8))
    sampler = StatefulDistributedSampler(samples, num_replicas=1, rank=0, shuffle=False)
    loader = StatefulDataLoader(samples, batch_size=3, sampler=sampler)
    state = {"loader": Loader(loader)}
    print(next(iter(loader)))
    milepost.save(state, "memory://loader")
    milepost.load(state, "memory://loader")
    print([batch.tolist() for batch in loader])
    ```
    """

    def __init__(self, loader: Any) -> None:
        position = _position(loader)
        super().__init__(position, position.remap)

    @property
    def epoch(self) -> int:
        """The epoch to go on with: `for epoch in range(state["loader"].epoch, epochs)`."""
        position: SamplePosition | ShardPosition = self.value
        return position.epoch

    def fits(self, value: Any) -> bool:
        """Whether this rank reads the same share as the rank that saved `value`: with as many data ranks."""
        position: SamplePosition | ShardPosition = self.value
        return position.fits(value)


def _position(loader: Any) -> SamplePosition | ShardPosition:
    if isinstance(loader, ShardStream):
        return ShardPosition(loader)
    try:
        from torchdata.stateful_dataloader import StatefulDataLoader  # noqa: PLC0415  # an optional framework
    except ImportError as error:
        raise ImportError("milepost.integrations.data needs torchdata: pip install 'torchdata>=0.11'") from error
    if not isinstance(loader, StatefulDataLoader):
        raise InvalidState(
            f"Loader takes torchdata's StatefulDataLoader, not {type(loader).__name__}: other loaders do not say how "
            "far they were read. torchdata.stateful_dataloader.StatefulDataLoader takes the same arguments as torch's."
        )
    if loader.num_workers > 0 and not loader.in_order:
        raise InvalidState(
            "this loader gives prefetched batches in any order (in_order=False), so which samples were read is not "
            f"known. Make it with in_order=True. {_BY_HAND}"
        )
    if isinstance(loader.dataset, IterableDataset) or loader.batch_sampler is None:
        return _stream(loader)
    _check_samplers(loader)
    return SamplePosition(loader)


def _stream(loader: Any) -> ShardPosition:
    stream = loader.dataset
    if not isinstance(stream, ShardStream):
        raise InvalidState(
            f"the samples of {type(stream).__name__} that a rank read cannot be named, so what is left cannot be dealt "
            "out among other ranks. Split a Hugging Face stream with milepost.integrations.data.split_dataset_by_node; "
            f"give a map-style loader a batch_size and a DistributedSampler. {_BY_HAND}"
        )
    if loader.num_workers > 0 and loader.snapshot_every_n_steps != 1:
        raise InvalidState("make the loader of a stream with snapshot_every_n_steps=1: its workers say where they are")
    return ShardPosition(stream, loader)


def _check_samplers(loader: Any) -> None:
    """Only samplers whose order is known: those of torch and torchdata themselves."""
    from torchdata.stateful_dataloader.sampler import (  # noqa: PLC0415  # an optional framework
        BatchSampler,
        StatefulDistributedSampler,
    )

    batches = loader.batch_sampler
    if type(batches) is not BatchSampler:
        raise InvalidState(
            f"the batches of {type(batches).__name__} are not known to be runs of its sampler. Pass `batch_size` and "
            f"`sampler` to the loader instead. {_BY_HAND}"
        )
    sampler = batches.sampler
    known = (DistributedSampler, StatefulDistributedSampler, ResumingSampler)
    if type(sampler).__iter__ not in [kind.__iter__ for kind in known]:
        raise InvalidState(
            f"the order in which {type(sampler).__name__} gives samples is not known, so what is left of an epoch "
            "cannot be dealt out. Use torch's DistributedSampler or torchdata's StatefulDistributedSampler (also on "
            f"one rank, with num_replicas=1, rank=0). {_BY_HAND}"
        )
    if hasattr(loader.dataset, "state_dict") and hasattr(loader.dataset, "load_state_dict"):
        raise InvalidState(
            f"{type(loader.dataset).__name__} has a state of its own (state_dict), which belongs to one rank and "
            f"cannot be dealt out. Use a dataset without one. {_BY_HAND}"
        )
