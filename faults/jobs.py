"""Faults over the life of a job: interrupts, restarts of the process group, and what thousands of saves leave."""

import contextlib
import gc
import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import milepost
import milepost.dcp
from faults.processes import command, environment
from faults.rows import Counting, FaultRow, Tally

SIZE = 1 << 20
PARTS = 4
HANG_S = 120.0
WORLD = 2
GOOD, MIXED, BROKEN = "one state, and the next save works", "mixed or torn", "the next save fails"
AGAIN, HANGS, GROWS = "begins again, nothing left", "hangs or fails", "descriptors or threads grow"
FLAT = "flat"
SLACK = {"fds": 0, "threads": 0, "keys": 8, "objects": 400, "rss_mib": 24}
"""How much more than after the first saves is still flat."""


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The faults of this module."""
    yield interrupts(40 if full else 6, folder / "interrupts")
    yield restarts(8 if full else 3, folder / "restarts")
    yield leaks(2000 if full else 100, folder / "leaks")


# An interrupt during a save in the background


def interrupts(trials: int, folder: Path) -> FaultRow:
    """A signal handler raises while `async_save` runs; training goes on with other values."""
    return FaultRow(
        26,
        "interrupt during an async save",
        "a signal whose handler raises, at a random moment of `async_save`; the state is changed as soon as the "
        "exception is caught; then the same save again",
        _interrupted(trials, folder / "milepost", milepost_async, milepost_value),
        frozenset({GOOD}),
        _interrupted(trials, folder / "dcp", dcp_async, dcp_value),
    )


def _interrupted(trials: int, folder: Path, save: Callable[..., Any], value_at: Callable[[Path], float]) -> Tally:
    counting, chance = Counting(), random.Random(26)
    for number in range(trials):
        place = folder / str(number)
        save(filled(1.0), place).result()
        start = time.monotonic()
        save(filled(1.0), place / "timed").result()
        state, took = filled(2.0), time.monotonic() - start
        with interrupt_after(chance.uniform(0, took)), contextlib.suppress(_Interrupt):
            pending = save(state, place)
            with contextlib.suppress(BaseException):
                pending.result()
        for tensor in state.values():
            tensor.fill_(-1.0)
        time.sleep(took)
        counting.add(_judged(save, place, value_at))
    return counting.tally


def _judged(save: Callable[..., Any], place: Path, value_at: Callable[[Path], float]) -> str:
    try:
        if value_at(place) not in (1.0, 2.0):
            return MIXED
    except Exception:
        return MIXED
    try:
        try:
            save(filled(3.0), place).result()
        except milepost.SaveCancelled:  # of the save that was stopped, told once
            save(filled(3.0), place).result()
        return GOOD if value_at(place) == 3.0 else BROKEN
    except Exception:
        return BROKEN


class _Interrupt(BaseException):
    """As Ctrl-C, but for this trial alone."""


@contextlib.contextmanager
def interrupt_after(seconds: float) -> Iterator[None]:
    """Raise in the main thread after this long, once, inside the block."""

    def handle(*_: Any) -> None:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        raise _Interrupt

    signal.signal(signal.SIGALRM, handle)
    signal.setitimer(signal.ITIMER_REAL, max(seconds, 1e-6))
    try:
        yield
    finally:
        signal.signal(signal.SIGALRM, signal.SIG_IGN)
        signal.setitimer(signal.ITIMER_REAL, 0)


def filled(value: float) -> dict[str, torch.Tensor]:
    """A state of one value."""
    return {str(i): torch.full((SIZE,), value) for i in range(PARTS)}


def milepost_async(state: Any, place: Path) -> Any:
    """Save by Milepost in the background."""
    return milepost.async_save(state, place)


def dcp_async(state: Any, place: Path) -> Any:
    """Save by DCP in the background."""
    warnings.simplefilter("ignore")  # for its thread too
    return dcp.async_save(state, checkpoint_id=place)


def milepost_value(place: Path) -> float:
    """The one value of the checkpoint; NaN for a mixture."""
    return _one_value(milepost.load(filled(0.0), place))


def dcp_value(place: Path) -> float:
    """The one value of the checkpoint; NaN for a mixture."""
    state = filled(0.0)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(state, checkpoint_id=place)
    return _one_value(state)


def _one_value(state: dict[str, torch.Tensor]) -> float:
    found = {float(x) for tensor in state.values() for x in (tensor.min(), tensor.max())}
    return found.pop() if len(found) == 1 else float("nan")


# Jobs of two ranks, in processes of their own


def restarts(times: int, folder: Path) -> FaultRow:
    """The process group is destroyed and made again in the same processes, at the same port."""
    return FaultRow(
        29,
        "destroy and init of the process group again",
        "two ranks save in the foreground, in a thread, in a process and by steps; then `destroy_process_group`, and "
        "`init_process_group` at the same port",
        _restarted(times, folder / "milepost", "milepost"),
        frozenset({AGAIN}),
        _restarted(times, folder / "dcp", "dcp"),
    )


def _restarted(times: int, folder: Path, library: str) -> Tally:
    counting = Counting()
    reports = _run_job("restart", library, times, folder)
    for i in range(1, times):
        seen = [(rank[0], rank[i]) for rank in reports if len(rank) > i]
        grows = any(now[name] > first[name] for first, now in seen for name in ("fds", "threads"))
        counting.add(HANGS if len(seen) < WORLD else GROWS if grows else AGAIN)
    return counting.tally


def leaks(saves: int, folder: Path) -> FaultRow:
    """Thousands of saves in one job leave nothing behind."""
    ours, theirs = (_leaked(saves, folder / library, library) for library in ("milepost", "dcp"))
    return FaultRow(
        31,
        f"{saves} saves in one job",
        "two ranks save in the foreground, in the background and by steps; keys of the job's store, file descriptors, "
        "threads, objects of Python and memory are counted after the first saves and after the last, on each rank",
        ours,
        frozenset({FLAT}),
        theirs,
    )


def _leaked(saves: int, folder: Path, library: str) -> Tally:
    counting = Counting()
    reports = _run_job("leak", library, saves, folder)
    for first, last in (rank for rank in reports if len(rank) == 2):
        for name, slack in SLACK.items():
            counting.add(FLAT if last[name] <= first[name] + slack else f"{name} grow")
    if any(len(rank) != 2 for rank in reports):
        counting.add(HANGS)
    return counting.tally


def _run_job(action: str, library: str, times: int, folder: Path) -> list[list[dict[str, float]]]:
    """What each rank said, one record for each line."""
    folder.mkdir(parents=True)
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = str(free.getsockname()[1])
    ranks = [
        subprocess.Popen(
            command("jobs", action, library, str(times), str(folder)),
            env=environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=port, RANK=str(r), WORLD_SIZE=str(WORLD)),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        for r in range(WORLD)
    ]
    end = time.monotonic() + HANG_S + times * 0.5
    said = []
    for rank in ranks:
        try:
            said.append(rank.communicate(timeout=max(end - time.monotonic(), 1.0))[0])
        except subprocess.TimeoutExpired:
            rank.kill()
            said.append(rank.communicate()[0])
    return [[json.loads(line) for line in text.splitlines() if line.startswith("{")] for text in said]


def _seen(store: Any = None) -> dict[str, float]:
    gc.collect()
    status = Path("/proc/self/status").read_text().split()
    return {
        "fds": len(os.listdir("/proc/self/fd")),
        "threads": threading.active_count(),
        "keys": store.num_keys() if store is not None else 0,
        "objects": len(gc.get_objects()),
        "rss_mib": int(status[status.index("VmRSS:") + 1]) / 1024,
    }


def _job_store() -> Any:
    store: Any = dist.group.WORLD.get_group_store()  # type: ignore[union-attr]
    while hasattr(store, "underlying_store"):
        store = store.underlying_store
    return store


def _tell(record: dict[str, float]) -> None:
    print(json.dumps(record), flush=True)


def _save_once(library: str, number: int, folder: Path, keeper: Any, guard: Any) -> None:
    state = {"w": torch.full((1000,), float(number)), "step": number}
    if library == "dcp":
        saves = (dcp.save, lambda state, checkpoint_id: dcp.async_save(state, checkpoint_id=checkpoint_id).result())
        saves[number % 2](state, checkpoint_id=folder / "dcp")
        return
    match number % 5:
        case 0:
            milepost.save(state, folder / "front")
        case 1:
            milepost.async_save(state, folder / "thread").result()
        case 2:
            milepost.async_save(state, folder / "process", background="process").result()
        case 3:
            keeper.async_save(state, number).result()
        case _:
            milepost.dcp.async_save(state, checkpoint_id=folder / "dcp").result()
    guard.reached(number)


def _restart(library: str, times: int, folder: Path) -> None:
    for _ in range(times):
        dist.init_process_group("gloo")
        with milepost.Checkpointer(folder / "steps", keep_last=2) as keeper, milepost.PreemptionGuard() as guard:
            for number in range(5):
                _save_once(library, number, folder, keeper, guard)
        dist.barrier()
        dist.destroy_process_group()
        _tell(_seen())


def _leak(library: str, saves: int, folder: Path) -> None:
    dist.init_process_group("gloo")
    with milepost.Checkpointer(folder / "steps", keep_last=2) as keeper, milepost.PreemptionGuard() as guard:
        for number in range(saves):
            if number == min(50, saves // 2):
                dist.barrier()
                _tell(_seen(_job_store()))
                dist.barrier()
            _save_once(library, number, folder, keeper, guard)
        dist.barrier()
        _tell(_seen(_job_store()))
        dist.barrier()


def main() -> None:
    """Run as one rank of a job."""
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    action, library, times, folder = sys.argv[1:]
    {"restart": _restart, "leak": _leak}[action](library, int(times), Path(folder))


if __name__ == "__main__":
    main()
