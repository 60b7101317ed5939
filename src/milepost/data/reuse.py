"""Finding what a save need not write: entries that are equal to what the base of the save holds, by their digests.

Nothing of the old data is read: only headers and tables. Most of what changed is told by one or two blocks of 64 KiB,
whose checksums the table of the base has. What looks equal there is hashed as a whole, and its 128 bits are compared.
"""

import logging
from collections import defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch

from milepost.core.box import Box
from milepost.core.division import read_plan
from milepost.core.dtypes import DTYPES
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import Manifest, OlderFile, ShardFile, older_name
from milepost.core.reuse import (
    CELL_BYTES,
    FileId,
    KeptEntry,
    Reusable,
    age_of,
    id_of,
    older_file,
    used_of,
    worth_keeping,
)
from milepost.core.shardfile import PRIVATE, sums_of
from milepost.data.cells import Sample, bytes_between, can_be_sampled, compute_digests
from milepost.data.collection_pause import CollectionPaused
from milepost.data.memory import Block
from milepost.data.read import Files, place_of
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import EntryToWrite
from milepost.errors import CheckpointError, SaveCancelled
from milepost.store import Store
from milepost.store.siblings import link

_log = logging.getLogger("milepost")
_MANY = 256
_EVERY = 16
"""Of many short entries, every 16th is looked at first. If all of those changed, the others count as changed."""


@dataclass(frozen=True, slots=True)
class ReuseRules:
    """When a file of an earlier save is given up: when it is older than `max_depth` saves, or mostly waste."""

    max_depth: int = 100
    max_waste: float = 0.5


@dataclass(frozen=True, slots=True)
class Reused:
    """What a rank need not write: the entries, with where each is, and the files that hold them."""

    entries: Mapping[str, KeptEntry]
    files: tuple[OlderFile, ...]

    @property
    def size_bytes(self) -> int:
        """How many bytes they have."""
        return sum(file.used_bytes for file in self.files)


NOTHING = Reused({}, ())


class KeepTarget(Protocol):
    """The save that goes on using files of its base."""

    @property
    def store(self) -> Store:
        """Where it saves to."""

    def keep(self, source: Store, base: Manifest, files: Sequence[tuple[ShardFile, int]]) -> Sequence[OlderFile | None]:
        """Keep these files of the base for this save; each comes with how many of its bytes are used.

        Gives the row of each for the manifest, or None for one that cannot be kept: then its data is written again.
        """


class ReuseBase:
    """The checkpoint that a save is based on, as one rank sees it."""

    def __init__(self, store: Store, manifest: Manifest, rank: int) -> None:
        self._store, self._manifest, self._rank = store, manifest, rank
        self.where, self._files = store.url, Files(store, manifest)
        self._tensors = {tensor.key: tensor for tensor in manifest.tensors}
        self._writers = {file.rank for file in manifest.files}
        self._numbers: dict[FileId, int] = {}

    def choose(
        self,
        entries: Sequence[EntryToWrite],
        boxes: Mapping[str, tuple[str, Box]],
        rules: ReuseRules,
        transfer: Transfer,
        meter: Meter,
        target: KeepTarget,
    ) -> Reused:
        """The entries that are in the base already, and that the new save keeps there.

        `boxes`: the tensor and the box of each entry, by its name. Gives nothing where the base cannot be read: then
        everything is written.
        """
        try:
            with CollectionPaused():
                found = list(self._candidates(entries, boxes, rules.max_depth))
            chosen = _equal(found, transfer, meter)
            return self._kept(worth_keeping(chosen, self._judged(chosen), rules.max_waste), target)
        except (CheckpointError, OSError) as error:
            if isinstance(error, SaveCancelled):
                raise
            _log.warning("%s cannot be the base of a save, so all data is written: %s", self._store.url, error)
            return NOTHING
        finally:
            self._files.close()

    def _candidates(
        self, entries: Sequence[EntryToWrite], boxes: Mapping[str, tuple[str, Box]], max_depth: int
    ) -> "Iterator[_Candidate]":
        """Where the base holds entries of the same name, type and shape. Goes from file to file: each is opened once.

        One that is in a file of an earlier save is told by the header of the rank whose entry it is.
        """
        by_rank: dict[int, list[EntryToWrite]] = defaultdict(list)
        own = self._digests_of(self._rank)
        for entry in entries:
            name = entry.header.name
            if name == PRIVATE or not entry.header.size_bytes or not can_be_sampled(entry.data):
                continue
            where = boxes.get(name)
            rank = self._rank if name in own or where is None else self._elsewhere(name, *where)
            by_rank[rank].append(entry)
        by_number: dict[int, list[tuple[EntryToWrite, bytes]]] = defaultdict(list)
        for rank in self._files.in_turn(list(by_rank)):
            digests = self._digests_of(rank)
            for entry in by_rank[rank]:
                if entry.header.name in digests:
                    by_number[self._number(rank, entry.header.name)].append((entry, digests[entry.header.name]))
        young = [number for number in by_number if age_of(self._files.record(number)) < max_depth]
        for number in self._files.in_turn(young):
            yield from self._alike(number, by_number[number])

    def _digests_of(self, rank: int) -> Mapping[str, bytes]:
        return self._files.of(rank).digests if rank in self._writers else {}

    def _number(self, rank: int, name: str) -> int:
        """The number of the file with an entry. One that several ranks of the base use has several; here it has one."""
        number = self._files.number_of(rank, name)
        return self._numbers.setdefault(id_of(self._files.record(number), self._manifest), number)

    def _alike(self, number: int, held: Iterable[tuple[EntryToWrite, bytes]]) -> "Iterator[_Candidate]":
        """Those of the entries that a file holds with their type and shape."""
        file = self._files.of(number)
        for entry, digest in held:
            there, dtype = file.header.entries.get(entry.header.name), DTYPES[entry.header.dtype]
            if there is not None and (there.dtype, there.shape) == (
                dtype.stored_as,
                (*entry.header.shape, *dtype.inner),
            ):
                start = there.data_offsets[0]
                yield _Candidate(entry, number, digest, start, _looks(start, entry.header.size_bytes, file.checksums))

    def _elsewhere(self, name: str, key: str, box: Box) -> int:
        """The rank that holds this very entry in the base, where the base was cut otherwise; -1 if none does."""
        tensor = self._tensors.get(key)
        if tensor is None or len(tensor.shape) != len(box.shape) or not Box.whole(tensor.shape).contains(box):
            return -1
        items = read_plan(self._manifest, tensor, box)
        return items[0].rank if len(items) == 1 and items[0].name == name else -1

    def _judged(self, chosen: Mapping[str, Reusable]) -> dict[int, int]:
        """The sizes of the files that may be given up as waste: those that this rank wrote.

        Of another rank's file it sees only what it uses itself. Such files end by their age.
        """
        records = {one.number: self._files.record(one.number) for one in chosen.values()}
        own = {n: file for n, file in records.items() if id_of(file, self._manifest).writer == self._rank}
        return {number: self._manifest.parts_of(file).data_bytes for number, file in own.items()}

    def _kept(self, chosen: Mapping[str, Reusable], target: KeepTarget) -> Reused:
        """The entries whose files could be kept for the new save."""
        used = used_of(chosen)
        files = [(self._files.record(number), size) for number, size in used.items()]
        kept = target.keep(self._store, self._manifest, files) if files else []
        rows = {number: row for number, row in zip(used, kept, strict=True) if row is not None}
        if used and not rows and self._rank == 0:
            _log.warning(
                "%s cannot share files with %s, so all data is written. A folder needs hard links, and its base on the "
                "same file system; an object store needs its base beside it. If it never can, leave out `incremental` "
                "or `base`: every save looks for what did not change",
                target.store.url,
                self.where,
            )
        elif len(rows) < len(used):
            _log.info("%s: not all files of %s can be kept; that data is written", target.store.url, self.where)
        ids = {number: FileId(row.save_id, row.writer) for number, row in rows.items()}
        entries = {name: KeptEntry(ids[one.number], one.digest) for name, one in chosen.items() if one.number in ids}
        return Reused(entries, tuple(rows.values()))


@dataclass(frozen=True, slots=True)
class LinkTarget:
    """The save that goes on using files: each gets a second name among its own."""

    store: Store
    save_id: str
    rank: int

    def keep(self, source: Store, base: Manifest, files: Sequence[tuple[ShardFile, int]]) -> Sequence[OlderFile | None]:
        """See `KeepTarget`. Where one cannot have a second name, those after it are not tried."""
        rows: list[OlderFile | None] = [None] * len(files)
        for at, (record, used_bytes) in enumerate(files):
            row = older_file(record, base, self.rank, used_bytes)
            if not self._link(source, base, record, row):
                break
            rows[at] = row
        return rows

    def _link(self, source: Store, base: Manifest, record: ShardFile, row: OlderFile) -> bool:
        name = older_name(self.save_id, self.rank, row.save_id, row.writer)
        there, parts = place_of(source, record), base.parts_of(record)
        suffixes = [part.name.removeprefix(parts.name) for part in parts]
        return all(link(self.store, name + suffix, there, parts.name + suffix) for suffix in suffixes)


class _Candidate(NamedTuple):
    """An entry, and the one of the base that may be equal: in which file, its digest, and where it starts there.

    `looks`: some blocks inside, each with where it begins in the entry and the checksum that the base has of it.
    """

    entry: EntryToWrite
    number: int
    digest: bytes
    start: int
    looks: Mapping[int, int]

    @property
    def size_bytes(self) -> int:
        return self.entry.header.size_bytes

    @property
    def data(self) -> torch.Tensor:
        assert isinstance(self.entry.data, torch.Tensor)
        return self.entry.data

    def may_be_equal(self, block: Block) -> bool:
        """False if one of the blocks has another checksum than in the base."""
        return all(self._block_sum(low, block) == expected for low, expected in self.looks.items())

    def _block_sum(self, low: int, block: Block) -> int:
        return sums_of([bytes_between(self.data, low, low + BLOCK_BYTES, block)], BLOCK_BYTES)[0]


def _looks(start: int, size_bytes: int, checksums: Sequence[int]) -> dict[int, int]:
    """Three blocks inside an entry that begins at `start` of its file: where each begins in it, and its checksum."""
    first, last = -(-start // BLOCK_BYTES), (start + size_bytes) // BLOCK_BYTES
    inside = sorted({first, (first + last) // 2, last - 1}) if first < last else ()
    return {at * BLOCK_BYTES - start: checksums[at] for at in inside}


def _equal(candidates: Sequence[_Candidate], transfer: Transfer, meter: Meter) -> dict[str, Reusable]:
    """Those of the entries whose data is what the base holds."""
    block = Block(BLOCK_BYTES)
    short = [one for one in candidates if one.size_bytes < BLOCK_BYTES]
    long = [one for one in candidates if one.size_bytes >= BLOCK_BYTES and one.may_be_equal(block)]
    if len(short) > _MANY and not _equal_ones(short[::_EVERY], transfer, meter):
        short = []
    found = _equal_ones([*short, *long], transfer, meter)
    return {one.entry.header.name: Reusable(one.number, one.digest, one.size_bytes) for one in found}


def _equal_ones(candidates: Sequence[_Candidate], transfer: Transfer, meter: Meter) -> list[_Candidate]:
    samples = [Sample(one.data, one.size_bytes, one.start % CELL_BYTES) for one in candidates]
    compute_digests(samples, transfer, meter)
    return [one for one, sample in zip(candidates, samples, strict=True) if sample.digest == one.digest]
