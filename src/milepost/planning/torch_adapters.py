"""Planners and storage made for torch's own classes, adapted to Milepost; and Milepost's storage for torch's functions.

Both sides have the same records with the same fields, so a record is converted by its name.
"""

import dataclasses
import inspect
import io
import os
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint import planner as their_planner
from torch.distributed.checkpoint import storage as their_storage
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner as TheirLoadPlanner
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner as TheirSavePlanner
from torch.futures import Future

from milepost.errors import CheckpointDamaged, CheckpointError
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.manifest_bridge import Goal
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import LoadPlan, Metadata, ReadItem, SavePlan, StorageMeta, WriteItem, WriteResult
from milepost.planning.storage import CheckpointReader, CheckpointWriter
from milepost.planning.torch_records import ours, theirs
from milepost.planning.value_bytes import ValueIO, pack_value, unpack_value
from milepost.state.values import Codec
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
    return _TheirSavePlanner(planner) if isinstance(planner, their_planner.SavePlanner) else planner


def adapted_load_planner(planner: Any) -> LoadPlanner | None:
    """A planner that Milepost can call."""
    return _TheirLoadPlanner(planner) if isinstance(planner, their_planner.LoadPlanner) else planner


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
        for_torch: Any = planner.inner if isinstance(planner, _TheirSavePlanner) else SavePlannerForTorch(planner)
        return _then(self._inner.write_data(theirs(plan), for_torch), ours)

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
        for_torch: Any = planner.inner if isinstance(planner, _TheirLoadPlanner) else LoadPlannerForTorch(planner)
        return self._inner.read_data(theirs(plan), for_torch)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return bool(checkpoint_id)


class _TheirSavePlanner(SavePlanner):
    def __init__(self, inner: their_planner.SavePlanner) -> None:
        self.inner = inner

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        self.inner.set_up_planner(state_dict, theirs(storage_meta), is_coordinator)

    def create_local_plan(self) -> SavePlan:
        found: SavePlan = ours(self.inner.create_local_plan())
        return found

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        found: tuple[list[SavePlan], Metadata] = ours(self.inner.create_global_plan(theirs(all_plans)))
        return found

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        found: SavePlan = ours(self.inner.finish_plan(theirs(new_plan)))
        if new_plan.storage_data is None:
            return found
        # Torch's plan caching gives the plan of an earlier save, with the place that was written to then.
        return dataclasses.replace(found, storage_data=new_plan.storage_data)

    def resolve_data(self, write_item: WriteItem) -> Any:
        return _plain(self.inner.resolve_data(theirs(write_item)), write_item.index.fqn)


class _TheirLoadPlanner(LoadPlanner):
    def __init__(self, inner: their_planner.LoadPlanner) -> None:
        self.inner = inner

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        self.inner.set_up_planner(state_dict, theirs(metadata), is_coordinator)

    def create_local_plan(self) -> LoadPlan:
        found: LoadPlan = ours(self.inner.create_local_plan())
        return found

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        found: list[LoadPlan] = ours(self.inner.create_global_plan(theirs(global_plan)))
        return found

    def finish_plan(self, central_plan: LoadPlan) -> LoadPlan:
        found: LoadPlan = ours(self.inner.finish_plan(theirs(central_plan)))
        return found

    def load_bytes(self, read_item: ReadItem, value: Any) -> None:
        # Torch's own method unpickles, which runs code; a planner with its own method gets the bytes that it gave.
        runs = type(self.inner).load_bytes is TheirLoadPlanner.load_bytes
        if runs or isinstance(value, ValueIO):
            value = _as_torch_saves(value, read_item.storage_index.fqn)
        self.inner.load_bytes(theirs(read_item), value)

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        return self.inner.resolve_tensor(theirs(read_item))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        self.inner.commit_tensor(theirs(read_item), tensor)


def _as_torch_saves(value: io.BytesIO, key: str = "a value") -> io.BytesIO:
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


def _then(future: Future[Any], convert: Callable[[Any], Any]) -> Future[Any]:
    done: Future[Any] = Future()
    done.set_result(convert(future.wait()))
    return done


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
        return _as_torch_saves(data, write_item.index.fqn) if isinstance(data, ValueIO) else data


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


@dataclasses.dataclass(slots=True)
class PlannedGoal:
    """What a save aims at, in the plan that torch's planner holds. It notes that it was written to.

    The planner may keep the plan for later saves, and this with it: a goal that was used is one of an earlier save.
    """

    goal: Goal
    used: bool = False


class MilepostWriter(their_storage.StorageWriter):
    """Milepost's format for torch's own `dcp.save(..., storage_writer=MilepostWriter(path))`.

    Options: those of `CheckpointWriter`.

    Torch's planner may keep plans between saves, with the goal of an old save in them. So the coordinator also puts the
    new goal into the job's store, before it sends plans. If two saves to one place run at once, `finish` notices.
    """

    def __init__(self, path: Location, **options: Any) -> None:
        self.inner = CheckpointWriter(path, **options)
        self._goal: Goal | None = None

    @classmethod
    def around(cls, inner: CheckpointWriter) -> "MilepostWriter":
        """The same for a writer that there is already."""
        made = cls.__new__(cls)
        made.inner, made._goal = inner, None  # noqa: SLF001
        return made

    @property
    def is_unchanged(self) -> bool:
        """Whether its class changes nothing of how it writes, so that Milepost's own calls can use `inner`."""
        steps = ("prepare_local_plan", "prepare_global_plan", "write_data", "finish")
        return all(getattr(type(self), step) is getattr(MilepostWriter, step) for step in steps)

    def __getstate__(self) -> dict[str, Any]:
        """What travels to the process in which torch saves: nothing of a save under way."""
        return {**vars(self), "_goal": None}

    @property
    def path(self) -> str:
        """Where it writes."""
        return self.inner.url

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Begin a new save."""
        self.inner.reset(checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank commits."""
        self.inner.set_up_storage_writer(is_coordinator, *args, **kwargs)
        self._goal = None

    def prepare_local_plan(self, plan: Any) -> Any:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Tell each rank under which name to write."""
        prepared = self.inner.prepare_global_plan(ours(plans))
        self._goal = prepared[0].storage_data
        if dist.is_initialized() and self._goal is not None:
            store = _job_store()
            store.set(self._note, f"{self._goal.generation} {self._goal.save_id}")
            store.get(self._note)  # the store answers in order: now it is there, and no rank reads the one before
        wrapped = [dataclasses.replace(plan, storage_data=PlannedGoal(plan.storage_data)) for plan in prepared]
        found: list[Any] = theirs(wrapped)
        return found

    @property
    def _note(self) -> str:
        return f"milepost/goal/{self.path}"

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's shard file."""
        mine: SavePlan = ours(plan)
        planned = mine.storage_data
        if isinstance(planned, PlannedGoal):
            goal = planned.goal
            if planned.used:
                goal = dataclasses.replace(self._goal or self._announced(), rank=goal.rank)
            planned.used = True
            mine = dataclasses.replace(mine, storage_data=goal)
        return _then(self.inner.write_data(mine, _TheirSavePlanner(planner)), theirs)

    def _announced(self) -> Goal:
        """The goal of this save, as the coordinator put it into the job's store."""
        generation, save_id = _job_store().get(self._note).decode().split()
        return Goal(int(generation), save_id, 0)

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commit."""
        self.inner.finish(ours(metadata), ours(results))

    def storage_meta(self) -> Any:
        """Where, and the id of this save."""
        return theirs(self.inner.storage_meta())

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be written there."""
        return CheckpointWriter.validate_checkpoint_id(checkpoint_id)


def _job_store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001


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
        return self._inner.read_data(ours(plan), _TheirLoadPlanner(planner))

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether a checkpoint could be read there."""
        return CheckpointReader.validate_checkpoint_id(checkpoint_id)
