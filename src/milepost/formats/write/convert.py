"""`milepost.convert`: a checkpoint in one format becomes the same checkpoint in another, as a stream, on any number of ranks.

Every format is written from a layout that is known before the first byte is read, so memory is bounded by the blocks that
are in flight, and ranks share the work without talking about it.
"""

import json
import math
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, get_args

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from milepost.checkpoint import Checkpoint, files_at, open_checkpoint
from milepost.comm import TIMEOUT_S, Comm
from milepost.comm.distributed import ranks_of
from milepost.core.limits import BLOCK_BYTES, KIB
from milepost.core.manifest import FORMAT, Value
from milepost.core.table import TensorRow
from milepost.core.tree import LEAVES, Node, build, grow
from milepost.data.late import LateBox
from milepost.data.read import Files
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, Watcher
from milepost.errors import CheckpointDamaged, InvalidRequest
from milepost.formats.write.content import Content, FilePiece
from milepost.formats.write.dcp import dcp_plan
from milepost.formats.write.files import FolderPlan, NewFolder, write_together
from milepost.formats.write.huggingface import INDEX, HfLayout, HfTensor, hf_layout, owns
from milepost.formats.write.milepost import SourceContents, write_milepost
from milepost.formats.write.source import FilesReader
from milepost.formats.write.torchfile import TensorStub, plain_value, refuse_unreadable, torch_plan
from milepost.state.values import Codec
from milepost.store import LocalStore, Location, Store, store_at

if TYPE_CHECKING:
    import torch.distributed as dist

Format = Literal["milepost", "dcp", "torch", "safetensors"]
Rename = Callable[[str], str | None] | Mapping[str, str | None]
MAX_SHARD_BYTES = 5 * 1000**3
"""The size of a safetensors file, as Hugging Face cuts them."""
_LISTED = 50


class Converted(msgspec.Struct, frozen=True):
    """What a conversion made: where, in which format, how many tensors, and how many bytes these have."""

    url: str
    format: str
    tensors: int
    data_bytes: int


def convert(
    source: Location,
    target: Location,
    to: Format = "milepost",
    *,
    rename: Rename | None = None,
    max_shard_bytes: int = MAX_SHARD_BYTES,
    drop_values: bool = False,
    overwrite: bool = False,
    types: Iterable[type] = (),
    allow_pickle: bool = False,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
    process_group: "dist.ProcessGroup | Comm | None" = None,
    timeout_s: float = TIMEOUT_S,
) -> Converted:
    """Write what `milepost.open(source)` shows to `target`, in another format; from one process, or from every rank of a job.

    Returns once everything is whole and survives power loss. Nothing that looks whole is at `target` before. An error
    on any rank is raised on every rank. Tensors keep their dtype and their bytes; no tensor is in memory as a whole.

    `to`: "milepost"; "dcp", a directory for `torch.distributed.checkpoint.load`; "torch", a file for `torch.load`;
    "safetensors", a folder as Hugging Face has them. All but the first are written to a path of a file system.
    `rename`: a function or dict from key to new key, or to None to leave it out. Where it renames anything, the result
    is one flat dict; else containers stay.
    `max_shard_bytes`: the size of a safetensors file. `drop_values`: leave out values that safetensors cannot hold.
    `overwrite=False`: refuse to replace what is at `target`.
    `types`, `allow_pickle`: as for `open`. `host_memory_bytes`, `transfer`, `progress`, `process_group`, `timeout_s`: as
    for `save`. Raises InvalidRequest, CheckpointNotFound, CheckpointDamaged, StorageError.
    """
    if to not in get_args(Format):
        raise InvalidRequest(f"`to` is one of {', '.join(get_args(Format))}, not {to!r}")
    if max_shard_bytes < 1:
        raise InvalidRequest(f"max_shard_bytes is positive, not {max_shard_bytes}")
    limited, comm = within(transfer, host_memory_bytes), ranks_of(process_group, timeout_s)
    store = store_at(target)
    meter = Meter("save", store.url, progress if comm.rank == comm.coordinator else None)
    opened = _Origin(source, tuple(types), allow_pickle, rename, limited)
    try:
        if to == "milepost":
            write_milepost(store, opened.contents, comm, limited, meter, overwrite=overwrite)
        else:
            root, plan = _foreign(opened, to, local_folder(store, to), comm.size, max_shard_bytes, drop_values)
            write_together(NewFolder(root, comm, limited, overwrite), plan, meter)
    finally:
        opened.close()
    tensors = opened.chosen.tensors
    return Converted(store.url, to, len(tensors), sum(t.size_bytes for t in tensors))


def within(transfer: Transfer | None, host_memory_bytes: int) -> Transfer:
    """How bytes move: half of the memory for what is read, and half for what is written."""
    if host_memory_bytes < 2 * BLOCK_BYTES:
        raise InvalidRequest(
            f"host_memory_bytes is {host_memory_bytes}, and nothing is converted with less than "
            f"{2 * BLOCK_BYTES // KIB} KiB"
        )
    return (transfer or Transfer()).within(host_memory_bytes // 2)


def local_folder(store: Store, to: str) -> Path:
    """The path behind a store. Raises InvalidRequest where it is no file system."""
    if not isinstance(store, LocalStore):
        raise InvalidRequest(
            f"{to} is written to a path, not to {store.url}: its files are written in place by all ranks"
        )
    return store.root


def _foreign(
    source: "_Origin", to: str, target: Path, world: int, max_shard_bytes: int, drop_values: bool
) -> tuple[Path, Callable[[], FolderPlan]]:
    """The folder that files are made in, and what gives the plan for them."""
    if to == "torch":
        if target.is_dir():
            raise InvalidRequest(f"{target} is a folder; torch.save makes one file")
        return target.parent, lambda: torch_plan(target.name, source.chosen.torch_state())
    if target.is_file():
        raise InvalidRequest(f"{target} is a file; {to} makes a folder")
    if to == "dcp":
        return target, lambda: dcp_plan(*source.chosen.dcp_state(), world, str(target))
    return target, lambda: source.chosen.hf_plan(max_shard_bytes, drop_values)


class _Origin:
    """The source, opened when it is first used: in a meeting, where an error of one rank reaches all."""

    def __init__(
        self, where: Location, types: tuple[type, ...], allow_pickle: bool, rename: Rename | None, transfer: Transfer
    ) -> None:
        self._where, self._types, self._allow_pickle = where, types, allow_pickle
        self._rename, self._transfer = rename, transfer
        self._chosen: _Chosen | None = None

    @property
    def chosen(self) -> "_Chosen":
        """What of it is converted."""
        if self._chosen is None:
            checkpoint = open_checkpoint(self._where, types=self._types, allow_pickle=self._allow_pickle)
            codec = Codec(self._types, self._allow_pickle)
            self._chosen = _Chosen(checkpoint, store_at(self._where), codec, self._rename, self._transfer)
        return self._chosen

    def contents(self) -> SourceContents:
        """For Milepost's own format."""
        return self.chosen.contents()

    def close(self) -> None:
        """Close its files."""
        if self._chosen is not None:
            self._chosen.reader.close()
            self._chosen.checkpoint.close()


class _Leaf(NamedTuple):
    """A tensor of the result, and its key in the source."""

    key: str
    old: str
    dtype: str
    shape: tuple[int, ...]
    size_bytes: int
    kind: str


class _Chosen:
    """What of a checkpoint is converted, and under which keys."""

    def __init__(
        self, checkpoint: Checkpoint, store: Store, codec: Codec, rename: Rename | None, transfer: Transfer
    ) -> None:
        self.checkpoint, self._codec = checkpoint, codec
        lazy = checkpoint.tensors
        self._native = checkpoint.format == FORMAT
        files = Files(store, checkpoint.manifest) if self._native else files_at(store)
        self.reader = FilesReader(files, transfer)
        self.nodes, self.names = choose(checkpoint.manifest.tree, rename, codec)
        kinds = {tensor.key: tensor.kind for tensor in checkpoint.manifest.tensors}
        self.tensors = [
            _Leaf(node.key, old, lazy[old].dtype_name, lazy[old].shape, lazy[old].size_bytes, kinds.get(old, "tensor"))
            for node in self.nodes
            if node.kind == "tensor"
            for old in [self.names[node.key]]
        ]

    def contents(self) -> SourceContents:
        """For Milepost's own format."""
        private = [node.key for node in self.nodes if node.kind == "per_rank"]
        if private:
            raise InvalidRequest(
                f"{len(private)} keys hold a value for each rank that saved them, and cannot be converted: "
                f"{', '.join(map(repr, private[:_LISTED]))}. Leave them out: rename={{key: None}}."
            )
        saved = {value.key: value.value for value in self.checkpoint.manifest.values} if self._native else {}
        values = []
        for node in self.nodes:
            if node.kind == "value":
                old = self.names[node.key]
                spelled = saved[old] if old in saved else self._codec.encode(self.checkpoint[old], old)
                values.append(Value(node.key, spelled))
        rows = [TensorRow(t.key, t.dtype, t.shape, t.kind, None) for t in self.tensors]  # type: ignore[arg-type]
        metadata = self._codec.encode(self.checkpoint.metadata, "metadata")
        return SourceContents(tuple(rows), self.reader, self.names, self.nodes, tuple(values), metadata)

    def torch_state(self) -> Any:
        """For torch.save: containers and values that torch.load reads without running anything."""
        values: dict[str, Any] = {}
        state = self._built(values)
        refuse_unreadable({key: value for key, value in values.items() if not _is_plain(value)})
        return state

    def dcp_state(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """For DCP: the state flattened by torch's own rule, and the way back."""
        stands: dict[int, tuple[torch.Tensor, TensorStub]] = {}

        def stand_in(stored: TensorStub) -> Any:
            blank = torch.empty(0, device="meta")  # torch goes into a list only if it sees tensors there
            stands[id(blank)] = blank, stored
            return blank

        state = self._built({}, stand_in)
        if not isinstance(state, dict):
            raise InvalidRequest(
                f"a DCP checkpoint is a dict, and this is a {type(state).__name__}; use another format"
            )
        try:
            flat, mapping = flatten_state_dict(state)
        except ValueError as error:
            raise InvalidRequest(f"DCP has one name for two keys: {error}") from None

        def resolve(value: Any) -> Any:
            return stands[id(value)][1] if id(value) in stands else self._read_inside(value, stands)

        return {key: resolve(value) for key, value in flat.items()}, mapping

    def _read_inside(self, value: Any, stands: "dict[int, tuple[torch.Tensor, TensorStub]]") -> Any:
        """A value that DCP pickles as a whole: tensors in tuples are read into memory, as torch's own save has them."""
        if isinstance(value, torch.Tensor) and id(value) in stands:
            late = stands[id(value)][1].data
            assert isinstance(late, LateBox)
            return self.checkpoint.tensors[late.key].read()
        if isinstance(value, (list, tuple)):
            return type(value)(self._read_inside(item, stands) for item in value)
        if isinstance(value, dict):
            return type(value)((key, self._read_inside(item, stands)) for key, item in value.items())
        return value

    def hf_plan(self, max_shard_bytes: int, drop_values: bool) -> FolderPlan:
        """For safetensors."""
        tensors = [t for t in self.tensors if t.kind in ("tensor", "numpy")]
        others = {node.key for node in self.nodes if node.kind in LEAVES} - {t.key for t in tensors}
        values = {key: plain_value(self.checkpoint[self.names[key]]) for key in self.names if key in others}
        layout = hf_layout(
            [HfTensor(t.key, t.dtype, t.shape) for t in tensors],
            notes_of(values, self.checkpoint.metadata, drop_values),
            max_shard_bytes,
        )
        late = {t.key: self._late(t).data for t in tensors}
        return plan_of(layout, {t.key: FilePiece(0, t.size_bytes, late[t.key]) for t in tensors})

    def _built(self, values: dict[str, Any], stand_in: Callable[[TensorStub], Any] = lambda stored: stored) -> Any:
        """The containers, with stand-ins for tensors. `values` gets all other leaves by key."""
        tensors = {t.key: t for t in self.tensors if t.kind in ("tensor", "numpy")}

        def leaf(node: Node, path: Any) -> Any:
            del path
            if node.key in tensors:
                return stand_in(self._late(tensors[node.key]))
            values[node.key] = plain_value(self.checkpoint[self.names[node.key]])
            return values[node.key]

        nodes = [_simpler(node) for node in self.nodes]
        try:
            return build(grow(nodes), lambda name: self._codec.decode(name, "a key"), leaf)
        except ValueError as error:
            raise CheckpointDamaged(f"{self.checkpoint.url}: {error}") from error

    def _late(self, tensor: _Leaf) -> TensorStub:
        return TensorStub.late(self.reader, tensor.old, tensor.dtype, tensor.shape)


def choose(tree: Iterable[Node], rename: Rename | None, codec: Codec) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The tree of the result, and for each of its keys that of the source. Raises InvalidRequest, listing all clashes."""
    nodes = tuple(tree)
    old = [node.key for node in nodes if node.kind in LEAVES]
    if isinstance(rename, Mapping):
        unknown = sorted(set(rename) - set(old))
        if unknown:
            raise InvalidRequest(f"`rename` names {len(unknown)} keys that are not there: {unknown[:_LISTED]}")
        given = rename
        new = {key: given.get(key, key) for key in old}
    else:
        new = {key: key if rename is None else rename(key) for key in old}
    kept = {key: name for key, name in new.items() if name is not None}
    _refuse_clashes(kept)
    names = {name: key for key, name in kept.items()}
    if all(name == key for key, name in kept.items()):
        return tuple(n for n in nodes if n.kind not in LEAVES or n.key in kept), names
    flat = [Node(1, codec.encode(kept[n.key], n.key), n.kind, kept[n.key]) for n in nodes if n.key in kept]
    return (Node(0, None, "dict"), *flat), names


def _refuse_clashes(kept: Mapping[str, Any]) -> None:
    wrong = {key: name for key, name in kept.items() if not isinstance(name, str) or not name}
    if wrong:
        raise InvalidRequest(f"`rename` gives a key or None, not {next(iter(wrong.values()))!r}")
    by_name: dict[str, list[str]] = {}
    for key, name in kept.items():
        by_name.setdefault(name, []).append(key)
    clashes = [f"{name!r}: {', '.join(map(repr, keys))}" for name, keys in by_name.items() if len(keys) > 1]
    if clashes:
        raise InvalidRequest("`rename` gives one key to several:\n  " + "\n  ".join(clashes[:_LISTED]))


def _simpler(node: Node) -> Node:
    """A container that every program knows: named tuples are tuples, default dicts are dicts."""
    kind = node.kind.partition(":")[0]
    known = {"namedtuple": "tuple", "defaultdict": "dict"}.get(kind)
    return Node(node.depth, node.name, known, node.key) if known else node


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str, bytes)


def notes_of(values: Mapping[str, Any], metadata: Mapping[str, Any], drop_values: bool) -> dict[str, str]:
    """Values as strings for the header: text as it is, the rest as JSON. Raises InvalidRequest for what JSON cannot hold."""
    notes, problems = {}, []
    for key, value in {**{k: plain_value(v) for k, v in metadata.items()}, **values}.items():
        if key == "format":  # what the format itself says there
            continue
        if _fits_json(value):
            notes[key] = value if isinstance(value, str) else json.dumps(value)
        elif not drop_values:
            problems.append(f"{key!r} ({type(value).__name__})")
    if problems:
        raise InvalidRequest(
            f"safetensors holds tensors and text, and {len(problems)} values are neither:\n  "
            + "\n  ".join(problems[:_LISTED])
            + "\nPass drop_values=True, or leave them out: rename={key: None}."
        )
    return notes


def _fits_json(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return all(map(_fits_json, value))
    if isinstance(value, dict):
        return all(type(key) is str for key in value) and all(map(_fits_json, value.values()))
    if type(value) is str:
        return value.isascii() or value == value.encode("utf-8", "replace").decode()
    return value is None or type(value) in (bool, int) or (type(value) is float and math.isfinite(value))


def plan_of(layout: HfLayout, data: Mapping[str, FilePiece]) -> FolderPlan:
    """The plan for safetensors files: their headers, and what `data` gives for each key."""
    files = []
    for file in layout.files:
        pieces = [FilePiece(0, len(file.head), file.head)]
        pieces += [data[key]._replace(start=start) for key, start in file.starts.items() if key in data]
        files.append(Content(file.name, file.size_bytes, pieces))
    last = [] if layout.index_json is None else [(INDEX, layout.index_json)]
    return FolderPlan(files, last, owns, [INDEX])
