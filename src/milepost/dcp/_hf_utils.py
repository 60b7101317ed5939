"""Names of files and notes in Hugging Face folders, as DCP spells them."""

import io
import json
import struct
from dataclasses import dataclass
from typing import Any

import torch

from milepost.core.limits import MAX_HEADER_BYTES
from milepost.core.shardfile import NOTES
from milepost.errors import CheckpointDamaged
from milepost.formats.read.huggingface import INDEX

_metadata_fn: str = INDEX

FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"
SUFFIX = ".safetensors"
SHARDED_DIR_NAME = "sharded"

CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
DCP_SHARDING_INFO_KEY = CUSTOM_METADATA_KEY
DEFAULT_EXTRA_METADATA_KEY = NOTES
SAVED_OFFSETS_KEY = "saved_offsets"
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"
DCP_VERSION_KEY = "DCP_VERSION"
HF_DCP_VERSION: float = 1.0
FORMAT_KEY = "format"
FORMAT_VALUE = "pt"
NUM_BYTES_FOR_HEADER_LEN = 8

DTYPE_MAP = {
    "BF16": torch.bfloat16,
    "F16": torch.float16,
    "F32": torch.float32,
    "F64": torch.float64,
    "I8": torch.int8,
    "I16": torch.int16,
    "I32": torch.int32,
    "I64": torch.int64,
    "U8": torch.uint8,
}


@dataclass
class _HFStorageInfo:
    """Where a box of a tensor is: its file, and the shape and type that it has there."""

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype


def _gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """The name of file `index` of `largest_index`; with `shard_index`, of the part of it that one rank writes."""
    numbers = {"cpt_idx": f"{index:05d}", "num_files": f"{largest_index:05d}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(shard_idx=f"{shard_index:05d}", **numbers) + SUFFIX


def _get_safetensors_file_metadata(file_bytes: io.IOBase) -> tuple[Any, int]:
    """The header of a safetensors stream, and the position where its data begins."""
    start: bytes = file_bytes.read(NUM_BYTES_FOR_HEADER_LEN)
    length = struct.unpack("<Q", start)[0] if len(start) == NUM_BYTES_FOR_HEADER_LEN else 0
    if not 2 <= length <= MAX_HEADER_BYTES:
        raise CheckpointDamaged(f"this is not a safetensors file: its header would have {length} bytes")
    try:
        return json.loads(file_bytes.read(length)), NUM_BYTES_FOR_HEADER_LEN + length
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"this is not a safetensors file: {str(error)[:200]}") from None


def _get_dtype(dtype_str: str) -> torch.dtype:
    """The type of this name; torch's default type for a name that is not known, as in DCP."""
    return DTYPE_MAP.get(dtype_str, torch.get_default_dtype())


def _get_dcp_custom_metadata(metadata: Any) -> Any | None:
    """What a distributed writer noted in a header about the parts of tensors; None if it noted nothing."""
    noted = metadata.get(DEFAULT_EXTRA_METADATA_KEY, {}).get(CUSTOM_METADATA_KEY)
    return None if noted is None else json.loads(noted)
