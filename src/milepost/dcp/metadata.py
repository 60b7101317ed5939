"""What a checkpoint holds, as planners and storage see it."""

import os

from torch.distributed.checkpoint.metadata import _MEM_FORMAT_ENCODING  # noqa: F401  # frameworks import it

from milepost.dcp._engine.lent import lend
from milepost.planning.records import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

__all__ = [
    "STATE_DICT_TYPE",
    "STORAGE_TYPES",
    "BytesStorageMetadata",
    "ChunkStorageMetadata",
    "Metadata",
    "MetadataIndex",
    "StorageMeta",
    "TensorProperties",
    "TensorStorageMetadata",
]

CHECKPOINT_ID_TYPE = str | os.PathLike[str]

lend(__name__)
