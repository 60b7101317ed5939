"""Comparing two tensors by reading both, in pieces: for those that are cut differently, or of another format."""

from collections.abc import Iterator

import numpy as np
import numpy.typing as npt
import torch

from milepost.checkpoint import LazyTensor
from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.core.manifest import Tensor
from milepost.data.memory import view_of
from milepost.data.transfer import Meter
from milepost.inspection.sides import ComparedSide
from milepost.inspection.tables import ChangeTally

PIECE_BYTES = 32 * MIB


def compare_by_reading(left: ComparedSide, a: Tensor, right: ComparedSide, b: Tensor, meter: Meter) -> ChangeTally:
    """Compare two tensors of one dtype and shape, bit by bit."""
    tally = ChangeTally()
    for mine, theirs in pieces_of(left, a, right, b, PIECE_BYTES):
        first, second = _bytes(mine), _bytes(theirs)
        if not np.array_equal(first, second):
            for at in np.unique(np.flatnonzero(first != second) // BLOCK_BYTES).tolist():
                tally.add(min(BLOCK_BYTES, len(first) - at * BLOCK_BYTES))
        meter.add(len(first))
        meter.report()
    return tally


def pieces_of(
    left: ComparedSide, a: Tensor, right: ComparedSide, b: Tensor, piece_bytes: int
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Two tensors of one shape, piece by piece: regions of at most about `piece_bytes`."""
    mine, theirs = LazyTensor(left.files, a), LazyTensor(right.files, b)
    for region in _regions(left, a, right, b, piece_bytes):
        left.count_foreign(region.elements * DTYPES[a.dtype].size_bytes)
        right.count_foreign(region.elements * DTYPES[b.dtype].size_bytes)
        yield mine[region.slices], theirs[region.slices]


def _regions(left: ComparedSide, a: Tensor, right: ComparedSide, b: Tensor, piece_bytes: int) -> Iterator[Box]:
    """Regions along the boxes of the first; along whole boxes of the one that was transformed, which is read so."""
    widest = max(DTYPES[a.dtype].size_bytes, DTYPES[b.dtype].size_bytes)
    side, tensor = (left, a) if a.transforms or not b.transforms else (right, b)
    for item in read_plan(side.manifest, tensor, Box.whole(tensor.shape)):
        yield from [item.source] if tensor.transforms else item.source.slabs(max(piece_bytes // widest, 1))


def _bytes(data: torch.Tensor) -> npt.NDArray[np.uint8]:
    return np.frombuffer(view_of(data.contiguous()), dtype=np.uint8)
