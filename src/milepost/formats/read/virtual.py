"""A checkpoint of another library as a Milepost checkpoint: a manifest in memory, and files that read like shard files.

The reader of a format gives the state as it was saved, with a `PlacedTensor` for each tensor. It is flattened by the
same rules as a state that is saved or loaded, so that keys, values and containers match in the same way.
"""

import base64
import contextlib
import io
import pickle  # only to write what `allow_pickle` lets torch load; nothing is unpickled here
import secrets
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

from milepost.core.box import Box, Shape
from milepost.core.dtypes import size_bytes
from milepost.core.layout import Boxes, Held, Layout, Whole
from milepost.core.leaves import LeafRule
from milepost.core.limits import GIB, MAX_DEPTH, MIB, PAGE_BYTES
from milepost.core.manifest import Manifest, ShardFile, Tensor, Value
from milepost.core.shardfile import entry_name
from milepost.core.tree import Flat, Path, Rules, TooDeep, UnknownContainer, flatten
from milepost.core.versions import set_versions, versions_of
from milepost.data.read import read_bytes
from milepost.errors import CheckpointDamaged, InvalidRequest, InvalidState, UnsafeCheckpoint
from milepost.formats.read.files import ForeignFiles
from milepost.formats.read.pickle_machine import Opaque
from milepost.formats.read.spots import FileEntry, Item, Spot
from milepost.state.values import Codec
from milepost.store import LocalStore, Reader, Store

_SLACK = 100_000
_SLACK_LETTERS = 16 * MIB
_LETTERS_PER_BYTE = 16
_SHARED = 16
"""How many times the size of its file the tensors of a state may have. Tensors that share memory count separately."""


@dataclass(frozen=True, slots=True)
class FileBox:
    """A box of a tensor: the number of the file that holds it, and where in it."""

    box: Box
    file: int
    where: Spot | Item


@dataclass(frozen=True, slots=True, eq=False)
class PlacedTensor:
    """A tensor whose bytes are in files."""

    dtype: str
    shape: Shape
    pieces: tuple[FileBox, ...]


@dataclass(frozen=True, slots=True)
class ForeignState:
    """What the reader of a format found: the state, and a function for values that only pickle can make, by path.

    `files` are names and sizes; `digest` is the same on all ranks that see the same checkpoint.
    """

    format: str
    digest: bytes
    state: Any
    files: tuple[tuple[str, int], ...]
    world: int
    notes: Mapping[str, str]
    rescue: Callable[[Path], bytes]
    open: Callable[[str], Reader]


@dataclass(frozen=True, slots=True)
class Foreign:
    """A recognised checkpoint: the name of its format, a digest of its index, its manifest and its files."""

    format: str
    digest: bytes
    manifest: Manifest
    files: ForeignFiles


def virtual(store: Store, found: ForeignState) -> Foreign:
    """The checkpoint as Milepost's own. Raises CheckpointDamaged for holes in tensors, UnsafeCheckpoint over limits."""
    flat = _flat(store, found.state)
    slots: list[list[FileEntry]] = [[] for _ in found.files]
    layouts: dict[Layout, int] = {}
    tensors, values = [], []
    for key, leaf in flat.leaves.items():
        if isinstance(leaf, PlacedTensor):
            layout = _layout(store, key, leaf)
            tensors.append(Tensor(key, leaf.dtype, leaf.shape, layouts.setdefault(layout, len(layouts))))
            for piece in leaf.pieces:
                if piece.box.elements:
                    name = entry_name(key, piece.box, leaf.shape)
                    slots[piece.file].append(FileEntry(name, key, leaf.dtype, piece.box.shape, piece.where))
        else:
            values.append(Value(key, _spelled(leaf, key, found.rescue, flat.paths[key])))
    manifest = Manifest(
        *(found.format, 0, 0, "", "", found.format, found.world, PAGE_BYTES),
        metadata={"dict": [[str(name), str(text)] for name, text in found.notes.items()]},
        layouts=tuple(layouts),
        tensors=tuple(tensors),
        tree=flat.nodes,
        values=tuple(values),
        per_rank=(),
        files=tuple(ShardFile(i, size, 0, "") for i, (_, size) in enumerate(found.files)),
    )
    names = [name for name, _ in found.files]
    files = ForeignFiles(store, manifest, names, slots, found.open, keeps=found.rescue)
    return Foreign(found.format, found.digest, manifest, files)


_LEAVES = LeafRule(lambda value: "tensor" if isinstance(value, PlacedTensor) else None)


def _flat(store: Store, state: Any) -> Flat:
    codec = Codec()
    try:
        state = state if _LEAVES.kind(state) is None else {"data": state}
        return flatten(state, Rules(_LEAVES.kind, codec.encode, lambda _value, _path: None))
    except TooDeep as error:
        raise UnsafeCheckpoint(f"{store.url}: {str(error)[:1000]}") from None
    except (UnknownContainer, InvalidState) as error:
        raise CheckpointDamaged(f"{store.url}: {str(error)[:1000]}") from None


def _layout(store: Store, key: str, tensor: PlacedTensor) -> Layout:
    whole = Box.whole(tensor.shape)
    if not whole.elements:
        return Whole("0")
    if len(tensor.pieces) == 1 and tensor.pieces[0].box == whole:
        return Whole(str(tensor.pieces[0].file))
    try:
        layout = Boxes(tuple(Held(piece.box, str(piece.file)) for piece in tensor.pieces if piece.box.elements))
        layout.check(tensor.shape)
    except ValueError as error:
        raise CheckpointDamaged(f"{store.url}: the parts of {key[:200]!r} do not make it up: {error}") from None
    return layout


def _spelled(value: Any, key: str, rescue: Callable[[Path], bytes], path: Path) -> Any:
    """A value as the codec encodes it. A value that only pickle can make is encoded so that it needs the opt-in."""
    try:
        return Codec().encode(value, key)
    except InvalidState:
        return {"pickle": base64.b64encode(rescue(path)).decode()}


class Allowance:
    """How much a checkpoint may hold: about one object for each byte, and a few letters for each byte.

    A pickle can hold one list many times, so a few bytes can describe more objects than memory can hold. Bytes are
    encoded once for each occurrence, and so are the names in dicts, which become part of every key below them.
    """

    def __init__(self) -> None:
        self._objects, self._letters = _SLACK, _SLACK_LETTERS

    def grow(self, size_bytes: int) -> "Allowance":
        """Allow what `size_bytes` more bytes can hold."""
        self._objects += size_bytes
        self._letters += _LETTERS_PER_BYTE * size_bytes
        return self

    def spend(self, what: str, letters: int) -> None:
        """Count one object. Raises UnsafeCheckpoint, naming `what`, when there are too many."""
        self._objects -= 1
        self._letters -= letters
        if self._objects < 0 or self._letters < 0:
            raise UnsafeCheckpoint(f"{what} holds the same things again and again, far more than it has bytes")


class TensorReplacer:
    """Walks through an object from a pickle within limits, and replaces its tensors."""

    def __init__(self, what: str, allowance: Allowance, replace: Callable[[Any], Any]) -> None:
        self._what, self._allowance, self._replace = what, allowance, replace

    def walk(self, value: Any, depth: int = 0, name_letters: int = 0) -> Any:
        """The same object with its tensors replaced. `name_letters`: the length of its key."""
        self._allowance.spend(self._what, name_letters + _letters(value))
        if depth > MAX_DEPTH:
            raise UnsafeCheckpoint(f"{self._what} holds itself, or is nested too deeply")
        if isinstance(value, dict) and not all(map(_can_be_named, value)):
            return Opaque("a dict with keys of other types")
        if isinstance(value, dict):
            empty: dict[Any, Any] = type(value)()
            if isinstance(value, defaultdict):
                empty = defaultdict(value.default_factory)
            for name, item in value.items():
                letters = len(name) if type(name) is str else len(str(name))
                empty[name] = self.walk(item, depth + 1, name_letters + letters)
            for prefix in versions_of(value) or ():
                self._allowance.spend(self._what, len(prefix))
            set_versions(empty, versions_of(value))
            return empty
        if type(value) in (list, tuple):
            return type(value)(self.walk(item, depth + 1) for item in value)
        return self._replace(value)


def _letters(value: Any) -> int:
    """How many letters of a value are encoded or read at each occurrence."""
    if type(value) is str:
        return 0 if value.isascii() else len(value)
    if type(value) is int:
        return value.bit_length() // 8
    return len(value) if isinstance(value, (bytes, bytearray, set, frozenset, tuple)) else 0


def _can_be_named(value: Any) -> bool:
    """Whether the codec can encode a key of a dict."""
    if type(value) is tuple:
        return all(map(_can_be_named, value))
    return value is None or type(value) in (str, int, float, bool, bytes, complex)


@dataclass(frozen=True, slots=True)
class _PickledCall:
    """Pickled as a call of one of the functions below."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def rescue_from_bytes(archive: bytes, path: Path) -> bytes:
    """A pickle that gives the value at `path` in a torch.save archive, where the caller allows pickles."""
    return pickle.dumps(_PickledCall(unpickled, (archive, path)))


class StoredArchive:
    """A file of `torch.save` in a store, for pickles that read a value from it in this process, while this lives.

    They get it from this very store: its URL alone lacks the endpoint, the token or the options, and would lead to
    somebody else's file.
    """

    def __init__(self, store: Store, name: str) -> None:
        self._store, self._name = store, name
        self.key = f"{store.url}/{name}"
        if not _is_local(store):
            self.key = f"{_STORED}{secrets.token_hex(8)}/{self.key}"
            _ARCHIVES[self.key] = self

    def rescue(self, path: Path) -> bytes:
        """A pickle that gives the value at `path` in the archive, which it reads as a whole."""
        return pickle.dumps(_PickledCall(unpickled, (self.key, path)))

    def read(self) -> bytes:
        """All bytes of the file."""
        with contextlib.closing(self._store.reader(self._name)) as reader:
            return read_bytes(reader, 0, reader.size_bytes)


_STORED = "archive://"
# What the pickles of open checkpoints refer to: they cannot hold a store, which may hold secrets.
_ARCHIVES: WeakValueDictionary[str, StoredArchive] = WeakValueDictionary()


def _is_local(store: Any) -> bool:
    while store is not None and not isinstance(store, LocalStore):
        store = getattr(store, "inner", None)
    return store is not None


def unpickled(archive: bytes | str, path: Path) -> Any:
    """The value at `path` in an archive. Runs the pickle in it: only for callers who allowed that."""
    import torch  # noqa: PLC0415

    source: Any = io.BytesIO(archive) if isinstance(archive, bytes) else archive
    if isinstance(source, str) and source.startswith(_STORED):
        stored = _ARCHIVES.get(source)
        if stored is None:
            raise InvalidRequest(f"the checkpoint of {source.rpartition('/')[2]} is not open any more; open it again")
        source = io.BytesIO(stored.read())
    value = torch.load(source, map_location="cpu", weights_only=False)
    for part in path:
        value = value[part]
    return value


def check_total(what: str, tensors: Iterable[PlacedTensor], file_bytes: int) -> None:
    """Refuse tensors that are far larger than their files: many views of one storage."""
    most_bytes = _SHARED * file_bytes + GIB
    total = sum(size_bytes(t.dtype, t.shape) for t in tensors)
    if total > most_bytes:
        raise UnsafeCheckpoint(f"the tensors of {what} would take {total} bytes, far more than the file has")
