"""Tables and lines as records: what a command prints, before it is known on what."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

Style = Literal["", "bold", "dim", "good", "warn", "bad", "key"]


@dataclass(frozen=True, slots=True)
class Cell:
    """Text with a meaning, which a terminal shows as a colour. It may hold anything: what is unsafe is spelled out.

    Keys go through `milepost.cli.escape.shown` first, so that they can be typed as they are shown.
    """

    text: str
    style: Style = ""


@dataclass(frozen=True, slots=True)
class Column:
    """One column. `rank`: columns with the highest go first where a terminal is narrow; 0 stays."""

    title: str
    right: bool = False
    rank: int = 0


@dataclass(frozen=True, slots=True)
class TextTable:
    """Rows under titles."""

    columns: Sequence[Column]
    rows: Sequence[Sequence[Cell | str]]


@dataclass(frozen=True, slots=True)
class Line:
    """One line, of one or several cells that follow each other."""

    cells: Sequence[Cell | str]


Block = TextTable | Line


def line(*cells: Cell | str) -> Line:
    """A line of these cells."""
    return Line(cells)


def cell_of(cell: Cell | str) -> Cell:
    """A cell, of a cell or of plain text."""
    return cell if isinstance(cell, Cell) else Cell(cell)
