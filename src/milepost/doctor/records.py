"""What a diagnosis found, as records."""

from typing import Literal

import msgspec

CheckState = Literal["ok", "warn", "fail", "skipped"]
"""`warn`: it works, and something should be known. `skipped`: an earlier failure left nothing to check."""


class PlaceCheck(msgspec.Struct, frozen=True, kw_only=True):
    """One thing that was checked: what was found, what to do about it (empty: nothing), and what was measured.

    The names of numbers end in their unit: `median_s`, `free_bytes`, `bytes_per_s`.
    """

    name: str
    state: CheckState
    found: str
    advice: str = ""
    numbers: dict[str, float] = {}


class RankView(msgspec.Struct, frozen=True, kw_only=True):
    """What one rank saw of the place: `unseen` are ranks whose files it did not find there. `clock_s`: see `clock`."""

    rank: int
    host: str
    file_system: str
    unseen: tuple[int, ...] = ()
    clock_s: float | None = None
    error: str = ""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """Whether a place is fit to hold checkpoints. `fit`: no check failed. `ranks`: those that looked together."""

    url: str
    kind: Literal["folder", "object store", "other"]
    fit: bool
    checks: tuple[PlaceCheck, ...]
    ranks: tuple[RankView, ...] = ()
