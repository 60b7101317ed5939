"""The items of a plan for the objects of a state: what to write, and what to read, found by the overlap of boxes."""

import io
from bisect import bisect_left, insort
from collections.abc import Callable, Iterable, Mapping
from functools import cache
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from milepost.comm.base import Solo
from milepost.core.box import Box
from milepost.errors import InvalidState
from milepost.planning.flatten import tuple_like
from milepost.planning.records import (
    STORAGE_TYPES,
    BytesIOWriteData,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadItemType,
    MetadataIndex,
    ReadItem,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from milepost.planning.torch_records import ours, theirs
from milepost.state.tensors import (
    Describer,
    LocalTensor,
    Part,
    Sharded,
    dtype_name,
    from_numpy,
    is_sharded_tensor,
    materialise,
    new_tensor,
)


class _JobRanks(Solo):
    """The ranks of the whole job, to describe what this one holds. Ranks do not meet through it."""

    def __init__(self) -> None:
        if dist.is_available() and dist.is_initialized():
            self.rank, self.size = dist.get_rank(), dist.get_world_size()

    def index_of(self, global_rank: int) -> int | None:
        return global_rank


def describer_of_job() -> Describer:
    """A describer of the boxes that this rank holds. Use one for many tensors: it works out each kind of cut once."""
    return Describer(_JobRanks())


def local_tensor(value: Any, fqn: str, describer: Describer | None = None) -> LocalTensor:
    """What this rank holds of a tensor, box by box: several boxes where a mesh cuts a dimension in strides."""
    return (describer or describer_of_job()).describe(value, fqn)


def is_distributed(value: Any) -> bool:
    """Whether ranks hold different parts of this tensor."""
    return isinstance(value, (DTensor, Sharded)) or is_sharded_tensor(value)


# Writing


def create_write_items(fqn: str, value: Any, describer: Describer | None = None) -> list[WriteItem]:
    """The items to write for an object: one for a tensor or a value, one for each box of a sharded tensor.

    A tensor type that has torch's `__create_write_items__` is asked for its items.

    >>> boxes = milepost.Sharded((4, 2), {(0, 0): torch.ones(2, 2), (2, 0): torch.ones(2, 2)})
    >>> [item.index.offset for item in milepost.planning.create_write_items("w", boxes)]
    [torch.Size([0, 0]), torch.Size([2, 0])]
    """
    if is_distributed(value):
        return create_write_items_for_shards(fqn, value, describer)
    if hasattr(value, "__create_write_items__"):
        return [ours(item) for item in value.__create_write_items__(fqn, value)]
    if isinstance(value, np.ndarray):
        value = from_numpy(value, fqn)
    if isinstance(value, torch.Tensor):
        return [create_write_item_for_tensor(fqn, value)]
    return [create_write_item_for_bytesio(fqn, value)]


def create_write_items_for_shards(fqn: str, value: Any, describer: Describer | None = None) -> list[WriteItem]:
    """One item for each box with elements that this rank holds of a DTensor, ShardedTensor or Sharded.

    Every rank counts as holding the whole of a tensor without elements; otherwise no rank would record the tensor.
    """
    local = local_tensor(value, fqn, describer)
    return [_shard(fqn, part, torch.Size(local.shape)) for part in _solid(local)]


def _solid(local: LocalTensor) -> tuple[Part, ...]:
    """The parts that have elements. Offsets identify parts, and an empty part may share its offset with another."""
    whole = Box.whole(local.shape)
    if not whole.elements:
        return (Part(whole, new_tensor(local.dtype, local.shape)),)
    return tuple(part for part in local.parts if part.box.elements)


def _shard(fqn: str, part: Part, size: torch.Size) -> WriteItem:
    chunk = chunk_of(part.box)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(part.data), size)
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.SHARD, tensor_data=data)


def create_write_item_for_tensor(fqn: str, tensor: torch.Tensor) -> WriteItem:
    """The item to write for a tensor that this rank holds whole.

    >>> milepost.planning.create_write_item_for_tensor("w", torch.ones(2)).tensor_data.size
    torch.Size([2])
    """
    chunk = create_chunk_from_tensor(tensor)
    data = TensorWriteData(chunk, TensorProperties.create_from_tensor(tensor), tensor.size())
    return WriteItem(MetadataIndex(fqn, chunk.offsets), WriteItemType.TENSOR, tensor_data=data)


def create_write_item_for_bytesio(fqn: str, value: Any) -> WriteItem:
    """The item to write for an object that is not a tensor.

    >>> milepost.planning.create_write_item_for_bytesio("step", 7).type
    <WriteItemType.BYTE_IO: 3>
    """
    size = len(value.getbuffer()) if isinstance(value, io.BytesIO) else None
    return WriteItem(
        MetadataIndex(fqn), WriteItemType.BYTE_IO, bytes_io_data=None if size is None else BytesIOWriteData(size)
    )


# Boxes


def chunk_of(box: Box) -> ChunkStorageMetadata:
    """The record for a box."""
    return ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape))


def box_of(chunk: ChunkStorageMetadata) -> Box:
    """The box of a record."""
    return Box(tuple(chunk.offsets), tuple(chunk.sizes))


def create_chunk_from_tensor(tensor: torch.Tensor) -> ChunkStorageMetadata:
    """The box that is the whole tensor."""
    return ChunkStorageMetadata(torch.Size([0] * tensor.dim()), tensor.size())


def create_chunk_list(tensor: Any, describer: Describer | None = None) -> list[ChunkStorageMetadata]:
    """The boxes that this rank holds of a tensor. Raises ValueError for an object that is not a tensor."""
    if is_distributed(tensor):
        return [chunk_of(part.box) for part in _solid(local_tensor(tensor, "a tensor", describer))]
    if hasattr(tensor, "__create_chunk_list__"):
        return [ours(chunk) for chunk in tensor.__create_chunk_list__()]
    if isinstance(tensor, np.ndarray):
        return [chunk_of(Box.whole(tensor.shape))]
    if isinstance(tensor, torch.Tensor):
        return [create_chunk_from_tensor(tensor)]
    raise ValueError(f"Unsupported Type, expecting one of [Tensor, DTensor, ShardedTensor], but got {type(tensor)}")


def find_shard(tensor: Any, index: MetadataIndex, describer: Describer | None = None) -> torch.Tensor:
    """The local memory of the box that starts at `index.offset`. Raises ValueError if this rank does not hold it."""
    if not is_distributed(tensor):
        found: torch.Tensor = tensor
        if hasattr(tensor, "__get_tensor_shard__"):
            found = tensor.__get_tensor_shard__(theirs(index))
        elif index.offset is not None and any(index.offset):
            raise ValueError(f"FQN: '{index.fqn}' is not a ShardedTensor, can't find by offset: '{index.offset}'")
        return found
    parts = _solid(local_tensor(tensor, index.fqn, describer))
    if index.offset is None:
        raise ValueError(f"Cannot lookup {index.fqn} since its a ShardedTensor and no offset was provided")
    hinted = parts[index.index : index.index + 1] if index.index is not None else ()
    for part in (*hinted, *parts):
        if part.box.offset == tuple(index.offset):
            return part.data
    raise ValueError(f"Could not find shard at '{index.offset}' for FQN: '{index.fqn}'")


def find_state_dict_object(
    state_dict: Mapping[str, Any], index: MetadataIndex, describer: Describer | None = None
) -> Any:
    """The object that an index names: a value, a tensor, or this rank's memory of one box. Raises ValueError if none.

    >>> milepost.planning.find_state_dict_object({"step": 7}, milepost.planning.MetadataIndex("step"))
    7
    """
    if index.fqn not in state_dict:
        raise ValueError(f"Could not find FQN: '{index.fqn}'")
    value = state_dict[index.fqn]
    if isinstance(value, np.ndarray):
        value = from_numpy(value, index.fqn)
    if isinstance(value, torch.Tensor) or is_distributed(value):
        return find_shard(value, index, describer)
    if index.offset is not None:
        raise ValueError(f"FQN: '{index.fqn}' is not a ShardedTensor, can't find by offset: '{index.offset}'")
    return value


# Reading


def check_writable(value: Any, fqn: str) -> None:
    """Raise ValueError for an array that nothing can be read into. A memory map that is written to ends the process."""
    if (
        isinstance(value, np.ndarray)
        and value.size
        and not (value.flags.writeable and min(value.strides, default=0) >= 0)
    ):
        raise ValueError(f"{fqn} is an array that cannot be read into: it is read-only, or runs backwards")


def create_read_items(fqn: str, saved: STORAGE_TYPES, value: Any, describer: Describer | None = None) -> list[ReadItem]:
    """The items to read for an object of the state. `saved` is its record in the metadata.

    Raises ValueError if a tensor was saved and the object is not one.

    >>> _ = milepost.save({"w": torch.ones(4)}, "memory://items")
    >>> metadata = milepost.planning.CheckpointReader("memory://items").read_metadata()
    >>> half = milepost.Sharded((4,), {(2,): torch.zeros(2)})
    >>> items = milepost.planning.create_read_items("w", metadata.state_dict_metadata["w"], half)
    >>> [(item.storage_offsets, item.lengths) for item in items]
    [(torch.Size([2]), torch.Size([2]))]
    """
    if isinstance(saved, BytesStorageMetadata):
        return [create_read_item_for_bytesio(MetadataIndex(fqn), 0, MetadataIndex(fqn), 0, 0)]
    check_writable(value, fqn)
    try:
        wanted = create_chunk_list(value, describer)
    except ValueError:
        raise ValueError(
            f"Invalid checkpoint metadata for {fqn}, expected BytesStorageMetadata but found {type(saved)}: a tensor "
            f"was saved, and the state has a {type(value).__name__} there"
        ) from None
    return create_read_items_for_chunk_list(fqn, saved, wanted)


def create_read_items_for_chunk_list(
    fqn: str, checkpoint_md: TensorStorageMetadata, local_chunks: list[ChunkStorageMetadata]
) -> list[ReadItem]:
    """The reads that fill `local_chunks` from the saved boxes. A sweep finds them, without comparing all pairs.

    Boxes without elements need no reads.
    """
    targets = [box_of(chunk) for chunk in local_chunks]
    saved = [box_of(chunk) for chunk in checkpoint_md.chunks]
    items: list[ReadItem] = []
    for number, other, overlap in overlaps(targets, saved):
        wanted, source = targets[number], saved[other]
        items.append(
            create_read_item_for_tensor(
                MetadataIndex(fqn, wanted.offset, number),
                overlap.within(wanted).offset,
                MetadataIndex(fqn, source.offset, other),
                overlap.within(source).offset,
                overlap.shape,
            )
        )
    return items


def overlaps(wanted: list[Box], saved: list[Box]) -> Iterable[tuple[int, int, Box]]:
    """The pairs that overlap, as positions in both lists, with the region that they share; in the order of `wanted`."""
    if not wanted or not saved:
        return []
    if not wanted[0].shape:
        return [(i, j, wanted[i]) for i in range(len(wanted)) for j in range(len(saved))]
    sweep = sweep_dim(saved)
    starts = sorted(range(len(saved)), key=lambda j: saved[j].offset[sweep])
    found: list[tuple[int, int, Box]] = []
    active: list[tuple[int, int]] = []  # end in the swept dimension, position in `saved`
    following = 0
    for i in sorted(range(len(wanted)), key=lambda i: wanted[i].offset[sweep]):
        low, high = wanted[i].offset[sweep], wanted[i].end[sweep]
        while following < len(starts) and saved[starts[following]].offset[sweep] < high:
            insort(active, (saved[starts[following]].end[sweep], starts[following]))
            following += 1
        del active[: bisect_left(active, (low + 1, -1))]
        for _, j in active:
            region = wanted[i].intersect(saved[j])
            if region is not None:
                found.append((i, j, region))
    return sorted(found, key=lambda pair: pair[:2])


def sweep_dim(boxes: list[Box]) -> int:
    """The dimension with the most cuts: a plane across it meets the fewest boxes."""

    def met(dim: int) -> float:
        return sum(box.shape[dim] for box in boxes) / max(1, *(box.end[dim] for box in boxes))

    return min(range(len(boxes[0].shape)), key=met)


def create_read_item_for_tensor(
    dest_index: MetadataIndex,
    dest_offsets: Iterable[int],
    storage_index: MetadataIndex,
    storage_offsets: Iterable[int],
    lengths: Iterable[int],
) -> ReadItem:
    """The item to read one box."""
    return ReadItem(
        LoadItemType.TENSOR,
        dest_index,
        torch.Size(dest_offsets),
        storage_index,
        torch.Size(storage_offsets),
        torch.Size(lengths),
    )


def create_read_item_for_bytesio(
    dest_index: MetadataIndex, dest_offset: int, storage_index: MetadataIndex, storage_offset: int, length: int
) -> ReadItem:
    """The item to read bytes."""
    return ReadItem(
        LoadItemType.BYTE_IO,
        dest_index,
        torch.Size((dest_offset,)),
        storage_index,
        torch.Size((storage_offset,)),
        torch.Size((length,)),
    )


# States


def iterate_state_dict(
    value: Any,
    dtensor_func: Callable[[Any], Any],
    sharded_tensor_func: Callable[[Any], Any],
    tensor_func: Callable[[Any], Any],
) -> Any:
    """The state, each tensor replaced by the result of the function for its kind. Dicts and lists change in place."""

    def made(item: torch.Tensor) -> Any:
        if isinstance(item, DTensor):
            return dtensor_func(item)
        return sharded_tensor_func(item) if is_sharded_tensor(item) else tensor_func(item)

    def walk(item: Any) -> Any:
        if isinstance(item, torch.Tensor):
            return made(item)
        if isinstance(item, tuple):
            inner = [walk(one) for one in item]
            return tuple_like(item, inner) if any(a is not b for a, b in zip(inner, item, strict=True)) else item
        pairs = item.items() if isinstance(item, dict) else enumerate(item) if isinstance(item, list) else ()
        for key, old in list(pairs):
            new = walk(old)
            if new is not old:
                item[key] = new
        return item

    return walk(value)


def init_state_dict(state_dict: dict[str, Any]) -> None:
    """Give memory on the job's device to every tensor of the state that is on the meta device. In place."""

    def refuse(value: Any) -> Any:
        if any(shard.tensor.device.type == "meta" for shard in value.local_shards()):
            raise InvalidState(f"Found unsupported type {type(value)} for meta device loading.")
        return value

    def with_memory(value: Any) -> Any:
        return _materialised(value) if value.device.type == "meta" else value

    iterate_state_dict(state_dict, with_memory, refuse, with_memory)


def _materialised(value: Any) -> Any:
    return materialise(value, dtype_name(value.dtype, "a tensor"), tuple(value.shape), _job_device())


@cache
def _device_of(kind: str) -> torch.device:
    if kind == "cpu":
        return torch.device("cpu")
    return torch.device(kind, torch.get_device_module(kind).current_device())


def _job_device() -> torch.device:
    """Where tensors go by default: the device of the default process group, else the CPU."""
    if not (dist.is_available() and dist.is_initialized()):
        return torch.device("cpu")
    return _device_of(dist.distributed_c10d._get_pg_default_device().type)  # noqa: SLF001
