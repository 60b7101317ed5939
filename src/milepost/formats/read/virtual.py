"""A checkpoint of another library as one of ours: a manifest that was never written, and files that read like our own.

A reader of a format gives the state as it was saved, with a `PlacedTensor` where a tensor stands. That is flattened by the
same rules as a state that is saved or loaded, so that keys, values and containers match in the same way.
"""

import base64
import io
import pickle  # only to spell what `allow_pickle` will ask torch to load; nothing is unpickled here
from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from milepost.core.box import Box, Shape
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Boxes, Held, Layout, Whole
from milepost.core.limits import GIB, MAX_DEPTH, MIB, PAGE_BYTES
from milepost.core.manifest import Manifest, ShardFile, Tensor, Value
from milepost.core.shardfile import entry_name
from milepost.core.tree import Flat, Leaf, Path, Rules, TooDeep, UnknownContainer, flatten
from milepost.errors import CheckpointDamaged, InvalidState, UnsafeCheckpoint
from milepost.formats.read.files import FileEntry, ForeignFiles, Item, Spot
from milepost.formats.read.pickles import Opaque
from milepost.state.values import Codec
from milepost.store import Reader, Store

_SLACK = 100_000
_SLACK_LETTERS = 16 * MIB
_LETTERS_PER_BYTE = 16
_SHARED = 16
"""How many times as large as its file the tensors of a state may be: those that share memory count each."""


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
    """What a reader of a format found: the state, and how to get what only pickle can make, by path.

    `files` are the names and sizes; `digest` is the same on all ranks that see the same checkpoint.
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
    """The checkpoint as one of ours. Raises CheckpointDamaged where tensors have holes, UnsafeCheckpoint beyond limits."""
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
    return Foreign(found.format, found.digest, manifest, ForeignFiles(store, manifest, names, slots, found.open))


def _flat(store: Store, state: Any) -> Flat:
    codec = Codec()
    state = state if isinstance(state, dict) or (leaf_kind(state) is None) else {"data": state}
    try:
        return flatten(state, Rules(leaf_kind, codec.encode, lambda _value, _path: None))
    except TooDeep as error:
        raise UnsafeCheckpoint(f"{store.url}: {str(error)[:1000]}") from None
    except (UnknownContainer, InvalidState) as error:
        raise CheckpointDamaged(f"{store.url}: {str(error)[:1000]}") from None


def leaf_kind(value: Any) -> Leaf | None:
    """What kind of leaf this is, or None for a container, as for a state of ours."""
    if isinstance(value, PlacedTensor):
        return "tensor"
    if isinstance(value, Mapping):
        return None
    return None if isinstance(value, (list, tuple)) and _holds_tensor(value) else "value"


def _holds_tensor(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_holds_tensor, value.values()))
    return isinstance(value, PlacedTensor) or (isinstance(value, (list, tuple)) and any(map(_holds_tensor, value)))


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
    """A value as the codec spells it; what only pickle can make is spelled so that it needs the opt-in."""
    try:
        return Codec().encode(_plain_dicts(value), key)
    except InvalidState:
        return {"pickle": base64.b64encode(rescue(path)).decode()}


class Allowance:
    """How much a checkpoint may hold: about as many objects as it has bytes, and some times as many letters.

    A pickle can hold one list many times, so that few bytes stand for more objects than there are atoms. Bytes, and the
    names of dicts, which become parts of each key below, are spelled anew for each place where they stand.
    """

    def __init__(self) -> None:
        self._objects, self._letters = _SLACK, _SLACK_LETTERS

    def grow(self, size_bytes: int) -> "Allowance":
        """Allow what so many bytes more can hold."""
        self._objects += size_bytes
        self._letters += _LETTERS_PER_BYTE * size_bytes
        return self

    def spend(self, what: str, letters: int) -> None:
        """Count one object. Raises UnsafeCheckpoint, naming `what`, where they are too many."""
        self._objects -= 1
        self._letters -= letters
        if self._objects < 0 or self._letters < 0:
            raise UnsafeCheckpoint(f"{what} holds the same things again and again, far more than it has bytes")


class Settler:
    """Goes through an object that came from a pickle, puts something in the place of its tensors, and keeps to limits."""

    def __init__(self, what: str, allowance: Allowance, replace: Callable[[Any], Any]) -> None:
        self._what, self._allowance, self._replace = what, allowance, replace

    def settle(self, value: Any, depth: int = 0, name_letters: int = 0) -> Any:
        """The same object with its tensors replaced. `name_letters`: how long the key is that it stands under."""
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
                empty[name] = self.settle(item, depth + 1, name_letters + letters)
            return empty
        if type(value) in (list, tuple):
            return type(value)(self.settle(item, depth + 1) for item in value)
        return self._replace(value)


def _letters(value: Any) -> int:
    """How much of a value is spelled anew wherever it stands, or looked at."""
    if type(value) is str:
        return 0 if value.isascii() else len(value)
    if type(value) is int:
        return value.bit_length() // 8
    return len(value) if isinstance(value, (bytes, bytearray, set, frozenset, tuple)) else 0


def _can_be_named(value: Any) -> bool:
    """Whether the name of something in a dict is one that we can spell."""
    if type(value) is tuple:
        return all(map(_can_be_named, value))
    return value is None or type(value) in (str, int, float, bool, bytes, complex)


def _plain_dicts(value: Any) -> Any:
    """A value whose dicts are plain ones, which is all that the codec knows."""
    if isinstance(value, dict):
        return {name: _plain_dicts(item) for name, item in value.items()}
    return type(value)(map(_plain_dicts, value)) if type(value) in (list, tuple) else value


@dataclass(frozen=True, slots=True)
class _Call:
    """Spelled by pickle as a call of one of the functions below."""

    function: Callable[..., Any]
    args: tuple[Any, ...]

    def __reduce__(self) -> tuple[Callable[..., Any], tuple[Any, ...]]:
        return self.function, self.args


def rescue_from_bytes(archive: bytes, path: Path) -> bytes:
    """A pickle that, where the caller allows pickles, gives what stands at `path` in an archive of torch.save."""
    return pickle.dumps(_Call(unpickled, (archive, path)))


def rescue_from_file(name: str, path: Path) -> bytes:
    """The same for an archive in a file of its own, which is read as a whole then."""
    return pickle.dumps(_Call(unpickled, (name, path)))


def unpickled(archive: bytes | str, path: Path) -> Any:
    """What stands at `path` in an archive. Runs the pickle in it: only for callers who allowed that."""
    import torch  # noqa: PLC0415

    source = io.BytesIO(archive) if isinstance(archive, bytes) else archive
    value = torch.load(source, map_location="cpu", weights_only=False)
    for part in path:
        value = value[part]
    return value


def check_total(what: str, tensors: Iterable[PlacedTensor], file_bytes: int) -> None:
    """Refuse tensors that are out of all proportion to their files: views of one storage, many times over."""
    most_bytes = _SHARED * file_bytes + GIB
    total = sum(Box.whole(t.shape).elements * DTYPES[t.dtype].size_bytes for t in tensors)
    if total > most_bytes:
        raise UnsafeCheckpoint(f"the tensors of {what} would take {total} bytes, far more than the file has")
