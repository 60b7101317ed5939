"""Hugging Face folders: safetensors files of limited size and an index. Headers follow from names, types and shapes alone."""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from typing import NamedTuple

import msgspec

from milepost.core.box import Shape
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_ENTRIES, MAX_HEADER_BYTES
from milepost.core.shardfile import count_entries
from milepost.errors import InvalidRequest

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
_NOTES = "__metadata__"
_OURS = re.compile(r"model(-[0-9]{5,}-of-[0-9]{5,})?\.safetensors")
# The order of the safetensors library itself: widest first, so that each entry is aligned without padding.
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
# Shard files of our own store these as plain bytes, for old readers; here they have their names.
_NAMES = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4"}


class HfTensor(NamedTuple):
    """A tensor to write: its key, dtype (torch's name) and shape."""

    key: str
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """How many bytes it takes."""
        return math.prod(self.shape) * DTYPES[self.dtype].size_bytes


class HfFile(NamedTuple):
    """One file: its name, header, size, and where in the file each tensor begins."""

    name: str
    head: bytes
    size_bytes: int
    starts: dict[str, int]


class HfLayout(NamedTuple):
    """All files, and the bytes of the index (None where one file holds everything)."""

    files: list[HfFile]
    index_json: bytes | None


def owns(name: str) -> bool:
    """Whether a name in a folder is one that an export writes."""
    return name == INDEX or _OURS.fullmatch(name) is not None


def hf_layout(tensors: Iterable[HfTensor], notes: Mapping[str, str], max_shard_bytes: int) -> HfLayout:
    """Where each byte goes. Pure. Raises InvalidRequest, listing all tensors that safetensors cannot hold.

    Files are filled in the order given, up to `max_shard_bytes`; a larger tensor has a file to itself. The notes are
    in the first file.
    """
    order = list(tensors)
    _refuse(order)
    groups: list[list[HfTensor]] = [[]]
    room = max_shard_bytes
    for tensor in order:
        if groups[-1] and tensor.size_bytes > room:
            groups.append([])
            room = max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.size_bytes
    count = len(groups)
    if count == 1:
        return HfLayout([_file(SINGLE, groups[0], notes)], None)
    names = [f"model-{i + 1:05d}-of-{count:05d}.safetensors" for i in range(count)]
    files = [_file(names[i], group, notes if i == 0 else {}) for i, group in enumerate(groups)]
    weight_map = {tensor.key: name for name, group in zip(names, groups, strict=True) for tensor in group}
    total = sum(tensor.size_bytes for tensor in order)
    index = {"metadata": {"total_size": total}, "weight_map": weight_map}
    return HfLayout(files, (json.dumps(index, indent=2, sort_keys=True) + "\n").encode())


def _refuse(tensors: list[HfTensor]) -> None:
    problems = [
        f"{t.key!r} is {t.dtype}" for t in tensors if DTYPES[t.dtype].inner or (_type(t.dtype) == "F4" and not t.shape)
    ] + [f"{t.key!r} is a reserved name" for t in tensors if t.key == _NOTES]
    if problems:
        listed = "\n  ".join(problems[:50])
        raise InvalidRequest(
            f"safetensors cannot hold {len(problems)} of the tensors:\n  {listed}\nLeave them out: rename={{key: None}}."
        )


def _type(dtype: str) -> str:
    return _NAMES.get(dtype, DTYPES[dtype].stored_as)


def _file(name: str, tensors: list[HfTensor], notes: Mapping[str, str]) -> HfFile:
    record: dict[str, object] = {_NOTES: {"format": "pt", **notes}}
    starts, position = {}, 0
    for tensor in sorted(tensors, key=lambda t: (_ORDER.index(_type(t.dtype)), t.key)):
        kind, shape = _type(tensor.dtype), tensor.shape
        if kind == "F4":  # torch counts bytes of two numbers each, safetensors the numbers
            shape = (*shape[:-1], 2 * shape[-1])
        end = position + tensor.size_bytes
        record[tensor.key] = {"dtype": kind, "shape": shape, "data_offsets": (position, end)}
        starts[tensor.key], position = position, end
    text = msgspec.json.encode(record)
    if count_entries(text) > MAX_ENTRIES:
        raise InvalidRequest(
            f"{name} would have {count_entries(text)} entries (a brace in a key counts as one), and its readers accept "
            f"{MAX_ENTRIES}. Choose a smaller max_shard_bytes."
        )
    length = -(-len(text) // 8) * 8
    if length + 8 > MAX_HEADER_BYTES:
        raise InvalidRequest(f"{name} would have a header of {length} bytes, over {MAX_HEADER_BYTES}")
    head = struct.pack("<Q", length) + text.ljust(length)
    return HfFile(name, head, len(head) + position, {key: len(head) + start for key, start in starts.items()})
