"""The four roles of a save or load by plans: planners decide what is written or read, storage decides where."""

import abc
import io
import os
from typing import Any, ClassVar

import torch
from torch.futures import Future

from milepost.planning.kept_plans import PlansByKey
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
    """Turns a state into plans.

    The methods are called in the order below, on every rank; `create_global_plan` only on the coordinator. A planner
    may keep state between the calls of one save. Most extensions override one method of `DefaultSavePlanner`.

    >>> class Prefixed(milepost.planning.DefaultSavePlanner):
    ...     def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
    ...         renamed = {f"ema.{key}": value for key, value in state_dict.items()}
    ...         super().set_up_planner(renamed, storage_meta, is_coordinator)
    >>> _ = milepost.save({"w": torch.ones(2)}, "memory://prefixed", planner=Prefixed())
    >>> list(milepost.open("memory://prefixed"))
    ['ema.w']
    """

    # What planners keep between saves, by their `_cached_plans_key`: where programs written for DCP look for it.
    _cached_save_plan: ClassVar[PlansByKey[SavePlan]] = PlansByKey("local")
    _cached_final_save_plan: ClassVar[PlansByKey[SavePlan]] = PlansByKey("final")
    _cached_all_plans: ClassVar[PlansByKey[list[SavePlan]]] = PlansByKey("all_plans")
    _cached_global_plan: ClassVar[PlansByKey[list[SavePlan]]] = PlansByKey("global_plan")
    _cached_metadata: ClassVar[PlansByKey[Metadata]] = PlansByKey("metadata")

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a save. `is_coordinator` is true on the rank that will make the global plan."""

    @abc.abstractmethod
    def create_local_plan(self) -> SavePlan:
        """Return what this rank would write. The plan is sent to the coordinator, with its `planner_data`."""

    @abc.abstractmethod
    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """On the coordinator: turn the plans of all ranks into one final plan for each, and into the metadata."""

    @abc.abstractmethod
    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """Receive this rank's final plan, and return what is to be written."""

    @abc.abstractmethod
    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """Return the data of an item. Called when it is written, possibly by several threads and more than once."""


class LoadPlanner(abc.ABC):
    """Turns a state and the metadata of a checkpoint into reads, and puts what was read into the state.

    The methods are called in the order below, on every rank; `create_global_plan` only on the coordinator. After the
    plans, each item gets either `load_bytes`, or `resolve_tensor` and `commit_tensor`.

    >>> class Doubled(milepost.planning.DefaultLoadPlanner):
    ...     def commit_tensor(self, read_item, tensor):
    ...         tensor.mul_(2)
    >>> _ = milepost.save({"w": torch.ones(2)}, "memory://doubled")
    >>> state = {"w": torch.zeros(2)}
    >>> _ = milepost.load(state, "memory://doubled", planner=Doubled())
    >>> state
    {'w': tensor([2., 2.])}
    """

    @abc.abstractmethod
    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Begin a load. `is_coordinator` is true on the rank that will make the global plan."""

    @abc.abstractmethod
    def create_local_plan(self) -> LoadPlan:
        """Return what this rank would read."""

    @abc.abstractmethod
    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: turn the plans of all ranks into one final plan for each."""

    @abc.abstractmethod
    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """Receive this rank's final plan, and return what is to be read."""

    @abc.abstractmethod
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Put the bytes of an item into the state."""

    def resolve_bytes(self, read_item: ReadItem) -> io.BytesIO:
        """Return a buffer for storage that reads bytes into the planner's memory. It is then passed to `load_bytes`."""
        del read_item
        return io.BytesIO()

    @abc.abstractmethod
    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """Return the tensor to read into. It has the size of the item's box, and may lie in any memory."""

    @abc.abstractmethod
    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Take the data over: the tensor that `resolve_tensor` returned holds it now."""


class StorageWriter(abc.ABC):
    """Writes planned items.

    The methods are called in the order below, on every rank; `prepare_global_plan` and `finish` only on the
    coordinator.

    >>> class Announced(milepost.planning.CheckpointWriter):
    ...     def finish(self, metadata, results):
    ...         super().finish(metadata, results)
    ...         print("committed", list(metadata.state_dict_metadata))
    >>> _ = milepost.save({"w": torch.ones(2)}, storage_writer=Announced("memory://announced"))
    committed ['w']
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save at this place; None keeps the place of the last one."""

    @abc.abstractmethod
    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank coordinates. `rank` and `use_collectives` come too, if the method takes keywords."""

    @abc.abstractmethod
    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add to the local plan what this storage needs (in `storage_data`)."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """On the coordinator: add to the final plans what this storage needs."""

    @abc.abstractmethod
    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write all items of the plan, with the data that `planner.resolve_data` returns."""

    @abc.abstractmethod
    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """On the coordinator, once all ranks have written: make the checkpoint valid."""

    def abort(self, error: BaseException) -> None:  # noqa: B027  # storage may have nothing to remove
        """On every rank, after the save failed with `error`: remove what this rank wrote, if nothing can commit it.

        With several ranks, an error without `failures` means that the coordinator did not answer. It may still commit,
        so the data must stay.
        """

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this storage can write to this place."""

    def storage_meta(self) -> StorageMeta | None:
        """Return what planners and metadata may know about this storage."""
        return None


class StorageReader(abc.ABC):
    """Reads planned items.

    The methods are called in the order below, on every rank; `prepare_global_plan` only on the coordinator.

    >>> class Counted(milepost.planning.CheckpointReader):
    ...     def read_data(self, plan, planner):
    ...         print(len(plan.items), "items to read")
    ...         return super().read_data(plan, planner)
    >>> _ = milepost.save({"w": torch.ones(2), "step": 7}, "memory://counted")
    >>> state = {"w": torch.zeros(2), "step": 0}
    >>> _ = milepost.load(state, storage_reader=Counted("memory://counted"))
    2 items to read
    """

    @abc.abstractmethod
    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load at this place; None keeps the place of the last one."""

    @abc.abstractmethod
    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """Return what the checkpoint holds. `rank` is passed too, if the method takes keywords."""

    @abc.abstractmethod
    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn the metadata and whether this rank coordinates.

        `rank` and `use_collectives` come too, if the method takes keywords.
        """

    @abc.abstractmethod
    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add to the local plan what this storage needs (in `storage_data`)."""

    @abc.abstractmethod
    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator: add to the final plans what this storage needs."""

    @abc.abstractmethod
    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items of the plan into the memory that the planner returns for them."""

    @classmethod
    @abc.abstractmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether this storage can read from this place."""
