"""Copies between element types: a value that the target's type does not have is an error, not another value."""

from typing import Any

import numpy as np
import torch

from milepost.core.box import Box, Shape
from milepost.core.dtypes import COMPLEX, FLOATS, INTEGERS, conversion

_AT_ONCE = 1 << 16
"""How many elements are looked at together, so that the look takes little memory."""
_REDUCED = frozenset({torch.float16, torch.bfloat16, torch.float32, torch.float64})
"""The types in which torch finds the least and the greatest number."""


def copy_checked(source: torch.Tensor, target: torch.Tensor, saved: str, wanted: str) -> Shape | None:
    """Copy `source` into `target`. Gives the index of the first value that does not fit.

    `saved` and `wanted` are the names of their types. Precision may be lost. A number beyond the range of the target's
    type does not fit; nothing is copied of the piece in which it lies, and of those after it. What lies on a device is
    looked at in main memory.
    """
    looks = conversion(saved, wanted) != "fits"
    seen = source.cpu() if looks else source
    for slab in Box.whole(tuple(source.shape)).slabs(_AT_ONCE if looks else source.numel()):
        part = seen[slab.slices]
        if looks and not _surely_fits(part, wanted):
            wrong = _misfits(part, saved, wanted)
            if wrong.any():
                first = np.unravel_index(int(wrong.argmax()), part.shape)
                return tuple(int(i) + start for i, start in zip(first, slab.offset, strict=True))
        target[slab.slices].copy_(source[slab.slices])
    return None


def _surely_fits(part: torch.Tensor, wanted: str) -> bool:
    """Whether the least and the greatest of all numbers are in the range. With a NaN or an infinity: not surely."""
    if part.is_complex():
        part, wanted = torch.view_as_real(part), COMPLEX[wanted]
    if part.dtype not in _REDUCED:
        return False
    reach = FLOATS[wanted]
    edge = reach.largest + reach.half_step
    least, greatest = torch.aminmax(part)
    return -edge < least.item() and greatest.item() < edge


def _misfits(part: torch.Tensor, saved: str, wanted: str) -> Any:
    """For each element, whether it lies beyond the range of the wanted type."""
    if saved in INTEGERS:
        return _outside(part, saved, wanted)
    if part.is_complex():
        return _beyond(torch.view_as_real(part), COMPLEX[wanted]).any(dim=-1).numpy()
    return _beyond(part, wanted).numpy()


def _outside(part: torch.Tensor, saved: str, wanted: str) -> Any:
    # By numpy: torch compares no unsigned integers of more than one byte.
    numbers: Any = part.numpy()
    (low, high), (lowest, highest) = INTEGERS[wanted], INTEGERS[saved]
    wrong = np.zeros(numbers.shape, dtype=np.bool_)
    if low > lowest:
        wrong |= numbers < low
    if high < highest:
        wrong |= numbers > high
    return wrong


def _beyond(part: torch.Tensor, wanted: str) -> torch.Tensor:
    reach = FLOATS[wanted]
    size = part.to(torch.float64).abs()
    wrong = size >= reach.largest + reach.half_step
    return wrong & (size != torch.inf) if reach.has_infinity else wrong
