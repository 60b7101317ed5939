"""Which entries of a step lie in which files of earlier saves: so the page names the right file for each box.

That stands in the headers of the files of ranks, and headers may be long and many: a page reads those of the newest
steps only, as far as its budget goes.
"""

from collections import defaultdict
from collections.abc import Iterable, Mapping

from milepost.core.manifest import OlderFile
from milepost.core.reuse import FileId
from milepost.data.read import Files
from milepost.errors import CheckpointError
from milepost.view.record import PageOlderFile

_REMOTE_HEADERS = 64
"""How many headers are read at most where each costs round trips."""


class HeaderBudget:
    """How many headers may still be read for a page, and how many bytes of them."""

    def __init__(self, headers: int, size_bytes: int) -> None:
        self._headers, self._bytes = headers, size_bytes
        self._is_remote = False

    def pays(self, headers: int, size_bytes: int, *, is_remote: bool) -> bool:
        """Whether these may be read; if so, they count."""
        if is_remote and not self._is_remote:
            self._is_remote, self._headers = True, min(self._headers, _REMOTE_HEADERS)
        if headers > self._headers or size_bytes > self._bytes:
            return False
        self._headers, self._bytes = self._headers - headers, self._bytes - size_bytes
        return True


def older_files(files: Files | None, rows: Iterable[OlderFile], budget: HeaderBudget) -> list[PageOlderFile]:
    """The files of earlier saves of a step, each with its entries; with None where the headers are not read.

    `files`: those of the step, none of which is open; None if they cannot be.
    """
    older = list(rows)
    entries = _entries(files, {row.rank for row in older}, budget) if files is not None and older else None
    return [
        PageOlderFile(
            rank=row.rank,
            save_id=row.save_id,
            writer=row.writer,
            folder=row.folder,
            size_bytes=row.size_bytes,
            header_bytes=row.header_bytes,
            entries=None if entries is None else entries.get((row.rank, FileId(row.save_id, row.writer)), []),
        )
        for row in older
    ]


def _entries(files: Files, ranks: set[int], budget: HeaderBudget) -> Mapping[tuple[int, FileId], list[str]] | None:
    """The names of entries by rank and older file; None where that may not be read, or cannot."""
    try:
        size_bytes = sum(files.record(rank).header_bytes for rank in ranks)
        if not budget.pays(len(ranks), size_bytes, is_remote=bool(files.traits.requests)):
            return None
        files.open_ahead(sorted(ranks))
        found: dict[tuple[int, FileId], list[str]] = defaultdict(list)
        for rank in ranks:
            for name, file in files.of(rank).older.items():
                found[rank, file].append(name)
    except (CheckpointError, KeyError):
        return None  # the step says itself what is wrong with it
    finally:
        files.close()
    return found
