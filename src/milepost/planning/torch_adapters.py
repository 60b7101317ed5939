"""Planners and storage made for torch's own classes, adapted to Milepost; and Milepost's storage for torch's functions.

Both sides have the same records with the same fields, so a record is converted by its name.
"""

import dataclasses
import inspect
import os
import weakref
from typing import Any

from torch.distributed.checkpoint import planner as their_planner
from torch.distributed.checkpoint import storage as their_storage
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as TheirSavePlanner
from torch.futures import Future

from milepost.errors import CheckpointDamaged
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import LoadPlan, Metadata, SavePlan, StorageMeta, WriteResult
from milepost.planning.storage import CheckpointReader, CheckpointWriter
from milepost.planning.torch_planners import (
    AdaptedLoadPlanner,
    AdaptedSavePlanner,
    LoadPlannerForTorch,
    SavePlannerForTorch,
)
from milepost.planning.torch_records import ours, theirs
from milepost.planning.torch_steps import StepsForTorch, then
from milepost.store import Location

# Made for torch, used by Milepost


def adapted_writer(writer: Any) -> StorageWriter:
    """A writer that Milepost can call, whichever side it was made for."""
    if isinstance(writer, MilepostWriter) and writer.is_unchanged:
        return writer.inner
    return _TheirWriter(writer) if isinstance(writer, their_storage.StorageWriter) else writer


def adapted_reader(reader: Any) -> StorageReader:
    """A reader that Milepost can call."""
    return _TheirReader(reader) if isinstance(reader, their_storage.StorageReader) else reader


def adapted_save_planner(planner: Any, writer: StorageWriter) -> SavePlanner | None:
    """A planner that Milepost can call. With Milepost's storage, torch's default planner becomes Milepost's."""
    if type(planner) is TheirSavePlanner and isinstance(writer, CheckpointWriter):
        return _default_planner(planner)
    return AdaptedSavePlanner(planner) if isinstance(planner, their_planner.SavePlanner) else planner


def adapted_load_planner(planner: Any) -> LoadPlanner | None:
    """A planner that Milepost can call."""
    return AdaptedLoadPlanner(planner) if isinstance(planner, their_planner.LoadPlanner) else planner


_DEFAULT_PLANNERS: "weakref.WeakKeyDictionary[Any, DefaultSavePlanner]" = weakref.WeakKeyDictionary()


def _default_planner(planner: TheirSavePlanner) -> DefaultSavePlanner:
    """Milepost's default planner with the options of torch's; the same one for each save, since it keeps plans."""
    found = _DEFAULT_PLANNERS.get(planner) or DefaultSavePlanner()
    found.flatten_state_dict, found.flatten_sharded_tensors = (
        planner.flatten_state_dict,
        planner.flatten_sharded_tensors,
    )
    found.dedup_save_to_lowest_rank = planner.dedup_save_to_lowest_rank
    found.enable_plan_caching = planner._enable_plan_caching  # noqa: SLF001  # it has no other name
    _DEFAULT_PLANNERS[planner] = found
    return found


class _TheirWriter(StorageWriter):
    def __init__(self, inner: their_storage.StorageWriter) -> None:
        self._inner = inner
        self.set_up_storage_writer = inner.set_up_storage_writer  # type: ignore[method-assign]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Replaced by the inner one: its signature says which arguments it takes."""
        del is_coordinator, args, kwargs

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        found: SavePlan = ours(self._inner.prepare_local_plan(theirs(plan)))
        return found

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        found: list[SavePlan] = ours(self._inner.prepare_global_plan(theirs(plans)))
        return found

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        # Torch's planner with torch's storage: nothing is converted, not even pickled values.
        for_torch: Any = planner.inner if isinstance(planner, AdaptedSavePlanner) else SavePlannerForTorch(planner)
        return then(self._inner.write_data(theirs(plan), for_torch), ours)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        self._inner.finish(theirs(metadata), theirs(results))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(checkpoint_id)

    def storage_meta(self) -> StorageMeta | None:
        found: StorageMeta | None = ours(self._inner.storage_meta())
        return found


class _TheirReader(StorageReader):
    def __init__(self, inner: their_storage.StorageReader) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._inner.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        del args, kwargs
        found: Metadata = ours(self._inner.read_metadata())
        return found

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        del args
        takes = "kwargs" in inspect.signature(self._inner.set_up_storage_reader).parameters
        self._inner.set_up_storage_reader(theirs(metadata), is_coordinator, **(kwargs if takes else {}))

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        found: LoadPlan = ours(self._inner.prepare_local_plan(theirs(plan)))
        return found

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        found: list[LoadPlan] = ours(self._inner.prepare_global_plan(theirs(plans)))
        return found

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        for_torch: Any = planner.inner if isinstance(planner, AdaptedLoadPlanner) else LoadPlannerForTorch(planner)
        return self._inner.read_data(theirs(plan), for_torch)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(checkpoint_id)


# Made for Milepost, used by torch


class MilepostWriter(StepsForTorch, their_storage.StorageWriter):
    """Milepost's format for torch's own `dcp.save(..., storage_writer=MilepostWriter(path))`.

    Options: those of `CheckpointWriter`.
    """

    inner: CheckpointWriter

    def __init__(self, path: Location, **options: Any) -> None:
        super().__init__(CheckpointWriter(path, **options))

    @property
    def is_unchanged(self) -> bool:
        """Whether its class changes nothing of how it writes, so that Milepost's own calls can use `inner`."""
        steps = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
        return all(getattr(type(self), step) is getattr(MilepostWriter, step) for step in steps)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to the process in which torch saves: nothing of a save under way."""
        return {**vars(self), "_goal": None}

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank commits."""
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._goal = None

    def storage_meta(self) -> Any:
        """Where, and the id of this save."""
        return theirs(self.inner.storage_meta())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be written there."""
        return CheckpointWriter.validate_checkpoint_id(checkpoint_id)


class MilepostReader(their_storage.StorageReader):
    """Milepost's format for torch's own `dcp.load(..., storage_reader=MilepostReader(path))`.

    Options: those of `CheckpointReader`.
    """

    def __init__(self, path: Location, **options: Any) -> None:
        self._inner = CheckpointReader(path, **options)

    @property
    def path(self) -> str:
        """Where it reads."""
        return self._inner.url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new load."""
        self._inner.reset(checkpoint_id)

    def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
        """What the checkpoint holds."""
        del args, kwargs
        return theirs(self._inner.read_metadata())

    def set_up_storage_reader(self, metadata: Any, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where the boxes are."""
        self._inner.set_up_storage_reader(ours(metadata), is_coordinator, *args, **kwargs)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Add which save this rank has opened."""
        return dataclasses.replace(plan, storage_data=self._inner.manifest.save_id)

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Check that all ranks opened the same checkpoint. Raises CheckpointDamaged."""
        found = {plan.storage_data for plan in plans}
        if len(found) > 1:
            raise CheckpointDamaged(f"{self.path} was replaced while the ranks opened it; load it again")
        return plans

    def read_data(self, plan: Any, planner: Any) -> Future[None]:
        """Read all items."""
        return self._inner.read_data(ours(plan), AdaptedLoadPlanner(planner))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be read there."""
        return CheckpointReader.validate_checkpoint_id(checkpoint_id)
