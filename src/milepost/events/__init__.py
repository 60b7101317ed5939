"""Events for operators: what saves, loads, verifications and removals do, as they do it.

    with milepost.events.listen(print):
        milepost.save(state, "runs/a")

`OpenTelemetry`, `PrometheusFile` and `ProfilerRanges` are listeners that are ready to use.
"""

from milepost.events.listeners import Listener, Subscription, listen
from milepost.events.open_telemetry import OpenTelemetry
from milepost.events.profiler_ranges import ProfilerRanges
from milepost.events.prometheus import PrometheusFile
from milepost.events.records import (
    Committed,
    Ended,
    Event,
    Failed,
    PhaseEnded,
    PhaseStarted,
    Preempted,
    Removed,
    Retried,
    Skipped,
    Started,
    Waiting,
)

__all__ = [
    "Committed",
    "Ended",
    "Event",
    "Failed",
    "Listener",
    "OpenTelemetry",
    "PhaseEnded",
    "PhaseStarted",
    "Preempted",
    "ProfilerRanges",
    "PrometheusFile",
    "Removed",
    "Retried",
    "Skipped",
    "Started",
    "Subscription",
    "Waiting",
    "listen",
]
