"""How long the page of a large run takes: to write it, and to open it in a browser until it answers.

The runs are simulated (`simulated_run.py`): their manifests are as real saves would leave them, and their data files
have no content. `milepost view` writes the page in a new process. Then a new Chromium opens the file in each round.

*Until it answers*: from the command to open the file until the timeline is drawn, a key that was pressed then has
picked another step, and that is on the screen. The time of the driver (Playwright) is part of it. *Parts* are the first
looks at the other tabs, each until it is on the screen; the slowest is told.
"""

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the browser is in the folder of tests

from machine import machine
from showing import Row, bars_table, below, format_table, positive, write_rows
from simulated_run import RunSize, SimulatedRun

from tests import browser

TABS = ("tensors", "layout", "statistics", "changes")
MOST_OPEN_S, MOST_MB = 2.0, 20.0
PAINTED = "new Promise(done => requestAnimationFrame(() => requestAnimationFrame(() => done(performance.now()))))"
WRITE = """
import pathlib, sys
from milepost.cli.app import main
status = main(["view", sys.argv[1], "-o", sys.argv[2], "--json"])
print(pathlib.Path("/proc/self/status").read_text().split("VmHWM:")[1].split()[0], file=sys.stderr)
sys.exit(status)
"""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What is simulated. The first has bars."""

    runs: tuple[RunSize, ...]
    rounds: int


QUIET = {"unhealthy_every": 0, "unfinished_every": 0, "damaged_every": 0}
FULL = Sizes((RunSize(), RunSize(1, 100_000, 1024, **QUIET), RunSize(1, 1000, 16_384, **QUIET)), 7)
QUICK = Sizes((RunSize(60, 500, 64), RunSize(1, 5000, 64, **QUIET), RunSize(1, 100, 2048, **QUIET)), 1)


@dataclass(slots=True)
class Opened:
    """One page, opened several times. `parts`: for each tab its first looks."""

    name: str
    write_s: float
    write_mib: float
    size_mb: float
    open_s: list[float] = field(default_factory=list)
    drawn_s: list[float] = field(default_factory=list)
    parts_s: dict[str, list[float]] = field(default_factory=dict)
    heap_mib: list[float] = field(default_factory=list)
    renderer_mib: list[float] = field(default_factory=list)

    @property
    def slowest_part(self) -> tuple[str, float]:
        """The tab that takes longest to show, and how long."""
        return max(((tab, statistics.median(took)) for tab, took in self.parts_s.items()), key=lambda pair: pair[1])


def name_of(size: RunSize) -> str:
    """The size in words."""
    steps = "1 step" if size.steps == 1 else f"{size.steps:,} steps"
    return f"{steps} x {size.tensors:,} tensors x {size.ranks:,} ranks"


def write(size: RunSize, folder: Path) -> tuple[Path, Opened]:
    """Simulate a run and let `milepost view` write its page."""
    run, page = folder / "run", folder / "page.html"
    began = time.monotonic()
    SimulatedRun(size).write(run)
    print(f"  simulated {name_of(size)}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", WRITE, run, page], capture_output=True, text=True, check=True)
    took = time.monotonic() - began
    peak_mib = int(done.stderr.split()[-1]) / 1024
    return page, Opened(name_of(size), took, peak_mib, page.stat().st_size / 1e6)


def open_once(running: Any, page: Path, found: Opened) -> None:
    """Open the page, press a key as soon as it is drawn, and look at each part."""
    session = running.new_browser_cdp_session()
    tab = browser.Tab(running, reduced_motion="no-preference")
    began = time.perf_counter()
    tab.open(page.as_uri())
    opened = tab.raw
    tab.until("document.documentElement.dataset.ready === 'true'", timeout_s=120)
    found.drawn_s.append(time.perf_counter() - began)
    if opened.locator("#timeline-chart").is_visible():
        before = opened.inner_text("#step-heading")
        opened.locator("#timeline-chart").press("ArrowLeft")
        opened.evaluate(PAINTED)
        assert opened.inner_text("#step-heading") != before or before == "Step 100", "nothing was picked"
    found.open_s.append(time.perf_counter() - began)
    for name in TABS:
        if not opened.locator(f"#tab-{name}").is_visible():
            continue
        began = time.perf_counter()
        opened.evaluate(f"document.getElementById('tab-{name}').click()")
        opened.evaluate(PAINTED)
        found.parts_s.setdefault(name, []).append(time.perf_counter() - began)
    metrics = tab.devtools()
    metrics.send("Performance.enable")
    heap = {one["name"]: one["value"] for one in metrics.send("Performance.getMetrics")["metrics"]}
    found.heap_mib.append(heap["JSHeapUsedSize"] / 2**20)
    found.renderer_mib.append(max(_renderers(session)))
    tab.close()


def _renderers(session: Any) -> Iterator[float]:
    """The peak memory of each process that draws pages, in MiB."""
    yield 0.0
    for process in session.send("SystemInfo.getProcessInfo")["processInfo"]:
        status = Path(f"/proc/{process['id']}/status")
        if process["type"] == "renderer" and status.exists():
            yield int(status.read_text().split("VmHWM:")[1].split()[0]) / 1024


def measure(sizes: Sizes, folder: Path | None) -> list[Opened]:
    """Write and open all pages."""
    results = []
    for size in sizes.runs:
        with tempfile.TemporaryDirectory(dir=folder, prefix="milepost-page-") as work:
            page, found = write(size, Path(work))
            for _ in range(sizes.rounds + 1):
                with browser.started() as running:
                    open_once(running, page, found)
            for took in (found.open_s, found.drawn_s, found.heap_mib, found.renderer_mib, *found.parts_s.values()):
                del took[0]  # the first round is not counted: the browser itself comes from the disk
            results.append(found)
    return results


def rows_of(results: list[Opened]) -> Iterator[Row]:
    """What was found; the bars are for the first page."""
    for number, one in enumerate(results):
        bar: Callable[[float], float | None] = lambda value, number=number: value if number == 0 else None  # noqa: E731
        yield below(f"{one.name}: opened until it answers", statistics.median(one.open_s), "s", bar(MOST_OPEN_S))
        yield below(f"{one.name}: size of the page", one.size_mb, "MB", bar(MOST_MB))
        yield Row(f"{one.name}: opened until drawn", statistics.median(one.drawn_s), "s")
        yield Row(f"{one.name}: opened until it answers, slowest round", max(one.open_s), "s")
        yield Row(f"{one.name}: slowest part, first look ({one.slowest_part[0]})", one.slowest_part[1], "s")
        yield Row(f"{one.name}: heap of JavaScript", statistics.median(one.heap_mib), "MiB")
        yield Row(f"{one.name}: peak memory of the drawing process", statistics.median(one.renderer_mib), "MiB")
        yield Row(f"{one.name}: milepost view", one.write_s, "s")
        yield Row(f"{one.name}: milepost view, peak memory", one.write_mib, "MiB")


def table_of(results: list[Opened]) -> str:
    """One line for each page."""
    heads = ["page", "slowest part", "MB", "written s", "MiB", "drawn s", "answers s", "min..max", "part s", "heap MiB"]
    lines = [
        [
            one.name,
            one.slowest_part[0],
            f"{one.size_mb:.1f}",
            f"{one.write_s:.1f}",
            f"{one.write_mib:.0f}",
            f"{statistics.median(one.drawn_s):.2f}",
            f"{statistics.median(one.open_s):.2f}",
            f"{min(one.open_s):.2f}..{max(one.open_s):.2f}",
            f"{one.slowest_part[1]:.2f}",
            f"{statistics.median(one.heap_mib):.0f}",
        ]
        for one in results
    ]
    return format_table(heads, lines)


def main() -> None:
    """Measure, print the table, and write the rows."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="small runs and one round: under a minute")
    parser.add_argument("--rounds", type=positive, help="rounds (default 7)")
    parser.add_argument("--dir", type=Path, help="where to simulate: 5 GB (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    if browser.why_not():
        sys.exit(browser.why_not())
    sizes = QUICK if arguments.quick else FULL
    sizes = replace(sizes, rounds=arguments.rounds or sizes.rounds)
    print(__doc__.strip(), end="\n\n")
    with browser.started() as running:
        print(machine(arguments.dir or Path(tempfile.gettempdir())))
        print(f"Chromium {running.version}, {sizes.rounds} rounds\n", flush=True)
    results = measure(sizes, arguments.dir)
    rows = list(rows_of(results))
    print(table_of(results), bars_table(rows), sep="\n\n")
    if arguments.quick:
        print("\nA quick run only shows that everything works. It is too small to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    main()
