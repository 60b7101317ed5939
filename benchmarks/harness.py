"""Shared by the benchmarks: start ranks and measure fairly. Linux only; torch is imported only in the ranks.

What makes a comparison fair here:

* Contenders take turns within a round, in a different order each time. The first round is not counted.
* Every run starts with the same pages. Memory that was never touched, or has been free for long, is several times
  slower at first use, above all in virtual machines. So the state is allocated and filled once; freed heap goes back
  to the system before each run; and just before each run a filler as large as the state is written and deleted, so
  that the page cache and the contenders get its pages.
* A save starts with nothing left to sync. A warm load finds its files in the page cache, a cold load finds none of
  them there. Targets are overwritten before each load.
* Ratios are computed within a round, where contenders share the noise of the machine. The median of these is shown.
"""

import ctypes
import gc
import multiprocessing
import os
import random
import shutil
import signal
import statistics
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from multiprocessing.connection import Connection, wait
from pathlib import Path
from typing import Any

RANK_ENVIRONMENT = {"OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}
PRELOAD = ("milepost.api", "torch.distributed.checkpoint", "torch.distributed.tensor", "safetensors.torch")
DROP_CACHES = Path("/proc/sys/vm/drop_caches")
_BUFFER_BYTES = 4 << 20
_STOP_S = 10.0


class RankFailed(Exception):
    """A rank of the benchmark raised or died."""


@dataclass(frozen=True, slots=True)
class Sample:
    """One run as one rank saw it. Times come from the clock that all processes of a machine share."""

    start_s: float
    end_s: float
    cpu_s: float
    read_bytes: int
    peak_bytes: int


@dataclass(frozen=True, slots=True)
class Run:
    """One run of all ranks: from the first start to the last end."""

    wall_s: float
    cpu_s: float
    read_bytes: int


@dataclass(slots=True)
class Measured:
    """What one rank measured in one case, by contender. `size_bytes` is what this rank saves or needs.

    `peaks` is the peak memory of a contender beyond what was there before. It includes the round that is not counted: a
    contender that keeps its memory between calls allocates it then. `counts` is what rank 0 counted for all ranks.
    """

    case: str
    size_bytes: int
    samples: dict[str, list[Sample]] = field(default_factory=dict)
    peaks: dict[str, int] = field(default_factory=dict)
    counts: dict[str, dict[str, int]] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Case:
    """One case: the runs of each contender, in the order of the rounds. `peaks` has the largest of all ranks."""

    name: str
    size_bytes: int
    runs: dict[str, list[Run]]
    peaks: dict[str, int]
    world: int
    notes: tuple[str, ...] = ()
    counts: dict[str, dict[str, int]] = field(default_factory=dict)

    @property
    def loads(self) -> bool:
        """Whether this case reads."""
        return self.name.startswith("load")

    def median(self, contender: str, what: str) -> float:
        """The median over the rounds of one field of `Run`."""
        return statistics.median(getattr(run, what) for run in self.runs[contender])

    def ratio(self, contender: str, others: tuple[str, ...]) -> float | None:
        """The time over that of the fastest of `others` in the same round, as a median; None if either did not run."""
        present = [self.runs[other] for other in others if other in self.runs]
        if not present or contender not in self.runs:
            return None
        best = [min(run.wall_s for run in runs) for runs in zip(*present, strict=True)]
        return statistics.median(run.wall_s / base for run, base in zip(self.runs[contender], best, strict=True))


# On the ranks


class Meter:
    """Measures on one rank; `barrier` waits for all of them."""

    def __init__(self, rank: int, world: int, rounds: int, barrier: Callable[[], None]) -> None:
        self.rank, self.world, self.rounds, self.barrier = rank, world, rounds, barrier
        self.results: list[Measured] = []
        self.notes: list[str] = []
        self._buffer = bytearray(_BUFFER_BYTES)
        self._libc = ctypes.CDLL(None)

    def case(self, name: str, size_bytes: int, runs: dict[str, "Planned"]) -> Measured:
        """Let the contenders take turns, and keep the samples of each round but the first."""
        measured = Measured(name, size_bytes, {contender: [] for contender in runs}, notes=self.notes)
        self.results.append(measured)
        gc.freeze()  # exclude what is there now: otherwise each collection takes longer than a small case
        began = time.monotonic()
        order = list(runs)
        for turn in range(self.rounds + 1):
            for contender in order:
                planned = runs[contender]
                if turn == 0:
                    planned.before_first()
                sample = self._measure(planned)
                measured.peaks[contender] = max(sample.peak_bytes, measured.peaks.get(contender, 0))
                if turn == 0:
                    planned.after_first()
                else:
                    measured.samples[contender].append(sample)
            random.Random(turn).shuffle(order)  # the same order on all ranks
        if self.rank == 0:
            print(f"  {name}: {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
        return measured

    def _measure(self, planned: "Planned") -> Sample:
        gc.collect()
        self._libc.malloc_trim(0)
        self.barrier()
        planned.prepare()
        Path("/proc/self/clear_refs").write_text("5")  # the peak counts from here
        resident, read = _status_bytes("VmRSS"), _read_bytes()
        self.barrier()
        cpu, start = time.process_time(), time.monotonic()
        planned.action()
        end, cpu = time.monotonic(), time.process_time() - cpu
        peak = max(0, _status_bytes("VmHWM") - resident)
        return Sample(start, end, cpu, _read_bytes() - read, peak)

    def delete(self, folder: Path) -> None:
        """Remove a folder, once for all ranks."""
        if self.rank == 0:
            shutil.rmtree(folder, ignore_errors=True)

    def recycle(self, folder: Path, size_bytes: int) -> None:
        """Free pages that were in use a moment ago, so that a contender that needs new memory gets these.

        Call it last before a run: pages that stay free for a second or two go back to the host of a virtual machine.
        """
        filler = folder / f"filler-{self.rank}"
        with filler.open("wb", buffering=0) as file:
            while size_bytes > 0:
                size_bytes -= file.write(self._buffer)
        filler.unlink()  # before the kernel has begun to write it back

    def settle(self) -> None:
        """Sync everything, once for all ranks, so that no run pays for another one's writes."""
        self.barrier()
        if self.rank == 0:
            os.sync()
        self.barrier()

    def chill(self, folder: Path) -> None:
        """Drop the files of a folder from the page cache, once for all ranks; where permitted, drop the whole cache."""
        self.barrier()
        if self.rank == 0:
            _drop(folder)
        self.barrier()

    def warm(self, folder: Path) -> None:
        """Bring the files of a folder into the page cache; the ranks share the work."""
        for path in _files(folder)[self.rank :: self.world]:
            with path.open("rb", buffering=0) as file:
                while file.readinto(self._buffer):
                    pass


def may_drop_caches() -> bool:
    """Whether this process may drop the page cache of the whole machine."""
    return os.access(DROP_CACHES, os.W_OK)


def _drop(folder: Path) -> None:
    for path in _files(folder):
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)  # pages that are not written back yet would stay
        os.posix_fadvise(handle, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(handle)
    if may_drop_caches():
        DROP_CACHES.write_text("1")


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _nothing() -> None:
    pass


@dataclass(frozen=True, slots=True)
class Planned:
    """A run to measure: what is timed, what comes before each run, and what surrounds the first one (not counted)."""

    action: Callable[[], Any]
    prepare: Callable[[], Any]
    before_first: Callable[[], Any] = _nothing
    after_first: Callable[[], Any] = _nothing


def _status_bytes(name: str) -> int:
    text = Path("/proc/self/status").read_text()
    return int(text.split(f"{name}:")[1].split()[0]) * 1024


def _read_bytes() -> int:
    """Bytes that this process has read so far, from disk or page cache. Memory maps do not count."""
    return int(Path("/proc/self/io").read_text().split("rchar:")[1].split()[0])


# Starting the ranks


def run_ranks(world: int, work: Callable[..., list[Measured]], folder: Path, *arguments: Any) -> list[Case]:
    """Call `work(rank, world, folder, *arguments)` in `world` new processes, and merge what they measured.

    Raises RankFailed with the traceback of the first rank that failed. No process is left behind, even after an error.
    """
    # One server imports torch and the ranks are forked from it: the import takes longer than many cases.
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOAD))
    ranks, pipes = [], []
    try:
        for rank in range(world):
            here, there = context.Pipe(duplex=False)
            process = context.Process(target=_be_rank, args=(there, work, rank, world, folder, *arguments), daemon=True)
            process.start()
            there.close()
            ranks.append(process)
            pipes.append(here)
        results = _collect(pipes)
    finally:
        for process in ranks:
            process.join(0 if sys.exc_info()[0] else _STOP_S)
            process.kill()
            process.join()
    return [_merge(group) for group in zip(*results, strict=True)]


def _collect(pipes: list[Connection]) -> list[list[Measured]]:
    results: dict[int, list[Measured]] = {}
    while len(results) < len(pipes):
        for pipe in wait([p for i, p in enumerate(pipes) if i not in results]):
            rank = pipes.index(pipe)
            try:
                result = pipe.recv()
            except EOFError:
                raise RankFailed(f"rank {rank} died") from None
            if isinstance(result, str):
                raise RankFailed(f"rank {rank}:\n{result}")
            results[rank] = result
    return [results[rank] for rank in range(len(pipes))]


def _be_rank(pipe: Connection, work: Callable[..., list[Measured]], *arguments: Any) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the parent gets it too, and ends the ranks
    threading.Thread(target=_end_with_parent, daemon=True).start()
    try:
        pipe.send(work(*arguments))
    except BaseException:
        pipe.send(traceback.format_exc())


def _end_with_parent() -> None:
    parent = multiprocessing.parent_process()
    assert parent is not None
    wait([parent.sentinel])
    os._exit(1)


def _merge(group: tuple[Measured, ...]) -> Case:
    runs = {
        contender: [_merge_run(samples) for samples in zip(*(m.samples[contender] for m in group), strict=True)]
        for contender in group[0].samples
    }
    peaks = {contender: max(m.peaks[contender] for m in group) for contender in runs}
    size_bytes, first = sum(m.size_bytes for m in group), group[0]
    return Case(first.case, size_bytes, runs, peaks, len(group), tuple(first.notes), first.counts)


def _merge_run(samples: tuple[Sample, ...]) -> Run:
    return Run(
        wall_s=max(s.end_s for s in samples) - min(s.start_s for s in samples),
        cpu_s=sum(s.cpu_s for s in samples),
        read_bytes=sum(s.read_bytes for s in samples),
    )


@contextmanager
def work_folder(parent: Path | None, need_bytes: int) -> Iterator[Path]:
    """A fresh folder, removed at the end, also after an error, Ctrl-C or SIGTERM. Refuses a disk that is too full."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
    folder = Path(tempfile.mkdtemp(prefix="milepost-benchmark-", dir=parent))
    try:
        free = shutil.disk_usage(folder).free
        if free < need_bytes:
            sys.exit(
                f"{folder} has {free / 1e9:.1f} GB free and this needs {need_bytes / 1e9:.1f}: choose another folder"
            )
        yield folder
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def run_main(main: Callable[[], None]) -> None:
    """Run a benchmark; end with 1 and a traceback if a rank failed, with 130 after Ctrl-C."""
    try:
        main()
    except RankFailed as error:
        sys.exit(f"the benchmark failed on {error}")
    except KeyboardInterrupt:
        sys.exit(130)
