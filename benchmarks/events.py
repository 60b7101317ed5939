"""What events cost where nobody listens, and where somebody does.

1. The calls that a save and a load make into the events, and how long each takes without a listener: their product is
   set beside the wall time of a tiny save and of a large one.
2. The time of a tiny save and of a tiny load, in one process: without a listener, and with one, ten and a hundred.
   With `--against`, also by the source of another commit, such as the last one without events. Contenders take turns,
   a few calls at a time; ratios are within a turn, and their median is shown.

README.md says what each row means.
"""

import argparse
import json
import os
import statistics
import subprocess
import sys
import timeit
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

import harness
from machine import load_average, machine
from showing import Row, at_most, bars_table, format_table, positive, write_rows

MOST_PERCENT = 0.1
MOST_OF_BEFORE = 1.05
CALLS_A_TURN = 20
STARTS = 6
"""How often each contender is started: one process differs from the next by some percent, for as long as it runs."""
KINDS = ("save", "load")
HERE, BEFORE = "no listener", "before"
LISTENERS = {HERE: 0, "1 listener": 1, "10 listeners": 10, "100 listeners": 100}


# In the worker: one process for each contender


def work(folder: Path, listeners: int) -> None:
    """Save or load as often as each line of the input says, and print the seconds of each call."""
    import time

    import torch

    import milepost

    heard: list[Any] = []
    for _ in range(listeners):
        milepost.events.listen(heard.append)
    state, place = {"w": torch.ones(1000), "step": 1}, folder / "step"
    calls = {"save": lambda: milepost.save(state, place), "load": lambda: milepost.load(state, place)}

    def measure(kind: str, count: int) -> list[float]:
        times = []
        for _ in range(count):
            start = time.perf_counter()
            calls[kind]()
            times.append(time.perf_counter() - start)
        heard.clear()
        return times

    measure("save", CALLS_A_TURN)
    measure("load", CALLS_A_TURN)
    print("ready", flush=True)
    for line in sys.stdin:
        print(json.dumps(measure(line.strip(), CALLS_A_TURN)), flush=True)


class Worker:
    """A contender: a process that saves and loads on demand."""

    def __init__(self, folder: Path, listeners: int, source: Path | None) -> None:
        folder.mkdir()
        command = [sys.executable, __file__, "--work", str(folder), str(listeners)]
        further = {} if source is None else {"PYTHONPATH": str(source)}
        self._process = subprocess.Popen(
            command,
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, **harness.RANK_ENVIRONMENT, **further},
        )
        self._read()

    def turn(self, kind: str) -> float:
        """The median seconds of a few calls."""
        assert self._process.stdin is not None
        self._process.stdin.write(f"{kind}\n")
        self._process.stdin.flush()
        found: list[float] = json.loads(self._read())
        return statistics.median(found)

    def _read(self) -> str:
        assert self._process.stdout is not None
        line = self._process.stdout.readline()
        if not line:
            raise harness.RankFailed(f"a worker that ended with {self._process.wait()}")
        return line

    def close(self) -> None:
        """End the process."""
        self._process.kill()
        self._process.communicate()


# The parts


def counted(size_bytes: int, folder: Path) -> list[Row]:
    """How many calls a save and a load make into the events, what they take, and which share of the time that is."""
    import torch

    import milepost

    torch.set_num_threads(1)
    tiny = {"w": torch.ones(1000), "step": 1}
    large = {f"layers.{i}": torch.empty(size_bytes // 32).normal_() for i in range(8)}
    costs = _costs()
    rows = [Row(f"one {name}, without a listener", seconds * 1e6, "us") for name, seconds in costs.items()]
    for size, state in (("tiny", tiny), (f"{size_bytes / 1e9:.3g} GB", large)):
        for kind in ("save", "load"):
            call = getattr(milepost, kind)
            call(state, folder / "counted") if kind == "save" else None
            with counting() as counts:
                call(state, folder / "counted")
            wall = statistics.median(_repeat(lambda: call(state, folder / "counted"), 50 if size == "tiny" else 5))  # noqa: B023
            spent = sum(counts[name] * costs[name] for name in costs)
            name = f"{size} {kind}"
            rows.append(Row(f"{name}: calls into events", sum(counts.values()), ""))
            bar = MOST_PERCENT if size != "tiny" else None
            rows.append(at_most(f"{name}: events without a listener, share of the time", 100 * spent / wall, "%", bar))
    return rows


def _repeat(call: Any, times: int) -> list[float]:
    return timeit.repeat(call, number=1, repeat=times)


def _costs() -> dict[str, float]:
    """The seconds that each call takes where nobody listens."""
    from milepost.events.operation import moved, operating, phasing

    def phase() -> None:
        with phasing("writing"):
            pass

    def operation() -> None:
        with operating("save", "nowhere"):
            pass

    with operating("save", "nowhere") as current:
        calls = {
            "phase": phase,
            "operation": operation,
            "count of bytes": lambda: moved(1),
            "commit": lambda: current.commit(1, 1),
            "list of times": current.packed_times,
        }
        return {name: min(timeit.repeat(call, number=2000, repeat=7)) / 2000 for name, call in calls.items()}


@contextmanager
def counting() -> Iterator[dict[str, int]]:
    """Count the calls, under the names of `_costs`."""
    from milepost.events import operation
    from milepost.events.operation import Operation, Track, operating, phasing

    places = {
        "phase": (phasing, "__enter__"),
        "operation": (operating, "__enter__"),
        "count of bytes": (Track, "count"),
        "commit": (Operation, "commit"),
        "list of times": (Operation, "packed_times"),
    }
    counts, real = dict.fromkeys(places, 0), {}
    for name, (owner, method) in places.items():
        real[name] = getattr(owner, method)

        def count(*arguments: Any, name: str = name, **options: Any) -> Any:
            counts[name] += 1
            return real[name](*arguments, **options)

        setattr(owner, method, count)
    try:
        yield counts
    finally:
        for name, (owner, method) in places.items():
            setattr(owner, method, real[name])
        assert operation.current() is None


def turns(folder: Path, rounds: int, against: Path | None) -> tuple[list[Row], str]:
    """The times of a tiny save and load, by contenders that take turns; the rows, and a table."""
    who_else = {BEFORE: 0} if against is not None else {}
    times: dict[tuple[str, str], list[float]] = {(k, w): [] for k in KINDS for w in {**LISTENERS, **who_else}}
    for start in range(min(STARTS, rounds)):
        with ExitStack() as stack:
            workers = {}
            for who, listeners in {**LISTENERS, **who_else}.items():
                source = against / "src" if against is not None and who == BEFORE else None
                workers[who] = Worker(folder / f"{start}-{who}".replace(" ", "-"), listeners, source)
                stack.callback(workers[who].close)
            for turn in range(start, rounds, STARTS):
                for kind in KINDS:
                    for who in list(workers) if turn // STARTS % 2 else reversed(workers):
                        times[kind, who].append(workers[who].turn(kind))
    rows, lines = [], []
    for (kind, who), found in times.items():
        ratio = _ratio(times, kind, who)
        if ratio is not None:
            other, bar = (BEFORE, MOST_OF_BEFORE) if who == HERE else (HERE, None)
            rows.append(at_most(f"tiny {kind}: {who} / {other}", ratio, "x", bar))
        rows.append(Row(f"tiny {kind}: {who}", statistics.median(found) * 1e3, "ms"))
        shown = f"{min(found) * 1e3:.3f}..{max(found) * 1e3:.3f}", f"{ratio:.3f}" if ratio else ""
        lines.append([f"tiny {kind}", who, f"{statistics.median(found) * 1e3:.3f}", *shown])
    return rows, format_table(["case", "contender", "ms", "min..max", "ratio"], lines)


def _ratio(times: dict[tuple[str, str], list[float]], kind: str, who: str) -> float | None:
    """To the time without a listener; of that one, to the time of the commit before. None if there is none."""
    others = times.get((kind, BEFORE if who == HERE else HERE))
    if who == BEFORE or others is None:
        return None
    return statistics.median(a / b for a, b in zip(times[kind, who], others, strict=True))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="32 MB, 3 rounds: a few seconds")
    parser.add_argument("--size-gb", type=float, help="size of the large state in GB (default 1)")
    parser.add_argument("--rounds", type=positive, help="turns of each contender (default 60)")
    parser.add_argument("--against", type=Path, metavar="DIR", help="the repository at another commit")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="a folder to save to (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    parser.add_argument("--work", nargs=2, metavar=("DIR", "COUNT"), help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    """Run all parts, print the tables, write the rows."""
    arguments = _arguments()
    if arguments.work:
        work(Path(arguments.work[0]), int(arguments.work[1]))
        return
    size_bytes = int((arguments.size_gb or (0.032 if arguments.quick else 1.0)) * 1e9)
    rounds = arguments.rounds or (3 if arguments.quick else 60)
    os.environ.update(harness.RANK_ENVIRONMENT)
    with harness.work_folder(arguments.dir, 2 * size_bytes + (1 << 28)) as folder:
        print((__doc__ or "").strip(), machine(folder), "", sep="\n\n", flush=True)
        rows = counted(size_bytes, folder)
        more, table = turns(folder, rounds, arguments.against)
        rows += more
    print(
        format_table(["", "row", "value"], [["", r.name, f"{r.value:.3f} {r.unit}"] for r in rows]), table, sep="\n\n"
    )
    print("", bars_table(rows), load_average(), sep="\n\n")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    harness.run_main(main)
