"""The bytes of a new file: literal bytes and the elements of tensors, each at a known place, brought together by blocks.

The place of every byte is known before anything is written. So any part of a file can be written by any rank and
thread, within the memory of its own block, however large a tensor is.
"""

import zlib
from bisect import bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

import torch

from milepost.data.late import BlockFill, LateBox
from milepost.data.memory import Block, needs_pinned
from milepost.data.transfer import Meter, Transfer, run_all
from milepost.store import Writer

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
        fill, tensors = BlockFill(block), []
        for piece in self.between(start, stop):
            low, high = max(start - piece.start, 0), min(stop - piece.start, piece.size_bytes)
            at = piece.start + low - start
            if isinstance(piece.data, bytes):
                block.view[at : at + high - low] = piece.data[low:high]
                continue
            tensors.append((piece, low, block.view[at : at + high - low]))
            fill.add(piece.data, low, high, at)
        fill.finish()
        return tensors


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
) -> list[PieceSum]:
    """Write bytes start..stop of a file, in blocks. Gives the sums that could not be put into their place by then."""
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
            writer.write(position, [view])
            meter.add(len(view))

        return write

    threads = transfer.threads_to_write(stop - start, len(pieces), cached=not writer.aligned)
    run_all(iter(range(start, stop, transfer.block_bytes)), make_worker, threads, meter)
    return sums
