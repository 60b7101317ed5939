"""Host memory as bytes: the blocks that workers copy through, and the bytes of tensors."""

import ctypes
import logging
from typing import Any

import torch

from milepost.core.box import boxes_of_run
from milepost.core.limits import KIB, PAGE_BYTES
from milepost.data.transfer import new_pages

_log = logging.getLogger("milepost")
_SMALL = 128 * KIB
_BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}
# This one keeps the interpreter's lock: for small copies, releasing it costs more than the copy.
_move_small = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.c_void_p, ctypes.c_void_p, ctypes.c_size_t)(
    ("memmove", ctypes.pythonapi)
)


def copy_bytes(to: int, source: int, count: int) -> None:
    """Copy memory between two addresses, which the caller keeps alive."""
    if count <= _SMALL:
        _move_small(to, source, count)
    else:
        ctypes.memmove(to, source, count)


def address_of(data: torch.Tensor) -> int:
    """The address of a tensor's bytes, in row-major order; 0 for one on a device, strided, conjugated or empty."""
    if data.is_cpu and data.is_contiguous() and not data.is_conj() and not data.is_neg():
        return int(data.data_ptr())
    return 0


def view_of(data: torch.Tensor) -> memoryview:
    """The bytes of a tensor that has an address."""
    # One run of memory, whatever its strides say: those of dimensions of size 1 mean nothing.
    array: Any = data.as_strided((data.numel(),), (1,)).view(torch.uint8).numpy()
    return memoryview(array)


def as_bits(data: torch.Tensor) -> torch.Tensor:
    """The same memory under a type that every kernel can copy: torch has none for some small floats."""
    return data.view(_BITS[data.element_size()])


class TypedViews:
    """Bytes that can be seen as numbers of any type."""

    def __init__(self, data: torch.Tensor) -> None:
        self.data = data
        self._typed: dict[torch.dtype, torch.Tensor] = {}

    def as_type(self, dtype: torch.dtype) -> torch.Tensor:
        """All of it as a flat tensor."""
        if dtype not in self._typed:
            whole = self.data.numel() // dtype.itemsize * dtype.itemsize
            self._typed[dtype] = self.data[:whole].view(dtype)
        return self._typed[dtype]


class Block(TypedViews):
    """Page-aligned memory of one worker; pinned where it serves a GPU, so that copies run at full speed.

    `is_pinned`: whether that was possible. It is not where the system limits locked memory.
    """

    def __init__(self, size_bytes: int, pinned: bool = False) -> None:
        memory = _pinned(size_bytes) if pinned else None
        self.is_pinned = memory is not None
        super().__init__(torch.frombuffer(new_pages(size_bytes), dtype=torch.uint8) if memory is None else memory)
        self.address = int(self.data.data_ptr())
        self.view = view_of(self.data)


def _pinned(size_bytes: int) -> torch.Tensor | None:
    """Pinned memory that is page-aligned; None, after a warning, where there is none."""
    try:
        # Not more at first: torch takes the next power of two. Some ways to pin memory do not align it.
        memory = torch.empty(size_bytes, dtype=torch.uint8, device="cpu", pin_memory=True)
        if memory.data_ptr() % PAGE_BYTES:
            memory = torch.empty(size_bytes + PAGE_BYTES, dtype=torch.uint8, device="cpu", pin_memory=True)
    except RuntimeError as error:
        _log.warning(
            "cannot pin %d bytes of host memory (%s); copies from and to GPUs will be slower. Is there a limit on "
            "locked memory (ulimit -l)?",
            size_bytes,
            str(error).partition("\n")[0],
        )
        return None
    shift = -memory.data_ptr() % PAGE_BYTES
    return memory[shift : shift + size_bytes]


def copy_run(data: torch.Tensor, low: int, high: int, block: Block, at: int) -> None:
    """Copy bytes low..high of a tensor, in row-major order, to `at` of a block. Elements are not cut."""
    address = address_of(data)
    if address:
        copy_bytes(block.address + at, address + low, high - low)
        return
    size = data.element_size()
    if data.is_contiguous():
        data = data.view(-1)
    for box in boxes_of_run(tuple(data.shape), low // size, high // size):
        part = data[box.slices]
        if not part.is_conj() and not part.is_neg():  # else torch works it out while it copies
            part = as_bits(part)
        room = block.as_type(part.dtype)[at // size : at // size + box.elements]
        room.view(box.shape).copy_(part)
        at += box.elements * size


def needs_pinned(tensors: "list[torch.Tensor]") -> bool:
    """Whether any of these is on a GPU that copies faster from and to pinned memory."""
    return torch.cuda.is_available() and any(tensor.is_cuda for tensor in tensors)
