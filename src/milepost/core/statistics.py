"""What is known of the numbers in a tensor without reading it: recorded while they were saved. Pure."""

import math
from collections.abc import Iterable, Mapping
from typing import Literal, Protocol

import msgspec

Recording = Literal["", "finite", "numbers", "histogram"]
"""What a save looks for in tensors: nothing; only what is not finite; statistics; these and histograms."""

MAX_TENSORS = 500_000
"""Of how many tensors a manifest has statistics: with more of them it could grow over its own limit."""
MAX_BINS = 4_000_000
"""The same for the bins of all histograms together."""
UNIT_BIN = 1100
"""The bin of the numbers from 1 to 2 (without 2): bins have numbers above 0, and float64 reaches down to 2**-1074."""
_FIRST_BIN, _LAST_BIN = UNIT_BIN - 1074, UNIT_BIN + 1023


class TensorStatistics(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """The numbers of one tensor: how many, how many of them NaN or infinite, and what the finite ones are like.

    Exact over all shards: each element counts once. `min`, `max`, `mean` and `rms` (root of the mean square) are those
    of the finite elements, and None where there are none. A complex number counts as two.

    `histogram`: pairs (bin, count) of the finite elements, in the order of their values; empty unless it was asked for.
    Bin `UNIT_BIN + e` has the numbers from 2**e up to (without) 2**(e + 1), bin `-(UNIT_BIN + e)` the same with a minus
    sign, and bin 0 the zeros. `bins` spells that out.

    >>> _ = milepost.save({"w": torch.tensor([1.0, -3.0, float("nan")])}, "memory://numbers", statistics=True)
    >>> found = milepost.open("memory://numbers").statistics["w"]
    >>> found.count, found.nan, found.min, found.max, found.mean
    (3, 1, -3.0, 1.0, -1.0)
    """

    key: str
    count: int
    nan: int = 0
    inf: int = 0
    min: float | None = None
    max: float | None = None
    mean: float | None = None
    rms: float | None = None
    histogram: tuple[tuple[int, int], ...] = ()

    @property
    def is_finite(self) -> bool:
        """Whether every element is a finite number."""
        return not self.nan and not self.inf

    @property
    def bins(self) -> tuple[tuple[float, float, int], ...]:
        """The histogram with the limits of each bin: (low, high, count). The limit nearer to zero belongs to it."""
        return tuple((*bin_range(number), count) for number, count in self.histogram)


class Health(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Whether the rule of the run found this checkpoint healthy when it was saved, and if not, why.

    >>> _ = milepost.save({"w": torch.tensor([float("inf")])}, "memory://sick", healthy=True)
    >>> milepost.open("memory://sick").health
    Health(ok=False, reason="1 infinite in 'w'")
    """

    ok: bool
    reason: str = ""


def bin_range(number: int) -> tuple[float, float]:
    """Between which two values the elements of a bin of a histogram lie. The limit nearer to zero belongs to it.

    >>> milepost.core.statistics.bin_range(1100), milepost.core.statistics.bin_range(-1101)
    ((1.0, 2.0), (-4.0, -2.0))
    """
    if not number:
        return 0.0, 0.0
    near = math.ldexp(1.0, abs(number) - UNIT_BIN)
    far = 2 * near  # infinite for the last bin of float64
    return (near, far) if number > 0 else (-far, -near)


class Counted(Protocol):
    """A tensor of a manifest, as far as its statistics are concerned."""

    @property
    def numbers(self) -> int:
        """How many numbers it has."""

    @property
    def has_statistics(self) -> bool:
        """Whether it can have statistics."""


def check_statistics(rows: Iterable[TensorStatistics], tensors: "Mapping[str, Counted]") -> None:
    """Refuse statistics of other tensors than these, or that contradict themselves. Raises ValueError."""
    seen: set[str] = set()
    for row in rows:
        tensor = tensors.get(row.key)
        if tensor is None or row.key in seen or not tensor.has_statistics:
            raise ValueError(f"it has statistics of {row.key[:80]!r}, twice or without that tensor")
        seen.add(row.key)
        finite = row.count - row.nan - row.inf
        if row.count != tensor.numbers or row.nan < 0 or row.inf < 0 or finite < 0:
            raise ValueError(f"the statistics of {row.key[:80]!r} do not count what is there")
        if not _fit(row, finite):
            raise ValueError(f"the statistics of {row.key[:80]!r} are impossible")


def _fit(row: TensorStatistics, finite: int) -> bool:
    if row.min is None or row.max is None or row.mean is None or row.rms is None:
        return not finite and row.min is row.max is row.mean is row.rms is None and not row.histogram
    if not finite or not row.min <= row.mean <= row.max or not 0 <= row.rms <= max(-row.min, row.max):
        return False
    return not row.histogram or _is_histogram(row.histogram, finite)


def _is_histogram(bins: tuple[tuple[int, int], ...], finite: int) -> bool:
    last = -_LAST_BIN - 1
    for number, count in bins:
        if not last < number <= _LAST_BIN or 0 < abs(number) < _FIRST_BIN or count < 1:
            return False
        last, finite = number, finite - count
    return not finite
