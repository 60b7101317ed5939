"""Faults at the system calls by which a save changes its folder: a kill, no space, an I/O error. Also their order.

`rows` compiles shim.c and starts this file once, with the shim preloaded. That process imports torch and forks a child
for each trial. The child tells the shim what to break, saves, and ends. A process without faults then checks what is
left.
"""

import ctypes
import gc
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import warnings
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed.checkpoint as dcp

import milepost
from faults.processes import command, environment
from faults.rows import Counting, FaultRow, Tally
from milepost.testing import run_ranks

LIMIT_S = 60
SYNCS = 0  # counted and broken, but not made: no trial cuts the power, and real syncs are slow
WORLD, LARGE_TENSORS, LARGE_ITEMS = 2, 8, 1 << 20  # 8 tensors of 2 x 4 MiB: 64 MiB
OLD, NEW = 1, 2
SUCCEEDED, RAISED, UNCLEAR, NO_FAULT = 0, 1, 2, 3
_CODES = {UNCLEAR: "raised, but not on all ranks or without the path", NO_FAULT: "no fault"}
_AFTER_RAISING = {"none": "nothing there", "old": "old loads", "new": "new loads"}
_COMMIT = re.compile(r"manifest-\d+\.json|\.metadata")
_NUMBERS = (4, 5, 8, 11, 12)
_RAISED_WELL = frozenset({"raised, old loads", "raised, nothing there"})


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 4, 5, 8, 11 and 12: with every call of a save (two minutes), or with some (seconds)."""
    yield from preloaded("shim", _NUMBERS, full, folder)


def preloaded(module: str, numbers: Iterable[int], full: bool, folder: Path) -> Iterator[FaultRow]:
    """The rows that a module of this folder prints, as `main` does, in a process with the shim."""
    library = compiled(folder)
    if library is None:
        for number in numbers:
            yield FaultRow(number, "faults at system calls", "", Tally({}), frozenset(), note="needs gcc, and Linux")
        return
    preload = " ".join(filter(None, [str(library), os.environ.get("LD_PRELOAD")]))
    with (
        (folder / "errors.txt").open("w+") as errors,
        subprocess.Popen(
            command(module, str(folder), "full" if full else "few"),
            env=environment(LD_PRELOAD=preload, OMP_NUM_THREADS="1"),
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            yield from map(_row_from, process.stdout or [])
            if process.wait() != 0:
                errors.seek(0)
                raise RuntimeError(f"the process that makes faults failed:\n{errors.read()}")
        finally:
            process.kill()


def compiled(folder: Path) -> Path | None:
    """The shim, compiled into this folder; None without a compiler or without Linux."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if compiler is None or sys.platform != "linux":
        return None
    library, source = folder / "shim.so", Path(__file__).with_name("shim.c")
    subprocess.run([compiler, "-shared", "-fPIC", "-O2", "-o", library, source], check=True)
    return library


def _row_from(line: str) -> FaultRow:
    record = json.loads(line)
    tallies = {name: Tally(**record[name]) if record[name] else None for name in ("milepost", "dcp")}
    return FaultRow(**{**record, **tallies, "good": frozenset(record["good"])})


# --- what the shim recorded, and whether the order is right


class Call(NamedTuple):
    """A call that touched the folder. `other`: the second path of a link or rename; "new" or "trunc" for an open."""

    number: int
    verb: str
    result: int
    error: int
    path: str
    other: str = ""


def read_log(text: str) -> list[Call]:
    """The calls of a log of the shim."""
    fields = (line.split("\t") for line in text.splitlines())
    return [Call(int(n), verb, int(result), int(error), *paths) for n, verb, result, error, *paths in fields]


def violations(calls: Iterable[Call]) -> list[tuple[str, str]]:
    """Where a save committed before it synced, or touched the old checkpoint too early: kind, path. Pure.

    All bytes that were written and all names that were made must be synced when a manifest gets its name; that name
    must be synced at the end; and until it is, nothing that was there before may be removed or overwritten.
    """
    found, commit = [], ""
    own: set[str] = set()  # paths that these calls made
    data: set[str] = set()  # files with bytes that are not synced
    names: set[str] = set()  # paths whose entries in their folders are not synced
    for call in calls:
        verb, path, other = call.verb, call.path, call.other
        touches_old = path not in own and (not commit or commit in names)
        if call.error or verb in ("close", "sync_file_range"):
            continue
        if verb in ("fsync", "fdatasync"):
            data.discard(path)
            names = {name for name in names if verb == "fdatasync" or os.path.dirname(name) != path}
        elif verb in ("unlink", "rmdir"):
            found += [("old one removed first", path)] * touches_old
            own, data, names = own - {path}, data - {path}, names - {path}
        elif verb in ("link", "rename"):
            if _COMMIT.fullmatch(os.path.basename(other)):
                found += [("bytes not synced", file) for file in sorted(data)]
                # Except for the source: its own entry may be lost, since the commit does not name it.
                found += [("name not synced", name) for name in sorted(names - {path})]
                commit = other
            data |= {other} if path in data else set()
            if verb == "rename":
                own, data, names = own - {path}, data - {path}, names - {path}
            own, names = own | {other}, names | {other}
        else:
            found += [("old one overwritten", path)] * (touches_old and other == "trunc")
            if verb == "mkdir" or other == "new":
                own, names = own | {path}, names | {path}
            data |= {path} if verb != "mkdir" else set()
    return found + [("commit not synced" if commit else "no commit", commit)] * (not commit or commit in names)


# --- what is saved, and how


def small(value: int) -> dict[str, Any]:
    """A state of a few small tensors, full of this value."""
    layer = {"weight": torch.full((32, 4), float(value)), "bias": torch.full((7,), value)}
    return {"layer": layer, "moments": torch.full((3000,), value, dtype=torch.float64), "step": value}


def large(value: int) -> dict[str, Any]:
    """A state of 64 MiB, full of this value."""
    return {f"t{i}": torch.full((WORLD * LARGE_ITEMS,), float(value)) for i in range(LARGE_TENSORS)}


def _values(state: Any) -> set[float]:
    if isinstance(state, dict):
        return set().union(*map(_values, state.values()))
    return {float(torch.as_tensor(state).min()), float(torch.as_tensor(state).max())}


@dataclass(frozen=True, slots=True)
class System:
    """How a library saves and loads a state, and how to see that nothing was ever saved at a place."""

    name: str
    save: Callable[[Any, Path], object]
    load: Callable[[Any, Path], object]
    is_absent: Callable[[Path, BaseException], bool]
    state: Callable[[int], dict[str, Any]] = small

    def try_to_save(self, value: int, place: Path) -> int:
        """Save, and return an exit code for the outcome."""
        try:
            self.save(self.state(value), place)
        except BaseException as error:  # DCP raises a BaseException
            return UNCLEAR if isinstance(error, Unclear) else RAISED
        return SUCCEEDED

    def found(self, place: Path, first: bool) -> str:
        """What a load finds: "old", "new", "mixed", "unloadable"; "none" if there was nothing before either."""
        target = self.state(0)
        try:
            self.load(target, place)
        except BaseException as error:
            return "none" if first and self.is_absent(place, error) else "unloadable"
        return {(OLD,): "old", (NEW,): "new"}.get(tuple(_values(target)), "mixed")


class Unclear(Exception):
    """An error that breaks the promise."""


def _save_by_milepost(state: Any, place: Path) -> None:
    try:
        milepost.save(state, place, transfer=milepost.Transfer(threads=1))
    except milepost.CheckpointError as error:
        raise error if str(place) in str(error) else Unclear from error


def _save_by_ranks(state: Any, place: Path) -> None:
    """Save from ranks that are threads. Each writes its part with four threads."""

    def work(comm: Any) -> str:
        start, stop = comm.rank * LARGE_ITEMS, (comm.rank + 1) * LARGE_ITEMS
        parts = {key: milepost.Sharded((len(t),), {(start,): t[start:stop]}) for key, t in state.items()}
        try:
            milepost.save(parts, place, process_group=comm, transfer=milepost.Transfer(threads=4))
        except milepost.CheckpointError as error:
            return str(error)
        return ""

    texts = run_ranks(WORLD, work, timeout_s=LIMIT_S / 2)
    if any(texts):
        raise OSError if all("rank" in text and str(place) in text for text in texts) else Unclear


def _save_by_dcp(state: Any, place: Path, threads: int = 1) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place, thread_count=threads), no_dist=True)


MILEPOST = System(
    "milepost",
    _save_by_milepost,
    lambda state, place: milepost.load(state, place, transfer=milepost.Transfer(threads=1)),
    lambda _, error: isinstance(error, milepost.CheckpointNotFound),
)
MILEPOST_THREADS = replace(MILEPOST, name="milepost-threads", save=_save_by_ranks, state=large)
DCP = System(
    "dcp",
    _save_by_dcp,
    lambda state, place: dcp.load(state, storage_reader=dcp.FileSystemReader(place), no_dist=True),
    lambda place, _: not (place / ".metadata").exists(),
)
DCP_THREADS = replace(DCP, name="dcp-threads", save=partial(_save_by_dcp, threads=4), state=large)


# --- trials


class Fault(NamedTuple):
    """What happens at which call. Only calls whose name starts with `only` count."""

    do: str
    at: int
    only: str = ""


def attempt(save: Callable[[], int], home: Path, fault: Fault | None = None, log: str = "", reads: bool = False) -> int:
    """Let a child save with this fault below `home`. Returns the code of `save`, NO_FAULT, or minus a signal.

    `reads`: calls that read count too.
    """
    child = os.fork()
    if child == 0:
        code = 99
        try:
            signal.alarm(LIMIT_S)  # ends a child that hangs
            os.dup2(os.open(os.devnull, os.O_WRONLY), 2)  # DCP's threads print errors there
            shim = ctypes.CDLL(None)
            shim.shim_see_reads(reads)
            if fault is not None:
                assert shim.shim_arm(ctypes.c_long(fault.at), fault.do.encode(), fault.only.encode()) == 0
            assert shim.shim_watch(str(home).encode(), log.encode(), SYNCS) == 0
            code = save()
            if fault is not None and not shim.shim_hit():
                code = NO_FAULT
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])


def ending(code: int, found: str, killed: bool = False) -> str:
    """The name of an ending: the exit code of the process, and what was there afterwards."""
    if killed:
        return found if code == -signal.SIGKILL else "not killed"
    if code == SUCCEEDED:
        return "succeeded, whole" if found == "new" else "succeeded, damaged"
    if code == RAISED:
        return f"raised, {_AFTER_RAISING.get(found, found)}"
    return _CODES.get(code, f"ended with {code}")


class Lab:
    """Runs trials in a folder: all, or a few that include those around the commit."""

    def __init__(self, folder: Path, full: bool) -> None:
        self.folder, self.full = folder.resolve(), full
        self._records: dict[tuple[str, bool], list[Call]] = {}

    def prepared(self, system: System, first: bool) -> tuple[Path, Path]:
        """A folder to watch, and a place in it to save to. Except for a first save, an old checkpoint is there."""
        home = Path(tempfile.mkdtemp(dir=self.folder))
        place = home / "runs" / "step"
        if not first:
            old = self.folder / f"old-{system.name}"
            if not old.exists():
                assert attempt(lambda: system.try_to_save(OLD, old), self.folder) == SUCCEEDED
            shutil.copytree(old, place)
        return home, place

    def record(self, system: System, first: bool) -> list[Call]:
        """The calls of a save that meets no fault."""
        if (system.name, first) not in self._records:
            home, place = self.prepared(system, first)
            log = self.folder / f"log-{system.name}-{first}"
            assert attempt(lambda: system.try_to_save(NEW, place), home, log=str(log)) == SUCCEEDED
            self._records[system.name, first] = read_log(log.read_text())
            shutil.rmtree(home)
        return self._records[system.name, first]

    def trial(self, system: System, first: bool, fault: Fault) -> str:
        """How one save with this fault ended."""
        home, place = self.prepared(system, first)
        code = attempt(lambda: system.try_to_save(NEW, place), home, fault)
        found = system.found(place, first)
        shutil.rmtree(home)
        return ending(code, found, fault.do == "kill")

    def tally(
        self, system: System, ways: Sequence[str], only: str = "", firsts: Sequence[bool] = (True, False)
    ) -> Tally:
        """How saves ended with these faults at all (or some) of their calls: first saves, and overwrites."""
        counting = Counting()
        for first, do in itertools.product(firsts, ways):
            calls = [call for call in self.record(system, first) if call.verb.startswith(only)]
            for at in self.picked(calls):
                counting.add(self.trial(system, first, Fault(do, at, only)))
        return counting.tally

    def picked(self, calls: Sequence[Call]) -> list[int]:
        """The numbers of the calls to break, from 1."""
        if self.full:
            return list(range(1, len(calls) + 1))
        commits = [i for i, call in enumerate(calls, 1) if _COMMIT.fullmatch(os.path.basename(call.other))]
        near = {min(commit + i, len(calls)) for commit in commits for i in (0, 1)}
        return sorted(near | {len(calls), *range(2, len(calls), max(5, len(calls) // 3))})


# --- the rows


def killed(lab: Lab) -> FaultRow:
    """Row 4."""
    tallies = [lab.tally(system, ["kill"]) for system in (MILEPOST, DCP)]
    counts = [len(lab.record(MILEPOST, first)) for first in (True, False)]
    how = f"SIGKILL before I/O calls, of {counts[0]} in a first save and {counts[1]} in an overwrite"
    good, note = frozenset({"none", "old", "new"}), '"none": nothing was there before'
    return FaultRow(4, "killed at an I/O call", how, tallies[0], good, tallies[1], note)


def refused(lab: Lab) -> FaultRow:
    """Row 5."""
    tallies = [lab.tally(system, ["ENOSPC", "EIO"]) for system in (MILEPOST, DCP)]
    how = "ENOSPC, then EIO, from I/O calls of a first save and of an overwrite"
    return FaultRow(5, "no space, I/O error", how, tallies[0], _RAISED_WELL | {"succeeded, whole"}, tallies[1])


def ordered(lab: Lab) -> FaultRow:
    """Row 8."""
    counts = {}
    for system in (MILEPOST, MILEPOST_THREADS, DCP):
        found = [violations(lab.record(system, first)) for first in (True, False)]
        counts[system.name] = Counter(kind for one in found for kind, _ in one or [("in order", "")])
    own = counts["milepost"] + counts["milepost-threads"]
    how = "system calls of a first save and of an overwrite: everything is synced before the commit that names it"
    good, note = frozenset({"in order"}), "DCP: violations in two saves"
    return FaultRow(8, "order of system calls", how, Tally(dict(own)), good, Tally(dict(counts["dcp"])), note)


def threads(lab: Lab) -> FaultRow:
    """Row 11."""
    own, other = (
        lab.tally(MILEPOST_THREADS, ["EIO"], "pwrite", [False]),
        lab.tally(DCP_THREADS, ["EIO"], "write", [True]),
    )
    how = f"EIO from a write of 64 MiB with 4 threads per rank: overwrite on {WORLD} ranks; DCP: first save on one"
    note = "Milepost: raised on every rank, with rank and path"
    return FaultRow(11, "error in a writer thread", how, own, frozenset({"raised, old loads"}), other, note)


def unsynced(lab: Lab) -> FaultRow:
    """Row 12."""
    tallies = [lab.tally(system, ["EIO"], "fsync") for system in (MILEPOST, DCP)]
    how = "EIO from an fsync of a first save or of an overwrite"
    return FaultRow(12, "fsync fails", how, tallies[0], _RAISED_WELL, tallies[1])


def main() -> None:
    """Print the rows, as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    gc.freeze()
    print_rows((killed, refused, ordered, threads, unsynced))


def print_rows(rows_of_lab: Iterable[Callable[[Lab], FaultRow]]) -> None:
    """Print the rows of the process that `preloaded` starts."""
    lab = Lab(Path(sys.argv[1]), full=sys.argv[2] == "full")
    for row in rows_of_lab:
        print(json.dumps(asdict(row(lab)), default=sorted), flush=True)


if __name__ == "__main__":
    main()
