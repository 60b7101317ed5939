"""Conversion between Milepost's records and torch's. Both have the same names and fields, so a name finds its twin."""

import dataclasses
from enum import Enum
from functools import cache
from typing import Any

from milepost.planning import records

_NAMES = {
    "metadata": (
        *("ChunkStorageMetadata", "TensorProperties", "TensorStorageMetadata", "BytesStorageMetadata"),
        *("StorageMeta", "Metadata", "MetadataIndex"),
    ),
    "planner": (
        *("WriteItemType", "LoadItemType", "BytesIOWriteData", "TensorWriteData", "WriteItem", "ReadItem"),
        *("SavePlan", "LoadPlan"),
    ),
    "storage": ("WriteResult",),
}


@cache
def _pairs() -> tuple[dict[type, type], dict[type, type]]:
    """The classes of Milepost for those of torch, and the reverse. Made on first use: torch's are slow to import."""
    from torch.distributed.checkpoint import metadata, planner, storage  # noqa: PLC0415

    modules = {"metadata": metadata, "planner": planner, "storage": storage}
    to_ours = {getattr(modules[m], name): getattr(records, name) for m, names in _NAMES.items() for name in names}
    return to_ours, {own: foreign for foreign, own in to_ours.items()}


def ours(value: Any) -> Any:
    """The value with Milepost's records in place of torch's, at any depth of lists, tuples and dicts."""
    return _crossed(value, _pairs()[0])


def theirs(value: Any) -> Any:
    """The value with torch's records in place of Milepost's, at any depth of lists, tuples and dicts."""
    return _crossed(value, _pairs()[1])


def _crossed(value: Any, to: dict[type, type]) -> Any:
    kind = type(value)
    other = to.get(kind)
    if other is not None:
        if isinstance(value, Enum):
            return other[value.name]  # type: ignore[index]
        known = {field.name for field in dataclasses.fields(other)}
        named = {f.name: _crossed(getattr(value, f.name), to) for f in dataclasses.fields(value) if f.name in known}
        return other(**named)
    if kind is list or kind is tuple:
        return kind(_crossed(item, to) for item in value)
    if kind is dict:
        return {_crossed(key, to): _crossed(item, to) for key, item in value.items()}
    return value
