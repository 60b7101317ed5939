"""A board: a key-value store that all ranks reach, on which they leave notes for each other."""

import threading
import time
from typing import Protocol


class Board(Protocol):
    """Notes by name, seen by all ranks."""

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board. It replaces a note of the same name."""

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """These notes, once all are there; None for those that are not there in time."""

    def count(self, name: str, step: int = 1) -> int:
        """Add `step` to a counter and return its value; a step of 0 only looks."""

    def remove(self, name: str) -> None:
        """Take a note or a counter off the board, if it is there."""

    def named(self, name: str) -> "Board":
        """Another board for the same ranks, by its name."""


class MemoryBoard:
    """A board for ranks that are threads of one process."""

    def __init__(self) -> None:
        self._named: dict[str, MemoryBoard] = {}
        self._changed = threading.Condition()
        self._notes: dict[str, bytes] = {}
        self._counts: dict[str, int] = {}
        self.bytes_pinned = 0
        self.bytes_read = 0

    def pin(self, name: str, note: bytes) -> None:
        """Put a note on the board, in place of one that has the name already."""
        with self._changed:
            self._notes[name] = note
            self.bytes_pinned += len(note)
            self._changed.notify_all()

    def read(self, names: list[str], timeout_s: float) -> list[bytes | None]:
        """These notes, as soon as all are there; None for those that are not there in time."""
        deadline = time.monotonic() + timeout_s
        with self._changed:
            for name in names:
                while name not in self._notes and (wait := deadline - time.monotonic()) > 0:
                    self._changed.wait(wait)
            found = [self._notes.get(name) for name in names]
            self.bytes_read += sum(len(note) for note in found if note is not None)
            return found

    def count(self, name: str, step: int = 1) -> int:
        """Add to a counter (0 just looks) and give its value."""
        with self._changed:
            self._counts[name] = self._counts.get(name, 0) + step
            return self._counts[name]

    def remove(self, name: str) -> None:
        """Take a note or a counter off the board, if it is there."""
        with self._changed:
            self._notes.pop(name, None)
            self._counts.pop(name, None)

    def named(self, name: str) -> "MemoryBoard":
        """The board of this name: another one for the same ranks."""
        with self._changed:
            return self._named.setdefault(name, MemoryBoard())
