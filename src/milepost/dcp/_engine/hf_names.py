"""Names of files and notes in Hugging Face folders, as DCP spells them, and where a box of a tensor is in them."""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from milepost.errors import InvalidRequest
from milepost.store.spelling import spelled, without_secrets

FILE_NAME = "model-{cpt_idx}-of-{num_files}"
SHARDED_FILE_NAME = "shard-{shard_idx}-model-{cpt_idx}-of-{num_files}"
SUFFIX = ".safetensors"
SHARDED_DIR_NAME = "sharded"
CUSTOM_METADATA_KEY = "DCP_SHARDING_INFO"
SAVED_OFFSETS_KEY = "saved_offsets"
DCP_VERSION_KEY = "DCP_VERSION"
HF_DCP_VERSION: float = 1.0


@dataclass
class HFStorageInfo:
    """Where a box of a tensor is: its file, and the shape and type that it has there."""

    relative_path: str
    shape: torch.Size
    dtype: torch.dtype


def local_path(path: Any) -> Path:
    """The folder of Hugging Face files. Raises InvalidRequest for a URL: pathlib would take it for a folder here."""
    text = spelled(path)
    if "://" in text:
        raise InvalidRequest(
            f"Hugging Face storage of milepost.dcp is a folder on a file system, not {without_secrets(text)}. To read "
            "it there, use milepost.load or milepost.convert; to write, save to a folder and copy it"
        )
    return Path(text)


def gen_file_name(index: int, largest_index: int, shard_index: int | None = None) -> str:
    """The name of file `index` of `largest_index`; with `shard_index`, of the part of it that one rank writes."""
    numbers = {"cpt_idx": f"{index:05d}", "num_files": f"{largest_index:05d}"}
    if shard_index is None:
        return FILE_NAME.format(**numbers) + SUFFIX
    return SHARDED_FILE_NAME.format(shard_idx=f"{shard_index:05d}", **numbers) + SUFFIX
