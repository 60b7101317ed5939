"""Ranks that lost each other: one came too late, or the whole job was started again. The same call must work again."""

import contextlib
import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp

import milepost
from faults.kills import WORLD, Job, Library, Rank, found_at, spread, state_of
from faults.processes import environment
from faults.rows import Counting, FaultRow

DEADLINE_S = 4.0
TRIES = 4
WORKS, NEVER, HANGS, MIXED = "works again", "never works again", "hangs", "mixed"
RESUMES, FAILS, GLOO = "resumes", "fails to resume", "gloo itself does not start again"
NO_KILL = "nobody was killed in time"
STEPS = 200
START_S = 90.0


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The faults of this module."""
    yield after_a_missed_deadline(full, folder)
    yield started_again(full, folder)


# After a missed deadline


def save_by(library: Library) -> Callable[[dict[str, Any], Path], Any]:
    """Saves at a place, and waits for other ranks as long as the deadline says."""
    if library == "milepost":
        return lambda state, where: milepost.save(state, where, timeout_s=DEADLINE_S)
    group = dist.new_group(backend="gloo", timeout=timedelta(seconds=DEADLINE_S))
    return lambda state, where: dcp.save(state, checkpoint_id=str(where), process_group=group)


def try_again(rank: Rank, library: Library, victim: int, skips: bool, where: Path) -> None:
    """Save; miss the deadline of the second save on one rank; then all try again at the same place."""
    save = save_by(library)
    save(state_of(rank, 1), where)
    rank.say("ready")
    if rank.rank == victim:
        time.sleep(1.5 * DEADLINE_S)
    if not (skips and rank.rank == victim):
        try:
            save(state_of(rank, 2), where)
        except Exception as error:
            rank.say("missed", str(error))
    for _ in range(TRIES):
        try:
            save(state_of(rank, 3), where)
        except Exception as error:
            rank.say("failed", str(error))
        else:
            rank.say("worked")
            return


def one_missed(library: Library, victim: int, skips: bool, where: Path) -> str:
    """How one trial ends."""
    with Job(WORLD, try_again, library, victim, skips, where) as job:
        job.await_all("ready")
        deadline = time.monotonic() + (2 * TRIES + 6) * DEADLINE_S
        ends = [job.last_words(rank, deadline) for rank in range(WORLD)]
        said = [{words[0] for words in job.said[rank]} for rank in range(WORLD)]
    if any(end is None for end in ends):
        return HANGS
    if not all("worked" in words for words in said):
        return NEVER
    return WORKS if found_at(library, where) == 3 else MIXED


def after_a_missed_deadline(full: bool, folder: Path) -> FaultRow:
    """27: the ranks miss each other once, and try again at the same place."""
    cases = list(itertools.product((0, 2), (False, True)))
    cases = cases * 5 if full else cases[:2]
    trials = [
        (library, victim, skips, folder / f"late-{library}-{i}")
        for library in ("milepost", "dcp")
        for i, (victim, skips) in enumerate(cases if library == "milepost" else cases[: 4 if full else 1])
    ]
    ours, theirs = Counting(), Counting()
    for (library, *_), ending in spread(one_missed, trials, 2):
        (ours if library == "milepost" else theirs).add(ending)
    how = (
        f"1 of {WORLD} ranks, the coordinator or another, comes too late to a save, or skips it (timeout {DEADLINE_S} "
        f"s); then all ranks save at the same place, up to {TRIES} times"
    )
    return FaultRow(27, "again after a missed deadline", how, ours.tally, frozenset({WORKS}), theirs.tally)


# Started again in the same rendezvous


def train(library: Library, folder: Path) -> None:
    """The program that the launcher starts and starts again: resume, save each step, and be killed in a save."""
    first = os.environ["TORCHELASTIC_RESTART_COUNT"] == "0"
    if library == "milepost":
        # A backend without connections of its own: gloo does not always start again, and that is not the question.
        from torch.testing._internal.distributed import fake_pg  # noqa: F401  # registers the backend

        store, rank, world = next(dist.rendezvous("env://"))
        dist.init_process_group("fake", store=store, rank=rank, world_size=world)
    else:
        dist.init_process_group("gloo", timeout=timedelta(seconds=15))
    rank = dist.get_rank()
    if not first:
        note(folder, f"started-{rank}", "")
    resumed = resume(library, folder)
    if not first:
        note(folder, f"resumed-{rank}", str(resumed))
    if first and rank == 1:
        threading.Timer(random.uniform(0.05, 0.6), os.kill, (os.getpid(), signal.SIGKILL)).start()
    for number in range(resumed + 1, resumed + (STEPS if first else 3)):
        save_step(library, folder, number)
    note(folder, f"ended-{rank}", "first" if first else "second")


def resume(library: Library, folder: Path) -> int:
    """Load the newest step. Raises if it is not whole."""
    state = {"n": 0, "t": torch.zeros(1000)}
    if library == "milepost":
        milepost.Checkpointer(folder / "run", timeout_s=20).restore(state, default=0)
    else:
        done = [step for step in sorted((folder / "run").glob("*")) if (step / ".metadata").exists()]
        if done:
            dcp.load(state, checkpoint_id=str(done[-1]))
    assert bool((state["t"] == state["n"]).all())
    return int(state["n"])


def save_step(library: Library, folder: Path, number: int) -> None:
    """Save a state in which everything is this number."""
    state = {"n": number, "t": torch.full((1000,), float(number))}
    if library == "milepost":
        milepost.Checkpointer(folder / "run", keep_last=3, timeout_s=20).save(state, number)
    else:
        dcp.save(state, checkpoint_id=str(folder / "run" / f"{number:08d}"))


def note(folder: Path, name: str, text: str) -> None:
    """Tell the trial something."""
    (folder / name).write_text(text)


def one_restart(library: Library, folder: Path) -> str:
    """How one trial ends."""
    folder.mkdir()
    arguments = ["--standalone", "--nproc-per-node=2", "--max-restarts=1", "--monitor-interval=0.1"]
    program = [sys.executable, "-m", "torch.distributed.run", *arguments, "-m", "faults.rejoin", library, str(folder)]
    own = environment(OMP_NUM_THREADS="1", GLOO_SOCKET_IFNAME="lo")
    launcher = subprocess.Popen(
        program, env=own, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
    )
    try:
        launcher.wait(START_S)
    except subprocess.TimeoutExpired:
        pass
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(launcher.pid, signal.SIGKILL)
        launcher.wait()
    there = {path.name for path in folder.iterdir()}
    if {"resumed-0", "resumed-1", "ended-0", "ended-1"} <= there and "first" not in endings(folder):
        return RESUMES
    if "first" in endings(folder) and not {"started-0", "started-1"} & there:
        return NO_KILL
    if library == "dcp" and not {"started-0", "started-1"} <= there:
        return GLOO
    return FAILS


def endings(folder: Path) -> set[str]:
    """What the ranks that came to their end noted."""
    return {path.read_text() for path in folder.glob("ended-*")}


def started_again(full: bool, folder: Path) -> FaultRow:
    """32: a rank is killed in a save, and the launcher starts all ranks again in the same rendezvous."""
    ours, theirs = Counting(), Counting()
    trials = [("milepost", folder / f"restart-{i}") for i in range(20 if full else 2)]
    trials += [("dcp", folder / f"restart-dcp-{i}") for i in range(10 if full else 1)]
    for (library, _), ending in spread(one_restart, trials, 2):
        if ending != NO_KILL:
            (ours if library == "milepost" else theirs).add(ending)
    how = (
        "a rank is killed at a random moment of a save, and torchrun starts both again with the same rendezvous "
        "(--max-restarts), whose store still has all notes; then they resume, and save three more steps"
    )
    note_ = "Milepost's ranks have a process group without connections of its own, since gloo may fail to start again"
    return FaultRow(32, "started again by torchrun", how, ours.tally, frozenset({RESUMES}), theirs.tally, note_)


if __name__ == "__main__":
    train("milepost" if sys.argv[1] == "milepost" else "dcp", Path(sys.argv[2]))
