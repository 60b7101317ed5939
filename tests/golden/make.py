"""Make the golden checkpoint of the current format version: `python tests/golden/make.py`.

It is made once for each version and then kept: later versions must read these very bytes. Everything in it follows from
formulas in this file, so a test can tell what must come back without reading the checkpoint.
"""

import enum
import math
import shutil
import sys
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

import milepost
from milepost.comm import Comm
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import VERSION
from milepost.core.reuse import CELL_BYTES
from milepost.store import MemoryStore, Traits
from milepost.testing import run_ranks

HERE = Path(__file__).parent
WORLD = 4
METADATA = {"loss": 2.125, "tags": ("golden", None)}


class Colour(enum.Enum):
    """An enum in the state."""

    RED = 1
    BLUE = 2


@dataclass
class Config:
    """A dataclass in the state."""

    width: int
    rate: float
    colours: list[Colour]


class Pair(NamedTuple):
    """A namedtuple in the state."""

    left: Any
    right: Any


TYPES = (Colour, Config)


def pattern(dtype: str, shape: tuple[int, ...], start: int = 0) -> torch.Tensor:
    """A tensor whose n-th byte is (5 n + start) mod 251, or n mod 2 for booleans."""
    count = math.prod(shape) * DTYPES[dtype].size_bytes
    numbers = torch.arange(count, dtype=torch.int64)
    data = numbers % 2 if dtype == "bool" else (5 * numbers + start) % 251
    return data.to(torch.uint8).view(getattr(torch, dtype)).reshape(shape)


MESH = Mesh.of((2, 2), range(WORLD))
GRIDS = {
    "rows": ((10, 3), Grid(MESH, (Cut(0), None))),
    "columns": ((3, 10), Grid(MESH, (None, Cut(1)))),
    "tiles": ((5, 7), Grid(MESH, (Cut(0), Cut(1)))),
    "strided": ((16, 2), Grid(MESH, (Cut(0), Cut(0, 2)))),
    "few": ((3,), Grid(Mesh.of((WORLD,), (3, 2, 1, 0)), (Cut(0),))),
}
UNEVEN = ((0, 0, 2, 5), (0, 5, 6, 1), (2, 0, 4, 3), (2, 3, 4, 2))  # offset and shape of each rank's box of (6, 6)


def whole_tensors() -> dict[str, torch.Tensor]:
    """The tensors that are cut over ranks, whole."""
    tensors = {name: pattern("float32", shape, 10 + i) for i, (name, (shape, _)) in enumerate(GRIDS.items())}
    tensors["uneven"] = pattern("int16", (6, 6), 90)
    return tensors


def shared_values() -> dict[str, Any]:
    """What all ranks hold alike and that is no tensor."""
    return {
        "none": None,
        "flags": [True, False],
        "ints": [0, -1, 2**53, -(2**100)],
        "floats": [0.1, -0.0, math.inf, -math.inf, 5e-324],
        "nan": math.nan,
        "complex": complex(1, -math.inf),
        "text": ["", "ä€😀", "\ud800 alone", "a.b", "\0"],
        "bytes": [b"", b"\x00\xff", bytearray(b"abc")],
        "nested": [1, (2, [3, {4, 5}, frozenset({6})], {"a": {(7, "b"): None}})],
        "numpy": [np.float32(1.5), np.int8(-3), np.bool_(True), np.complex128(1 + 2j)],
        "torch": [torch.bfloat16, torch.Size([2, 3]), torch.device("cuda", 1)],
        "pair": Pair(1, Pair("x", (None,))),
        "enum": Colour.BLUE,
        "config": Config(4096, 3e-4, [Colour.RED, Colour.BLUE]),
    }


def plain_tensors() -> dict[Any, Any]:
    """What all ranks hold alike: tensors of every dtype, arrays, long bytes, in containers of every kind."""
    return {
        "dtypes": {dtype: pattern(dtype, (3, 2), i) for i, dtype in enumerate(DTYPES)},
        "scalar": torch.tensor(2.5, dtype=torch.float64),
        "empty": torch.zeros(0, 4),
        "array": np.arange(12, dtype=np.uint16).reshape(3, 4)[:, ::2],
        "long": bytes((7 * n) % 256 for n in range(65537)),
        "list": [pattern("int32", (2,)), ("x", pattern("int64", (1,), 7))],
        "ordered": OrderedDict([("z", torch.tensor(1)), ("a", torch.tensor(2))]),
        "default": defaultdict(list, {3: torch.tensor(3), "3": torch.tensor(33)}),
        "pair": Pair(torch.tensor([1]), torch.tensor([2])),
        0: {True: torch.tensor(5), None: "under None", (1, "t"): torch.tensor(6)},
        "a.b": torch.tensor(7),
        "a": {"b": torch.tensor(8)},
        "@odd]": torch.tensor(9),
    }


def private_value(rank: int) -> dict[str, Any]:
    """What one rank keeps for itself."""
    return {
        "seed": 1000 + rank,
        "noise": pattern("uint8", (4 + rank,), rank),
        "todo": list(range(rank)),
        "array": np.full(2, rank, dtype=np.int64),
    }


def local_parts(name: str, rank: int) -> dict[tuple[int, ...], torch.Tensor]:
    """The boxes of a cut tensor that a rank holds, by offset."""
    whole = whole_tensors()[name]
    if name == "uneven":
        row, column, rows, columns = UNEVEN[rank]
        return {(row, column): whole[row : row + rows, column : column + columns].clone()}
    shape, grid = GRIDS[name]
    return {piece.box.offset: whole[piece.box.slices].clone() for piece in grid.pieces(shape, rank)}


def cut_tensor(name: str, rank: int, fill: Callable[[torch.Tensor], torch.Tensor]) -> milepost.Sharded:
    """A rank's part of a cut tensor, as `save` takes it."""
    parts = {at: fill(part) for at, part in local_parts(name, rank).items()}
    shape, dtype = tuple(whole_tensors()[name].shape), whole_tensors()[name].dtype
    if name == "uneven":
        return milepost.Sharded(shape, parts, dtype)
    grid = GRIDS[name][1]
    local = torch.zeros(grid.local_shape(shape, rank) or (), dtype=dtype)
    for piece in grid.pieces(shape, rank):
        at = tuple(slice(a, a + n) for a, n in zip(piece.at, piece.box.shape, strict=True))
        local[at] = parts[piece.box.offset]
    return milepost.Sharded.on_grid(shape, local, grid, rank)


def state_of(rank: int) -> dict[str, Any]:
    """The state as one rank saves it."""
    return {
        "cut": {name: cut_tensor(name, rank, torch.clone) for name in whole_tensors()},
        "plain": plain_tensors(),
        "values": shared_values(),
        "mine": milepost.PerRank(private_value(rank)),
    }


def parts_state() -> dict[str, Any]:
    """What the checkpoint in parts holds: enough for two parts of data and a bit."""
    count = 2 * BLOCK_BYTES + 1001
    return {"bytes": (torch.arange(count) * 7 % 251).to(torch.uint8), "step": 9}


def make_parts(place: Path) -> None:
    """Write what an object store with small parts gets, as a plain copy of it on a disk."""
    store = MemoryStore(traits=Traits(part_bytes=BLOCK_BYTES, range_bytes=BLOCK_BYTES, requests=2, is_current=True))
    milepost.save(parts_state(), store)
    write_out(store, place)


def write_out(store: MemoryStore, place: Path) -> None:
    """Write what a store holds to a folder."""
    for name, data in store.objects.items():
        (place / name).parent.mkdir(parents=True, exist_ok=True)
        (place / name).write_bytes(data)


def recorded_tensors() -> dict[str, torch.Tensor]:
    """What all ranks hold alike in the checkpoint with statistics: one that is not finite, and one of each width."""
    odd = torch.tensor([math.nan, math.inf, -math.inf, 1e30, -1e-30, 0.0])
    return {"odd": odd, **{d: pattern(d, (3, 2), i) for i, d in enumerate(("bfloat16", "int64", "complex128", "bool"))}}


def make_recorded(place: Path) -> None:
    """Write a checkpoint with statistics, times of phases, and a verdict."""

    def save(comm: Comm) -> None:
        cut = {name: cut_tensor(name, comm.rank, torch.clone) for name in GRIDS}
        milepost.save(
            {**cut, **recorded_tensors()}, place, process_group=comm, statistics="histogram", healthy=lambda _: "golden"
        )

    run_ranks(WORLD, save)


def older_state(changes: int) -> dict[str, Any]:
    """What the checkpoint with an older file holds: a frozen tensor of more than one cell, and one that changes."""
    frozen = (torch.arange(CELL_BYTES + 4001) * 11 % 241).to(torch.uint8)
    return {"frozen": frozen, "adapter": pattern("float32", (7, 3), changes), "step": changes}


def make_older(place: Path) -> None:
    """Write the second of two incremental saves."""
    base = MemoryStore()
    milepost.save(older_state(1), base, base=base)  # the base of the next one, so it has digests
    made = MemoryStore()
    milepost.save(older_state(2), made, base=base)
    write_out(made, place)


def main() -> None:
    """Write the golden checkpoints; refuse to replace one."""
    for name, make in (("parts", make_parts), ("recorded", make_recorded), ("older", make_older)):
        if not (HERE / f"v{VERSION}-{name}").exists():
            make(HERE / f"v{VERSION}-{name}")
    place = HERE / f"v{VERSION}"
    if place.exists() and sys.argv[1:] != ["--replace"]:
        raise SystemExit(f"{place} exists; golden checkpoints are kept. Pass --replace before the first release.")
    shutil.rmtree(place, ignore_errors=True)
    run_ranks(
        WORLD,
        lambda comm: milepost.save(
            state_of(comm.rank), place, metadata=METADATA, types=TYPES, process_group=comm, compare_replicas=True
        ),
    )


if __name__ == "__main__":
    main()
