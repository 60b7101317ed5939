"""Milepost's format behind the storage protocol: checkpoints that planners write and read."""

import io
import math
import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch
from torch.futures import Future

from milepost.checkpoint import files_at
from milepost.comm import Call, Comm, Deferred
from milepost.commit.attempt import Aim, Attempt, take_aim
from milepost.core.box import Box
from milepost.core.division import PlannedRead, read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.manifest import Manifest, Tensor
from milepost.core.shardfile import NewEntry, entry_name
from milepost.data.late import LateTensor, ready
from milepost.data.pieces import Placement, placement_of
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, Watcher
from milepost.data.transforms import REGISTRY, ExtensionRegistry, StreamTransformExtension, transformed
from milepost.data.write import EntryToWrite, Written
from milepost.errors import CheckpointError, InvalidRequest, InvalidState
from milepost.events.operation import current
from milepost.loading.pipeline import open_together
from milepost.planning.items import box_of
from milepost.planning.manifest_bridge import Goal, StoredBox, StoredItem, expand, make_contents, written_as
from milepost.planning.protocol import LoadPlanner, SavePlanner, StorageReader, StorageWriter
from milepost.planning.records import (
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    StorageMeta,
    WriteItem,
    WriteResult,
)
from milepost.planning.value_bytes import ValueIO
from milepost.state.host_memory import tensor_of_bytes
from milepost.state.tensors import bytes_of, dtype_name, new_tensor, torch_dtype
from milepost.store import Location, Store, store_at
from milepost.store.location import store_to_save

_AT_ONCE_BYTES = 256 << 20
_TRANSFORMED_BYTES = 4 << 20
_LARGEST_ELEMENT_BYTES = 16


class _AtStore:
    """Storage at a path, URL or store."""

    store: Store

    @property
    def checkpoint_id(self) -> str:
        """Where the checkpoint is."""
        return self.store.url

    @property
    def url(self) -> str:
        """Where the checkpoint is, for messages."""
        return self.store.url

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        """Whether a checkpoint can be at this place."""
        try:
            store_at(checkpoint_id)
        except (CheckpointError, TypeError):
            return False
        return True


class CheckpointWriter(_AtStore, StorageWriter):
    """Writes Milepost's format by the storage protocol: atomic, durable, with checksums.

    `path`: a path, URL or store. `overwrite=False`: refuse to replace a checkpoint. `metadata`: a small dict of plain
    values, stored with the checkpoint. `transforms`: stream transforms for the bytes of each tensor; their output on
    this rank is held in memory. `host_memory_bytes`, `transfer`, `progress`: as for `milepost.save`.

    The methods raise InvalidRequest if they are called out of order or if plans and metadata do not agree, and
    InvalidState if the data is not what the plan says.

    >>> writer = milepost.planning.CheckpointWriter("memory://written", metadata={"loss": 2.1})
    >>> _ = milepost.save({"w": torch.ones(2)}, storage_writer=writer)
    >>> milepost.open("memory://written").metadata
    {'loss': 2.1}
    """

    def __init__(
        self,
        path: Location,
        *,
        overwrite: bool = True,
        metadata: Mapping[str, Any] | None = None,
        transforms: Sequence[StreamTransformExtension] = (),
        host_memory_bytes: int = HOST_MEMORY_BYTES,
        transfer: Transfer | None = None,
        progress: Watcher | None = None,
    ) -> None:
        self.store = store_to_save(path)
        self.overwrite, self.metadata, self.progress = overwrite, dict(metadata or {}), progress
        self.transforms = tuple(transforms)
        self.transfer = (transfer or Transfer()).within(host_memory_bytes)
        self.save_id = str(uuid.uuid4())
        self.generation = 0
        self._meter = Meter("save", self.store.url)
        self._goal: Goal | None = None
        self._is_coordinator = False
        self._in_torch: Any = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Location) -> bool:
        """Whether a checkpoint can be saved at this place."""
        try:
            store_to_save(checkpoint_id)
        except (CheckpointError, TypeError):
            return False
        return True

    def __getstate__(self) -> dict[str, Any]:
        """What travels to another process: where and how to write, and nothing of a save under way."""
        return {**vars(self), "_meter": None, "_goal": None, "_in_torch": None}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, _meter=Meter("save", state["store"].url))

    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Begin a new save."""
        if checkpoint_id is not None and checkpoint_id != "":
            self.store = store_to_save(checkpoint_id)
        self.save_id, self._goal = str(uuid.uuid4()), None

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn whether this rank commits."""
        del args, kwargs
        self._is_coordinator, self._goal, self._in_torch = is_coordinator, None, None

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        """Add nothing."""
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        """Add the names under which each rank writes."""
        if any(map(_is_torchs, plans)):
            found: list[SavePlan] = self._for_torch().prepare_global_plan(plans)
            return found
        aim = take_aim(self.store, overwrite=self.overwrite)
        return [replace(plan, storage_data=Goal(*aim, rank, len(plans))) for rank, plan in enumerate(plans)]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's shard file."""
        if _is_torchs(plan):
            future: Future[list[WriteResult]] = self._for_torch().write_data(plan, planner)
            return future
        goal = plan.storage_data
        if not isinstance(goal, Goal):
            raise InvalidRequest(
                "the plan does not say where to write: call `prepare_global_plan` of this writer first"
            )
        self._goal, self.save_id = goal, goal.save_id
        self._meter = Meter("save", self.url, self.progress if self._is_coordinator else None)
        entries: list[EntryToWrite] = []
        values: dict[MetadataIndex, ValueIO] = {}
        sizes: dict[MetadataIndex, int] = {}
        for item in plan.items:
            found = _resolved(planner, item)
            if isinstance(found, EntryToWrite):
                entries.append(_transformed(found, self.transforms) if item.tensor_data is not None else found)
                sizes[item.index] = _size_of(entries[-1])
            elif found is not None:
                values[item.index], sizes[item.index] = found, len(found.getbuffer())
        written = _attempt(self.store, goal).write(entries, self.transfer, self._meter)
        names = tuple(transform.get_descriptor() for transform in self.transforms)
        results = [
            WriteResult(item.index, sizes.get(item.index, 0), _stored(item, goal, written, values, names))
            for item in plan.items
        ]
        return _done(results)

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the manifest from the plans and the results, and commit it."""
        if _is_torchs(metadata):
            self._for_torch().finish(metadata, results)
            return
        if self._goal is None:
            raise InvalidRequest("this writer has not written anything: call `write_data` before `finish`")
        contents, operation = make_contents(self._goal, metadata, results, self.metadata), current()
        timings = operation.timings if operation is not None else ()
        _attempt(self.store, self._goal).commit(replace(contents, timings=timings))
        self.generation = self._goal.generation
        self._meter.finish()

    def abort(self, error: BaseException) -> None:
        """Remove what this rank wrote, unless a manifest may name it."""
        if self._goal is not None:
            _attempt(self.store, self._goal).fail(error)

    def storage_meta(self) -> StorageMeta:
        """Where this writer writes, and the id of this save."""
        return StorageMeta(checkpoint_id=self.checkpoint_id, save_id=self.save_id)

    def _for_torch(self) -> Any:
        """What torch's own `save` calls: the same with torch's records."""
        from milepost.planning.torch_steps import StepsForTorch  # noqa: PLC0415  # slow to import

        if self._in_torch is None:
            self._in_torch = StepsForTorch(self)
        return self._in_torch


def _is_torchs(record: object) -> bool:
    """Whether torch's own functions call: their records have the fields of Milepost's and are other classes."""
    return not isinstance(record, (SavePlan, Metadata))


def _attempt(store: Store, goal: Goal) -> Attempt:
    return Attempt(store, Aim(goal.generation, goal.save_id), goal.rank, goal.world)


def _resolved(planner: SavePlanner, item: WriteItem) -> "EntryToWrite | ValueIO | None":
    """The data of an item, ready to be written. Raises InvalidState if it is not what the plan says."""
    fqn = item.index.fqn
    if item.tensor_data is not None:
        return _late_entry(planner, item)
    data = planner.resolve_data(item)
    if isinstance(data, ValueIO):
        return data
    if isinstance(data, io.BytesIO):
        raw = bytes_tensor(data)
        shape = tuple(raw.shape)
        return EntryToWrite(NewEntry(entry_name(fqn, Box.whole(shape), shape), "uint8", shape), raw)
    raise InvalidState(f"{fqn!r}: the plan says {item.type.name} and the data is a {type(data).__name__}")


def bytes_tensor(data: io.BytesIO) -> torch.Tensor:
    """The bytes as a tensor, as they are now. Nobody may write into it."""
    return tensor_of_bytes(data.getvalue())


def _late_entry(planner: SavePlanner, item: WriteItem) -> EntryToWrite | None:
    """An entry that asks the planner for its data when it is written; None for a box without elements."""
    assert item.tensor_data is not None
    box, shape = box_of(item.tensor_data.chunk), tuple(item.tensor_data.size)
    if not box.elements:
        return None
    fqn = item.index.fqn
    name = dtype_name(item.tensor_data.properties.dtype, fqn)
    return EntryToWrite(
        NewEntry(entry_name(fqn, box, shape), name, box.shape), LateTensor(lambda: resolved_tensor(planner, item))
    )


def resolved_tensor(planner: SavePlanner, item: WriteItem) -> torch.Tensor:
    """The data of an item that is a tensor. Raises InvalidState if it is not what the plan says, or not there."""
    try:
        data = planner.resolve_data(item)
    except OSError as error:  # else it would look like an error of the storage that is written to
        raise InvalidState(f"{item.index.fqn!r}: the planner cannot give its data: {error}") from error
    assert item.tensor_data is not None
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    if not isinstance(data, torch.Tensor) or tuple(data.shape) != tuple(chunk.sizes) or data.dtype != dtype:
        found = f"{data.dtype} {tuple(data.shape)}" if isinstance(data, torch.Tensor) else type(data).__name__
        raise InvalidState(
            f"{item.index.fqn!r}: the plan says {dtype} {tuple(chunk.sizes)} and the data is {found}. A planner that "
            "changes data in resolve_data must change the plan in create_local_plan."
        )
    return data.detach()


def _size_of(entry: EntryToWrite) -> int:
    return math.prod(entry.header.shape) * DTYPES[entry.header.dtype].size_bytes


def _transformed(entry: EntryToWrite, extensions: Sequence[StreamTransformExtension]) -> EntryToWrite:
    if not extensions:
        return entry
    data = bytes_tensor(io.BytesIO(transformed(list(bytes_of(ready(entry.data), _TRANSFORMED_BYTES)), extensions)))
    return EntryToWrite(NewEntry(entry.header.name, "uint8", tuple(data.shape)), data)


def _stored(
    item: WriteItem, goal: Goal, written: Written, values: dict[MetadataIndex, ValueIO], transforms: tuple[str, ...]
) -> StoredItem:
    value = values.get(item.index)
    if value is not None:
        return StoredItem(goal.rank, goal.save_id, written.file, value=value.encoded, is_value=True)
    data = item.tensor_data
    if data is None:
        return StoredItem(goal.rank, goal.save_id, written.file)
    what = written_as(item.index.fqn, data.properties.dtype, box_of(data.chunk), data.size)
    return StoredItem(goal.rank, goal.save_id, written.file, what, transforms=transforms)


def _done(value: Any) -> Future[Any]:
    future: Future[Any] = Future()
    future.set_result(value)
    return future


# Reading


class CheckpointReader(_AtStore, StorageReader):
    """Reads checkpoints by the storage protocol: Milepost's format, verified, and other formats.

    `path`: a path, URL or store. `registry`: the stream transforms that it knows. `verify=False`: do not compare
    checksums. `allow_unhealthy`, `host_memory_bytes`, `transfer`, `progress`: as for `milepost.load`.

    The methods raise CheckpointNotFound, CheckpointDamaged if the data is not what was saved, InvalidRequest if the
    checkpoint lacks what a plan reads, and InvalidState if the planner's tensors do not fit.

    >>> _ = milepost.save({"w": torch.ones(2), "step": 7}, "memory://reader")
    >>> reader = milepost.planning.CheckpointReader("memory://reader")
    >>> list(reader.read_metadata().state_dict_metadata)
    ['w', 'step']
    """

    needs_global_plan = False

    def __init__(
        self,
        path: Location,
        *,
        registry: ExtensionRegistry | None = None,
        verify: bool = True,
        allow_unhealthy: bool = True,
        host_memory_bytes: int = HOST_MEMORY_BYTES,
        transfer: Transfer | None = None,
        progress: Watcher | None = None,
    ) -> None:
        self.store = store_at(path)
        self.registry = registry or REGISTRY
        self.verify, self.allow_unhealthy, self.progress = verify, allow_unhealthy, progress
        self.transfer = (transfer or Transfer()).within(host_memory_bytes)
        self.load_id = str(uuid.uuid4())
        self._is_coordinator = False
        self._opened: Deferred[Files] | None = None

    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Begin a new load."""
        if checkpoint_id is not None and checkpoint_id != "":
            self.store = store_at(checkpoint_id)
        self.load_id, self._opened = str(uuid.uuid4()), None
        self.__dict__.pop("_files", None)

    def open_together(self, comm: Comm) -> None:
        """Make the next `read_metadata` of every rank read the checkpoint that the coordinator finds."""
        self._opened = open_together(self.store, comm, Call("loading", self.url), self.allow_unhealthy)

    @cached_property
    def _files(self) -> Files:
        return files_at(self.store)

    @property
    def manifest(self) -> Manifest:
        """The newest manifest, or one made from a checkpoint of another format."""
        return self._files.manifest

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the checkpoint holds now, with all boxes."""
        del args, kwargs
        self.__dict__.pop("_files", None)  # without a reset too: another save may have replaced the checkpoint
        if self._opened is not None:
            opened, self._opened = self._opened, None
            self._files = opened.get()
        metadata = expand(self.manifest)
        metadata.storage_meta = StorageMeta(self.checkpoint_id, self.manifest.save_id or None, self.load_id)
        return metadata

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Learn where the boxes are."""
        del args, kwargs
        self._is_coordinator = is_coordinator
        self._parts: dict[MetadataIndex, StoredBox] = dict(metadata.storage_data or {})

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add nothing."""
        return plan

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Add nothing."""
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items, in groups: a planner may return new memory for each, so a group's tensors are bounded."""
        files = self._files
        meter = Meter("load", self.url, self.progress if self._is_coordinator else None)
        try:
            for items in _groups(plan.items, _AT_ONCE_BYTES):
                self._read(items, planner, files, meter)
        finally:
            files.close()
        meter.finish()
        return _done(None)

    def _read(self, items: list[ReadItem], planner: LoadPlanner, files: Files, meter: Meter) -> None:
        tensors = {t.key: t for t in self.manifest.tensors}
        placements: list[Placement] = []
        targets: list[tuple[ReadItem, torch.Tensor]] = []
        used: set[int] = set()

        def fill() -> None:
            place_all(files, placements, self.transfer, meter, verify=self.verify, registry=self.registry)
            for item, target in targets:
                planner.commit_tensor(item, target)
            placements.clear()
            targets.clear()
            used.clear()

        for item in items:
            if item.type.name == "BYTE_IO":
                planner.load_bytes(item, self._bytes(item.storage_index.fqn, tensors, files))
                continue
            placement = self._placement(item, planner.resolve_tensor(item).detach(), tensors)
            target = placement.target
            if target.numel() and target.data_ptr() in used:
                fill()  # the planner returned the same memory again: commit_tensor takes the data from it first
            used.add(target.data_ptr())
            placements.append(placement)
            targets.append((item, target))
        fill()

    def _placement(self, item: ReadItem, target: torch.Tensor, tensors: dict[str, Tensor]) -> Placement:
        """The read of an item into `target`. Raises InvalidState if they do not fit each other."""
        fqn = item.dest_index.fqn
        if tuple(target.shape) != tuple(item.lengths):
            raise InvalidState(
                f"{fqn!r}: the planner returned a tensor of shape {tuple(target.shape)} for a read of "
                f"{tuple(item.lengths)}"
            )
        read, dtype = self._source(item, tensors)
        if _kind(torch_dtype(dtype)) != _kind(target.dtype):
            raise InvalidState(
                f"{fqn!r} was saved as {dtype} and the target is {target.dtype}; planners convert only between "
                "floating-point types, and between integers"
            )
        return placement_of(read, dtype, target)

    def _source(self, item: ReadItem, tensors: dict[str, Tensor]) -> tuple[PlannedRead, str]:
        index = item.storage_index
        part = self._parts.get(MetadataIndex(index.fqn, index.offset))
        if part is None or index.fqn not in tensors:
            raise InvalidRequest(f"the checkpoint at {self.url} has no {index.fqn!r} at {index.offset}")
        start = tuple(a + b for a, b in zip(part.box.offset, item.storage_offsets, strict=True))
        wanted = Box(start, tuple(item.lengths))
        if not part.box.contains(wanted):
            raise InvalidRequest(f"a read of {index.fqn!r} leaves its box: {wanted.text} of {part.box.text}")
        return PlannedRead(index.fqn, part.rank, part.name, part.box, wanted), tensors[index.fqn].dtype

    def _bytes(self, fqn: str, tensors: dict[str, Tensor], files: Files) -> io.BytesIO:
        if fqn in self._values:
            return ValueIO(self._values[fqn])
        tensor = tensors.get(fqn)
        if tensor is None:
            raise InvalidRequest(f"the checkpoint at {self.url} has no {fqn!r}")
        data = new_tensor(tensor.dtype, tensor.shape)
        reads = read_plan(self.manifest, tensor, Box.whole(tensor.shape))
        place_all(files, [placement_of(read, tensor.dtype, data[read.box.slices]) for read in reads], self.transfer)
        return io.BytesIO(data.numpy().tobytes())

    @property
    def _values(self) -> dict[str, Any]:
        return {value.key: value.value for value in self.manifest.values}


def _kind(dtype: torch.dtype) -> str:
    if dtype.is_complex:
        return "complex"
    return "floating" if dtype.is_floating_point else "integer"


def _groups(items: list[ReadItem], size_bytes: int) -> Iterator[list[ReadItem]]:
    """The items in their order, in groups whose tensors take at most `size_bytes`; a larger item is a group alone."""
    group: list[ReadItem] = []
    total = 0
    for item in items:
        size = _LARGEST_ELEMENT_BYTES * math.prod(item.lengths)
        if group and total + size > size_bytes:
            yield group
            group, total = [], 0
        group.append(item)
        total += size
    if group:
        yield group
