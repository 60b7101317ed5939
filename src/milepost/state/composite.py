"""Tensors that are made of other tensors: sparse, quantized, jagged, and subclasses with `__tensor_flatten__`.

Each is saved as its parts, which are plain tensors and values. A kind of torch's own is built again from them, checked.
A subclass is built again only from a class that the caller has: that of the target, or one of `types`. Nothing that a
checkpoint names is imported or called.
"""

import re
import warnings
from collections.abc import Callable
from typing import Any

import torch
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch

from milepost.core.tree import Parts
from milepost.errors import CheckpointDamaged, CheckpointError, InvalidState, UnsupportedFormat
from milepost.state.composite_cuts import cut_parts, local_of, memory_of_cut
from milepost.state.self_described import is_self_described
from milepost.state.tensors import is_sharded_tensor
from milepost.state.values import Codec

_PLAIN = (torch.Tensor, torch.nn.Parameter)
_COMPRESSED = {
    torch.sparse_csr: ("sparse_csr", "crow_indices", "col_indices"),
    torch.sparse_csc: ("sparse_csc", "ccol_indices", "row_indices"),
    torch.sparse_bsr: ("sparse_bsr", "crow_indices", "col_indices"),
    torch.sparse_bsc: ("sparse_bsc", "ccol_indices", "row_indices"),
}
_LAYOUTS = {name: (layout, compressed, plain) for layout, (name, compressed, plain) in _COMPRESSED.items()}
_QUANTIZED = {torch.qint8: "int8", torch.quint8: "uint8", torch.qint32: "int32"}
_SCHEMES = (torch.per_tensor_affine, torch.per_channel_affine)
_ADDRESS = re.compile(r" at 0x[0-9a-f]+")
_CUT = "cut over ranks, by a DTensor"
_GRADIENT = re.compile(r"'requires_grad': (True|False)")


def is_composite(value: Any) -> bool:
    """Whether this is a tensor that is saved as its parts."""
    # Most tensors, of which a state may have very many.
    plain = type(value) in _PLAIN and value.layout is torch.strided and not value.is_quantized
    return not plain and _has_parts(value)


def _has_parts(value: Any) -> bool:
    if not isinstance(value, torch.Tensor) or is_lazy(value) or is_sharded_tensor(value):
        return False
    if isinstance(value, DTensor):
        local = local_of(value)
        return type(local) not in _PLAIN and is_composite(local) and kind_of(local) == "subclass"
    if type(value).__name__ == "AsyncCollectiveTensor" or is_self_described(value):
        return False
    if value.layout is torch.sparse_coo or value.layout in _COMPRESSED:
        return True
    if value.is_quantized:
        return value.dtype in _QUANTIZED and value.qscheme() in _SCHEMES
    return bool(_python_dispatch.is_traceable_wrapper_subclass(value))


def kind_of(value: torch.Tensor) -> str:
    """The word for this kind of tensor."""
    if isinstance(value, DTensor):
        return "subclass"
    if value.layout is torch.sparse_coo:
        return "sparse_coo"
    if value.layout in _COMPRESSED:
        return _COMPRESSED[value.layout][0]
    if value.is_quantized:
        return "quantized"
    return "jagged" if value.is_nested else "subclass"


def parts_of(value: torch.Tensor) -> Parts:
    """The parts of a tensor, by name. Tensors among them share its memory, except those of a quantized tensor."""
    kind = kind_of(value)
    return Parts(kind, _TAKE_APART[kind](value))


def _coo_parts(value: torch.Tensor) -> dict[str, Any]:
    value = value.detach()
    coalesced = value.is_coalesced()
    return {
        "indices": value._indices(),  # noqa: SLF001  # the public name refuses tensors that are not coalesced
        "values": value._values(),  # noqa: SLF001
        "shape": tuple(value.shape),
        "is_coalesced": coalesced,
    }


def _compressed_parts(value: torch.Tensor) -> dict[str, Any]:
    value = value.detach()
    _, compressed, plain = _COMPRESSED[value.layout]
    indices = {name: getattr(value, name)() for name in (compressed, plain)}
    return {**indices, "values": value.values(), "shape": tuple(value.shape)}


def _quantized_parts(value: torch.Tensor) -> dict[str, Any]:
    parts: dict[str, Any] = {"values": value.int_repr()}
    if value.qscheme() == torch.per_tensor_affine:
        return {**parts, "scale": value.q_scale(), "zero_point": value.q_zero_point(), "axis": None}
    scales, zero_points = value.q_per_channel_scales(), value.q_per_channel_zero_points()
    return {**parts, "scale": scales, "zero_point": zero_points, "axis": value.q_per_channel_axis()}


def _jagged_parts(value: Any) -> dict[str, Any]:
    value = value.detach()
    ragged = next(i for i, n in enumerate(value.shape) if not isinstance(n, int))
    return {
        "values": value.values(),
        "offsets": value.offsets(),
        "lengths": value.lengths(),
        "ragged_dim": ragged,
    }


def _subclass_parts(value: Any) -> dict[str, Any]:
    if isinstance(value, DTensor):
        whole = {"shape": tuple(value.shape), "stride": tuple(value.stride()), "tensors": cut_parts(value)}
        # What the class keeps beside its tensors may be about the local part, and differ from rank to rank.
        return {**_subclass_parts(local_of(value)), "context": None, "description": _CUT, **whole}
    names, context = value.__tensor_flatten__()
    return {
        "class": _class_name(type(value)),
        "context": context if _is_plain(context) else None,
        "description": described(context),
        "shape": tuple(map(int, value.shape)),
        "stride": tuple(map(int, value.stride())),
        "tensors": {name: getattr(value, name) for name in names},
    }


_TAKE_APART: dict[str, Callable[[Any], dict[str, Any]]] = {
    "sparse_coo": _coo_parts,
    **dict.fromkeys(_LAYOUTS, _compressed_parts),
    "quantized": _quantized_parts,
    "jagged": _jagged_parts,
    "subclass": _subclass_parts,
}


def _class_name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _is_plain(context: Any) -> bool:
    try:
        Codec().encode(context, "context")
    except InvalidState:
        return False
    return True


def described(context: Any) -> str:
    """What a subclass keeps beside its tensors, as text: equal for tensors of the same make."""
    return _GRADIENT.sub("'requires_grad'", _ADDRESS.sub("", repr(context)))[:4000]


def compose(parts: Parts, like: Any, codec: Codec, key: str) -> Any:
    """The tensor that the parts make up. `like`: the tensor of the target, or None.

    Raises CheckpointDamaged for parts that contradict each other, UnsupportedFormat for a subclass that neither the
    target nor `types` has.
    """
    try:
        if parts.kind == "subclass":
            return _subclass(parts, like, codec, key)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch calls these kinds a prototype, or deprecated
            made = _COMPOSE[parts.kind](parts)
    except CheckpointError:
        raise
    except (RuntimeError, ValueError, TypeError, KeyError, IndexError, AttributeError) as error:
        shown = str(error).splitlines()[0][:200] if str(error) else type(error).__name__
        raise CheckpointDamaged(f"{key!r} holds parts that do not make a {parts.kind} tensor: {shown}") from None
    if isinstance(like, torch.Tensor):
        made = made.to(like.device) if not like.is_meta else made
        made = torch.nn.Parameter(made, like.requires_grad) if isinstance(like, torch.nn.Parameter) else made
    return made


def composed_or_parts(parts: Parts, codec: Codec, key: str) -> Any:
    """The tensor that the parts make up; a dict of the parts for a subclass that the caller did not pass."""
    if parts.kind == "subclass" and codec.tensor_class(str(parts.get("class"))) is None:
        return dict(parts)
    return compose(parts, None, codec, key)


def _coo(parts: Parts) -> torch.Tensor:
    values = parts["values"]
    made = torch.sparse_coo_tensor(
        parts["indices"], values, parts["shape"], dtype=values.dtype, device=values.device, check_invariants=True
    )
    if parts["is_coalesced"]:
        again = made.coalesce()
        if not torch.equal(again.indices(), parts["indices"]):
            raise ValueError("its indices are not sorted")
        return again
    return made


def _compressed(parts: Parts) -> torch.Tensor:
    layout, compressed, plain = _LAYOUTS[parts.kind]
    values = parts["values"]
    return torch.sparse_compressed_tensor(
        parts[compressed],
        parts[plain],
        values,
        parts["shape"],
        layout=layout,
        dtype=values.dtype,
        device=values.device,
        check_invariants=True,
    )


def _quantized(parts: Parts) -> torch.Tensor:
    values, scale, zero_point, axis = parts["values"], parts["scale"], parts["zero_point"], parts["axis"]
    if axis is None:
        return torch._make_per_tensor_quantized_tensor(values, float(scale), int(zero_point))  # noqa: SLF001
    if not scale.shape == zero_point.shape == (values.shape[axis],) or axis < 0:
        raise ValueError(f"{tuple(scale.shape)} scales for {tuple(values.shape)} along dimension {axis}")
    return torch._make_per_channel_quantized_tensor(values, scale, zero_point, axis)  # noqa: SLF001


def _jagged(parts: Parts) -> torch.Tensor:
    values, offsets, lengths, ragged = parts["values"], parts["offsets"], parts["lengths"], parts["ragged_dim"]
    if not 1 <= ragged <= values.ndim or offsets.ndim != 1 or offsets.is_floating_point():
        raise ValueError("its offsets are not a list")
    steps = offsets.diff() if lengths is None else lengths
    ends = offsets[1:] if lengths is None else offsets[: len(lengths)] + lengths
    lowest, last = min(offsets.tolist(), default=0), max(ends.tolist(), default=0)
    if lowest < 0 or last > values.shape[ragged - 1] or min(steps.tolist(), default=0) < 0:
        raise ValueError("its offsets leave its values")
    return torch.nested.nested_tensor_from_jagged(values, offsets, lengths, jagged_dim=ragged)


_COMPOSE: dict[str, Callable[[Parts], torch.Tensor]] = {
    "sparse_coo": _coo,
    **dict.fromkeys(_LAYOUTS, _compressed),
    "quantized": _quantized,
    "jagged": _jagged,
}


def _subclass(parts: Parts, like: Any, codec: Codec, key: str) -> Any:
    tensors, name = parts["tensors"], str(parts["class"])[:200]
    if parts["description"] == _CUT and like is None:
        raise UnsupportedFormat(
            f"{key!r} is a {name} inside a DTensor, which loads only into one that is there. For an optimizer, make "
            "its state before the load: set the gradients to zeros, and call step() once with a learning rate of 0."
        )
    if isinstance(like, DTensor):
        own = _subclass_parts(like)
        differ = [part for part in ("class", "description", "shape") if own[part] != parts[part]]
        if differ or any(memory_of_cut(own["tensors"][part]) != memory_of_cut(tensors[part]) for part in tensors):
            was, now = ([one[part] for part in ("class", "shape", "description")] for one in (parts, own))
            raise InvalidState(f"{key!r} was saved as {was}, and the target is {now}, or is cut into other blocks.")
        return like  # its tensors were filled where they are
    if like is None:
        kind, context = codec.tensor_class(name), parts["context"]
        if kind is None or described(context) != parts["description"]:
            raise UnsupportedFormat(
                f"{key!r} is a {name}, a tensor made of other tensors. Load into one of this class, or pass the class: "
                f"types=[{name.rpartition('.')[2]}]. Without it, milepost.open(...).tree() gives its parts."
            )
        return kind.__tensor_unflatten__(tensors, context, torch.Size(parts["shape"]), tuple(parts["stride"]))
    names, context = like.__tensor_flatten__()
    if all(tensors[name] is getattr(like, name) for name in names):
        return like  # its tensors were filled where they are
    made = type(like).__tensor_unflatten__(tensors, context, like.size(), like.stride())
    return torch.nn.Parameter(made, like.requires_grad) if isinstance(like, torch.nn.Parameter) else made
