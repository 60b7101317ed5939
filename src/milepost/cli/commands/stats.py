"""`milepost stats`."""

from collections.abc import Iterator, Sequence
from typing import Literal

import click
import msgspec

from milepost.checkpoint import files_at
from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.complete import complete_keys
from milepost.cli.escape import meant, shown
from milepost.cli.histogram import histogram_rows
from milepost.cli.output import print_record, progress_shown
from milepost.cli.places import PLACE, advising, one_at
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.commit.find import told_if_gone
from milepost.core.statistics import TensorStatistics
from milepost.data.read import Files
from milepost.errors import InvalidRequest
from milepost.inspection.recorded import NumbersReport, numbers_at, numbers_of

Order = Literal["key", "rms", "max"]
_COLUMNS = [
    Column("TENSOR"),
    Column("NAN", right=True),
    Column("INF", right=True),
    Column("MIN", right=True, rank=1),
    Column("MAX", right=True, rank=1),
    Column("MEAN", right=True, rank=3),
    Column("RMS", right=True),
    Column("ELEMENTS", right=True, rank=4),
]
_BINS = [Column("FROM", right=True), Column("TO", right=True), Column("ELEMENTS", right=True), Column("", rank=1)]


@make_command(NumbersReport)
@click.argument("path", type=PLACE)
@click.argument("key", required=False, shell_complete=complete_keys)
@click.option("--compute", is_flag=True, help="Read the tensors of which nothing was recorded. Imports torch.")
@click.option("--keys", "pattern", metavar="PATTERN", help="Only keys that match, with * and ? as in a shell.")
@click.option("--sort", type=click.Choice(["key", "rms", "max"]), default="key", help="Which tensors first; see below.")
@click.option(
    "--limit", type=click.IntRange(min=0), default=50, metavar="N", help="At most N tensors; 0: all. By default 50."
)
def command(
    session: Session, path: str, key: str | None, compute: bool, pattern: str | None, sort: Order, limit: int
) -> Status:
    """Show the statistics of tensors: NaN, Inf, range, mean, rms.

    They are recorded by `milepost.save(..., statistics=True)` and by `Checkpointer(healthy=...)`, and are shown without
    reading data. --compute reads what was not recorded, verified and in pieces. With KEY: one tensor, and a histogram
    if there is one. Of a run, the newest step is shown.

    Tensors with NaN or Inf come first. Then --sort decides: the order of the state (key), the largest rms, or the
    largest absolute value (max). NaN and Inf do not count in the range, the mean and the rms.
    """
    if key is not None and pattern is not None:
        raise InvalidRequest("pass a KEY or --keys PATTERN, not both")
    place = one_at(path)
    with advising(place):
        files = files_at(place)
    try:
        with progress_shown() as bar, told_if_gone(place, files.manifest.generation, "read"):
            if key is None:
                found = numbers_of(files, pattern or "*", compute=compute, progress=bar)
            else:
                found = numbers_at(files, _known(files, key), compute=compute, progress=bar)
    finally:
        files.close()
    found = msgspec.structs.replace(found, url=place.url)  # of a file, and not of the folder that it is in
    print_record(found, session.json, lambda: _blocks(found, sort, limit) if key is None else _of_one(found, key))
    return Status.FINE


def _known(files: Files, key: str) -> str:
    """The key as it was saved, of a key as it was shown."""
    return key if any(tensor.key == key for tensor in files.manifest.tensors) else meant(key)


def _blocks(found: NumbersReport, sort: Order, limit: int) -> Iterator[Block]:
    yield from _about(found)
    if found.tensors:
        rows = [_row(one) for one in _sorted(found.tensors, sort)]
        shown = rows[:limit] if limit else rows
        yield line("")
        yield TextTable(_COLUMNS, shown)
        if len(shown) < len(rows):
            yield line(Cell(f"and {len(rows) - len(shown):,} more; --limit 0 shows all", "dim"))


def _about(found: NumbersReport) -> Iterator[Block]:
    counted = words.count(len(found.tensors), "tensor")
    bad = f"{words.count(found.not_finite, 'tensor')} with NaN or Inf"
    numbers = Cell(bad, "bad") if found.not_finite else Cell("all finite", "good")
    if found.tensors:
        how = {"recorded": "recorded when it was saved", "computed": "computed now"}.get(
            found.source, "partly recorded"
        )
        yield line(Cell(found.url, "bold"), f": {counted}, {how}; ", numbers)
    else:
        yield line(Cell(found.url, "bold"), ": no statistics")
    if found.health is not None:
        yield line(Cell("health    ", "dim"), "healthy" if found.health.ok else f"unhealthy: {found.health.reason}")
    if found.missing:
        what = words.count(found.missing, "tensor")
        advice = "--compute reads them; milepost.save(..., statistics=True) records them"
        yield line(Cell(f"nothing was recorded of {what}: {advice}", "warn"))


def _sorted(rows: Sequence[TensorStatistics], sort: Order) -> Sequence[TensorStatistics]:
    if sort == "key":
        return rows

    def size_of(one: TensorStatistics) -> float:
        if sort == "rms":
            return one.rms or 0.0
        return max(abs(one.min or 0.0), abs(one.max or 0.0))

    return sorted(rows, key=lambda one: (one.is_finite, -size_of(one)))


def _row(one: TensorStatistics) -> list[Cell | str]:
    odd = [Cell(f"{count:,}" if count else "", "bad") for count in (one.nan, one.inf)]
    numbers = ["" if value is None else words.number(value) for value in (one.min, one.max, one.mean, one.rms)]
    return [Cell(shown(one.key), "key" if one.is_finite else "bad"), *odd, *numbers, f"{one.count:,}"]


def _of_one(found: NumbersReport, key: str) -> Iterator[Block]:
    yield from _about(found)
    for one in found.tensors:
        if one.key not in (key, meant(key)):
            yield line(Cell("tied      ", "dim"), f"{shown(meant(key))} is the same tensor as {shown(one.key)}")
        yield line("")
        yield TextTable(_COLUMNS, [_row(one)])
        if one.histogram:
            yield line("")
            yield TextTable(_BINS, histogram_rows(one.histogram))
        elif found.source == "recorded":
            yield line(Cell('no histogram was recorded; milepost.save(..., statistics="histogram") does', "dim"))
