"""Bytes and arrays as tensors over the same memory, so that nothing is copied whole on its way to or from a file."""

import ctypes
from typing import Any

import numpy as np
import torch

from milepost.core.manifest import TensorKind
from milepost.errors import UnsafeCheckpoint

_new_bytes = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class _Alias:
    """The memory of an array, as one that may be written: torch warns of any other, also where it is only read."""

    def __init__(self, array: "np.ndarray[Any, Any]", owner: object) -> None:
        self._owner = owner  # of the memory: kept alive
        interface = array.__array_interface__
        self.__array_interface__ = {**interface, "data": (interface["data"][0], False)}


def tensor_over(array: "np.ndarray[Any, Any]") -> torch.Tensor:
    """A tensor over the memory of an array without negative strides, which it keeps alive.

    Nobody may write into the tensor if the array is read-only: a memory map, or the bytes of an object of Python.
    """
    if array.flags.writeable or array.size == 0:
        return torch.from_numpy(array if array.flags.writeable else array.copy())
    return torch.from_numpy(np.asarray(_Alias(array, array)))


def tensor_of_bytes(data: bytes) -> torch.Tensor:
    """A tensor over the memory of `bytes`. Nobody may write into it."""
    return tensor_over(np.frombuffer(data, dtype=np.uint8))


def new_bytes(size: int, kind: TensorKind) -> tuple[Any, torch.Tensor]:
    """`bytes` or a `bytearray` of this size, not set to anything, and a tensor over its memory to read into.

    The memory must be filled before anybody else gets the object. Raises UnsafeCheckpoint where there is not enough.
    """
    try:
        if kind == "bytearray":
            array = bytearray(size)
            # Not by way of its buffer: a tensor that lives a little longer would keep others from appending to it.
            view = np.frombuffer(array, dtype=np.uint8)
            return array, torch.from_numpy(np.asarray(_Alias(view, array))) if size else tensor_of_bytes(b"")
        # As extensions of Python make `bytes`: with memory of their own, which is filled before anybody sees them.
        made: bytes = _new_bytes(None, size)
    except MemoryError as error:
        raise UnsafeCheckpoint(f"{size:,} bytes of one value cannot be had: {error}") from None
    return made, tensor_of_bytes(made)
