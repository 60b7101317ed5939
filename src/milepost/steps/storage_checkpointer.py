"""A checkpointer without steps: the same storage, planners and ranks each time."""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from milepost.api import load, save
from milepost.comm import TIMEOUT_S, Comm, Solo
from milepost.comm.distributed import ranks_of
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.saving.pipeline import Receipt

if TYPE_CHECKING:
    import torch.distributed as dist


def ranks_by(group: Any, timeout_s: float, coordinator: int, no_dist: bool) -> Callable[[], Comm]:
    """What gives the ranks of each call."""
    return Solo if no_dist else lambda: ranks_of(group, timeout_s, coordinator)


class StorageCheckpointer:
    """Saves and loads with the same storage, planners and ranks each time; a save replaces the one before.

    Without planners, the default ones are used. `coordinator_rank`: the rank of the group that decides. `no_dist`: this
    process alone.

    >>> writer = milepost.planning.CheckpointWriter("memory://fixed")
    >>> reader = milepost.planning.CheckpointReader("memory://fixed")
    >>> keeper = milepost.StorageCheckpointer(writer, reader)
    >>> keeper.save({"step": 1}).generation, keeper.load({"step": 0})
    (1, {'step': 1})
    """

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: "dist.ProcessGroup | Comm | None" = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        timeout_s: float = TIMEOUT_S,
        save_planner: SavePlanner | None = None,
        load_planner: LoadPlanner | None = None,
    ) -> None:
        self._writer, self._reader = storage_writer, storage_reader
        self._planners = (save_planner, load_planner)
        self._ranks = ranks_by(process_group, timeout_s, coordinator_rank, no_dist)

    def save(self, state: Any) -> Receipt:
        """Save `state`, on every rank."""
        return save(state, storage_writer=self._writer, planner=self._planners[0], process_group=self._ranks())

    def load(self, state: Any) -> Any:
        """Load into `state`, in place, on every rank, and give it back."""
        return load(state, storage_reader=self._reader, planner=self._planners[1], process_group=self._ranks())
