"""Sharded optimizer states of FSDP1."""

from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import TensorProperties as ShardProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.checkpoint import optimizer as theirs

from milepost.dcp._engine.calls import comm_of, load_with
from milepost.dcp._engine.lent import lend
from milepost.errors import InvalidRequest
from milepost.planning.flatten import unflatten_state_dict
from milepost.planning.protocol import LoadPlanner, StorageReader
from milepost.planning.records import BytesStorageMetadata, Metadata, TensorStorageMetadata
from milepost.planning.torch_adapters import adapted_reader

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """The optimizer's part of a checkpoint, from every rank: tensors as ShardedTensors that are cut like the model's.

    `optimizer_key`: the first name of its keys. `planner` is not used where the model is cut by tensor parallelism too.
    """
    metadata = adapted_reader(storage_reader).read_metadata()
    layouts, group = theirs._get_state_dict_2d_layout(model_state_dict)  # noqa: SLF001
    state: dict[str, Any] = {}
    starts: dict[str, Any] = {}
    paths = _paths_of(metadata)
    for key, saved in metadata.state_dict_metadata.items():
        path = paths.get(key, (key,))
        if path[0] != optimizer_key:
            continue
        if isinstance(saved, BytesStorageMetadata):
            state[key] = None
            continue
        start, size = layouts.get(str(path[2]), (None, saved.size)) if group is not None else (None, saved.size)
        state[key] = _target(saved, torch.Size(size), group)
        if start is not None:
            starts[key] = start
    chosen: Any = theirs._ReaderWithOffset(starts) if group is not None else planner  # noqa: SLF001
    load_with(lambda: state, storage_reader, chosen, comm_of(None, no_dist=False))
    return unflatten_state_dict(state, {key: paths.get(key, (key,)) for key in state})


def _paths_of(metadata: Metadata) -> dict[str, tuple[str | int, ...]]:
    if not isinstance(metadata.planner_data, dict):
        raise InvalidRequest("the planner that saved this checkpoint did not note where its keys stood in the state")
    return metadata.planner_data


def _target(saved: TensorStorageMetadata, size: torch.Size, group: Any) -> Any:
    """New memory to read a tensor into: one of several elements is cut along dimension 0 over the group's ranks."""
    properties = saved.properties
    device = dist.distributed_c10d._get_pg_default_device(group)  # noqa: SLF001
    if saved.size.numel() == 1:
        return torch.empty(saved.size, dtype=properties.dtype, device=device)
    ranks = range(dist.get_world_size(group))
    placements: Any = [f"rank:{rank}/{_device_of(rank, device.type)}" for rank in ranks]
    whole = ChunkShardingSpec(dim=0, placements=placements).build_metadata(size, ShardProperties(properties.dtype))
    shards = [
        Shard(torch.empty(one.shard_sizes, dtype=properties.dtype, device=device), one)
        for one in whole.shards_metadata
        if one.placement is not None and one.placement.rank() == dist.get_rank(group)
    ]
    make: Any = ShardedTensor._init_from_local_shards_and_global_metadata  # noqa: SLF001
    return make(shards, whole, process_group=group)


def _device_of(rank: int, kind: str) -> str:
    return kind if kind == "cpu" else f"{kind}:{rank % torch.get_device_module(kind).device_count()}"


lend(
    __name__,
    "STATE_DICT_2D_LAYOUT _ReaderWithOffset _alloc_tensor _create_colwise_spec _gen_rank_device "
    "_get_device_module _get_state_dict_2d_layout _is_nested_tensor",
)
