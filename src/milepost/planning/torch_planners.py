"""Planners made for torch's classes as Milepost calls them, and Milepost's as torch's storage calls them."""

import dataclasses
import io
from typing import Any

import torch
from torch.distributed.checkpoint import planner as their_planner
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as TheirLoadPlanner

from milepost.errors import CheckpointError
from milepost.planning.protocol import LoadPlanner, SavePlanner
from milepost.planning.records import LoadPlan, Metadata, ReadItem, SavePlan, StorageMeta, WriteItem
from milepost.planning.torch_records import ours, theirs
from milepost.planning.value_bytes import ValueIO, pack_value, unpack_value
from milepost.state.values import Codec


class AdaptedSavePlanner(SavePlanner):
    """A planner made for torch, with Milepost's records."""

    def __init__(self, inner: their_planner.SavePlanner) -> None:
        self.inner = inner

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Learn what to plan for."""
        self.inner.set_up_planner(state_dict, theirs(storage_meta), is_coordinator)

    def create_local_plan(self) -> SavePlan:
        """The plan of this rank."""
        found: SavePlan = ours(self.inner.create_local_plan())
        return found

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """The plans of all ranks."""
        found: tuple[list[SavePlan], Metadata] = ours(self.inner.create_global_plan(theirs(all_plans)))
        return found

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The plan of this rank, with what was decided for all."""
        found: SavePlan = ours(self.inner.finish_plan(theirs(new_plan)))
        if new_plan.storage_data is None:
            return found
        # Torch's plan caching gives the plan of an earlier save, with the place that was written to then.
        return dataclasses.replace(found, storage_data=new_plan.storage_data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        """The data of an item, with values in plain form where they have one."""
        return _plain(self.inner.resolve_data(theirs(write_item)), write_item.index.fqn)


class AdaptedLoadPlanner(LoadPlanner):
    """A planner made for torch, with Milepost's records."""

    def __init__(self, inner: their_planner.LoadPlanner) -> None:
        self.inner = inner

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Learn what to plan for."""
        self.inner.set_up_planner(state_dict, theirs(metadata), is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        """The plan of this rank."""
        found: LoadPlan = ours(self.inner.create_local_plan())
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The plans of all ranks."""
        found: list[LoadPlan] = ours(self.inner.create_global_plan(theirs(global_plan)))
        return found

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        """The plan of this rank, with what was decided for all."""
        found: LoadPlan = ours(self.inner.finish_plan(theirs(central_plan)))
        return found

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        """Take bytes over."""
        # Torch's own method unpickles, which runs code; a planner with its own method gets the bytes that it gave.
        runs = type(self.inner).load_bytes is TheirLoadPlanner.load_bytes
        if runs or isinstance(value, ValueIO):
            value = as_torch_saves(value, read_item.storage_index.fqn)
        self.inner.load_bytes(theirs(read_item), value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The tensor to read into."""
        return self.inner.resolve_tensor(theirs(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """The tensor holds the data now."""
        self.inner.commit_tensor(theirs(read_item), tensor)


def as_torch_saves(value: io.BytesIO, key: str = "a value") -> io.BytesIO:
    """What `torch.save` would have written for a value, made again from its plain form.

    Raises UnsafeCheckpoint for a pickle without a plain form, InvalidState for bytes that are no value.
    """
    out = io.BytesIO()
    torch.save(unpack_value(value, Codec(), key), out)
    out.seek(0)
    return out


def _plain(data: Any, key: str) -> Any:
    """The data of torch's planners, with values in plain form where they have one; other pickles stay bytes."""
    if not isinstance(data, io.BytesIO) or isinstance(data, ValueIO):
        return data
    codec = Codec()
    try:
        return pack_value(unpack_value(data, codec, key), codec, key)
    except CheckpointError:
        return data


# Made for Milepost, used by torch


class SavePlannerForTorch:
    """A planner of Milepost, as torch's storage sees it: storage only calls `resolve_data`."""

    def __init__(self, inner: SavePlanner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def resolve_data(self, write_item: Any) -> Any:
        """The data of an item; values as torch's readers expect them."""
        data = self._inner.resolve_data(ours(write_item))
        return as_torch_saves(data, write_item.index.fqn) if isinstance(data, ValueIO) else data


class LoadPlannerForTorch:
    """A planner of Milepost, as torch's storage sees it."""

    def __init__(self, inner: LoadPlanner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_bytes(self, read_item: Any, value: Any) -> None:
        """Take bytes over."""
        self._inner.load_bytes(ours(read_item), value)

    def resolve_bytes(self, read_item: Any) -> Any:
        """Where to read bytes to."""
        return self._inner.resolve_bytes(ours(read_item))

    def resolve_tensor(self, read_item: Any) -> torch.Tensor:
        """The tensor to read into."""
        return self._inner.resolve_tensor(ours(read_item))

    def commit_tensor(self, read_item: Any, tensor: torch.Tensor) -> None:
        """The tensor holds the data now."""
        self._inner.commit_tensor(ours(read_item), tensor)
