"""What the benchmarks show: rows with bars, and tables."""

import argparse
import json
from collections.abc import Iterable, Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from harness import Case

RAW, DIRECT, SAFETENSORS, DCP, MILEPOST = "raw", "raw direct", "safetensors", "DCP", "Milepost"
UNVERIFIED, UNSUMMED = "Milepost, unverified", "Milepost, no checksums"
ONCE = "Milepost, read once"
MOST_READ_ONCE = 1.05
MOST_PEAK_MIB = 512


@dataclass(frozen=True, slots=True)
class Row:
    """One result. `bar` says what it should be ("<= 1.15"). It and `ok` are None where there is no bar."""

    name: str
    value: float
    unit: str
    bar: str | None = None
    ok: bool | None = None


@dataclass(frozen=True, slots=True)
class Bars:
    """The bars of a case: limits for time over raw, and for speed over other contenders, and so on."""

    most_of_raw: float | None = None
    most_of_raw_unverified: float | None = None
    least_of_dcp: float | None = None
    least_of_safetensors: float | None = None
    most_read: float | None = None
    most_checksums_percent: float | None = None


def at_most(name: str, value: float, unit: str, bar: float | None) -> Row:
    """A row that should not exceed its bar."""
    return Row(name, value, unit) if bar is None else Row(name, value, unit, f"<= {bar}", value <= bar)


def at_least(name: str, value: float, unit: str, bar: float | None) -> Row:
    """A row that should reach its bar."""
    return Row(name, value, unit) if bar is None else Row(name, value, unit, f">= {bar}", value >= bar)


def below(name: str, value: float, unit: str, bar: float | None) -> Row:
    """A row that should stay under its bar."""
    return Row(name, value, unit) if bar is None else Row(name, value, unit, f"< {bar}", value < bar)


def rows_of(case: Case, bars: Bars) -> list[Row]:
    """The results of a case; rows that can have a bar come first."""
    return [*_beside_raw(case, bars), *_beside_others(case, bars), *_checksums(case, bars), *_figures(case, bars)]


def _beside_raw(case: Case, bars: Bars) -> Iterator[Row]:
    for who, bar in ((MILEPOST, bars.most_of_raw), (UNVERIFIED, bars.most_of_raw_unverified), (ONCE, None)):
        if who in case.runs and (ratio := case.ratio(who, (RAW, DIRECT))):
            yield at_most(f"{case.name}: {who} / raw", ratio, "x", bar)


def _beside_others(case: Case, bars: Bars) -> Iterator[Row]:
    for who, bar in ((DCP, bars.least_of_dcp), (SAFETENSORS, bars.least_of_safetensors)):
        if ratio := case.ratio(MILEPOST, (who,)):
            yield at_least(f"{case.name}: {who} / Milepost", 1 / ratio, "x", bar)


def _checksums(case: Case, bars: Bars) -> Iterator[Row]:
    """The share of the time that checksums take: what is saved by leaving them out."""
    for without in (UNVERIFIED, UNSUMMED):
        if ratio := case.ratio(without, (MILEPOST,)):
            name = f"{case.name}: checksums, share of the time"
            yield below(name, 100 * (1 - ratio), "%", bars.most_checksums_percent)


def _figures(case: Case, bars: Bars) -> Iterator[Row]:
    peak = max(case.peaks.get(who, 0) for who in (MILEPOST, UNVERIFIED, ONCE))
    yield at_most(f"{case.name}: Milepost, memory beyond the state, largest rank", peak / 2**20, "MiB", MOST_PEAK_MIB)
    for who in case.runs:
        if case.loads:
            read = case.median(who, "read_bytes") / case.size_bytes
            most = {MILEPOST: bars.most_read, ONCE: MOST_READ_ONCE}.get(who)
            yield at_most(f"{case.name}: {who}, bytes read / needed", read, "x", most)
        walls = [run.wall_s for run in case.runs[who]]
        yield Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s")
        yield Row(f"{case.name}: {who}, wall, fastest round", min(walls), "s")
        yield Row(f"{case.name}: {who}, wall, slowest round", max(walls), "s")
        yield Row(f"{case.name}: {who}, CPU", case.median(who, "cpu_s"), "s")


def worst_peak(rows: list[Row]) -> Row:
    """A row for the case in which Milepost took the most memory."""
    worst = max((row for row in rows if row.unit == "MiB"), key=lambda row: row.value)
    return at_most(
        f"memory beyond the state, worst of all ({worst.name.split(':')[0]})", worst.value, "MiB", MOST_PEAK_MIB
    )


# Tables


def table_of(cases: list[Case]) -> str:
    """All cases and contenders in one table."""
    heads = ["case", "contender", "wall s", "min..max", "GB/s", "CPU s", "x raw", "DCP/it", "read/needed", "extra MiB"]
    lines = []
    for case in cases:
        for who in case.runs:
            lines.append(_line(case, who))
        lines.append([""] * len(heads))
    return format_table(heads, lines[:-1])


def _line(case: Case, who: str) -> list[str]:
    walls = [run.wall_s for run in case.runs[who]]
    wall = case.median(who, "wall_s")
    to_raw, to_dcp = case.ratio(who, (RAW, DIRECT)), case.ratio(who, (DCP,))
    digits = 3 if wall > 0.1 else 4
    return [
        case.name if who == next(iter(case.runs)) else "",
        who,
        f"{wall:.{digits}f}",
        f"{min(walls):.{digits}f}..{max(walls):.{digits}f}",
        f"{case.size_bytes / wall / 1e9:.2f}",
        f"{case.median(who, 'cpu_s'):.3f}",
        f"{to_raw:.2f}" if to_raw else "",
        f"{1 / to_dcp:.2f}" if to_dcp else "",
        f"{case.median(who, 'read_bytes') / case.size_bytes:.2f}" if case.loads else "",
        f"{case.peaks[who] / 2**20:.0f}",
    ]


def bars_table(rows: list[Row]) -> str:
    """The rows that have a bar."""
    lines = [
        ["met" if row.ok else "MISSED", row.name, f"{row.value:.2f} {row.unit}", row.bar] for row in rows if row.bar
    ]
    return format_table(["", "bar", "value", "wanted"], lines)


def format_table(heads: list[str], lines: list[list[str]]) -> str:
    """A text table: the first two columns are left-aligned, the rest right-aligned."""
    widths = [max(len(line[i]) for line in [heads, *lines]) for i in range(len(heads))]
    heads_and_lines = [heads, ["-" * width for width in widths], *lines]
    return "\n".join("  ".join(_cells(line, widths)).rstrip() for line in heads_and_lines)


def _cells(line: list[str], widths: list[int]) -> Iterator[str]:
    for i, (cell, width) in enumerate(zip(line, widths, strict=True)):
        yield cell.ljust(width) if i < 2 else cell.rjust(width)


def write_rows(file: Path, rows: Iterable[Row]) -> None:
    """The rows as JSON."""
    file.write_text(json.dumps([asdict(row) for row in rows], indent=1))


# Arguments


def positive(text: str) -> int:
    """A whole number of at least 1, for argparse."""
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)
