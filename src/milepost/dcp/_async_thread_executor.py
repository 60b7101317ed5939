"""Saves of a staged state in a thread."""

import os
from concurrent.futures import Future
from typing import TYPE_CHECKING, Any

from milepost.dcp._engine.executors import ThreadExecutor
from milepost.dcp._engine.lent import lend
from milepost.dcp.state_dict_saver import save
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.records import Metadata

if TYPE_CHECKING:
    import torch.distributed as dist

__all__: list[str] = []

_ThreadBasedAsyncCheckpointExecutor = ThreadExecutor


def save_wrapper(
    staging_future_or_state_dict: "Future[dict[str, Any]] | dict[str, Any]",
    *,
    checkpoint_id: str | os.PathLike[str] | None = None,
    storage_writer: StorageWriter | None = None,
    planner: SavePlanner | None = None,
    process_group: "dist.ProcessGroup | None" = None,
    no_dist: bool = False,
    use_collectives: bool = True,
) -> Metadata:
    """Wait until the state is staged, and save it, in the caller's thread."""
    staged = staging_future_or_state_dict
    return save(
        staged.result() if isinstance(staged, Future) else staged,
        checkpoint_id=checkpoint_id,
        storage_writer=storage_writer,
        planner=planner,
        process_group=process_group,
        no_dist=no_dist,
        use_collectives=use_collectives,
    )


lend(__name__)
