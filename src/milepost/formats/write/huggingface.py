"""Hugging Face folders: safetensors files of limited size and an index. Names, types and shapes determine headers."""

import json
import math
import re
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec

from milepost.core.dtypes import DTYPES
from milepost.core.limits import MAX_ENTRIES, MAX_HEADER_BYTES
from milepost.core.shardfile import NOTES, NewEntry, count_entries
from milepost.errors import InvalidRequest
from milepost.formats.read.names import SINGLE
from milepost.formats.write.content import Content, Data, FilePiece
from milepost.formats.write.files import FolderPlan
from milepost.formats.write.torchfile import plain_value

_LISTED = 50
# The order of the safetensors library itself: widest first, so that each entry is aligned without padding.
_ORDER = (
    *("U64", "I64", "F64", "C64", "F32", "U32", "I32", "BF16", "F16", "U16", "I16"),
    *("F8_E5M2FNUZ", "F8_E4M3FNUZ", "F8_E8M0", "F8_E4M3", "F8_E5M2", "I8", "U8", "F4", "BOOL"),
)
# Milepost's shard files store these as plain bytes, for old readers; here they have their names.
_NAMES = {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ", "float4_e2m1fn_x2": "F4"}


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


@dataclass(frozen=True, slots=True)
class HfNames:
    """How files are cut and named. One file has the given name; more get numbers before the suffix, and an index."""

    max_shard_bytes: int
    file_name: str = SINGLE

    @property
    def index(self) -> str:
        """The name of the index."""
        return f"{self.file_name}.index.json"

    def numbered(self, number: int, count: int) -> str:
        """The name of file `number` of `count`."""
        stem = self.file_name.removesuffix(".safetensors")
        return f"{stem}-{number:05d}-of-{count:05d}.safetensors"

    def owns(self, name: str) -> bool:
        """Whether a name in a folder is one that an export under this name writes."""
        stem = re.escape(self.file_name.removesuffix(".safetensors"))
        numbered = rf"{stem}-[0-9]{{5,}}-of-[0-9]{{5,}}\.safetensors"
        return name in (self.index, self.file_name) or re.fullmatch(numbered, name) is not None


MODEL = HfNames(5 * 1000**3)
"""The files of a model, as Hugging Face cuts and names them."""


def hf_layout(tensors: Iterable[NewEntry], notes: Mapping[str, str], named: HfNames) -> HfLayout:
    """Where each byte goes. Pure. Raises InvalidRequest, listing all tensors that safetensors cannot hold.

    Files are filled in the given order, up to `named.max_shard_bytes`; a larger tensor gets a file of its own. The
    first file holds the notes.
    """
    order = list(tensors)
    refuse_unknown(order)
    groups: list[list[NewEntry]] = [[]]
    room = named.max_shard_bytes
    for tensor in order:
        if groups[-1] and tensor.size_bytes > room:
            groups.append([])
            room = named.max_shard_bytes
        groups[-1].append(tensor)
        room -= tensor.size_bytes
    count = len(groups)
    if count == 1:
        return HfLayout([make_file(named.file_name, groups[0], notes)], None)
    names = [named.numbered(i + 1, count) for i in range(count)]
    files = [make_file(names[i], group, notes if i == 0 else {}) for i, group in enumerate(groups)]
    weight_map = {tensor.name: name for name, group in zip(names, groups, strict=True) for tensor in group}
    return HfLayout(files, index_json(weight_map, sum(tensor.size_bytes for tensor in order)))


def layout_by_name(names: Mapping[NewEntry, str]) -> HfLayout:
    """Where each byte goes, given the file of each tensor. There is always an index."""
    refuse_unknown(list(names))
    groups: dict[str, list[NewEntry]] = {}
    for tensor, name in names.items():
        groups.setdefault(name, []).append(tensor)
    files = [make_file(name, groups[name], {}) for name in sorted(groups)]
    weight_map = {tensor.name: name for tensor, name in names.items()}
    return HfLayout(files, index_json(weight_map, sum(tensor.size_bytes for tensor in names)))


def index_json(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """The index of a folder: the file of each tensor."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, sort_keys=True) + "\n").encode()


def refuse_unknown(tensors: list[NewEntry]) -> None:
    """Raise InvalidRequest, listing all tensors that safetensors cannot hold."""
    problems = [
        f"{t.name!r} is {t.dtype}" for t in tensors if DTYPES[t.dtype].inner or (_type(t.dtype) == "F4" and not t.shape)
    ] + [f"{t.name!r} is a reserved name" for t in tensors if t.name == NOTES]
    if problems:
        listed = "\n  ".join(problems[:_LISTED])
        raise InvalidRequest(
            f"safetensors cannot hold {len(problems)} of the tensors:\n  {listed}\n"
            "Leave them out: rename={key: None}."
        )


def _type(dtype: str) -> str:
    return _NAMES.get(dtype, DTYPES[dtype].stored_as)


def make_file(name: str, tensors: list[NewEntry], notes: Mapping[str, str]) -> HfFile:
    """One file. Raises InvalidRequest where its header would be larger than readers accept."""
    record: dict[str, object] = {NOTES: {"format": "pt", **notes}}
    starts, position = {}, 0
    for tensor in sorted(tensors, key=lambda t: (_ORDER.index(_type(t.dtype)), t.name)):
        kind, shape = _type(tensor.dtype), tensor.shape
        if kind == "F4":  # torch counts bytes of two numbers each, safetensors the numbers
            shape = (*shape[:-1], 2 * shape[-1])
        end = position + tensor.size_bytes
        record[tensor.name] = {"dtype": kind, "shape": shape, "data_offsets": (position, end)}
        starts[tensor.name], position = position, end
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


def notes_of(values: Mapping[str, Any], metadata: Mapping[str, Any], drop_values: bool) -> dict[str, str]:
    """Values as strings for the header: text as it is, the rest as JSON. Raises InvalidRequest for other values."""
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


def plan_of(layout: HfLayout, data: Mapping[str, Data], named: HfNames = MODEL) -> FolderPlan:
    """The plan for safetensors files: their headers, and the data of each key."""
    files = []
    for file in layout.files:
        pieces = [FilePiece.at(0, file.head)]
        pieces += [FilePiece.at(start, data[key]) for key, start in file.starts.items() if key in data]
        files.append(Content(file.name, file.size_bytes, pieces))
    last = [] if layout.index_json is None else [(named.index, layout.index_json)]
    return FolderPlan(files, last, named.owns, [named.index])
