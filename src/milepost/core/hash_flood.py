"""Keys with equal hashes: a dict of many takes quadratic time, and an attacker can choose them. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
MAX_ALIKE = 64
"""How many keys of one dict may have the same hash. An attacker can choose all hashes but those of text and bytes."""


def differing(keys: Iterable[T]) -> list[T]:
    """The keys, or items of a set. Raises ValueError where many have the same hash; TypeError where one has none."""
    found = list(keys)
    # Nearly all keys are text, whose hashes cannot be predicted.
    alike = Counter(hash(key) for key in found if not isinstance(key, (str, bytes)))
    if alike and max(alike.values()) > MAX_ALIKE:
        distinct = {repr(key) for key in found if alike.get(hash(key), 0) > MAX_ALIKE}
        if len(distinct) > MAX_ALIKE:  # the same key many times does no harm
            raise ValueError("many keys have the same hash, which does not happen by chance")
    return found
