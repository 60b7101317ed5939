"""Places as people write them for a question: a path or URL, and `@3` behind it for generation 3."""

import os
import re

from milepost.store import AtGeneration, Location, Store, store_at

_GENERATION = re.compile(r"(.*[^/])@([1-9][0-9]{0,7})", re.DOTALL)


def place_at(path: Location) -> Store:
    """The store at this place. `runs/a@3` is generation 3 of `runs/a`, unless a file or folder of that name exists.

    A slash at the end says that the `@3` belongs to the name.
    """
    match = _GENERATION.fullmatch(path) if isinstance(path, str) else None
    if match is None or os.path.exists(str(path)):
        return store_at(path)
    return AtGeneration(match[1], int(match[2]))
