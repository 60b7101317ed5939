"""The `.metadata` of a DCP folder as plain data: all tensors, where their parts lie, and the path of each key."""

from typing import Any, NamedTuple

from milepost.core.box import Box, Shape, check_shape
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_DEPTH, MAX_DIMS
from milepost.core.tree import Path
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint, UnsupportedFormat
from milepost.formats.read.pickle_machine import BadPickle, Maker, NamedObject
from milepost.formats.read.pickles import load
from milepost.formats.read.spots import Item
from milepost.formats.read.virtual import Allowance

_MAX_TRANSFORMS = 16
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


class TensorParts(NamedTuple):
    """A tensor as the metadata describes it: its dtype, its shape, and the boxes that are stored."""

    dtype: str
    shape: Shape
    boxes: list[Box]


StoredItems = dict[tuple[str, Shape | None], tuple[str, Item]]
"""The file and item of each part, by key and offset; the offset is None for a value."""


class DcpMetadata(NamedTuple):
    """What the metadata says: the tensor of each key (None for a value), where parts lie, and the path of each key."""

    described: dict[str, TensorParts | None]
    stored: StoredItems
    paths: dict[str, Path]


def read_metadata(data: bytes, where: str) -> DcpMetadata:
    """Parse and check. Raises CheckpointDamaged; UnsafeCheckpoint for metadata that names anything but data."""
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
    return DcpMetadata(described, stored, paths)


def _find(module: str, name: str) -> Any:
    """What a name in the metadata means: records without behaviour, sizes as tuples, dtypes by name."""
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
    # In the order in which they were applied, though torch undoes them in this order too.
    return _text(fields["relative_path"]), Item(offset, length, tuple(map(_text, transforms)))


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


def _described(key: Any, entry: Any) -> TensorParts | None:
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
    boxes = [Box(_shape(chunk["offsets"]), _shape(chunk["sizes"])) for chunk in chunks]
    return TensorParts(dtype, shape, boxes)


def _check_chunks(entries: dict[str, Any], most: int) -> None:
    """Refuse metadata in which many tensors share one long list of chunks: there are fewer chunks than bytes."""
    for entry in entries.values():
        chunks = entry.fields.get("chunks") if isinstance(entry, NamedObject) else None
        most -= len(chunks) if isinstance(chunks, (list, tuple)) else 0
    if most < 0:
        raise UnsafeCheckpoint("many tensors name the same chunks")


def _paths(planner_data: Any, entries: dict[str, Any], allowance: Allowance) -> dict[str, Path]:
    """The path of each key in the state. A key that the planner does not list is its own path."""
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
