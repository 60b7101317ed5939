"""A ready-made picture of progress for terminals, drawn by rich."""

from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    DownloadColumn,
    TaskID,
    TextColumn,
    TimeRemainingColumn,
    TransferSpeedColumn,
)
from rich.progress import Progress as Drawing

from milepost.data.transfer import Progress


class ProgressBar:
    """Pass one as `progress` to `save`, `load` or `verify`: it draws bytes, rate and time left while they run.

    It may be used again, for one call after the other. Where one fails, `close` (or leaving a `with` block) gives the
    terminal back; when it succeeds that happens by itself.

    >>> with milepost.ProgressBar() as bar:
    ...     _ = milepost.save({"w": torch.ones(3)}, "memory://drawn", progress=bar)
    """

    def __init__(self, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._drawing: Drawing | None = None
        self._task = TaskID(0)

    def __call__(self, progress: Progress) -> None:
        """Draw how far it is."""
        if self._drawing is None:
            self._start(progress)
        assert self._drawing is not None
        self._drawing.update(self._task, completed=progress.done_bytes, total=progress.total_bytes)
        if progress.finished:
            self.close()

    def _start(self, progress: Progress) -> None:
        self._drawing = Drawing(
            TextColumn("{task.description}", markup=False),  # a path may hold what looks like markup
            BarColumn(),
            DownloadColumn(binary_units=True),
            TransferSpeedColumn(),
            TimeRemainingColumn(),
            console=self._console,
        )
        # The name of a folder may hold anything, and a terminal obeys some of it.
        where = "".join(letter if letter.isprintable() else "\N{REPLACEMENT CHARACTER}" for letter in progress.url)
        self._task = self._drawing.add_task(f"{progress.action} {where}", total=progress.total_bytes)
        self._drawing.start()

    def close(self) -> None:
        """Stop drawing."""
        drawing, self._drawing = self._drawing, None
        if drawing is not None:
            drawing.stop()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
