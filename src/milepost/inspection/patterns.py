"""Patterns that choose keys, as in a shell. One that chooses nothing is a mistake, and not an empty answer. Pure."""

import fnmatch
from collections.abc import Iterable

from milepost.core.manifest import Manifest
from milepost.core.tree import LEAVES
from milepost.errors import InvalidRequest

ALL = "*"


def keys_in(manifest: Manifest) -> Iterable[str]:
    """The keys of everything that a checkpoint holds."""
    return (node.key for node in manifest.tree if node.kind in LEAVES)


def refuse_unmatched(patterns: Iterable[str], keys: Iterable[str], where: str, noun: str = "key") -> None:
    """Raise InvalidRequest for patterns that fit none of these keys. `where`: what has the keys, for the message."""
    known: list[str] | None = None
    wrong = []
    for pattern in patterns:
        if pattern != ALL:
            known = list(keys) if known is None else known
            if not any(fnmatch.fnmatchcase(key, pattern) for key in known):
                wrong.append(repr(pattern))
    if wrong:
        raise InvalidRequest(f"{where}: no {noun} matches {', '.join(wrong)}. `milepost show` lists the keys")
