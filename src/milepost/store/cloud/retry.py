"""When a failed request is asked again, and how many may be under way. A policy with a clock; no I/O.

All requests of a store share one `Pace`. Each answer renews the patience of all: while anything gets through, nothing
gives up. When the service says that it is asked too much, fewer requests go out at once, and each waits longer.
"""

import random
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from milepost.store.cloud.replies import CURABLE, Refusal, Why

FIRST_PAUSE_S = 0.1
LONGEST_PAUSE_S = 15.0
THROTTLED_TIMES = 2
"""How much longer the pauses are for a service that is asked too much."""
FIRST_CONTACT_S = 10.0
"""How long to look for a service that never answered: the endpoint may be wrong."""
CREDENTIAL_TRIES = 3
"""How often to ask for credentials where there may be none."""
FEWEST_TRIES = 3
"""A request that may succeed is asked this often, however long each attempt takes."""
LONGEST_TIMES = 4
"""A request gives up after this many times the patience, whatever else succeeds."""
TELL_AFTER_S = 10.0
TELL_EVERY_S = 30.0
"""When the log says that a request has failed for so long, and how often it says so."""
HALVING_S = 1.0
"""The bound on requests under way is halved at most once in this time: one storm is one reason."""


class Clock(Protocol):
    """The time, waiting, and chance."""

    def now(self) -> float:
        """Seconds."""

    def sleep(self, seconds: float) -> None:
        """Wait."""

    def chance(self) -> float:
        """A number from 0 up to 1."""


class SystemClock:
    """The real one."""

    def now(self) -> float:
        """Seconds since some start."""
        return time.monotonic()

    def sleep(self, seconds: float) -> None:
        """Wait. Ctrl-C gets through."""
        time.sleep(seconds)

    def chance(self) -> float:
        """A number from 0 up to 1."""
        return random.random()  # noqa: S311  # spreads requests; keeps no secret


def pause_s(failures: int, chance: float, *, throttled: bool) -> float:
    """How long to wait after this many failures in a row: twice as long each time, half of it left to chance."""
    longest = FIRST_PAUSE_S * 2.0 ** min(failures - 1, 20) * (THROTTLED_TIMES if throttled else 1)
    return min(longest, LONGEST_PAUSE_S * (2 if throttled else 1)) * (0.5 + chance / 2)


class Pace:
    """How many requests of a store may be under way, and how long failing ones are asked again."""

    def __init__(self, requests: int, patience_s: float, clock: Clock | None = None) -> None:
        self.patience_s, self.clock = patience_s, clock or SystemClock()
        self._most = self._bound = float(requests)
        self._under_way = 0
        self._changed = threading.Condition()
        self._answered_at: float | None = None
        self._halved_at = -HALVING_S
        self._told_at = -TELL_EVERY_S

    @property
    def bound(self) -> int:
        """How many requests may be under way now."""
        return max(1, int(self._bound))

    @property
    def reached(self) -> bool:
        """Whether the service has ever answered."""
        return self._answered_at is not None

    @contextmanager
    def turn(self) -> Iterator[None]:
        """Wait for a turn to ask."""
        with self._changed:
            while self._under_way >= self.bound:
                self._changed.wait(1.0)  # bounded: Ctrl-C gets through
            self._under_way += 1
        try:
            yield
        finally:
            with self._changed:
                self._under_way -= 1
                self._changed.notify()

    def answered(self) -> None:
        """The service did what was asked, or said something definite."""
        with self._changed:
            self._answered_at = self.clock.now()
            self._bound = min(self._most, self._bound + 1 / self._bound)
            self._changed.notify()

    def throttled(self) -> None:
        """The service is asked too much."""
        with self._changed:
            now = self.clock.now()
            if now - self._halved_at >= HALVING_S:
                self._halved_at = now
                self._bound = max(1.0, self._bound / 2)

    def should_tell(self, began: float) -> bool:
        """Whether it is time to tell of a request that began then and still fails: not for each, and not often."""
        with self._changed:
            now = self.clock.now()
            if now - began < TELL_AFTER_S or now - self._told_at < TELL_EVERY_S:
                return False
            self._told_at = now
            return True

    def deadline(self, began: float) -> float:
        """Until when a request that began then is asked again."""
        latest = max(began, self._answered_at or began) + self.patience_s
        return min(latest, began + LONGEST_TIMES * self.patience_s)


class Trial:
    """One request, from its first attempt to its last: counts failures and says whether to go on."""

    def __init__(self, pace: Pace) -> None:
        self._pace = pace
        self.began = pace.clock.now()
        self.failures = 0
        self.timeouts = 0
        self.may_act = False
        """Whether an attempt may have taken effect, or may still."""
        self._renewed = False

    def failed(self, refusal: Refusal) -> float | None:
        """How long to wait before the next attempt; None: give up."""
        self.failures += 1
        self.may_act |= refusal.may_act
        self.timeouts += refusal.why is Why.LATE
        if refusal.why in (Why.THROTTLED, Why.LATE):  # the line may be slow for so many at once
            self._pace.throttled()
        if not self._may_go_on(refusal):
            return None
        pause = pause_s(self.failures, self._pace.clock.chance(), throttled=refusal.why is Why.THROTTLED)
        now = self._pace.clock.now()
        if refusal.why is Why.UNREACHABLE and not self._pace.reached:
            last = self.began + min(FIRST_CONTACT_S, self._pace.patience_s)
        else:
            last = self._pace.deadline(self.began)
        return pause if now + pause < last or self.failures < FEWEST_TRIES else None

    def _may_go_on(self, refusal: Refusal) -> bool:
        if refusal.why is Why.EXPIRED:
            may, self._renewed = not self._renewed, True
            return may
        if refusal.why is Why.NO_CREDENTIALS:
            return self.failures < CREDENTIAL_TRIES
        return refusal.why in CURABLE
