"""Data that is fetched when its block is written: what a planner makes, and what other checkpoint files hold."""

from collections.abc import Callable
from typing import NamedTuple, Protocol

import torch

from milepost.core.box import Box, boxes_of_run
from milepost.core.dtypes import DTYPES
from milepost.data.memory import Block, copy_run
from milepost.state.tensors import torch_dtype


class LateTensor:
    """A tensor that is made when it is needed, and not kept: what a planner gives for an item, or a part of that."""

    def __init__(self, make: Callable[[], torch.Tensor]) -> None:
        self._make = make

    def __getitem__(self, inside: tuple[slice, ...]) -> "LateTensor":
        return LateTensor(lambda: self.get()[inside])

    def get(self) -> torch.Tensor:
        """The tensor, made anew."""
        return self._make()


class Wanted(NamedTuple):
    """A box of a saved tensor, and the memory that it goes to."""

    key: str
    box: Box
    target: torch.Tensor


class LateReader(Protocol):
    """Where the elements of late boxes come from. Used by several threads at once."""

    def read(self, wanted: list[Wanted]) -> None:
        """Fill all targets. Raises CheckpointDamaged where the source is not what was saved."""


class LateBox(NamedTuple):
    """A box of a saved tensor that is read when it is written."""

    reader: LateReader
    key: str
    dtype: str
    box: Box

    @property
    def size_bytes(self) -> int:
        """How many bytes it holds."""
        return self.box.elements * DTYPES[self.dtype].size_bytes

    def wanted(self, low: int, high: int, block: Block, at: int) -> list[Wanted]:
        """The boxes that its bytes low..high form, with the part of the block, from `at` on, that each goes to."""
        size = DTYPES[self.dtype].size_bytes
        room, position = block.as_type(torch_dtype(self.dtype)), at // size
        found = []
        for box in boxes_of_run(self.box.shape, low // size, high // size):
            moved = Box(tuple(a + b for a, b in zip(box.offset, self.box.offset, strict=True)), box.shape)
            found.append(Wanted(self.key, moved, room[position : position + box.elements].view(box.shape)))
            position += box.elements
        return found


EntryData = torch.Tensor | LateTensor | LateBox


def ready(data: EntryData) -> torch.Tensor:
    """The tensor itself."""
    assert not isinstance(data, LateBox), "late boxes are read in parts, to bound memory"
    return data.get() if isinstance(data, LateTensor) else data


class BlockFill:
    """Fills one block. Tensors are copied at once; late boxes are read by `finish`, those of one reader together."""

    def __init__(self, block: Block) -> None:
        self._block = block
        self._wanted: dict[LateReader, list[Wanted]] = {}

    def add(self, data: torch.Tensor | LateBox, low: int, high: int, at: int) -> None:
        """Put bytes low..high of `data`, in row-major order, at `at` of the block. Elements are not cut."""
        if isinstance(data, LateBox):
            self._wanted.setdefault(data.reader, []).extend(data.wanted(low, high, self._block, at))
        else:
            copy_run(data, low, high, self._block, at)

    def finish(self) -> None:
        """Return when all bytes are in the block."""
        for reader, wanted in self._wanted.items():
            reader.read(wanted)
