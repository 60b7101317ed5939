"""What a piece of numbers adds up to: conversion to float32 or float64, sums, extremes, histograms.

No call here uses threads of its own: those of a save are enough, and torch's and BLAS's threads would wait for each
other.
"""

import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from milepost.core.dtypes import DTYPES, INTEGERS
from milepost.core.statistics import UNIT_BIN
from milepost.state.tensors import torch_dtype

Array = npt.NDArray[Any]
PIECE = 1 << 18
"""How many numbers are converted at once: to 1 MiB of float32, which about stay in the cache of a core."""
_ROW = 1 << 13
"""How many numbers are added in float32; then these sums in float64. OpenBLAS starts threads for more than 10,000."""
_SERIAL = 1 << 15
"""How many numbers torch converts without starting threads."""
_NARROW = {"bool", "int8", "uint8"}
"""Integers that float32 holds exactly, and whose sums over a row it holds too."""
HALVES: dict[str, int] = {"bfloat16": 0x7F80, "float16": 0x7C00}
"""Floating types of 16 bits, with the bits of infinity."""
AS_THEY_ARE = {"float32", "float64"}
EXPONENTS: dict[str, tuple[float, float]] = {"f": (2.0**-50, 2.0**50), "d": (2.0**-480, 2.0**480)}
"""Between these, squares neither overflow nor vanish, in float32 and in float64."""


class PieceSums(NamedTuple):
    """What a row has, of one piece."""

    nan: int = 0
    inf: int = 0
    min: float = math.inf
    max: float = -math.inf
    total: float = 0.0
    squares: float = 0.0
    scale: int = 0


class Scratch:
    """Memory that is used again and again, and the numbers that are made in it."""

    def __init__(self) -> None:
        self._narrow = np.empty(PIECE, np.float32)
        self._wide = np.empty(0, np.float64)
        self._squares = np.empty(0, np.float32)
        self._tables: dict[str, Array] = {}

    def widened(self, data: Array, dtype: str, *, in_order: bool) -> Array:
        """At most a piece of numbers as float32 or float64, in memory that the next call may overwrite."""
        if dtype in ("float32", "float64"):
            return data.view(dtype)
        count = len(data) // DTYPES[dtype].size_bytes
        if dtype in INTEGERS and dtype not in _NARROW:
            if not len(self._wide):
                self._wide = np.empty(PIECE, np.float64)
            np.copyto(self._wide[:count], data.view(dtype))
            return self._wide[:count]
        numbers = self._narrow[:count]
        if dtype == "bfloat16":
            _widen_bfloat16(data.view(np.uint16), numbers.view(np.uint32), in_order=in_order)
        elif dtype.startswith("float8"):
            np.take(self._table(dtype), data, out=numbers, mode="clip")
        else:
            _convert(data, dtype, numbers)
        return numbers

    def is_finite(self, data: Array, dtype: str) -> bool:
        """Whether no number is NaN or infinite. May say no where a sum overflows."""
        if dtype in HALVES:
            return _extremes(data.view(np.uint16), HALVES[dtype]) is not None
        return math.isfinite(_total(self.widened(data, dtype, in_order=False)))

    def sums_of_halves(self, data: Array, dtype: str) -> PieceSums | None:
        """The sums of floating numbers of 16 bits; None if they are others, or take a closer look."""
        extremes = _extremes(data.view(np.uint16), HALVES[dtype]) if dtype in HALVES else None
        if extremes is None:
            return None
        low, high = self.widened(np.array(extremes, "<u2").view(np.uint8), dtype, in_order=True).tolist()
        least, most = EXPONENTS["f"]
        if not least < max(-low, high) < most:
            return None
        total = squares = 0.0
        for piece in cut(data, 2 * PIECE):
            numbers = self.widened(piece, dtype, in_order=False)
            total += _total(numbers)
            squares += _total_of_squares(numbers)
        return PieceSums(0, 0, low, high, total, squares)

    def squares(self, like: Array) -> Array:
        """Memory for as many numbers of this type."""
        if len(self._squares) < len(like) or self._squares.dtype != like.dtype:
            self._squares = np.empty(PIECE, like.dtype)
        return self._squares[: len(like)]

    def _table(self, dtype: str) -> Array:
        """The value of each byte: torch converts these types one number at a time."""
        if dtype not in self._tables:
            values = np.empty(256, np.float32)
            _convert(np.arange(256, dtype=np.uint8), dtype, values)
            self._tables[dtype] = values
        return self._tables[dtype]


def cut(data: Array, size: int) -> Iterator[Array]:
    """Parts of this size; the last may be shorter."""
    return (data[at : at + size] for at in range(0, len(data), size))


def _extremes(bits: Array, infinity: int) -> tuple[int, int] | None:
    """The bits of the least and of the largest number; None if one of them is not finite.

    As signed integers, the positive numbers are in order and above all others. Without the sign, the negative ones are
    above all others, the least of them on top.
    """
    top, bottom = int(np.maximum.reduce(bits.view(np.int16))), int(np.maximum.reduce(bits))
    if top >= infinity or bottom >= 0x8000 + infinity:
        return None
    if top < 0 or bottom < 0x8000:  # all of one sign
        nearest = int(np.minimum.reduce(bits))
        return (bottom, nearest) if top < 0 else (nearest, top)
    return bottom, top


def _widen_bfloat16(halves: Array, bits: Array, *, in_order: bool) -> None:
    """The same numbers as float32: their bits are the upper halves."""
    if in_order or len(halves) % 2:
        np.copyto(bits, halves)
        np.left_shift(bits, np.uint32(16), out=bits)
        return
    words, middle = halves.view(np.uint32), len(halves) // 2  # two in each word, which is faster
    np.bitwise_and(words, np.uint32(0xFFFF0000), out=bits[:middle])
    np.left_shift(words, np.uint32(16), out=bits[middle:])


def _convert(data: Array, dtype: str, numbers: Array) -> None:
    source, target = torch.from_numpy(data).view(torch_dtype(dtype)), torch.from_numpy(numbers)
    parts = zip(torch.split(target, _SERIAL), torch.split(source, _SERIAL), strict=True)
    for some, other in parts:
        some.copy_(other)


def sums_of_numbers(numbers: Array) -> PieceSums:
    """The sums of some numbers."""
    low, high = float(np.minimum.reduce(numbers)), float(np.maximum.reduce(numbers))
    if math.isfinite(low) and math.isfinite(high):
        return _finite_sums(numbers, low, high)
    nan, inf = int(np.count_nonzero(np.isnan(numbers))), int(np.count_nonzero(np.isinf(numbers)))
    rest = numbers[np.isfinite(numbers)]
    if not len(rest):
        return PieceSums(nan, inf)
    return _finite_sums(rest, float(rest.min()), float(rest.max()))._replace(nan=nan, inf=inf)


def _finite_sums(numbers: Array, low: float, high: float) -> PieceSums:
    largest, scale = max(-low, high), 0
    if not largest:
        return PieceSums(min=low, max=high)
    least, most = EXPONENTS[numbers.dtype.char]
    if not least < largest < most:
        numbers = numbers.astype(np.float64)
        least, most = EXPONENTS["d"]
        if not least < largest < most:
            scale = math.frexp(largest)[1]
            numbers = np.ldexp(numbers, -scale)
    return PieceSums(0, 0, low, high, _total(numbers), _total_of_squares(numbers), scale)


def _total(numbers: Array) -> float:
    whole = len(numbers) // _ROW * _ROW
    rows = np.einsum("ij->i", numbers[:whole].reshape(-1, _ROW))
    return float(rows.sum(dtype=np.float64) + numbers[whole:].sum(dtype=np.float64))


def _total_of_squares(numbers: Array) -> float:
    whole = len(numbers) // _ROW * _ROW
    rows, rest = numbers[:whole], numbers[whole:]
    squares = np.matmul(rows.reshape(-1, 1, _ROW), rows.reshape(-1, _ROW, 1))
    return float(squares.sum(dtype=np.float64)) + float(rest.dot(rest))


def histogram_of(numbers: Array) -> tuple[Array, Array]:
    """The bins of these numbers (see `TensorStatistics`), and how many are in each."""
    wide = numbers.dtype == np.float64
    bits, shift = (numbers.view(np.uint64), 52) if wide else (numbers.view(np.uint32), 23)
    half = 2048 if wide else 256  # exponents; with the sign, twice as many
    counts = np.bincount((bits >> bits.dtype.type(shift)).astype(np.int64), minlength=2 * half)
    counts[half - 1] = counts[-1] = 0  # NaN and infinity
    counts[0] = counts[half] = 0  # zeros, and numbers too small for an exponent of their own
    first = UNIT_BIN - (1023 if wide else 127)
    codes = np.flatnonzero(counts)
    bins = np.where(codes < half, codes + first, -(codes - half + first))
    small = numbers[np.abs(numbers) < np.finfo(numbers.dtype).tiny]
    if len(small):
        exponents = np.frexp(small)[1] - 1 + UNIT_BIN
        others = np.where(small == 0, 0, np.where(small > 0, exponents, -exponents))
        found, found_counts = np.unique(others, return_counts=True)
        return np.concatenate([bins, found]), np.concatenate([counts[codes], found_counts])
    return bins, counts[codes]
