"""Names of files and notes in Hugging Face folders, as DCP spells them."""

import io
import json
import struct
from typing import Any

import torch

from milepost.core.limits import MAX_HEADER_BYTES
from milepost.core.shardfile import NOTES
from milepost.dcp._engine.hf_names import (
    CUSTOM_METADATA_KEY,
    DCP_VERSION_KEY,  # noqa: F401  # DCP has these names here
    FILE_NAME,  # noqa: F401
    HF_DCP_VERSION,  # noqa: F401
    SAVED_OFFSETS_KEY,  # noqa: F401
    SHARDED_DIR_NAME,  # noqa: F401
    SHARDED_FILE_NAME,  # noqa: F401
    SUFFIX,  # noqa: F401
    HFStorageInfo,
    gen_file_name,
)
from milepost.errors import CheckpointDamaged
from milepost.formats.read.names import INDEX

_metadata_fn: str = INDEX

DCP_SHARDING_INFO_KEY = CUSTOM_METADATA_KEY
DEFAULT_EXTRA_METADATA_KEY = NOTES
SHAPE_KEY = "shape"
DATA_KEY = "data"
DTYPE_KEY = "dtype"
DATA_OFFSETS_KEY = "data_offsets"
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


_HFStorageInfo = HFStorageInfo
_gen_file_name = gen_file_name


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
