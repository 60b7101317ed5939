"""The forger's workshop: a good checkpoint, and the tools to change any byte of it and seal it again.

XXH3 is not secret, so a forger can seal anything. Nothing here goes through Milepost's own checks.
"""

import enum
import json
import struct
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import torch
import xxhash

import milepost
from milepost.core.layout import Cut, Grid, Mesh
from milepost.testing import run_ranks

WORLD = 2
BLOCK_BYTES = 1 << 20
WEIGHT = torch.arange(64 * 32, dtype=torch.float32).reshape(64, 32)
BIAS = torch.arange(48, dtype=torch.bfloat16)
GRID = Grid(Mesh.of((WORLD,), range(WORLD)), (Cut(0),))

Stop = Literal["open", "verify", "use", "nothing"]


class Color(enum.Enum):
    """An enum that the reader knows and passes."""

    RED = 1


@dataclass
class Point:
    """A dataclass that the reader knows and passes."""

    x: int
    y: int


KNOWN_TYPES = (Color, Point)


@dataclass(frozen=True)
class Attack:
    """One hostile checkpoint: how to make it, and what must stop it.

    `stop` says where: "open" (it does not open), "verify" (it opens, but verifying reports it and reading fails), "use"
    (only what touches the forged part fails), "nothing" (it must do no harm, and all data is right). `gap`, if set,
    says why the attack still gets through. Such an attack runs only when it is named.
    """

    name: str
    why: str
    stop: Stop
    make: Callable[[Path], None]
    gap: str = ""


class Corpus(list[Attack]):
    """A list of attacks, with a decorator that adds functions to it."""

    def attack(self, stop: Stop, gap: str = "") -> Callable[[Callable[[Path], None]], Callable[[Path], None]]:
        """Add the decorated function. Its name is the name of the attack, and its first line says why."""

        def add(make: Callable[[Path], None]) -> Callable[[Path], None]:
            why = (make.__doc__ or "").strip().split("\n")[0]
            self.append(Attack(make.__name__, why, stop, make, gap))
            return make

        return add


def good_state(rank: int) -> dict[str, Any]:
    """The state that is saved before anything is forged: the part of `rank`."""
    (piece,) = GRID.pieces(tuple(WEIGHT.shape), rank)
    return {
        "model": {
            "weight": milepost.Sharded.on_grid((64, 32), WEIGHT[piece.box.slices].clone(), GRID, rank),
            "bias": BIAS.clone(),
        },
        "step": 7,
        "names": ["a", ("b", 3)],
        "mine": milepost.PerRank({"seed": rank, "noise": torch.full((5,), float(rank))}),
    }


@cache
def good_files() -> dict[str, bytes]:
    """The files of the good checkpoint, as Milepost saves it."""
    store = milepost.store.MemoryStore()
    run_ranks(WORLD, lambda comm: milepost.save(good_state(comm.rank), store, process_group=comm, metadata={"a": 1}))
    return store.objects


def make_good(folder: Path) -> None:
    """Write the good checkpoint into a folder."""
    for name, data in good_files().items():
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def manifest_path(folder: Path) -> Path:
    """The manifest of the good checkpoint."""
    return folder / "manifest-00000001.json"


def shard_path(folder: Path, rank: int = 0) -> Path:
    """A shard file of the good checkpoint."""
    return next(iter((folder / "data").iterdir())) / f"{rank:05d}.safetensors"


def read_manifest(folder: Path) -> dict[str, Any]:
    """The manifest as plain data, without its seal."""
    record = json.loads(manifest_path(folder).read_bytes())
    del record["checksum"]
    return record


def write_manifest(folder: Path, record: Any) -> None:
    """Write any data as a manifest with a valid seal."""
    write_manifest_text(folder, json.dumps(record).encode())


def write_manifest_text(folder: Path, text: bytes) -> None:
    """Write any text that ends in a brace as a manifest with a valid seal."""
    body = text[:-1]
    seal = xxhash.xxh3_64(body).hexdigest()
    manifest_path(folder).write_bytes(body + f',\n"checksum": "{seal}"\n}}\n'.encode())


def forge_manifest(folder: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Save the good checkpoint and change its manifest."""
    make_good(folder)
    record = read_manifest(folder)
    change(record)
    write_manifest(folder, record)


def set_fields(folder: Path, **fields: Any) -> None:
    """Save the good checkpoint with other fields in its manifest."""
    forge_manifest(folder, lambda record: record.update(fields))


def replace_text(folder: Path, old: bytes, new: bytes) -> None:
    """Save the good checkpoint and replace a piece of the manifest's text. The manifest must hold the old text."""
    make_good(folder)
    text = json.dumps(read_manifest(folder)).encode()
    assert old in text, old
    write_manifest_text(folder, text.replace(old, new, 1))


def tensor_row(record: dict[str, Any], key: str = "model.weight") -> dict[str, Any]:
    """The manifest's entry for one tensor."""
    return next(row for row in record["tensors"] if row["key"] == key)


def set_layout(record: dict[str, Any], layout: dict[str, Any], shape: list[int], dtype: str = "float32") -> None:
    """Give `model.weight` another layout, shape and dtype."""
    record["layouts"].append(layout)
    tensor_row(record).update(layout=len(record["layouts"]) - 1, shape=shape, dtype=dtype)


def add_value(record: dict[str, Any], value: Any, name: Any = "evil", key: str = "evil") -> None:
    """Add a value to the state, by default under the name and key `evil`."""
    record["tree"].append([1, name, "value", key])
    record["values"].append({"key": key, "value": value})


def claim_large_files(record: dict[str, Any], size_bytes: int = 2**50) -> None:
    """Claim that the files are large enough for anything, although they are not."""
    for file in record["files"]:
        file["size_bytes"] = size_bytes


def read_shard(folder: Path, rank: int = 0) -> tuple[dict[str, Any], bytes]:
    """The header and the data of a shard file, without the table."""
    raw = shard_path(folder, rank).read_bytes()
    (length,) = struct.unpack("<Q", raw[:8])
    header = json.loads(raw[8 : 8 + length])
    start, _ = header["@checksums"]["data_offsets"]
    return header, raw[8 + length : 8 + length + start]


def table_of(data: bytes, block_bytes: int = BLOCK_BYTES) -> bytes:
    """The table of checksums for the data."""
    blocks = (data[at : at + block_bytes] for at in range(0, len(data), block_bytes))
    return b"".join(struct.pack("<Q", xxhash.xxh3_64_intdigest(block)) for block in blocks)


def write_shard(folder: Path, header: Any, data: bytes, table: bytes | None = None, rank: int = 0) -> None:
    """Write a shard file with any header, given as data or as text, and seal it in the manifest."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    text = text.ljust(-(-(8 + len(text)) // 4096) * 4096 - 8)
    head = struct.pack("<Q", len(text)) + text
    table = table_of(data) if table is None else table
    shard_path(folder, rank).write_bytes(head + data + table)
    seal_shard(folder, head, table, len(head) + len(data) + len(table), rank)


def seal_shard(folder: Path, head: bytes, table: bytes, size_bytes: int, rank: int = 0) -> None:
    """Replace the line of a shard file in the manifest."""
    record = read_manifest(folder)
    line = next(file for file in record["files"] if file["rank"] == rank)
    checksum = xxhash.xxh3_64(head + table).hexdigest()
    line.update(size_bytes=size_bytes, header_bytes=len(head), checksum=checksum)
    write_manifest(folder, record)


def forge_header(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save the good checkpoint and change the header of rank 0's file. `change` may return text instead."""
    make_good(folder)
    header, data = read_shard(folder)
    changed = change(header)
    write_shard(folder, changed if isinstance(changed, bytes) else header, data)


def forge_private(folder: Path, change: Callable[[dict[str, Any]], Any]) -> None:
    """Save the good checkpoint and change rank 0's record of private values. `change` may return text instead."""
    make_good(folder)
    header, data = read_shard(folder)
    start, stop = header["@private"]["data_offsets"]
    record = json.loads(data[start:stop])
    changed = change(record)
    text = changed if isinstance(changed, bytes) else json.dumps(record).encode()
    assert stop == len(data), "the record stands last"
    data = data[:start] + text
    blocks = -(-len(data) // BLOCK_BYTES)
    header["@private"].update(shape=[len(text)], data_offsets=[start, len(data)])
    header["@checksums"].update(shape=[blocks], data_offsets=[len(data), len(data) + 8 * blocks])
    write_shard(folder, header, data)


def nested(depth: int, kind: str = "list") -> str:
    """A value of the codec, nested to this depth, as JSON text: `{"list": [{"list": [ ... ]}]}`."""
    return f'{{"{kind}": [' * depth + "]}" * depth
