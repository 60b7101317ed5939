"""The rows and tables of object_store.py."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

from harness import Case
from showing import MOST_PEAK_MIB, Row, at_least, at_most, format_table

RAW, MILEPOST, S3FS, CONNECTOR = "raw", "Milepost", "DCP + s3fs", "DCP + s3torchconnector"
PART_BYTES = 64 << 20


@dataclass(frozen=True, slots=True)
class ObjectBars:
    """The bars of a case: the least share of raw's speed, the least speed over DCP's, and what may be read."""

    least_of_raw: float | None = None
    least_of_dcp: float | None = None
    most_read: float | None = None
    most_requests: Callable[[Case], int] | None = None


def object_rows(case: Case, bars: ObjectBars) -> Iterator[Row]:
    """The results of a case; those that can have a bar come first."""
    if raw := best_raw(case):
        yield at_least(f"{case.name}: Milepost, share of raw's speed", speed_of(case, raw), "x", bars.least_of_raw)
    for other, bar in ((S3FS, bars.least_of_dcp), (CONNECTOR, None)):
        if other in case.runs:
            yield at_least(f"{case.name}: Milepost / {other}, speed", speed_of(case, other), "x", bar)
    peak = case.peaks[MILEPOST] / 2**20
    yield at_most(f"{case.name}: Milepost, memory beyond the state, largest rank", peak, "MiB", MOST_PEAK_MIB)
    for who in case.runs:
        yield from _counted(case, who, bars if who == MILEPOST else ObjectBars())
        walls = [run.wall_s for run in case.runs[who]]
        yield Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s")
        yield Row(f"{case.name}: {who}, wall, fastest round", min(walls), "s")
        yield Row(f"{case.name}: {who}, wall, slowest round", max(walls), "s")
        yield Row(f"{case.name}: {who}, CPU", case.median(who, "cpu_s"), "s")


def _counted(case: Case, who: str, bars: ObjectBars) -> Iterator[Row]:
    if who not in case.counts:
        return
    counts = case.counts[who]
    most = bars.most_requests(case) if bars.most_requests else None
    yield at_most(f"{case.name}: {who}, requests", counts["requests"], "requests", most)
    if case.loads:
        yield at_most(f"{case.name}: {who}, bytes read / needed", _read(case, who), "x", bars.most_read)


def requests_of_save(case: Case) -> int:
    """How many requests a save may need: one for each 64 MiB, and a few for each rank."""
    return -(-case.size_bytes // PART_BYTES) + 4 * case.world + 10


def speed_of(case: Case, other: str) -> float:
    """The speed of Milepost over that of another, in the same round; the median over the rounds."""
    ratio = case.ratio(MILEPOST, (other,))
    assert ratio
    return 1 / ratio


def best_raw(case: Case) -> str | None:
    """The raw contender with the number of threads that is best in this case."""
    raws = [who for who in case.runs if who.startswith(RAW)]
    return min(raws, key=lambda who: case.median(who, "wall_s"), default=None)


def _read(case: Case, who: str) -> float:
    return case.counts[who]["bytes_down"] / case.size_bytes


def object_table(cases: list[Case]) -> str:
    """All cases and contenders in one table."""
    heads = ["case", "contender", "wall s", "min..max", "MB/s", "CPU s", "of raw", "Milepost is"]
    heads += ["requests", "read/needed", "extra MiB"]
    lines = []
    for case in cases:
        lines += [_line(case, who) for who in case.runs]
        lines.append([""] * len(heads))
    return format_table(heads, lines[:-1])


def _line(case: Case, who: str) -> list[str]:
    walls = [run.wall_s for run in case.runs[who]]
    wall, raw = case.median(who, "wall_s"), best_raw(case)
    counts = case.counts.get(who)
    of_raw = case.ratio(who, (raw,)) if raw else None
    return [
        case.name if who == next(iter(case.runs)) else "",
        who,
        f"{wall:.3f}",
        f"{min(walls):.3f}..{max(walls):.3f}",
        f"{case.size_bytes / wall / 1e6:.0f}" if case.size_bytes else "",
        f"{case.median(who, 'cpu_s'):.2f}",
        f"{1 / of_raw:.2f}" if of_raw else "",
        f"{speed_of(case, who):.1f}x" if who != MILEPOST and not who.startswith(RAW) else "",
        str(counts["requests"]) if counts else "",
        f"{_read(case, who):.3f}" if counts and case.loads else "",
        f"{case.peaks[who] / 2**20:.0f}",
    ]
