"""A save and a load with the same storage, planners and ranks each time."""

from concurrent.futures import Future
from functools import partial
from typing import TYPE_CHECKING, Any

from milepost.dcp._engine.calls import comm_of, save_with
from milepost.dcp._engine.shared import TURNS
from milepost.dcp.state_dict_loader import load
from milepost.dcp.state_dict_saver import async_save
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import Metadata
from milepost.planning.stateful_dict import expand_stateful

if TYPE_CHECKING:
    import torch.distributed as dist


class FixedStorage:
    """Saves and loads with the storage, planners and ranks that it was made with."""

    def __init__(
        self,
        storage_writer: StorageWriter,
        storage_reader: StorageReader,
        *,
        process_group: "dist.ProcessGroup | None" = None,
        coordinator_rank: int = 0,
        no_dist: bool = False,
        load_planner: LoadPlanner | None = None,
        save_planner: SavePlanner | None = None,
    ) -> None:
        self.storage_writer, self.storage_reader = storage_writer, storage_reader
        self.process_group, self.coordinator_rank, self.no_dist = process_group, coordinator_rank, no_dist
        self.load_planner, self.save_planner = load_planner, save_planner

    def save(self, state_dict: dict[str, Any]) -> Metadata:
        """Save, from every rank. Gives the metadata."""
        comm = comm_of(self.process_group, self.no_dist, self.coordinator_rank)
        TURNS.wait(self.storage_writer, self.save_planner)
        return save_with(partial(expand_stateful, state_dict), self.storage_writer, self.save_planner, comm)

    def async_save(self, state_dict: dict[str, Any]) -> "Future[Any]":
        """Copy the state, and save the copy in a thread. Gives a future of the metadata."""
        response = async_save(
            state_dict,
            storage_writer=self.storage_writer,
            process_group=self.process_group,
            planner=self.save_planner,
            no_dist=self.no_dist,
        )
        return response if isinstance(response, Future) else response.upload_completion

    def load(self, state_dict: dict[str, Any]) -> None:
        """Load into the state, in place, on every rank."""
        load(
            state_dict,
            storage_reader=self.storage_reader,
            process_group=self.process_group,
            planner=self.load_planner,
            no_dist=self.no_dist,
        )
