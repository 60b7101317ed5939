"""One line of the log for each save, load, verification and removal, by the logger "milepost", at level INFO.

saved step 1200: 13.1 GB in 6.2 s (2.1 GB/s), slowest rank 17: writing 5.9 s
"""

import logging

from milepost.core.history import PhaseTime
from milepost.core.printable import printable
from milepost.events.records import Committed, Ended, Event, Removed

_log = logging.getLogger("milepost")
_UNITS = ("B", "kB", "MB", "GB", "TB", "PB", "EB")
_DONE = {"save": "saved", "convert": "converted", "copy": "copied", "load": "loaded", "verify": "verified"}
_NOT_WORK = ("waiting", "blocking")


def wants_lines() -> bool:
    """Whether the log takes such lines."""
    return _log.isEnabledFor(logging.INFO)


def log_committed(event: Committed) -> None:
    """A checkpoint was committed; an unhealthy one is a warning, too."""
    if event.health is not None and not event.health.ok:
        _log.warning("%s is unhealthy: %s", _what(event), printable(event.health.reason))
    reused = f", {show_bytes(event.reused_bytes)} reused" if event.reused_bytes else ""
    _log.info("%s %s%s%s", _DONE[event.kind], _moved(event, event.bytes, event.seconds), reused, _slowest(event))


def log_removed(event: Removed) -> None:
    """A checkpoint was removed."""
    _log.info("removed %s: %s", _what(event), show_bytes(event.bytes))


def log_ended(event: Ended) -> None:
    """A load or a verification ended. Saves and removals have lines of their own."""
    if event.ok and event.kind in ("load", "verify"):
        share = f" on rank {event.rank} of {event.world}" if event.world > 1 else ""
        _log.info("%s %s%s", _DONE[event.kind], _moved(event, event.bytes, event.seconds), share)


def _what(event: Event) -> str:
    return printable(event.url) if event.step is None else f"step {event.step}"


def _moved(event: Event, size_bytes: int, seconds: float) -> str:
    rate = f" ({show_bytes(size_bytes / seconds)}/s)" if size_bytes and seconds > 0 else ""
    return f"{_what(event)}: {show_bytes(size_bytes)} in {show_seconds(seconds)}{rate}"


def _slowest(event: Committed) -> str:
    found = slowest(event.timings)
    if found is None:
        return ""
    who = f"slowest rank {found.slowest_rank}: " if event.world > 1 else ""
    return f", {who}{found.phase} {show_seconds(found.slowest_s)}"


def slowest(timings: tuple[PhaseTime, ...]) -> PhaseTime | None:
    """The phase that took a rank longest; waiting for others does not count. None without phases. Pure."""
    return max((t for t in timings if t.phase not in _NOT_WORK), key=lambda t: t.slowest_s, default=None)


def show_bytes(size_bytes: float) -> str:
    """A number of bytes for people, in powers of 1000: "13.1 GB". Pure."""
    size = float(size_bytes)
    for unit in _UNITS:
        shown = f"{size:.0f}" if unit == "B" or size >= 99.95 else f"{size:.1f}"
        if float(shown) < 1000 or unit == _UNITS[-1]:
            return f"{shown} {unit}"
        size /= 1000
    raise AssertionError


def show_seconds(seconds: float) -> str:
    """A time for people: "0.4 ms", "6.2 s", "4 min 7 s", "2 h 5 min". Pure."""
    if seconds < 0.0995:
        return f"{seconds * 1000:.1f} ms" if seconds < 0.00995 else f"{seconds * 1000:.0f} ms"
    if seconds < 59.95:
        return f"{seconds:.1f} s" if seconds >= 0.995 else f"{seconds:.2f} s"
    whole = round(seconds)
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    minutes = round(seconds / 60)
    return f"{minutes // 60} h {minutes % 60} min"
