"""DTensors whose local parts are made of other tensors (torchao's optimizer states): how each of those is cut.

The local part of a rank was quantized by itself, so its inner tensors follow from how the outer one is cut. An inner
tensor is one of three things. It has the dimensions of the local part, and is cut as the outer tensor is. Or it lies in
blocks: one element stands for so many elements of the local part, counted in rows. Or it is the same on all ranks.
"""

from typing import Any, Literal

import torch
from torch.distributed.tensor import DTensor, Replicate

from milepost.errors import InvalidState
from milepost.state.tensors import Sharded

_Way = Literal["cut", "blocks", "whole"]
_KNOWN: dict[str, dict[str, _Way]] = {
    "torchao.optim.subclass_8bit.OptimState8bit": {"codes": "cut", "scale": "blocks", "qmap": "whole"},
    "torchao.optim.subclass_4bit.OptimState4bit": {"codes": "blocks", "scale": "blocks", "qmap": "whole"},
    "torchao.optim.subclass_fp8.OptimStateFp8": {"codes": "cut", "scale": "blocks"},
}
"""Tensors in blocks look like any list of numbers, so only classes that are known may have them."""


def local_of(value: DTensor) -> Any:
    """The local part, without its graph."""
    return value._local_tensor  # noqa: SLF001  # `to_local` would make a view, with the memory but not the object


def cut_parts(value: DTensor) -> dict[str, Any]:
    """The inner tensors of the local part, each as a part of one that all ranks hold together. They share its memory.

    Raises InvalidState where that cannot be told.
    """
    local = local_of(value)
    names, _ = local.__tensor_flatten__()
    known = _KNOWN.get(f"{type(local).__module__}.{type(local).__qualname__}", {})
    return {name: _part(value, name, getattr(local, name), known.get(name)) for name in names}


def memory_of_cut(part: Any) -> tuple[int, ...]:
    """Where the memory of this rank's part of an inner tensor begins: equal for two views of the same memory."""
    if isinstance(part, Sharded):
        return tuple(piece.data.data_ptr() for piece in part.parts)
    return ((local_of(part) if isinstance(part, DTensor) else part).data_ptr(),)


def _part(value: DTensor, name: str, inner: torch.Tensor, way: _Way | None) -> Any:
    if way == "whole":
        return inner
    if way == "blocks":
        return _in_blocks(value, inner)
    shape = _whole_shape(value, tuple(inner.shape))
    if shape is None:
        raise InvalidState(
            f"a DTensor of {type(local_of(value)).__name__} holds {name!r} of shape {tuple(inner.shape)}, and how that "
            f"is cut does not follow from {value.placements} of {tuple(value.shape)}. Save its local part in PerRank, "
            "or what it was quantized from."
        )
    strides = torch.empty(shape, dtype=torch.uint8, device="meta").stride()
    return DTensor.from_local(
        inner, value.device_mesh, value.placements, run_check=False, shape=torch.Size(shape), stride=strides
    )


def _whole_shape(value: DTensor, inner: tuple[int, ...]) -> tuple[int, ...] | None:
    """The shape of an inner tensor over all ranks, if it has the same elements along the dimensions that are cut."""
    local = tuple(local_of(value).shape)
    cut = {p.dim for p in value.placements if not isinstance(p, Replicate) and hasattr(p, "dim")}
    if len(inner) != len(local) or any(inner[dim] != local[dim] for dim in cut):
        return None
    return tuple(n if dim in cut else inner[dim] for dim, n in enumerate(value.shape))


def _in_blocks(value: DTensor, inner: torch.Tensor) -> Sharded:
    """A list with one element for each block of the local part, which is a run of rows of the outer tensor."""
    local = local_of(value)
    cuts = [p for p in value.placements if not isinstance(p, Replicate)]
    if len(cuts) > 1 or any(getattr(p, "dim", None) != 0 or hasattr(p, "split_factor") for p in cuts):
        raise InvalidState(
            f"a DTensor of {type(local).__name__} is cut by {value.placements}: its blocks lie in rows, so only a cut "
            "along dimension 0, over one dimension of the mesh, can be saved. Keep this state in PerRank instead."
        )
    block = local.numel() // max(inner.numel(), 1)
    first = _first_row(value) * (value.numel() // max(value.shape[0], 1))
    if inner.ndim != 1 or not block or block * inner.numel() != local.numel() or value.numel() % block or first % block:
        raise InvalidState(
            f"a DTensor of {type(local).__name__} is cut within a block of {block} elements, so its ranks hold no "
            "parts of one state. Use a number of ranks (or rows) for which every rank has whole blocks."
        )
    return Sharded((value.numel() // block,), {(first // block,): inner})


def _first_row(value: DTensor) -> int:
    """The row of the outer tensor at which the local part begins."""
    mesh = value.device_mesh
    at = next((i for i, p in enumerate(value.placements) if not isinstance(p, Replicate)), None)
    if at is None:
        return 0
    rows = -(-value.shape[0] // mesh.size(at))  # as torch cuts: parts of this many rows, the last ones shorter
    return min(rows * mesh.get_local_rank(at), value.shape[0])
