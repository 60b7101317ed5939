"""A file of `torch.save`, written as a stream: first the pickle, made from stand-ins, then the tensors in blocks."""

import io
import pickle
from collections import Counter, OrderedDict
from typing import Any, NamedTuple

import numpy as np
import torch

from milepost.core.box import Box, Shape
from milepost.core.dtypes import DTYPES
from milepost.core.tree import is_namedtuple
from milepost.data.late import LateBox, LateReader
from milepost.errors import InvalidRequest
from milepost.formats.read.content import STORAGES
from milepost.formats.write.content import Content, Data
from milepost.formats.write.files import FolderPlan
from milepost.formats.write.zip import ArchiveLayout
from milepost.state.tensors import check_plain, dtype_name, from_numpy, torch_dtype

_PROTOCOL = 2  # as torch.save
# Torch's older types have storage classes of their own; newer types are stored as bytes, with the dtype beside them.
_CLASSES = {dtype: name for name, dtype in STORAGES.items() if name != "UntypedStorage"}


class TensorStub:
    """A stand-in for a tensor whose bytes are written as a separate storage."""

    def __init__(self, dtype: str, shape: Shape, data: Data) -> None:
        self.dtype, self.shape, self.data = dtype, shape, data

    @classmethod
    def of(cls, tensor: torch.Tensor, key: str) -> "TensorStub":
        """A tensor in memory."""
        tensor = check_plain(tensor, key)
        return cls(dtype_name(tensor.dtype, key), tuple(tensor.shape), tensor)

    @classmethod
    def late(cls, reader: LateReader, key: str, dtype: str, shape: Shape) -> "TensorStub":
        """A tensor of the source, read when it is written."""
        return cls(dtype, shape, LateBox(reader, key, dtype, Box.whole(shape)))


class _StorageStub(NamedTuple):
    kind: Any
    number: int
    elements: int


class _Pickler(pickle.Pickler):
    """Writes for stand-ins what torch's own pickler writes for tensors."""

    def __init__(self, file: io.BytesIO) -> None:
        super().__init__(file, protocol=_PROTOCOL)
        self.storages: list[Data] = []

    def persistent_id(self, obj: Any) -> Any:
        if type(obj) is _StorageStub:
            return ("storage", obj.kind, str(obj.number), "cpu", obj.elements)
        return None

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, np.ndarray):
            obj = from_numpy(obj, "an array")
        if isinstance(obj, torch.Tensor):
            obj = TensorStub.of(obj, "a tensor")
        return self._rebuilt(obj) if isinstance(obj, TensorStub) else NotImplemented

    def _rebuilt(self, stored: TensorStub) -> Any:
        """The call that rebuilds such a tensor in torch."""
        box, known = Box.whole(stored.shape), _CLASSES.get(stored.dtype)
        size = DTYPES[stored.dtype].size_bytes
        kind = getattr(torch, known) if known else torch.UntypedStorage
        storage = _StorageStub(kind, len(self.storages), box.elements * (1 if known else size))
        self.storages.append(stored.data)
        hooks: OrderedDict[Any, Any] = OrderedDict()
        arguments = (storage, 0, stored.shape, _strides(stored.shape), False, hooks)
        if known:
            return torch._utils._rebuild_tensor_v2, arguments  # noqa: SLF001  # what torch.save names in its files
        return torch._utils._rebuild_tensor_v3, (*arguments, torch_dtype(stored.dtype))  # noqa: SLF001


def _strides(shape: Shape) -> Shape:
    """Strides as torch computes them: an empty dimension counts as one."""
    strides, step = [], 1
    for length in reversed(shape):
        strides.append(step)
        step *= max(length, 1)
    return tuple(reversed(strides))


def archive_of(value: Any, base: int = 0) -> ArchiveLayout:
    """The archive that `torch.save(value)` would write; tensors may be `TensorStub` stand-ins."""
    buffer = io.BytesIO()
    pickler = _Pickler(buffer)
    pickler.dump(value)
    return ArchiveLayout(base, buffer.getvalue(), pickler.storages)


def torch_plan(name: str, state: Any) -> FolderPlan:
    """One file that `torch.load(..., weights_only=True)` reads."""
    archive = archive_of(state)
    content = Content(name, archive.size_bytes, archive.pieces, [archive])
    return FolderPlan([content], [], lambda found: found == name)


def plain_value(value: Any) -> Any:
    """The value without types that other programs do not know: named tuples, default dicts and numpy's numbers."""
    if isinstance(value, np.generic):
        return value.item()
    if is_namedtuple(value) or type(value) is tuple:
        return tuple(plain_value(item) for item in value)
    if type(value) is list:
        return [plain_value(item) for item in value]
    if isinstance(value, dict):
        kind = next((known for known in (OrderedDict, Counter) if isinstance(value, known)), dict)
        return kind({plain_value(key): plain_value(item) for key, item in value.items()})
    return value


def refuse_unreadable(values: dict[str, Any]) -> None:
    """Raise InvalidRequest, listing all keys, for values that `torch.load(..., weights_only=True)` would not read."""
    problems = []
    for key, value in values.items():
        try:
            buffer = io.BytesIO()
            torch.save(value, buffer)
            buffer.seek(0)
            torch.load(buffer, weights_only=True)
        except Exception as error:  # noqa: BLE001  # whatever it is, this value cannot be kept
            problems.append(f"{key!r} ({type(value).__name__}): {str(error).splitlines()[0][:200]}")
    if problems:
        listed = "\n  ".join(problems[:50])
        raise InvalidRequest(
            f"{len(problems)} values cannot be read by torch.load(weights_only=True):\n  {listed}\n"
            "Leave them out: rename={key: None}."
        )
