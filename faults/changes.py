"""How a valid input is changed: its JSON, its opcodes or its bytes, and with parts of another input. Seeded."""

import inspect
import itertools
import json
import pickletools
import random
import re
from contextlib import suppress
from functools import cache, lru_cache
from types import CodeType
from typing import Any

from milepost.core import (
    box,
    hash_flood,
    layout,
    manifest,
    private_record,
    ranks,
    shardfile,
    spans,
    strict_int,
    tiling,
    tree,
)
from milepost.formats.read import archive, content, dcp, dcp_metadata, pickle_machine, pickles, recognise, virtual
from milepost.state import values

WATCHED = (
    *(box, hash_flood, layout, manifest, private_record, ranks, shardfile, spans, strict_int, tiling, tree, values),
    *(archive, content, dcp, dcp_metadata, pickle_machine, pickles, recognise, virtual),
)
"""The modules that decode bytes."""
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
LETTERS = "0123456789,-.:/ aAF="
Slot = tuple[Any, Any]
"""A dict or list, and one of its keys or indices."""


def change_bytes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Some bytes overwritten, removed, inserted or repeated, or taken from the other input."""
    at, there = rng.randrange(len(data) + 1), rng.randrange(len(other) + 1)
    if rng.random() < 0.1:
        return data[:at] + other[there:]
    new = rng.choice((b"", bytes([rng.randrange(256)]), b"\xff" * 4, rng.randbytes(8), other[there : there + 16]))
    return data[:at] + new + data[at + rng.choice((0, 1, 1, len(new), 16)) :]


def change_json(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Some nodes of the tree replaced, removed, doubled or renamed; or some bytes changed."""
    slots = _slots(data) if rng.random() < 0.8 else []
    if not slots:
        return change_bytes(rng, data, other)
    donors = slots if other == data else _slots(other) or slots
    tree = slots[0][0]
    for _ in range(rng.choice((1, 1, 2, 3))):
        with suppress(LookupError):  # an earlier change removed it
            _change_node(rng, tree, slots, donors)
    return json.dumps(tree[0]).encode()


def _slots(data: bytes) -> list[Slot]:
    """Every place of the tree, the root first; none if the data is not JSON."""
    try:
        slots: list[Slot] = [([json.loads(data)], 0)]
    except (ValueError, RecursionError):
        return []
    for node, key in slots:  # grows during the loop
        inner = node[key]
        if isinstance(inner, dict):
            slots += [(inner, name) for name in inner]
        elif isinstance(inner, list):
            slots += [(inner, i) for i in range(len(inner))]
    return slots


def _change_node(rng: random.Random, tree: list[Any], slots: list[Slot], donors: list[Slot]) -> None:
    (node, key), (giver, at) = rng.choice(slots), rng.choice(donors)
    new = rng.choice((rng.choice(EVIL), rng.choice(words()), *[json.loads(json.dumps(giver[at]))] * 2))
    match rng.randrange(7):
        case 0 if node is not tree:
            del node[key]
        case 1 if isinstance(node, list) and node is not tree:
            node[key:key] = [new] * rng.choice((1, 1, 1, 2, 70))
        case 2 if isinstance(node, dict):
            names = [name for _, name in donors if isinstance(name, str)]
            node[rng.choice((*names, *words()))] = node.pop(key)
        case 3 | 4 if type(node[key]) is int:
            node[key] = rng.choice((node[key] + 1, node[key] - 1, node[key] * 2, node[key] // 2))
        case 3 | 4 if type(node[key]) is str:
            place = rng.randrange(len(node[key]) + 1)
            node[key] = node[key][:place] + rng.choice(LETTERS) + node[key][place + rng.randrange(2) :]
        case _:
            node[key] = new


@cache
def words() -> tuple[str, ...]:
    """The words in the code of the decoders: many of them have a meaning in an input."""
    found: dict[str, None] = {}
    pending: list[Any] = [compile(inspect.getsource(module), module.__name__, "exec") for module in WATCHED]
    while pending:
        constant = pending.pop()
        if isinstance(constant, CodeType):
            pending += constant.co_consts
        elif isinstance(constant, tuple | frozenset):
            pending += sorted(constant, key=repr)
        elif isinstance(constant, str) and re.fullmatch(r"[\w.:@-]{1,24}", constant):
            found[constant] = None
    return tuple(sorted(found))


def change_opcodes(rng: random.Random, data: bytes, other: bytes) -> bytes:
    """Opcodes of a pickle removed, doubled, moved, or taken from the other input; or some bytes changed."""
    parts, donors = list(_opcodes(data)), _opcodes(other)
    if not parts or not donors or rng.random() < 0.4:
        return change_bytes(rng, data, other)
    at, there = rng.randrange(len(parts)), rng.randrange(len(donors))
    parts[at : at + rng.randrange(3)] = rng.choice(
        ([], [donors[there]], donors[there : there + rng.randrange(1, 16)], [parts[at], parts[at]])
    )
    return b"".join(parts)


@lru_cache(maxsize=1024)
def _opcodes(data: bytes) -> tuple[bytes, ...]:
    with suppress(Exception):
        places = [at for _, _, at in pickletools.genops(data)]
        return tuple(data[a:b] for a, b in itertools.pairwise([*places, len(data)]))
    return ()
