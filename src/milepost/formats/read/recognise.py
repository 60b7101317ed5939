"""Recognises checkpoints of other libraries."""

import contextlib
import os

from milepost.commit.beside import METADATA
from milepost.data.read import read_bytes
from milepost.errors import CheckpointNotFound, UnsafeCheckpoint, UnsupportedFormat
from milepost.formats.read.dcp import read_dcp
from milepost.formats.read.deepspeed import read_deepspeed
from milepost.formats.read.huggingface import read_files, read_folder, read_one_file
from milepost.formats.read.names import INDEX, NUMBERED, SINGLE, names_at_top
from milepost.formats.read.torchfile import read_torch_file
from milepost.formats.read.virtual import Foreign, ForeignState, virtual
from milepost.store import LocalStore, Store


def recognise(store: Store) -> Foreign | None:
    """The checkpoint of another library at this place, opened; None where there is no known one."""
    if isinstance(store, LocalStore) and os.path.isfile(store.root):
        # The user named this file, so a link is followed; one inside a folder would not be.
        path = store.root.resolve()
        store = LocalStore(path.parent)
        return virtual(store, _read_file(store, path.name))
    found = _read_folder(store)
    if found is not None:
        return virtual(store, found)
    around = _around(store)
    if around is not None:
        return virtual(around[0], _read_file(*around))
    from milepost.store.http import HttpStore  # noqa: PLC0415  # a path needs no network

    if isinstance(store, HttpStore):
        raise CheckpointNotFound(store.not_found())
    return None


def _around(store: Store) -> tuple[Store, str] | None:
    """The folder and the name of the file that a URL names; None where there is no such file."""
    parent = getattr(store, "parent", None)  # no verb of the port: a store has it where it lies in another one
    around: tuple[Store, str] | None = parent() if callable(parent) else None
    if around is None:
        return None
    try:
        around[0].reader(around[1]).close()
    except (FileNotFoundError, UnsafeCheckpoint):
        return None
    return around


def _read_folder(store: Store) -> ForeignState | None:
    names = names_at_top(store)
    if METADATA in names:
        return read_dcp(store)
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    if INDEX in indices or len(indices) == 1:
        return read_folder(store, INDEX if INDEX in indices else indices[0])
    deepspeed = read_deepspeed(store, names)
    if deepspeed is not None:
        return deepspeed
    files = [name for name in names if name.endswith(".safetensors")]
    if not files and any(name.endswith(".distcp") for name in names):
        raise CheckpointNotFound(f"there is no checkpoint at {store.url}: a save of DCP that never finished left data")
    if SINGLE not in files and any(map(NUMBERED.fullmatch, files)):
        # The index is written last: without it these may be a part of the shards, or those of two conversions.
        raise CheckpointNotFound(
            f"there is no checkpoint at {store.url}: the index ({INDEX}), which says what belongs to these shards, is "
            "missing. "
            "Was a conversion or a download not finished?"
        )
    # As Hugging Face does: others beside it are adapters, or the same weights in another layout.
    files = [SINGLE] if SINGLE in files else files
    return read_files(store, files) if files else None


def _read_file(store: Store, name: str) -> ForeignState:
    with contextlib.closing(store.reader(name)) as reader:
        head = read_bytes(reader, 0, min(9, reader.size_bytes))
    if head[:2] == b"PK":
        return read_torch_file(store, name)
    if head[8:9] == b"{":
        return read_one_file(store, name)
    hint = (
        " It looks like torch's format before version 1.6: load and save it again with torch."
        if head[:1] == b"\x80"
        else ""
    )
    raise UnsupportedFormat(f"{store.url}/{name} is neither a file of torch.save nor a safetensors file.{hint}")
