"""What differs between two checkpoints: keys, shapes, types, values, and which tensors changed.

Where both hold the same boxes of a tensor, their tables of checksums tell (`tables`), and nearly nothing is read.
Elsewhere both are read box by box and compared (`reading`).
"""

import fnmatch
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import msgspec

from milepost.core.box import Box, Shape
from milepost.core.division import PlannedRead, read_plan, written_by
from milepost.core.manifest import Manifest, Tensor
from milepost.core.option_values import check_values
from milepost.core.reuse import FileId, id_of
from milepost.data.read import Files
from milepost.data.transfer import Meter, Watcher
from milepost.errors import CheckpointDamaged
from milepost.inspection.contents import layout_words
from milepost.inspection.differing_values import (
    ValueDifference,
    compare_metadata,
    compare_values,
    kinds_of,
    shape_of_state,
)
from milepost.inspection.patterns import keys_in, refuse_unmatched
from milepost.inspection.private_values import PerRankDifference, compare_private
from milepost.inspection.sides import ComparedSide, opened
from milepost.inspection.tables import ChangeTally, TableComparison
from milepost.store import Location

_FLAT = "safetensors"
"""A format that keeps neither containers nor the order of keys."""
_AHEAD = 16
"""How many files of each side are opened at once, where that costs round trips."""


class TensorDifference(msgspec.Struct, frozen=True, kw_only=True):
    """A tensor, array or bytes that both hold, and that differ. Pairs are of the first and the second checkpoint.

    `changed`: whether the data differs; None where it has another type or shape, so that bytes cannot be compared.
    `share`: how much of the data lies in blocks of 64 KiB that differ, from 0 to 1. A block can hold parts of several
    tensors, and counts for each. `tied`: the key of the tensor that it is the same as, or empty.
    With `values`: the largest and the root of the mean square of the differences of the elements that are finite in
    both, and how many others differ (NaN, infinite). None: not asked for, or not numbers that can be subtracted.
    """

    key: str
    dtype: tuple[str, str]
    shape: tuple[Shape, Shape]
    kind: tuple[str, str]
    tied: tuple[str, str]
    size_bytes: tuple[int, int]
    changed: bool | None
    share: float | None = None
    max_difference: float | None = None
    rms_difference: float | None = None
    not_finite: int | None = None


class LayoutDifference(msgspec.Struct, frozen=True):
    """How many tensors were cut one way in the first checkpoint, and another way in the second; both in words."""

    a: str
    b: str
    tensors: int


class DiffSide(msgspec.Struct, frozen=True):
    """One of the two checkpoints that were compared."""

    url: str
    format: str
    generation: int
    ranks: int
    created: str
    data_bytes: int


class Difference(msgspec.Struct, frozen=True, kw_only=True):
    """What differs between two checkpoints; see `milepost.diff`. `same`: nothing does, metadata included.

    `only_a`, `only_b`: the keys that only one has. `tensors`, `values`, `per_rank`, `metadata`: what both have, and
    differs. `containers`: the same keys, but in other containers or another order (safetensors files keep neither, so
    there they do not count). `layouts`: tensors that are cut another way over the ranks; they are the same if their
    data is. `equal_tensors`: how many tensors are the same in both. `by_tables`: how many tensors were compared by
    checksums alone. `bytes_read`: of both, with headers, tables and manifests. `keys`: the pattern of the keys that
    were compared; "*" for all.

    >>> _ = milepost.save({"w": torch.zeros(3), "step": 1}, "memory://difference")
    >>> found = milepost.diff("memory://difference", "memory://difference")
    >>> found.same, found.equal_tensors, found.by_tables
    (True, 1, 1)
    """

    a: DiffSide
    b: DiffSide
    same: bool
    only_a: tuple[str, ...]
    only_b: tuple[str, ...]
    tensors: tuple[TensorDifference, ...]
    values: tuple[ValueDifference, ...]
    per_rank: tuple[PerRankDifference, ...]
    metadata: tuple[ValueDifference, ...]
    containers: bool
    layouts: tuple[LayoutDifference, ...]
    equal_tensors: int
    by_tables: int
    bytes_read: int
    keys: str = "*"


def diff(
    a: Location, b: Location, *, values: bool = False, keys: str = "*", progress: Watcher | None = None
) -> Difference:
    """Compare two checkpoints, of any format and mesh. Needs no process group.

    Where both hold a tensor in the same boxes, the tables of checksums are compared and the data is not read. Elsewhere
    both are read and compared, in pieces. Elements are equal if their bits are: a NaN equals the same NaN.
    `values`: also how far the numbers of tensors that changed are apart, which reads those tensors. `keys`: compare
    only keys that match this pattern, with * and ? as in a shell, and not the metadata. `path@3` is generation 3 of a
    place. Raises CheckpointNotFound; CheckpointDamaged for what is not as it was saved; InvalidRequest for `keys` that
    match nothing in either.

    >>> _ = milepost.save({"w": torch.zeros(3), "b": torch.zeros(2), "step": 1}, "memory://before")
    >>> _ = milepost.save({"w": torch.tensor([0.0, 0.5, 0.0]), "b": torch.zeros(2), "step": 2}, "memory://after")
    >>> found = milepost.diff("memory://before", "memory://after", values=True)
    >>> [(tensor.key, tensor.max_difference) for tensor in found.tensors], found.equal_tensors
    ([('w', 0.5)], 1)
    >>> [(value.key, value.a, value.b) for value in found.values]
    [('step', '1', '2')]
    """
    check_values({"values": values, "keys": keys, "progress": progress})
    with opened(a) as left, opened(b) as right:
        held = (key for side in (left, right) for key in keys_in(side.manifest))
        refuse_unmatched([keys], held, f"{left.url} and {right.url}")
        meter = Meter("diff", f"{left.url} {right.url}", progress)
        return _Comparison(left, right, meter, keys).run(values)


def diff_within(a: Location, b: Location, read_bytes: int) -> Difference:
    """Like `diff`, for those who may not read much: headers and tables, and data only until `read_bytes` are read.

    What is not known then of a tensor is None.
    """
    with opened(a) as left, opened(b) as right:
        meter = Meter("diff", f"{left.url} {right.url}", None)
        may_read = lambda: left.count.total + right.count.total < read_bytes  # noqa: E731
        return _Comparison(left, right, meter, "*", may_read).run(with_values=False)


class _Pair(NamedTuple):
    """A tensor that both hold."""

    a: Tensor
    b: Tensor

    @property
    def comparable(self) -> bool:
        """Whether equal data would mean equal bytes."""
        return (self.a.dtype, self.a.shape) == (self.b.dtype, self.b.shape)


class _Comparison:
    """One comparison of two checkpoints."""

    def __init__(
        self,
        left: ComparedSide,
        right: ComparedSide,
        meter: Meter,
        keys: str,
        may_read: Callable[[], bool] = lambda: True,
    ) -> None:
        self._left, self._right, self._meter, self._keys = left, right, meter, keys
        self._may_read, self._tables = may_read, TableComparison(may_read)
        self._tallies: dict[str, ChangeTally] = {}
        self._by_tables: set[str] = set()
        self._layouts = tuple([layout_words(layout) for layout in side.manifest.layouts] for side in (left, right))

    def run(self, with_values: bool) -> Difference:
        one, other = self._left.manifest, self._right.manifest
        mine, theirs = (
            {key: kind for key, kind in kinds_of(manifest).items() if fnmatch.fnmatchcase(key, self._keys)}
            for manifest in (one, other)
        )
        tensors = {tensor.key: tensor for tensor in other.tensors if tensor.key in theirs}
        pairs = [_Pair(t, tensors[t.key]) for t in one.tensors if t.key in mine and t.key in tensors]
        self._compare_data([pair for pair in pairs if pair.comparable])
        changed = tuple(found for pair in pairs if (found := self._difference(pair, with_values)) is not None)
        values = compare_values(one, other, mine, theirs)
        only_a, only_b = tuple(k for k in mine if k not in theirs), tuple(k for k in theirs if k not in mine)
        both = [one.key for one in one.per_rank if one.key in mine and one.key in theirs]
        private = compare_private(self._left.files, self._right.files, self._tables, both)
        metadata = compare_metadata(one, other) if self._keys == "*" else ()
        comparable = self._keys == "*" and not only_a and not only_b and _FLAT not in (one.format, other.format)
        containers = comparable and shape_of_state(one) != shape_of_state(other)
        self._meter.finish()
        return Difference(
            a=_side(self._left),
            b=_side(self._right),
            same=not (only_a or only_b or changed or values or private or metadata or containers),
            only_a=only_a,
            only_b=only_b,
            tensors=changed,
            values=values,
            per_rank=private,
            metadata=metadata,
            containers=containers,
            layouts=self._other_layouts(pairs),
            equal_tensors=len(pairs) - len(changed),
            by_tables=len(self._by_tables),
            bytes_read=self._left.count.total + self._right.count.total,
            keys=self._keys,
        )

    def _other_layouts(self, pairs: list[_Pair]) -> tuple[LayoutDifference, ...]:
        mine, theirs = self._layouts
        counts = Counter((mine[pair.a.layout], theirs[pair.b.layout]) for pair in pairs)
        return tuple(LayoutDifference(a, b, count) for (a, b), count in counts.items() if a != b)

    # --- the data of tensors

    def _compare_data(self, pairs: list[_Pair]) -> None:
        self._tallies = {pair.a.key: ChangeTally() for pair in pairs}
        tied, own = list[_Pair](), list[_Pair]()
        for pair in pairs:
            once = pair.a.same_as and pair.a.same_as == pair.b.same_as and pair.a.same_as in self._tallies
            (tied if once else own).append(pair)
        self._meter.expect(sum(pair.a.size_bytes for pair in own))
        by_rule, by_boxes, apart = self._sorted([pair for pair in own if pair.a.size_bytes])
        self._compare_by_rule(by_rule)
        self._compare_by_boxes(by_boxes)
        by_tables = [*by_rule, *(pair for pair, _ in by_boxes)]
        # The bytes of a transform may differ where its input does not: another version of a compressor.
        unsure = [pair for pair in by_tables if pair.a.transforms and self._tallies[pair.a.key].changed]
        self._by_tables = {pair.a.key for pair in by_tables} - {pair.a.key for pair in unsure}
        self._meter.add(sum(pair.a.size_bytes for pair in by_tables if pair not in unsure))
        for pair in [*unsure, *apart]:
            self._tallies[pair.a.key] = self._read(pair)
        for pair in tied:
            self._tallies[pair.a.key] = self._tallies[pair.a.same_as]
            self._by_tables |= {pair.a.key} if pair.a.same_as in self._by_tables else set()

    def _sorted(
        self, pairs: list[_Pair]
    ) -> tuple[list[_Pair], list[tuple[_Pair, list[tuple[PlannedRead, PlannedRead]]]], list[_Pair]]:
        """Tensors that are cut and dealt out alike; those in the same boxes, but in other files; the rest."""
        one, other = self._left.manifest, self._right.manifest
        if not (self._left.ours and self._right.ours and one.block_bytes == other.block_bytes):
            return [], [], pairs
        alike: dict[tuple[int, int], bool] = {}
        by_rule, by_boxes, apart = [], [], []
        for pair in pairs:
            layouts = (pair.a.layout, pair.b.layout)
            if layouts not in alike:
                alike[layouts] = one.layout_of(pair.a) == other.layout_of(pair.b)
            dealt_alike = (pair.a.parts, pair.a.turn) == (pair.b.parts, pair.b.turn) and alike[layouts]
            if pair.a.transforms != pair.b.transforms:
                apart.append(pair)
            elif dealt_alike and not pair.a.same_as and not pair.b.same_as:
                by_rule.append(pair)
            elif (entries := _same_boxes(one, other, pair)) is not None:
                by_boxes.append((pair, entries))
            else:
                apart.append(pair)
        return by_rule, by_boxes, apart

    def _compare_by_rule(self, pairs: list[_Pair]) -> None:
        """Compare tensors that are cut alike, file by file: each header and table is read once."""
        one = self._left.manifest
        ranks = [file.rank for file in one.files] if pairs else []
        for batch in (ranks[i : i + _AHEAD] for i in range(0, len(ranks), _AHEAD)):
            self._open_ahead(batch, batch)
            for rank in batch:
                if not self._are_equal_files(rank):
                    self._compare_files(rank, pairs)

    def _compare_files(self, rank: int, pairs: list[_Pair]) -> None:
        one = self._left.manifest
        for pair in pairs:
            for write in written_by(pair.a, one.layout_of(pair.a), rank):
                item = PlannedRead(write.key, rank, write.name, write.box, write.box)
                self._compare_entries(pair, item, item)

    def _compare_by_boxes(self, pairs: list[tuple[_Pair, list[tuple[PlannedRead, PlannedRead]]]]) -> None:
        """Compare tensors in the same boxes; those of the same two files one after the other."""
        jobs = [(mine, theirs, pair) for pair, entries in pairs for mine, theirs in entries]
        jobs.sort(key=lambda job: (job[0].rank, job[1].rank))
        for mine, theirs, pair in jobs:
            self._compare_entries(pair, mine, theirs)

    def _compare_entries(self, pair: _Pair, mine: PlannedRead, theirs: PlannedRead) -> None:
        here, there = self._left.files, self._right.files
        numbers = here.number_of(mine.rank, mine.name), there.number_of(theirs.rank, theirs.name)
        tally = self._tallies[pair.a.key]
        if mine.name == theirs.name and _file_id(here, numbers[0]) == _file_id(there, numbers[1]):
            return  # one and the same entry, which the later of the two saves did not write again
        one, other = here.of(numbers[0]), there.of(numbers[1])
        if not pair.a.transforms:
            first, second = one.entry(mine, pair.a.dtype), other.entry(theirs, pair.b.dtype)
        else:
            found, known = one.header.entries.get(mine.name), other.header.entries.get(theirs.name)
            if found is None or known is None:
                raise CheckpointDamaged(f"{(one if found is None else other).where} does not hold {mine.name[:200]!r}")
            first, second = found, known
            if first.size_bytes != second.size_bytes:
                tally.add(first.size_bytes)
                return
        self._tables.compare(one, first, other, second, tally)

    def _are_equal_files(self, rank: int) -> bool:
        """Whether two files hold the same entries, and all have the same bytes."""
        if rank not in {file.rank for file in self._right.manifest.files}:
            return False
        one, other = self._left.files.of(rank), self._right.files.of(rank)
        same = one.header.entries == other.header.entries and one.checksums == other.checksums
        return same and one.older == other.older

    def _open_ahead(self, mine: Sequence[int], theirs: Sequence[int]) -> None:
        self._left.files.open_ahead(mine)
        self._right.files.open_ahead(theirs)

    def _read(self, pair: _Pair) -> ChangeTally:
        if not self._may_read():
            unsure = ChangeTally()
            unsure.unsure = True
            return unsure
        from milepost.inspection.reading import compare_by_reading  # noqa: PLC0415  # imports torch

        return compare_by_reading(self._left, pair.a, self._right, pair.b, self._meter)

    # --- what is told of a tensor

    def _difference(self, pair: _Pair, with_values: bool) -> TensorDifference | None:
        tally = self._tallies.get(pair.a.key)
        differs = pair.a.kind != pair.b.kind or pair.a.same_as != pair.b.same_as
        if tally is not None and not tally.changed and not tally.unsure and not differs:
            return None
        if tally is not None and tally.unsure and not tally.changed:
            tally = None
        numbers: dict[str, Any] = {}
        if with_values and pair.a.shape == pair.b.shape and (tally is None or tally.changed):
            from milepost.inspection.numbers import difference_of_numbers  # noqa: PLC0415  # imports torch

            numbers = difference_of_numbers(self._left, pair.a, self._right, pair.b)
        elif with_values and tally is not None:
            numbers = {"max_difference": 0.0, "rms_difference": 0.0, "not_finite": 0}
        size = pair.a.size_bytes
        return TensorDifference(
            key=pair.a.key,
            dtype=(pair.a.dtype, pair.b.dtype),
            shape=(pair.a.shape, pair.b.shape),
            kind=(pair.a.kind, pair.b.kind),
            tied=(pair.a.same_as, pair.b.same_as),
            size_bytes=(size, pair.b.size_bytes),
            changed=None if tally is None else tally.changed,
            share=None if tally is None else min(tally.changed_bytes / size, 1.0) if size else 0.0,
            **numbers,
        )


def _file_id(files: Files, number: int) -> FileId:
    """Which file of which save this is; it is not opened for that."""
    try:
        record = files.record(number)
    except KeyError:
        return files.of(number).id  # raises: the manifest names no such file
    return id_of(record, files.manifest)


def _same_boxes(one: Manifest, other: Manifest, pair: _Pair) -> list[tuple[PlannedRead, PlannedRead]] | None:
    """The entries of a tensor in both, box by box; None where they are not in the same boxes."""
    whole = Box.whole(pair.a.shape)
    mine = {item.source: item for item in read_plan(one, pair.a, whole)}
    theirs = {item.source: item for item in read_plan(other, pair.b, whole)}
    return [(item, theirs[box]) for box, item in mine.items()] if mine.keys() == theirs.keys() else None


def _side(side: ComparedSide) -> DiffSide:
    manifest = side.manifest
    told = manifest.format, manifest.generation, manifest.world, manifest.created
    return DiffSide(side.url, *told, side.data_bytes)
