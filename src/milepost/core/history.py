"""How long a save took, phase by phase, over all ranks: the median, the slowest, and which rank that was. Pure."""

import math
import struct
from collections.abc import Mapping, Sequence

import msgspec

MAX_PHASES = 64
SAVE_PHASES = ("describing", "planning", "writing", "comparing", "waiting", "staging", "blocking")
"""The phases whose times a rank sends with its result, in this order."""
_MOST_S = 65504.0  # of a float of two bytes


class PhaseTime(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The seconds that one phase took: on the rank in the middle, on the slowest, and the number of the slowest."""

    phase: str
    median_s: float
    slowest_s: float
    slowest_rank: int


def pack_times(times: Mapping[str, float]) -> bytes:
    """The seconds of the phases of a save on one rank, in two bytes each: to 0.05 %, and up to 18 hours. Pure."""
    seconds = [min(times.get(phase, 0.0), _MOST_S) for phase in SAVE_PHASES]
    while seconds and not seconds[-1]:
        seconds.pop()
    return struct.pack(f"<{len(seconds)}e", *seconds)


def phase_times(packed: Sequence[bytes]) -> tuple[PhaseTime, ...]:
    """The phases of all ranks, given what `pack_times` gave on each, in order of rank. Pure.

    Ranks on which a phase took no time do not count for it. Of an even number of ranks, the median is the slower of the
    two in the middle.
    """
    if len(packed) == 1:
        alone = ((phase, round(s, 6)) for phase, s in zip(SAVE_PHASES, _seconds(packed[0]), strict=False) if s > 0)
        return tuple(PhaseTime(phase, s, s, 0) for phase, s in alone)
    import numpy as np  # noqa: PLC0415  # reading a manifest must not wait for it

    width = 2 * len(SAVE_PHASES)
    table = np.frombuffer(b"".join(times.ljust(width, b"\0") for times in packed), "<f2").reshape(-1, len(SAVE_PHASES))
    found = []
    for phase, column in zip(SAVE_PHASES, table.T.astype(np.float64), strict=True):
        taken = np.sort(column[column > 0])
        if len(taken):
            median_s, slowest_s = round(float(taken[len(taken) // 2]), 6), round(float(taken[-1]), 6)
            found.append(PhaseTime(phase, median_s, slowest_s, int(column.argmax())))
    return tuple(found)


def _seconds(packed: bytes) -> tuple[float, ...]:
    return struct.unpack(f"<{len(packed) // 2}e", packed)


def check_timings(timings: tuple[PhaseTime, ...], world: int) -> None:
    """Refuse times that no save can have taken. Raises ValueError."""
    if len(timings) > MAX_PHASES:
        raise ValueError(f"it has the times of {len(timings)} phases")
    for time in timings:
        if not (math.isfinite(time.median_s) and 0 <= time.median_s <= time.slowest_s < math.inf):
            raise ValueError(f"the times of the phase {time.phase[:80]!r} are impossible")
        if not 0 <= time.slowest_rank < world:
            raise ValueError(f"the phase {time.phase[:80]!r} names rank {time.slowest_rank} of {world}")
