"""What a load reads, and where it goes: placements, their runs in a file, and jobs of some runs each."""

from operator import add, mul
from typing import NamedTuple

import msgspec
import torch

from milepost.core.box import Shape, boxes_of_run, strides_of
from milepost.core.division import PlannedRead
from milepost.core.dtypes import DTYPES
from milepost.data.conversion import copy_checked
from milepost.data.memory import TypedViews, as_bits
from milepost.data.read import VerifiedFile
from milepost.errors import StateMismatch
from milepost.state.tensors import dtype_name, torch_dtype


class Placement(msgspec.Struct, frozen=True, gc=False):
    """A planned read, the saved dtype, and the memory that takes the result. `alone`: no other rank reads the same.

    `order`: which dimension of the tensor each dimension of the read is, where they were turned around.
    """

    item: PlannedRead
    dtype: str
    target: torch.Tensor
    size_bytes: int
    alone: bool = False
    order: Shape | None = None

    def index(self, at: Shape) -> Shape:
        """An index in the order of the tensor's own dimensions."""
        return at if self.order is None else tuple(at[self.order.index(d)] for d in range(len(at)))


def placement_of(item: PlannedRead, dtype: str, target: torch.Tensor, alone: bool = False) -> Placement:
    """The read of `item` into `target`."""
    return Placement(item, dtype, target, item.box.elements * DTYPES[dtype].size_bytes, alone)


class PlacementRun(NamedTuple):
    """One placement in its file: bytes start..stop span it, and where it lies in one run, `address` is its memory."""

    start: int
    stop: int
    address: int
    origin: int
    alone: bool
    placement: Placement
    region: "Region | None"


class ReadJob(NamedTuple):
    """Bytes start..stop of the data of a file, and all that they hold of what is wanted."""

    file: VerifiedFile
    start: int
    stop: int
    pieces: list[PlacementRun]


def is_cold(job: ReadJob) -> bool:
    """Whether to read a job past the page cache. Data that other ranks of this machine also read goes through it."""
    alone = all(piece.alone for piece in job.pieces)
    return alone and job.file.reader.is_cold(job.file.header.header_bytes + job.start, job.stop - job.start)


def copy_box(placement: Placement, source: torch.Tensor, *, lossy: bool) -> None:
    """Copy the box of a placement, as it was saved, into its target. Raises StateMismatch; see `place_all`."""
    target = placement.target
    same = target.dtype == source.dtype and not target.is_conj() and not target.is_neg()
    with torch.inference_mode(target.is_inference()):  # else torch refuses to change such a tensor
        if same:
            as_bits(target).copy_(as_bits(source))
        else:
            _convert(placement, source, target, placement.item.box.offset, lossy=lossy)


def _convert(placement: Placement, source: torch.Tensor, target: torch.Tensor, offset: Shape, *, lossy: bool) -> None:
    """Copy a box at `offset` of the whole tensor into a target of another type. Raises StateMismatch; see `place_all`.

    The offset is in the order of the dimensions of the placement.
    """
    wanted = dtype_name(target.dtype, placement.item.key)
    if lossy:
        target.copy_(source)
        return
    wrong = copy_checked(source, target, placement.dtype, wanted)
    if wrong is not None:
        at = tuple(a + b for a, b in zip(offset, wrong, strict=True))
        raise StateMismatch(
            f"{placement.item.key!r} was saved as {placement.dtype} and the target is {wanted}, which cannot hold the "
            f"value {source[wrong].item()} at index {placement.index(at)}.\n  The state is partly filled. Give the "
            'target a type that holds every value, or pass convert_dtype="lossy".'
        )


class Region:
    """A region of an entry whose target is strided, on a device, or of another type: filled by copies from a block."""

    def __init__(self, placement: Placement, lossy: bool, in_one_run: bool) -> None:
        item, target = placement.item, placement.target
        self._placement, self._lossy, self._in_one_run = placement, lossy, in_one_run
        self._dtype = torch_dtype(placement.dtype)
        self._size = DTYPES[placement.dtype].size_bytes
        self._shape, self._strides = item.source.shape, strides_of(item.source.shape)
        self._wanted = item.box.within(item.source)
        same = target.dtype == self._dtype and not target.is_conj() and not target.is_neg()
        # Bit by bit where the types are the same: torch cannot copy all of its types.
        self._target = as_bits(target) if same else target
        self._read_as = self._target.dtype if same else self._dtype
        self._same = same
        self._run: torch.Tensor | None = None
        self._knows_run = False

    @property
    def is_exact(self) -> bool:
        """Whether the bits are copied as they are."""
        return self._same

    @property
    def run(self) -> torch.Tensor | None:
        """The bytes of the target, where they lie as in the file, in one run; None where they do not."""
        if not self._knows_run:  # two threads may find it at once; a `cached_property` has one lock for all regions
            self._run, self._knows_run = self._bytes_in_order(), True
        return self._run

    def _bytes_in_order(self) -> torch.Tensor | None:
        target = self._target
        if not self._same or not self._in_one_run or not target.is_contiguous() or target.is_inference():
            return None
        return target.detach().as_strided((target.numel(),), (1,)).view(torch.uint8)

    def fill(self, block: TypedViews, at: int, start: int, stop: int) -> int:
        """Copy the region's part of bytes start..stop of the entry, which lie at `at` in the block. Gives its size."""
        # Workers are not in the caller's inference mode, and outside of it torch refuses to change such a tensor.
        with torch.inference_mode(self._target.is_inference()):
            return self._fill(block, at, start, stop)

    def _fill(self, block: TypedViews, at: int, start: int, stop: int) -> int:
        count = 0
        first = start // self._size
        source = block.as_type(self._read_as)
        base = source.storage_offset() + at // self._size - first
        for box in boxes_of_run(self._shape, first, stop // self._size):
            part = box.intersect(self._wanted)
            if part is not None:
                offset = base + sum(map(mul, part.offset, self._strides))
                target = self._target[part.within(self._wanted).slices]
                values = source.as_strided(part.shape, self._strides, offset)
                if self._same:
                    target.copy_(values)
                else:
                    where = tuple(map(add, self._placement.item.source.offset, part.offset))
                    _convert(self._placement, values, target, where, lossy=self._lossy)
                count += part.elements
        return count * self._size
