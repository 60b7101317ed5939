"""What a benchmark of a place measured, as records."""

from typing import Literal

import msgspec

BenchCase = Literal["durable write", "read, cached", "read, not cached", "read", "small write", "small read"]
"""`read`: where nothing is cached on this machine. The small ones are of one file, object or checkpoint."""


class BenchRow(msgspec.Struct, frozen=True, kw_only=True):
    """One contender in one case: its seconds over the rounds, and its rate (0 for the small ones).

    `times_raw`: its time over that of the fastest raw contender in the same round, as a median; 1 is the limit.
    """

    case: BenchCase
    contender: str
    is_raw: bool
    rounds: int
    median_s: float
    fastest_s: float
    slowest_s: float
    bytes_per_s: float
    times_raw: float


class BenchResult(msgspec.Struct, frozen=True, kw_only=True):
    """What was measured at a place. `size_bytes`: of what was written and read in one run."""

    url: str
    kind: Literal["folder", "object store"]
    place: str
    size_bytes: int
    rounds: int
    seconds: float
    versions: str
    rows: tuple[BenchRow, ...]
