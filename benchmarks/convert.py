"""How fast a checkpoint is converted to each format, and how much memory that takes, compared with copying its files.

One process converts a checkpoint from the page cache, with a budget of 64 MiB, and ends when the result is synced. Copy
is shutil.copyfile and fsync of the same shard files: it reads and writes every byte once and does nothing else. A
conversion also verifies what it reads, computes the checksums of its target, and reorders bytes. The second case has
thousands of tensors of 4 KB, where most of the time is spent in Python. Contenders take turns, in a different order in
each round, and ratios are medians within rounds; harness.py has the details. The first result of each format is read by
that format's own library and compared.
"""

import argparse
import os
import shutil
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import harness
from harness import Case, Measured, Meter, Planned
from machine import load_average, machine
from showing import Row, at_least, at_most, bars_table, format_table, positive, write_rows

COPY = "copy"
FORMATS = ("milepost", "dcp", "torch", "safetensors")
LARGE, SMALL = "large tensors", "tensors of 4 KB"
BUDGET_BYTES = 64 << 20
LEAST_OF_COPY = 0.5


@dataclass(frozen=True, slots=True)
class Sizes:
    """How much to measure."""

    size_bytes: int
    tensors: int
    rounds: int


# What the process does


def convert_all(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Both cases, one after the other."""
    import torch

    torch.set_num_threads(1)
    meter = Meter(rank, world, sizes.rounds, lambda: None)
    count = max(sizes.size_bytes // (64 << 20), 1)
    each = sizes.size_bytes // count // 4
    _case(meter, LARGE, folder, {f"layer{i}.weight": torch.randn(each // 1024, 1024) for i in range(count)})
    _case(meter, SMALL, folder, {f"small{i}": torch.full((1024,), float(i)) for i in range(sizes.tensors)})
    return meter.results


def _case(meter: Meter, name: str, folder: Path, state: dict[str, Any]) -> None:
    import milepost

    source, target = folder / "source", folder / "target"
    milepost.save(state, source)
    size = sum(t.numel() * t.element_size() for t in state.values())
    state.clear()

    def prepare() -> None:
        shutil.rmtree(target, ignore_errors=True)
        target.mkdir()
        meter.warm(source)
        meter.settle()
        meter.recycle(folder, size)

    def planned(to: str) -> Planned:
        place = target / "x"

        def work() -> None:
            milepost.convert(source, place, to, host_memory_bytes=BUDGET_BYTES)

        return Planned(work, prepare, after_first=lambda: _compare(source, place, to))

    runs = {COPY: Planned(lambda: _copy(source, target), prepare)}
    meter.case(name, size, runs | {to: planned(to) for to in FORMATS})
    shutil.rmtree(source)
    shutil.rmtree(target)


def _copy(source: Path, target: Path) -> None:
    for path in sorted(p for p in source.rglob("*") if p.is_file()):
        shutil.copyfile(path, target / path.name)
        handle = os.open(target / path.name, os.O_RDWR)
        os.fsync(handle)
        os.close(handle)


def _compare(source: Path, place: Path, to: str) -> None:
    """Check that the format's own library reads what the source holds."""
    import torch

    import milepost

    found, saved = _read(place, to), milepost.open(source)
    assert set(found) == set(saved), to
    for key in saved:
        assert torch.equal(found[key], saved[key].read()), f"{to}: {key}"


def _read(place: Path, to: str) -> dict[str, Any]:
    import torch
    import torch.distributed.checkpoint as dcp
    from safetensors.torch import load_file

    import milepost

    if to == "torch":
        return torch.load(place, weights_only=True, mmap=True)
    if to == "milepost":
        return milepost.open(place).state()
    if to == "safetensors":
        return {key: tensor for path in place.glob("*.safetensors") for key, tensor in load_file(path).items()}
    records = dcp.FileSystemReader(place).read_metadata().state_dict_metadata
    target = {key: torch.empty(record.size, dtype=record.properties.dtype) for key, record in records.items()}
    dcp.load(target, checkpoint_id=place, no_dist=True)
    return target


# What is shown


def rows_of(case: Case) -> list[Row]:
    """The rows of a case, those with bars first."""
    rows = []
    judged = case.name == LARGE
    for to in FORMATS:
        ratio = case.ratio(to, (COPY,))
        assert ratio
        rows.append(at_least(f"{case.name}: to {to}, speed / copy", 1 / ratio, "x", LEAST_OF_COPY if judged else None))
    for to in FORMATS:
        peak = case.peaks[to] / 2**20
        # With small tensors the plan itself takes about a KB for each tensor.
        most = BUDGET_BYTES / 2**20 if judged else None
        rows.append(at_most(f"{case.name}: to {to}, memory", peak, "MiB", most))
    for who in (COPY, *FORMATS):
        rows.append(Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s"))
    return rows


def table_of(cases: list[Case]) -> str:
    """All cases and contenders in one table."""
    lines = []
    for case in cases:
        for who in case.runs:
            walls = [run.wall_s for run in case.runs[who]]
            wall, ratio = case.median(who, "wall_s"), case.ratio(who, (COPY,))
            lines.append(
                [
                    case.name if who == COPY else "",
                    who if who == COPY else f"to {who}",
                    f"{wall:.3f}",
                    f"{min(walls):.3f}..{max(walls):.3f}",
                    f"{case.size_bytes / wall / 1e9:.2f}",
                    f"{case.median(who, 'cpu_s'):.3f}",
                    f"{1 / ratio:.2f}" if ratio else "",
                    f"{case.peaks[who] / 2**20:.0f}",
                ]
            )
    return format_table(["case", "contender", "wall s", "min..max", "GB/s", "CPU s", "speed/copy", "extra MiB"], lines)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n", maxsplit=1)[0])
    parser.add_argument("--quick", action="store_true", help="256 MB, 2,000 small tensors, 3 rounds: under a minute")
    parser.add_argument("--size-mb", type=positive, help="size of the checkpoint in MiB (default 2048)")
    parser.add_argument("--tensors", type=positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=positive, help="rounds that count (default 5)")
    parser.add_argument("--dir", type=Path, help="measure in a fresh folder below this one (default: temporary)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the results as a list of rows")
    return parser.parse_args()


def main() -> None:
    """Run both cases, print the tables, write the rows."""
    arguments = _arguments()
    size_mb, tensors, rounds = (256, 2_000, 3) if arguments.quick else (2048, 20_000, 5)
    sizes = Sizes((arguments.size_mb or size_mb) << 20, arguments.tensors or tensors, arguments.rounds or rounds)
    os.environ.update(harness.RANK_ENVIRONMENT)
    with harness.work_folder(arguments.dir, 4 * sizes.size_bytes + (1 << 28)) as folder:
        amount = f"{sizes.size_bytes / 2**20:.0f} MiB, {sizes.tensors} small tensors, rounds: {sizes.rounds}"
        print(__doc__.strip(), f"{machine(folder)}\n{amount}", "", sep="\n\n", flush=True)
        cases = harness.run_ranks(1, convert_all, folder, sizes)
    rows = [row for case in cases for row in rows_of(case)]
    print(table_of(cases), bars_table(rows), load_average(), sep="\n\n")
    if arguments.quick:
        print("A quick run only shows that everything works. It is too short to judge the figures.")
    if arguments.json:
        write_rows(arguments.json, rows)


if __name__ == "__main__":
    harness.run_main(main)
