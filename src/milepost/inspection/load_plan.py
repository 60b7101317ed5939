"""What a load on another mesh would read, rank by rank. Arithmetic over the manifest: no torch, no ranks, no data."""

import fnmatch
import math
import re
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field

import msgspec

from milepost.core.box import Box, Shape
from milepost.core.division import extra_bytes, read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.limits import MAX_RANKS
from milepost.core.manifest import FORMAT, Manifest, Tensor
from milepost.errors import InvalidRequest
from milepost.inspection.patterns import refuse_unmatched
from milepost.loading.way import swap_pays

Cuts = tuple[int | None, ...]
"""What each axis of a mesh does to a tensor: cut this dimension, or (None) replicate."""
_AXIS = re.compile(r"(?:([A-Za-z_][A-Za-z0-9_]*)=)?([1-9][0-9]{0,8})")
_CUT = re.compile(r"(?:shard|s)?\(?([0-9]{1,2})\)?")
_COPY = ("replicate", "r", "none", "-")


class RankReads(msgspec.Struct, frozen=True):
    """What one rank would read. `reads`: in how many pieces. `files`: of how many ranks that saved it.

    Each of those has its data in one file; after incremental saves, also in files of earlier ones.
    """

    rank: int
    bytes: int
    reads: int
    files: int


class FileReads(msgspec.Struct, frozen=True):
    """What one rank would read from one file."""

    file: str
    bytes: int
    reads: int


class PlannedLoad(msgspec.Struct, frozen=True, kw_only=True):
    """What a load would read. `axes` and `mesh`: the new mesh; `cuts`: what each axis does, -1 for replicate.

    `tensors`: how many are read; `tensor_bytes`: what they hold. `read_bytes`: what all ranks read together, where each
    reads for itself; about `extra_bytes` lie beside that and are read too, since data is verified in whole blocks.
    `swaps`: whether ranks of several machines would instead read each byte once, and send it to each other.
    `files_of`: the reads of the one rank that was asked for, by file.
    """

    url: str
    saved_ranks: int
    axes: tuple[str, ...]
    mesh: tuple[int, ...]
    cuts: tuple[int, ...]
    tensors: int
    tensor_bytes: int
    read_bytes: int
    extra_bytes: int
    swaps: bool
    ranks: tuple[RankReads, ...]
    files_of: tuple[FileReads, ...] = ()


@dataclass(frozen=True, slots=True)
class NewMesh:
    """The mesh to load on: the names of its axes ("" where they have none), their sizes, and how tensors are cut.

    `rules`: patterns of keys, as in a shell, with cuts of their own; the first that fits a key counts.
    """

    axes: tuple[str, ...]
    shape: Shape
    cuts: Cuts
    rules: Sequence[tuple[str, Cuts]] = field(default=())

    @classmethod
    def parse(cls, ranks: int | None, mesh: str | None, cuts: str | None, rules: Iterable[str] = ()) -> "NewMesh":
        """From texts: `2x3` or `dp=2,tp=3`; `replicate,shard0` or `dp=replicate,tp=shard0`; `*.wo.weight=...`.

        Without `mesh`, the ranks form one axis. Without `cuts`, the last axis cuts dimension 0 and the others
        replicate: on one axis that is what FSDP does, on two HSDP. Raises InvalidRequest.
        """
        axes, shape = _axes(mesh) if mesh else (("",), (ranks or 0,))
        count = math.prod(shape)
        if not 1 <= count <= MAX_RANKS:
            raise InvalidRequest(f"say on how many ranks, from 1 to {MAX_RANKS}: --ranks 6, or --mesh dp=2,tp=3")
        if ranks is not None and ranks != count:
            raise InvalidRequest(f"a mesh of {'x'.join(map(str, shape))} has {count} ranks, not {ranks}")
        usual: Cuts = (*[None] * (len(shape) - 1), 0)
        chosen = _cuts(cuts, axes) if cuts else usual
        return cls(axes, shape, chosen, tuple(_rule(rule, axes) for rule in rules))

    def cuts_of(self, key: str, shape: Shape) -> Cuts:
        """How a tensor is cut. An axis that would cut a dimension that it does not have replicates."""
        found = next((cuts for pattern, cuts in self.rules if fnmatch.fnmatchcase(key, pattern)), self.cuts)
        return tuple(cut if cut is not None and cut < len(shape) else None for cut in found)


def _axes(text: str) -> tuple[tuple[str, ...], Shape]:
    parts = re.split(r"[x,]", text) if "=" not in text else text.split(",")
    found = [_AXIS.fullmatch(part.strip()) for part in parts]
    names = [one[1] for one in found if one and one[1]]
    if not all(found) or len(set(names)) < len(names):
        raise InvalidRequest(f"{text!r} is no mesh: write 2x3, or dp=2,tp=3, each axis once")
    return tuple(one[1] or "" for one in found if one), tuple(int(one[2]) for one in found if one)


def _cuts(text: str, axes: Sequence[str]) -> Cuts:
    parts = [part.strip() for part in text.split(",")]
    if all("=" in part for part in parts):
        named = dict(part.split("=", 1) for part in parts)
        if set(named) - set(axes) or len(named) < len(parts):
            has = ", ".join(filter(None, axes)) or "none with a name"
            raise InvalidRequest(f"{text!r} does not name axes of the mesh, each once at most; it has {has}")
        parts = [named.get(axis, "replicate") for axis in axes]
    if len(parts) != len(axes):
        raise InvalidRequest(f"{text!r} has {len(parts)} cuts, and the mesh has {len(axes)} axes")
    return tuple(_cut(part.lower(), text) for part in parts)


def _cut(part: str, text: str) -> int | None:
    if part in _COPY:
        return None
    found = _CUT.fullmatch(part)
    if not found:
        raise InvalidRequest(f"{text!r} is no list of cuts: write replicate or shard0 for each axis of the mesh")
    return int(found[1])


def _rule(text: str, axes: Sequence[str]) -> tuple[str, Cuts]:
    pattern, separator, cuts = text.rpartition(":")  # a key may hold one, and cuts do not
    if not separator:
        raise InvalidRequest(f"{text!r} is no rule: write PATTERN:CUTS, as in '*.wo.weight:replicate,shard1'")
    return pattern, _cuts(cuts, axes)


@dataclass(slots=True)
class _ReadSums:
    bytes: int = 0
    extra: int = 0
    reads: int = 0
    files: set[int] = field(default_factory=set)


def plan_load(manifest: Manifest, url: str, mesh: NewMesh, keys: str = "*") -> PlannedLoad:
    """What a load of the tensors whose keys match would read on this mesh. Raises InvalidRequest if none does."""
    patterns = keys, *(pattern for pattern, _ in mesh.rules)
    refuse_unmatched(patterns, (tensor.key for tensor in manifest.tensors), url, "tensor")
    world = math.prod(mesh.shape)
    ranks = [_ReadSums() for _ in range(world)]
    tensors = [tensor for tensor in manifest.tensors if fnmatch.fnmatchcase(tensor.key, keys)]
    alike: dict[tuple[object, ...], list[tuple[int, _ReadSums]]] = {}
    for tensor in tensors:
        cuts = mesh.cuts_of(tensor.key, tensor.shape)
        looks = (tensor.dtype, tensor.shape, tensor.layout, tensor.parts, tensor.turn, cuts)
        if looks not in alike:  # once, for a thousand layers that look the same
            alike[looks] = [(rank, _reads(manifest, tensor, _grid(mesh.shape, cuts), rank)) for rank in range(world)]
        for rank, found in alike[looks]:
            ranks[rank].bytes += found.bytes
            ranks[rank].extra += found.extra
            ranks[rank].reads += found.reads
            ranks[rank].files |= found.files
    read, extra = sum(one.bytes for one in ranks), sum(one.extra for one in ranks)
    rows = tuple(RankReads(rank, one.bytes, one.reads, len(one.files)) for rank, one in enumerate(ranks))
    return PlannedLoad(
        url=url,
        saved_ranks=manifest.world,
        axes=mesh.axes,
        mesh=mesh.shape,
        cuts=tuple(-1 if cut is None else cut for cut in mesh.cuts),
        tensors=len(tensors),
        tensor_bytes=sum(tensor.size_bytes for tensor in tensors if not tensor.same_as),
        read_bytes=read,
        extra_bytes=extra,
        swaps=manifest.format == FORMAT and swap_pays(read, extra),
        ranks=rows,
    )


def _grid(shape: Shape, cuts: Cuts) -> Grid:
    mesh = Mesh.of(shape, range(math.prod(shape)))
    return Grid(mesh, tuple(None if cut is None else Cut(cut) for cut in cuts))


def _boxes(tensor: Tensor, grid: Grid, rank: int) -> Iterator[Box]:
    return (piece.box for piece in grid.pieces(tensor.shape, rank))


def _reads(manifest: Manifest, tensor: Tensor, grid: Grid, rank: int) -> _ReadSums:
    found, item_bytes = _ReadSums(), DTYPES[tensor.dtype].size_bytes
    for box in _boxes(tensor, grid, rank):
        for item in read_plan(manifest, tensor, box):
            found.bytes += (item.source if tensor.transforms else item.box).elements * item_bytes
            found.extra += 0 if tensor.transforms else extra_bytes(item, item_bytes)
            found.reads += 1
            found.files.add(item.rank)
    return found


def files_of(
    manifest: Manifest, file_name: Callable[[int, str], str], mesh: NewMesh, rank: int, keys: str = "*"
) -> tuple[FileReads, ...]:
    """What one rank would read from each file, the most first. Raises InvalidRequest for a rank that is not there.

    `file_name`: which file holds an entry of a rank that saved.
    """
    if not 0 <= rank < math.prod(mesh.shape):
        raise InvalidRequest(f"there is no rank {rank} on a mesh of {math.prod(mesh.shape)}")
    sums: dict[str, _ReadSums] = {}
    for tensor in manifest.tensors:
        if not fnmatch.fnmatchcase(tensor.key, keys):
            continue
        grid, item_bytes = _grid(mesh.shape, mesh.cuts_of(tensor.key, tensor.shape)), DTYPES[tensor.dtype].size_bytes
        for box in _boxes(tensor, grid, rank):
            for item in read_plan(manifest, tensor, box):
                one = sums.setdefault(file_name(item.rank, item.name), _ReadSums())
                one.bytes += (item.source if tensor.transforms else item.box).elements * item_bytes
                one.reads += 1
    ordered = sorted(sums.items(), key=lambda pair: (-pair[1].bytes, pair[0]))
    return tuple(FileReads(name, one.bytes, one.reads) for name, one in ordered)
