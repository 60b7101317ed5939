"""A histogram as rows of text. Pure."""

from collections.abc import Sequence

from milepost.cli import words
from milepost.cli.blocks import Cell
from milepost.core.statistics import bin_range

_MOST_ROWS = 24
_BAR = 30


def histogram_rows(bins: Sequence[tuple[int, int]]) -> list[list[Cell | str]]:
    """Rows (from, to, how many, a bar) of the pairs (bin, count) of a `TensorStatistics`.

    Where there are many bins, neighbours on the same side of zero share a row.
    """
    merged = _merged(sorted(bins))
    most = max(count for _, _, count in merged)
    return [
        [words.number(bin_range(first)[0]), words.number(bin_range(last)[1]), f"{count:,}", _bar(count, most)]
        for first, last, count in merged
    ]


def _bar(count: int, most: int) -> str:
    return "#" * max(round(_BAR * count / most), 1)


def _merged(bins: Sequence[tuple[int, int]]) -> list[tuple[int, int, int]]:
    """(first bin, last bin, count) in the order of the values, with as many bins to a row as it takes."""
    numbers = [number for number, _ in bins]
    together = 1
    while len({_row_of(number, together) for number in numbers}) > _MOST_ROWS:
        together *= 2
    rows: dict[tuple[int, int], tuple[int, int, int]] = {}
    for number, count in bins:
        row = _row_of(number, together)
        first, _, known = rows.get(row, (number, number, 0))
        rows[row] = first, number, known + count
    return list(rows.values())


def _row_of(number: int, together: int) -> tuple[int, int]:
    """The sign of a bin, and which row of that sign it is in."""
    return (number > 0) - (number < 0), abs(number) // together
