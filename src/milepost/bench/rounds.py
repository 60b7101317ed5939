"""Contenders take turns, each round in another order; ratios are of one round, where all share the machine's noise."""

import gc
import random
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from milepost.bench.records import BenchCase, BenchRow

_FEWEST, _MOST = 2, 30
SMALL_BYTES, SMALL_TIMES = 4096, 10
"""What the small cases move, and how often in one run."""


@dataclass(frozen=True, slots=True)
class Contender:
    """One way to do something: `prepare` makes every run start alike, and only `action` is timed.

    `times`: how often `action` does it. `size_bytes`: how much it moves; 0 where its latency matters.
    """

    case: BenchCase
    name: str
    is_raw: bool
    prepare: Callable[[], object]
    action: Callable[[], object]
    size_bytes: int = 0
    times: int = 1


def run_rounds(contenders: Sequence[Contender], seconds: float) -> list[dict[str, float]]:
    """The seconds of each contender in each round, by case and name; as many rounds as fit, and at least two.

    The first round is not counted: it warms up.
    """
    order = list(contenders)
    gc.freeze()  # what is there now is not looked through again, before each run
    try:
        return _rounds(order, seconds)
    finally:
        gc.unfreeze()


def _rounds(order: list[Contender], seconds: float) -> list[dict[str, float]]:
    began, rounds, longest = time.monotonic(), list[dict[str, float]](), 0.0
    while len(rounds) <= _FEWEST or (len(rounds) <= _MOST and time.monotonic() - began + longest < seconds):
        started = time.monotonic()
        rounds.append({_key(one): _timed(one) for one in order})
        longest = max(longest, time.monotonic() - started)
        random.Random(len(rounds)).shuffle(order)  # noqa: S311  # an order, no secret
    return rounds[1:]


def _timed(one: Contender) -> float:
    gc.collect()
    one.prepare()
    began = time.perf_counter()
    one.action()
    return (time.perf_counter() - began) / one.times


def _key(one: Contender) -> str:
    return f"{one.case}/{one.name}"


def rows_of(contenders: Sequence[Contender], rounds: Sequence[dict[str, float]]) -> tuple[BenchRow, ...]:
    """What the rounds say of each contender. Pure."""
    return tuple(_row(one, contenders, rounds) for one in contenders)


def _row(one: Contender, contenders: Sequence[Contender], rounds: Sequence[dict[str, float]]) -> BenchRow:
    times = [each[_key(one)] for each in rounds]
    raw = [_key(other) for other in contenders if other.is_raw and other.case == one.case]
    ratios = [each[_key(one)] / min(each[key] for key in raw) for each in rounds]
    median = statistics.median(times)
    return BenchRow(
        case=one.case,
        contender=one.name,
        is_raw=one.is_raw,
        rounds=len(times),
        median_s=round(median, 6),
        fastest_s=round(min(times), 6),
        slowest_s=round(max(times), 6),
        bytes_per_s=round(one.size_bytes / median) if median > 0 else 0,
        times_raw=round(statistics.median(ratios), 3),
    )
