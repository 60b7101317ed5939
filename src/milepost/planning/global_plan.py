"""Plans of all ranks: made from states, compared, merged, deduplicated and checked."""

import dataclasses
import logging
import math
from bisect import bisect_left, insort
from collections import ChainMap
from collections.abc import Mapping, Sequence
from itertools import combinations
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from milepost.core.box import Box
from milepost.planning.items import (
    box_of,
    create_read_items,
    create_write_items,
    describer_of_job,
    sweep_dim,
)
from milepost.planning.records import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    LoadPlan,
    Metadata,
    MetadataIndex,
    SavePlan,
    TensorProperties,
    TensorStorageMetadata,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)
from milepost.state.tensors import Sharded, is_sharded_tensor

_log = logging.getLogger("milepost")
_SHOWN = 50


# Local plans


def create_default_local_save_plan(state_dict: Mapping[str, Any], is_coordinator: bool) -> SavePlan:
    """The plan to write all that this rank holds of a flat state. The global plan removes what other ranks hold too.

    >>> plan = milepost.planning.create_default_local_save_plan({"w": torch.ones(2), "step": 7}, is_coordinator=True)
    >>> [(item.index.fqn, item.type.name) for item in plan.items]
    [('w', 'TENSOR'), ('step', 'BYTE_IO')]
    """
    del is_coordinator
    describer = describer_of_job()
    here = [(fqn, value) for fqn, value in state_dict.items() if _is_here(value)]
    return SavePlan([item for fqn, value in here for item in create_write_items(fqn, value, describer)])


def create_default_metadata_only_plan(state_dict: Mapping[str, Any]) -> SavePlan:
    """The plan that describes a state completely: it has all shards of a ShardedTensor, not only those of this rank."""
    items: list[WriteItem] = []
    for fqn, value in state_dict.items():
        if is_sharded_tensor(value):
            items += [_item_of_shard(fqn, value, shard) for shard in value.metadata().shards_metadata]
        else:
            items += create_write_items(fqn, value)
    return SavePlan(items)


def create_default_local_metadata(state_dict: Mapping[str, Any]) -> Metadata:
    """The metadata of a checkpoint that holds this state alone."""
    return create_default_global_save_plan([create_default_metadata_only_plan(state_dict)])[1]


def _item_of_shard(fqn: str, value: Any, shard: Any) -> WriteItem:
    whole = value.metadata()
    chunk = ChunkStorageMetadata(torch.Size(shard.shard_offsets), torch.Size(shard.shard_sizes))
    properties = TensorProperties(whole.tensor_properties.dtype)
    return WriteItem(
        MetadataIndex(fqn, chunk.offsets),
        WriteItemType.SHARD,
        tensor_data=TensorWriteData(chunk, properties, torch.Size(whole.size)),
    )


def _is_here(value: Any) -> bool:
    """Whether this rank takes part in a tensor: a rank outside a DTensor's mesh holds nothing of it."""
    return not isinstance(value, DTensor) or value.device_mesh.get_coordinate() is not None


def create_default_local_load_plan(state_dict: Mapping[str, Any], metadata: Metadata, strict: bool = True) -> LoadPlan:
    """The plan to read all that this rank holds of a flat state.

    Raises RuntimeError with all keys that the checkpoint lacks (if `strict`), and ValueError with all that have another
    size there.

    >>> _ = milepost.save({"w": torch.ones(2)}, "memory://local-load")
    >>> metadata = milepost.planning.CheckpointReader("memory://local-load").read_metadata()
    >>> plan = milepost.planning.create_default_local_load_plan({"w": torch.zeros(2)}, metadata)
    >>> [item.dest_index.fqn for item in plan.items]
    ['w']
    """
    describer = describer_of_job()
    items, missing, wrong = [], [], []
    for fqn, value in state_dict.items():
        saved = metadata.state_dict_metadata.get(fqn)
        if saved is None:
            missing.append(fqn)
        elif isinstance(saved, TensorStorageMetadata) and _size_of(value) not in (None, saved.size):
            wrong.append(f"Size mismatch between saved {saved.size} and current: {_size_of(value)} for {fqn}")
        elif _is_here(value):
            try:
                items += create_read_items(fqn, saved, value, describer)
            except ValueError as error:
                wrong.append(str(error))
    if missing and strict:
        shown = ", ".join(missing[:_SHOWN]) + (f" and {len(missing) - _SHOWN} more" if len(missing) > _SHOWN else "")
        raise RuntimeError(f"Missing key in checkpoint state_dict: {shown}.")
    if wrong:
        raise ValueError(
            "\n".join(wrong[:_SHOWN]) + (f"\nand {len(wrong) - _SHOWN} more" if len(wrong) > _SHOWN else "")
        )
    return LoadPlan(items)


def _size_of(value: Any) -> torch.Size | None:
    if isinstance(value, torch.Tensor):
        return torch.Size(value.size())
    return torch.Size(value.shape) if isinstance(value, (Sharded, np.ndarray)) else None


def create_default_global_load_plan(all_plans: list[LoadPlan]) -> list[LoadPlan]:
    """The same plans: each rank reads what its own plan says.

    >>> milepost.planning.create_default_global_load_plan([milepost.planning.LoadPlan([])])
    [LoadPlan(items=[], storage_data=None, planner_data=None)]
    """
    return all_plans


# Plans of all ranks


def dedup_save_plans(all_plans: list[SavePlan], save_to_lowest_rank: bool = False) -> list[SavePlan]:
    """The same plans without duplicates: what several ranks hold goes to the rank with the fewest bytes so far.

    The largest items are assigned first, so that the small ones even out the load. With `save_to_lowest_rank`, the
    lowest rank that holds an item writes it.

    >>> plan = milepost.planning.create_default_local_save_plan({"a": torch.ones(2), "b": torch.ones(2)}, True)
    >>> deduplicated = milepost.planning.dedup_save_plans([plan, plan])
    >>> [[item.index.fqn for item in plan.items] for plan in deduplicated]
    [['a'], ['b']]
    """
    holders: dict[MetadataIndex, list[int]] = {}
    sizes: dict[MetadataIndex, int] = {}
    for rank, plan in enumerate(all_plans):
        for item in plan.items:
            holders.setdefault(item.index, []).append(rank)
            sizes[item.index] = _size_bytes(item)
    load = [0] * len(all_plans)
    for index, ranks in holders.items():
        if len(ranks) == 1:
            load[ranks[0]] += sizes[index]
    writer: dict[MetadataIndex, int] = {}
    for index in sorted(holders, key=lambda index: -sizes[index]):
        ranks = holders[index]
        writer[index] = ranks[0] if save_to_lowest_rank else min(ranks, key=load.__getitem__)
        if len(ranks) > 1:
            load[writer[index]] += sizes[index]
    return [
        dataclasses.replace(plan, items=_once([item for item in plan.items if writer[item.index] == rank]))
        for rank, plan in enumerate(all_plans)
    ]


def _once(items: list[WriteItem]) -> list[WriteItem]:
    return list({item.index: item for item in items}.values())


def _size_bytes(item: WriteItem) -> int:
    if item.tensor_data is not None:
        return item.tensor_storage_size() or 0
    return item.bytes_io_data.nbytes if item.bytes_io_data is not None else 1


def create_default_global_save_plan(
    all_plans: list[SavePlan], rewrite_index_hints: bool = True
) -> tuple[list[SavePlan], Metadata]:
    """The plans, with a hint at the position of each box in the metadata, and the metadata of all that they write.

    The plans have no duplicates: see `dedup_save_plans`. `rewrite_index_hints=False` leaves the plans unchanged.

    >>> plan = milepost.planning.create_default_local_save_plan({"w": torch.ones(2)}, is_coordinator=True)
    >>> plans, metadata = milepost.planning.create_default_global_save_plan([plan])
    >>> list(metadata.state_dict_metadata)
    ['w']
    """
    known: dict[str, STORAGE_TYPES] = {}
    plans = []
    for plan in all_plans:
        items = []
        for item in plan.items:
            place = _added(item, known)
            hinted = dataclasses.replace(item.index, index=place) if rewrite_index_hints and place is not None else None
            items.append(item if hinted is None else dataclasses.replace(item, index=hinted))
        plans.append(dataclasses.replace(plan, items=items))
    return plans, Metadata(known)


def _added(item: WriteItem, known: dict[str, STORAGE_TYPES]) -> int | None:
    """Describe an item in the metadata, and return the position of its box in the tensor's list of boxes."""
    fqn, data = item.index.fqn, item.tensor_data
    if item.type is not WriteItemType.SHARD and fqn in known:
        raise AssertionError(f"{fqn} is written twice: remove duplicates with dedup_save_plans first")
    if data is None:
        known[fqn] = BytesStorageMetadata()
        return None
    tensor = known.setdefault(fqn, TensorStorageMetadata(data.properties, data.size, []))
    assert isinstance(tensor, TensorStorageMetadata), f"{fqn} is written as a tensor and as a value"
    tensor.chunks.append(data.chunk)
    return len(tensor.chunks) - 1


def merged_planner_data(plans: Sequence[SavePlan]) -> dict[str, Any]:
    """The planner data of all plans in one dict. Where several plans have a key, the first one counts."""
    return dict(ChainMap(*[plan.planner_data for plan in plans if plan.planner_data]))


def validate_global_plan(global_plan: list[SavePlan], metadata: Metadata) -> list[str]:
    """All problems with the boxes of each tensor: outside of it, overlapping, of different types, leaving holes.

    >>> plan = milepost.planning.create_default_local_save_plan({"w": torch.ones(2)}, is_coordinator=True)
    >>> plans, metadata = milepost.planning.create_default_global_save_plan([plan])
    >>> milepost.planning.validate_global_plan(plans, metadata)
    []
    """
    errors = conflicts(global_plan)
    for key, value in metadata.state_dict_metadata.items():
        if isinstance(value, BytesStorageMetadata):
            continue
        outside = [chunk for chunk in value.chunks if not _is_inside(value.size, chunk)]
        for chunk in outside:
            errors.append(f"key:{key} has out of bounds chunk: tensor-size:{value.size} chunk: {chunk}")
        if outside:
            continue
        boxes = [box_of(chunk) for chunk in value.chunks]
        errors += [
            f"key:{key} has overlapping chunks: {value.chunks[i]} {value.chunks[j]}" for i, j in overlapping(boxes)
        ]
        volume, filled = math.prod(value.size), sum(box.elements for box in boxes)
        if len(global_plan) > 1 and volume != filled:  # a single process may save the part of a tensor that it has
            errors.append(f"key:{key} invalid fill tensor-volume: {volume} chunks-volume: {filled}")
    for error in errors[:_SHOWN]:
        _log.warning("%s", error)
    return errors


def conflicts(plans: Sequence[SavePlan]) -> list[str]:
    """The keys that ranks describe in different ways: with other types or sizes, or as a tensor and as a value."""
    seen: dict[str, tuple[int, str]] = {}
    errors: dict[str, None] = {}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            own = _described(item)
            where, first = seen.setdefault(item.index.fqn, (rank, own))
            if first != own:
                errors[f"key:{item.index.fqn} is {first} on rank {where} and {own} on rank {rank}"] = None
    return list(errors)


def _described(item: WriteItem) -> str:
    data = item.tensor_data
    return "a value" if data is None else f"{data.properties.dtype} {tuple(data.size)}"


def _is_inside(size: torch.Size, chunk: ChunkStorageMetadata) -> bool:
    return len(size) == len(chunk.offsets) == len(chunk.sizes) and all(
        start >= 0 and length >= 0 and start + length <= end
        for start, length, end in zip(chunk.offsets, chunk.sizes, size, strict=True)
    )


def overlapping(boxes: list[Box]) -> list[tuple[int, int]]:
    """The pairs of boxes that share elements, found by a sweep along the dimension with the most cuts."""
    boxed = [(i, box) for i, box in enumerate(boxes) if box.elements]
    if len(boxed) < 2:
        return []
    if not boxed[0][1].shape:
        return list(combinations([i for i, _ in boxed], 2))
    sweep = sweep_dim([box for _, box in boxed])
    active: list[tuple[int, int]] = []
    found = []
    for i, box in sorted(boxed, key=lambda pair: pair[1].offset[sweep]):
        del active[: bisect_left(active, (box.offset[sweep] + 1, -1))]
        found += [(min(i, j), max(i, j)) for _, j in active if box.intersect(boxes[j]) is not None]
        insort(active, (box.end[sweep], i))
    return sorted(found)
