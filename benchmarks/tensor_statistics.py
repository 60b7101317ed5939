"""What statistics of tensors and the health gate cost a save: the same save with and without them, in turns.

Cases: durable saves of large tensors of one dtype, in one process and on 4 gloo ranks with DTensors; a durable save of
thousands of tensors of 4 KB; and an async save, of which the time until control returns counts. Contenders take turns.
Slow-downs are ratios within a round; their median is shown. harness.py says what makes the comparison fair, and
README.md what each row means. (Called statistics.py, this file would hide Python's own module from all benchmarks.)
"""

import argparse
import os
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Case, Measured
from machine import load_average, machine
from showing import Row, at_most, bars_table, positive, table_of, write_rows

PLAIN, HEALTHY, NUMBERS, HISTOGRAM = "plain", "healthy=True", "statistics=True", 'statistics="histogram"'
OPTIONS: dict[str, dict[str, Any]] = {
    PLAIN: {},
    HEALTHY: {"healthy": True},
    NUMBERS: {"statistics": True},
    HISTOGRAM: {"statistics": "histogram"},
}
NAMES = {
    "large-1-bfloat16": "save, bfloat16, 1 process",
    "large-1-float32": "save, float32, 1 process",
    "large-4-bfloat16": "save, bfloat16, 4 ranks",
    "large-4-float32": "save, float32, 4 ranks",
    "small-bfloat16": "save, {tensors} bfloat16 tensors of 4 KB",
    "small-float32": "save, {tensors} float32 tensors of 4 KB",
    "async-bfloat16": "async save, bfloat16, until control returns",
    "async-float32": "async save, float32, until control returns",
}
MOST_PERCENT = 5
NOISE_PERCENT = 5
"""An async save returns before the statistics are computed: what is measured there is the noise."""
LARGE = 8


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how much. It is sent to the ranks."""

    size_bytes: int
    tensors: int
    rounds: int
    keys: frozenset[str]

    def name(self, key: str) -> str:
        """The name of a case in the table and in the rows."""
        return NAMES[key].format(tensors=self.tensors)


# What the ranks do


def on_ranks(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """All cases of this many ranks."""
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    for key in NAMES:
        if key not in plan.keys:
            continue
        kind, *_, dtype = key.split("-")
        if kind == "large" and int(key.split("-")[1]) == world:
            state = _state(stage, plan.size_bytes // LARGE, LARGE, dtype)
            stage.saves(plan.name(key), state, folder, [_format()])
        elif kind == "small" and world == 1:
            stage.saves(plan.name(key), _state(stage, 4096, plan.tensors, dtype), folder, [_format()])
        elif kind == "async" and world == 1:
            _until_control_returns(stage, plan.name(key), _state(stage, plan.size_bytes // LARGE, LARGE, dtype))
    return stage.done()


def _state(stage: Any, tensor_bytes: int, count: int, dtype: str) -> Any:
    """Tensors of ordinary numbers: with NaN among them, each would take a closer look."""
    import torch
    from contenders import Spec

    kind = getattr(torch, dtype)
    numbers = tensor_bytes // kind.itemsize
    shape = (numbers,) if count > LARGE else (max(numbers // 4096 * 4, 4), 1024)  # rows for 4 ranks
    state = stage.state([Spec("model", f"layers.{i}.weight", shape, kind) for i in range(count)])
    for local in state.locals:
        local.normal_()
    return state


def _format() -> Any:
    from contenders import Format

    return Format({who: _saver(options) for who, options in OPTIONS.items()}, {})


def _saver(options: dict[str, Any]) -> Callable[[Any, Path], Any]:
    import milepost

    return lambda state, folder: milepost.save(state.value, folder / "step", **options)


def _until_control_returns(stage: Any, name: str, state: Any) -> None:
    """Each contender has a saver of its own, whose memory is there. The next run begins when the save is committed."""
    import milepost

    savers = {who: milepost.AsyncSaver() for who in OPTIONS}
    folder = stage.folder / "async"

    def planned(who: str) -> harness.Planned:
        def prepare() -> None:
            for saver in savers.values():
                saver.wait()
            stage.meter.delete(folder)
            stage.meter.settle()

        return harness.Planned(lambda: savers[who].save(state.value, folder, **OPTIONS[who]), prepare)

    stage.meter.case(name, state.size_bytes, {who: planned(who) for who in OPTIONS})
    for saver in savers.values():
        saver.close()
    stage.meter.delete(folder)


# What is run and shown


def measure(folder: Path, plan: Plan) -> list[Case]:
    """The cases of one process, and then those of 4 ranks."""
    cases: list[Case] = []
    for world in (1, 4):
        if any(("-4-" in key) == (world == 4) for key in plan.keys):
            cases += harness.run_ranks(world, on_ranks, folder, plan)
    return cases


def rows_of(case: Case) -> list[Row]:
    """Slow-downs, with a bar for statistics and for the health gate, and what they cost the processor."""
    is_async = case.name.startswith("async")
    bars = {HEALTHY: MOST_PERCENT, NUMBERS: MOST_PERCENT}
    rows = []
    for who in OPTIONS:
        walls = [run.wall_s for run in case.runs[who]]
        if who != PLAIN:
            ratio = case.ratio(who, (PLAIN,))
            assert ratio is not None
            bar = (NOISE_PERCENT if is_async else bars[who]) if who in bars else None
            rows.append(at_most(f"{case.name}: {who}, slow-down", 100 * (ratio - 1), "%", bar))
            if not is_async:
                more = case.median(who, "cpu_s") - case.median(PLAIN, "cpu_s")
                rows.append(Row(f"{case.name}: {who}, more CPU", more / case.size_bytes * 1e9, "s/GB"))
        rows.append(Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s"))
        rows.append(Row(f"{case.name}: {who}, wall, fastest round", min(walls), "s"))
        rows.append(Row(f"{case.name}: {who}, wall, slowest round", max(walls), "s"))
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="cases: " + ", ".join(NAMES)
    )
    parser.add_argument("--quick", action="store_true", help="32 MB, 2,000 small tensors, 1 round: under a minute")
    parser.add_argument("--size-gb", type=float, help="size of the state in GB (default 1)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 9)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[], help="cases, or prefixes of their names")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder on a disk (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    if unknown := [start for start in arguments.only if not any(key.startswith(start) for key in NAMES)]:
        parser.error(f"no case begins with {', '.join(unknown)}; there are {', '.join(NAMES)}")
    arguments.keys = frozenset(key for key in NAMES if key.startswith(tuple(arguments.only or [""])))
    return arguments


def _plan(arguments: argparse.Namespace) -> Plan:
    size_gb, tensors, rounds = (0.032, 2_000, 1) if arguments.quick else (1.0, 20_000, 9)
    return Plan(
        int((arguments.size_gb or size_gb) * 1e9),
        arguments.tensors or tensors,
        arguments.rounds or rounds,
        arguments.keys,
    )


def main() -> None:
    """Run the cases, print the tables, write the rows."""
    arguments = _arguments()
    os.environ.update(harness.RANK_ENVIRONMENT)
    plan = _plan(arguments)
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder(arguments.disk, 4 * plan.size_bytes + (1 << 28)))
        kinds = f"{plan.size_bytes / 1e9:.3g} GB, {plan.tensors} small tensors, rounds: {plan.rounds}"
        print(__doc__.strip(), machine(folder) + "\n" + kinds, "", sep="\n\n", flush=True)
        cases = measure(folder, plan)
    rows = [row for case in cases for row in rows_of(case)]
    print(table_of(cases), bars_table(rows), load_average(), sep="\n\n")
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    harness.run_main(main)
