"""The names by which a folder of another library is recognised. Nothing is opened."""

import re
from itertools import islice

from milepost.commit.beside import METADATA
from milepost.store import Store

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
NUMBERED = re.compile(r"(?!shard-[0-9]{5,}-).+-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
"""One of several files, of a model, an adapter or another part of one. An index says which belong together."""
SHARDED = re.compile(r"shard-[0-9]{5,}-model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
"""A file of one rank, as torch's distributed writer and Milepost's name it."""
DEEPSPEED = re.compile(r"(?:zero_pp_rank_([0-9]{1,6})_)?mp_rank_([0-9]{1,6})(?:_[0-9]+)?_model_states\.pt")
"""The file of one rank of DeepSpeed that holds the module."""
_MAX_NAMES = 100_000


def is_deepspeed(names: set[str]) -> bool:
    """Whether these are the names of one step of DeepSpeed."""
    return any(map(DEEPSPEED.fullmatch, names))


def looks_foreign(store: Store) -> bool:
    """Whether this place looks like a whole checkpoint of another library, by its names. Nothing is opened."""
    return names_look_foreign(names_at_top(store))


def names_look_foreign(names: set[str]) -> bool:
    """Whether the names of files at the top of a place look like a whole checkpoint of another library."""
    files = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    alone = bool(files) and not any(map(NUMBERED.fullmatch, files))
    return is_deepspeed(names) or METADATA in names or INDEX in indices or len(indices) == 1 or SINGLE in files or alone


def names_at_top(store: Store) -> set[str]:
    """The names at the top of the store, without those in folders."""
    return {name for name in islice(store.list("", shallow=True), _MAX_NAMES) if "/" not in name}
