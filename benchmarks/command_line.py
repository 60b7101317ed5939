"""How fast the command line starts, and how little a comparison of two steps reads.

Each contender is a process of its own, from its start to its end. They take turns, in another order in each round; the
first round is not counted. `python -c pass` is what the interpreter takes, and `python -c 'import torch'` what every
command would take that imports torch. The run has many small steps. The two steps that are compared are large, from
four ranks that cut every tensor; between them most tensors changed and some did not. What a comparison reads is what it
says itself; the tests compare that with the kernel's count.
"""

import argparse
import json
import os
import random
import statistics
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path

import harness
from machine import load_average, machine
from showing import Row, at_most, bars_table, below, format_table, positive, write_rows

PASS, TORCH, DIFF = "python -c pass", "python -c 'import torch'", "milepost diff A B"
MOST_S = 0.3
MOST_READ_PERCENT = 0.02
RANKS = 4
FROZEN = 8
"""One of so many tensors does not change."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    size_bytes: int
    steps: int
    rounds: int


@dataclass(frozen=True, slots=True)
class Took:
    """One run of a process."""

    wall_s: float
    cpu_s: float


# What is measured


def save_all(folder: Path, sizes: Sizes) -> dict[str, Path]:
    """A run of small steps, and two large steps of some ranks."""
    import milepost

    with milepost.Checkpointer(folder / "run", keep_last=sizes.steps) as keeper:
        state = _small_state()
        for step in range(sizes.steps):
            keeper.save(state, step, metrics={"loss": 1 / (step + 1)})
    for step in (1, 2):
        _save_large(folder / "large" / f"step-{step}", sizes.size_bytes, step)
    newest = folder / "run" / f"step-{sizes.steps - 1:010}"
    return {"run": folder / "run", "step": newest, "a": folder / "large/step-1", "b": folder / "large/step-2"}


def _small_state() -> dict[str, object]:
    import torch

    return {f"layers.{i}.{name}": torch.full((8, 8), float(i)) for i in range(100) for name in ("weight", "m", "v")}


def _save_large(place: Path, size_bytes: int, step: int) -> None:
    import torch

    import milepost
    from milepost.testing import run_ranks

    columns, count = 4096, max(size_bytes // (64 << 20), 2)
    rows = size_bytes // count // columns // 4 // RANKS

    def work(comm: "milepost.Solo") -> None:
        state = {}
        for i in range(count):
            random = torch.Generator().manual_seed(1000 * i + comm.rank + (0 if i % FROZEN == 0 else step))
            part = torch.randn(rows, columns, generator=random)
            state[f"layers.{i}.weight"] = milepost.Sharded(
                (rows * RANKS, columns), {(rows * comm.rank, 0): part}, part.dtype
            )
        milepost.save({"model": state, "step": step}, place, process_group=comm)

    run_ranks(RANKS, work)


def contenders(places: dict[str, Path]) -> dict[str, list[str]]:
    """The command line of each."""
    entry = Path(sys.executable).with_name("milepost")
    ours = [str(entry)] if entry.exists() else [sys.executable, "-m", "milepost"]
    run, step, a, b = (str(places[name]) for name in ("run", "step", "a", "b"))
    return {
        PASS: [sys.executable, "-c", "pass"],
        "milepost --help": [*ours, "--help"],
        "milepost ls RUN": [*ours, "ls", run],
        "milepost show STEP": [*ours, "show", step],
        "milepost verify STEP": [*ours, "verify", step],
        "milepost stats STEP": [*ours, "stats", step],
        "milepost prune RUN --dry-run": [*ours, "prune", run, "--keep-last", "3", "--dry-run"],
        DIFF: [*ours, "diff", a, b],
        TORCH: [sys.executable, "-c", "import torch"],
    }


def measure(commands: dict[str, list[str]], rounds: int) -> dict[str, list[Took]]:
    """The runs of each, in the order of the rounds, without the first."""
    found: dict[str, list[Took]] = {name: [] for name in commands}
    order = list(commands)
    for turn in range(rounds + 1):
        for name in order:
            took = _run(commands[name])
            if turn:
                found[name].append(took)
        random.shuffle(order)
    return found


def _run(command: list[str]) -> Took:
    start = time.perf_counter()
    process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    _, status, usage = os.wait4(process.pid, 0)
    wall_s = time.perf_counter() - start
    process.returncode = os.waitstatus_to_exitcode(status)
    if process.returncode not in (0, 1):  # `diff` gives 1 for a difference
        sys.exit(f"{command} ended with {process.returncode}")
    return Took(wall_s, usage.ru_utime + usage.ru_stime)


def compare(places: dict[str, Path]) -> tuple[int, int, int]:
    """What a comparison of the two large steps reads, what they hold, and how many tensors differ."""
    line = [sys.executable, "-m", "milepost", "diff", str(places["a"]), str(places["b"]), "--json"]
    found = json.loads(subprocess.run(line, capture_output=True, check=False).stdout)
    assert found["by_tables"] == found["equal_tensors"] + len(found["tensors"])
    return found["bytes_read"], found["a"]["data_bytes"] + found["b"]["data_bytes"], len(found["tensors"])


# What is shown


def rows_of(took: dict[str, list[Took]], read: int, held: int) -> list[Row]:
    """The results, those with bars first."""
    rows = [at_most(f"{DIFF}: bytes read / bytes of the two", 100 * read / held, "%", MOST_READ_PERCENT)]
    for name, runs in took.items():
        bar = MOST_S if name not in (PASS, TORCH) else None
        rows.append(below(f"{name}: wall", statistics.median(run.wall_s for run in runs), "s", bar))
    for name, runs in took.items():
        walls = [run.wall_s for run in runs]
        rows.append(Row(f"{name}: wall, fastest round", min(walls), "s"))
        rows.append(Row(f"{name}: wall, slowest round", max(walls), "s"))
        rows.append(Row(f"{name}: CPU", statistics.median(run.cpu_s for run in runs), "s"))
    rows.append(Row(f"{DIFF}: bytes of the two", held / 1e9, "GB"))
    rows.append(Row(f"{DIFF}: bytes read", read / 1e6, "MB"))
    return rows


def table_of(took: dict[str, list[Took]]) -> str:
    """All contenders in one table."""
    lines = []
    for name, runs in took.items():
        walls = [run.wall_s for run in runs]
        over = [run.wall_s - base.wall_s for run, base in zip(runs, took[PASS], strict=True)]
        lines.append(
            [
                name,
                "",
                f"{statistics.median(walls):.3f}",
                f"{min(walls):.3f}..{max(walls):.3f}",
                f"{statistics.median(over):.3f}",
                f"{statistics.median(run.cpu_s for run in runs):.3f}",
            ]
        )
    return format_table(["command", "", "wall s", "min..max", "beyond python", "CPU s"], lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="64 MB, 5 steps, 3 rounds: under a minute")
    parser.add_argument("--size-mb", type=positive, help="size of each of the two large steps, in MiB (default 1024)")
    parser.add_argument("--steps", type=positive, help="steps of the run (default 50)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 21)")
    parser.add_argument("--dir", type=Path, help="measure in a fresh folder below this one (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    return parser.parse_args()


def main() -> None:
    """Save what is looked at, run all commands, print the tables, write the rows."""
    arguments = _arguments()
    size_mb, steps, rounds = (64, 5, 3) if arguments.quick else (1024, 50, 21)
    sizes = Sizes((arguments.size_mb or size_mb) << 20, arguments.steps or steps, arguments.rounds or rounds)
    os.environ.update(harness.RANK_ENVIRONMENT)
    with harness.work_folder(arguments.dir, 3 * sizes.size_bytes + (1 << 28)) as folder:
        amount = f"two steps of {sizes.size_bytes / 2**20:.0f} MiB, a run of {sizes.steps}, rounds: {sizes.rounds}"
        print(__doc__.strip(), f"{machine(folder)}\n{amount}", "", sep="\n\n", flush=True)
        places = save_all(folder, sizes)
        took = measure(contenders(places), sizes.rounds)
        read, held, differ = compare(places)
    rows = rows_of(took, read, held)
    told = f"diff of two steps: {differ} tensors differ; {read / 1e6:.2f} MB read of {held / 1e9:.2f} GB"
    print(table_of(took), told, bars_table(rows), load_average(), sep="\n\n")
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    harness.run_main(main)
