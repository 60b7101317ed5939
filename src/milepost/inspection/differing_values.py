"""What differs between the values, the metadata and the containers of two checkpoints, by their manifests. Pure."""

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec

from milepost.core.manifest import Manifest
from milepost.core.ranks import unpack_ranks
from milepost.core.tree import LEAVES
from milepost.inspection.spelled import text_of

_TEXT_LETTERS = 200
_BEFORE = 40
"""How many letters stand before the first that differs, where texts are cut."""


class ValueDifference(msgspec.Struct, frozen=True):
    """A value that differs: both as Python would write them, cut to what differs; None where there is none."""

    key: str
    a: str | None
    b: str | None


def kinds_of(manifest: Manifest) -> dict[str, str]:
    """What stands under each key, in the order of the state."""
    return {node.key: node.kind for node in manifest.tree if node.kind in LEAVES}


def shape_of_state(manifest: Manifest) -> list[tuple[int, bytes, str, str]]:
    """The containers of a state, with the places of its leaves."""
    return [(node.depth, msgspec.json.encode(node.name), node.kind, node.key) for node in manifest.tree]


def compare_values(
    one: Manifest, other: Manifest, mine: Mapping[str, str], theirs: Mapping[str, str]
) -> tuple[ValueDifference, ...]:
    """The values that differ, of the keys (with their kinds) that are to be compared."""
    spelled, others = ({value.key: value.value for value in manifest.values} for manifest in (one, other))
    both = [key for key, kind in mine.items() if kind == "value" == theirs.get(key)]
    found = list(_differing({key: spelled[key] for key in both}, {key: others[key] for key in both}))
    for key, kind in mine.items():
        if key in theirs and theirs[key] != kind:
            found.append(ValueDifference(key, _shown(one, key, spelled), _shown(other, key, others)))
    return tuple(found)


def compare_metadata(one: Manifest, other: Manifest) -> tuple[ValueDifference, ...]:
    """What differs in the metadata, by name."""
    return tuple(_differing(_named(one.metadata), _named(other.metadata)))


def _shown(manifest: Manifest, key: str, values: dict[str, Any]) -> str:
    """What stands under a key that is a tensor in one checkpoint and a value in the other."""
    if key in values:
        return _cut(text_of(values[key]), 0)
    tensor = next((tensor for tensor in manifest.tensors if tensor.key == key), None)
    if tensor is not None:
        return f"{tensor.kind} {tensor.dtype} {tensor.shape}"
    holders = next(one.ranks for one in manifest.per_rank if one.key == key)
    return f"one for each of {len(unpack_ranks(holders))} ranks"


def _differing(mine: dict[str, Any], theirs: dict[str, Any]) -> Iterator[ValueDifference]:
    """The values that differ as they are spelled: 1, 1.0 and True are three things."""
    for key in dict.fromkeys([*mine, *theirs]):
        if key not in mine:
            yield ValueDifference(key, None, _cut(text_of(theirs[key]), 0))
        elif key not in theirs:
            yield ValueDifference(key, _cut(text_of(mine[key]), 0), None)
        elif msgspec.json.encode(mine[key]) != msgspec.json.encode(theirs[key]):
            yield ValueDifference(key, *_texts(mine[key], theirs[key]))


def _texts(mine: Any, theirs: Any) -> tuple[str, str]:
    """Two values that differ, as texts that differ: long ones from shortly before the place where they do."""
    one, other = text_of(mine), text_of(theirs)
    if one == other:  # what differs was left out, or is not shown
        one, other = (msgspec.json.encode(spelled).decode() for spelled in (mine, theirs))
    same = next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))
    start = max(same - _BEFORE, 0) if max(len(one), len(other)) > _TEXT_LETTERS else 0
    return _cut(one, start), _cut(other, start)


def _cut(text: str, start: int) -> str:
    more = "…" if len(text) > start + _TEXT_LETTERS else ""
    return f"{'…' if start else ''}{text[start : start + _TEXT_LETTERS]}{more}"


def _named(metadata: Any) -> dict[str, Any]:
    """The metadata by name."""
    rows = metadata.get("dict", []) if isinstance(metadata, dict) else []
    return {name if isinstance(name, str) else text_of(name): value for name, value in rows}
