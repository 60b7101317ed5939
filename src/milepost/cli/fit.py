"""Tables as lines: the widths of columns, what a narrow terminal leaves out, and what is cut. Pure."""

import unicodedata
from collections.abc import Iterator, Sequence

from milepost.cli.blocks import Cell, Column, TextTable, cell_of
from milepost.core.printable import printable

_GAP = "  "
_LEAST = 8
"""The narrowest that a column becomes before a terminal wraps the line."""
_PADDED = 80
"""What is longer than this pushes the rest of its row aside, not that of all rows."""


def width_of(text: str) -> int:
    """How many columns of a terminal a text takes."""
    return len(text) if text.isascii() else sum(map(_letter_width, text))


def _letter_width(letter: str) -> int:
    if unicodedata.category(letter) in ("Mn", "Me"):
        return 0
    return 2 if unicodedata.east_asian_width(letter) in "WF" else 1


def cut_to(text: str, width: int) -> str:
    """At most this wide: the start and the end, where names say the most, with `…` between them."""
    if width_of(text) <= width:
        return text
    head = _start(text, width // 2)
    tail = _start(text[::-1], width - 1 - width_of(head))
    return f"{head}…{tail[::-1]}"


def _start(text: str, width: int) -> str:
    """As much of the start as is this wide."""
    taken = 0
    for place, letter in enumerate(text):
        taken += _letter_width(letter)
        if taken > width:
            return text[:place]
    return text


def rows_of(table: TextTable, width: int | None) -> Iterator[list[Cell]]:
    """The titles and the rows, each a list of cells that are escaped, cut and padded. `width`: None for no limit.

    Columns without content are left out, and a table without any is nothing. Where a terminal is too narrow, columns of
    a high rank go, then the widest are cut.
    """
    rows = [[Cell(printable(cell.text), cell.style) for cell in map(cell_of, row)] for row in table.rows]
    places = [place for place in range(len(table.columns)) if any(row[place].text for row in rows)]
    if not places:
        return
    widths = {place: _natural(table.columns[place], [row[place].text for row in rows]) for place in places}
    if width is None:
        widths = {place: min(natural, _PADDED) for place, natural in widths.items()}
    else:
        widths = _narrowed(widths, table.columns, width)
    titles = [Cell(column.title, "dim") for column in table.columns]
    for row in [titles, *rows] if any(column.title for column in table.columns) else rows:
        yield _padded(row, widths, table.columns, width is not None)


def _natural(column: Column, texts: Sequence[str]) -> int:
    return max(map(width_of, (column.title, *texts)))


def _narrowed(widths: dict[int, int], columns: Sequence[Column], width: int) -> dict[int, int]:
    """The widths with which a table fits, of the columns that are shown."""
    widths = dict(widths)

    def excess() -> int:
        return sum(widths.values()) + len(_GAP) * (len(widths) - 1) - width

    for place in sorted(widths, key=lambda place: columns[place].rank, reverse=True):
        if excess() > 0 and columns[place].rank:
            del widths[place]
    while excess() > 0 and max(widths.values()) > _LEAST:
        widest = max(widths, key=widths.__getitem__)
        second = max((other for place, other in widths.items() if place != widest), default=0)
        widths[widest] = max(widths[widest] - excess(), min(second, widths[widest] - 1), _LEAST)
    return widths


def _padded(row: Sequence[Cell], widths: dict[int, int], columns: Sequence[Column], cut: bool) -> list[Cell]:
    found: list[Cell] = []
    last = max(widths, default=0)
    for place, width in widths.items():
        text = cut_to(row[place].text, width) if cut else row[place].text
        room = " " * (width - width_of(text))
        if columns[place].right:
            text = room + text
        elif place != last:
            text += room
        found += [Cell(text, row[place].style)] if place == last else [Cell(text, row[place].style), Cell(_GAP)]
    return found
