"""A part of one tensor, by an index written as text: `0:2,:4`, `...,0`, `-1`."""

import math
import re
from types import EllipsisType
from typing import Any

import msgspec

from milepost.checkpoint import Checkpoint
from milepost.core.box import Shape
from milepost.errors import CheckpointError, InvalidRequest
from milepost.inspection.contents import EntryDetail, detail_of

Index = int | slice | EllipsisType
MOST_VALUES = 1_000_000
"""How many elements one call reads."""
_PAIRS = "float4_e2m1fn_x2"
_NUMBER = re.compile(r"[+-]?[0-9]{1,1000}")
_BEYOND = 2**60
"""No tensor is as long. Numbers above it mean the same."""


def index_of(text: str) -> tuple[Index, ...]:
    """The index that a text spells, as Python would read it in brackets. Raises InvalidRequest."""
    inner = text.strip().removeprefix("[").removesuffix("]")
    return tuple(_one(part.strip(), text) for part in inner.split(",")) if inner else ()


def _one(part: str, text: str) -> Index:
    if part == "...":
        return ...
    pieces = part.split(":")
    if len(pieces) > 3 or (len(pieces) == 1 and not part) or not all(map(_is_number_or_empty, pieces)):
        raise InvalidRequest(f"{text!r} is no index: write integers, slices and ..., as in 0:2,:4")
    numbers = [max(-_BEYOND, min(int(piece), _BEYOND)) if piece.strip() else None for piece in pieces]
    return slice(*numbers) if len(pieces) > 1 else int(part)


def _is_number_or_empty(piece: str) -> bool:
    return not piece.strip() or _NUMBER.fullmatch(piece.strip()) is not None


def values_at(checkpoint: Checkpoint, key: str, index: str) -> EntryDetail:
    """One tensor with the elements that the index names, read and verified. Imports torch.

    Raises InvalidRequest for an index that does not fit, and for more than `MOST_VALUES` elements.
    """
    detail = detail_of(checkpoint, key)
    if detail.entry.kind != "tensor":
        raise InvalidRequest(f"{key!r} is no tensor, so it has no slices")
    lazy, parts = checkpoint.tensors[key], index_of(index)
    if lazy.dtype_name == _PAIRS:
        raise InvalidRequest(f"{key!r} holds two numbers of four bits in each byte, which torch cannot show")
    touched = _touched(parts, lazy.shape)
    if touched > MOST_VALUES:
        raise InvalidRequest(
            f"[{index}] of {key!r} spans {touched:,} elements; ask for at most {MOST_VALUES:,} at once"
        )
    try:
        found = lazy[parts]
    except (IndexError, ValueError) as error:
        if isinstance(error, CheckpointError):
            raise
        raise InvalidRequest(f"[{index}] does not fit {key!r} of shape {lazy.shape}: {error}") from None
    return msgspec.structs.replace(detail, index=index, values=_nested(found), values_text=str(found))


def _touched(parts: tuple[Index, ...], shape: Shape) -> int:
    """How many elements the box around them has; 0 where an index does not fit, which the reader explains."""
    if Ellipsis in parts:
        at = parts.index(...)
        parts = (*parts[:at], *[slice(None)] * (len(shape) - len(parts) + 1), *parts[at + 1 :])
    parts = (*parts, *[slice(None)] * (len(shape) - len(parts)))
    sizes = []
    for part, length in zip(parts, shape, strict=False):
        start, stop, _ = part.indices(length) if isinstance(part, slice) and part.step != 0 else (0, 1, 1)
        sizes.append(max(stop - start, 0))
    return math.prod(sizes)


def _nested(found: Any) -> Any:
    if found.dtype.is_complex:
        return _as_text(found.tolist())
    if found.dtype.is_floating_point:  # some of eight bits have no other way to Python's numbers
        found = found.double()
    return found.tolist()


def _as_text(values: Any) -> Any:
    return [_as_text(value) for value in values] if isinstance(values, list) else str(values)
