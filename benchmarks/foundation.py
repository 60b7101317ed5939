"""How long a durable save and a warm load take: Milepost beside torch.distributed.checkpoint (DCP) and the raw disk.

Cases: one process; 2 and 4 gloo ranks with DTensors; loads with the same sharding, onto other numbers of ranks (2 -> 4,
4 -> 2) and onto another dimension (Shard(0) -> Shard(1)); thousands of tensors of 4 KB. The state is a slice of a
transformer in training: bf16 weights with two fp32 moments. A save ends when the bytes are synced. A load fills the
state in place from files in the page cache. Raw is pwritev + fsync (or direct I/O) of each rank's bytes into one file,
and preadv of a file that is already sharded for the load. Contenders take turns, and ratios are medians within rounds;
harness.py has the details. Every load is compared once with what was saved.
"""

import argparse
import os
from dataclasses import dataclass
from importlib.util import find_spec
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
    bars_table,
    positive,
    rows_of,
    table_of,
    write_rows,
)

SAVE_ONE, LOAD_ONE = "save, 1 process", "load, 1 process"
LOAD_2_TO_4, LOAD_4_TO_2 = "load, 2 -> 4 ranks", "load, 4 -> 2 ranks"
LOAD_OTHER_DIM = "load, Shard(0) -> Shard(1), 4 ranks"
MOST_SMALL_ROUNDS = 3  # DCP needs many seconds for each


def bars_of(case: str) -> Bars:
    """The project's bars for this case."""
    if "4 KB" in case:
        return Bars(least_of_dcp=10 if case.startswith("save") else 20)
    if case.startswith("save"):
        return Bars(most_of_raw=1.15, least_of_dcp=1.6, least_of_safetensors=1.0)
    named = {
        LOAD_2_TO_4: Bars(least_of_dcp=8, most_read=1.05),
        LOAD_OTHER_DIM: Bars(least_of_dcp=8),
        LOAD_4_TO_2: Bars(),
    }
    return named.get(case, Bars(most_of_raw=1.5, least_of_dcp=5))


# What the ranks do


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    size_bytes: int
    tensors: int
    rounds: int


def saves(stage: Any, name: str, state: Any, keep: Path) -> None:
    """Measure saves; then leave a checkpoint of DCP and one of Milepost below `keep`."""
    import contenders as c
    import raw

    direct = "4 KB" not in name and raw.direct_works_in(stage.folder, stage.meter.rank)
    both = {DCP: c.dcp_format(), MILEPOST: c.milepost_format()}
    formats = [c.raw_format(direct), *both.values()]
    if stage.mesh is None and find_spec("safetensors"):
        formats.append(c.single_formats()["safetensors"])
    stage.saves(name, state, stage.folder, formats)
    stage.keep(state, keep, both)


def loads(stage: Any, name: str, state: Any, kept: Path) -> None:
    """Measure loads of what `saves` left below `kept`."""
    import contenders as c

    formats = {RAW: c.raw_format(direct=False), DCP: c.dcp_format(), MILEPOST: c.milepost_format()}
    stage.keep(state, kept, {RAW: formats[RAW]})
    stage.loads(name, state, kept, formats)


def one_process(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Large tensors, then many small ones, without a process group."""
    from contenders import large_specs, small_specs
    from stage import Stage

    stage = Stage(rank, world, folder, sizes.rounds)
    state = stage.state(large_specs(sizes.size_bytes))
    saves(stage, SAVE_ONE, state, folder / "one")
    loads(stage, LOAD_ONE, state, folder / "one")
    del state
    stage.meter.delete(folder / "one")
    small = stage.state(small_specs(sizes.tensors))
    stage.meter.rounds = min(sizes.rounds, MOST_SMALL_ROUNDS)
    saves(stage, f"save, {sizes.tensors} tensors of 4 KB", small, folder / "small")
    loads(stage, f"load, {sizes.tensors} tensors of 4 KB", small, folder / "small")
    return stage.done(folder / "small")


def two_ranks_save(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Save on two ranks; four ranks load it later."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, sizes.rounds)
    saves(stage, "save, 2 ranks", stage.state(large_specs(sizes.size_bytes)), folder / "by-2")
    return stage.done()


def four_ranks(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Load what two ranks saved; save; load that with the same sharding, then sharded along the other dimension."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, sizes.rounds)
    specs = large_specs(sizes.size_bytes)
    state = stage.state(specs)
    loads(stage, LOAD_2_TO_4, state, folder / "by-2")
    stage.meter.barrier()
    stage.meter.delete(folder / "by-2")
    saves(stage, "save, 4 ranks", state, folder / "by-4")
    loads(stage, "load, 4 ranks", state, folder / "by-4")
    del state
    loads(stage, LOAD_OTHER_DIM, stage.state(specs, dim=1), folder / "by-4")
    return stage.done()


def two_ranks_load(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Load on two ranks what four saved."""
    from contenders import large_specs
    from stage import Stage

    stage = Stage(rank, world, folder, sizes.rounds)
    loads(stage, LOAD_4_TO_2, stage.state(large_specs(sizes.size_bytes)), folder / "by-4")
    return stage.done(folder / "by-4")


def _arguments() -> argparse.Namespace:
    first = __doc__.split("\n\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("--quick", action="store_true", help="64 MB, 2,000 small tensors, 3 rounds: under a minute")
    parser.add_argument("--size-mb", type=positive, help="size of the state in MiB (default 1024)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 5)")
    parser.add_argument(
        "--dir", type=Path, help="measure in a fresh folder below this one (default: the temporary folder)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    return parser.parse_args()


def main() -> None:
    """Run all stages, print the tables, write the rows."""
    arguments = _arguments()
    size_mb, tensors, rounds = (64, 2_000, 3) if arguments.quick else (1024, 20_000, 5)
    sizes = Sizes((arguments.size_mb or size_mb) << 20, arguments.tensors or tensors, arguments.rounds or rounds)
    os.environ.update(harness.RANK_ENVIRONMENT)
    cases: list[Case] = []
    with harness.work_folder(arguments.dir, 4 * sizes.size_bytes + (1 << 28)) as folder:
        amount = f"{sizes.size_bytes / 2**20:.0f} MiB, {sizes.tensors} small tensors, rounds: {sizes.rounds}"
        print(__doc__.strip(), f"{machine(folder)}\n{amount}", "", sep="\n\n", flush=True)
        for world, work in ((1, one_process), (2, two_ranks_save), (4, four_ranks), (2, two_ranks_load)):
            cases += harness.run_ranks(world, work, folder, sizes)
    rows = [row for case in cases for row in rows_of(case, bars_of(case.name))]
    print(table_of(cases), bars_table(rows), load_average(), sep="\n\n")
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    harness.run_main(main)
