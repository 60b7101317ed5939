"""Fuzzed bytes for every decoder: valid inputs whose JSON, opcodes or bytes are changed. Row 20 of the table of faults.

Seeded, and not guided by coverage: an input that gives a new kind of error joins the seeds. An input may be refused with
an error that the decoder documents. What is accepted is checked by other means than the decoder's own: a manifest without
a fitting checksum never is; one sealed again can be written and read again, and its boxes tile its tensors; a header says
what Python's `json` reads; a value is the same after another round; a pickle is what Python's own reader makes of it.
"""

import io
import itertools
import json
import math
import pickle
import pickletools
import random
import re
import struct
import sys
import tempfile
import warnings
import zipfile
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from functools import cache, lru_cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch
import torch.distributed.checkpoint as dcp
import xxhash

import milepost
from milepost.core import manifest as manifests
from milepost.core import shardfile
from milepost.formats.content import read_content
from milepost.formats.recognise import recognise
from milepost.values import Codec

sys.path.append(str(Path(__file__).resolve().parents[1]))
from attacks import forge, on_foreign

REFUSED, ACCEPTED = "refused", "accepted and sound"
SEAL_BYTES = len(b',\n"checksum": "0123456789abcdef"\n}\n')
EVIL = (
    None,
    True,
    0,
    1,
    -1,
    2**31,
    2**53 + 1,
    2**63,
    -(2**64),
    0.5,
    1e308,
    "",
    "a",
    "..",
    "0-1",
    "0,0",
    "\ud800",
    [],
    {},
    [[]],
)


def fuzz_all(job: tuple[int, int]) -> tuple[dict[str, int], list[str]]:
    """How so many inputs ended, made from this seed; and what those looked like that ended badly."""
    ended, examples = Counter[str](), []
    for name, decoder in decoders().items():
        found, bad = fuzz(decoder, job[1] * decoder.percent // 100, random.Random(job[0]))
        ended.update(found)
        examples += [f"{name}: {text}" for text in bad[:3]]
    return ended, examples


@dataclass(frozen=True, slots=True)
class Decoder:
    """A decoder: valid inputs, how one is changed, what it may raise, and whether what it made of an input is sound."""

    percent: int
    seeds: list[bytes]
    change: Callable[[random.Random, bytes], bytes]
    decode: Callable[[bytes], Any]
    errors: tuple[type[Exception], ...]
    sound: Callable[[bytes, Any], bool]


def fuzz(decoder: Decoder, count: int, rng: random.Random) -> tuple[Counter[str], list[str]]:
    """The same for one decoder."""
    ended, bad, kept, kinds = Counter[str](), [], [], set()
    for _ in range(count):
        data = origin = rng.choice(kept if kept and rng.random() < 0.3 else decoder.seeds)
        while data == origin:
            data = decoder.change(rng, origin)
        kind = ""
        try:
            ending = ACCEPTED if decoder.sound(data, decoder.decode(data)) else "wrongly accepted"
        except decoder.errors as error:
            ending, kind = REFUSED, re.sub(r"[0-9]+|'[^']*'", "", str(error))[:80]
        except Exception as error:
            ending = f"crash ({type(error).__name__})"
        if ending not in (REFUSED, ACCEPTED):
            bad.append(f"{ending} {data!r}")
        elif kind not in kinds and len(kept) < 500:
            kinds.add(kind)
            kept.append(data)
        ended[ending] += 1
    return ended, bad


def change_bytes(rng: random.Random, data: bytes) -> bytes:
    """Some bytes overwritten, removed, inserted or repeated."""
    at, other = rng.randrange(len(data) + 1), rng.randrange(len(data) + 1)
    new = rng.choice((b"", bytes([rng.randrange(256)]), b"\xff" * 4, rng.randbytes(8), data[other : other + 16]))
    return data[:at] + new + data[at + rng.choice((0, 1, 1, len(new), 16)) :]


def change_json(rng: random.Random, data: bytes) -> bytes:
    """Some nodes of the tree replaced by odd ones or by others, removed, or doubled; or some bytes changed."""
    try:
        tree = [json.loads(data)] if rng.random() < 0.8 else []
    except (ValueError, RecursionError):
        tree = []
    slots = [(tree, 0)] if tree else []
    for node, key in slots:  # grows meanwhile
        inner = node[key]
        slots += (
            [(inner, k) for k in (inner if isinstance(inner, dict) else range(len(inner)))]
            if isinstance(inner, (dict, list))
            else []
        )
    for _ in range(rng.choice((1, 1, 2, 3)) if slots else 0):
        (node, key), (other, at) = rng.choice(slots), rng.choice(slots)
        with suppress(LookupError):  # a change before this one removed it
            new = rng.choice(EVIL) if rng.random() < 0.5 else json.loads(json.dumps(other[at]))
            match rng.randrange(4):
                case 0 if node is not tree:
                    del node[key]
                case 1 if isinstance(node, list):
                    node.insert(key, new)
                case _:
                    node[key] = new
    return json.dumps(tree[0]).encode() if slots else change_bytes(rng, data)


def change_opcodes(rng: random.Random, data: bytes) -> bytes:
    """Opcodes of a pickle removed, doubled or moved; or some bytes changed."""
    parts = list(_opcodes(data))
    if not parts or rng.random() < 0.4:
        return change_bytes(rng, data)
    at, other = rng.randrange(len(parts)), rng.randrange(len(parts))
    parts[at : at + rng.randrange(3)] = rng.choice(
        ([], [parts[other]], parts[other : other + 8], [parts[at], parts[at]])
    )
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    with suppress(Exception):
        places = [at for _, _, at in pickletools.genops(data)]
        return tuple(data[a:b] for a, b in itertools.pairwise([*places, len(data)]))
    return ()


# ---------------------------------------------------------------- what is sound


def sealed(body: bytes) -> bytes:
    """A manifest with a checksum that fits."""
    return body + b',\n"checksum": "%s"\n}\n' % xxhash.xxh3_64(body).hexdigest().encode()


def sound_manifest(_data: bytes, found: manifests.Manifest) -> bool:
    """Whether it can be written and read again, its tensors are tiled by boxes of ranks that exist, and names stay inside."""
    names = [found.file_name(file.rank) for file in found.files]
    inside = all(re.fullmatch(r"data/[0-9]{8}-[0-9a-f]{8,32}/[0-9]{5,6}\.safetensors", name) for name in names)
    return inside and manifests.unseal(manifests.seal(found)) == found and tiled(found, found.world)


def tiled(found: manifests.Manifest, ranks: int) -> bool:
    """Whether the boxes of each tensor fill it, without overlap, and belong to these ranks."""
    for tensor in found.tensors:
        layout = found.layout_of(tensor)
        held = [h for rank in range(min(ranks, 64)) for h in layout.held_by(tensor.shape, rank)]
        boxes = {h.box for h in held if h.box.elements}
        if sum(box.elements for box in boxes) != math.prod(tensor.shape):
            return False
        if any(max(h.holders) >= ranks for h in held):
            return False
        if any(a.intersect(b) for a, b in itertools.combinations(list(boxes)[:32], 2)):
            return False
    return True


def sound_header(data: bytes, found: shardfile.Header) -> bool:
    """Whether another parser of JSON reads the same entries, and they lie one behind the other."""
    plain = json.loads(data[8:].decode(errors="replace"), strict=False)
    mine = {n: (e.dtype, list(e.shape), list(e.data_offsets)) for n, e in found.entries.items()}
    theirs = {n: (e["dtype"], e["shape"], e["data_offsets"]) for n, e in plain.items() if n != "__metadata__"}
    ends = [0, *(e.data_offsets[1] for e in found.entries.values())]
    return mine == theirs and ends[:-1] == [e.data_offsets[0] for e in found.entries.values()]


class Plain(pickle._Unpickler):  # noqa: SLF001  # the one in Python: that in C takes any amount of memory
    """Python's own reader of pickles, for those that name nothing."""

    def find_class(self, module: str, name: str) -> Any:
        """Nothing."""
        raise pickle.UnpicklingError(f"{module}.{name}")


def sound_pickle(data: bytes, found: Any) -> bool:
    """Whether Python reads the same, if it reads it at all without making objects."""
    with suppress(Exception):
        return repr(Plain(io.BytesIO(data)).load()) == repr(found)
    return True


# ---------------------------------------------------------------- the decoders


class Pair(NamedTuple):
    """For a value."""

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


@cache
def decoders() -> dict[str, Decoder]:
    """Everything that turns bytes of a checkpoint into something, with inputs that are right."""
    files = forge.good_files()
    good = next(data for name, data in files.items() if name.startswith("manifest"))
    record = json.loads(good)
    record["layouts"].append({"kind": "boxes", "held": [{"box": [[0], [48]], "ranks": "1"}]})
    forge.tensor_row(record, "model.bias")["layout"] = len(record["layouts"]) - 1
    record["layouts"].append({"kind": "grid", "mesh": {"shape": [2, 1], "ranks": "0-1"}, "cuts": [[0, 2], None]})
    forge.tensor_row(record)["layout"] = len(record["layouts"]) - 1
    forge.add_value(record, {"dict": [["a", {"tuple": [1, {"float": "nan"}]}]]})
    del record["checksum"]
    seeds = [sealed(text[:-1]) for text in (json.dumps(record).encode(), good[:-SEAL_BYTES] + b"}")]
    shards = [data for name, data in files.items() if name.endswith("safetensors")]
    heads = [with_length(data[8 : 8 + struct.unpack("<Q", data[:8])[0]].rstrip()) for data in shards]
    codec = Codec(forge.KNOWN_TYPES)
    refusals = (ValueError, LookupError, milepost.CheckpointError)
    return {
        "manifest": Decoder(20, seeds, change_bytes, manifests.unseal, refusals[:2], lambda data, _: data in seeds),
        "manifest, sealed again": Decoder(
            20,
            seeds,
            lambda rng, data: sealed(change_json(rng, data[:-SEAL_BYTES] + b"}")[:-1]),
            manifests.unseal,
            refusals[:2],
            sound_manifest,
        ),
        "header": Decoder(
            20,
            heads,
            lambda rng, data: with_length(change_json(rng, data[8:])),
            lambda data: shardfile.read_header(data, len(data) + described(data), forge.BLOCK_BYTES),
            refusals[:1],
            sound_header,
        ),
        "value": Decoder(
            20,
            [msgspec.json.encode(codec.encode(value, "x")) for value in VALUES],
            change_json,
            lambda data: codec.decode(msgspec.json.decode(data), "x"),
            refusals[::2],
            lambda _, found: codec.encode(codec.decode(codec.encode(found, "x"), "x"), "x") == codec.encode(found, "x"),
        ),
        "pickle": Decoder(
            15, pickles(), change_opcodes, lambda data: read_content(one_record(data), "x"), refusals[2:], sound_pickle
        ),
        "DCP metadata": Decoder(
            5,
            [dcp_files()[".metadata"]],
            change_opcodes,
            recognised,
            refusals[2:],
            lambda _, found: tiled(found, len(found.files)),
        ),
    }


def with_length(text: bytes) -> bytes:
    """A header that says how long it is."""
    return struct.pack("<Q", len(text)) + text


def described(data: bytes) -> int:
    """How many bytes the last entry of a header says that the file has behind the header; for every 8th, something else."""
    ends = re.findall(rb"\[ *[0-9]+, *([0-9]{1,9}) *\]", data)
    return int(ends[-1]) if ends and len(data) % 8 else 4096


def one_record(data: bytes) -> Any:
    """What stands for an archive whose only record is this pickle."""
    return SimpleNamespace(prefix="x/", records={"x/data.pkl": SimpleNamespace(crc=0)}, read=lambda _: data)


def pickles() -> list[bytes]:
    """Pickles as torch writes them, and one that names nothing."""
    buffer = io.BytesIO()
    torch.save(on_foreign.good_state(), buffer)
    with zipfile.ZipFile(buffer) as archive:
        data = archive.read("archive/data.pkl")
    plain = {"a": [1, 2.5, None, True, b"x", (1, 2, 3, 4)], "b": {"c": {7, 8}, "d": 2**70}, 3: frozenset({"e"})}
    return [data, pickle.dumps(plain, 2), pickle.dumps(plain, 5)]


@cache
def dcp_files() -> dict[str, bytes]:
    """The files of a small checkpoint of DCP."""
    with tempfile.TemporaryDirectory() as folder, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.save({"a": {"b": torch.zeros(4, 3), "c": torch.zeros(2)}}, checkpoint_id=folder)
        return {path.name: path.read_bytes() for path in Path(folder).iterdir()}


def recognised(metadata: bytes) -> manifests.Manifest:
    """What DCP's metadata say, with the data of `dcp_files`."""
    store = milepost.MemoryStore()
    store.objects.update(dcp_files() | {".metadata": metadata})
    found = recognise(store)
    assert found is not None
    return found.manifest
