"""Requests that nobody waits for any more: a store that tries again and again asks here whether it still should.

A call with several threads fails or is interrupted (Ctrl-C) as a whole. Then the requests of its other threads should
not be repeated until the patience of the store ends.
"""

import contextlib
import threading
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from milepost.events.operation import carried

Item = TypeVar("Item")
Found = TypeVar("Found")
_of_thread = threading.local()


@contextlib.contextmanager
def stopping_when(stopped: Callable[[], bool]) -> Iterator[None]:
    """Inside, requests of this thread are not repeated once `stopped()` is true."""
    before = getattr(_of_thread, "stopped", None)
    _of_thread.stopped = stopped
    try:
        yield
    finally:
        _of_thread.stopped = before


def is_stopped() -> bool:
    """Whether the call that this thread works for has ended."""
    stopped = getattr(_of_thread, "stopped", None)
    return stopped is not None and stopped()


def side_by_side(work: Callable[[Item], Found], items: Iterable[Item], threads: int) -> list[Found]:
    """What `work` gives for each item, in their order, several at the same time.

    If one raises, or this thread is interrupted, the requests of the others are not repeated.
    """
    items = list(items)
    if len(items) < 2 or threads < 2:
        return list(map(work, items))
    around, ended = getattr(_of_thread, "stopped", None), False

    def stopped() -> bool:
        return ended or (around is not None and around())

    def one(item: Item) -> Found:
        with stopping_when(stopped):
            return work(item)

    pool = ThreadPoolExecutor(min(threads, len(items)), "milepost")
    try:
        return list(pool.map(carried(one), items))
    finally:
        ended = True
        pool.shutdown(cancel_futures=True)
