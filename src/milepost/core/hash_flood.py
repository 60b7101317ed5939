"""Keys that hash alike: a dict of many takes time that grows with their square, and a forger can choose them. Pure."""

from collections import Counter
from collections.abc import Iterable
from typing import TypeVar

T = TypeVar("T")
MAX_ALIKE = 64
"""How many keys of one dict may have the same hash. Those of text and bytes are secret, of all others anyone can choose."""


def differing(keys: Iterable[T]) -> list[T]:
    """The keys, or items of a set. Raises ValueError where many have the same hash; TypeError where one has none."""
    found = list(keys)
    # Text is what nearly all keys are, and its hashes cannot be foreseen.
    alike = Counter(hash(key) for key in found if not isinstance(key, (str, bytes)))
    if alike and max(alike.values()) > MAX_ALIKE:
        distinct = {repr(key) for key in found if alike.get(hash(key), 0) > MAX_ALIKE}
        if len(distinct) > MAX_ALIKE:  # the same key many times is no trouble
            raise ValueError("many keys have the same hash, which nobody has by chance")
    return found
