"""Where a command writes: text or JSON on stdout, remarks on stderr.

A terminal gets colours and lines that fit its width. A pipe, a file or a dumb terminal gets plain text, and a pipe all
of it. Text from checkpoints is escaped here, so no command can forget it.
"""

import contextlib
import logging
import os
import re
import shutil
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, TextIO

import click
import msgspec

from milepost.cli.blocks import Block, Cell, Line, Style, cell_of
from milepost.cli.fit import rows_of
from milepost.core.plain_json import plain_json
from milepost.core.printable import printable

if TYPE_CHECKING:
    from milepost.data.progress_bar import ProgressBar
    from milepost.data.transfer import Progress, Watcher

_COLOURS: dict[Style, dict[str, Any]] = {
    "": {},
    "bold": {"bold": True},
    "dim": {"dim": True},
    "good": {"fg": "green"},
    "warn": {"fg": "yellow"},
    "bad": {"fg": "red", "bold": True},
    "key": {"fg": "cyan"},
}
_UNSAFE_IN_JSON = re.compile("[\x7f-\x9f\u061c\u200b-\u200f\u2028-\u202e\u2060-\u206f\ufeff]")
_NOT_ASCII = re.compile("[^\x00-\x7f]")
_MIN_WIDTH = 20
MOMENT_S = 0.5
"""What takes longer tells how far it is."""


def print_record(record: msgspec.Struct, as_json: bool, text: Callable[[], Iterable[Block]]) -> None:
    """Write one record to stdout: as JSON, or as the text that the function makes of it."""
    if as_json:
        data = json_of(record)
        try:
            data.encode(sys.stdout.encoding or "utf-8")
        except UnicodeEncodeError:  # how Python would spell what stdout does not know is no JSON
            data = _NOT_ASCII.sub(_escaped, data)
        sys.stdout.write(data + "\n")
        return
    for block in text():
        write(block, sys.stdout)


def _escaped(found: re.Match[str]) -> str:
    units = found[0].encode("utf-16-be").hex()
    return "".join(f"\\u{units[at : at + 4]}" for at in range(0, len(units), 4))


def json_of(record: msgspec.Struct) -> str:
    """A record as indented JSON. NaN is null. What could move a cursor or turn text round is escaped."""
    text = msgspec.json.format(plain_json(record)).decode()
    return _UNSAFE_IN_JSON.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def write(block: Block, stream: TextIO) -> None:
    """Write one block of text."""
    colours, width = has_colours(stream), width_of_terminal(stream)
    if isinstance(block, Line):
        cells = [Cell(printable(cell.text), cell.style) for cell in map(cell_of, block.cells)]
        stream.write(_coloured(cells, colours) + "\n")
        return
    stream.writelines(_coloured(row, colours).rstrip(" ") + "\n" for row in rows_of(block, width))


def _coloured(cells: Iterable[Cell], colours: bool) -> str:
    if not colours:
        return "".join(cell.text for cell in cells)
    return "".join(click.style(cell.text, **_COLOURS[cell.style]) if cell.style else cell.text for cell in cells)


def can_draw(stream: TextIO) -> bool:
    """Whether this is a terminal that can move its cursor."""
    return stream.isatty() and os.environ.get("TERM", "") not in ("", "dumb")


def has_colours(stream: TextIO) -> bool:
    """Whether colours are wanted here: on a terminal that has them, unless the user said no."""
    return can_draw(stream) and not os.environ.get("NO_COLOR")


def width_of_terminal(stream: TextIO) -> int | None:
    """How many columns there are; None for a pipe or a file, which has no end."""
    return max(shutil.get_terminal_size().columns, _MIN_WIDTH) if stream.isatty() else None


def is_terminal() -> bool:
    """Whether stdout is a terminal."""
    return sys.stdout.isatty()


def remark(text: str) -> None:
    """Say something on stderr that is no result."""
    with contextlib.suppress(OSError):  # nobody reads stderr
        sys.stderr.write(f"milepost: {printable(text)}\n")


@contextlib.contextmanager
def warnings_shown() -> Iterator[None]:
    """Inside, what the library logs as a warning is a remark, and said once."""
    log, shows = logging.getLogger("milepost"), _Remarks()
    propagates, log.propagate = log.propagate, False
    log.addHandler(shows)
    try:
        yield
    finally:
        log.removeHandler(shows)
        log.propagate = propagates


class _Remarks(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._said: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage()
        if text not in self._said:
            self._said.add(text)
            remark(text)


@contextlib.contextmanager
def progress_shown() -> Iterator["Watcher | None"]:
    """A watcher that draws a bar on stderr, where that is a terminal that can draw one. It appears after a moment."""
    if not can_draw(sys.stderr):
        yield None
        return
    bar = _LateBar()
    try:
        yield bar
    finally:
        bar.close()


class _LateBar:
    """A bar for what takes longer than a moment: the library that draws takes as long to import as a short command."""

    def __init__(self) -> None:
        self._bar: ProgressBar | None = None

    def __call__(self, progress: "Progress") -> None:
        if self._bar is None and (progress.finished or progress.seconds < MOMENT_S):
            return
        if self._bar is None:
            from milepost.data.progress_bar import ProgressBar  # noqa: PLC0415  # brings rich

            self._bar = ProgressBar()
        self._bar(progress)

    def close(self) -> None:
        if self._bar is not None:
            self._bar.close()
