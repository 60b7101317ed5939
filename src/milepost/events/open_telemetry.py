"""Spans for OpenTelemetry: one for each operation, with one inside it for each phase."""

from typing import TYPE_CHECKING, Any

from milepost.core.statistics import Health
from milepost.errors import InvalidRequest
from milepost.events.records import (
    Committed,
    Ended,
    Event,
    Failed,
    PhaseEnded,
    Removed,
    Retried,
    Skipped,
    Started,
    Waiting,
)
from milepost.version import __version__

if TYPE_CHECKING:
    from opentelemetry.trace import Span, TracerProvider

_COMMON = ("time", "operation", "kind", "url", "rank", "world", "pid", "step", "parent")
_NOTED = {Retried: "retry", Waiting: "waiting", Committed: "committed", Removed: "removed", Skipped: "skipped"}


class OpenTelemetry:
    """A listener that makes spans: "milepost.save" for a save, and "milepost.writing" and so on for its phases.

    The span of an operation belongs to the span in which the caller was, also where the save goes on in the background.
    Retries, waiting and the commit are events of the span. A failed operation has the status ERROR.

    `tracer_provider`: where the spans go; by default the one of the process. Raises InvalidRequest without the package
    `opentelemetry-api`.

    >>> with milepost.events.listen(milepost.events.OpenTelemetry()):
    ...     _ = milepost.save({"step": 1}, "memory://traced")
    """

    def __init__(self, tracer_provider: "TracerProvider | None" = None) -> None:
        try:
            from opentelemetry import trace  # noqa: PLC0415  # an extra
        except ImportError:
            raise InvalidRequest('spans need OpenTelemetry: pip install "milepost[opentelemetry]"') from None
        self._trace: Any = trace
        self._tracer = trace.get_tracer("milepost", __version__, tracer_provider)
        self._spans: dict[str, Span] = {}

    def __call__(self, event: Event) -> None:
        """Begin, describe or end a span."""
        if isinstance(event, Started):
            self._begin(event)
            return
        span = self._spans.get(event.operation)
        if span is None:
            return  # it began before anybody listened
        if isinstance(event, PhaseEnded):
            self._add_phase(span, event)
        elif isinstance(event, Failed):
            span.set_attribute("error.type", event.error)
            span.set_status(self._trace.StatusCode.ERROR, f"{event.error}: {event.text}")
        elif isinstance(event, Ended):
            span.set_attribute("milepost.bytes", event.bytes)
            span.set_attribute("milepost.retries", event.retries)
            span.end(_ns(event.time))
            self._spans.pop(event.operation, None)
        elif type(event) in _NOTED:
            span.add_event(_NOTED[type(event)], _details(event), _ns(event.time))

    def _begin(self, event: Started) -> None:
        about: dict[str, Any] = {
            "milepost.url": event.url,
            "milepost.rank": event.rank,
            "milepost.world": event.world,
            "milepost.operation": event.operation,
        }
        if event.step is not None:
            about["milepost.step"] = event.step
        around = self._spans.get(event.parent)
        # None: the context of the caller, in whose thread this is called.
        context = None if around is None else self._trace.set_span_in_context(around)
        self._spans[event.operation] = self._tracer.start_span(
            f"milepost.{event.kind}", context, attributes=about, start_time=_ns(event.time)
        )

    def _add_phase(self, span: "Span", event: PhaseEnded) -> None:
        about = {"milepost.seconds": event.seconds, "milepost.bytes": event.bytes, "milepost.pid": event.pid}
        context = self._trace.set_span_in_context(span)
        phase = self._tracer.start_span(
            f"milepost.{event.phase}", context, attributes=about, start_time=_ns(event.start)
        )
        phase.end(_ns(event.end))


def _ns(seconds: float) -> int:
    return int(seconds * 1e9)


def _details(event: Event) -> dict[str, Any]:
    """What an event says beyond what all say, as attributes have it: plain values, and sequences of them."""
    found = {name: getattr(event, name) for name in event.__struct_fields__ if name not in _COMMON}
    found.pop("timings", None)
    health: Health | None = found.pop("health", None)
    if health is not None:
        found |= {"healthy": health.ok, "unhealthy.reason": health.reason}
    return {f"milepost.{name}": value for name, value in found.items()}
