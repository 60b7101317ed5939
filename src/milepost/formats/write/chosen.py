"""What of a checkpoint is converted, under which keys, and how each format gets it."""

from collections.abc import Callable, Iterable, Mapping
from typing import Any, NamedTuple

import msgspec
import torch
from torch.distributed.checkpoint._nested_dict import flatten_state_dict

from milepost.checkpoint import Checkpoint, files_at
from milepost.core.manifest import FORMAT, Tensor, Value
from milepost.core.shardfile import NewEntry
from milepost.core.statistics import Health, TensorStatistics
from milepost.core.table import TensorRow
from milepost.core.tree import LEAVES, Node, build, grow
from milepost.data.late import LateBox
from milepost.data.read import Files
from milepost.data.transfer import Transfer
from milepost.errors import CheckpointDamaged, InvalidRequest
from milepost.formats.write.files import FolderPlan
from milepost.formats.write.huggingface import HfNames, hf_layout, notes_of, plan_of
from milepost.formats.write.milepost import SourceContents
from milepost.formats.write.source import FilesReader
from milepost.formats.write.torchfile import TensorStub, plain_value, refuse_unreadable
from milepost.state.values import Codec
from milepost.store import Store

Rename = Callable[[str], str | None] | Mapping[str, str | None]
_LISTED = 50


class ChosenTensor(NamedTuple):
    """A tensor of the result: its key, and what the source says of it."""

    key: str
    saved: Tensor


class Chosen:
    """What of a checkpoint is converted, and under which keys."""

    def __init__(
        self, checkpoint: Checkpoint, store: Store, codec: Codec, rename: Rename | None, transfer: Transfer
    ) -> None:
        self.checkpoint, self._codec = checkpoint, codec
        self._native = checkpoint.format == FORMAT
        files = Files(store, checkpoint.manifest) if self._native else files_at(store)
        self.reader = FilesReader(files, store, transfer)
        self.nodes, self.names = choose(checkpoint.manifest.tree, rename, codec)
        saved = {tensor.key: tensor for tensor in checkpoint.manifest.tensors}
        self.tensors = [
            ChosenTensor(node.key, saved[self.names[node.key]]) for node in self.nodes if node.kind == "tensor"
        ]

    def contents(self) -> SourceContents:
        """For Milepost's own format."""
        private = [node.key for node in self.nodes if node.kind == "per_rank"]
        if private:
            raise InvalidRequest(
                f"{len(private)} keys hold a value for each rank that saved them, and cannot be converted: "
                f"{', '.join(map(repr, private[:_LISTED]))}. Leave them out: rename={{key: None}}."
            )
        known = {value.key: value.value for value in self.checkpoint.manifest.values} if self._native else {}
        values = []
        for node in self.nodes:
            if node.kind == "value":
                old = self.names[node.key]
                spelled = known[old] if old in known else self._codec.encode(self.checkpoint[old], old)
                values.append(Value(node.key, spelled))
        now = {saved.key: key for key, saved in self.tensors}
        rows = [
            TensorRow(key, saved.dtype, saved.shape, saved.kind, None, now.get(saved.same_as, ""))
            for key, saved in self.tensors
        ]
        metadata = self._codec.encode(self.checkpoint.metadata, "metadata")
        found = tuple(rows), self.reader, self.names, self.nodes, tuple(values), metadata
        return SourceContents(*found, self._statistics(), self.health)

    @property
    def health(self) -> Health | None:
        """What the rule of the run said when the source was saved. Of the whole source, also where a part is chosen."""
        return self.checkpoint.manifest.health if self._native else None

    def _statistics(self) -> tuple[TensorStatistics, ...]:
        """What the source records of the tensors that are chosen, under their keys here."""
        recorded = {row.key: row for row in self.checkpoint.manifest.statistics} if self._native else {}
        chosen = ((key, recorded.get(saved.key)) for key, saved in self.tensors)
        return tuple(msgspec.structs.replace(row, key=key) for key, row in chosen if row is not None)

    def torch_state(self) -> Any:
        """For torch.save: containers and values that torch.load reads without running anything."""
        values: dict[str, Any] = {}
        state = self._built(values)
        refuse_unreadable({key: value for key, value in values.items() if not _is_plain(value)})
        return state

    def dcp_state(self) -> tuple[dict[str, Any], Mapping[str, Any]]:
        """For DCP: the state flattened by torch's own rule, and the mapping back."""
        stands: dict[int, tuple[torch.Tensor, TensorStub]] = {}

        def stand_in(stored: TensorStub) -> Any:
            blank = torch.empty(
                0, dtype=torch.uint8, device="meta"
            )  # torch goes into a list only if it sees tensors there
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
        """A value that DCP pickles as a whole. Tensors in tuples are read into memory, as torch's own save does."""
        if isinstance(value, torch.Tensor) and id(value) in stands:
            late = stands[id(value)][1].data
            assert isinstance(late, LateBox)
            return self.checkpoint.tensors[late.key].read()
        if isinstance(value, (list, tuple)):
            return type(value)(self._read_inside(item, stands) for item in value)
        if isinstance(value, dict):
            return type(value)((key, self._read_inside(item, stands)) for key, item in value.items())
        return value

    def hf_plan(self, named: HfNames, drop_values: bool) -> FolderPlan:
        """For safetensors."""
        tensors = {key: saved for key, saved in self.tensors if not saved.is_bytes}
        others = {node.key for node in self.nodes if node.kind in LEAVES} - set(tensors)
        values = {key: plain_value(self.checkpoint[self.names[key]]) for key in self.names if key in others}
        layout = hf_layout(
            [NewEntry(key, saved.dtype, saved.shape) for key, saved in tensors.items()],
            notes_of(values, self.checkpoint.metadata, drop_values),
            named,
        )
        return plan_of(layout, {key: self._late(saved).data for key, saved in tensors.items()}, named)

    def _built(self, values: dict[str, Any], stand_in: Callable[[TensorStub], Any] = lambda stored: stored) -> Any:
        """The containers, with stand-ins for tensors. `values` gets all other leaves by key."""
        tensors = {key: saved for key, saved in self.tensors if not saved.is_bytes}

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

    def _late(self, saved: Tensor) -> TensorStub:
        return TensorStub.late(self.reader, saved.key, saved.dtype, saved.shape)


def choose(tree: Iterable[Node], rename: Rename | None, codec: Codec) -> tuple[tuple[Node, ...], dict[str, str]]:
    """The tree of the result, and the key in the source of each of its keys. Raises InvalidRequest for all clashes."""
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
    wrong = {key: name for key, name in kept.items() if not isinstance(name, str) or (not name and key)}
    if wrong:
        raise InvalidRequest(f"`rename` gives a key or None, not {next(iter(wrong.values()))!r}")
    by_name: dict[str, list[str]] = {}
    for key, name in kept.items():
        by_name.setdefault(name, []).append(key)
    clashes = [f"{name!r}: {', '.join(map(repr, keys))}" for name, keys in by_name.items() if len(keys) > 1]
    if clashes:
        raise InvalidRequest("`rename` gives one key to several:\n  " + "\n  ".join(clashes[:_LISTED]))


def _simpler(node: Node) -> Node:
    """The node as a container that every program knows: a named tuple as a tuple, a default dict as a dict."""
    kind = node.kind.partition(":")[0]
    known = {"namedtuple": "tuple", "defaultdict": "dict", "composite": "dict"}.get(kind)
    return msgspec.structs.replace(node, kind=known) if known else node


def _is_plain(value: Any) -> bool:
    if isinstance(value, (list, tuple)):
        return type(value) in (list, tuple) and all(map(_is_plain, value))
    if type(value) is dict:
        return all(map(_is_plain, value)) and all(map(_is_plain, value.values()))
    return value is None or type(value) in (bool, int, float, str, bytes)
