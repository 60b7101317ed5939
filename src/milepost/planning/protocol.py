"""The four roles of a save or load with plans of its own: planners decide what, storage decides where."""

import abc
import io
import os
from typing import Any

import torch
from torch.futures import Future

from milepost.planning.records import (
    STATE_DICT_TYPE,
    LoadPlan,
    Metadata,
    ReadItem,
    SavePlan,
    StorageMeta,
    WriteItem,
    WriteResult,
)


class SavePlanner(abc.ABC):
    """Turns a state into plans. Called in the order of its methods; all but `create_global_plan` on every rank.

    Most extensions override one method of `DefaultSavePlanner`. A planner may keep state between the calls of one save.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """A save begins. `is_coordinator` is true on the rank that will be asked for the global plan."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """What this rank has to write. It is sent to the coordinator, with its `planner_data`."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: the plans of all ranks, made into as many final ones and the metadata of the checkpoint."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The final plan of this rank came back. What is given here is written."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item: asked for when it is written, perhaps by several threads, perhaps more than once."""


class LoadPlanner(abc.ABC):
    """Turns a state and the metadata of a checkpoint into reads, and puts what was read into place.

    Called in the order of its methods; all but `create_global_plan` on every rank. For each item then either
    `load_bytes`, or `resolve_tensor` and `commit_tensor`.
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """A load begins."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """What this rank wants to read."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: the plans of all ranks, made into as many final ones."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The final plan of this rank came back. What is given here is read."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Take bytes over."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Where to read bytes to, for storage that reads into memory that it is given: `load_bytes` takes it over then."""
        del read_item
        return io.BytesIO()

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to read into: exactly the box of the item, in whatever memory."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor that `resolve_tensor` gave holds the data now."""


class StorageWriter(abc.ABC):
    """Writes planned items. Called in the order of its methods; the global plan and the end on the coordinator only."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new save begins, at this place; None keeps the place of the last one."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank coordinates, and, where keywords are taken, `rank` and `use_collectives`."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add to the local plan what this storage needs (in `storage_data`)."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: add to the final plans what this storage needs."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of the plan, with the data that `planner.resolve_data` gives."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: make the checkpoint valid."""

    def abort(self, error: BaseException) -> None:  # noqa: B027  # storage may have nothing to remove
        """On every rank, after the save failed with `error`: remove what this rank wrote, if nothing can commit it.

        In a job of several ranks, an error without `failures` means that the coordinator did not answer. It may still
        commit, so the data must stay.
        """

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can write to such a place."""

    def storage_meta(self) -> StorageMeta | None:
        """What planners and metadata may know of this storage."""
        return None


class StorageReader(abc.ABC):
    """Reads planned items. Called in the order of its methods; the global plan on the coordinator only."""

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """A new load begins, at this place; None keeps the place of the last one."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds; where keywords are taken, `rank` comes along."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the metadata, whether this rank coordinates, and, where keywords are taken, `rank` and `use_collectives`."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the local plan what this storage needs (in `storage_data`)."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: add to the final plans what this storage needs."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan into what the planner gives for them."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether this storage can read from such a place."""
