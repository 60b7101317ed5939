"""Saves that share a planner or storage take turns: both keep what they work on, and would mix two saves."""

import os
import threading
from concurrent.futures import Future, wait
from typing import Any


class Turns:
    """The saves in the background that have not ended, each with the objects that it uses."""

    def __init__(self) -> None:
        self._process = os.getpid()
        self._lock = threading.Lock()
        self._under_way: list[tuple[list[Any], Future[Any]]] = []

    def earlier(self, *used: Any) -> "list[Future[Any]]":
        """The saves under way that use any of these objects. Ranks that make the same calls find the same ones."""
        if self._process != os.getpid():
            # A fork: the saves, and the lock that a thread may have held, are those of the parent.
            self._process, self._lock, self._under_way = os.getpid(), threading.Lock(), []
        with self._lock:
            entries = list(self._under_way)
        return [future for theirs, future in entries if any(a is b for a in theirs for b in used if b is not None)]

    def wait(self, *used: Any) -> None:
        """Return when no save under way uses any of these objects. How each ended is in its own future."""
        wait(self.earlier(*used))

    def enter(self, future: "Future[Any]", *used: Any) -> None:
        """Count a save as under way until its future is done."""
        entry = ([one for one in used if one is not None], future)
        with self._lock:
            self._under_way.append(entry)
        future.add_done_callback(lambda _: self._leave(entry))

    def _leave(self, entry: "tuple[list[Any], Future[Any]]") -> None:
        with self._lock:
            self._under_way = [other for other in self._under_way if other is not entry]
