"""Damage and foreign files: rows 13 to 16 of the table of faults.

Every fault is made in the files of a real save on disk, in Milepost's format and in DCP's, and then everything is
loaded. Seeds are fixed. Each row takes the `load` to try, so that the tests can show that a worse one is noticed.
"""

import json
import logging
import random
import resource
import struct
import warnings
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import combinations, permutations
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.rows import Counting, FaultRow, Tally
from milepost.core.layout import Cut, Grid, Mesh
from milepost.testing import run_ranks

FILES = 4
"""The number of ranks that save with Milepost, one file each. DCP writes as many files from one rank."""
SHAPE = (128, 64)
GRID = Grid(Mesh.of((FILES,), range(FILES)), (Cut(0),))
PAGE_BYTES = 4096
SPARE_BYTES = 4 << 30
"""The memory that DCP may take while it reads damaged metadata: a flipped bit in a pickle can ask for any amount."""
REFUSALS = (
    milepost.CheckpointDamaged,
    milepost.UnsafeCheckpoint,
    milepost.UnsupportedFormat,
    milepost.CheckpointNotFound,
)

State = dict[str, Any]
Load = Callable[[State, Path], Any]
Change = dict[str, bytes | None]
"""New contents by file name; None removes the file."""


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The rows, in order."""
    yield data_bits(full, folder / "data-bits")
    yield index_bits(full, folder / "index-bits")
    yield broken_files(full, folder / "broken-files")
    yield foreign_files(full, folder / "foreign-files")


# ---------------------------------------------------------------- states, saved and compared


def state_of(step: int) -> State:
    """Tensors of random bits, different for each step."""
    random_bits = torch.Generator().manual_seed(step)
    make = partial(torch.randint, -(2**31), 2**31, SHAPE, dtype=torch.int32, generator=random_bits)
    return {f"weight{i}": make().view(torch.float32) for i in range(FILES)}


def blank(state: Any) -> Any:
    """The same state with zeros for all tensors and numbers, to load into."""
    if isinstance(state, dict):
        return {key: blank(value) for key, value in state.items()}
    if isinstance(state, list):
        return [blank(value) for value in state]
    return torch.zeros_like(state) if isinstance(state, torch.Tensor) else type(state)()


def is_same(one: Any, other: Any) -> bool:
    """Whether both hold the same. Tensors are compared bit by bit, NaN included."""
    if isinstance(one, dict) and isinstance(other, dict):
        return one.keys() == other.keys() and all(is_same(one[key], other[key]) for key in one)
    if isinstance(one, list) and isinstance(other, list):
        return len(one) == len(other) and all(map(is_same, one, other))
    if not isinstance(one, torch.Tensor) or not isinstance(other, torch.Tensor):
        return type(one) is type(other) and one == other
    alike = one.dtype == other.dtype and one.shape == other.shape
    return alike and torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))


def save_milepost(state: State, folder: Path) -> None:
    """Save with one rank for each file; every tensor is sharded over all of them."""

    def part(value: Any, rank: int) -> Any:
        if not isinstance(value, torch.Tensor):
            return value
        (piece,) = GRID.pieces(SHAPE, rank)
        return milepost.Sharded.on_grid(SHAPE, value[piece.box.slices], GRID, rank)

    def save(comm: Any) -> None:
        milepost.save({key: part(value, comm.rank) for key, value in state.items()}, folder, process_group=comm)

    run_ranks(FILES, save)


def save_dcp(state: State, folder: Path) -> None:
    """Save from one rank into as many files."""
    with warnings.catch_warnings(action="ignore"):
        writer = dcp.FileSystemWriter(folder, thread_count=FILES, sync_files=False)
        dcp.save(state, storage_writer=writer, no_dist=True)


def load_dcp(target: State, folder: Path) -> None:
    """Load with DCP, in bounded memory and without its log, which has whole tracebacks."""
    logged, (limit, most) = logging.root.manager.disable, resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    logging.disable()
    resource.setrlimit(resource.RLIMIT_AS, (used + SPARE_BYTES, most))
    try:
        with warnings.catch_warnings(action="ignore"):
            dcp.load(target, checkpoint_id=folder, no_dist=True)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (limit, most))
        logging.disable(logged)


@dataclass(frozen=True, slots=True)
class Copy:
    """A checkpoint on disk whose files are changed and restored."""

    root: Path
    save: Callable[[State, Path], None]
    whole: dict[str, bytes]

    @classmethod
    def of(cls, save: Callable[[State, Path], None], state: State, root: Path) -> "Copy":
        """Save, and remember all files."""
        save(state, root)
        files = sorted(path for path in root.rglob("*") if path.is_file())
        return cls(root, save, {str(path.relative_to(root)): path.read_bytes() for path in files})

    def other(self, state: State) -> "Copy":
        """Another checkpoint of the same format, beside this one."""
        return Copy.of(self.save, state, self.root.with_name(f"{self.root.name}-other"))

    @property
    def data(self) -> list[str]:
        """The files with data."""
        return [name for name in self.whole if name.endswith((".safetensors", ".distcp"))]

    @property
    def index(self) -> str:
        """The manifest, or DCP's metadata."""
        (name,) = self.whole.keys() - set(self.data)
        return name

    def data_range(self, name: str) -> range:
        """Where the data is: between header and table in Milepost's files, anywhere in DCP's."""
        raw = self.whole[name]
        if not name.endswith(".safetensors"):
            return range(len(raw))
        (length,) = struct.unpack("<Q", raw[:8])
        start = 8 + length
        return range(start, start + json.loads(raw[8:start])["@checksums"]["data_offsets"][0])

    @contextmanager
    def changed(self, change: Change) -> Iterator[None]:
        """Apply a change inside the block, and restore the files after it."""
        self._write(change)
        try:
            yield
        finally:
            self._write({name: self.whole[name] for name in change})

    def _write(self, files: Change) -> None:
        for name, data in files.items():
            if data is None:
                (self.root / name).unlink()
            else:
                (self.root / name).write_bytes(data)


@dataclass(frozen=True, slots=True)
class Fault:
    """A change, the files that verifying must report (loading: one of them), and the state that the index describes."""

    change: Change
    names: frozenset[str]
    state: State


# ---------------------------------------------------------------- how a trial ends


def ending_in_milepost(root: Path, fault: Fault, load: Load) -> str:
    """Detected: loading raises and names the file, and verifying reports it too."""
    target = blank(fault.state)
    try:
        load(target, root)
    except REFUSALS as error:
        if not any(name in str(error) for name in fault.names):
            return "file not named"
    except Exception as error:
        return f"another error: {type(error).__name__}"
    else:
        return "harmless" if is_same(target, fault.state) else "silent"
    try:
        verify(root)
    except REFUSALS as error:
        return "detected" if all(name in str(error) for name in fault.names) else "not verified"
    return "not verified"


def verify(root: Path) -> None:
    """Read and check every byte. Raises everything that it found."""
    with milepost.open(root) as checkpoint:
        checkpoint.verify().raise_if_damaged()


def ending_in_dcp(root: Path, fault: Fault) -> str:
    """Detected: loading raises any error."""
    target = blank(fault.state)
    try:
        load_dcp(target, root)
    except (Exception, CheckpointException):
        return "detected"
    return "harmless" if is_same(target, fault.state) else "silent"


def count(copy: Copy, faults: Iterable[Fault], ending: Callable[[Path, Fault], str]) -> Tally:
    """Make the faults one by one, and count the endings."""
    counting = Counting()
    for fault in faults:
        assert any(copy.whole[name] != data for name, data in fault.change.items()), "no fault was made"
        with copy.changed(fault.change):
            counting.add(ending(copy.root, fault))
    return counting.tally


Faults = Callable[[Copy, State], Iterable[Fault]]


def both(folder: Path, state: State, faults: Faults, load: Load) -> tuple[Tally, Tally]:
    """The same kind of fault in a checkpoint of Milepost and in one of DCP."""
    ours, theirs = Copy.of(save_milepost, state, folder / "milepost"), Copy.of(save_dcp, state, folder / "dcp")
    return (
        count(ours, faults(ours, state), partial(ending_in_milepost, load=load)),
        count(theirs, faults(theirs, state), ending_in_dcp),
    )


# ---------------------------------------------------------------- 13, 14: one bit


def data_bits(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 13."""

    def faults(copy: Copy, state: State) -> Iterator[Fault]:
        rng = random.Random(13)
        for _ in range(800 if full else 40):
            name = rng.choice(copy.data)
            yield flipped(copy, name, rng.choice(copy.data_range(name)), rng, state)

    ours, theirs = both(folder, {**state_of(1), "step": 1}, faults, load)
    how = "a random bit of a random data file (for DCP that includes the zip headers around its tensors)"
    return FaultRow(13, "one bit of data", how, ours, frozenset({"detected"}), theirs)


def index_bits(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 14."""

    def faults(copy: Copy, state: State) -> Iterator[Fault]:
        rng = random.Random(14)
        shards = [name for name in copy.data if name.endswith(".safetensors")]
        for _ in range(800 if full else 40):
            name = rng.choice([copy.index, rng.choice(shards)]) if shards else copy.index
            places = range(len(copy.whole[name]))
            if name != copy.index:
                data = copy.data_range(name)
                places = [*places[: data.start], *places[data.stop :]]
            yield flipped(copy, name, rng.choice(places), rng, state)

    ours, theirs = both(folder, {**state_of(1), "step": 1}, faults, load)
    how = "a random bit of the manifest, or of a shard's header or table of checksums (DCP: of .metadata)"
    return FaultRow(14, "one bit of manifest or header", how, ours, frozenset({"detected"}), theirs)


def flipped(copy: Copy, name: str, position: int, rng: random.Random, state: State) -> Fault:
    """Flip one bit of a file."""
    raw = bytearray(copy.whole[name])
    raw[position] ^= 1 << rng.randrange(8)
    return Fault({name: bytes(raw)}, frozenset({name}), state)


# ---------------------------------------------------------------- 15: blocks and lengths


def broken_files(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 15."""

    def faults(copy: Copy, state: State) -> Iterator[Fault]:
        rng = random.Random(15)
        names = list(copy.whole)
        zeros, cuts, lost = (120, 120, 10) if full else (8, 8, 5)
        for make, trials in ((zeroed, zeros), (cut, cuts), (grown, cuts)):
            for _ in range(trials):
                name = rng.choice(names)
                yield Fault({name: make(copy.whole[name], rng)}, frozenset({name}), state)
        groups = [group for size in (1, 2) for group in combinations(names, size)]
        for group in groups[:lost]:
            # Without a manifest there is no checkpoint, and the error can only name the folder.
            named = frozenset({str(copy.root)} if copy.index in group else group)
            yield Fault(dict.fromkeys(group), named, state)

    ours, theirs = both(folder, {**state_of(1), "step": 1}, faults, load)
    how = "a page zeroed (120), a file cut (120) or extended (120), or one or two files lost (10)"
    note = "Without a manifest there is no checkpoint, and the error names the folder."
    return FaultRow(15, "a block zeroed; a file cut, grown or lost", how, ours, frozenset({"detected"}), theirs, note)


def zeroed(raw: bytes, rng: random.Random) -> bytes:
    """One page of zeros, as a lost write leaves it."""
    start = rng.randrange(0, len(raw), PAGE_BYTES)
    stop = min(start + PAGE_BYTES, len(raw))
    return raw[:start] + bytes(stop - start) + raw[stop:]


def cut(raw: bytes, rng: random.Random) -> bytes:
    """A shorter file, by a little or by much."""
    return raw[: rng.choice([rng.randrange(len(raw)), len(raw) - rng.randint(1, 16)])]


def grown(raw: bytes, rng: random.Random) -> bytes:
    """A longer file, by zeros, spaces or random bytes."""
    more = rng.choice([1, 8, rng.randint(1, 64), PAGE_BYTES])
    return raw + rng.choice([bytes(more), b" " * more, rng.randbytes(more)])


# ---------------------------------------------------------------- 16: files that belong elsewhere


def foreign_files(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 16: all cases, always."""
    del full
    ours, theirs = both(folder, state_of(1), misplaced, load)
    how = (
        "files of two ranks swapped, or one replaced by another; one file, all files or the index of another step of "
        "equal layout; its data under this step's header and table (DCP: files of one rank)"
    )
    return FaultRow(16, "files of another rank or step", how, ours, frozenset({"detected"}), theirs)


def misplaced(copy: Copy, state: State) -> Iterator[Fault]:
    """Every file in every wrong place."""
    other, whole, names = copy.other(state_of(2)), copy.whole, copy.data
    foreign = {name: other.whole[there] for name, there in zip(names, other.data, strict=True)}
    assert len({len(data) for data in [*foreign.values(), *map(whole.__getitem__, names)]}) == 1, "sizes differ"
    changes: list[Change] = [{one: whole[two], two: whole[one]} for one, two in combinations(names, 2)]
    changes += [{one: whole[two]} for one, two in permutations(names, 2)]
    changes += [{name: data} for name, data in foreign.items()] + [{**foreign}]
    for name, data in foreign.items():
        inside = copy.data_range(name)
        if len(inside) < len(data):
            changes.append({name: splice(whole[name], inside, data)})
    yield from (Fault(change, frozenset(change), state) for change in changes)
    # This index names the data of its own save, which is missing here.
    yield Fault({copy.index: other.whole[other.index]}, frozenset(other.data), state_of(2))


def splice(raw: bytes, inside: range, data: bytes) -> bytes:
    """A file with a part of another file."""
    return raw[: inside.start] + data[inside.start : inside.stop] + raw[inside.stop :]
