"""The border to torch's own records: tensor types that plan for themselves speak in those."""

from typing import Any

import torch

from milepost.planning.records import (
    BytesIOWriteData,
    ChunkStorageMetadata,
    MetadataIndex,
    TensorProperties,
    TensorWriteData,
    WriteItem,
    WriteItemType,
)


def index(theirs: Any) -> MetadataIndex:
    """Torch's index as ours."""
    return MetadataIndex(theirs.fqn, theirs.offset, theirs.index)


def chunk(theirs: Any) -> ChunkStorageMetadata:
    """Torch's box as ours."""
    return ChunkStorageMetadata(torch.Size(theirs.offsets), torch.Size(theirs.sizes))


def properties(theirs: Any) -> TensorProperties:
    """Torch's properties of a tensor as ours."""
    return TensorProperties(theirs.dtype, theirs.layout, theirs.requires_grad, theirs.memory_format, theirs.pin_memory)


def write_item(theirs: Any) -> WriteItem:
    """Torch's write item as ours; ours as it is."""
    if isinstance(theirs, WriteItem):
        return theirs
    data, size = theirs.tensor_data, theirs.bytes_io_data
    return WriteItem(
        index(theirs.index),
        WriteItemType[theirs.type.name],
        None if size is None else BytesIOWriteData(size.nbytes),
        None
        if data is None
        else TensorWriteData(chunk(data.chunk), properties(data.properties), torch.Size(data.size)),
    )


def to_torch(ours: MetadataIndex) -> Any:
    """Our index as torch's."""
    from torch.distributed.checkpoint.metadata import MetadataIndex as Theirs  # noqa: PLC0415

    return Theirs(ours.fqn, ours.offset, ours.index)
