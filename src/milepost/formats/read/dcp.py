"""Folders of `torch.distributed.checkpoint`: a pickled `.metadata`, and files of `torch.save` archives."""

import re
from collections.abc import Callable, Iterable
from itertools import pairwise
from typing import Any

import xxhash

from milepost.commit.beside import METADATA
from milepost.core.box import Shape
from milepost.core.dtypes import size_bytes
from milepost.core.limits import MAX_RANKS, MIB
from milepost.core.strict_int import number_of
from milepost.core.tree import Path
from milepost.data.collection_pause import CollectionPaused
from milepost.data.read import read_small
from milepost.data.transforms import restored
from milepost.errors import CheckpointDamaged, UnsafeCheckpoint
from milepost.formats.read.archive import MAX_PICKLE_BYTES, Archive, Window
from milepost.formats.read.content import Strided, read_content
from milepost.formats.read.dcp_metadata import StoredItems, TensorParts, read_metadata
from milepost.formats.read.files import SLACK_BYTES
from milepost.formats.read.spots import Item
from milepost.formats.read.torchfile import placed_in
from milepost.formats.read.virtual import (
    Allowance,
    FileBox,
    ForeignState,
    PlacedTensor,
    TensorReplacer,
    check_total,
    rescue_from_bytes,
)
from milepost.store import Reader, Store
from milepost.store.base import check_name

_MAX_METADATA_BYTES = 512 * MIB
_RANK = re.compile(r"__([0-9]{1,6})_[0-9]+\.distcp")


@CollectionPaused()
def read_dcp(store: Store) -> ForeignState:
    """The state that DCP saved in a folder. Raises CheckpointDamaged, or UnsafeCheckpoint for hostile metadata."""
    where = f"{store.url}/{METADATA}"
    data = read_small(store.reader(METADATA), where, _MAX_METADATA_BYTES)
    described, stored, paths = read_metadata(data, where)
    names = sorted({name for name, _ in stored.values()})
    if len(names) >= MAX_RANKS:
        raise UnsafeCheckpoint(f"{where} names {len(names)} files")
    for name in names:
        check_name(name)
    sizes = _sizes(where, names, stored.values())
    numbers = {name: i for i, name in enumerate(names)}
    values = _Values(store, sizes)
    leaves: dict[str, Any] = {}
    for key, tensor in described.items():
        if tensor is None:
            leaves[key] = values.read(key, *_stored(stored, key, None, where, alone=True), numbers)
        else:
            leaves[key] = _placed(key, tensor, stored, numbers, where)
    values.close()
    check_total(where, values.tensors, sum(sizes.values()))
    state = _nest(where, {key: (paths[key], leaf) for key, leaf in leaves.items()})
    ranks = [int(match[1]) for name in names if (match := _RANK.fullmatch(name))]
    files = tuple((name, sizes[name]) for name in names)
    digest = xxhash.xxh3_64_digest(data)
    return ForeignState("dcp", digest, state, files, max(ranks, default=0) + 1, {}, values.rescuer(paths), store.reader)


def _sizes(where: str, names: list[str], items: Iterable[tuple[str, Item]]) -> dict[str, int]:
    """How much of each file is in use. Overlapping items are refused: they could claim any amount of data."""
    by_file: dict[str, list[tuple[int, int]]] = {name: [] for name in names}
    for name, item in items:
        by_file[name].append((item.offset, item.offset + item.length))
    for name, spans in by_file.items():
        spans.sort()
        if any(a[1] > b[0] for a, b in pairwise(spans)):
            raise UnsafeCheckpoint(f"{where}: items of {name[:200]!r} overlap")
    return {name: max((stop for _, stop in spans), default=0) for name, spans in by_file.items()}


def _stored(stored: StoredItems, key: str, offset: Shape | None, where: str, alone: bool) -> tuple[str, Item]:
    found = stored.get((key, offset)) or (stored.get((key, None)) if alone else None)
    if found is None:
        raise CheckpointDamaged(f"{where} does not say where {key[:200]!r} is, at {offset}")
    return found


def _placed(key: str, tensor: TensorParts, stored: StoredItems, numbers: dict[str, int], where: str) -> PlacedTensor:
    dtype, shape, boxes = tensor
    pieces = []
    for box in boxes:
        if not box.elements:
            continue
        name, item = _stored(stored, key, box.offset, where, alone=len(boxes) == 1)
        if not item.transforms and size_bytes(dtype, box.shape) > item.length:
            raise CheckpointDamaged(f"{where}: the part {box.text} of {key[:200]!r} has too few bytes")
        pieces.append(FileBox(box, numbers[name], item))
    return PlacedTensor(dtype, shape, tuple(pieces))


# ---------------------------------------------------------------- values


class _Values:
    """Reads values that are not tensors. Each is a separate archive."""

    def __init__(self, store: Store, sizes: dict[str, int]) -> None:
        self._store, self._sizes = store, sizes
        self._open: tuple[str, Reader, Window] | None = None
        self._items: dict[str, tuple[str, Item]] = {}
        self._allowance = Allowance()
        self.tensors: list[PlacedTensor] = []

    def read(self, key: str, name: str, item: Item, numbers: dict[str, int]) -> Any:
        """The value of a key, with a `PlacedTensor` for each tensor in it."""
        self._items[key] = (name, item)
        what = f"{key[:200]!r} in {self._store.url}/{name}"
        window, start, length = self._bytes_of(name, item, what)
        archive = Archive(window, start, length, what)
        content = read_content(archive, what)
        seen: dict[int, tuple[Strided, PlacedTensor]] = {}
        inside = item if item.transforms else None
        allowed = self._allowance.grow(length)
        found = TensorReplacer(what, allowed, lambda v: placed_in(archive, v, numbers[name], what, seen, inside)).walk(
            content
        )
        self.tensors.extend(tensor for _, tensor in seen.values())
        return found

    def _bytes_of(self, name: str, item: Item, what: str) -> tuple[Callable[[int, int], bytes], int, int]:
        if item.length > MAX_PICKLE_BYTES:
            raise UnsafeCheckpoint(f"{what} is a value of {item.length} bytes, over {MAX_PICKLE_BYTES}")
        if self._open is None or self._open[0] != name:
            self.close()
            try:
                reader = self._store.reader(name)
            except FileNotFoundError:
                raise CheckpointDamaged(f"{self._store.url}/{name} is missing") from None
            self._open = (name, reader, Window(reader, self._store))
        _, reader, window = self._open
        if item.offset + item.length > reader.size_bytes:
            raise CheckpointDamaged(f"{self._store.url}/{name} ends before {what} does")
        if not item.transforms:
            return window, item.offset, item.length
        data = restored(window(item.offset, item.length), item.transforms, 64 * item.length + SLACK_BYTES, what)
        return (lambda at, count: data[at : at + count]), 0, len(data)

    def rescuer(self, paths: dict[str, Path]) -> Callable[[Path], bytes]:
        """A function that gives a value which only pickle can make, from the archive of the key above it."""
        keys = {path: key for key, path in paths.items()}

        def rescue(path: Path) -> bytes:
            for end in range(len(path), 0, -1):
                key = keys.get(_as_saved(path[:end], keys))
                if key is not None and key in self._items:
                    name, item = self._items[key]
                    read, start, length = self._bytes_of(name, item, repr(key[:200]))
                    data = read(start, length)
                    self.close()
                    return rescue_from_bytes(data, path[end:])
            raise CheckpointDamaged(f"{self._store.url}: there is no value at {path[:10]!r}")

        return rescue

    def close(self) -> None:
        """Close the file."""
        if self._open is not None:
            self._open[1].close()
            self._open = None


def _as_saved(path: Path, keys: dict[Path, str]) -> Path:
    """The path as DCP spells it, with text where an optimizer has numbers."""
    return path if path in keys else tuple(str(part) if type(part) is int else part for part in path)


# ---------------------------------------------------------------- the tree


class _OpenContainer(dict[Any, Any]):
    """A container that is being filled. Whether it is a list is known when all its children are there."""


def _nest(where: str, leaves: dict[str, tuple[Path, Any]]) -> Any:
    """The state with its containers."""
    root = _OpenContainer()
    for key, (path, leaf) in leaves.items():
        here = root
        for part in path[:-1]:
            following = here.setdefault(part, _OpenContainer())
            if not isinstance(following, _OpenContainer):
                raise CheckpointDamaged(f"{where}: {key[:200]!r} lies below a value")
            here = following
        if path[-1] in here:
            raise CheckpointDamaged(f"{where}: {key[:200]!r} has the path of another key")
        here[path[-1]] = leaf
    return _finished(root)


def _finished(node: Any) -> Any:
    if not isinstance(node, _OpenContainer):
        return node
    children = {name: _finished(child) for name, child in node.items()}
    if children and all(type(name) is int for name in children) and sorted(children) == list(range(len(children))):
        return [children[i] for i in range(len(children))]
    if set(children) == {"state", "param_groups"} and isinstance(children["state"], dict):
        # An optimizer, which numbers its parameters; DCP turns all keys into text.
        children["state"] = {_number(name): child for name, child in children["state"].items()}
    return children


def _number(name: Any) -> Any:
    number = number_of(name) if isinstance(name, str) else None
    return name if number is None else number
