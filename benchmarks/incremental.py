"""What incremental saves cost and save: adapter training, dense training, and loads of steps that lie in older files.

Cases, in one process and on 4 gloo ranks with DTensors: an adapter of 4 MB that changes beside frozen weights, saved
plainly, incrementally, by DCP, and by itself; a state of which everything changes, plainly and incrementally; and a
warm load of a step whose data lies in 10 older files, beside a step that one save wrote. Contenders take turns; ratios
are within a round. Every load is compared once with what was saved. harness.py says what makes the comparison fair, and
README.md what each row means.
"""

import argparse
import os
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Case, Measured, Planned
from machine import load_average, machine
from showing import DCP, Row, at_most, bars_table, positive, table_of, write_rows

PLAIN, INCREMENTAL, ALONE = "plain", "incremental", "the changed part alone"
NAMES = {
    "adapter": "save, adapter training, {ranks}",
    "dense": "save, everything changes, {ranks}",
    "dense-small": "save, {tensors} tensors of 4 KB change, {ranks}",
    "old": "load, in 10 older files, {ranks}",
}
FROZEN, GROUPS, STEPS = 16, 10, 20
ADAPTER_BYTES = 4_000_000
MOST_WRITTEN, MOST_OF_ALONE, MOST_OF_PLAIN, MOST_OF_LOAD = 1.02, 3.0, 1.02, 1.1


@dataclass(frozen=True, slots=True)
class Plan:
    """What to measure, and how much. It is sent to the ranks."""

    size_bytes: int
    tensors: int
    rounds: int
    keys: frozenset[str]
    adapter_bytes: int


# What the ranks do


def on_ranks(rank: int, world: int, folder: Path, plan: Plan) -> list[Measured]:
    """All cases of this many ranks."""
    from stage import Stage

    stage = Stage(rank, world, folder, plan.rounds)
    ranks = "1 process" if world == 1 else f"{world} ranks"
    names = {key: name.format(ranks=ranks, tensors=plan.tensors) for key, name in NAMES.items()}
    if f"adapter-{world}" in plan.keys:
        _adapter(stage, names["adapter"], plan)
    if f"dense-{world}" in plan.keys:
        _dense(stage, names["dense"], _state(stage, plan.size_bytes, FROZEN))
    if f"dense-small-{world}" in plan.keys:
        _dense(stage, names["dense-small"], _state(stage, 4096 * plan.tensors, plan.tensors))
    if f"old-{world}" in plan.keys:
        _old(stage, names["old"], _state(stage, plan.size_bytes, GROUPS))
    return stage.done()


def _state(stage: Any, size_bytes: int, count: int, group: str = "model") -> Any:
    """A state of tensors of one size, in rows for the ranks."""
    import torch
    from contenders import Spec

    rows = max(size_bytes // count // 4 // 256 // 4 * 4, 4)
    return stage.state([Spec(group, f"layers.{i}.weight", (rows, 256), torch.float32) for i in range(count)])


class _Steps:
    """A run of steps in a folder, each based on the one before."""

    def __init__(self, folder: Path, **options: Any) -> None:
        self.folder, self.options, self.step = folder, options, 0

    @property
    def newest(self) -> Path:
        """The newest step."""
        return self.folder / f"step-{self.step}"

    def save(self, value: Any) -> Any:
        """Save the next step."""
        import milepost

        base = self.newest
        self.step += 1
        return milepost.save(value, self.newest, base=base, **self.options)

    def forget(self, stage: Any) -> None:
        """Remove all steps but the newest."""
        stage.meter.delete(self.folder / f"step-{self.step - 1}")


def _adapter(stage: Any, name: str, plan: Plan) -> None:
    frozen, adapter = _state(stage, plan.size_bytes, FROZEN), _state(stage, plan.adapter_bytes, 8, "adapter")
    value = {**frozen.value, **adapter.value}
    written = _bytes_of_steps(stage, value, adapter)
    steps, runs = _Steps(stage.folder / "steps"), {}
    steps.save(value)

    def incremental() -> Planned:
        def prepare() -> None:
            steps.forget(stage)
            _change(adapter)
            stage.meter.settle()

        return Planned(lambda: steps.save(value), prepare)

    runs[PLAIN] = _plain(stage, value, adapter)
    runs[INCREMENTAL] = incremental()
    runs[ALONE] = _plain(stage, adapter.value, adapter)
    runs[DCP] = _plain(stage, value, adapter, by_dcp=True)
    measured = stage.meter.case(name, frozen.size_bytes + adapter.size_bytes, runs)
    measured.notes.append(f"{name}: bytes written per step / bytes changed = {written}")
    stage.meter.delete(steps.folder)


def _bytes_of_steps(stage: Any, value: Any, adapter: Any) -> float:
    """The bytes in new files, manifests included, over those that changed: for 20 steps after the first."""
    steps = _Steps(stage.folder / "counted")
    steps.save(value)
    total = 0
    for _ in range(STEPS):
        _change(adapter)
        steps.save(value)
        stage.meter.barrier()
        seen = [path.stat() for path in steps.newest.rglob("*") if path.is_file()]
        total += sum(status.st_size for status in seen if status.st_nlink == 1)
        stage.meter.barrier()
        steps.forget(stage)
        stage.meter.barrier()
    stage.meter.delete(steps.folder)
    return total / (STEPS * adapter.size_bytes * stage.meter.world)


def _change(state: Any) -> None:
    import torch

    for local in state.locals:
        local.view(torch.int32).bitwise_xor_(1)


def _plain(stage: Any, value: Any, changing: Any, *, by_dcp: bool = False) -> Planned:
    """A save of everything, into a fresh folder."""
    folder = stage.folder / "plain"

    def prepare() -> None:
        stage.meter.barrier()
        stage.meter.delete(folder)
        _change(changing)
        stage.meter.settle()

    def action() -> None:
        if by_dcp:
            import torch.distributed.checkpoint as dcp

            dcp.save(value, storage_writer=dcp.FileSystemWriter(folder))
        else:
            import milepost

            milepost.save(value, folder)

    return Planned(action, prepare)


def _dense(stage: Any, name: str, state: Any) -> None:
    steps = _Steps(stage.folder / "steps")
    steps.save(state.value)

    def prepare() -> None:
        steps.forget(stage)
        _change(state)
        stage.meter.settle()
        stage.meter.recycle(stage.folder, state.size_bytes)

    plain = _plain(stage, state.value, state)

    def prepare_plain() -> None:
        plain.prepare()
        stage.meter.recycle(stage.folder, state.size_bytes)

    runs = {PLAIN: Planned(plain.action, prepare_plain), INCREMENTAL: Planned(lambda: steps.save(state.value), prepare)}
    stage.meter.case(name, state.size_bytes, runs)
    stage.meter.delete(steps.folder)
    stage.meter.delete(stage.folder / "plain")


def _old(stage: Any, name: str, state: Any) -> None:
    """Each step saves one more of the tensors as it is in the end, so the last one needs a file of each."""
    import milepost

    contents = [local.clone() for local in state.locals]
    state.scribble()
    steps = _Steps(stage.folder / "steps", max_waste=1)
    for local, content in zip(state.locals, contents, strict=True):
        local.copy_(content)
        steps.save(state.value)
    steps.save(state.value)
    plain = stage.folder / "plain"
    milepost.save(state.value, plain)
    with milepost.open(steps.newest) as checkpoint:
        assert len(checkpoint.manifest.older) == GROUPS * stage.meter.world

    def load(folder: Path) -> Planned:
        def prepare() -> None:
            state.scribble()
            stage.find(folder, state.size_bytes, cold=False)

        return Planned(lambda: milepost.load(state.value, folder), prepare, after_first=lambda: state.check(name))

    stage.meter.case(name, state.size_bytes, {PLAIN: load(plain), INCREMENTAL: load(steps.newest)})
    stage.meter.delete(steps.folder)
    stage.meter.delete(plain)


# What is run and shown


def measure(folder: Path, plan: Plan) -> list[Case]:
    """The cases of one process, and then those of 4 ranks."""
    cases: list[Case] = []
    for world in (1, 4):
        if any(key.endswith(f"-{world}") for key in plan.keys):
            cases += harness.run_ranks(world, on_ranks, folder, plan)
    return cases


def rows_of(case: Case) -> list[Row]:
    """The ratios with their bars, and the times."""
    rows = []
    if case.name.startswith("save, adapter"):
        label = f"{case.name}: bytes written per step / bytes changed"
        said = {note.rpartition(" = ")[0]: float(note.rpartition(" = ")[2]) for note in case.notes}
        rows.append(at_most(label, said[label], "x", MOST_WRITTEN))
        rows.append(_ratio(case, INCREMENTAL, ALONE, MOST_OF_ALONE))
        rows.append(_ratio(case, PLAIN, INCREMENTAL, None))
        rows.append(_ratio(case, DCP, INCREMENTAL, None))
    else:
        bar = MOST_OF_LOAD if case.loads else None if "of 4 KB" in case.name else MOST_OF_PLAIN
        rows.append(_ratio(case, INCREMENTAL, PLAIN, bar))
    for who, runs in case.runs.items():
        walls = [run.wall_s for run in runs]
        rows.append(Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s"))
        rows.append(Row(f"{case.name}: {who}, wall, fastest round", min(walls), "s"))
        rows.append(Row(f"{case.name}: {who}, wall, slowest round", max(walls), "s"))
        rows.append(Row(f"{case.name}: {who}, CPU", case.median(who, "cpu_s"), "s"))
    return rows


def _ratio(case: Case, who: str, other: str, bar: float | None) -> Row:
    ratio = case.ratio(who, (other,))
    assert ratio is not None
    return at_most(f"{case.name}: {who} / {other}", ratio, "x", bar)


def _arguments() -> argparse.Namespace:
    keys = [f"{key}-{world}" for key in NAMES for world in (1, 4)]
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, epilog="cases: " + ", ".join(keys)
    )
    parser.add_argument("--quick", action="store_true", help="32 MB, 500 small tensors, 1 round: under a minute")
    parser.add_argument("--size-gb", type=float, help="size of the state in GB (default 1)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 9)")
    parser.add_argument("--only", nargs="+", metavar="CASE", default=[], help="cases, or prefixes of their names")
    parser.add_argument("--disk", type=Path, metavar="DIR", help="a folder on a disk (default: the temporary folder)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    arguments = parser.parse_args()
    if unknown := [start for start in arguments.only if not any(key.startswith(start) for key in keys)]:
        parser.error(f"no case begins with {', '.join(unknown)}; there are {', '.join(keys)}")
    arguments.keys = frozenset(key for key in keys if key.startswith(tuple(arguments.only or [""])))
    return arguments


def main() -> None:
    """Run the cases, print the tables, write the rows."""
    arguments = _arguments()
    os.environ.update(harness.RANK_ENVIRONMENT)
    size_gb, tensors, rounds = (0.032, 500, 1) if arguments.quick else (1.0, 20_000, 9)
    size_bytes = int((arguments.size_gb or size_gb) * 1e9)
    plan = Plan(
        size_bytes,
        arguments.tensors or tensors,
        arguments.rounds or rounds,
        arguments.keys,
        min(ADAPTER_BYTES, size_bytes // 8),
    )
    with ExitStack() as stack:
        folder = stack.enter_context(harness.work_folder(arguments.disk, 6 * plan.size_bytes + (1 << 28)))
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
