"""What an asynchronous save costs a training loop: Milepost's modes beside DCP's default and its best options.

A transformer trains with AdamW in one process, on a GPU or on one CPU thread. Its parameters and moments are the state.
Each contender runs in its own process, so its first save is a real first save. Later saves are measured in rounds. A
round has one save while training continues (several, if they are short), with steps before and after it. For Milepost
it also has one save while training is paused, and one synchronous `milepost.save`.

Measured:

* Seconds until control returns, until the state is staged, and until the checkpoint is committed.
* The stall: the time of the call, plus the extra time of the first step after it. That step waits for an overlapped
  copy.
* Steps per second with and without a save. Steps count if they began after control returned and ended before the
  commit; the first one does not count.
* Memory.

The limit is a copy of all bytes of the state to warm host memory (pinned, for a GPU), in the same process and round.
After each save during training, a weight and a moment are loaded and compared with their values at the call.
"""

import argparse
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import harness
from machine import load_average, machine
from showing import Row, at_most, bars_table, below, format_table, positive, write_rows

MOST_OF_LIMIT = 1.15
MOST_OF_DCP_STALL = 0.5
STALL_BELOW_MS = {"device": 10, "overlap": 20}  # on a GPU, up to 13 GB
SLOW_DOWN_BELOW_PERCENT = 2
MOST_OF_SYNC = 1.1
MOST_OF_STATE = 1.1
LEAST_STEPS = 3  # fewer do not show a rate
GRACE_S = 180.0  # for a worker that is past its share of the time, to finish its round
OVERTIME_S = 60.0  # for all workers together, past `--minutes`
WORKER = Path(__file__).with_name("async_worker.py")


@dataclass(frozen=True, slots=True)
class Contender:
    """A way to save. For DCP, `stage` is "fresh" (a new stager for each save, its default) or "reused"."""

    name: str
    background: str
    stage: str
    prewarmed: bool = False  # only the first save is measured

    @property
    def ours(self) -> bool:
        """Whether this is Milepost."""
        return self.name.startswith("Milepost")


CONTENDERS = {
    "dcp-default": Contender("DCP default", "thread", "fresh"),
    "thread-host": Contender("Milepost thread/host", "thread", "host"),
    "thread-device": Contender("Milepost thread/device", "thread", "device"),
    "thread-overlap": Contender("Milepost thread/overlap", "thread", "overlap"),
    "process-host": Contender("Milepost process/host", "process", "host"),
    "process-auto": Contender("Milepost process/auto", "process", "auto"),
    "prewarmed-thread-host": Contender("Milepost thread/host, prewarmed", "thread", "host", prewarmed=True),
    "prewarmed-process-host": Contender("Milepost process/host, prewarmed", "process", "host", prewarmed=True),
    "dcp-thread": Contender("DCP best, thread", "thread", "reused"),
    "dcp-process": Contender("DCP best, process", "process", "reused"),
}
GPU_ONLY = frozenset({"thread-device"})


# What is measured


@dataclass(frozen=True, slots=True)
class Task:
    """The task of one worker. It starts no new round after `seconds`, and is killed after `most_seconds`."""

    key: str
    size_bytes: int
    device: str
    rounds: int
    pace_s: float
    enough_steps: int  # during the saves of one round
    seconds: float
    most_seconds: float
    folder: str


@dataclass(frozen=True, slots=True)
class Save:
    """Seconds from the call until control returned, the state was staged, and the checkpoint was committed."""

    returned_s: float
    staged_s: float
    done_s: float


@dataclass(frozen=True, slots=True)
class Busy:
    """Saves during training: the first step after each, the other overlapped steps, and the steps before and after."""

    saves: list[Save]
    first_steps_s: list[float]
    steps_s: list[float]
    quiet_s: list[float]

    @property
    def stalls_s(self) -> list[float]:
        """The time that each save took from the training."""
        usual = statistics.median(self.quiet_s)
        pairs = zip(self.saves, self.first_steps_s, strict=True)
        return [save.returned_s + max(0.0, step - usual) for save, step in pairs]

    @property
    def slow_down_percent(self) -> float | None:
        """How much lower the rate of steps was during the saves; None if there were too few steps."""
        if len(self.steps_s) < LEAST_STEPS:
            return None
        return 100 * (1 - statistics.fmean(self.quiet_s) / statistics.fmean(self.steps_s))


@dataclass(slots=True)
class Outcome:
    """What a worker measured. `limits_s` has an entry for each of `idle`, and so has `syncs_s`."""

    key: str
    size_bytes: int
    step_s: float = 0.0
    prewarm_s: float | None = None
    first: Save | None = None
    idle: list[Save] = field(default_factory=list)
    limits_s: list[float] = field(default_factory=list)
    syncs_s: list[float] = field(default_factory=list)
    busy: list[Busy] = field(default_factory=list)
    device_copies_s: list[float] = field(default_factory=list)
    host_bytes: int | None = None
    device_bytes: int = 0
    notes: list[str] = field(default_factory=list)

    @property
    def contender(self) -> Contender:
        """The contender that was measured."""
        return CONTENDERS[self.key]

    def as_dict(self) -> dict[str, Any]:
        """For JSON."""
        return asdict(self)

    @staticmethod
    def from_dict(values: dict[str, Any]) -> "Outcome":
        """From JSON."""
        first, idle, busy = values["first"], values["idle"], values["busy"]
        records = {
            "first": Save(**first) if first else None,
            "idle": [Save(**save) for save in idle],
            "busy": [Busy(**{**one, "saves": [Save(**save) for save in one["saves"]]}) for one in busy],
        }
        return Outcome(**{**values, **records})

    def saves(self) -> list[Save]:
        """The later saves, made during training."""
        return [save for busy in self.busy for save in busy.saves]

    def stalls_ms(self) -> list[float]:
        """The stall of each later save."""
        return [1000 * stall for busy in self.busy for stall in busy.stalls_s]

    def slow_downs(self) -> list[float]:
        """The slow-down of each round that had enough steps."""
        return [found for busy in self.busy if (found := busy.slow_down_percent) is not None]

    def of_limit(self) -> list[float]:
        """Time until staged over the limit, round by round."""
        return [save.staged_s / limit for save, limit in zip(self.idle, self.limits_s, strict=False)]

    def of_sync(self) -> list[float]:
        """Time until committed over that of a synchronous save, round by round; training was paused."""
        return [save.done_s / sync for save, sync in zip(self.idle, self.syncs_s, strict=False)]


# What is shown


def rows_of(outcomes: list[Outcome], device: str) -> list[Row]:
    """The results; rows that can have a bar come first. What was not measured has no row."""
    rows: list[Row] = []
    for outcome in outcomes:
        if outcome.contender.ours and outcome.first is not None:
            rows += _barred(outcome, device, _dcp_stall_s(outcomes))
    return rows + [row for outcome in outcomes for row in _figures(outcome, device)]


def _barred(outcome: Outcome, device: str, dcp_stall_s: float | None) -> Iterator[Row]:
    who, name = outcome.contender, f"async save, {device}: {outcome.contender.name}"
    host = who.stage == "host" and not who.prewarmed
    if host and (ratios := outcome.of_limit()):
        yield at_most(f"{name}, staged, later saves / limit", statistics.median(ratios), "x", MOST_OF_LIMIT)
    if host and dcp_stall_s:
        assert outcome.first is not None
        ratio = outcome.first.returned_s / dcp_stall_s
        yield at_most(f"{name}, first save / stall of DCP's default", ratio, "x", MOST_OF_DCP_STALL)
    if outcome.busy:
        bar = STALL_BELOW_MS.get(who.stage or "") if device != "cpu" else None
        yield below(f"{name}, stall per save", statistics.median(outcome.stalls_ms()), "ms", bar)
    if slow_downs := outcome.slow_downs():
        yield below(f"{name}, training slow-down", statistics.median(slow_downs), "%", SLOW_DOWN_BELOW_PERCENT)
    if ratios := outcome.of_sync():
        yield at_most(f"{name}, total / synchronous save", statistics.median(ratios), "x", MOST_OF_SYNC)
    if outcome.host_bytes is not None:
        yield at_most(f"{name}, host memory / state", outcome.host_bytes / outcome.size_bytes, "x", MOST_OF_STATE)


def _dcp_stall_s(outcomes: list[Outcome]) -> float | None:
    """Seconds until DCP's default returns control: its first save or the median later one, whichever is shorter."""
    for outcome in outcomes:
        if outcome.key == "dcp-default" and outcome.first is not None:
            later = [save.returned_s for save in outcome.saves()]
            return min([outcome.first.returned_s, *([statistics.median(later)] if later else [])])
    return None


def _figures(outcome: Outcome, device: str) -> Iterator[Row]:
    name = f"async save, {device}: {outcome.contender.name}"
    if outcome.first is not None:
        yield Row(f"{name}, first save, until control returns", outcome.first.returned_s, "s")
        yield Row(f"{name}, first save, until committed", outcome.first.done_s, "s")
    if outcome.prewarm_s is not None:
        yield Row(f"{name}, prewarming", outcome.prewarm_s, "s")
    if not outcome.contender.ours:
        yield from _spread(f"{name}, stall per save", outcome.stalls_ms(), "ms")
        yield from _spread(f"{name}, training slow-down", outcome.slow_downs(), "%")
        if outcome.host_bytes is not None:
            yield Row(f"{name}, host memory / state", outcome.host_bytes / outcome.size_bytes, "x")
    yield from _spread(f"{name}, until control returns", [save.returned_s for save in outcome.saves()], "s")
    yield from _spread(f"{name}, until staged", [save.staged_s for save in outcome.saves()], "s")
    yield from _spread(f"{name}, until committed, training", [save.done_s for save in outcome.saves()], "s")
    yield from _spread(f"{name}, until committed, nothing else", [save.done_s for save in outcome.idle], "s")
    yield from _spread(f"{name}, synchronous save", outcome.syncs_s, "s")
    yield from _spread(f"{name}, limit", outcome.limits_s, "s")
    yield from _spread(f"{name}, copy within the device", outcome.device_copies_s, "s")
    yield from _spread(f"{name}, steps per second without a save", _rates(outcome, "quiet_s"), "1/s")
    yield from _spread(f"{name}, steps per second during a save", _rates(outcome, "steps_s"), "1/s")
    if device != "cpu":
        yield Row(f"{name}, device memory", outcome.device_bytes / 1e9, "GB")


def _spread(name: str, values: list[float], unit: str) -> Iterator[Row]:
    if values:
        yield Row(name, statistics.median(values), unit)
        yield Row(f"{name}, least", min(values), unit)
        yield Row(f"{name}, most", max(values), unit)


def _rates(outcome: Outcome, what: str) -> list[float]:
    periods = [getattr(busy, what) for busy in outcome.busy]
    return [1 / statistics.fmean(period) for period in periods if len(period) >= LEAST_STEPS]


def saves_table(outcomes: list[Outcome]) -> str:
    """First and later saves. Later ones ran during training; `x limit` and `x sync` are from saves without training."""
    heads = ["contender", "first s", "returns s", "min..max", "staged s", "x limit", "min..max", "total s", "x sync",
             "min..max", "host/state", "device GB"]  # fmt: skip
    lines = []
    for outcome in outcomes:
        first, saves = outcome.first, outcome.saves()
        returned, staged, done = ([getattr(s, what) for s in saves] for what in ("returned_s", "staged_s", "done_s"))
        lines.append(
            [
                outcome.contender.name,
                f"{first.returned_s:.3f}" if first else "none",
                *_cells(returned, 3), _cells(staged, 3)[0], *_cells(outcome.of_limit(), 2),
                _cells(done, 2)[0], *_cells(outcome.of_sync(), 2),
                f"{outcome.host_bytes / outcome.size_bytes:.2f}" if outcome.host_bytes is not None else "",
                f"{outcome.device_bytes / 1e9:.2f}" if first else "",
            ]
        )  # fmt: skip
    return format_table(heads, lines)


def training_table(outcomes: list[Outcome]) -> str:
    """The training during the later saves."""
    heads = ["contender", "stall ms", "min..max", "steps/s without", "with", "slow-down %", "min..max", "worst step ms",
             "of", "steps", "saves"]  # fmt: skip
    lines = []
    for outcome in outcomes:
        if not outcome.busy:
            continue
        during = [1000 * step for busy in outcome.busy for step in busy.steps_s]
        quiet = [1000 * step for busy in outcome.busy for step in busy.quiet_s]
        rates = [_cells(_rates(outcome, what), 2)[0] for what in ("quiet_s", "steps_s")]
        worst = f"{max(during):.0f}" if during else ""
        stalls, slow_downs = _cells(outcome.stalls_ms(), 0), _cells(outcome.slow_downs(), 1)
        counts = [f"{statistics.median(quiet):.0f}", str(len(during)), str(len(outcome.saves()))]
        lines.append([outcome.contender.name, *stalls, *rates, *slow_downs, worst, *counts])
    return format_table(heads, lines)


def _cells(values: list[float], digits: int) -> tuple[str, str]:
    """The median and the range."""
    if not values:
        return "", ""
    return (
        f"{statistics.median(values):.{digits}f}",
        f"{min(values):.{digits}f}..{max(values):.{digits}f}",
    )


def notes_of(outcomes: list[Outcome]) -> list[str]:
    """The notes of the workers, and what could not be judged."""
    notes = [f"{outcome.contender.name}: {note}" for outcome in outcomes for note in outcome.notes]
    for outcome in outcomes:
        if outcome.busy and not outcome.slow_downs():
            notes.append(f"{outcome.contender.name}: saves too short for {LEAST_STEPS} steps, no slow-down")
    if _dcp_stall_s(outcomes) is None:
        notes.append("first saves are not compared: DCP's default was not measured")
    copies = [copy for outcome in outcomes for copy in outcome.device_copies_s]
    if copies:
        notes.append(f"a copy of the state within the device: {1000 * statistics.median(copies):.1f} ms")
    return notes


# What is run


def run_worker(task: Task, folder: Path) -> Outcome:
    """Run the task in a new process. That process and all its children have ended when this returns."""
    task_file, result_file, log = folder / "task.json", folder / "result.json", folder / "log"
    task_file.write_text(json.dumps(asdict(task)))
    result_file.unlink(missing_ok=True)
    command = [sys.executable, str(WORKER), str(task_file), str(result_file)]
    with log.open("w") as output:
        process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=output, stderr=output, start_new_session=True
        )  # fmt: skip
        try:
            code = process.wait(task.most_seconds)
            fault = None if code in (0, 1) else f"the process ended with {code}"
        except subprocess.TimeoutExpired:
            fault = "the process took too long and was killed"
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    if not result_file.exists():
        last = (log.read_text().strip().splitlines() or ["no output"])[-1][:300]
        return Outcome(task.key, task.size_bytes, notes=[fault or f"the process failed: {last}"])
    outcome = Outcome.from_dict(json.loads(result_file.read_text()))
    if fault:
        outcome.notes.append(fault)
    return outcome


def measure(arguments: argparse.Namespace, folder: Path) -> Iterator[Outcome]:
    """All contenders, one after the other. Those that remain share the remaining time."""
    end = time.monotonic() + 60 * arguments.minutes
    for i, key in enumerate(arguments.keys):
        began = time.monotonic()
        if began >= end:
            yield Outcome(key, int(arguments.size_gb * 1e9), notes=["not measured: the time was used up"])
            continue
        place = folder / key
        place.mkdir()
        seconds = (end - began) / (len(arguments.keys) - i)
        most_seconds = min(seconds + GRACE_S, end + OVERTIME_S - began)
        pace_s, enough = (0.2, 0) if arguments.quick else (1.5, 10)
        task = Task(
            key, int(arguments.size_gb * 1e9), arguments.device, arguments.rounds, pace_s, enough,
            seconds, most_seconds, str(place),
        )  # fmt: skip
        outcome = run_worker(task, place)
        said = f"{len(outcome.saves())} saves during training, {time.monotonic() - began:.0f} s"
        print("; ".join([f"  {outcome.contender.name}: {said}", *outcome.notes]), file=sys.stderr, flush=True)
        shutil.rmtree(place, ignore_errors=True)
        yield outcome


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="contenders: " + ", ".join(CONTENDERS),
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="0.1 GB (on a GPU 1 GB), 1 round: about a minute")
    parser.add_argument(
        "--device", choices=["cpu", "cuda"], help="where the training runs (default: cuda if there is one)"
    )
    parser.add_argument("--size-gb", type=float, help="size of the state in GB (default 1; on a GPU 13)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 5)")
    parser.add_argument("--minutes", type=float, help="for all contenders together (default 20; on a GPU 7)")
    parser.add_argument("--only", nargs="+", metavar="CONTENDER", default=[], help="contenders, or prefixes of names")
    parser.add_argument("--folder", type=Path, metavar="DIR", help="a folder on a disk (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    if unknown := [start for start in arguments.only if not any(key.startswith(start) for key in CONTENDERS)]:
        parser.error(f"no contender begins with {', '.join(unknown)}; there are {', '.join(CONTENDERS)}")
    arguments.device = arguments.device or ("cuda" if _has_device() else "cpu")
    on_device = arguments.device != "cpu"
    size_gb, rounds = ((1.0, 1) if on_device else (0.1, 1)) if arguments.quick else (13.0 if on_device else 1.0, 5)
    arguments.size_gb, arguments.rounds = arguments.size_gb or size_gb, arguments.rounds or rounds
    arguments.minutes = arguments.minutes or (7.0 if on_device else 20.0)
    wanted = [key for key in CONTENDERS if key.startswith(tuple(arguments.only or [""]))]
    arguments.keys = [key for key in wanted if on_device or key not in GPU_ONLY]
    return arguments


def main() -> None:
    """Run the contenders, print the tables, write the rows."""
    arguments = _arguments()
    if arguments.device != "cpu" and not _has_device():
        print(f"--device {arguments.device}: there is none on this machine, so nothing is measured")
        if arguments.json:
            write_rows(arguments.json, [])
        return
    os.environ.update(harness.RANK_ENVIRONMENT)
    with harness.work_folder(arguments.folder, int(3e9 * arguments.size_gb) + (1 << 28)) as folder:
        amount = f"{arguments.device}, {arguments.size_gb:.3g} GB, at most {arguments.rounds} rounds"
        print(__doc__.strip(), f"{machine(folder)}\n{amount}", "", sep="\n\n", flush=True)
        outcomes: list[Outcome] = []
        for outcome in measure(arguments, folder):
            outcomes.append(outcome)
            if arguments.json:  # after each contender, in case this run is interrupted
                write_rows(arguments.json, rows_of(outcomes, arguments.device))
    rows = rows_of(outcomes, arguments.device)
    ends = "\n".join([*notes_of(outcomes), load_average()])
    print(saves_table(outcomes), training_table(outcomes), bars_table(rows), ends, sep="\n\n")
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    harness.run_main(main)
