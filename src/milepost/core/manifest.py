"""The manifest: the one file that makes a checkpoint exist. JSON, typed, with a checksum over itself. Pure.

One line for each tensor, node, value and shard file, so people can read it and `diff` works on it. Its size is
O(tensors + ranks): layouts say how tensors are cut, and nothing lists the boxes.
"""

import math
import re
from typing import Any, Literal, get_args

import msgspec
import xxhash

from milepost.core.box import Shape, check_shape
from milepost.core.dtypes import COMPLEX, DTYPES, size_bytes
from milepost.core.history import PhaseTime, check_timings
from milepost.core.layout import Boxes, Grid, Layout, Whole
from milepost.core.limits import BLOCK_BYTES, MAX_ENTRIES, MAX_HEADER_BYTES, MAX_MANIFEST_BYTES, MAX_RANKS
from milepost.core.ranks import unpack_ranks
from milepost.core.save_id import intended_generation
from milepost.core.seal import SEAL_BYTES, is_sealed
from milepost.core.shardfile import FileParts, check_block_bytes, data_bytes_of, is_name
from milepost.core.statistics import Health, TensorStatistics, check_statistics
from milepost.core.tree import Node, check_kinds, check_leaves, check_names, grow
from milepost.core.wire import Wire

FORMAT = "milepost"
VERSION = 1
TensorKind = Literal["tensor", "numpy", "bytes", "bytearray"]
"""What stands in the state: a tensor, a numpy array, or long bytes."""

# Not \d, which means the digits of every script.
_NAME = re.compile(r"manifest-([0-9]{8})\.json")
_NOT_IN_NUMPY = ("bfloat16", "complex32", "float8", "float4")
_MESSAGE_LETTERS = 1000
_OPTIONAL = ("replaced", "timings", "statistics", "health", "older")
"""The fields that are left out where they are empty."""


class Tensor(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True, gc=False):
    """One tensor: `layout` is an index into the manifest's layouts.

    Each box is split into `parts` and part j is written by the (turn + j)-th of the ranks that hold the box.
    `transforms` are the stream transforms that were applied to the bytes of each box, in order. `same_as`: the key of a
    tensor that is the same one, and that the bytes are stored under (tied weights); the rest of both is equal.
    """

    key: str
    dtype: str
    shape: Shape
    layout: int
    parts: int = 1
    turn: int = 0
    kind: TensorKind = "tensor"
    transforms: tuple[str, ...] = ()
    same_as: str = ""

    @property
    def stored_key(self) -> str:
        """The key that its bytes are stored under."""
        return self.same_as or self.key

    @property
    def is_bytes(self) -> bool:
        """Whether bytes stand in the state here, and not a tensor or an array."""
        return self.kind in ("bytes", "bytearray")

    @property
    def size_bytes(self) -> int:
        """How many bytes all its elements take."""
        return size_bytes(self.dtype, self.shape)

    @property
    def numbers(self) -> int:
        """How many numbers all its elements have: two for each complex one."""
        return math.prod(self.shape) * (2 if self.dtype in COMPLEX else 1)

    @property
    def has_statistics(self) -> bool:
        """Whether it has numbers of its own: not bytes, not the same as another, and not two numbers in a byte."""
        other = self.same_as or self.transforms or self.dtype == "float4_e2m1fn_x2"
        return not other and self.kind in ("tensor", "numpy")


class Value(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One value that is not a tensor, as the closed codec spells it."""

    key: str
    value: Any


class PerRankValue(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A key under which each of these ranks keeps a value of its own, in its own shard file."""

    key: str
    ranks: str


class ShardFile(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The file that one rank wrote: its size, the size of its header, and a checksum over header and table.

    `part_bytes`: how much data each object of a file in parts holds (`core.shardfile.FileParts`); 0: it is one object.
    `digests`: of how many entries its table ends with a digest, those in other files included (`core.reuse`).
    `spans`: whether its table also has a checksum for each span of blocks.
    """

    rank: int
    size_bytes: int
    header_bytes: int
    checksum: str
    part_bytes: int = 0
    digests: int = 0
    spans: bool = False


class OlderFile(ShardFile, frozen=True, forbid_unknown_fields=True, omit_defaults=True, kw_only=True):
    """A file that an earlier save wrote, and that holds what did not change since, for one rank of this save.

    `rank`: whose entries it holds here. `save_id`, `writer`: who wrote it, `age` saves ago. `used_bytes`: how many of
    its bytes are used here. `folder`: the checkpoint beside this one in whose folder it lies; empty: in this one's.
    """

    save_id: str
    writer: int
    age: int
    used_bytes: int
    folder: str = ""


class ReplacedIndex(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The index of another library's checkpoint that was at the same place when this one was committed."""

    name: str
    size_bytes: int
    checksum: str


class Manifest(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The whole content of a checkpoint, except the bytes of its tensors."""

    format: str
    version: int
    generation: int
    save_id: str
    created: str
    writer: str
    world: int
    block_bytes: int
    metadata: Any
    layouts: tuple[Layout, ...]
    tensors: tuple[Tensor, ...]
    tree: tuple[Node, ...]
    values: tuple[Value, ...]
    per_rank: tuple[PerRankValue, ...]
    files: tuple[ShardFile, ...]
    replaced: tuple[ReplacedIndex, ...] = ()
    timings: tuple[PhaseTime, ...] = ()
    statistics: tuple[TensorStatistics, ...] = ()
    health: Health | None = None
    older: tuple[OlderFile, ...] = ()

    @property
    def stored(self) -> tuple[ShardFile, ...]:
        """All files that hold its data: those of this save, and those of earlier ones."""
        return (*self.files, *self.older)

    @property
    def data_bytes(self) -> int:
        """How many bytes of data it has, in files of this save and of earlier ones."""
        return self.new_bytes + sum(file.used_bytes for file in self.older)

    @property
    def new_bytes(self) -> int:
        """How many bytes of data its own save wrote."""
        return sum(self.parts_of(file).data_bytes for file in self.files)

    def file_name(self, rank: int) -> str:
        """The name of the shard file that `rank` wrote."""
        return shard_name(self.save_id, rank)

    def name_of(self, file: ShardFile) -> str:
        """The name of a file, in the folder of this checkpoint; or in that of another, if it says so."""
        if not isinstance(file, OlderFile):
            return shard_name(self.save_id, file.rank)
        if file.folder:
            return shard_name(file.save_id, file.writer)
        return older_name(self.save_id, file.rank, file.save_id, file.writer)

    def shown_name(self, file: ShardFile) -> str:
        """The name of a file, for people: one in the folder of another checkpoint is `../step-1/data/...`."""
        folder = file.folder if isinstance(file, OlderFile) else ""
        return f"../{folder}/{self.name_of(file)}" if folder else self.name_of(file)

    def parts_of(self, file: ShardFile) -> FileParts:
        """The objects that hold a shard file: usually one."""
        data_bytes = _data_bytes(file, self.block_bytes)
        return FileParts(self.name_of(file), file.header_bytes, data_bytes, file.size_bytes, file.part_bytes)

    def layout_of(self, tensor: Tensor) -> Layout:
        """How this tensor is cut."""
        return self.layouts[tensor.layout]


def manifest_name(generation: int) -> str:
    """The name of a generation's manifest."""
    return f"manifest-{generation:08d}.json"


def generation_of(name: str) -> int | None:
    """The generation that a manifest's name stands for, or None for any other name."""
    match = _NAME.fullmatch(name)
    return int(match[1]) if match else None


def shard_name(save_id: str, rank: int) -> str:
    """The name of a rank's shard file."""
    return f"data/{save_id}/{rank:05d}.safetensors"


def older_name(save_id: str, rank: int, older_id: str, writer: int) -> str:
    """The name under which a save keeps a file of an earlier one: beside that of the rank whose entries it holds."""
    return f"data/{save_id}/{rank:05d}-{older_id}-{writer:05d}.safetensors"


def seal(manifest: Manifest) -> bytes:
    """The bytes of a manifest file. Raises ValueError for one that no reader would accept."""
    lines = []
    for name in Manifest.__struct_fields__:
        field = getattr(manifest, name)
        if name in _OPTIONAL and not field:
            continue
        if isinstance(field, tuple):
            # A row on a line: JSON has no raw newline inside a row.
            # As a list: msgspec (0.22) does not free the iterator that it makes for anything else.
            text = _ENCODER.encode_lines(list(field))
            if name == "tree":
                text = text.replace(b",null]\n", b"]\n")  # few nodes have versions; the key before them is text
            rows = text.rstrip(b"\n").replace(b"\n", b",\n  ").decode()
            lines.append(f'"{name}": [\n  {rows}\n]' if rows else f'"{name}": []')
        else:
            lines.append(f'"{name}": {_ENCODER.encode(field).decode()}')
    body = ("{\n" + ",\n".join(lines)).encode()
    checksum = xxhash.xxh3_64(body).hexdigest()
    sealed = body + f',\n"checksum": "{checksum}"\n}}\n'.encode()
    unseal(sealed)  # a manifest that no reader would accept must not be committed
    return sealed


def unseal(data: bytes) -> Manifest:
    """Check and parse the bytes of a manifest file. Raises ValueError for damage, LookupError for a newer version."""
    if len(data) > MAX_MANIFEST_BYTES:
        raise ValueError(f"a manifest of {len(data)} bytes is over the limit of {MAX_MANIFEST_BYTES}")
    body = memoryview(data)[:-SEAL_BYTES]
    if not is_sealed(data):
        raise ValueError("its checksum does not fit its content")
    text = b"".join((body, b"}"))
    try:
        manifest = _decode(text)
        check(manifest)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        # It may quote a number or a name of any length.
        raise ValueError(str(error)[:_MESSAGE_LETTERS]) from None
    return manifest


def unseal_brief(data: bytes) -> Manifest:
    """Like `unseal`, but quick: without tensors, tree and values, which are neither parsed nor checked.

    For those who look at a thousand manifests and want to know who wrote them, when and how much.
    """
    if not is_sealed(data):
        raise ValueError("its checksum does not fit its content")
    text = b"".join((memoryview(data)[:-SEAL_BYTES], b"}"))
    try:
        _check_version(_HEAD.unpack(text))
        brief = _BRIEF.unpack(text)
        told = {name: getattr(brief, name) for name in brief.__struct_fields__}
        manifest = Manifest(**told, layouts=(), tensors=(), tree=(), values=(), per_rank=())
        if intended_generation(manifest.save_id) != manifest.generation or not 1 <= manifest.world <= MAX_RANKS:
            raise ValueError("its save id does not belong to its generation, or it names impossible ranks")
        check_block_bytes(manifest.block_bytes)
        _check_files(manifest, 0)
        check_timings(manifest.timings, manifest.world)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError as error:
        raise ValueError(str(error)[:_MESSAGE_LETTERS]) from None
    return manifest


def _decode(text: bytes) -> Manifest:
    try:
        manifest = _MANIFEST.unpack(text)
    except ValueError:
        _check_version(_HEAD.unpack(text))  # one of another version may have other fields
        raise
    _check_version(manifest)
    return manifest


def _check_version(head: "Manifest | _Head") -> None:
    if head.format != FORMAT:
        raise ValueError("it is not a manifest of Milepost")
    if head.version != VERSION:
        raise LookupError(f"it has format version {head.version} and this reader knows version {VERSION}")


class _Head(msgspec.Struct):
    format: str
    version: int


class _Brief(msgspec.Struct):
    """The fields of a manifest that say who wrote it, when and how much."""

    format: str
    version: int
    generation: int
    save_id: str
    created: str
    writer: str
    world: int
    block_bytes: int
    metadata: Any
    files: tuple[ShardFile, ...]
    replaced: tuple[ReplacedIndex, ...] = ()
    timings: tuple[PhaseTime, ...] = ()
    health: Health | None = None
    older: tuple[OlderFile, ...] = ()


_MANIFEST = Wire.json(Manifest)
_BRIEF = Wire.json(_Brief)
_HEAD = Wire.json(_Head)
_ENCODER = msgspec.json.Encoder()


def check(manifest: Manifest) -> None:
    """Refuse a manifest that contradicts itself or exceeds the limits. Raises ValueError."""
    if intended_generation(manifest.save_id) != manifest.generation:
        raise ValueError("its save id does not belong to its generation")
    if not 1 <= manifest.world <= MAX_RANKS:
        raise ValueError(f"it names {manifest.world} ranks")
    check_block_bytes(manifest.block_bytes)
    _check_tree(manifest)
    for layout in manifest.layouts:
        _check_ranks(layout, manifest.world)
    held_bytes = _check_tensors(manifest)
    for per_rank in manifest.per_rank:
        _check_holders(unpack_ranks(per_rank.ranks), manifest.world)
    _check_files(manifest, held_bytes)
    check_timings(manifest.timings, manifest.world)
    if manifest.statistics:
        check_statistics(manifest.statistics, {tensor.key: tensor for tensor in manifest.tensors})


def _check_tensors(manifest: Manifest) -> int:
    """Refuse impossible tensors. Gives the bytes that they take, without tensors that were transformed."""
    alike: dict[tuple[object, ...], int] = {}
    held_bytes = 0
    for tensor in manifest.tensors:
        looks = (tensor.dtype, tensor.shape, tensor.layout, tensor.parts, tensor.turn, tensor.kind)
        size = alike.get(looks)
        if size is None:  # once, however many tensors share a long layout
            _check_tensor(tensor, manifest.layouts)
            manifest.layout_of(tensor).check(tensor.shape)
            size = alike[looks] = tensor.size_bytes
        if not tensor.transforms and not tensor.same_as:
            held_bytes += size
    _check_tied(manifest.tensors)
    return held_bytes


def _check_tied(tensors: tuple[Tensor, ...]) -> None:
    """Refuse a tensor that is said to be the same as one that does not exist, or that differs from it."""
    tied = [tensor for tensor in tensors if tensor.same_as]
    known = {tensor.key: tensor for tensor in tensors} if tied else {}
    for tensor in tied:
        other = known.get(tensor.same_as)
        if other is None or msgspec.structs.replace(tensor, key=other.key, same_as="") != other:
            raise ValueError(f"tensor {tensor.key[:80]!r} is not the same as {tensor.same_as[:80]!r}")


def _check_ranks(layout: Layout, world: int) -> None:
    match layout:
        case Whole(ranks=ranks):
            holders = unpack_ranks(ranks)
        case Grid(mesh=mesh):
            holders = unpack_ranks(mesh.ranks)
        case Boxes(held=held):
            holders = tuple(rank for h in held for rank in h.holders)
    _check_holders(holders, world)


def _check_holders(ranks: tuple[int, ...], world: int) -> None:
    if max(ranks, default=0) >= world:
        raise ValueError(f"it names rank {max(ranks)} of {world}")


def _check_tensor(tensor: Tensor, layouts: tuple[Layout, ...]) -> None:
    if tensor.dtype not in DTYPES:
        raise ValueError(f"tensor {tensor.key[:80]!r} has the unknown dtype {tensor.dtype[:40]!r}")
    if not 0 <= tensor.layout < len(layouts):
        raise ValueError(f"tensor {tensor.key[:80]!r} names layout {tensor.layout} of {len(layouts)}")
    if not 1 <= tensor.parts <= MAX_RANKS or tensor.turn < 0:
        raise ValueError(f"tensor {tensor.key[:80]!r} has {tensor.parts} parts and turn {tensor.turn}")
    check_shape(tensor.shape)
    check_kind(tensor)
    if tensor.parts > 1 and tensor.parts > _copies(layouts[tensor.layout]):
        raise ValueError(f"tensor {tensor.key[:80]!r} has more parts than ranks that hold a box of it")


def _copies(layout: Layout) -> int:
    """How many ranks hold one box, at most."""
    match layout:
        case Whole(ranks=ranks):
            return len(unpack_ranks(ranks))
        case Grid(mesh=mesh, cuts=cuts):
            return math.prod(size for size, cut in zip(mesh.shape, cuts, strict=True) if cut is None)
        case Boxes(held=held):
            return max((len(h.holders) for h in held), default=1)


def check_kind(tensor: Tensor) -> None:
    """Refuse a tensor with an impossible kind: bytes that are not uint8, or an array of a dtype that numpy lacks."""
    if tensor.is_bytes:
        fits = tensor.dtype == "uint8" and len(tensor.shape) == 1
    else:
        fits = tensor.kind == "tensor" or not tensor.dtype.startswith(_NOT_IN_NUMPY)
    if not fits:
        raise ValueError(f"tensor {tensor.key[:80]!r} cannot be {tensor.kind} of {tensor.dtype}")


def _check_files(manifest: Manifest, held_bytes: int) -> None:
    ranks = [f.rank for f in manifest.files]
    if len(set(ranks)) != len(ranks) or not all(0 <= r < manifest.world for r in ranks):
        raise ValueError("its list of files names a rank twice, or one that does not exist")
    for file in manifest.stored:
        if not 8 <= file.header_bytes <= min(file.size_bytes, MAX_HEADER_BYTES):
            raise ValueError(f"the file of rank {file.rank} cannot have a header of {file.header_bytes} bytes")
        if not 0 <= file.digests <= MAX_ENTRIES or 16 * file.digests > file.size_bytes - file.header_bytes:
            raise ValueError(f"the file of rank {file.rank} cannot have {file.digests} digests")
        if file.part_bytes and not _can_be_in_parts(file, manifest.block_bytes):
            raise ValueError(f"the file of rank {file.rank} cannot have parts of {file.part_bytes} bytes")
    _check_older(manifest)
    if held_bytes > sum(f.size_bytes - f.header_bytes for f in manifest.stored):
        raise ValueError("its tensors are larger than its files")


def _check_older(manifest: Manifest) -> None:
    """Refuse files of earlier saves that are named twice, or that cannot be where they should."""
    if len({(file.rank, file.save_id, file.writer) for file in manifest.older}) != len(manifest.older):
        raise ValueError("its list of older files names one twice")
    written = {file.rank for file in manifest.files}
    for file in manifest.older:
        if file.rank not in written or not 0 <= file.writer < MAX_RANKS or intended_generation(file.save_id) is None:
            raise ValueError(f"it names an older file of rank {file.rank} that no save can have written")
        if file.save_id == manifest.save_id or file.age < 1:
            raise ValueError(f"it calls a file of rank {file.rank} older that is not")
        if not 0 <= file.used_bytes <= file.size_bytes - file.header_bytes:
            raise ValueError(f"an older file of rank {file.rank} cannot hold {file.used_bytes} bytes")
        if file.folder and not is_name(file.folder):
            raise ValueError(f"{file.folder[:80]!r} is no folder beside a checkpoint")


def _data_bytes(file: ShardFile, block_bytes: int) -> int:
    return data_bytes_of(file.size_bytes, file.header_bytes, block_bytes, file.digests, spans=file.spans)


def _can_be_in_parts(file: ShardFile, block_bytes: int) -> bool:
    data_bytes = _data_bytes(file, block_bytes)
    return 0 < file.part_bytes < data_bytes and file.part_bytes % block_bytes == 0


def _check_tree(manifest: Manifest) -> None:
    if len(manifest.tensors) + len(manifest.values) + len(manifest.per_rank) > len(manifest.tree):
        raise ValueError("its tables list more keys than its tree has places for")
    check_kinds(manifest.tree)
    tables = {
        "tensor": [t.key for t in manifest.tensors],
        "value": [v.key for v in manifest.values],
        "per_rank": [p.key for p in manifest.per_rank],
    }
    check_leaves(manifest.tree, tables)
    check_names(grow(manifest.tree))


def new_manifest(generation: int, save_id: str, created: str, writer: str, world: int, **content: Any) -> Manifest:
    """A manifest of the current version."""
    return Manifest(FORMAT, VERSION, generation, save_id, created, writer, world, BLOCK_BYTES, **content)


assert get_args(Layout) == (Whole, Grid, Boxes), "`_check_ranks` must know every kind of layout"
