"""What one rank finds when it matches its state with a checkpoint."""

import msgspec

from milepost.core.box import Shape


class RankMatch(msgspec.Struct, frozen=True):
    """One rank's view: keys that are missing or differ, a bit for each saved key that it wants, the bytes to read.

    Other ranks want `shared_bytes` of them too. `extra_bytes` would be read beside them, for other ranks, and not in a
    swap. `on_device`: whether those are for a device; `host`: where it runs. `reasons`: why keys are missing, where
    there is more to say.
    """

    missing: tuple[str, ...]
    shapes: dict[str, tuple[Shape, Shape]]
    dtypes: dict[str, tuple[str, str]]
    kinds: dict[str, str]
    wanted: bytes
    read_bytes: int
    shared_bytes: int = 0
    on_device: bool = False
    host: bytes = b""
    reasons: dict[str, str] = {}  # msgspec copies it
    extra_bytes: int = 0
