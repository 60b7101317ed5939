"""How long a durable save and a warm load take: Milepost beside torch.distributed.checkpoint (DCP) and the raw disk.

Cases: one process; 2 and 4 gloo ranks with DTensors; loads onto the same cut, onto other numbers of ranks (2 -> 4, 4 -> 2)
and onto another dimension (Shard(0) -> Shard(1)); thousands of tensors of 4 KB. The state is a slice of a transformer in
training: bf16 weights with two fp32 moments. A save ends when the bytes are synced. A load fills the state in place from files
in the page cache. Raw is pwritev + fsync (or direct I/O) of each rank's bytes into one file, and preadv of a file that is
already cut as the load wants it. Contenders take turns; ratios are medians within rounds; see harness.py for the rest.
Everything that was loaded is compared once with what was saved.
"""

import argparse
import json
import os
import platform
import sys
import time
import warnings
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import timedelta
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import harness
from harness import Case, Measured, Meter, Planned, Row

RAW, DIRECT, SAFETENSORS, DCP, MILEPOST = "raw", "raw direct", "safetensors", "DCP", "Milepost"
SAVE_ONE, LOAD_ONE = "save, 1 process", "load, 1 process"
LOAD_2_TO_4, LOAD_4_TO_2 = "load, 2 -> 4 ranks", "load, 4 -> 2 ranks"
LOAD_OTHER_DIM = "load, Shard(0) -> Shard(1), 4 ranks"
MOST_SMALL_ROUNDS = 3  # DCP needs many seconds for each
_RENDEZVOUS_S = 120.0


@dataclass(frozen=True, slots=True)
class Bars:
    """What a case should reach: at most so many times raw's time, at least so many times as fast as DCP, and so on."""

    most_of_raw: float | None = None
    least_of_dcp: float | None = None
    most_of_safetensors: float | None = None
    most_read: float | None = None


MOST_PEAK_MIB = 512


def bars_of(case: str) -> Bars:
    """The bars of the project's design for this case."""
    if "4 KB" in case:
        return Bars(least_of_dcp=10 if case.startswith("save") else 20)
    if case.startswith("save"):
        return Bars(most_of_raw=1.15, least_of_dcp=1.6, most_of_safetensors=1.0)
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


class Stage:
    """One set of ranks at work: the meter, and the mesh where there are several of them."""

    def __init__(self, rank: int, world: int, folder: Path, rounds: int) -> None:
        warnings.simplefilter("ignore")  # DCP's, about being used without a process group
        self.folder = folder
        self.mesh = _join(rank, world, folder) if world > 1 else None
        self.meter = Meter(rank, world, rounds, self._barrier)

    def _barrier(self) -> None:
        if self.mesh is not None:
            import torch.distributed as dist

            dist.barrier()

    def state(self, specs: list[Any], dim: int = 0) -> Any:
        """A state for these ranks."""
        from contenders import State

        return State(specs, self.mesh, dim)

    def saves(self, name: str, state: Any, keep: Path) -> None:
        """Measure saves; then leave a checkpoint of DCP and one of Milepost below `keep`."""
        import contenders as c

        savers: dict[str, Callable[[Any, Path], None]] = {RAW: c.raw_save, DCP: c.dcp_save, MILEPOST: c.milepost_save}
        if c.DirectSaver.works_in(self.folder) and "4 KB" not in name:
            savers[DIRECT] = c.DirectSaver(self.meter.world)
        if self.mesh is None and find_spec("safetensors"):
            savers[SAFETENSORS] = c.safetensors_save
        folder = self.folder / "saved"
        self.meter.case(name, state.size_bytes, {who: self._save(call, state, folder) for who, call in savers.items()})
        self.meter.delete(folder)
        for who in (DCP, MILEPOST):
            self._fresh(keep / who)
            self.meter.barrier()
            savers[who](state, keep / who)

    def _save(self, call: Callable[[Any, Path], None], state: Any, folder: Path) -> Planned:
        def prepare() -> None:
            self._fresh(folder)
            self.meter.recycle(self.folder, state.size_bytes)

        return Planned(lambda: call(state, folder), prepare)

    def _fresh(self, folder: Path) -> None:
        self.meter.delete(folder)
        if self.meter.rank == 0:
            folder.mkdir(parents=True)

    def loads(self, name: str, state: Any, kept: Path) -> None:
        """Measure loads of what `saves` left below `kept`."""
        import contenders as c

        self._fresh(kept / RAW)
        self.meter.barrier()
        c.raw_save(state, kept / RAW)
        loaders = {RAW: c.raw_load, DCP: c.dcp_load, MILEPOST: c.milepost_load}
        self.meter.case(
            name, state.size_bytes, {who: self._load(who, call, state, kept / who) for who, call in loaders.items()}
        )

    def _load(self, who: str, call: Callable[[Any, Path], None], state: Any, folder: Path) -> Planned:
        return Planned(
            lambda: call(state, folder), lambda: self.meter.warm(folder), state.scribble, lambda: state.check(who)
        )

    def done(self, *finished: Path) -> list[Measured]:
        """Delete what nobody needs any more, leave the process group, and give the results."""
        self.meter.barrier()
        for folder in finished:
            self.meter.delete(folder)
        if self.mesh is not None:
            import torch.distributed as dist

            dist.destroy_process_group()
        return self.meter.results


def _join(rank: int, world: int, folder: Path) -> Any:
    """Join the gloo group of this stage: rank 0 serves a store on a free loopback port and leaves its number in a file."""
    import torch.distributed as dist
    from torch.distributed.device_mesh import init_device_mesh

    note, deadline = folder / "port", time.monotonic() + _RENDEZVOUS_S
    limit = timedelta(seconds=_RENDEZVOUS_S)
    if rank == 0:
        store = dist.TCPStore("127.0.0.1", 0, world, is_master=True, wait_for_workers=False, timeout=limit)
        Path(f"{note}.new").write_text(str(store.port))
        os.rename(f"{note}.new", note)
    else:
        while not note.exists():
            if time.monotonic() > deadline:
                raise TimeoutError("rank 0 did not come")
            time.sleep(0.02)
        store = dist.TCPStore("127.0.0.1", int(note.read_text()), world, is_master=False, timeout=limit)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=world, timeout=timedelta(minutes=10))
    dist.barrier()
    if rank == 0:
        note.unlink()
    return init_device_mesh("cpu", (world,))


def one_process(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Large tensors, then many small ones, without a process group."""
    from contenders import large_specs, small_specs

    stage = Stage(rank, world, folder, sizes.rounds)
    state = stage.state(large_specs(sizes.size_bytes))
    stage.saves(SAVE_ONE, state, folder / "one")
    stage.loads(LOAD_ONE, state, folder / "one")
    del state
    stage.meter.delete(folder / "one")
    small = stage.state(small_specs(sizes.tensors))
    stage.meter.rounds = min(sizes.rounds, MOST_SMALL_ROUNDS)
    stage.saves(f"save, {sizes.tensors} tensors of 4 KB", small, folder / "small")
    stage.loads(f"load, {sizes.tensors} tensors of 4 KB", small, folder / "small")
    return stage.done(folder / "small")


def two_ranks_save(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Save on two ranks, for the four."""
    from contenders import large_specs

    stage = Stage(rank, world, folder, sizes.rounds)
    stage.saves("save, 2 ranks", stage.state(large_specs(sizes.size_bytes)), folder / "by-2")
    return stage.done()


def four_ranks(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Load what two ranks saved; save; load that as it was cut, and cut along the other dimension."""
    from contenders import large_specs

    stage = Stage(rank, world, folder, sizes.rounds)
    specs = large_specs(sizes.size_bytes)
    state = stage.state(specs)
    stage.loads(LOAD_2_TO_4, state, folder / "by-2")
    stage.meter.barrier()
    stage.meter.delete(folder / "by-2")
    stage.saves("save, 4 ranks", state, folder / "by-4")
    stage.loads("load, 4 ranks", state, folder / "by-4")
    del state
    stage.loads(LOAD_OTHER_DIM, stage.state(specs, dim=1), folder / "by-4")
    return stage.done()


def two_ranks_load(rank: int, world: int, folder: Path, sizes: Sizes) -> list[Measured]:
    """Load on two ranks what four saved."""
    from contenders import large_specs

    stage = Stage(rank, world, folder, sizes.rounds)
    stage.loads(LOAD_4_TO_2, stage.state(large_specs(sizes.size_bytes)), folder / "by-4")
    return stage.done(folder / "by-4")


# What is shown


def table_of(cases: list[Case]) -> str:
    """All cases and contenders in one table."""
    heads = ["case", "contender", "wall s", "min..max", "GB/s", "CPU s", "x raw", "DCP/it", "read/needed", "extra MiB"]
    lines = []
    for case in cases:
        for who in case.runs:
            lines.append(_line(case, who))
        lines.append([""] * len(heads))
    return harness.format_table(heads, lines[:-1])


def _line(case: Case, who: str) -> list[str]:
    walls = [run.wall_s for run in case.runs[who]]
    wall = case.median(who, "wall_s")
    to_dcp = case.ratio(who, (DCP,))
    return [
        case.name if who == next(iter(case.runs)) else "",
        who,
        f"{wall:.3f}",
        f"{min(walls):.3f}..{max(walls):.3f}",
        f"{case.size_bytes / wall / 1e9:.2f}",
        f"{case.median(who, 'cpu_s'):.3f}",
        f"{case.ratio(who, (RAW, DIRECT)):.2f}",
        f"{1 / to_dcp:.2f}" if to_dcp else "",
        f"{case.median(who, 'read_bytes') / case.size_bytes:.2f}" if case.loads else "",
        f"{case.median(who, 'peak_bytes') / 2**20:.0f}",
    ]


def rows_of(case: Case) -> list[Row]:
    """The results of a case, those with a bar first."""
    bars = bars_of(case.name)
    rows = [
        _at_most(f"{case.name}: Milepost / raw", case.ratio(MILEPOST, (RAW, DIRECT)), "x", bars.most_of_raw),
        _at_least(f"{case.name}: DCP / Milepost", 1 / (case.ratio(MILEPOST, (DCP,)) or 1), "x", bars.least_of_dcp),
        _at_most(
            f"{case.name}: Milepost, memory beyond the state, largest rank",
            max(run.peak_bytes for run in case.runs[MILEPOST]) / 2**20,
            "MiB",
            MOST_PEAK_MIB,
        ),
    ]
    if SAFETENSORS in case.runs:
        beside = case.ratio(MILEPOST, (SAFETENSORS,))
        rows.append(_at_most(f"{case.name}: Milepost / safetensors", beside, "x", bars.most_of_safetensors))
    for who in case.runs:
        if case.loads:
            read = case.median(who, "read_bytes") / case.size_bytes
            most = bars.most_read if who == MILEPOST else None
            rows.append(_at_most(f"{case.name}: {who}, bytes read / needed", read, "x", most))
        rows.append(Row(f"{case.name}: {who}, wall", case.median(who, "wall_s"), "s"))
        rows.append(Row(f"{case.name}: {who}, CPU", case.median(who, "cpu_s"), "s"))
    return rows


def _at_most(name: str, value: float | None, unit: str, bar: float | None) -> Row:
    assert value is not None
    return Row(name, value, unit) if bar is None else Row(name, value, unit, f"<= {bar}", value <= bar)


def _at_least(name: str, value: float, unit: str, bar: float | None) -> Row:
    return Row(name, value, unit) if bar is None else Row(name, value, unit, f">= {bar}", value >= bar)


def bars_table(rows: list[Row]) -> str:
    """The rows that have a bar."""
    lines = [
        ["met" if row.ok else "MISSED", row.name, f"{row.value:.2f} {row.unit}", row.bar] for row in rows if row.bar
    ]
    return harness.format_table(["", "bar", "value", "wanted"], lines)


def _header(folder: Path, sizes: Sizes) -> str:
    names = ("milepost", "torch", "safetensors")
    versions = ", ".join(f"{name} {found}" for name in names if (found := _version(name)))
    disk = harness.kind_of_disk(folder)
    note = " (memory, not a disk: fsync costs nothing here)" if disk in ("tmpfs", "ramfs") else ""
    return (
        f"{__doc__.strip()}\n\n{versions}, Python {platform.python_version()}, {os.cpu_count()} CPUs, {disk}{note}\n"
        f"{sizes.size_bytes / 2**20:.0f} MiB, {sizes.tensors} small tensors, rounds: {sizes.rounds}; {_load()}"
    )


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _load() -> str:
    return "load average " + ", ".join(f"{n:.1f}" for n in os.getloadavg())


def _positive(text: str) -> int:
    if int(text) < 1:
        raise argparse.ArgumentTypeError("must be at least 1")
    return int(text)


def _arguments() -> argparse.Namespace:
    first = __doc__.split("\n\n", maxsplit=1)[0]
    parser = argparse.ArgumentParser(description=first)
    parser.add_argument("--quick", action="store_true", help="64 MB, 2,000 small tensors, 3 rounds: under a minute")
    parser.add_argument("--size-mb", type=_positive, help="size of the state in MiB (default 1024)")
    parser.add_argument("--tensors", type=_positive, help="number of tensors of 4 KB (default 20000)")
    parser.add_argument("--rounds", type=_positive, help="rounds that count (default 5)")
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
        print(_header(folder, sizes), end="\n\n", flush=True)
        for world, work in ((1, one_process), (2, two_ranks_save), (4, four_ranks), (2, two_ranks_load)):
            cases += harness.run_ranks(world, work, folder, sizes)
    rows = [row for case in cases for row in rows_of(case)]
    print(table_of(cases), bars_table(rows), _load(), sep="\n\n")
    if arguments.quick:
        print("A quick run shows that all of it works; it is too short to judge by.")
    if arguments.json:
        arguments.json.write_text(json.dumps([asdict(row) for row in rows], indent=1))


if __name__ == "__main__":
    try:
        main()
    except harness.RankFailed as error:
        sys.exit(f"the benchmark failed on {error}")
    except KeyboardInterrupt:
        sys.exit(130)
