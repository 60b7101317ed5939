"""The decoders of row 20 of the table of faults, and valid inputs for them. The inputs are the same in every run."""

import io
import json
import pickle
import random
import re
import struct
import tempfile
import warnings
import zipfile
from collections import OrderedDict, defaultdict
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash
from torch.distributed.checkpoint.metadata import StorageMeta

import milepost
from attacks import forge, on_foreign
from faults.changes import change_bytes, change_json, change_opcodes
from faults.sound import leaves_fit, sound_header, sound_manifest, sound_pickle, sound_private, sound_value, tiled
from milepost.core import manifest as manifests
from milepost.core import shardfile
from milepost.core.private_record import read_private
from milepost.formats.read.content import read_content
from milepost.formats.read.recognise import recognise
from milepost.state.values import Codec

SEAL_BYTES = len(b',\n"checksum": "0123456789abcdef"\n}\n')
DIGITS, DATE = re.compile(rb"[0-9a-f]{16}"), re.compile(rb"[0-9-]{10}T[0-9:]{8}")
TIMINGS = re.compile(rb',\n"timings": \[.*?\n\]', re.DOTALL)


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: valid inputs, how they are changed, what it may raise, and a check of what it accepts."""

    percent: int
    seeds: list[bytes]
    change: Callable[[random.Random, bytes, bytes], bytes]
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    sound: Callable[[bytes, Any], bool]


@cache
def decoders() -> dict[str, Decoder]:
    """Everything that decodes bytes of a checkpoint, with valid inputs."""
    codec = Codec(forge.KNOWN_TYPES)
    sealings, heads, records = manifest_seeds(), header_seeds(), private_seeds()
    spelled = [msgspec.json.encode(codec.encode(value, "x")) for value in VALUES]
    wrong, unknown, refused = ValueError, LookupError, milepost.CheckpointError
    return {
        "manifest": Decoder(
            15, sealings, change_bytes, manifests.unseal, (wrong, unknown), lambda data, _: data in sealings
        ),
        "manifest, sealed again": Decoder(
            20, sealings, change_sealed, manifests.unseal, (wrong, unknown), sound_manifest
        ),
        "header": Decoder(20, heads, change_header, decode_header, (wrong,), sound_header),
        "value": Decoder(
            20,
            spelled,
            change_json,
            lambda data: codec.decode(msgspec.json.decode(data), "x"),
            (wrong, refused),
            lambda _, found: sound_value(codec, found),
        ),
        "private record": Decoder(5, records, change_json, read_private, (wrong,), sound_private),
        "pickle": Decoder(
            15,
            torch_pickles(),
            change_opcodes,
            lambda data: read_content(one_record(data), "x"),
            (refused,),
            sound_pickle,
        ),
        "DCP metadata": Decoder(
            5,
            [dcp_files()[".metadata"]],
            change_opcodes,
            recognised,
            (refused,),
            lambda _, found: tiled(found, len(found.files)) and leaves_fit(found),
        ),
    }


# ---------------------------------------------------------------- manifests and headers


def sealed(body: bytes) -> bytes:
    """A manifest with a matching checksum."""
    return body + b',\n"checksum": "%s"\n}\n' % xxhash.xxh3_64(body).hexdigest().encode()


def change_sealed(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A changed manifest with a matching checksum."""
    return sealed(change_json(rng, data[:-SEAL_BYTES] + b"}", other[:-SEAL_BYTES] + b"}")[:-1])


def manifest_seeds() -> list[bytes]:
    """A manifest as Milepost writes it, and one with every kind of entry."""
    files = forge.good_files()
    good = steady(next(data for name, data in files.items() if name.startswith("manifest"))[:-SEAL_BYTES])
    record = json.loads(good + b"}")
    halves = [{"box": [[0], [20]], "ranks": "1"}, {"box": [[20], [28]], "ranks": "0-1"}]
    record["layouts"].append({"kind": "boxes", "held": halves})
    forge.tensor_row(record, "model.bias")["layout"] = len(record["layouts"]) - 1
    record["layouts"].append({"kind": "grid", "mesh": {"shape": [2, 1], "ranks": "0-1"}, "cuts": [[0, 2], None]})
    forge.tensor_row(record)["layout"] = len(record["layouts"]) - 1
    for key, dtype, kind, parts in (("raw", "uint8", "bytes", 2), ("table", "float32", "numpy", 1)):
        record["tree"].append([1, key, "tensor", key])
        record["tensors"].append({"key": key, "dtype": dtype, "shape": [8], "layout": 1, "parts": parts, "kind": kind})
    forge.add_value(record, {"dict": [["a", {"tuple": [1, {"float": "nan"}]}]]})
    record["tree"] += [
        [1, "d", "defaultdict:int", ""],
        [1, "n", "namedtuple:Pair", ""],
        [1, {"int": "0x7"}, "list", ""],
    ]
    record["timings"] = [{"phase": "writing", "median_s": 0.25, "slowest_s": 1.5, "slowest_rank": 1}]
    numbers = {"count": 8, "nan": 1, "inf": 1, "min": -3.0, "max": 1.0, "mean": -1.0, "rms": 2.25}
    record["statistics"] = [{"key": "table", **numbers, "histogram": [[-1101, 1], [0, 2], [1100, 3]]}]
    record["health"] = {"ok": False, "reason": "1 NaN and 1 infinite in 'table'"}
    return [sealed(json.dumps(record).encode()[:-1]), sealed(good)]


def steady(data: bytes) -> bytes:
    """The same without what differs in every run: checksums, the name of the save, its times, and the date."""
    data = TIMINGS.sub(b"", data)
    return DATE.sub(b"2026-01-01T00:00:00", DIGITS.sub(b"0123456789abcdef", data))


def change_header(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """A changed header, with its length."""
    return with_length(change_json(rng, data[8:], other[8:]))


def with_length(text: bytes) -> bytes:
    """A header, with its length."""
    return struct.pack("<Q", len(text)) + text


def decode_header(data: bytes) -> shardfile.Header:
    """Decode a header, in a file of the length that it implies; for every 8th length, in a file of another length."""
    ends = re.findall(rb"\[ *[0-9]+, *([0-9]{1,9}) *\]", data)
    behind = int(ends[-1]) if ends and len(data) % 8 else 4096
    return shardfile.read_header(data, len(data) + behind, forge.BLOCK_BYTES)


def shards() -> list[tuple[bytes, bytes]]:
    """The header and the data of each shard file, in order of ranks."""
    files = [data for name, data in sorted(forge.good_files().items()) if name.endswith("safetensors")]
    ends = [8 + struct.unpack("<Q", data[:8])[0] for data in files]
    return [(data[8:end].rstrip(), data[end:]) for data, end in zip(files, ends, strict=True)]


def header_seeds() -> list[bytes]:
    """The headers of shard files."""
    return [with_length(steady(text)) for text, _ in shards()]


def private_seeds() -> list[bytes]:
    """The records of private values in shard files."""
    places = [(data, json.loads(text)["@private"]["data_offsets"]) for text, data in shards()]
    return [data[start:stop] for data, (start, stop) in places]


# ---------------------------------------------------------------- values and pickles


class Pair(NamedTuple):
    """A namedtuple, as a value."""

    a: int
    b: str


VALUES = (
    [
        None,
        True,
        7,
        2**80,
        0.5,
        float("inf"),
        "text",
        "\ud800",
        b"bytes",
        bytearray(b"a"),
        1 + 2j,
        (1, (2,)),
        {3},
        frozenset({4}),
    ],
    {"a": {1: "b", (2, 3): [forge.Color.RED, forge.Point(1, 2)]}, None: [torch.float32, torch.Size([2, 3])]},
    [torch.device("cpu"), np.float32(1.5), np.int64(7), Pair(1, "b")],
)


def one_record(data: bytes) -> Any:
    """Stands in for an archive whose only record is this pickle."""
    return SimpleNamespace(prefix="x/", records={"x/data.pkl": SimpleNamespace(crc=0)}, read=lambda _: data)


def torch_pickles() -> list[bytes]:
    """Pickles as torch writes them, and one without names."""
    kinds = [defaultdict(list), 1j, bytearray(b"a"), np.float32(1.5), torch.Size([2]), torch.device("cpu"), torch.int8]
    tensors = {"p": torch.nn.Parameter(torch.zeros(2, 3).T), "c": torch.zeros(2, dtype=torch.complex64).conj()}
    tensors["u"] = torch.zeros(3, dtype=torch.uint16)
    plain = {"a": [1, 2.5, None, True, b"x", (1, 2, 3, 4)], "b": {"c": {7, 8}, "d": 2**70}, 3: frozenset({"e"})}
    states = (on_foreign.good_state(), OrderedDict(tensors, kinds=kinds))
    return [*map(torch_pickle, states), pickle.dumps(plain, 2), pickle.dumps(plain, 5)]


def torch_pickle(state: Any) -> bytes:
    """The pickle in what `torch.save` writes."""
    buffer = io.BytesIO()
    torch.save(state, buffer)
    with zipfile.ZipFile(buffer) as archive:
        return archive.read("archive/data.pkl")


@cache
def dcp_files() -> dict[str, bytes]:
    """The files of a small checkpoint of DCP."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"b": torch.zeros(4, 3), "c": [torch.zeros(2)]}, "d": 7}, checkpoint_id=folder)
        files = {path.name: path.read_bytes() for path in Path(folder).iterdir()}
    metadata = pickle.loads(files[".metadata"])
    metadata.storage_meta = StorageMeta(checkpoint_id="x", save_id="y")  # otherwise different in every run
    return files | {".metadata": pickle.dumps(metadata, 4)}


def recognised(metadata: bytes) -> manifests.Manifest:
    """Decode DCP's metadata, with the data of `dcp_files`."""
    store = milepost.store.MemoryStore()
    store.objects.update(dcp_files() | {".metadata": metadata})
    found = recognise(store)
    assert found is not None
    return found.manifest
