"""How far the numbers of two tensors are apart."""

import math
from typing import Any

import torch

from milepost.core.limits import MIB
from milepost.core.manifest import Tensor
from milepost.inspection.reading import pieces_of
from milepost.inspection.sides import ComparedSide

_PIECE_BYTES = 8 * MIB
"""Smaller than for a comparison of bytes: the numbers are compared as float64."""


def difference_of_numbers(left: ComparedSide, a: Tensor, right: ComparedSide, b: Tensor) -> dict[str, Any]:
    """The fields of a `TensorDifference` for two tensors of one shape. Empty for what cannot be subtracted.

    Numbers are subtracted as float64, complex ones as complex128, and their absolute differences counted.
    """
    most, squares, count, not_finite = 0.0, 0.0, 0, 0
    for mine, theirs in pieces_of(left, a, right, b, _PIECE_BYTES):
        try:
            first, second = _wide(mine), _wide(theirs)
        except (RuntimeError, NotImplementedError):
            return {}  # torch cannot convert from this type
        finite = torch.isfinite(first) & torch.isfinite(second)
        gap = torch.where(finite, first - second, torch.zeros((), dtype=first.dtype, device="cpu")).abs()
        odd = ~finite & (first != second) & ~(torch.isnan(first) & torch.isnan(second))
        most, count = max(most, float(gap.max())), count + int(finite.sum())
        squares, not_finite = squares + float((gap * gap).sum()), not_finite + int(odd.sum())
    rms = math.sqrt(squares / count) if count else 0.0
    return {"max_difference": most, "rms_difference": rms, "not_finite": not_finite}


def _wide(data: torch.Tensor) -> torch.Tensor:
    if data.is_complex():
        return data.to(torch.complex128)
    # By float32, because not every small float can be widened to float64 in one step.
    return data.to(torch.float32).to(torch.float64) if data.element_size() == 1 else data.to(torch.float64)
