"""A text file for Prometheus, as the textfile collector of node_exporter reads it."""

import contextlib
import os
import re
import threading
import time
from collections.abc import Mapping
from pathlib import Path

from milepost.errors import InvalidRequest
from milepost.events.records import Committed, Ended, Event, Failed, PhaseEnded, Retried, Skipped

_LAST, _HEALTHY = "milepost_last_checkpoint_", "milepost_last_healthy_checkpoint_timestamp_seconds"
_METRICS: dict[str, tuple[str, str]] = {
    _LAST + "timestamp_seconds": ("gauge", "When the last checkpoint was committed, in seconds since 1970."),
    _LAST + "step": ("gauge", "The step of the last checkpoint."),
    _LAST + "bytes": ("gauge", "The bytes of tensors in the last checkpoint, of all ranks."),
    _LAST + "healthy": ("gauge", "1 if the last checkpoint is healthy, or there is no rule; else 0."),
    _HEALTHY: ("gauge", "When the last healthy checkpoint was committed, in seconds since 1970."),
    _LAST + "seconds": ("gauge", "How long the last save took until it was committed."),
    _LAST + "phase_seconds": ("gauge", "How long each phase of the last save took, on the median and slowest rank."),
    _LAST + "phase_slowest_rank": ("gauge", "Which rank was the slowest in each phase of the last save."),
    "milepost_phase_seconds_total": ("counter", "Seconds that this rank spent in each phase."),
    "milepost_operations_total": ("counter", "Operations that ended, by kind."),
    "milepost_failures_total": ("counter", "Operations that failed, by kind."),
    "milepost_retries_total": ("counter", "Requests to an object store that were made again, by kind of operation."),
    "milepost_skipped_steps_total": ("counter", "Steps that a restore passed over: damaged or unhealthy."),
}
_KINDS = ("save", "load", "verify", "remove", "restore", "convert", "copy")
_LABEL = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")
_SAMPLE = re.compile(r'(milepost_last_\w+)((?:\{(?:\w+="(?:[^"\\\n]|\\["\\n])*",?)*\})?) ([0-9.eE+-]+)')
_MAX_BYTES = 1 << 20
_EVERY_S = 5.0

Labels = tuple[tuple[str, str], ...]


class PrometheusFile:
    """A listener that keeps a text file for Prometheus: when the last checkpoint was committed, and what it took.

    The file is replaced atomically, at the end of each operation. Put it into the folder of node_exporter's textfile
    collector, with a name that ends in `.prom`. What it says of the last checkpoint outlives the job: a job that starts
    again keeps it. `labels`: for all samples, for example `{"run": "a"}`. `rank`: whose events count; those of rank 0,
    the coordinator, have the phases of all ranks. Make it in the process that saves.

    Raises InvalidRequest for labels that Prometheus cannot have, or if the file cannot be written.

    >>> with milepost.events.listen(milepost.events.PrometheusFile("milepost.prom", labels={"run": "a"})):
    ...     _ = milepost.save({"w": torch.ones(3)}, "memory://scraped")
    >>> [line.strip() for line in open("milepost.prom") if "checkpoint_bytes{" in line]
    ['milepost_last_checkpoint_bytes{run="a"} 12']
    """

    def __init__(self, path: str | os.PathLike[str], *, labels: Mapping[str, str] | None = None, rank: int = 0) -> None:
        self._path, self._rank, self._process = Path(path), rank, os.getpid()
        self._labels = _checked(labels or {})
        if self._path.suffix != ".prom":
            raise InvalidRequest(f"node_exporter reads files whose names end in .prom, not {str(path)!r}")
        self._lock = threading.Lock()
        self._values: dict[tuple[str, Labels], float] = {}
        self._kept = _lines_kept(self._path)
        self._written = 0.0
        for kind in _KINDS:  # from 0 on: Prometheus sees the first increase
            for name in ("milepost_operations_total", "milepost_failures_total", "milepost_retries_total"):
                self._values[name, (("kind", kind),)] = 0.0
        self._values["milepost_skipped_steps_total", ()] = 0.0
        try:
            self._write()
        except OSError as error:
            raise InvalidRequest(f"cannot write {self._path}: {error}. Is it in a folder that is there?") from error

    def __call__(self, event: Event) -> None:
        """Count it, and write the file if it is time to."""
        if event.rank != self._rank or os.getpid() != self._process:
            return  # in a fork, another process may hold the lock for ever
        with self._lock:
            self._count(event)
            ends = isinstance(event, (Committed, Ended))
            if ends or (isinstance(event, Retried) and time.monotonic() - self._written >= _EVERY_S):
                self._write()

    def _count(self, event: Event) -> None:
        kind = (("kind", event.kind),)
        if isinstance(event, Committed) and event.kind == "save":
            self._commit(event)
        elif isinstance(event, PhaseEnded):
            self._add("milepost_phase_seconds_total", (*kind, ("phase", event.phase)), event.seconds)
        elif isinstance(event, Retried):
            self._add("milepost_retries_total", kind)
        elif isinstance(event, Failed):
            self._add("milepost_failures_total", kind)
        elif isinstance(event, Skipped):
            self._add("milepost_skipped_steps_total", ())
        elif isinstance(event, Ended):
            self._add("milepost_operations_total", kind)

    def _add(self, name: str, labels: Labels, by: float = 1.0) -> None:
        self._values[name, labels] = self._values.get((name, labels), 0.0) + by

    def _commit(self, event: Committed) -> None:
        is_healthy = event.health is None or event.health.ok
        self._kept = [] if is_healthy else [line for line in self._kept if line.startswith(_HEALTHY)]
        self._values = {key: value for key, value in self._values.items() if not key[0].startswith(_LAST)}
        found = {"timestamp_seconds": event.time, "bytes": event.bytes, "seconds": event.seconds}
        found["healthy"] = is_healthy
        if is_healthy:
            self._values[_HEALTHY, ()] = event.time
        if event.step is not None:
            found["step"] = event.step
        self._values |= {(_LAST + name, ()): float(value) for name, value in found.items()}
        for time_of in event.timings:
            phase = ("phase", time_of.phase)
            for which, seconds in (("median", time_of.median_s), ("slowest", time_of.slowest_s)):
                self._values[_LAST + "phase_seconds", (phase, ("rank", which))] = seconds
            self._values[_LAST + "phase_slowest_rank", (phase,)] = time_of.slowest_rank

    def _write(self) -> None:
        self._written = time.monotonic()
        lines: list[str] = []
        for name, (kind, text) in _METRICS.items():
            samples = [
                f"{name}{_show((*self._labels, *ls))} {v:.17g}" for (n, ls), v in self._values.items() if n == name
            ]
            samples += [line for line in self._kept if line.startswith((f"{name}{{", f"{name} "))]
            if samples:
                lines += [f"# HELP {name} {text}", f"# TYPE {name} {kind}", *samples]
        other = self._path.with_name(f".{self._path.name}.{os.getpid()}")  # not .prom: nobody reads it half written
        try:
            other.write_text("\n".join(lines) + "\n", encoding="utf-8")
            other.replace(self._path)
        except OSError:
            with contextlib.suppress(OSError):
                other.unlink(missing_ok=True)
            raise


def _checked(labels: Mapping[str, str]) -> Labels:
    for name in labels:
        if not _LABEL.fullmatch(name) or name.startswith("__"):
            raise InvalidRequest(f"a label of Prometheus has letters, digits and underscores, unlike {name!r}")
        if name in ("kind", "phase", "rank"):
            raise InvalidRequest(f"the label {name!r} is used already; choose another")
    return tuple((name, str(value)) for name, value in labels.items())


def _show(labels: Labels) -> str:
    """Labels as the format writes them. Pure."""
    if not labels:
        return ""
    return "{" + ",".join(f'{name}="{_escaped(value)}"' for name, value in labels) + "}"


def _escaped(value: str) -> str:
    plain = value.encode("utf-8", "backslashreplace").decode()
    return plain.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def _lines_kept(path: Path) -> list[str]:
    """What the file of an earlier job says of the last checkpoint; nothing, if that is no such file."""
    try:
        with path.open(encoding="utf-8", newline="\n") as file:  # labels may hold what ends a line elsewhere
            lines = file.read(_MAX_BYTES).split("\n")
    except (OSError, UnicodeDecodeError):
        return []
    found = {match[1] + match[2]: match for match in map(_SAMPLE.fullmatch, lines) if match is not None}
    return [match[0] for match in found.values() if match[1] in _METRICS and _is_number(match[3])]


def _is_number(text: str) -> bool:
    try:
        float(text)
    except ValueError:
        return False
    return True
