"""Tensors that say themselves which boxes of a larger tensor they hold: DCP's `_Checkpointable` protocol.

`__create_chunk_list__` lists the boxes of this rank, and `__get_tensor_shard__` gives the memory of one. Torch's
`LocalShardsWrapper` is such a tensor: a DTensor's local part that holds several shards, of any sizes. Boxes that ranks
list may be cut in any way. The placements of a DTensor around such a tensor say nothing about them.
"""

from typing import Any

import torch
from torch.distributed.tensor import DTensor

from milepost.core.box import Box
from milepost.errors import InvalidState

Shard = tuple[Box, torch.Tensor]


def is_self_described(value: Any) -> bool:
    """Whether this is a tensor, or a DTensor around one, that lists its own boxes."""
    kind = type(_inner(value))
    return issubclass(kind, torch.Tensor) and not issubclass(kind, DTensor) and _lists_boxes(kind)


def own_shards(value: Any, key: str) -> list[Shard] | None:
    """The boxes with elements that this rank holds, each with its memory; None for a tensor that lists none itself.

    Raises InvalidState, naming the key, if the tensor contradicts itself.
    """
    if not is_self_described(value):
        return None
    from torch.distributed.checkpoint.metadata import MetadataIndex  # noqa: PLC0415  # slow, and rarely needed

    inner = _inner(value)
    shards: list[Shard] = []
    for number, chunk in enumerate(inner.__create_chunk_list__()):
        box = Box(tuple(chunk.offsets), tuple(chunk.sizes))
        if not box.elements:  # torch gives one for a rank that holds nothing, of any number of dimensions
            continue
        if not Box.whole(tuple(value.shape)).contains(box):
            raise InvalidState(f"{key!r} lists the box {box.text}, which leaves its shape {tuple(value.shape)}")
        data = inner.__get_tensor_shard__(MetadataIndex(key, chunk.offsets, number))
        if tuple(data.shape) != box.shape:
            raise InvalidState(f"{key!r} gives a tensor of shape {tuple(data.shape)} for its box {box.text}")
        shards.append((box, data))
    return shards


def _inner(value: Any) -> Any:
    return value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001


def _lists_boxes(kind: type) -> bool:
    return hasattr(kind, "__create_chunk_list__") and hasattr(kind, "__get_tensor_shard__")
