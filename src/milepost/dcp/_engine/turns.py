"""Saves that share a planner or storage take turns: those keep what they work on, and would mix one save with another."""

import threading
from concurrent.futures import Future, wait
from typing import Any

_lock = threading.Lock()
# Saves in the background that have not ended, with what they use. Each takes itself off when it ends.
_under_way: "list[tuple[list[Any], Future[Any]]]" = []


def earlier(*used: Any) -> "list[Future[Any]]":
    """The saves under way that use any of these objects. Ranks that make the same calls find the same ones."""
    with _lock:
        return [future for theirs, future in _under_way if any(a is b for a in theirs for b in used if b is not None)]


def wait_for_turn(*used: Any) -> None:
    """Return when no save under way uses any of these objects. How it ended is for whoever has its future."""
    wait(earlier(*used))


def enter(future: "Future[Any]", *used: Any) -> None:
    """Count a save as under way until its future is done."""
    entry = ([one for one in used if one is not None], future)
    with _lock:
        _under_way.append(entry)
    future.add_done_callback(lambda _: _leave(entry))


def _leave(entry: "tuple[list[Any], Future[Any]]") -> None:
    with _lock:
        _under_way[:] = [other for other in _under_way if other is not entry]
