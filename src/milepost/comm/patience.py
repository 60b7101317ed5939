"""Telling those who listen, from time to time, for which ranks this one waits."""

import time
from collections.abc import Sequence

from milepost.comm.base import Phase
from milepost.events.listeners import LISTENERS
from milepost.events.operation import current

FIRST_S = 5.0
"""A rank that waits for others tells so after this time; then after twice the time, and so on."""


class Patience:
    """One wait for other ranks, at a step of a call."""

    def __init__(self, phase: Phase) -> None:
        self._phase, self._since, self._start = phase, time.time(), time.monotonic()
        self._next_s = FIRST_S

    def at_most_s(self, left_s: float) -> float:
        """How long to wait before `tell`: all that is left, if nobody listens."""
        if not LISTENERS.heard:
            return left_s
        return max(min(left_s, self._start + self._next_s - time.monotonic()), 0.0)

    def tell(self, missing: Sequence[int]) -> None:
        """Tell which ranks have not come, if there are any and it is time to."""
        waited_s = time.monotonic() - self._start
        if not missing or waited_s < self._next_s or not LISTENERS.heard:
            return
        while self._next_s <= waited_s:
            self._next_s *= 2
        operation = current()
        if operation is not None:
            operation.waits(self._phase.step, missing, self._since, waited_s)
