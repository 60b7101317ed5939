"""Files of `torch.save`: a zip archive with the pickle of the state and a record for each storage."""

import contextlib

import xxhash

from milepost.core.box import Box
from milepost.core.tree import Path
from milepost.formats.read.archive import Archive, Window
from milepost.formats.read.content import DtypeName, Strided, read_content
from milepost.formats.read.pickle_machine import Opaque
from milepost.formats.read.spots import Item, spot_of
from milepost.formats.read.virtual import (
    Allowance,
    FileBox,
    ForeignState,
    PlacedTensor,
    StoredArchive,
    TensorReplacer,
    check_total,
)
from milepost.store import Reader, Store


def read_torch_file(store: Store, name: str) -> ForeignState:
    """What `torch.save` put into a file. Raises CheckpointDamaged or UnsupportedFormat."""
    what = f"{store.url}/{name}"
    with contextlib.closing(store.reader(name)) as reader:
        archive = Archive(Window(reader, store), 0, reader.size_bytes, what)
        content = read_content(archive, what)
        size = archive.records[f"{archive.prefix}data.pkl"].size_bytes
        digest = xxhash.xxh3_64_digest(repr((reader.size_bytes, sorted(archive.records.items()))).encode())
        placed: dict[int, tuple[Strided, PlacedTensor]] = {}
        replacer = TensorReplacer(what, Allowance().grow(size), lambda v: placed_in(archive, v, 0, what, placed))
        state = replacer.walk(content)
        file_bytes = reader.size_bytes
    check_total(what, (tensor for _, tensor in placed.values()), file_bytes)
    nested = isinstance(content, (dict, list, tuple))

    stored = StoredArchive(store, name)

    def rescue(path: Path) -> bytes:
        return stored.rescue(path if nested else ())

    def opened(_: str) -> Reader:
        return store.reader(name)

    return ForeignState("torch", digest, state, ((name, file_bytes),), 1, {}, rescue, opened)


def _torch_dtype(name: str) -> object:
    import torch  # noqa: PLC0415

    return getattr(torch, name, Opaque(f"torch.{name}"))


def placed_in(
    archive: Archive,
    value: object,
    file: int,
    what: str,
    seen: dict[int, tuple[Strided, PlacedTensor]],
    inside: Item | None = None,
) -> object:
    """A tensor of an archive with its place in the file; any other value as it is."""
    if isinstance(value, DtypeName):
        return _torch_dtype(value)
    if not isinstance(value, Strided):
        return value
    if id(value) not in seen:
        pieces: tuple[FileBox, ...] = ()
        if 0 not in value.shape:
            pieces = (FileBox(Box.whole(value.shape), file, spot_of(archive, value, what, inside)),)
        seen[id(value)] = (value, PlacedTensor(value.dtype, value.shape, pieces))
    return seen[id(value)][1]
