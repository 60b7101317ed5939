"""Swaps: every byte is read by one rank, and sent to the ranks that want it. Pure, and the same on every rank.

The files stand side by side on a line, each as long as it is, with what its rank uses of files of earlier saves. The
line is cut into one equal part for each rank. So ranks read disjoint runs of the files. What a rank reads is cut into
rounds, and in each round every rank sends the others what they want of it.

Nothing is sent about who sends what. A sender works it out from the layouts of the targets, and a receiver goes through
what each sender reads, as the sender does. That takes time in proportion to the tensors for each sender from which a
rank gets something.
"""

import itertools
import math
from bisect import bisect_left, bisect_right
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

import msgspec

from milepost.core.box import Box, Shape, boxes_of_run
from milepost.core.division import PlannedRead, read_plan, written_by
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.layout import Boxes, Grid, Held, Layout, Whole
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.core.manifest import Manifest, Tensor
from milepost.core.ranks import pack_ranks, positions, unpack_ranks
from milepost.core.shardfile import entry_name, file_order

ALIGN = 16
"""What the size of a message is a multiple of, so that the next one starts aligned for any type."""
_ROUND_BYTES = 4 * MIB
_MOST_READ_BYTES = 128 * MIB
"""How much a rank reads at once, to send it in several rounds. Blocks at the edges are read twice."""
_SHORTEST_ROUND = 64 * KIB
_BOX_COST_BYTES = 2 * KIB
"""About what Python's objects take for a box that is prepared for a message: its place, and where it is read."""
_KINDS = 4096
"""For how many kinds of tensors a rank keeps what it wants of them."""


class WantRow(msgspec.Struct, frozen=True, array_like=True):
    """A tensor that a rank wants, by its key in the checkpoint. `layout` is None where the rank wants all of it."""

    key: str
    layout: Grid | Boxes | None


class Wish(NamedTuple):
    """How some ranks want a tensor."""

    layout: Layout
    ranks: frozenset[int]


Wants = Mapping[str, tuple[Wish, ...]]
"""How a tensor is wanted, by its key in the checkpoint. No rank stands in two of the entries."""


class Fragment(NamedTuple):
    """A box of a tensor that a message holds, and where it lies in the message."""

    key: str
    box: Box
    at: int


class Chunk(NamedTuple):
    """What a sender reads for one round: a box of a tensor, from the entry of a file that holds the box `source`."""

    round: int
    tensor: Tensor
    file: int
    source: Box
    box: Box

    def read_of(self, box: Box) -> PlannedRead:
        """The read of a part of the chunk."""
        name = entry_name(self.tensor.key, self.source, self.tensor.shape)
        return PlannedRead(self.tensor.key, self.file, name, self.source, box)


class Message(NamedTuple):
    """What one rank sends another in a round: `size_bytes` with all fragments in it."""

    fragments: tuple[Fragment, ...]
    size_bytes: int


def merge_wants(groups: Sequence[tuple[str, Sequence[WantRow]]]) -> Wants:
    """What all ranks want, from the distinct tables and the ranks that have each.

    Ranks that describe their own boxes have a table each. Their wishes for a tensor become one.
    """
    found: dict[str, list[Wish]] = {}
    for ranks, rows in groups:
        members = frozenset(unpack_ranks(ranks))
        for row in rows:
            found.setdefault(row.key, []).append(Wish(row.layout or Whole(ranks), members))
    return {key: _joined(wanted) for key, wanted in found.items()}


def _joined(wanted: list[Wish]) -> tuple[Wish, ...]:
    """The same as one wish, where all of them list boxes."""
    if len(wanted) == 1:
        return tuple(wanted)
    holding: dict[Box, set[int]] = {}
    for layout, ranks in wanted:
        if not isinstance(layout, Boxes):
            return tuple(wanted)
        for held in layout.held:
            holding.setdefault(held.box, set()).update(ranks.intersection(held.holders))
    held_by = tuple(Held(box, pack_ranks(sorted(ranks))) for box, ranks in holding.items() if ranks)
    return (Wish(Boxes(held_by), frozenset().union(*(one.ranks for one in wanted))),)


def may_swap(tensor: Tensor) -> bool:
    """Whether a tensor has entries of its own, which hold its bytes as they are."""
    return not (tensor.same_as or tensor.transforms or tensor.is_bytes)


@dataclass(frozen=True, slots=True)
class Rounds:
    """How much a rank sends in a round, and for how many rounds, with how many boxes, it reads at once."""

    size_bytes: int
    at_once: int
    boxes: int

    @classmethod
    def within(cls, memory_bytes: int, world: int) -> "Rounds":
        """Rounds so short that what all ranks send to one takes a quarter of its memory; what it sends, another.

        A third quarter is for boxes that are prepared: to many ranks go many small ones.
        """
        size = max(min(memory_bytes // (4 * world), _ROUND_BYTES), _SHORTEST_ROUND)
        at_once = min(memory_bytes // 4, _MOST_READ_BYTES) // size
        return cls(size, max(at_once, 1), memory_bytes // (4 * _BOX_COST_BYTES))

    def sent_bytes(self, world: int, head_bytes: int) -> int:
        """The most that a rank sends of what it reads at once, with `head_bytes` before each message."""
        messages = max(min(self.at_once * world, self.boxes), world)
        # A round holds one element for everyone, if nothing else fits.
        return self.at_once * max(self.size_bytes, ALIGN * world) + messages * (head_bytes + ALIGN)

    def received_bytes(self, world: int, total_bytes: int, head_bytes: int) -> int:
        """The most that a rank gets in a round, if it gets `total_bytes` in all."""
        return min(world * max(self.size_bytes, ALIGN), total_bytes) + world * (head_bytes + ALIGN)


class Portion(NamedTuple):
    """What a rank reads at once: up to which round, and the boxes of each chunk with the rank to which they go."""

    stop: int
    wishes: list[tuple[Chunk, int, Box]]


class SwapPlan:
    """Who reads what, and who sends what to whom, in which round.

    `bytes_of_round` is what a rank sends at most in a round, unless one element for all who want it is more. An entry
    as short as `unit_bytes` is not cut between two ranks.
    """

    def __init__(
        self, manifest: Manifest, wants: Wants, world: int, bytes_of_round: int, unit_bytes: int = BLOCK_BYTES
    ) -> None:
        self._manifest, self._wants, self._round_bytes = manifest, wants, bytes_of_round
        self._unit_bytes = unit_bytes
        self._tensors = [t for t in manifest.tensors if t.key in wants and may_swap(t)]
        ordered = sorted(self._tensors, key=_width)
        self._by_width = [(width, list(found)) for width, found in itertools.groupby(ordered, key=_width)]
        self._kinds = _Interned([wants[t.key] for t in self._tensors])
        copies = [sum(copies_of(wanted, find) for wanted, find in kind) for kind in self._kinds.finders]
        self._kind_of = dict(zip((t.key for t in self._tensors), self._kinds.numbers, strict=True))
        self._copies = {key: copies[kind] for key, kind in self._kind_of.items()}
        writers = {r for layout in {t.layout for t in self._tensors} for r in _ranks_of(manifest.layouts[layout])}
        self._files = _files_of(manifest, writers)
        self._ends = list(itertools.accumulate(file.length for file in self._files))
        total = self._ends[-1] if self._ends else 0
        self._cuts = [total * reader // world for reader in range(world + 1)]
        self._boxes_of = lru_cache(_KINDS)(self._own_boxes)

    @property
    def keys(self) -> frozenset[str]:
        """The tensors that are swapped."""
        return frozenset(self._copies)

    def chunks_of(self, sender: int) -> Iterator[Chunk]:
        """What a rank reads, in the order of rounds."""
        number = filled = 0
        for file, low, high in self._shares_of(sender):
            for tensor, source, first, stop in self._stretch(file, low, high):
                weight = DTYPES[tensor.dtype].size_bytes * self._copies[tensor.key]
                at = first
                while at < stop:
                    end = self._end(at, stop, source.shape, weight, filled)
                    if end == at:
                        number, filled = number + 1, 0
                        continue
                    for box in boxes_of_run(source.shape, at, end):
                        yield Chunk(number, tensor, file, source, box.moved(source.offset))
                    at, filled = end, filled + (end - at) * weight

    def wishes_for(self, chunk: Chunk) -> list[tuple[int, Box]]:
        """The boxes of a chunk that go to each rank, in order; the one that reads it may be among them."""
        found = []
        for wanted, find in self._kinds.finders[self._kind_of[chunk.tensor.key]]:
            for held in find(chunk.tensor.shape, chunk.box):
                part = held.box.intersect(chunk.box)
                if part is not None:
                    found += [(rank, part) for rank in held.holders if rank in wanted.ranks]
        return sorted(found, key=lambda wish: (wish[0], wish[1].offset, wish[1].shape))

    def portion(self, chunks: Iterable[Chunk], first: int, rounds: Rounds) -> Portion:
        """What a rank reads at once of its chunks from round `first` on: one round, and more within the limits."""
        wishes: list[tuple[Chunk, int, Box]] = []
        for number, group in itertools.groupby(chunks, key=lambda chunk: chunk.round):
            found = [(chunk, to, box) for chunk in group for to, box in self.wishes_for(chunk)]
            is_full = number - first >= rounds.at_once or len(wishes) + len(found) > rounds.boxes
            if number > first and is_full:
                return Portion(number, wishes)
            wishes += found
        return Portion(first + rounds.at_once, wishes)

    def messages(self, sender: int, receiver: int) -> Iterator[tuple[int, Message]]:
        """What one rank sends another, with the round, as the receiver works it out. Rounds without any are left out.

        Takes little memory: a rank goes through what all the others read side by side.
        """
        for number, chunks in itertools.groupby(self.chunks_of(sender), key=lambda chunk: chunk.round):
            boxes: list[tuple[Tensor, Box]] = []
            for chunk in chunks:
                mine = self._boxes_of(self._kind_of[chunk.tensor.key], chunk.tensor.shape, receiver)
                found = [part for box in mine if (part := box.intersect(chunk.box)) is not None]
                boxes += [(chunk.tensor, part) for part in sorted(found, key=lambda part: (part.offset, part.shape))]
            if boxes:
                yield number, packed(boxes)

    def senders_to(self, receiver: int) -> list[int]:
        """The ranks from which a rank may get something, itself included."""
        files: set[int] = set()
        for tensor in self._tensors:
            if len(files) == len(self._files):
                break
            for box in self._boxes_of(self._kind_of[tensor.key], tensor.shape, receiver):
                files.update(item.rank for item in read_plan(self._manifest, tensor, box))
        readers: set[int] = set()
        for number, file in enumerate(self._files):
            if file.rank in files:
                start, stop = self._ends[number] - file.length, self._ends[number]
                readers.update(range(bisect_right(self._cuts, start) - 1, bisect_left(self._cuts, stop)))
        return sorted(readers)

    def _own_boxes(self, kind: int, shape: Shape, receiver: int) -> list[Box]:
        mine = [one.layout for one, _ in self._kinds.finders[kind] if receiver in one.ranks]
        return [piece.box for layout in mine for piece in layout.pieces(shape, receiver) if piece.box.elements]

    def _end(self, at: int, stop: int, shape: Shape, weight: int, filled: int) -> int:
        """Up to where the elements from `at` go into a round in which `filled` bytes are sent: `at`, if it is full."""
        room = at + max((self._round_bytes - filled) // weight, 0)
        if room >= stop:
            return stop
        end = _whole_rows(room, shape, self._round_bytes // 4 // weight)
        return end if end > at else at + (not filled)

    def _shares_of(self, sender: int) -> Iterator[tuple[int, tuple[int, int], tuple[int, int]]]:
        """The files that a rank reads from, and from where to where, as shares (part, whole) of the file."""
        low, high = self._cuts[sender], self._cuts[sender + 1]
        for number in range(bisect_right(self._ends, low), len(self._files)):
            file = self._files[number]
            start = self._ends[number] - file.length
            if start >= high:
                return
            size = file.length
            yield file.rank, (max(low - start, 0), size), (min(high - start, size), size)

    def _stretch(
        self, file: int, low: tuple[int, int], high: tuple[int, int]
    ) -> Iterator[tuple[Tensor, Box, int, int]]:
        """The wanted entries in a part of a file, each with the elements first..stop that lie in it."""
        kinds: _Kinds = {}
        total = sum(size * self._copies[tensor.key] for tensor, _, size in self._entries(file, kinds))
        first, last = total * low[0] // low[1], total * high[0] // high[1]
        at = 0
        for tensor, box, size in self._entries(file, kinds):
            if at >= last:
                return
            copies = self._copies[tensor.key]
            start, stop = (_cut_of(box, cut - at, size * copies, self._unit_bytes * copies) for cut in (first, last))
            if start < stop:
                yield tensor, box, start, stop
            at += size * copies

    def _entries(self, file: int, kinds: "_Kinds") -> Iterator[tuple[Tensor, Box, int]]:
        """The wanted entries of a file, in its order, with their sizes. `kinds` is kept for another call.

        Tensors that are alike are looked at once. No list is made: a rank goes through many files side by side.
        """
        for _, tensors in self._by_width:
            for is_short in (False, True):
                for tensor in tensors:
                    looks = (tensor.dtype, tensor.shape, tensor.layout, tensor.parts, tensor.turn)
                    if looks not in kinds:
                        items = written_by(tensor, self._manifest.layout_of(tensor), file)
                        kinds[looks] = [(item.box, size_bytes(tensor.dtype, item.box.shape)) for item in items]
                    for box, size in kinds[looks]:
                        if file_order(tensor.dtype, size)[1] is is_short:
                            yield tensor, box, size


class _OnLine(NamedTuple):
    """What the entries of a rank take on the line: its file, and what it uses of files of earlier saves."""

    rank: int
    length: int


def _files_of(manifest: Manifest, writers: set[int]) -> list[_OnLine]:
    """The files of these ranks, in order."""
    used = Counter[int]()
    for older in manifest.older:
        used[older.rank] += older.used_bytes
    files = [_OnLine(file.rank, file.size_bytes + used[file.rank]) for file in manifest.files if file.rank in writers]
    # A file that a damaged manifest lacks stands on the line too: the rank that tries to read it is told.
    missing = writers - {file.rank for file in manifest.files}
    return [*files, *(_OnLine(rank, 1) for rank in sorted(missing))]


_Kinds = dict[tuple[object, ...], list[tuple[Box, int]]]
"""The boxes of tensors that look alike, and their sizes, in one file."""


def _width(tensor: Tensor) -> int:
    """The key by which a file sorts its entries first."""
    return file_order(tensor.dtype, 0)[0]


def packed(boxes: Iterable[tuple[Tensor, Box]]) -> Message:
    """The boxes in a message, the widest types first: so each starts aligned, and nothing lies between them."""
    listed = list(boxes)
    places, at = [0] * len(listed), 0
    for number in sorted(range(len(listed)), key=lambda number: -DTYPES[listed[number][0].dtype].size_bytes):
        tensor, box = listed[number]
        places[number], at = at, at + size_bytes(tensor.dtype, box.shape)
    fragments = tuple(Fragment(tensor.key, box, place) for (tensor, box), place in zip(listed, places, strict=True))
    return Message(fragments, -(-at // ALIGN) * ALIGN)


_Finder = Callable[[Shape, Box], Iterable[Held]]
"""Gives the boxes of a layout that meet a region of a tensor of this shape, with their holders."""


class _Interned:
    """Numbers for what is wanted: the same number where the same is wanted. Looking into long lists takes long."""

    def __init__(self, wanted: list[tuple[Wish, ...]]) -> None:
        known: dict[tuple[Wish, ...], int] = {}
        self.numbers = [known.setdefault(one, len(known)) for one in wanted]
        self.finders = [tuple((wish, finder_of(wish.layout)) for wish in one) for one in known]


class _BoxIndex:
    """Finds the boxes of a list that meet a region: by bisection, in the dimension in which they are cut most."""

    def __init__(self, held: Sequence[Held]) -> None:
        dims = range(len(held[0].box.offset)) if held else ()
        self._dim = max(dims, key=lambda dim: len({one.box.offset[dim] for one in held}), default=None)
        self._held = list(held)
        if self._dim is not None:
            dim = self._dim
            self._held.sort(key=lambda one: one.box.offset[dim])
            self._starts = [one.box.offset[dim] for one in self._held]
            self._reach = list(itertools.accumulate((one.box.end[dim] for one in self._held), max))

    def find(self, shape: Shape, region: Box) -> list[Held]:
        """Those that meet the region."""
        del shape
        first, stop = 0, len(self._held)
        if self._dim is not None:
            first = bisect_right(self._reach, region.offset[self._dim])
            stop = bisect_left(self._starts, region.end[self._dim])
        return [one for one in self._held[first:stop] if one.box.intersect(region) is not None]


def finder_of(layout: Layout) -> _Finder:
    """What finds the boxes of this layout."""
    return _BoxIndex(layout.held).find if isinstance(layout, Boxes) else layout.overlapping


def copies_of(wanted: Wish, find: _Finder) -> int:
    """How often an element is wanted, at most."""
    layout = wanted.layout
    if isinstance(layout, Grid):
        return math.prod(n for n, cut in zip(layout.mesh.shape, layout.cuts, strict=True) if cut is None)
    if isinstance(layout, Boxes):
        # Boxes of one rank may overlap, and those of several ranks that cut a tensor in different ways.
        return max((sum(len(one.holders) for one in find((), held.box)) for held in layout.held), default=1) or 1
    return max(len(wanted.ranks & set(positions(layout.ranks))), 1)


def _ranks_of(layout: Layout) -> tuple[int, ...]:
    if isinstance(layout, Boxes):
        return tuple({rank for held in layout.held for rank in held.holders})
    return unpack_ranks(layout.mesh.ranks if isinstance(layout, Grid) else layout.ranks)


def _cut_of(box: Box, cut: int, weight: int, whole: int) -> int:
    """How many elements of an entry lie before a cut. What is as short as a block goes to one side."""
    elements = box.elements
    if cut <= 0 or not weight:
        return 0
    if cut >= weight:
        return elements
    if weight <= whole:
        return elements if 2 * cut > weight else 0
    return _whole_rows(elements * cut // weight, box.shape, elements // 4)


def _whole_rows(elements: int, shape: Shape, most: int) -> int:
    """At most this many elements, in whole rows of the outermost dimension whose rows have at most `most` elements."""
    row = 1
    for n in reversed(shape):
        if row * n > max(most, 1):
            break
        row *= n
    return elements // row * row
