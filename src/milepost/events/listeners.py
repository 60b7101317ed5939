"""Who listens in this process."""

import logging
import os
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self

from milepost.errors import InvalidRequest
from milepost.events.records import Event

Listener = Callable[[Event], Any]
"""Called with each event, in the thread where that happens."""
_log = logging.getLogger("milepost")


class Subscription:
    """What `listen` gives. `close` ends it, and so does leaving a `with` block. May be closed twice, in any thread.

    >>> heard = []
    >>> subscription = milepost.events.listen(heard.append)
    >>> subscription.close()
    >>> _ = milepost.save({"step": 1}, "memory://unheard")
    >>> heard
    []
    """

    def __init__(self, owner: "Listeners", listener: Listener) -> None:
        self._owner, self._listener = owner, listener
        self._complained = self._closed = False

    def __repr__(self) -> str:
        return f"Subscription({self.name})"

    @property
    def name(self) -> str:
        """What the listener is called, for messages."""
        return str(getattr(self._listener, "__qualname__", None) or type(self._listener).__qualname__)

    def deliver(self, event: Event) -> None:
        """Call the listener, unless it was closed. An exception of it is logged, the first time."""
        if self._closed:
            return  # by another listener, or in another thread, while this event was on its way
        try:
            self._listener(event)
        except Exception:  # noqa: BLE001  # a listener must not be able to stop the work
            if not self._complained:
                self._complained = True
                _log.warning(
                    "the listener %s failed at %s; it is called again, and this is not said again",
                    self.name, type(event).__name__, exc_info=True,
                )  # fmt: skip

    def close(self) -> None:
        """End it. A call of the listener that is under way in another thread goes on."""
        self._closed = True
        self._owner.remove(self)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


class _OfThread(threading.local):
    """What a thread is doing: its part of an operation (a `Track`), and the listeners that it is inside of."""

    track: Any = None
    hearing: frozenset[Subscription] = frozenset()


class Listeners:
    """Who listens in this process, and what its threads are doing.

    There is one, as there is one root of the loggers: whoever listens and what happens know nothing of each other. It
    is the only object of the package that changes and belongs to nobody. A fork keeps its listeners, as it keeps the
    handlers of loggers.
    """

    def __init__(self) -> None:
        self.subscriptions: tuple[Subscription, ...] = ()
        self.heard = False
        """Whether somebody gets the events. If not, none need be made."""
        self.thread = _OfThread()
        self._forward: Listener | None = None
        self._renew_lock()
        os.register_at_fork(after_in_child=self._renew_lock)

    def _renew_lock(self) -> None:
        self._lock = threading.Lock()  # in a fork: another thread may have held it

    def add(self, listener: Listener) -> Subscription:
        """Call this listener from now on."""
        subscription = Subscription(self, listener)
        with self._lock:
            self.subscriptions = (*self.subscriptions, subscription)
            self.heard = True
        return subscription

    def remove(self, subscription: Subscription) -> None:
        """Do not call it any more."""
        with self._lock:
            self.subscriptions = tuple(one for one in self.subscriptions if one is not subscription)
            self.heard = bool(self.subscriptions) or self.forwards

    def forward_to(self, forward: Listener) -> None:
        """In a process that works for another: send all events there."""
        self._forward, self.heard = forward, True

    @property
    def forwards(self) -> bool:
        """Whether events go to another process."""
        return self._forward is not None

    def emit(self, event: Event, muted: frozenset[Subscription]) -> None:
        """Tell everybody but the muted, and but those whose listeners this thread is inside of."""
        if self._forward is not None:
            self._forward(event)
            return
        before = self.thread.hearing
        for one in self.subscriptions:
            if one not in muted and one not in before:
                self.thread.hearing = before | {one}
                try:
                    one.deliver(event)
                finally:
                    self.thread.hearing = before


LISTENERS = Listeners()


def listen(listener: Listener) -> Subscription:
    """Call `listener` with each event of this process, until the subscription is closed. Any thread may call this.

    The listener runs where the event happens, and the work goes on when it returns. So it should be quick, and must not
    make calls that other ranks take part in. An exception that it raises is logged the first time, with its traceback;
    it goes on being called, since a full disk or a lost connection may pass. What it saves or loads itself, other
    listeners hear of, and it does not. Raises InvalidRequest if it cannot be called.

    >>> with milepost.events.listen(print):
    ...     pass
    """
    if not callable(listener):
        raise InvalidRequest(f"a listener is called with one event; {listener!r} cannot be called")
    return LISTENERS.add(listener)
