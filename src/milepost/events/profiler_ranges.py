"""Ranges in the traces of `torch.profiler`."""

import os
import threading
from typing import Any

from milepost.events.records import Event, PhaseEnded, PhaseStarted


class ProfilerRanges:
    """A listener that shows phases in `torch.profiler`, as ranges named `milepost save: writing` and so on.

    Each range is in the thread in which the phase runs. Phases in a writing process are not shown: the profiler does
    not see that process. Listen only while you profile.

    >>> with torch.profiler.profile() as profile, milepost.events.listen(milepost.events.ProfilerRanges()):
    ...     _ = milepost.save({"w": torch.ones(3)}, "memory://profiled")
    >>> "milepost save: writing" in {event.name for event in profile.events()}
    True
    """

    def __init__(self) -> None:
        from torch.autograd.profiler import record_function  # noqa: PLC0415  # events do not need torch

        self._range: Any = record_function
        self._of_thread = threading.local()

    def __call__(self, event: Event) -> None:
        """Begin or end a range."""
        if event.pid != os.getpid():
            return
        ranges: list[tuple[str, str, Any]] = self._of_thread.__dict__.setdefault("ranges", [])
        if isinstance(event, PhaseStarted):
            one = self._range(f"milepost {event.kind}: {event.phase}")
            one.__enter__()
            ranges.append((event.operation, event.phase, one))
        elif isinstance(event, PhaseEnded) and ranges and ranges[-1][:2] == (event.operation, event.phase):
            ranges.pop()[2].__exit__(None, None, None)
