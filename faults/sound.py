"""Whether the output of a decoder is sound, checked by other means. For row 20 of the table of faults.

A manifest can be written and read again, its boxes tile its tensors, and its tree has the leaves that its tables list.
A header says what Python's `json` and safetensors read. A value and a private record survive another round trip. A
pickle is what Python's own reader makes of it, if it needs no names, and holds only plain data and tensors that lie
within their storages.
"""

import dataclasses
import enum
import io
import itertools
import json
import math
import pickle
import re
import struct
from collections.abc import Iterable
from contextlib import suppress
from typing import Any

import msgspec
import numpy as np
import safetensors
import torch

from milepost.core import manifest as manifests
from milepost.core import private_record, shardfile
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_DEPTH
from milepost.core.tree import Node
from milepost.formats.read.content import Strided
from milepost.formats.read.pickle_machine import Maker, NamedObject, Opaque
from milepost.state.values import Codec

MOST_RANKS, MOST_BOXES, MOST_DATA_BYTES = 256, 64, 1 << 20
"""Larger inputs are not checked, since that would take long."""
PLAIN = (int, float, str, bytes, bytearray, complex, type(None), np.generic, torch.dtype, torch.device)
TORCHS = (*PLAIN, Strided, Opaque, NamedObject, Maker)


def sound_manifest(_data: bytes, found: manifests.Manifest) -> bool:
    """Whether it can be written and read again, is complete, and names only files inside and ranks that exist."""
    names = [found.file_name(file.rank) for file in found.files]
    inside = all(re.fullmatch(r"data/[0-9]{8}-[0-9a-f]{8,32}/[0-9]{5,6}\.safetensors", name) for name in names)
    once = len({file.rank for file in found.files}) == len(found.files)
    again = manifests.unseal(manifests.seal(found)) == found
    return inside and once and again and tiled(found, found.world) and leaves_fit(found)


def tiled(found: manifests.Manifest, world: int) -> bool:
    """Whether the boxes of each tensor fill it, without overlap, and belong to these ranks."""
    for tensor in found.tensors:
        layout = found.layout_of(tensor)
        holders = set(ranks_in(msgspec.to_builtins(layout)))
        if not holders or max(holders) >= world:
            return False
        if len(holders) > MOST_RANKS:
            continue
        held = [h for rank in holders for h in layout.held_by(tensor.shape, rank)]
        boxes = {h.box for h in held if h.box.elements}
        if sum(box.elements for box in boxes) != math.prod(tensor.shape):
            return False
        if any(a.intersect(b) for a, b in itertools.combinations(sorted(boxes, key=repr)[:MOST_BOXES], 2)):
            return False
    return True


def ranks_in(layout: Any) -> Iterable[int]:
    """The ranks that a layout in JSON names."""
    for name, part in layout.items() if isinstance(layout, dict) else enumerate(layout):
        if name == "ranks":
            for run in part.split(","):
                first, _, last = run.partition("-")
                yield from range(int(first), int(last or first) + 1)
        elif isinstance(part, dict | list | tuple):
            yield from ranks_in(part)


def leaves_fit(found: manifests.Manifest) -> bool:
    """Whether the tree is valid, and its leaves are the keys of the tables, each once."""
    tables = {"tensor": found.tensors, "value": found.values, "per_rank": found.per_rank}
    listed = sorted((kind, row.key) for kind, rows in tables.items() for row in rows)
    leaves = sorted((node.kind, node.key) for node in found.tree if node.kind in tables)
    return listed == leaves and len(set(listed)) == len(listed) and is_tree(found.tree)


def is_tree(nodes: tuple[Node, ...]) -> bool:
    """Whether each node has a parent that can have children, and only the first has none."""
    leaves = ("tensor", "value", "per_rank")
    steps = itertools.pairwise(nodes)
    return nodes[0].depth == 0 and all(
        1 <= node.depth <= before.depth + (before.kind not in leaves) for before, node in steps
    )


def sound_private(_data: bytes, found: private_record.Private) -> bool:
    """Whether it survives another round trip, its tree is valid, and it holds what the tree names."""
    keys = {row.key for row in (*found.values, *found.tensors)}
    there = all(node.key in keys for node in found.tree if node.kind in ("tensor", "value"))
    return private_record.read_private(msgspec.json.encode(found)) == found and there and is_tree(found.tree)


def sound_header(data: bytes, found: shardfile.Header) -> bool:
    """Whether other readers see the same contiguous entries, and it survives another round trip."""
    plain = json.loads(data[8:].decode(errors="replace"), strict=False)
    mine = {n: (e.dtype, list(e.shape), list(e.data_offsets)) for n, e in found.entries.items()}
    theirs = {n: (e["dtype"], e["shape"], e["data_offsets"]) for n, e in plain.items() if n != "__metadata__"}
    ends = [0, *(e.data_offsets[1] for e in found.entries.values())]
    text = msgspec.json.encode({"__metadata__": found.notes, **found.entries})
    text = struct.pack("<Q", len(text)) + text
    size_bytes = ends[-1]
    again = shardfile.read_header(text, len(text) + size_bytes, block_bytes_of(found))
    return (
        mine == theirs
        and ends[:-1] == [e.data_offsets[0] for e in found.entries.values()]
        and (again.entries, again.notes) == (found.entries, found.notes)
        and found.size_bytes == len(data) + size_bytes
        and (size_bytes > MOST_DATA_BYTES or read_by_safetensors(text, size_bytes, mine))
    )


def block_bytes_of(header: shardfile.Header) -> int:
    """A block size for which the table of checksums has the right number of entries."""
    blocks = header.table_bytes // 8
    return max(1, -(-header.data_bytes // blocks)) if blocks else 1


def read_by_safetensors(header: bytes, size_bytes: int, entries: dict[str, Any]) -> bool:
    """Whether the library reads the same entries from a file with this header."""
    read = dict(safetensors.deserialize(header + bytes(size_bytes)))
    return {n: (t["dtype"], t["shape"], len(t["data"])) for n, t in read.items()} == {
        n: (dtype, shape, stop - start) for n, (dtype, shape, (start, stop)) in entries.items()
    }


def sound_value(codec: Codec, found: Any) -> bool:
    """Whether it survives another round trip, is plain, and is not nested too deeply."""
    spelled = codec.encode(found, "x")
    return codec.encode(codec.decode(spelled, "x"), "x") == spelled and only_of(found, PLAIN, MAX_DEPTH)


class Plain(pickle._Unpickler):  # noqa: SLF001  # the Python version: the C version takes any amount of memory
    """Python's own reader of pickles, for pickles without names."""

    def find_class(self, module: str, name: str) -> Any:
        """Nothing."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def sound_pickle(data: bytes, found: Any) -> bool:
    """Whether it is plain, and Python reads the same, if Python can read it without names."""
    with suppress(Exception):
        theirs = Plain(io.BytesIO(data)).load()
        return repr(theirs) == repr(found)
    return only_of(found, TORCHS, math.inf)


def only_of(found: Any, leaves: tuple[type, ...], most_depth: float) -> bool:
    """Whether it consists of containers and these types, and its tensors lie within their storages."""
    pending, seen = [(found, 0)], set()
    while pending:
        value, depth = pending.pop()
        if depth > most_depth:
            return False
        if isinstance(value, leaves):
            if isinstance(value, Strided) and not within(value):
                return False
        elif id(value) not in seen:
            seen.add(id(value))
            parts = parts_of(value)
            if parts is None:
                return False
            pending += [(part, depth + 1) for part in parts]
    return True


def parts_of(value: Any) -> list[Any] | None:
    """The items of a container; None for anything else."""
    if isinstance(value, dict):
        return [*value.keys(), *value.values()]
    if isinstance(value, list | tuple | set | frozenset):
        return list(value)
    if dataclasses.is_dataclass(value):
        return [getattr(value, field.name) for field in dataclasses.fields(value)]
    return [] if isinstance(value, enum.Enum) else None


def within(tensor: Strided) -> bool:
    """Whether the last element of a tensor lies in its storage."""
    if 0 in tensor.shape:
        return True
    last = tensor.offset + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.strides, strict=True))
    have = tensor.storage.elements * DTYPES[tensor.storage.dtype].size_bytes
    return tensor.offset >= 0 and (last + 1) * DTYPES[tensor.dtype].size_bytes <= have
