"""What one checkpoint holds: its tree, tensors, layouts, values and metadata. Reads the manifest, and no data."""

from collections.abc import Iterator, Sequence
from typing import Any, Literal

import msgspec

from milepost.checkpoint import Checkpoint
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.history import PhaseTime
from milepost.core.layout import Boxes, Grid, Layout, Whole
from milepost.core.manifest import Manifest, OlderFile, Tensor
from milepost.core.ranks import pack_ranks, unpack_ranks
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.tree import LEAVES, Node, is_dict
from milepost.errors import InvalidRequest
from milepost.inspection.spelled import plain_of, text_of

MOST_BOXES = 100_000
"""How many boxes of one tensor are listed."""


class HeldEntry(msgspec.Struct, frozen=True, kw_only=True):
    """One container or leaf of the state. `path`: the names from the root; `key`: that of a leaf.

    `container`: what kind a container is: "dict", "list". `layout`: how a tensor was cut over the ranks, in words.
    `value`: a value as JSON; `text`: as Python would write it. `ranks`: those that keep a value of their own here.
    `same_as`: the tensor that this one is tied to.
    """

    kind: Literal["container", "tensor", "value", "per_rank"]
    path: tuple[str, ...]
    key: str = ""
    container: str = ""
    dtype: str = ""
    shape: tuple[int, ...] | None = None
    size_bytes: int = 0
    layout: str = ""
    same_as: str = ""
    transforms: tuple[str, ...] = ()
    value: Any = None
    text: str = ""
    ranks: str = ""


class ReusedData(msgspec.Struct, frozen=True):
    """What an incremental save did not write again: so many bytes of data, in so many files of earlier saves.

    `saves`: how many saves these are of; `oldest_age`: how many saves ago the oldest of them was.
    """

    data_bytes: int
    files: int
    saves: int
    oldest_age: int


class CheckpointContents(msgspec.Struct, frozen=True, kw_only=True):
    """One checkpoint. `data_bytes`: all tensors; `file_bytes`: all files. `entries`: in the order of the state.

    `older`: what lies in files of earlier saves; None where nothing does.
    """

    url: str
    format: str
    generation: int
    created: str
    writer: str
    ranks: int
    tensors: int
    elements: int
    data_bytes: int
    file_bytes: int
    metadata: Any
    health: Health | None
    timings: tuple[PhaseTime, ...]
    statistics: tuple[TensorStatistics, ...]
    entries: tuple[HeldEntry, ...]
    older: ReusedData | None = None


class BoxInFile(msgspec.Struct, frozen=True):
    """One box of a tensor, the rank that saved it, its file, which may be of an earlier save, and the name in that."""

    offset: tuple[int, ...]
    shape: tuple[int, ...]
    rank: int
    file: str
    entry: str


class EntryDetail(msgspec.Struct, frozen=True, kw_only=True):
    """One leaf of a checkpoint. `boxes`: where the bytes of a tensor are; `more_boxes`: how many are left out.

    `statistics`: as recorded by the save, or of the elements that were read now. `values`: those that were asked for,
    nested by dimension, with `index` as it was given; `values_text`: the same, as torch prints them.
    """

    url: str
    entry: HeldEntry
    boxes: tuple[BoxInFile, ...] = ()
    more_boxes: int = 0
    statistics: TensorStatistics | None = None
    index: str = ""
    values: Any = None
    values_text: str = ""


def contents_of(checkpoint: Checkpoint) -> CheckpointContents:
    """All that the manifest of an open checkpoint tells."""
    manifest = checkpoint.manifest
    written = {tensor.key: tensor for tensor in manifest.tensors if not tensor.same_as}
    return CheckpointContents(
        url=checkpoint.url,
        format=manifest.format,
        generation=manifest.generation,
        created=manifest.created,
        writer=manifest.writer,
        ranks=manifest.world,
        tensors=len(manifest.tensors),
        elements=sum(Box.whole(tensor.shape).elements for tensor in written.values() if not tensor.is_bytes),
        data_bytes=sum(tensor.size_bytes for tensor in written.values()),
        file_bytes=sum(file.size_bytes for file in manifest.stored),
        metadata=plain_of(manifest.metadata),
        health=manifest.health,
        timings=manifest.timings,
        statistics=manifest.statistics,
        entries=tuple(_entries(manifest)),
        older=reused_of(manifest.older),
    )


def reused_of(older: Sequence[OlderFile]) -> ReusedData | None:
    """What lies in these files of earlier saves; None without any."""
    if not older:
        return None
    return ReusedData(
        data_bytes=sum(file.used_bytes for file in older),
        files=len(older),
        saves=len({file.save_id for file in older}),
        oldest_age=max(file.age for file in older),
    )


def _entries(manifest: Manifest) -> Iterator[HeldEntry]:
    leaves = _Leaves(manifest)
    path: list[str] = []
    parents: list[tuple[str, int]] = []  # the kind of each container on the way, and how many children it had so far
    for node in manifest.tree:
        del parents[node.depth :], path[max(node.depth - 1, 0) :]
        if parents:
            kind, count = parents[-1]
            parents[-1] = (kind, count + 1)
            path.append(_name(node, count if not is_dict(kind) and node.name is None else None))
        if node.kind in LEAVES:
            yield leaves.entry(node, tuple(path))
        else:
            parents.append((node.kind, 0))
            yield HeldEntry(kind="container", path=tuple(path), container=node.kind)


def _name(node: Node, position: int | None) -> str:
    if position is not None:
        return str(position)
    return node.name if isinstance(node.name, str) else text_of(node.name)


class _Leaves:
    """The tables of a manifest, by key."""

    def __init__(self, manifest: Manifest) -> None:
        self._tensors = {tensor.key: tensor for tensor in manifest.tensors}
        self._values = {value.key: value.value for value in manifest.values}
        self._ranks = {one.key: one.ranks for one in manifest.per_rank}
        self._layouts = [layout_words(layout) for layout in manifest.layouts]

    def entry(self, node: Node, path: tuple[str, ...]) -> HeldEntry:
        key = node.key
        if node.kind == "per_rank":
            return HeldEntry(kind="per_rank", path=path, key=key, ranks=self._ranks[key])
        if node.kind == "value":
            spelled = self._values[key]
            return HeldEntry(kind="value", path=path, key=key, value=plain_of(spelled), text=text_of(spelled))
        tensor = self._tensors[key]
        return HeldEntry(
            kind="tensor",
            path=path,
            key=key,
            dtype=tensor.dtype,
            shape=tensor.shape,
            size_bytes=tensor.size_bytes,
            layout=self._layouts[tensor.layout],
            same_as=tensor.same_as,
            transforms=tensor.transforms,
            container=tensor.kind if tensor.kind != "tensor" else "",
        )


def layout_words(layout: Layout) -> str:
    """How a tensor is cut, in a few words: `whole on 0-7`, `2x4: replicate, cut 0`, `6 boxes on 0-5`."""
    match layout:
        case Whole(ranks=ranks):
            return f"whole on {ranks}"
        case Grid(mesh=mesh, cuts=cuts):
            words = ["replicate" if c is None else f"cut {c.dim}" + f"/{c.stride}" * (c.stride > 1) for c in cuts]
            return f"{'x'.join(map(str, mesh.shape))}: {', '.join(words)}"
        case Boxes(held=held):
            ranks = pack_ranks(sorted({rank for one in held for rank in unpack_ranks(one.ranks)}))
            return f"{len(held)} box{'es' * (len(held) != 1)} on {ranks}"


def detail_of(checkpoint: Checkpoint, key: str) -> EntryDetail:
    """One leaf, and where its bytes are. Raises InvalidRequest for a key that is not there, with those like it."""
    entry = next((one for one in _entries(checkpoint.manifest) if one.kind != "container" and one.key == key), None)
    if entry is None:
        raise InvalidRequest(f"{checkpoint.url} has no key {key!r}.{_like(checkpoint, key)}")
    recorded = next((one for one in checkpoint.manifest.statistics if one.key == key), None)
    boxes = list(_boxes(checkpoint, key)) if entry.kind == "tensor" else []
    return EntryDetail(
        url=checkpoint.url,
        entry=entry,
        boxes=tuple(boxes[:MOST_BOXES]),
        more_boxes=max(len(boxes) - MOST_BOXES, 0),
        statistics=recorded,
    )


def _like(checkpoint: Checkpoint, key: str) -> str:
    """A hint: the keys below this one, or some that look like it."""
    below = [known for known in checkpoint if known.startswith(f"{key}.")]
    if below:
        return f" It is the start of {len(below)} keys, such as {below[0]!r}"
    import difflib  # noqa: PLC0415  # only for a hint

    like = difflib.get_close_matches(key, list(checkpoint)[:100_000], n=3)
    return f" Did you mean {' or '.join(map(repr, like))}?" if like else " `milepost show` lists the keys"


def _boxes(checkpoint: Checkpoint, key: str) -> Iterator[BoxInFile]:
    manifest = checkpoint.manifest
    tensor: Tensor = next(one for one in manifest.tensors if one.key == key)
    for item in read_plan(manifest, tensor, Box.whole(tensor.shape)):
        file = checkpoint.file_name(item.rank, item.name)
        yield BoxInFile(item.source.offset, item.source.shape, item.rank, file, item.name)
