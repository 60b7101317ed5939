"""The record of one rank's private values, kept in its own shard file. Pure."""

import msgspec

from milepost.core.box import check_shape
from milepost.core.dtypes import DTYPES
from milepost.core.manifest import Tensor, Value
from milepost.core.tree import Node, check_kinds, grow
from milepost.core.wire import Wire


class Private(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A tree whose root is a dict from key to private value; its tensors stand in the same file."""

    tree: tuple[Node, ...]
    values: tuple[Value, ...]
    tensors: tuple[Tensor, ...]


_RECORD = Wire.json(Private)


def read_private(data: bytes) -> Private:
    """Parse and check a record. Raises ValueError for anything that is not one."""
    record = _RECORD.unpack(data)
    check_kinds(record.tree)
    grow(record.tree)
    for tensor in record.tensors:
        check_shape(tensor.shape)
        if tensor.dtype not in DTYPES:
            raise ValueError(f"private tensor {tensor.key[:80]!r} has the unknown dtype {tensor.dtype[:40]!r}")
    known = {v.key for v in record.values} | {t.key for t in record.tensors}
    if any(node.kind in ("value", "tensor") and node.key not in known for node in record.tree):
        raise ValueError("its tree names a key that it does not hold")
    return record
