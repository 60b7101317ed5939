"""The bytes of a new file: literal bytes and the elements of tensors, each at a known place, brought together by blocks.

The place of every byte is known before anything is written. So any part of a file can be written by any rank and
thread, within the memory of its own block, however large a tensor is.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from milepost.core.box import Box, boxes_of_run
from milepost.core.dtypes import DTYPES
from milepost.data.memory import Block, address_of, as_bits, copy_bytes, needs_pinned
from milepost.data.transfer import Meter, Transfer, run_all
from milepost.state.tensors import torch_dtype
from milepost.store import Writer

_THROUGH_THE_CACHE = 2
"""So many write to the page cache at once: one file has one lock there, and more threads only spin on it."""


class Wanted(NamedTuple):
    """A box of a saved tensor, and the memory that it goes to."""

    key: str
    box: Box
    target: torch.Tensor


class LateReader(Protocol):
    """Where the elements of late tensors come from. Used by several threads at once."""

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


Data = bytes | torch.Tensor | LateBox


def bytes_in(data: Data) -> int:
    """How many bytes a piece of content takes."""
    if isinstance(data, bytes):
        return len(data)
    return data.size_bytes if isinstance(data, LateBox) else data.numel() * data.element_size()


class FilePiece(NamedTuple):
    """Something that lies at `start` of a file. Tensors lie at multiples of their element size."""

    start: int
    size_bytes: int
    data: Data


class PieceSum(NamedTuple):
    """The CRC-32 of bytes `low..low+length` of the piece at `start` of a file; `closed`: what follows it is written."""

    start: int
    low: int
    length: int
    crc: int
    closed: bool


class Summed(Protocol):
    """A part of a file in which sums of the tensors' bytes stand: behind each, and all of them at the end."""

    base: int
    size_bytes: int

    def descriptor(self, start: int, crc: int) -> tuple[int, bytes]:
        """What follows the tensor that starts there, and where."""

    def directory(self, sums: Mapping[int, int]) -> tuple[int, bytes]:
        """What follows all tensors, whose sums are given by their start, and where."""


class Content:
    """All of a file but the sums of `archives`, the parts of it that want some. Those lie in order, and hold all tensors."""

    def __init__(self, name: str, size_bytes: int, pieces: list[FilePiece], archives: Sequence[Summed] = ()) -> None:
        self.name, self.size_bytes, self.archives = name, size_bytes, archives
        self._bases = [archive.base for archive in archives]
        self.pieces = sorted((piece for piece in pieces if piece.size_bytes), key=lambda piece: piece.start)
        self._starts = [piece.start for piece in self.pieces]

    def between(self, start: int, stop: int) -> list[FilePiece]:
        """The pieces that bytes start..stop touch."""
        first = max(bisect_right(self._starts, start) - 1, 0)
        found = self.pieces[first : bisect_right(self._starts, stop - 1)]
        return found[1:] if found and found[0].start + found[0].size_bytes <= start else found

    def archive_of(self, start: int) -> Summed:
        """The archive that holds the tensor which starts there."""
        return self.archives[bisect_right(self._bases, start) - 1]

    def fill(self, start: int, stop: int, block: Block) -> list[tuple[FilePiece, int, memoryview]]:
        """Bring bytes start..stop together at the beginning of a block. Gives (piece, low, bytes) of each tensor there."""
        late: dict[LateReader, list[Wanted]] = {}
        tensors = []
        for piece in self.between(start, stop):
            low, high = max(start - piece.start, 0), min(stop - piece.start, piece.size_bytes)
            at = piece.start + low - start
            if isinstance(piece.data, bytes):
                block.view[at : at + high - low] = piece.data[low:high]
                continue
            tensors.append((piece, low, block.view[at : at + high - low]))
            if isinstance(piece.data, LateBox):
                late.setdefault(piece.data.reader, []).extend(_wanted(piece.data, low, high, block, at))
            else:
                copy_run(piece.data, low, high, block, at)
        for reader, wanted in late.items():
            reader.read(wanted)
        return tensors


def _wanted(late: LateBox, low: int, high: int, block: Block, at: int) -> list[Wanted]:
    """The boxes that bytes low..high of a late tensor form, with the part of the block that each goes to."""
    size = DTYPES[late.dtype].size_bytes
    room, position = block.as_type(torch_dtype(late.dtype)), at // size
    found = []
    for box in boxes_of_run(late.box.shape, low // size, high // size):
        moved = Box(tuple(a + b for a, b in zip(box.offset, late.box.offset, strict=True)), box.shape)
        found.append(Wanted(late.key, moved, room[position : position + box.elements].view(box.shape)))
        position += box.elements
    return found


def copy_run(data: torch.Tensor, low: int, high: int, block: Block, at: int) -> None:
    """Copy bytes low..high of a tensor, in row-major order, to `at` of a block. Elements are not cut."""
    address = address_of(data)
    if address:
        copy_bytes(block.address + at, address + low, high - low)
        return
    size = data.element_size()
    for box in boxes_of_run(tuple(data.shape), low // size, high // size):
        part = data[box.slices]
        if not part.is_conj() and not part.is_neg():  # else torch works it out while it copies
            part = as_bits(part)
        room = block.as_type(part.dtype)[at // size : at // size + box.elements]
        room.view(box.shape).copy_(part)
        at += box.elements * size


def _sum_up(
    content: Content, start: int, stop: int, block: Block, tensors: list[tuple[FilePiece, int, memoryview]]
) -> Iterator[PieceSum]:
    """Put the sums of a block's tensors where they belong, as far as that is in the block. Gives those that are still needed."""
    found: dict[Summed, list[PieceSum]] = {}
    for piece, low, view in tensors:
        archive, crc, closed = content.archive_of(piece.start), zlib.crc32(view), False
        if len(view) == piece.size_bytes:
            closed = _put(block, start, stop, *archive.descriptor(piece.start, crc))
        found.setdefault(archive, []).append(PieceSum(piece.start, low, len(view), crc, closed))
    for archive, parts in found.items():
        whole = start <= archive.base and archive.base + archive.size_bytes <= stop
        if not whole or not _put(block, start, stop, *archive.directory({part.start: part.crc for part in parts})):
            yield from parts


def _put(block: Block, start: int, stop: int, at: int, data: bytes) -> bool:
    """Put bytes into a block that holds start..stop of a file, if they lie in it."""
    inside = start <= at and at + len(data) <= stop
    if inside:
        block.view[at - start : at - start + len(data)] = data
    return inside


def write_range(
    writer: Writer,
    content: Content,
    start: int,
    stop: int,
    transfer: Transfer,
    meter: Meter,
    seen: Callable[[int, memoryview], None] | None = None,
) -> list[PieceSum]:
    """Write bytes start..stop of a file, in blocks. Gives the sums that could not be put into their place by then.

    `seen` is called with each block and its position before it is written, from any thread.
    """
    sums: list[PieceSum] = []
    pieces = content.between(start, stop)
    pinned = needs_pinned([piece.data for piece in pieces if isinstance(piece.data, torch.Tensor)])

    def make_worker() -> Callable[[int], None]:
        block = Block(min(transfer.block_bytes, stop - start), pinned)

        def write(position: int) -> None:
            end = min(position + transfer.block_bytes, stop)
            tensors = content.fill(position, end, block)
            if content.archives:
                sums.extend(_sum_up(content, position, end, block, tensors))
            view = block.view[: end - position]
            if seen is not None:
                seen(position, view)
            writer.write(position, [view])
            meter.add(len(view))

        return write

    threads = transfer.threads_for(stop - start, len(pieces), transfer.block_bytes)
    if not writer.aligned:
        threads = min(threads, _THROUGH_THE_CACHE)
    run_all(iter(range(start, stop, transfer.block_bytes)), make_worker, threads, meter)
    return sums
