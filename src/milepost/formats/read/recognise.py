"""Recognising what is at a place where there is no checkpoint of ours."""

import re
from itertools import islice

from milepost.errors import CheckpointNotFound, UnsupportedFormat
from milepost.formats.read.dcp import METADATA, read_dcp
from milepost.formats.read.huggingface import read_files, read_folder
from milepost.formats.read.torchfile import read_torch_file
from milepost.formats.read.virtual import Foreign, ForeignState, virtual
from milepost.store import LocalStore, Store

_INDEX = "model.safetensors.index.json"
_SINGLE = "model.safetensors"
_NUMBERED = re.compile(r"model-[0-9]{5,}-of-[0-9]{5,}\.safetensors")
_MAX_NAMES = 100_000


def recognise(store: Store) -> Foreign | None:
    """The checkpoint of another library at this place, opened; None where there is none that we know."""
    if isinstance(store, LocalStore) and store.root.is_file():
        # The user named this file, so a link is followed; one inside a folder would not be.
        path = store.root.resolve()
        store = LocalStore(path.parent)
        return virtual(store, _read_file(store, path.name))
    found = _read_folder(store)
    return None if found is None else virtual(store, found)


def _read_folder(store: Store) -> ForeignState | None:
    names = _names(store)
    if METADATA in names:
        return read_dcp(store)
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if _INDEX in indices or len(indices) == 1:
        return read_folder(store, _INDEX if _INDEX in indices else indices[0])
    files = [name for name in names if name.endswith(".safetensors")]
    if not files and any(name.endswith(".distcp") for name in names):
        raise CheckpointNotFound(f"there is no checkpoint at {store.url}: a save of DCP that never finished left data")
    if _SINGLE not in files and any(map(_NUMBERED.fullmatch, files)):
        # The index is written last: without it these may be a part of the shards, or those of two conversions.
        raise CheckpointNotFound(
            f"there is no checkpoint at {store.url}: {_INDEX}, which says what belongs to these shards, is missing. "
            "Was a conversion or a download not finished?"
        )
    # As Hugging Face does: others beside it are adapters, or the same weights in another layout.
    files = [_SINGLE] if _SINGLE in files else files
    return read_files(store, files) if files else None


def _names(store: Store) -> set[str]:
    """The names right at the place, without those in folders below it."""
    names = set()
    for name in islice(store.list(""), _MAX_NAMES):
        if "/" not in name:
            names.add(name)
        elif isinstance(store, LocalStore):
            break  # it lists what is at the top first
    return names


def _read_file(store: Store, name: str) -> ForeignState:
    reader = store.reader(name)
    try:
        head = bytearray(min(9, reader.size_bytes))
        reader.read(0, [memoryview(head)])
    finally:
        reader.close()
    if head[:2] == b"PK":
        return read_torch_file(store, name)
    if head[8:9] == b"{":
        return read_files(store, [name])
    hint = (
        " It looks like torch's format before version 1.6: load and save it again with torch."
        if head[:1] == b"\x80"
        else ""
    )
    raise UnsupportedFormat(f"{store.url}/{name} is neither a file of torch.save nor a safetensors file.{hint}")
