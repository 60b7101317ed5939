"""Statistics of all tensors of a step as columns of bytes that compress well. Pure."""

import math
import zlib
from collections.abc import Mapping
from typing import TYPE_CHECKING

from milepost.core.statistics import TensorStatistics

if TYPE_CHECKING:  # numpy takes as long to import as a whole command of the command line
    import numpy as np
    import numpy.typing as npt

COLUMNS = ("min", "max", "mean", "rms")
_KEPT_BITS = 12
"""Of the 23 bits after the first of a float32, in steps that are not shown exactly: about four digits."""


def statistics_columns(rows: Mapping[int, TensorStatistics], tensors: int, *, exact: bool) -> bytes:
    """`COLUMNS` of all tensors as float32, NaN where one is not known; each column as four planes of bytes.

    `rows`: by number of the tensor. Neighbouring tensors have like exponents, so that planes compress better.
    """
    import numpy as np  # noqa: PLC0415

    largest = float(np.finfo(np.float32).max)  # beyond it, a double would become infinite
    table = np.full((len(COLUMNS), tensors), np.nan, dtype=np.float32)
    places = list(rows)
    for column, name in enumerate(COLUMNS):
        known = [math.nan if (value := getattr(row, name)) is None else value for row in rows.values()]
        table[column, places] = np.clip(np.array(known, dtype=np.float64), -largest, largest)
    bits = table.view(np.uint32)
    if not exact:
        bits = _rounded(bits)
    return bits.astype("<u4").view(np.uint8).reshape(len(COLUMNS), tensors, 4).transpose(0, 2, 1).tobytes()


def _rounded(bits: "npt.NDArray[np.uint32]") -> "npt.NDArray[np.uint32]":
    """The nearest numbers whose low bits are zero. Numbers next to infinity and NaN stay what they are."""
    import numpy as np  # noqa: PLC0415

    low = 23 - _KEPT_BITS
    is_special = (bits >> 23) & 0xFF == 0xFF
    near_end = (bits >> low) & 0xFFFFF == 0xFF7FF
    rounded = (bits + np.uint32(1 << (low - 1))) & np.uint32(0xFFFFFFFF << low & 0xFFFFFFFF)
    return np.where(is_special | near_end, bits, rounded)


def packed_bytes(data: bytes) -> int:
    """How many bytes the page takes for this: deflated, as base64."""
    return -(-len(zlib.compress(data, 6)) * 4 // 3)
