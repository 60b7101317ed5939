"""From objects of a state to items of a plan."""

from typing import Any

import torch
from torch.distributed.checkpoint import planner_helpers as theirs

from milepost.dcp._engine.lent import lend
from milepost.planning import global_plan, items, kept_plans
from milepost.planning.items import create_read_items_for_chunk_list
from milepost.planning.records import ChunkStorageMetadata, TensorWriteData, WriteItem
from milepost.planning.torch_records import ours

__all__ = ["create_read_items_for_chunk_list"]

_compare_save_plans = kept_plans.compare_save_plans
_contains_usable_plan = kept_plans.contains_usable_plan
_create_chunk_from_tensor = items.create_chunk_from_tensor
_create_chunk_list = items.create_chunk_list
_create_default_metadata_only_plan = global_plan.create_default_metadata_only_plan
_create_read_item_for_byteio = items.create_read_item_for_bytesio
_create_read_item_for_tensor = items.create_read_item_for_tensor
_create_read_items = items.create_read_items
_create_write_item_for_bytesio = items.create_write_item_for_bytesio
_create_write_item_for_tensor = items.create_write_item_for_tensor
_create_write_items = items.create_write_items
_init_state_dict = items.init_state_dict
_iterate_state_dict = items.iterate_state_dict
_merge_delta_local_plans = kept_plans.merge_delta_local_plans


def _create_write_items_for_dtensor(fqn: str, tensor: Any) -> WriteItem:
    """The item of a DTensor of which this rank holds one box."""
    (item,) = items.create_write_items_for_shards(fqn, tensor)
    return item


def _create_chunk_from_dtensor(tensor: Any) -> ChunkStorageMetadata:
    (chunk,) = items.create_chunk_list(tensor)
    return chunk


def _chunk_for_shard(shard_md: Any) -> ChunkStorageMetadata:
    return ChunkStorageMetadata(torch.Size(shard_md.shard_offsets), torch.Size(shard_md.shard_sizes))


def _sharded_tensor_metadata(sharded_tensor: Any, shard_md: Any) -> TensorWriteData:
    made: TensorWriteData = ours(theirs._sharded_tensor_metadata(sharded_tensor, shard_md))  # noqa: SLF001
    return made


def _create_write_item_for_shard(fqn: str, sharded_tensor: Any, shard_md: Any) -> WriteItem:
    made: WriteItem = ours(theirs._create_write_item_for_shard(fqn, sharded_tensor, shard_md))  # noqa: SLF001
    return made


lend(__name__, "_get_device_module")
