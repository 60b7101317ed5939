"""Recognises checkpoints of other libraries."""

import contextlib
from itertools import islice

from milepost.commit.beside import METADATA
from milepost.data.read import read_bytes
from milepost.errors import CheckpointNotFound, UnsafeCheckpoint, UnsupportedFormat
from milepost.formats.read.dcp import read_dcp
from milepost.formats.read.deepspeed import is_deepspeed, read_deepspeed
from milepost.formats.read.huggingface import INDEX, NUMBERED, SINGLE, read_files, read_folder, read_one_file
from milepost.formats.read.torchfile import read_torch_file
from milepost.formats.read.virtual import Foreign, ForeignState, virtual
from milepost.store import HttpStore, LocalStore, Store

_MAX_NAMES = 100_000


def recognise(store: Store) -> Foreign | None:
    """The checkpoint of another library at this place, opened; None where there is no known one."""
    if isinstance(store, LocalStore) and store.root.is_file():
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
    names = _names(store)
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


def looks_foreign(store: Store) -> bool:
    """Whether this place looks like a whole checkpoint of another library, by its names. Nothing is opened."""
    return names_look_foreign(_names(store))


def names_look_foreign(names: set[str]) -> bool:
    """Whether the names of files at the top of a place look like a whole checkpoint of another library."""
    files = [name for name in names if name.endswith(".safetensors")]
    indices = [name for name in names if name.endswith(".safetensors.index.json")]
    alone = bool(files) and not any(map(NUMBERED.fullmatch, files))
    return is_deepspeed(names) or METADATA in names or INDEX in indices or len(indices) == 1 or SINGLE in files or alone


def _names(store: Store) -> set[str]:
    """The names at the top of the store, without those in folders."""
    return {name for name in islice(store.list("", shallow=True), _MAX_NAMES) if "/" not in name}


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
