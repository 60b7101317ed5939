"""`milepost bench`."""

from collections.abc import Iterator

import click

from milepost.bench.records import BenchResult, BenchRow
from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record
from milepost.cli.places import PLACE
from milepost.cli.session import Session
from milepost.cli.sizes import SIZE
from milepost.cli.statuses import Status
from milepost.cli.stopping import ending_on_sigterm

_COLUMNS = [
    Column("CASE"),
    Column("WHO"),
    Column("MEDIAN", right=True),
    Column("FASTEST", right=True, rank=2),
    Column("SLOWEST", right=True, rank=2),
    Column("TIME / RAW", right=True),
]


@make_command(BenchResult)
@click.argument("path", type=PLACE)
@click.option("--size", type=SIZE, default="256M", show_default=True, help="How much one run writes and reads.")
@click.option("--seconds", type=click.FloatRange(min=1), default=60.0, show_default=True, help="About how long.")
def command(session: Session, path: str, size: int, seconds: float) -> Status:
    """Measure what a place gives, raw beside Milepost.

    Durable writes, reads from the cache and past it, and small files, by the system's own calls (or by requests alone)
    and by milepost.save and milepost.load, which verify. They take turns; a ratio is that of one round, as a median. It
    takes three times SIZE of memory, and all that it writes is removed.
    """
    with ending_on_sigterm():
        from milepost.bench.measure import measure  # noqa: PLC0415  # imports torch

        found = measure(path, size_bytes=size, seconds=seconds)
    print_record(found, session.json, lambda: _blocks(found))
    return Status.FINE


def _blocks(found: BenchResult) -> Iterator[Block]:
    yield TextTable(_COLUMNS, [_row(row, found.size_bytes) for row in found.rows])
    runs = f"{words.count(found.rounds, 'round')} with {words.size(found.size_bytes)} in {found.seconds:.0f} s"
    yield line(Cell(found.place, "bold"), f": {runs}; {found.versions}")


def _row(row: BenchRow, size_bytes: int) -> list[Cell | str]:
    shown = [_amount(seconds, size_bytes if row.bytes_per_s else 0) for seconds in _times(row)]
    return [row.case, Cell(row.contender, "" if row.is_raw else "bold"), *shown, f"{row.times_raw:.2f}"]


def _times(row: BenchRow) -> tuple[float, float, float]:
    return row.median_s, row.fastest_s, row.slowest_s


def _amount(seconds: float, size_bytes: int) -> str:
    """A rate where bytes are moved, else a time."""
    if size_bytes:
        return f"{size_bytes / max(seconds, 1e-9) / 1e6:,.0f} MB/s"
    return f"{seconds * 1000:.2f} ms"
