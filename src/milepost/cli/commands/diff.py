"""`milepost diff`."""

from collections.abc import Iterator, Sequence
from typing import Literal

import click

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.escape import shown
from milepost.cli.output import print_record, progress_shown
from milepost.cli.places import PLACE, advising, one_at
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.inspection.diff import Difference, DiffSide, TensorDifference, diff
from milepost.inspection.differing_values import ValueDifference

Order = Literal["key", "share", "max", "rms"]
_TENSORS = [
    Column("TENSOR"),
    Column("CHANGED", right=True),
    Column("MAX", right=True),
    Column("RMS", right=True),
    Column("NOT FINITE", right=True, rank=3),
    Column("DTYPE", rank=2),
    Column("SHAPE", rank=1),
    Column("SIZE", right=True, rank=4),
]


@make_command(Difference)
@click.argument("a", type=PLACE)
@click.argument("b", type=PLACE)
@click.option("--values", is_flag=True, help="Also how far the numbers are apart: largest and rms difference.")
@click.option("--keys", metavar="PATTERN", default="*", help="Only keys that match, and no metadata.")
@click.option("--sort", type=click.Choice(["key", "share", "max", "rms"]), default="key", help="Which tensors first.")
@click.option(
    "--limit",
    type=click.IntRange(min=0),
    default=50,
    metavar="N",
    help="At most N of each kind; 0: all. By default 50.",
)
@click.option("-q", "--quiet", is_flag=True, help="Print nothing; the exit status says it.")
def command(session: Session, a: str, b: str, values: bool, keys: str, sort: Order, limit: int, quiet: bool) -> Status:
    """Say what differs between two checkpoints.

    Keys, shapes, dtypes, values, metadata, and which tensors changed. Where both hold a tensor in the same boxes, their
    checksums are compared and the data is not read; elsewhere it is read, also between formats. CHANGED is the share of
    a tensor in blocks of 64 KiB that differ. Of a run, the newest step is compared; PATH@3 is generation 3 of a place.

    The exit status is 0 if nothing differs, 1 if something does, and more if that could not be found out. How a tensor
    is cut over ranks makes no difference, and is only mentioned.
    """
    places = one_at(a), one_at(b)
    with progress_shown() as bar, advising(*places):
        found = diff(*places, values=values or sort in ("max", "rms"), keys=keys, progress=bar)
    if not quiet:
        print_record(found, session.json, lambda: _blocks(found, sort, limit))
    return Status.FINE if found.same else Status.NO


def _blocks(found: Difference, sort: Order, limit: int) -> Iterator[Block]:
    yield line(Cell("A  ", "bold"), Cell(found.a.url, "bold"), _side(found.a))
    yield line(Cell("B  ", "bold"), Cell(found.b.url, "bold"), _side(found.b))
    for keys, where in ((found.only_a, "A"), (found.only_b, "B")):
        yield from _table([Column(f"ONLY IN {where}")], [[Cell(shown(key), "key")] for key in keys], limit)
    rows = [_row(one) for one in _sorted(found.tensors, sort)]
    yield from _table(_TENSORS, rows, limit)
    for title, texts in (("VALUE", found.values), ("METADATA", found.metadata)):
        yield from _table([Column(title), Column("A"), Column("B")], [_texts(one) for one in texts], limit)
    private: list[list[Cell | str]] = [[Cell(shown(one.key), "key"), one.ranks] for one in found.per_rank]
    yield from _table([Column("VALUE OF EACH RANK"), Column("DIFFERS ON RANKS")], private, limit)
    yield line("")
    for layouts in found.layouts:
        tensors = words.count(layouts.tensors, "tensor is", "tensors are")
        yield line(Cell(f"{tensors} cut another way: {layouts.a} in A, {layouts.b} in B", "dim"))
    yield line(Cell(_verdict(found), "good" if found.same else "warn"))
    yield line(Cell(_cost(found), "dim"))


def _side(side: DiffSide) -> str:
    what = f"generation {side.generation}" if side.generation else side.format
    created = f", {side.created}" if side.created else ""
    return f": {what}, {words.count(side.ranks, 'rank')}, {words.size(side.data_bytes)}{created}"


def _table(columns: Sequence[Column], rows: list[list[Cell | str]], limit: int) -> Iterator[Block]:
    if not rows:
        return
    shown = rows[:limit] if limit else rows
    yield line("")
    yield TextTable(columns, shown)
    if len(shown) < len(rows):
        yield line(Cell(f"and {len(rows) - len(shown):,} more; --limit 0 shows all", "dim"))


def _sorted(tensors: tuple[TensorDifference, ...], sort: Order) -> Sequence[TensorDifference]:
    """The largest first; what cannot be compared, before all others; else in the order of the state."""
    numbers = {"share": "share", "max": "max_difference", "rms": "rms_difference"}
    if sort == "key":
        return tensors
    found = ((getattr(one, numbers[sort]), one) for one in tensors)
    return [one for _, one in sorted(found, key=lambda pair: -pair[0] if pair[0] is not None else float("-inf"))]


def _row(one: TensorDifference) -> list[Cell | str]:
    return [
        Cell(shown(one.key), "key"),
        _changed(one),
        "" if one.max_difference is None else words.number(one.max_difference),
        "" if one.rms_difference is None else words.number(one.rms_difference),
        f"{one.not_finite:,}" if one.not_finite else "",
        _pair(*one.dtype),
        _pair(*map(words.shape, one.shape)),
        _pair(*map(words.size, one.size_bytes)),
    ]


def _changed(one: TensorDifference) -> Cell:
    """How much of the data changed; or what differs where that cannot be compared, or is the same."""
    if one.changed and one.share is not None:
        return Cell(f"{100 * one.share:.3g} %", "warn")
    if one.changed is None:
        return Cell("dtype" if one.dtype[0] != one.dtype[1] else "shape", "warn")
    return Cell("tied" if one.tied[0] != one.tied[1] else f"was {_pair(*one.kind)}", "warn")


def _pair(a: str, b: str) -> str:
    return a if a == b else f"{a} -> {b}"


def _texts(one: ValueDifference) -> list[Cell | str]:
    nothing = Cell("(none)", "dim")
    return [Cell(shown(one.key), "key"), nothing if one.a is None else one.a, nothing if one.b is None else one.b]


def _verdict(found: Difference) -> str:
    equal = f"{words.count(found.equal_tensors, 'tensor is equal', 'tensors are equal')}"
    if found.same:
        return f"no differences: {equal}"
    counts = (
        (len(found.tensors), "tensor differs", "tensors differ"),
        (len(found.values), "value differs", "values differ"),
        (len(found.per_rank), "value of ranks differs", "values of ranks differ"),
        (len(found.metadata), "entry of the metadata differs", "entries of the metadata differ"),
        (len(found.only_a), "key is only in A", "keys are only in A"),
        (len(found.only_b), "key is only in B", "keys are only in B"),
    )
    parts = [words.count(count, one, many) for count, one, many in counts if count]
    order = ["the containers or the order of the keys differ"] if found.containers else []
    return "; ".join([*parts, *order, equal])


def _cost(found: Difference) -> str:
    held = found.a.data_bytes + found.b.data_bytes
    share = f" ({100 * found.bytes_read / held:.2g} %)" if found.bytes_read < held else ""
    return (
        f"read {words.size(found.bytes_read)} of {words.size(held)}{share}; {found.by_tables:,} compared by checksums"
    )
