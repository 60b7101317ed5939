"""How fast saves and loads are in an object store, and how many requests they take: Milepost beside raw and DCP.

One SeaweedFS server on this machine, which speaks S3. Cases, in one process and on 4 gloo ranks with DTensors: saves of
part of a transformer in training; loads with the same sharding, and on 4 ranks of what 2 saved; thousands of tensors of
4 KB. The same again through a proxy that lets each request wait and counts requests and bytes: on one machine latency
hides. Then the requests to open a checkpoint, and to find the newest of many steps.

Raw is the limit: obstore puts each rank's bytes as objects of 64 MiB, and gets them by ranges of 8 MiB into memory. It
does not plan, name, check or reshard. DCP uses its fsspec writer and reader with s3fs, and those of s3torchconnector.
Contenders take turns. Figures are medians over rounds. Every load is compared once with what was saved. README.md says
what each row means.
"""

import argparse
import os
import sys
from contextlib import ExitStack
from dataclasses import dataclass, replace
from importlib.util import find_spec
from pathlib import Path
from typing import Any

sys.path.append(str(Path(__file__).resolve().parents[1]))  # the servers and the proxy are in the folder of faults

import harness
from harness import Case, Measured
from machine import load_average, machine
from object_show import RAW, ObjectBars, object_rows, object_table, requests_of_save
from showing import Row, bars_table, positive, worst_peak, write_rows

from faults.servers import SeaweedFS
from faults.servers.seaweed import REGION

NAMES = {
    "save-1": "save, 1 process",
    "save-4": "save, 4 ranks",
    "load-1": "load, 1 process",
    "load-4": "load, 4 ranks",
    "load-2-to-4": "load, 2 -> 4 ranks",
    "small-save": "save, {tensors} tensors of 4 KB",
    "small-load": "load, {tensors} tensors of 4 KB",
}
FAR_NAMES = {f"far-{key}": f"{name}, {{latency:.0f}} ms away" for key, name in NAMES.items()}
LOOKUP_NAMES = {
    "open": "open a checkpoint, {latency:.0f} ms away",
    "newest": "newest of {steps} steps, {latency:.0f} ms away",
}
ALL_NAMES = NAMES | FAR_NAMES | LOOKUP_NAMES
BARS = {
    "save": ObjectBars(least_of_raw=0.9, least_of_dcp=5, most_requests=requests_of_save),
    "load": ObjectBars(least_of_raw=0.9, least_of_dcp=6, most_read=1.05),
    "small": ObjectBars(least_of_dcp=10),
    "open": ObjectBars(most_requests=lambda _: 3),
    "newest": ObjectBars(most_requests=lambda _: 5),
}
MOST_SMALL_ROUNDS = 3  # DCP needs many seconds for each


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how much. It is sent to the ranks."""

    size_bytes: int
    tensors: int
    rounds: int
    steps: int
    latency_s: float
    keys: frozenset[str]
    address: tuple[str, int] = ("", 0)

    def wants(self, *keys: str) -> bool:
        """Whether any of these cases is to be measured, near or far."""
        return not self.keys.isdisjoint([*keys, *(f"far-{key}" for key in keys)])

    def name(self, key: str) -> str:
        """The name of a case in the table and in the rows."""
        return ALL_NAMES[key].format(tensors=self.tensors, steps=self.steps, latency=1e3 * self.latency_s)

    def each(self, key: str) -> list[tuple[str, bool]]:
        """The name of a case, and whether it is far, if that is wanted: near first, then far."""
        both = ((key, False), (f"far-{key}", True))
        return [(self.name(key), far) for key, far in both if key in self.keys]

    def bars_of(self, case: Case) -> ObjectBars:
        """The project's bars for this case."""
        key = next(key for key in self.keys if self.name(key) == case.name)
        return next(bars for start, bars in BARS.items() if key.removeprefix("far-").startswith(start))


# What the ranks do


def one_process(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Large tensors, then many small ones, without a process group."""
    from contenders import large_specs, small_specs

    stage = _stage(rank, world, folder, plan)
    if plan.wants("save-1", "load-1"):
        saves_and_loads(stage, plan, stage.state(large_specs(plan.size_bytes)), ("save-1", "load-1"), "one")
    if plan.wants("small-save", "small-load"):
        stage.meter.rounds = min(plan.rounds, MOST_SMALL_ROUNDS)
        saves_and_loads(stage, plan, stage.state(small_specs(plan.tensors)), ("small-save", "small-load"), "small")
    return stage.done()


def two_ranks_save(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Save on two ranks; four ranks load it later. Nothing is measured."""
    from contenders import large_specs
    from object_stage import KEPT

    stage = _stage(rank, world, folder, plan)
    stage.fresh(KEPT)
    stage.keep(stage.state(large_specs(plan.size_bytes)), "by-2")
    return stage.done()


def four_ranks(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Load what two ranks saved; save; load that with the same sharding."""
    from contenders import large_specs

    stage = _stage(rank, world, folder, plan)
    state = stage.state(large_specs(plan.size_bytes))
    if plan.wants("load-2-to-4"):
        stage.keep(state, "by-2", only=RAW)  # already sharded for these ranks
        for name, far in plan.each("load-2-to-4"):
            stage.loads(name, state, "by-2", far=far)
    if plan.wants("save-4", "load-4"):
        saves_and_loads(stage, plan, state, ("save-4", "load-4"), "by-4")
    return stage.done()


def look_up(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """What it takes to open a checkpoint, and to find the newest of many steps."""
    import milepost

    stage = _stage(rank, world, folder, plan)
    site = stage.many_steps("steps", plan.steps)

    def open_newest() -> None:
        assert len(milepost.open(site.within(f"step-{plan.steps:010}").full_url)) > 0

    def find_newest() -> None:
        with milepost.Checkpointer(site.full_url) as keeper:
            assert keeper.latest() == plan.steps

    for key, call in (("open", open_newest), ("newest", find_newest)):
        if plan.wants(key):
            stage.looks(plan.name(key), call)
    return stage.done()


def saves_and_loads(stage: Any, plan: Plan, state: Any, keys: tuple[str, str], prefix: str) -> None:
    """The cases of one state: saves, then loads."""
    from object_stage import KEPT

    save, load = keys
    for name, far in plan.each(save):
        stage.saves(name, state, far=far)
    if plan.wants(load):
        stage.fresh(KEPT)
        stage.keep(state, prefix)
    for name, far in plan.each(load):
        stage.loads(name, state, prefix, far=far)


def _stage(rank: int, world: int, folder: Path, plan: Plan) -> Any:
    from object_stage import ObjectStage, Server

    return ObjectStage(rank, world, folder, plan.rounds, Server(*plan.address, REGION), plan.latency_s)


# What is run and shown


def measure(folder: Path, plan: Plan) -> list[Case]:
    """All stages that the plan wants, one set of ranks after the other."""
    stages = [
        (1, one_process, ["save-1", "load-1", "small-save", "small-load"]),
        (2, two_ranks_save, ["load-2-to-4"]),
        (4, four_ranks, ["save-4", "load-4", "load-2-to-4"]),
        (1, look_up, ["open", "newest"]),
    ]
    cases: list[Case] = []
    for world, work, keys in stages:
        if plan.wants(*keys):
            cases += harness.run_ranks(world, work, folder, plan)
    return cases


def show(cases: list[Case], plan: Plan) -> list[Row]:
    """Print the tables and return the rows."""
    rows = [row for case in cases for row in object_rows(case, plan.bars_of(case))]
    rows.append(worst_peak(rows))
    notes = list(dict.fromkeys(note for case in cases for note in case.notes))
    print(object_table(cases), bars_table(rows), "\n".join([*notes, load_average()]), sep="\n\n")
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases: " + ", ".join(ALL_NAMES),
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="32 MB, 500 small tensors, 30 steps, 1 round")
    parser.add_argument("--size-gb", type=float, help="size of the state in GB (default 0.5)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--steps", type=positive, help="number of steps to find the newest of (default 1000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 5)")
    parser.add_argument("--latency-ms", type=float, default=20.0, help="what each request waits (default 20)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[""], help="cases, or prefixes of their names")
    parser.add_argument("--dir", type=Path, metavar="DIR", help="where the server keeps its data (default: /dev/shm)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    if unknown := [start for start in arguments.only if not any(key.startswith(start) for key in ALL_NAMES)]:
        parser.error(f"no case begins with {', '.join(unknown)}; there are {', '.join(ALL_NAMES)}")
    return arguments


def _plan(arguments: argparse.Namespace) -> Plan:
    size_gb, tensors, steps, rounds = (0.032, 500, 30, 1) if arguments.quick else (0.5, 20_000, 1_000, 5)
    return Plan(
        int((arguments.size_gb or size_gb) * 1e9),
        arguments.tensors or tensors,
        arguments.rounds or rounds,
        arguments.steps or steps,
        arguments.latency_ms / 1e3,
        frozenset(key for key in ALL_NAMES if key.startswith(tuple(arguments.only))),
    )


def main() -> None:
    """Run the cases, print the tables, write the rows."""
    arguments = _arguments()
    if reason := _why_not():
        print(f"{reason}; nothing is measured")
        if arguments.json:
            write_rows(arguments.json, [])
        return
    os.environ.update(harness.RANK_ENVIRONMENT)
    plan = _plan(arguments)
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder(arguments.dir or Path("/dev/shm"), 12 * plan.size_bytes))
        server = stack.enter_context(SeaweedFS(folder))
        os.environ.update(server.environment)
        plan = replace(plan, address=server.address)
        print(__doc__.strip(), _header(plan, folder), "", sep="\n\n", flush=True)
        cases = measure(folder, plan)
    rows = show(cases, plan)
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


def _why_not() -> str | None:
    missing = [name for name in ("obstore", "boto3") if find_spec(name) is None]
    return f"{', '.join(missing)}: not installed" if missing else SeaweedFS.why_not()


def _header(plan: Plan, folder: Path) -> str:
    kinds = f"{plan.size_bytes / 1e9:.3g} GB, {plan.tensors} small tensors, {plan.steps} steps, rounds: {plan.rounds}"
    return machine(folder) + "\n" + kinds


if __name__ == "__main__":
    harness.run_main(main)
