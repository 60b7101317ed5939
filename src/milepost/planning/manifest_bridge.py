"""Between the manifest and what planners see: metadata with all boxes, and the results of writes."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from milepost.commit.attempt import Contents
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.layout import Boxes, Held, Layout, Whole
from milepost.core.manifest import Manifest, ShardFile, Tensor, Value
from milepost.core.tree import Branch, Leaf, grow, is_dict, nodes_of
from milepost.errors import CheckpointDamaged, CheckpointError, InvalidRequest
from milepost.planning.items import box_of, chunk_of
from milepost.planning.records import (
    STORAGE_TYPES,
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
    WriteResult,
)
from milepost.state.tensors import dtype_name, torch_dtype
from milepost.state.values import Codec

PLANNER_DATA = "milepost.planner_data"
"""The name of a planner's own data in the checkpoint's metadata."""


@dataclass(frozen=True)
class Goal:
    """What a save writes, and this rank among how many. Each rank finds it in the `storage_data` of its plan."""

    generation: int
    save_id: str
    rank: int
    world: int = 1


@dataclass(frozen=True)
class StoredItem:
    """What a rank wrote for an item: the save and the file; for a value, the value as it stands in the manifest."""

    rank: int
    save_id: str
    file: ShardFile | None
    what: str = ""
    value: Any = None
    is_value: bool = False
    transforms: tuple[str, ...] = ()


@dataclass(frozen=True)
class StoredBox:
    """Where a box of a tensor is stored."""

    rank: int
    name: str
    box: Box


def make_contents(
    goal: Goal, metadata: Metadata, results: list[list[WriteResult]], kept: Mapping[str, Any]
) -> Contents:
    """The contents of the manifest: what planners decided and ranks wrote.

    Raises InvalidRequest if the two do not agree, or if something was planned and not written.
    """
    stored = {result.index: result for rank in results for result in rank}
    _check_written(goal, metadata, stored)
    layouts: dict[Layout, int] = {}
    records = [_record(fqn, saved, stored, layouts) for fqn, saved in metadata.state_dict_metadata.items()]
    tensors = tuple(record for record in records if isinstance(record, Tensor))
    values = tuple(record for record in records if isinstance(record, Value))
    kinds: dict[str, Leaf] = {}
    kinds.update((tensor.key, "tensor") for tensor in tensors)
    kinds.update((value.key, "value") for value in values)
    paths, extra = paths_of(metadata.planner_data, kinds)
    files = {r.storage_data.file.rank: r.storage_data.file for r in stored.values() if r.storage_data.file is not None}
    notes = {**kept, **({PLANNER_DATA: extra} if extra is not None else {})}
    return Contents(
        Codec().encode(notes, "metadata"),
        tuple(layouts),
        tensors,
        nodes_of(paths, kinds),
        values,
        (),
        tuple(files[rank] for rank in sorted(files)),
    )


def _record(
    fqn: str, saved: STORAGE_TYPES, stored: dict[MetadataIndex, WriteResult], layouts: dict[Layout, int]
) -> Tensor | Value:
    """The manifest's record of one key. Adds its layout to `layouts`."""
    if isinstance(saved, TensorStorageMetadata):
        number = layouts.setdefault(_layout(fqn, saved, stored), len(layouts))
        first = stored[MetadataIndex(fqn, saved.chunks[0].offsets)].storage_data if saved.chunks else None
        transforms = () if first is None else first.transforms
        return Tensor(fqn, dtype_name(saved.properties.dtype, fqn), tuple(saved.size), number, transforms=transforms)
    result = stored[MetadataIndex(fqn)]
    item: StoredItem = result.storage_data
    if item.is_value:
        return Value(fqn, item.value)
    whole = layouts.setdefault(Whole(str(item.rank)), len(layouts))
    return Tensor(fqn, "uint8", (result.size_in_bytes,), whole, kind="bytes")


def written_as(fqn: str, dtype: torch.dtype, box: Box, size: torch.Size) -> str:
    """The dtype, box and size that are written for a box of a tensor, as text."""
    return f"{dtype_name(dtype, fqn)} {box.text} of {tuple(size)}"


def _check_written(goal: Goal, metadata: Metadata, stored: dict[MetadataIndex, WriteResult]) -> None:
    """Raise InvalidRequest if the manifest would promise something that its files do not hold."""
    missing = [fqn for fqn, saved in metadata.state_dict_metadata.items() if not _is_written(fqn, saved, stored)]
    if missing:
        raise InvalidRequest(f"these are in the metadata, but no rank wrote them: {', '.join(missing[:20])}")
    strays = sorted({index.fqn for index, result in stored.items() if result.storage_data.save_id != goal.save_id})
    if strays:
        raise InvalidRequest(
            f"these were written for another save: {', '.join(strays[:20])}. Does a planner keep plans between saves? "
            "The `storage_data` that storage puts into a plan holds for one save."
        )
    wrong = []
    for fqn, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        for chunk in saved.chunks:
            planned = written_as(fqn, saved.properties.dtype, box_of(chunk), saved.size)
            found = stored[MetadataIndex(fqn, chunk.offsets)].storage_data.what
            if found != planned:
                wrong.append(f"{fqn!r} is {planned} in the metadata, and {found or 'a value'} was written")
    if wrong:
        raise InvalidRequest(f"plans and metadata do not agree: {'; '.join(wrong[:20])}")


def _is_written(fqn: str, saved: Any, stored: dict[MetadataIndex, WriteResult]) -> bool:
    if isinstance(saved, TensorStorageMetadata):
        return all(MetadataIndex(fqn, chunk.offsets) in stored for chunk in saved.chunks)
    return MetadataIndex(fqn) in stored


def _layout(fqn: str, saved: TensorStorageMetadata, stored: dict[MetadataIndex, WriteResult]) -> Layout:
    """The layout that has each box at the one rank that wrote it."""
    held = []
    for chunk in saved.chunks:
        box, rank = box_of(chunk), stored[MetadataIndex(fqn, chunk.offsets)].storage_data.rank
        if box.shape == tuple(saved.size):
            return Whole(str(rank))
        if box.elements:
            held.append(Held(box, str(rank)))
    layout = Boxes(tuple(held))
    try:
        layout.check(tuple(saved.size))
    except ValueError as error:
        raise InvalidRequest(f"the boxes of {fqn!r} cannot be saved: {error}") from None
    return layout


def paths_of(planner_data: Any, kinds: Mapping[str, Leaf]) -> tuple[dict[str, tuple[str | int, ...]], Any]:
    """The path of each key in the tree, and the planner's data if it is something else than such paths."""
    is_mapping = isinstance(planner_data, Mapping) and all(_is_path(path) for path in planner_data.values())
    known = planner_data if is_mapping else {}
    paths = {key: tuple(known.get(key, (key,))) for key in kinds}
    return paths, None if is_mapping or planner_data is None else planner_data


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(step) in (str, int) for step in path)


def expand(manifest: Manifest) -> Metadata:
    """The manifest as planners see it: each tensor with all its boxes, and where the boxes are stored."""
    known: dict[str, Any] = {}
    parts: dict[MetadataIndex, StoredBox] = {}
    for tensor in manifest.tensors:
        if tensor.is_bytes:
            known[tensor.key] = BytesStorageMetadata()
            continue
        chunks: list[ChunkStorageMetadata] = []
        for read in read_plan(manifest, tensor, Box.whole(tensor.shape)):
            parts[MetadataIndex(tensor.key, read.source.offset)] = StoredBox(read.rank, read.name, read.source)
            chunks.append(chunk_of(read.source))
        if not chunks:  # a tensor without elements has one empty box
            chunks = [chunk_of(Box.whole(tensor.shape))]
        known[tensor.key] = TensorStorageMetadata(
            TensorProperties(torch_dtype(tensor.dtype)), torch.Size(tensor.shape), chunks
        )
    known |= {value.key: BytesStorageMetadata() for value in manifest.values}
    kept = _decoded(Codec(), manifest.metadata)
    paths = {key: path for key, path in _leaves(grow(manifest.tree)) if key in known}
    return Metadata(known, kept.get(PLANNER_DATA, paths), parts, version=str(manifest.version))


def _decoded(codec: Codec, metadata: Any) -> dict[Any, Any]:
    try:
        found = codec.decode(metadata, "metadata")
    except (ValueError, CheckpointError):
        return {}  # it uses types of the user; planners do not need it
    return found if isinstance(found, dict) else {}


def _leaves(branch: Branch, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Each key with its path, as planners spell it: names in dicts as text, positions in lists as numbers."""
    if branch.node.key:
        yield branch.node.key, path
    has_names = is_dict(branch.node.kind) or branch.node.kind.startswith("namedtuple:")
    for i, child in enumerate(branch.children):
        step = _spelled(child.node.name) if has_names else i
        yield from _leaves(child, (*path, step))


def _spelled(name: Any) -> str:
    if isinstance(name, str):
        return name
    try:
        return str(Codec().decode(name, "a key"))
    except (ValueError, CheckpointError) as error:
        raise CheckpointDamaged(f"the tree holds a name that is not valid: {str(error)[:200]}") from None
