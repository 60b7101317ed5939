"""Folders of `torch.distributed.checkpoint`: a pickled `.metadata`, and files whose items are archives of `torch.save`."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import xxhash

from milepost.core.box import Box, Shape, check_shape
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_DEPTH, MAX_DIMS, MAX_RANKS, MIB
from milepost.core.strict_int import number_of
from milepost.core.tree import Path
from milepost.data.collection_pause import CollectionPaused
from milepost.data.transforms import restored
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint, UnsupportedFormat
from milepost.formats.read.archive import MAX_PICKLE_BYTES, Archive, Window
from milepost.formats.read.content import Strided, read_content
from milepost.formats.read.files import SLACK_BYTES, Item
from milepost.formats.read.pickles import BadPickle, Maker, NamedObject, load
from milepost.formats.read.torchfile import placed_in
from milepost.formats.read.virtual import (
    Allowance,
    FileBox,
    ForeignState,
    PlacedTensor,
    Settler,
    check_total,
    rescue_from_bytes,
)
from milepost.store import Reader, Store
from milepost.store.base import check_name

METADATA = ".metadata"
_MAX_METADATA_BYTES = 512 * MIB
_MAX_TRANSFORMS = 16
_RANK = re.compile(r"__([0-9]{1,6})_[0-9]+\.distcp")
_CHECKPOINT = "torch.distributed.checkpoint"
_SHARDED = "torch.distributed._shard.sharded_tensor.metadata"
_RECORDS = {
    (f"{_CHECKPOINT}.metadata", "Metadata"),
    (f"{_CHECKPOINT}.metadata", "TensorStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "BytesStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "ChunkStorageMetadata"),
    (f"{_CHECKPOINT}.metadata", "TensorProperties"),
    (f"{_CHECKPOINT}.metadata", "_MEM_FORMAT_ENCODING"),
    (f"{_CHECKPOINT}.metadata", "MetadataIndex"),
    (f"{_CHECKPOINT}.metadata", "StorageMeta"),
    (f"{_CHECKPOINT}.filesystem", "_StorageInfo"),
    (f"{_CHECKPOINT}.filesystem", "_StoragePrefix"),
    (_SHARDED, "TensorProperties"),
    (_SHARDED, "MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
    ("pathlib", "PosixPath"),
    ("pathlib", "PurePosixPath"),
    ("pathlib", "Path"),
    ("pathlib", "WindowsPath"),
    ("pathlib._local", "PosixPath"),
    ("pathlib._local", "WindowsPath"),
}


@CollectionPaused()
def read_dcp(store: Store) -> ForeignState:
    """What DCP saved in a folder. Raises CheckpointDamaged; UnsafeCheckpoint for metadata that names anything but data."""
    data = _read_metadata(store)
    where = f"{store.url}/{METADATA}"
    try:
        metadata = load(data, _find)
        entries = _fields(metadata, "Metadata")["state_dict_metadata"]
        stored = {_index(index): _item(info) for index, info in metadata.fields["storage_data"].items()}
        _check_chunks(entries, len(data))
        described = {key: _described(key, entry) for key, entry in entries.items()}
        paths = _paths(metadata.fields.get("planner_data"), entries, Allowance().grow(len(data)))
    except UnsafeCheckpoint as error:
        raise UnsafeCheckpoint(f"{where}: {error}") from None
    except (BadPickle, LookupError, TypeError, ValueError, AttributeError, RecursionError) as error:
        raise CheckpointDamaged(f"{where} is not what DCP writes: {str(error)[:300]}") from None
    names = sorted({name for name, _ in stored.values()})
    if len(names) >= MAX_RANKS:
        raise UnsafeCheckpoint(f"{where} names {len(names)} files")
    for name in names:
        check_name(name)
    sizes = _sizes(where, names, stored.values())
    numbers = {name: i for i, name in enumerate(names)}
    values = _Values(store, sizes)
    leaves: dict[str, Any] = {}
    for key, tensor in described.items():
        if tensor is None:
            leaves[key] = values.read(key, *_stored(stored, key, None, where, alone=True), numbers)
        else:
            leaves[key] = _placed(key, *tensor, stored, numbers, where)
    values.close()
    check_total(where, values.tensors, sum(sizes.values()))
    state = _nest(where, {key: (paths[key], leaf) for key, leaf in leaves.items()})
    ranks = [int(match[1]) for name in names if (match := _RANK.fullmatch(name))]
    files = tuple((name, sizes[name]) for name in names)
    digest = xxhash.xxh3_64_digest(data)
    return ForeignState("dcp", digest, state, files, max(ranks, default=0) + 1, {}, values.rescuer(paths), store.reader)


def _read_metadata(store: Store) -> bytes:
    reader = store.reader(METADATA)
    try:
        if reader.size_bytes > _MAX_METADATA_BYTES:
            raise UnsafeCheckpoint(f"{store.url}/{METADATA} has {reader.size_bytes} bytes, over {_MAX_METADATA_BYTES}")
        buffer = bytearray(reader.size_bytes)
        reader.read(0, [memoryview(buffer)])
        return bytes(buffer)
    finally:
        reader.close()


# ---------------------------------------------------------------- the metadata, as plain data


def _find(module: str, name: str) -> Any:
    """What a name in the metadata stands for: records without behaviour, sizes as tuples, dtypes by name."""
    if (module, name) in _RECORDS:
        return Maker(name, lambda *args: NamedObject(name, args))
    if (module, name) == ("torch", "Size"):
        return Maker(name, lambda items=(): tuple(items))
    if (module, name) == ("collections", "OrderedDict"):
        return Maker(name, lambda *_: {})
    if module == "torch" and (name in DTYPES or name in ("strided", "preserve_format", "contiguous_format")):
        return name
    raise UnsafeCheckpoint(
        f"the metadata names {module}.{name}"[:300] + ", which is no part of what DCP writes; it was not run"
    )


def _fields(value: Any, name: str) -> dict[str, Any]:
    if not isinstance(value, NamedObject) or value.name != name:
        raise TypeError(f"a {name} was expected")
    return value.fields


def _index(value: Any) -> tuple[str, Shape | None]:
    fields = _fields(value, "MetadataIndex")
    offset = fields.get("offset")
    return _text(fields["fqn"]), None if offset is None else _shape(offset)


def _item(value: Any) -> tuple[str, Item]:
    fields = _fields(value, "_StorageInfo")
    offset, length = _shape((fields["offset"], fields["length"]))
    transforms = fields.get("transform_descriptors") or ()
    if not isinstance(transforms, (list, tuple)) or len(transforms) > _MAX_TRANSFORMS:
        raise TypeError("transforms were expected")
    transforms = tuple(
        map(_text, transforms)
    )  # in the order in which they were applied, though torch undoes them so too
    return _text(fields["relative_path"]), Item(offset, length, transforms)


def _text(value: Any) -> str:
    if type(value) is not str:
        raise TypeError("text was expected")
    return value


def _shape(value: Any) -> Shape:
    if not isinstance(value, (tuple, list)) or len(value) > MAX_DIMS:
        raise TypeError("sizes were expected")
    if any(type(n) is not int or not 0 <= n < 2**62 for n in value):
        raise TypeError("sizes were expected")
    return tuple(value)


def _described(key: Any, entry: Any) -> "tuple[str, Shape, list[Box]] | None":
    """The dtype, shape and parts of a tensor; None for a value."""
    _text(key)
    if isinstance(entry, NamedObject) and entry.name == "BytesStorageMetadata":
        return None
    fields = _fields(entry, "TensorStorageMetadata")
    properties = fields["properties"]
    if not isinstance(properties, NamedObject) or properties.name != "TensorProperties":
        raise TypeError("a tensor has no properties")
    dtype = properties.state[0] if isinstance(properties.state, tuple) else properties.fields.get("dtype")
    if dtype not in DTYPES:
        raise UnsupportedFormat(f"{key[:200]!r} has the dtype {str(dtype)[:40]}, which is not supported")
    shape = _shape(fields["size"])
    check_shape(shape)
    chunks = [_fields(chunk, "ChunkStorageMetadata") for chunk in fields["chunks"]]
    return dtype, shape, [Box(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in chunks]


def _check_chunks(entries: dict[str, Any], most: int) -> None:
    """Refuse metadata in which many tensors have one long list of chunks: there are less chunks than bytes."""
    for entry in entries.values():
        chunks = entry.fields.get("chunks") if isinstance(entry, NamedObject) else None
        most -= len(chunks) if isinstance(chunks, (list, tuple)) else 0
    if most < 0:
        raise UnsafeCheckpoint("many tensors name the same chunks")


def _paths(planner_data: Any, entries: dict[str, Any], allowance: Allowance) -> dict[str, Path]:
    """Where each key stands in the state; a key that the planner does not list stands there as it is."""
    known = planner_data if isinstance(planner_data, dict) else {}
    paths: dict[str, Path] = {}
    for key in entries:
        path = known.get(key)
        if isinstance(path, tuple) and len(path) > MAX_DEPTH:
            raise ValueError(f"{key[:200]!r} is nested too deeply")
        fits = isinstance(path, tuple) and path and all(type(part) in (str, int) for part in path)
        paths[key] = path if fits and isinstance(path, tuple) else (key,)
        allowance.spend("the metadata", sum(len(part) if isinstance(part, str) else 1 for part in paths[key]))
    return paths


def _sizes(where: str, names: list[str], items: Iterable[tuple[str, Item]]) -> dict[str, int]:
    """How much of each file is used. Items that overlap are refused: they could claim any amount of data."""
    by_file: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for name, item in items:
        by_file[name].append((item.offset, item.offset + item.length))
    for name, spans in by_file.items():
        spans.sort()
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise UnsafeCheckpoint(f"{where}: items of {name[:200]!r} overlap")
    return {name: max((stop for _, stop in spans), default=0) for name, spans in by_file.items()}


def _stored(
    stored: dict[tuple[str, Shape | None], tuple[str, Item]], key: str, offset: Shape | None, where: str, alone: bool
) -> tuple[str, Item]:
    found = stored.get((key, offset)) or (stored.get((key, None)) if alone else None)
    if found is None:
        raise CheckpointDamaged(f"{where} does not say where {key[:200]!r} is, at {offset}")
    return found


def _placed(
    key: str,
    dtype: str,
    shape: Shape,
    boxes: list[Box],
    stored: dict[tuple[str, Shape | None], tuple[str, Item]],
    numbers: dict[str, int],
    where: str,
) -> PlacedTensor:
    pieces = []
    for box in boxes:
        if not box.elements:
            continue
        name, item = _stored(stored, key, box.offset, where, alone=len(boxes) == 1)
        if not item.transforms and box.elements * DTYPES[dtype].size_bytes > item.length:
            raise CheckpointDamaged(f"{where}: the part {box.text} of {key[:200]!r} has too few bytes")
        pieces.append(FileBox(box, numbers[name], item))
    return PlacedTensor(dtype, shape, tuple(pieces))


# ---------------------------------------------------------------- values


class _Values:
    """Reads what is not a tensor: each is an archive of its own."""

    def __init__(self, store: Store, sizes: dict[str, int]) -> None:
        self._store, self._sizes = store, sizes
        self._open: tuple[str, Reader, Window] | None = None
        self._items: dict[str, tuple[str, Item]] = {}
        self._allowance = Allowance()
        self.tensors: list[PlacedTensor] = []

    def read(self, key: str, name: str, item: Item, numbers: dict[str, int]) -> Any:
        """The value of a key, with places where it holds tensors."""
        self._items[key] = (name, item)
        what = f"{key[:200]!r} in {self._store.url}/{name}"
        window, start, length = self._bytes_of(name, item, what)
        archive = Archive(window, start, length, what)
        content = read_content(archive, what)
        seen: dict[int, tuple[Strided, PlacedTensor]] = {}
        inside = item if item.transforms else None
        allowed = self._allowance.grow(length)
        found = Settler(what, allowed, lambda v: placed_in(archive, v, numbers[name], what, seen, inside)).settle(
            content
        )
        self.tensors.extend(tensor for _, tensor in seen.values())
        return found

    def _bytes_of(self, name: str, item: Item, what: str) -> tuple[Callable[[int, int], bytes], int, int]:
        if item.length > MAX_PICKLE_BYTES:
            raise UnsafeCheckpoint(f"{what} is a value of {item.length} bytes, over {MAX_PICKLE_BYTES}")
        if self._open is None or self._open[0] != name:
            self.close()
            try:
                reader = self._store.reader(name)
            except FileNotFoundError:
                raise CheckpointDamaged(f"{self._store.url}/{name} is missing") from None
            self._open = (name, reader, Window(reader))
        _, reader, window = self._open
        if item.offset + item.length > reader.size_bytes:
            raise CheckpointDamaged(f"{self._store.url}/{name} ends before {what} does")
        if not item.transforms:
            return window, item.offset, item.length
        data = restored(window(item.offset, item.length), item.transforms, 64 * item.length + SLACK_BYTES, what)
        return (lambda at, count: data[at : at + count]), 0, len(data)

    def rescuer(self, paths: dict[str, Path]) -> Callable[[Path], bytes]:
        """How to get a value that only pickle can make: from the archive of the key above it."""
        keys = {path: key for key, path in paths.items()}

        def rescue(path: Path) -> bytes:
            for end in range(len(path), 0, -1):
                key = keys.get(_as_saved(path[:end], keys))
                if key is not None and key in self._items:
                    name, item = self._items[key]
                    read, start, length = self._bytes_of(name, item, repr(key[:200]))
                    data = read(start, length)
                    self.close()
                    return rescue_from_bytes(data, path[end:])
            raise CheckpointDamaged(f"{self._store.url}: there is no value at {path[:10]!r}")

        return rescue

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _as_saved(path: Path, keys: dict[Path, str]) -> Path:
    """The path as DCP spells it, with text where an optimizer has numbers."""
    return path if path in keys else tuple(str(part) if type(part) is int else part for part in path)


# ---------------------------------------------------------------- the tree


class _OpenContainer(dict[Any, Any]):
    """A container that is being filled; whether it is a list shows when all its children are there."""


def _nest(where: str, leaves: dict[str, tuple[Path, Any]]) -> Any:
    """The state with its containers."""
    root = _OpenContainer()
    for key, (path, leaf) in leaves.items():
        here = root
        for part in path[:-1]:
            following = here.setdefault(part, _OpenContainer())
            if not isinstance(following, _OpenContainer):
                raise CheckpointDamaged(f"{where}: {key[:200]!r} stands below a value")
            here = following
        if path[-1] in here:
            raise CheckpointDamaged(f"{where}: {key[:200]!r} stands where another key does")
        here[path[-1]] = leaf
    return _finished(root)


def _finished(node: Any) -> Any:
    if not isinstance(node, _OpenContainer):
        return node
    children = {name: _finished(child) for name, child in node.items()}
    if children and all(type(name) is int for name in children) and sorted(children) == list(range(len(children))):
        return [children[i] for i in range(len(children))]
    if set(children) == {"state", "param_groups"} and isinstance(children["state"], dict):
        # An optimizer, which numbers its parameters; DCP makes text of all keys.
        children["state"] = {_number(name): child for name, child in children["state"].items()}
    return children


def _number(name: Any) -> Any:
    number = number_of(name) if isinstance(name, str) else None
    return name if number is None else number
