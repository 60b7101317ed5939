"""Between the manifest and what planners see: metadata with all boxes, and results of what was written."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from milepost.commit.attempt import Contents
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.layout import Boxes, Held, Layout, Whole
from milepost.core.manifest import Manifest, ShardFile, Tensor, Value
from milepost.core.tree import Branch, Leaf, grow, nodes_of
from milepost.errors import CheckpointDamaged, CheckpointError, InvalidRequest
from milepost.planning.items import box_of, chunk_of
from milepost.planning.records import (
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
"""Where a planner's own data is kept in the checkpoint's metadata."""


@dataclass(frozen=True)
class Goal:
    """What a save aims at, and which of how many ranks this is; each rank finds it in its plan's `storage_data`."""

    generation: int
    save_id: str
    rank: int
    world: int = 1


@dataclass(frozen=True)
class StoredItem:
    """What a rank wrote for an item: in which file of which save; or, for a value, the value as the manifest spells it."""

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
    """What planners decided and ranks wrote, for the manifest. Raises InvalidRequest for what was planned and not written."""
    stored = {result.index: result for rank in results for result in rank}
    missing = [fqn for fqn, saved in metadata.state_dict_metadata.items() if not _is_written(fqn, saved, stored)]
    if missing:
        raise InvalidRequest(f"these are in the metadata, but no rank wrote them: {', '.join(missing[:20])}")
    _check_written(goal, metadata, stored)
    layouts: dict[Layout, int] = {}
    tensors: list[Tensor] = []
    values: list[Value] = []
    for fqn, saved in metadata.state_dict_metadata.items():
        if isinstance(saved, TensorStorageMetadata):
            layout = _layout(fqn, saved, stored)
            dtype = dtype_name(saved.properties.dtype, fqn)
            number = layouts.setdefault(layout, len(layouts))
            how = stored[MetadataIndex(fqn, saved.chunks[0].offsets)].storage_data.transforms if saved.chunks else ()
            tensors.append(Tensor(fqn, dtype, tuple(saved.size), number, transforms=how))
            continue
        result = stored[MetadataIndex(fqn)]
        told: StoredItem = result.storage_data
        if told.is_value:
            values.append(Value(fqn, told.value))
        else:
            whole = layouts.setdefault(Whole(str(told.rank)), len(layouts))
            tensors.append(Tensor(fqn, "uint8", (result.size_in_bytes,), whole, kind="bytes"))
    kinds: dict[str, Leaf] = {}
    kinds.update((t.key, "tensor") for t in tensors)
    kinds.update((v.key, "value") for v in values)
    paths, extra = paths_of(metadata.planner_data, kinds)
    files = {r.storage_data.file.rank: r.storage_data.file for r in stored.values() if r.storage_data.file is not None}
    told_too = {**kept, **({PLANNER_DATA: extra} if extra is not None else {})}
    return Contents(
        Codec().encode(told_too, "metadata"),
        tuple(layouts),
        tuple(tensors),
        nodes_of(paths, kinds),
        tuple(values),
        (),
        tuple(files[rank] for rank in sorted(files)),
    )


def written_as(fqn: str, dtype: torch.dtype, box: Box, size: torch.Size) -> str:
    """What is written for a box of a tensor, in words: equal where the same is meant."""
    return f"{dtype_name(dtype, fqn)} {box.text} of {tuple(size)}"


def _check_written(goal: Goal, metadata: Metadata, stored: dict[MetadataIndex, WriteResult]) -> None:
    """Raise InvalidRequest where the manifest would promise something else than lies in the files that it names."""
    strays = sorted({index.fqn for index, result in stored.items() if result.storage_data.save_id != goal.save_id})
    if strays:
        raise InvalidRequest(
            f"these were written for another save: {', '.join(strays[:20])}. Does a planner keep plans between saves? "
            "What storage puts into `storage_data` of a plan holds for one save."
        )
    wrong = []
    for fqn, saved in metadata.state_dict_metadata.items():
        if not isinstance(saved, TensorStorageMetadata):
            continue
        for chunk in saved.chunks:
            told = written_as(fqn, saved.properties.dtype, box_of(chunk), saved.size)
            found = stored[MetadataIndex(fqn, chunk.offsets)].storage_data.what
            if found != told:
                wrong.append(f"{fqn!r} is {told} in the metadata, and {found or 'a value'} was written")
    if wrong:
        raise InvalidRequest(f"plans and metadata do not agree: {'; '.join(wrong[:20])}")


def _is_written(fqn: str, saved: Any, stored: dict[MetadataIndex, WriteResult]) -> bool:
    if isinstance(saved, TensorStorageMetadata):
        return all(MetadataIndex(fqn, chunk.offsets) in stored for chunk in saved.chunks)
    return MetadataIndex(fqn) in stored


def _layout(fqn: str, saved: TensorStorageMetadata, stored: dict[MetadataIndex, WriteResult]) -> Layout:
    """Each box at the one rank that wrote it."""
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
        raise InvalidRequest(f"{fqn!r} cannot be saved like this: {error}") from None
    return layout


def paths_of(planner_data: Any, kinds: Mapping[str, Leaf]) -> tuple[dict[str, tuple[str | int, ...]], Any]:
    """Where each key stands in the tree, and, where a planner has data of its own instead, that data."""
    is_mapping = isinstance(planner_data, Mapping) and all(_is_path(path) for path in planner_data.values())
    known = planner_data if is_mapping else {}
    paths = {key: tuple(known.get(key, (key,))) for key in kinds}
    return paths, None if is_mapping or planner_data is None else planner_data


def _is_path(path: Any) -> bool:
    return isinstance(path, tuple) and bool(path) and all(type(step) in (str, int) for step in path)


def expand(manifest: Manifest) -> Metadata:
    """The manifest as planners see it: each tensor with all its boxes, and where those are."""
    known: dict[str, Any] = {}
    parts: dict[MetadataIndex, StoredBox] = {}
    for tensor in manifest.tensors:
        if tensor.kind in ("bytes", "bytearray"):
            known[tensor.key] = BytesStorageMetadata()
            continue
        chunks: list[ChunkStorageMetadata] = []
        for read in read_plan(manifest, tensor, Box.whole(tensor.shape)):
            parts[MetadataIndex(tensor.key, read.source.offset)] = StoredBox(read.rank, read.name, read.source)
            chunks.append(chunk_of(read.source))
        if not chunks:  # no elements: one box without any
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
        return {}  # made with types of the user's, which nobody needs here
    return found if isinstance(found, dict) else {}


def _leaves(branch: Branch, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str, tuple[str | int, ...]]]:
    """Each key with its path, as planners spell it: names of dicts as text, places in lists as numbers."""
    if branch.node.key:
        yield branch.node.key, path
    is_dict = branch.node.kind.partition(":")[0] in ("dict", "OrderedDict", "defaultdict", "namedtuple")
    for i, child in enumerate(branch.children):
        step = _spelled(child.node.name) if is_dict else i
        yield from _leaves(child, (*path, step))


def _spelled(name: Any) -> str:
    if isinstance(name, str):
        return name
    try:
        return str(Codec().decode(name, "a key"))
    except (ValueError, CheckpointError) as error:
        raise CheckpointDamaged(f"the tree names a key that is none: {str(error)[:200]}") from None
