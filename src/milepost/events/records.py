"""What listeners get: one frozen record for each thing that happens in a save, a load, a verification or a removal."""

from typing import Literal

import msgspec

from milepost.core.history import PhaseTime
from milepost.core.statistics import Health

Kind = Literal["save", "load", "verify", "remove", "restore", "convert", "copy", "preempt"]
"""What an operation does."""


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """What all events say.

    `time`: seconds since 1970. `operation`: the same for all events of one operation on this rank. `parent`: that of
    the operation in which this one runs, or empty. `step`: where it is known. `pid`: the process in which it happened,
    which may be a writing process.

    >>> with milepost.events.listen(lambda event: print(type(event).__name__, event.kind, event.rank, event.world)):
    ...     _ = milepost.save({"step": 1}, "memory://heard")  # doctest: +ELLIPSIS
    Started save 0 1
    PhaseStarted save 0 1
    ...
    Committed save 0 1
    Ended save 0 1
    """

    time: float
    operation: str
    kind: Kind
    url: str
    rank: int
    world: int
    pid: int
    step: int | None = None
    parent: str = ""


class Started(Event, frozen=True, kw_only=True):
    """An operation began. Where the call returns early, as `async_save` does, this comes from the caller's thread."""


class PhaseStarted(Event, frozen=True, kw_only=True):
    """A phase began, in the thread that the listener is called from."""

    phase: str


class PhaseEnded(Event, frozen=True, kw_only=True):
    """A phase ended, with or without an error.

    `start`, `end`: seconds since 1970. `seconds`: how long it took, without the phases inside it, such as waiting for
    other ranks. `bytes`: how much data this rank moved in it.
    """

    phase: str
    start: float
    end: float
    seconds: float
    bytes: int = 0


class Retried(Event, frozen=True, kw_only=True):
    """A request to an object store failed, and is made again after a pause.

    `request`: "get", "put", "list" or "delete". `name`: the object. `attempt`: how often it has failed.
    """

    request: str
    name: str
    attempt: int
    pause_s: float
    reason: str


class Waiting(Event, frozen=True, kw_only=True):
    """A rank has waited for others for some seconds; comes again after twice the time, and so on.

    The coordinator names the ranks that have not arrived, the others name the coordinator. `ranks`: at most 100 of
    them. `missing`: how many there are. `since`: seconds since 1970. `meeting`: the step at which they meet.
    """

    meeting: str
    ranks: tuple[int, ...]
    missing: int
    since: float
    waited_s: float


class Committed(Event, frozen=True, kw_only=True):
    """The checkpoint exists, and survives power loss.

    `bytes`: of the tensors that all ranks wrote. `reused_bytes`: of those that did not change since an earlier save,
    and were not written again. `seconds`: since the operation began, on this rank. `timings`: the phases of
    all ranks, on the coordinator only; other ranks have none. `health`: what the rule of `healthy` said, if there is
    one.
    """

    generation: int
    bytes: int
    seconds: float
    timings: tuple[PhaseTime, ...] = ()
    health: Health | None = None
    reused_bytes: int = 0


class Removed(Event, frozen=True, kw_only=True):
    """A checkpoint was removed, which had this many bytes in its files."""

    generation: int
    bytes: int


class Skipped(Event, frozen=True, kw_only=True):
    """A restore passed over a step that is not whole, or not healthy, and goes on to an older one."""

    skipped: int
    reason: str


class Preempted(Event, frozen=True, kw_only=True):
    """All ranks stop at this step, because one of them was signalled."""

    seconds_left: float


class Failed(Event, frozen=True, kw_only=True):
    """An operation failed: the class of the error and its text. `ranks`: those that met it, where that is known."""

    error: str
    text: str
    ranks: tuple[int, ...] = ()


class Ended(Event, frozen=True, kw_only=True):
    """An operation ended. The last event of it.

    `ok`: it did not fail. `phases`: the seconds of each phase on this rank. `bytes`: how much data this rank moved.
    """

    ok: bool
    seconds: float
    bytes: int
    retries: int
    phases: dict[str, float]
