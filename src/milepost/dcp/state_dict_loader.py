"""`load`."""

import os
from typing import TYPE_CHECKING, Any

from milepost.dcp._engine.calls import comm_of, load_with
from milepost.dcp._engine.lent import lend
from milepost.dcp._storage_utils import storage_setup
from milepost.dcp.state_dict_saver import taking_storage_second
from milepost.planning.default import EmptyStateDictLoadPlanner
from milepost.planning.protocol import LoadPlanner, StorageReader
from milepost.planning.stateful_dict import expand_to_fill

if TYPE_CHECKING:
    import torch.distributed as dist

__all__ = ["load", "load_state_dict"]


def load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: "dist.ProcessGroup | None" = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    """`load` as it was called before, with the rank that decides; stateful objects are not opened."""
    storage_reader.reset()
    load_with(lambda: state_dict, storage_reader, planner, comm_of(process_group, no_dist, coordinator_rank))


@taking_storage_second
def load(
    state_dict: dict[str, Any],
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    planner: LoadPlanner | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    no_dist: bool = False,
) -> None:
    """Load into the tensors of `state_dict`, replace its values, and give stateful objects their state.

    An error on any rank raises CheckpointException on all ranks. Stateful objects are asked, and filled, in the order
    of their keys on every rank: their methods may be collectives.
    """
    reader = storage_setup(storage_reader, checkpoint_id, reader=True)
    expanded, put_back = expand_to_fill(state_dict)
    load_with(expanded, reader, planner, comm_of(process_group, no_dist), put_back)


def _load_state_dict(
    state_dict: dict[str, Any],
    storage_reader: StorageReader,
    process_group: "dist.ProcessGroup | None" = None,
    coordinator_rank: int = 0,
    no_dist: bool = False,
    planner: LoadPlanner | None = None,
) -> None:
    load_with(lambda: state_dict, storage_reader, planner, comm_of(process_group, no_dist, coordinator_rank))


def _load_state_dict_from_keys(
    keys: set[str] | str | None = None,
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_reader: StorageReader | None = None,
    process_group: "dist.ProcessGroup | None" = None,
) -> dict[str, Any]:
    """The checkpoint, or what stands below these keys, as a new state on the CPU."""
    state: dict[str, Any] = {}
    reader = storage_setup(storage_reader, checkpoint_id, reader=True)
    load_with(lambda: state, reader, EmptyStateDictLoadPlanner(keys=keys), comm_of(process_group, no_dist=False))
    return state


lend(__name__, "logger")
