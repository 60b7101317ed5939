"""Where the entries of a foreign file lie: in one run, strided, or in an item that must be unpacked first."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from milepost.core.box import Box, Shape, boxes_of_run
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.limits import KIB
from milepost.formats.read.archive import Archive
from milepost.formats.read.content import Strided, located, order_of

GAP_BYTES = 32 * KIB
"""A gap of at most this size between two pieces is read too: that is faster than another request."""
_MAX_SPARSE = 4
"""A strided region is read in one request if it spans at most this many times its own elements."""
_HALVES = {"complex32": "<f2", "complex64": "<f4", "complex128": "<f8"}
_FLOATS = {"float16": "<f2", "float32": "<f4", "float64": "<f8"}


@dataclass(frozen=True, slots=True)
class Item:
    """A `torch.save` archive of one tensor in bytes offset..offset+length of a file, perhaps transformed as a whole."""

    offset: int
    length: int
    transforms: tuple[str, ...] = ()


class BackingStorage(NamedTuple):
    """The storage behind a view: where it starts (counted as for the entry), its size, and the CRC-32 of its bytes."""

    start: int
    size_bytes: int
    crc: int


@dataclass(frozen=True, slots=True)
class Spot:
    """Where the bytes of an entry start, in its file or (`inside`) in an item that must be unpacked first.

    `order`: the dimensions from the outermost to the innermost, None for row-major order. `strided`: set where the
    entry does not lie in one run. `crc`: the CRC-32 of its bytes, 0 if there is none. `storage`: the storage that has a
    checksum instead, where the entry is only a part of it, or holds its bytes in another form.
    """

    at: int
    order: Shape | None = None
    strided: Strided | None = None
    crc: int = 0
    inside: Item | None = None
    storage: BackingStorage | None = None


@dataclass(frozen=True, slots=True)
class FileEntry:
    """One entry: its name, key, type and shape, and where it lies, or the archive that says so."""

    name: str
    key: str
    dtype: str
    shape: Shape
    where: Spot | Item

    @property
    def size_bytes(self) -> int:
        """How many bytes it has in memory."""
        return size_bytes(self.dtype, self.shape)


def spot_of(archive: Archive, tensor: Strided, what: str, inside: Item | None = None) -> Spot:
    """Where a tensor of an archive lies."""
    start, crc = located(archive, tensor, what)
    size, order = DTYPES[tensor.dtype].size_bytes, order_of(tensor)
    storage = BackingStorage(start, tensor.storage.elements * DTYPES[tensor.storage.dtype].size_bytes, crc)
    at = start + tensor.offset * size
    if order is None:
        return Spot(at, strided=tensor, inside=inside, storage=storage)
    covers = tensor.offset == 0 and size_bytes(tensor.dtype, tensor.shape) == storage.size_bytes
    in_rows = order == tuple(range(len(order)))
    return Spot(at, None if in_rows else order, None, crc if covers else 0, inside, None if covers else storage)


def gather(read: Callable[[int, int], bytes], spot: Spot, start: int, stop: int) -> bytes:
    """Bytes start..stop of a strided tensor, in row-major order. They start and end with whole elements."""
    tensor = spot.strided
    assert tensor is not None
    size = DTYPES[tensor.dtype].size_bytes
    parts = []
    for box in boxes_of_run(tensor.shape, start // size, stop // size):
        array = np.empty(box.shape, dtype=f"V{size}")
        _gather_box(read, spot, box, array, size)
        parts.append(array.tobytes())
    data = b"".join(parts)
    if tensor.conj or tensor.neg:
        numbers = np.frombuffer(data, dtype={**_HALVES, **_FLOATS}[tensor.dtype]).copy()
        if tensor.neg:
            np.negative(numbers, out=numbers)
        if tensor.conj:
            np.negative(numbers[1::2], out=numbers[1::2])
        data = numbers.tobytes()
    return data


def _gather_box(read: Callable[[int, int], bytes], spot: Spot, box: Box, into: Any, size: int) -> None:
    assert spot.strided is not None
    strides = spot.strided.strides
    repeated = [dim for dim, n in enumerate(box.shape) if n > 1 and strides[dim] == 0]
    if repeated:  # read once, or a small file could cause any number of reads
        for dim in repeated:
            box = box.narrow(dim, 0, 1)
        once = np.empty(box.shape, dtype=f"V{size}")
        _gather_box(read, spot, box, once, size)
        into[...] = once
        return
    first = sum(a * s for a, s in zip(box.offset, strides, strict=True))
    span = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
    if span <= max(_MAX_SPARSE * box.elements, GAP_BYTES // size):
        data = np.frombuffer(read(spot.at + first * size, span * size), dtype=f"V{size}")
        into[...] = np.lib.stride_tricks.as_strided(data, box.shape, [s * size for s in strides])
        return
    dim = max((d for d, n in enumerate(box.shape) if n > 1), key=lambda d: strides[d])
    half = box.shape[dim] // 2
    before, after = (slice(None),) * dim + (slice(0, half),), (slice(None),) * dim + (slice(half, None),)
    _gather_box(read, spot, box.narrow(dim, 0, half), into[before], size)
    _gather_box(read, spot, box.narrow(dim, half, box.shape[dim] - half), into[after], size)
