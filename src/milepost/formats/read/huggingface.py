"""Safetensors files, alone or as the shards of a folder as Hugging Face writes it."""

import contextlib
import math
import struct
from collections.abc import Mapping
from typing import Any

import msgspec
import xxhash

from milepost.core.box import Box, check_shape
from milepost.core.dtypes import DTYPES, STORED_SIZES
from milepost.core.limits import MAX_ENTRIES, MAX_HEADER_BYTES, MIB
from milepost.core.shardfile import Entry, count_entries, parse_entries
from milepost.core.wire import Wire
from milepost.data.read import read_bytes, read_small
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint, UnsupportedFormat
from milepost.formats.read.spots import Spot
from milepost.formats.read.virtual import FileBox, ForeignState, PlacedTensor
from milepost.store import LocalStore, Reader, Store

LABEL = "milepost_save"
"""The note in which a file says which save wrote it, and of how many files: no index says so for files of ranks."""
MAX_INDEX_BYTES = 256 * MIB
_TORCH_NAMES = {kind.stored_as: name for name, kind in reversed(DTYPES.items()) if not kind.inner}
_TORCH_NAMES["U8"] = "uint8"
_SHARDING = "DCP_SHARDING_INFO"


class _Index(msgspec.Struct):
    weight_map: dict[str, str]


class _Offsets(msgspec.Struct):
    saved_offsets: tuple[int, ...] = ()


class SaveLabel(msgspec.Struct, frozen=True):
    """Which save wrote a file, and how many files it wrote."""

    save_id: str
    files: int


_WEIGHTS = Wire.json(_Index)
_LABEL = Wire.json(SaveLabel)
_PLACES = Wire.json(dict[str, _Offsets])


def read_folder(store: Store, index: str) -> ForeignState:
    """The shards that an index lists. Raises CheckpointDamaged where one lacks what the index promises."""
    data = read_small(_reader(store, index), f"{store.url}/{index}", MAX_INDEX_BYTES)
    try:
        weights = _WEIGHTS.unpack(data).weight_map
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{store.url}/{index} is not a valid index: {str(error)[:200]}") from None
    names = sorted(set(weights.values()))
    return _read(store, names, weights, data)


def read_files(store: Store, names: list[str]) -> ForeignState:
    """All tensors of these files. A key may occur twice only where a distributed writer cut its tensor into parts."""
    return _read(store, sorted(names), None, b"")


def read_one_file(store: Store, name: str) -> ForeignState:
    """The tensors of one file, whatever belongs to it."""
    return _read(store, [name], None, b"", alone=True)


def _read(
    store: Store, names: list[str], weights: dict[str, str] | None, index: bytes, *, alone: bool = False
) -> ForeignState:
    hasher = xxhash.xxh3_64(index)
    parts: dict[str, list[tuple[tuple[int, ...], str, tuple[int, ...], FileBox]]] = {}
    files: list[tuple[str, int]] = []
    notes: dict[str, str] = {}
    labels: dict[str, str | None] = {}
    for number, name in enumerate(names):
        head, size = read_head(store, name)
        hasher.update(head)
        files.append((name, size))
        found, about, places = parse_head(head, size, f"{store.url}/{name}")
        labels |= {} if alone else {name: about.get(LABEL)}
        notes |= {key: text for key, text in about.items() if key not in (_SHARDING, LABEL)}
        for key, entry in found.items():
            if weights is None or weights.get(key) == name:
                dtype, shape = type_of(entry, f"{key[:200]!r} in {store.url}/{name}")
                at = places.get(key, (0,) * len(shape))
                spot = Spot(len(head) + entry.data_offsets[0])
                parts.setdefault(key, []).append((at, dtype, shape, FileBox(_box(at, shape, key), number, spot)))
    check_one_save(labels, store.url)
    missing = [key for key in weights or () if key not in parts]
    if missing:
        raise CheckpointDamaged(
            f"{store.url}: {len(missing)} tensors of the index are in no file, first {missing[0][:200]!r}"
        )
    state = {key: _placed(key, found, store.url) for key, found in parts.items()}

    def opened(name: str) -> Reader:
        return _reader(store, name)

    return ForeignState("safetensors", hasher.digest(), state, tuple(files), 1, notes, lambda _: b"", opened)


def check_one_save(labels: Mapping[str, str | None], url: str) -> None:
    """Raise CheckpointDamaged if files with labels (by name; None: it has none) are not all files of one save."""
    found = {name: unpack_label(text, f"{url}/{name}") for name, text in labels.items() if text is not None}
    if not found:
        return
    kinds = {label.save_id for label in found.values()} | ({""} if len(found) < len(labels) else set())
    expected = next(iter(found.values())).files
    if len(kinds) > 1 or expected != len(labels):
        raise CheckpointDamaged(
            f"{url} has {len(labels)} safetensors files, of {len(kinds)} saves, and {expected} were saved together. "
            "A save that replaced them did not finish, or files were added or removed. Save again, or use another copy"
        )


def unpack_label(text: str, what: str) -> SaveLabel:
    """The label in a file's notes."""
    try:
        return _LABEL.unpack(text.encode())
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{what} has a label of its save that is not valid: {str(error)[:200]}") from None


def pack_label(label: SaveLabel) -> str:
    """The label as a note of a file."""
    return msgspec.json.encode(label).decode()


def _box(at: tuple[int, ...], shape: tuple[int, ...], key: str) -> Box:
    try:
        return Box(at, shape)
    except ValueError as error:
        raise CheckpointDamaged(f"the part of {key[:200]!r} has no valid position: {error}") from None


def _placed(key: str, parts: list[tuple[tuple[int, ...], str, tuple[int, ...], FileBox]], url: str) -> PlacedTensor:
    if len({(dtype, len(shape)) for _, dtype, shape, _ in parts}) > 1:
        raise CheckpointDamaged(f"{url}: {key[:200]!r} stands in several files as different things")
    pieces = tuple(piece for _, _, _, piece in parts)
    shape = tuple(map(max, zip(*(piece.box.end for piece in pieces), strict=True)))
    if len(pieces) > 1 and len({piece.box for piece in pieces}) == 1:
        raise CheckpointDamaged(f"{url}: {key[:200]!r} stands in several files, and no index says which one counts")
    return PlacedTensor(parts[0][1], shape, tuple(p for p in pieces if p.box.elements))


def type_of(entry: Entry, what: str) -> tuple[str, tuple[int, ...]]:
    """The torch dtype and the shape of an entry."""
    if entry.dtype == "F4" and entry.shape and entry.shape[-1] % 2 == 0:
        return "float4_e2m1fn_x2", (*entry.shape[:-1], entry.shape[-1] // 2)
    if entry.dtype not in _TORCH_NAMES:
        raise UnsupportedFormat(f"{what} has the type {entry.dtype[:20]!r}, which torch does not have")
    return _TORCH_NAMES[entry.dtype], entry.shape


def parse_head(
    head: bytes, file_bytes: int, what: str
) -> tuple[dict[str, Entry], dict[str, str], dict[str, tuple[int, ...]]]:
    """The entries of a header, its notes, and where the parts of cut tensors lie in them."""
    if count_entries(head, 8) > MAX_ENTRIES:  # before they are parsed, which takes a microsecond for each
        raise UnsafeCheckpoint(f"{what} has a header of {count_entries(head, 8)} entries, over {MAX_ENTRIES}")
    try:
        entries, notes = parse_entries(memoryview(head)[8:])
        places = {k: p.saved_offsets for k, p in _PLACES.unpack(notes.get(_SHARDING, "{}").encode()).items()}
        data_bytes = file_bytes - len(head)
        for key, entry in entries.items():
            _check(key, entry, data_bytes)
    except (ValueError, RecursionError) as error:
        raise CheckpointDamaged(f"{what} is not a valid safetensors file: {str(error)[:300]}") from None
    end = 0
    for start, stop in sorted(entry.data_offsets for entry in entries.values()):
        if start < end:
            raise UnsafeCheckpoint(f"{what} has entries that overlap")
        if start > end:
            raise CheckpointDamaged(f"{what} has bytes that no entry holds, at {end}; does a key stand there twice?")
        end = stop
    if end != data_bytes:
        raise CheckpointDamaged(f"{what} has {data_bytes - end} bytes behind its last entry")
    return entries, notes, places


def _check(key: str, entry: Entry, data_bytes: int) -> None:
    check_shape(entry.shape)
    start, end = entry.data_offsets
    if not 0 <= start <= end <= data_bytes:
        raise ValueError(f"{key[:200]!r} lies at {start}..{end} of {data_bytes} bytes; is the file whole?")
    bits = 4 if entry.dtype == "F4" else 8 * STORED_SIZES.get(entry.dtype, 0)
    if bits and math.prod(entry.shape) * bits != 8 * (end - start):
        raise ValueError(f"{key[:200]!r} has {end - start} bytes, which do not fit {entry.dtype} {entry.shape}")


def read_head(store: Store, name: str) -> tuple[bytes, int]:
    """The header of a file with its length, and the size of the file."""
    try:
        reader = _reader(store, name)
    except FileNotFoundError:
        raise CheckpointDamaged(f"{store.url}/{name} is missing") from None
    with contextlib.closing(reader):
        length = struct.unpack("<Q", read_bytes(reader, 0, 8))[0] if reader.size_bytes >= 8 else 0
        if not 2 <= length <= min(MAX_HEADER_BYTES, reader.size_bytes - 8):
            raise CheckpointDamaged(f"{store.url}/{name} is not a whole safetensors file")
        return read_bytes(reader, 0, 8 + length), reader.size_bytes


def _reader(store: Store, name: str) -> Reader:
    """Open a file. Hugging Face's own cache has links into its folder of blobs; no other links are followed."""
    try:
        return store.reader(name)
    except UnsafeCheckpoint:
        target = _blob(store, name)
        if target is None:
            raise
        return target


def _blob(store: Store, name: str) -> Reader | None:
    if not isinstance(store, LocalStore) or store.root.parent.name != "snapshots" or "/" in name:
        return None
    blobs = store.root.parent.parent / "blobs"
    target: Any = (store.root / name).resolve()
    return LocalStore(blobs).reader(target.name) if target.parent == blobs.resolve() else None
