"""How close saves and loads come to the speed of the disk and of memory: Milepost beside raw transfers, DCP and others.

Cases, in one process and on 4 gloo ranks with DTensors: durable saves to a disk and to tmpfs; loads with the same
sharding, from the page cache (warm) and from the disk (cold: the page cache is dropped before each run); loads onto
other numbers of ranks and another dimension; thousands of tensors of 4 KB; and four of them, which is what a save and
a load cost beside their bytes. The state is part of a transformer in
training. With `--device cuda`: one process whose state is in GPU memory, and the time of the copies to and from pinned
memory.

Raw is the limit: it moves each rank's bytes between memory and one file, and does not plan, name, check or reshard.
A ratio to raw is to the faster of buffered and direct I/O in the same round. Contenders take turns. Figures are medians
over rounds. Every load is compared once with what was saved. harness.py says what makes the comparison fair, and
README.md what each row means.
"""

import argparse
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Case, Measured
from machine import load_average, machine
from showing import (
    DCP,
    MILEPOST,
    RAW,
    Bars,
    Row,
    bars_table,
    positive,
    rows_of,
    table_of,
    worst_peak,
    write_rows,
)

NAMES = {
    "save-disk-1": "save, disk, 1 process",
    "save-disk-4": "save, disk, 4 ranks",
    "save-tmpfs-1": "save, tmpfs, 1 process",
    "save-tmpfs-4": "save, tmpfs, 4 ranks",
    "load-warm-1": "load, warm, 1 process",
    "load-warm-4": "load, warm, 4 ranks",
    "load-cold-1": "load, cold, 1 process",
    "load-cold-4": "load, cold, 4 ranks",
    "load-2-to-4": "load, 2 -> 4 ranks",
    "load-4-to-2": "load, 4 -> 2 ranks",
    "load-other-dim": "load, Shard(0) -> Shard(1), 4 ranks",
    "small-save": "save, {tensors} tensors of 4 KB",
    "small-load": "load, {tensors} tensors of 4 KB",
    "tiny-save-1": "save, 4 tensors of 4 KB, 1 process",
    "tiny-load-1": "load, 4 tensors of 4 KB, 1 process",
    "tiny-save-4": "save, 4 tensors of 4 KB, 4 ranks",
    "tiny-load-4": "load, 4 tensors of 4 KB, 4 ranks",
}
DEVICE_NAMES = {
    "device-save": "save, from {device}",
    "device-load-warm": "load, warm, into {device}",
    "device-load-cold": "load, cold, into {device}",
}
BARS = {
    "save-disk": Bars(most_of_raw=1.15, least_of_dcp=1.6, least_of_safetensors=1.0, most_checksums_percent=10),
    "save-tmpfs": Bars(most_of_raw=1.25, least_of_dcp=1.5),
    "load-warm-1": Bars(most_of_raw=1.2, most_of_raw_unverified=1.1, least_of_dcp=5, most_checksums_percent=40),
    "load-warm-4": Bars(most_of_raw=1.3, most_of_raw_unverified=1.1, least_of_dcp=5, most_checksums_percent=40),
    # Checksums cost nothing measurable on a cold load: less than the noise.
    "load-cold": Bars(most_of_raw=1.15, least_of_dcp=2.5, most_checksums_percent=5),
    "load-2-to-4": Bars(most_of_raw=1.3, least_of_dcp=8, most_read=1.05),
    "load-4-to-2": Bars(most_of_raw=1.3, least_of_dcp=4, most_read=1.05),
    "load-other-dim": Bars(most_of_raw=2, least_of_dcp=6, most_read=1.05),
    "small-save": Bars(least_of_dcp=10),
    "small-load": Bars(least_of_dcp=25),
    "tiny": Bars(),
    "device": Bars(),
}
MOST_SMALL_ROUNDS = 3  # DCP needs many seconds for each
TINY_TENSORS, TINY_ROUNDS = 4, 5  # so many times the rounds of the others: each takes milliseconds


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how much. It is sent to the ranks."""

    size_bytes: int
    tensors: int
    rounds: int
    device: str
    keys: frozenset[str]
    shm: Path

    def wants(self, *keys: str) -> bool:
        """Whether any of these cases is to be measured."""
        return not self.keys.isdisjoint(keys)

    def name(self, key: str) -> str:
        """The name of a case in the table and in the rows."""
        return (NAMES | DEVICE_NAMES)[key].format(tensors=self.tensors, device=self.device)

    def bars_of(self, case: Case) -> Bars:
        """The project's bars for this case."""
        key = next(key for key in self.keys if self.name(key) == case.name)
        return next(bars for start, bars in BARS.items() if key.startswith(start))


# What the ranks do


def one_process(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Large tensors, then many small ones, without a process group."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    stage.meter.notes += _notes()
    if plan.wants("save-disk-1", "save-tmpfs-1", "load-warm-1", "load-cold-1"):
        state = stage.state(large_specs(plan.size_bytes))
        saves(stage, plan, state)
        loads(stage, plan, state, folder / "one")
        del state
        stage.meter.delete(folder / "one")
    if plan.wants("small-save", "small-load"):
        small(stage, plan)
    tiny(stage, plan)
    return stage.done()


def two_ranks_save(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Save on two ranks; four ranks load it later. Nothing is measured."""
    from contenders import dcp_format, large_specs, milepost_format
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    state = stage.state(large_specs(plan.size_bytes))
    stage.keep(state, folder / "by-2", {DCP: dcp_format(), MILEPOST: milepost_format()})
    return stage.done()


def four_ranks(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Load what two ranks saved; save; load that with the same sharding, then sharded along the other dimension."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    stage.meter.notes += _notes()
    specs = large_specs(plan.size_bytes)
    state = stage.state(specs)
    if plan.wants("load-2-to-4"):
        other_cut(stage, plan.name("load-2-to-4"), state, folder / "by-2")
        stage.meter.barrier()
        stage.meter.delete(folder / "by-2")
    saves(stage, plan, state)
    loads(stage, plan, state, folder / "by-4")
    del state
    if plan.wants("load-other-dim"):
        other_cut(stage, plan.name("load-other-dim"), stage.state(specs, dim=1), folder / "by-4", once=True)
    tiny(stage, plan)
    return stage.done()


def two_ranks_load(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """Load on two ranks what four saved."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    other_cut(stage, plan.name("load-4-to-2"), stage.state(large_specs(plan.size_bytes)), folder / "by-4")
    return stage.done()


def saves(stage: Any, plan: Plan, state: Any) -> None:
    """Durable saves to the disk, also without checksums, and saves to tmpfs."""
    import contenders as c

    world = stage.meter.world
    disk, tmpfs = f"save-disk-{world}", f"save-tmpfs-{world}"
    others = _others(stage)
    if plan.wants(disk):
        formats = [c.raw_format(_direct(stage)), *others.values(), c.dcp_format(), c.milepost_format(unsummed=True)]
        stage.saves(plan.name(disk), state, stage.folder, formats)
    if plan.wants(tmpfs):
        formats = [c.raw_format(direct=False, preallocate=False), *others.values()]
        stage.saves(plan.name(tmpfs), state, plan.shm, [*formats, c.dcp_format(), c.milepost_format()])


def loads(stage: Any, plan: Plan, state: Any, kept: Path) -> None:
    """Loads with the same sharding, warm and cold. The files stay, for loads with other shardings."""
    import contenders as c

    world = stage.meter.world
    warm, cold = f"load-warm-{world}", f"load-cold-{world}"
    both = {DCP: c.dcp_format(), MILEPOST: c.milepost_format(unverified=True)}
    if plan.wants(warm, cold):
        others = {**_others(stage), **both}
        stage.keep(state, kept, {RAW: c.raw_format(direct=False), **others})
        if plan.wants(warm):
            stage.loads(plan.name(warm), state, kept, {RAW: c.raw_format(direct=False), **others})
        if plan.wants(cold):
            stage.loads(plan.name(cold), state, kept, {RAW: c.raw_format(_direct(stage)), **others}, cold=True)
    elif world > 1 and plan.wants("load-other-dim", "load-4-to-2"):
        stage.keep(state, kept, both)


def other_cut(stage: Any, name: str, state: Any, kept: Path, once: bool = False) -> None:
    """A warm load of what other ranks saved. Raw's file is written here, already sharded for these ranks.

    `once`: Milepost also reads each byte once, and the ranks send each other what they want of it.
    """
    import contenders as c

    formats = {RAW: c.raw_format(direct=False), DCP: c.dcp_format(), MILEPOST: c.milepost_format(once=once)}
    stage.keep(state, kept, {RAW: formats[RAW]})
    stage.loads(name, state, kept, formats)


def small(stage: Any, plan: Plan) -> None:
    """Many tensors of 4 KB: saves, then warm loads."""
    import contenders as c

    state = stage.state(c.small_specs(plan.tensors))
    stage.meter.rounds = min(plan.rounds, MOST_SMALL_ROUNDS)
    formats = {RAW: c.raw_format(direct=False), **_others(stage), DCP: c.dcp_format(), MILEPOST: c.milepost_format()}
    if plan.wants("small-save"):
        stage.saves(plan.name("small-save"), state, stage.folder, formats.values())
    if plan.wants("small-load"):
        stage.keep(state, stage.folder / "small", formats)
        stage.loads(plan.name("small-load"), state, stage.folder / "small", formats)


def tiny(stage: Any, plan: Plan) -> None:
    """A few small tensors: saves, then warm loads."""
    import contenders as c

    world = stage.meter.world
    if not plan.wants(f"tiny-save-{world}", f"tiny-load-{world}"):
        return
    state, formats = stage.state(c.small_specs(TINY_TENSORS)), {DCP: c.dcp_format(), MILEPOST: c.milepost_format()}
    stage.meter.rounds = TINY_ROUNDS * plan.rounds
    if plan.wants(f"tiny-save-{world}"):
        stage.saves(plan.name(f"tiny-save-{world}"), state, stage.folder, formats.values())
    if plan.wants(f"tiny-load-{world}"):
        stage.keep(state, stage.folder / "tiny", formats)
        stage.loads(plan.name(f"tiny-load-{world}"), state, stage.folder / "tiny", formats)


def _others(stage: Any) -> dict[str, Any]:
    """The formats beside Milepost and DCP that are installed and work, and a note for each other one."""
    import contenders as c

    if stage.mesh is not None:
        return {}
    usable = {}
    for name, form in c.single_formats().items():
        fault = "not installed" if form is None else c.fault_of(form, stage.folder)
        if fault is None:
            usable[name] = form
        elif (note := f"{name}: {fault}") not in stage.meter.notes:
            stage.meter.notes.append(note)
    return usable


def _direct(stage: Any) -> bool:
    import raw

    works = raw.direct_works_in(stage.folder, stage.meter.rank)
    if not works:
        stage.meter.notes.append("raw direct: the file system refuses direct I/O")
    return works


def _notes() -> list[str]:
    notes = []
    if not harness.may_drop_caches():
        notes.append("cold: files are dropped from the page cache one by one, since only root may drop all of it")
    return notes


# What is run and shown


def measure(folder: Path, plan: Plan) -> list[Case]:
    """All stages that the plan wants, one set of ranks after the other."""
    if plan.device != "cpu":
        from device import device_process

        return harness.run_ranks(1, device_process, folder, plan)
    stages = [
        (1, one_process, [key for key in NAMES if key.endswith("-1") or key.startswith("small")]),
        (2, two_ranks_save, ["load-2-to-4"]),
        (4, four_ranks, [key for key in NAMES if key.endswith("-4")] + ["load-other-dim", "load-4-to-2"]),
        (2, two_ranks_load, ["load-4-to-2"]),
    ]
    cases: list[Case] = []
    for world, work, keys in stages:
        if plan.wants(*keys):
            cases += harness.run_ranks(world, work, folder, plan)
    return cases


def show(cases: list[Case], plan: Plan) -> list[Row]:
    """Print the tables and return the rows."""
    rows = [row for case in cases for row in rows_of(case, plan.bars_of(case))]
    rows.append(worst_peak(rows))
    notes = list(dict.fromkeys(note for case in cases for note in case.notes))
    print(table_of(cases), bars_table(rows), "\n".join([*notes, load_average()]), sep="\n\n")
    return rows


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="cases: " + ", ".join([*NAMES, *DEVICE_NAMES]),
    )  # fmt: skip
    parser.add_argument("--quick", action="store_true", help="32 MB, 2,000 small tensors, 1 round: under a minute")
    parser.add_argument("--size-gb", type=float, help="size of the state in GB (default 1; with --device cuda 8)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 5)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[], help="cases, or prefixes of their names")
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="where the state is")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder on a disk (default: the temporary folder)")
    parser.add_argument("--shm", type=Path, metavar="DIR", default=Path("/dev/shm"), help="a folder on tmpfs")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    known = NAMES if arguments.device == "cpu" else DEVICE_NAMES
    if unknown := [start for start in arguments.only if not any(key.startswith(start) for key in known)]:
        parser.error(f"no case begins with {', '.join(unknown)}; there are {', '.join(known)}")
    arguments.keys = frozenset(key for key in known if key.startswith(tuple(arguments.only or [""])))
    return arguments


def _plan(arguments: argparse.Namespace, shm: Path) -> Plan:
    on_device = arguments.device != "cpu"
    size_gb, tensors, rounds = (8.0, 20_000, 3) if on_device else (1.0, 20_000, 5)
    if arguments.quick:
        size_gb, tensors, rounds = (0.25, 2_000, 1) if on_device else (0.032, 2_000, 1)
    return Plan(
        int((arguments.size_gb or size_gb) * 1e9),
        arguments.tensors or tensors,
        arguments.rounds or rounds,
        arguments.device,
        arguments.keys,
        shm,
    )


def main() -> None:
    """Run the cases, print the tables, write the rows."""
    arguments = _arguments()
    if arguments.device != "cpu" and not _has_device():
        print(f"--device {arguments.device}: there is none on this machine, so nothing is measured")
        if arguments.json:
            write_rows(arguments.json, [])
        return
    os.environ.update(harness.RANK_ENVIRONMENT)
    plan = _plan(arguments, arguments.shm)
    needs_shm = plan.wants("save-tmpfs-1", "save-tmpfs-4")
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder(arguments.disk, 8 * plan.size_bytes + (1 << 28)))
        if needs_shm:
            shm = stack.enter_context(harness.work_folder(arguments.shm, 2 * plan.size_bytes))
            plan = _plan(arguments, shm)
        print(__doc__.strip(), _header(plan, folder, needs_shm), "", sep="\n\n", flush=True)
        cases = measure(folder, plan)
    rows = show(cases, plan)
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


def _header(plan: Plan, folder: Path, needs_shm: bool) -> str:
    kinds = f"{plan.size_bytes / 1e9:.3g} GB, {plan.tensors} small tensors, rounds: {plan.rounds}"
    return machine(folder, *([plan.shm] if needs_shm else [])) + "\n" + kinds


def _has_device() -> bool:
    import torch

    return torch.cuda.is_available()


if __name__ == "__main__":
    harness.run_main(main)
