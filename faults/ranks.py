"""Faults of ranks, of saves in the background, and of readers: all ranks raise in time and name the failed rank."""

import contextlib
import itertools
import logging
import os
import random
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults import kills as kit
from faults.kills import DEADLINE_S, HANG_S, WORLD, Job, Library, Rank, names, spread, state_of, target
from faults.rows import Counting, FaultRow
from milepost.comm import BoardComm, MemoryBoard
from milepost.comm.distributed import ranks_of
from milepost.testing import CountingStore, TroubledComm

SAVE = ("starting", "describing the state", "agreeing on the layout", "writing", "comparing values", "committing")
LOAD = ("opening", "matching", "sharing out", "reading", "sending", "applying")
SHARED = ("sharing out", "sending")
"""Steps of ranks that share reads, which needs a process group."""
NAMED, HANG, UNNAMED = "all others raise and name the rank", "others hang", "others do not name the rank"


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The faults of this module."""
    for row in (ranks_in_trouble, in_the_background, a_reader_meanwhile):
        (folder / row.__name__).mkdir()
        yield row(full, folder / row.__name__)
        shutil.rmtree(folder / row.__name__)


# A rank in trouble


@dataclass(frozen=True, slots=True)
class Trouble:
    """A kind of trouble, for one rank at one step of a save or a load."""

    kind: str
    step: str
    victim: int

    def judge(self, errors: list[str | None]) -> str:
        """The ending, by the errors of the other ranks: None for a rank that hangs, "" for a rank without an error."""
        if None in errors:
            return HANG
        expected: tuple[str, ...] = ("",)  # DCP has other steps
        for steps in (SAVE, LOAD):
            if self.step in steps:
                # Ranks do not wait in a step in which only the coordinator sends: the next step reports it.
                expected = (self.step,) if self.kind == "raises" else steps[steps.index(self.step) :]
        fine = all(text and names(text, self.victim) and any(step in text for step in expected) for text in errors)
        return NAMED if fine else UNNAMED


def call_with_trouble(trouble: Trouble, state: dict[str, Any], where: Any, comm: Any) -> None:
    """The save or load with the trouble. The ranks save slightly different states, so that all steps are taken."""
    if trouble.step in SAVE:
        more = {"more": torch.ones(1)} if comm.rank == WORLD - 1 else {}
        milepost.save({**state, **more, "odd": comm.rank}, where, on_difference="warn", process_group=comm)
    else:
        milepost.load(state, where, process_group=comm, share_reads=comm.group is not None)


HOOKS: dict[str, Callable[[], Any]] = {
    "raises": lambda: 1 / 0,
    "dies": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stops": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "never arrives": lambda: time.sleep(100),
}


def meet_trouble(rank: Rank, trouble: Trouble, where: Path) -> None:
    """Save once without trouble, then with it."""
    milepost.save(state_of(rank, 1), where)
    comm: Any = ranks_of(None, DEADLINE_S)
    if rank.rank == trouble.victim and trouble.step == "sending":
        dist.broadcast = lambda *_, **__: HOOKS[trouble.kind]()
    elif rank.rank == trouble.victim:
        comm = TroubledComm(comm, {trouble.step: HOOKS[trouble.kind]})
    rank.say("ready")
    call_with_trouble(trouble, state_of(rank, 2), where, comm)


def meet_trouble_in_dcp(rank: Rank, trouble: Trouble, where: Path) -> None:
    """The same with DCP, whose steps are methods of a planner."""
    dcp.save(state_of(rank, 1), checkpoint_id=str(where))
    planner = dcp.DefaultSavePlanner()
    if rank.rank == trouble.victim:
        method = getattr(planner, trouble.step)
        setattr(planner, trouble.step, lambda *args: HOOKS[trouble.kind]() or method(*args))
    rank.say("ready")
    dcp.save(state_of(rank, 2), checkpoint_id=str(where), planner=planner)


def in_processes(library: Library, trouble: Trouble, where: Path) -> str:
    """How trouble in a real process ends."""
    with Job(WORLD, meet_trouble if library == "milepost" else meet_trouble_in_dcp, trouble, where) as job:
        job.await_all("ready")
        # Sending has a deadline too.
        deadline = time.monotonic() + HANG_S + (DEADLINE_S if trouble.step == "sending" else 0.0)
        ends = [job.last_words(rank, deadline) for rank in range(WORLD) if rank != trouble.victim]
    ending = trouble.judge([None if end is None else end[2] if end[0] == "raised" else "" for end in ends])
    intact = library == "dcp" or kit.found_at("milepost", where) == 1
    return ending if intact else "the old checkpoint is not intact"


def broken(store: milepost.Store, word: str) -> CountingStore:
    """A store in which calls whose text starts with `word` fail."""

    def fail(_: int, call: str) -> None:
        if call.startswith(word):
            raise OSError(5, "Input/output error")

    counting = CountingStore(store)
    counting.before = fail  # type: ignore[method-assign]
    return counting


class Refusing:
    """An object that fails to return a state, or to load one."""

    def __init__(self, gives: bool) -> None:
        self.gives = gives

    def state_dict(self) -> dict[str, Any]:
        return {"w": torch.ones(1)} if self.gives else HOOKS["raises"]()

    def load_state_dict(self, _: dict[str, Any]) -> None:
        HOOKS["raises"]()


RAISES: list[tuple[str, int | None, str]] = [
    ("starting", 0, "list"),
    ("describing the state", None, "no state"),
    ("writing", None, "writer data/"),
    ("writing", None, "write data/"),
    ("writing", None, "commit data/"),
    ("committing", 0, "create manifest"),
    ("opening", 0, "list"),
    ("matching", None, "no state"),
    ("reading", None, "reader data/"),
    ("applying", None, "takes none"),
]
"""The step that fails, the rank if only the coordinator can fail, and what fails: a call of the store, or an object."""


def in_threads(trouble: Trouble, word: str) -> str:
    """How trouble in a thread rank ends: it raises where `word` says, or never reaches a step."""
    store, board, errors, gone = milepost.store.MemoryStore(), MemoryBoard(), dict[int, str](), threading.Event()
    milepost.save({"n": 1, "t": torch.ones(WORLD), "o": {"w": torch.ones(1)}}, store)
    before = dict(store.objects)

    def run(rank: int) -> None:
        comm: Any = BoardComm(board, rank, WORLD, DEADLINE_S)
        mine: Any = (
            milepost.Sharded((WORLD,), {(rank,): torch.zeros(1)}) if trouble.step in SAVE else torch.zeros(WORLD)
        )
        state, where = {"n": 2, "t": mine, "o": {"w": torch.ones(1)}}, store
        if rank == trouble.victim and trouble.kind == "raises":
            where = broken(store, word)
            state["o"] = Refusing(word == "takes none") if word in ("no state", "takes none") else state["o"]
        elif rank == trouble.victim:
            comm = TroubledComm(comm, {trouble.step: lambda: gone.wait(HANG_S) and HOOKS["raises"]()})
        try:
            call_with_trouble(trouble, state, where, comm)
            errors[rank] = ""
        except Exception as error:
            errors[rank] = str(error)

    threads = {rank: threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(WORLD)}
    for thread in threads.values():
        thread.start()
    deadline = time.monotonic() + HANG_S
    others = [rank for rank in threads if rank != trouble.victim]
    for rank in others:
        threads[rank].join(max(deadline - time.monotonic(), 0.0))
    ending = trouble.judge([errors.get(rank) for rank in others])
    intact = all(store.objects.get(name) == data for name, data in before.items())
    gone.set()
    threads[trouble.victim].join(HANG_S)
    return ending if intact else "the old checkpoint is not intact"


def ranks_in_trouble(full: bool, folder: Path) -> FaultRow:
    """21: a rank raises, dies, stops, or never arrives, at each step."""
    victims, ours, theirs = (0, 2) if full else (2,), Counting(), Counting()
    steps = SAVE + LOAD if full else ("writing", "reading")
    everywhere = [(step, victim) for step in steps for victim in victims]
    trials: list[tuple[Any, ...]] = [
        (in_processes, "milepost", Trouble(kind, *at), folder / f"{kind}-{at[0]}-{at[1]}")
        for kind in (("dies", "stops") if full else ("dies",))
        for at in everywhere
    ]
    trials += [(in_threads, Trouble("never arrives", *at), "") for at in everywhere if at[0] not in SHARED]
    if full:
        for kind, step in (("never arrives", "sharing out"), ("never arrives", "sending"), ("raises", "sending")):
            trials += [
                (in_processes, "milepost", Trouble(kind, step, v), folder / f"{kind}-{step}-{v}") for v in victims
            ]
    for step, lead, word in RAISES:
        trials += [(in_threads, Trouble("raises", step, v), word) for v in ((lead,) if lead is not None else victims)]
    cases = [(kind, method) for kind in ("raises", "dies", "stops") for method in ("create_local_plan", "resolve_data")]
    cases.append(("never arrives", "create_local_plan"))
    trials += [
        (in_processes, "dcp", Trouble(kind, method, victim), folder / f"dcp-{kind}-{method}-{victim}")
        for kind, method in (cases if full else cases[:3])
        for victim in victims
    ]
    for (_, library, *_), ending in spread(lambda how, *rest: how(*rest), trials, 8):
        (theirs if library == "dcp" else ours).add(ending)
    how = (
        "1 of 4 ranks, the coordinator or another, raises, dies, stops or never arrives, in each step of save and "
        f"load, with timeout_s={DEADLINE_S}"
    )
    note = f"DCP: in the planner, before and during writes. A rank that still runs after {HANG_S:.0f} s hangs"
    return FaultRow(21, "a rank in trouble", how, ours.tally, frozenset({NAMED}), theirs.tally, note)


# In the background


def begin(saver: milepost.AsyncSaver | None, state: dict[str, Any], where: Path) -> Any:
    """Begin a save, by DCP if there is no saver."""
    if saver is None:
        return dcp.async_save(state, checkpoint_id=str(where), no_dist=True)
    return saver.save(state, where)


def unread_failure(rank: Rank, library: Library, background: str, folder: Path) -> None:
    """Let a save fail, do not ask for its result, and save again; then the same, with a close instead of a save."""
    for way in ("the next save", "close") if library == "milepost" else ("the next save",):
        saver = milepost.AsyncSaver(background=background) if library == "milepost" else None
        begin(saver, state_of(rank, 1), folder / "file" / "a")
        time.sleep(0.2)
        try:
            saver.close() if saver and way == "close" else begin(saver, state_of(rank, 2), folder / "b").result()
            rank.say("ending", f"{way} did not report the unread failure")
        except milepost.CheckpointError:
            rank.say("ending", f"{way} reported the unread failure")


def two_saves(rank: Rank, library: Library, background: str, folder: Path) -> None:
    """Begin two saves to one place at once, several times."""
    saver = milepost.AsyncSaver(background=background) if library == "milepost" else None
    for number in range(10):
        pending, failed = [begin(saver, state_of(rank, mine), folder / str(number)) for mine in (1, 2)], ""
        for one in pending:
            try:
                one.result()
            except (Exception, CheckpointException):
                failed = ", and a save failed"
        found = kit.found_at(library, folder / str(number))
        there = {1: "left the first", 2: "left the second", "absent": "left no metadata"}.get(found, f"left it {found}")
        rank.say("ending", f"two at once {there}{failed}")


def keep_async(rank: Rank, library: Library, background: str, folder: Path) -> None:
    """Save in the background, each state to its own place, until killed. A save that ended must stay there."""
    saver = milepost.AsyncSaver(background=background) if library == "milepost" else None
    if saver is not None:
        saver.prewarm(state_of(rank, 0))
    for number in itertools.count(1):
        rank.say("begun", number)
        pending = begin(saver, state_of(rank, number), folder / str(number))
        pending.wait_staged() if background == "process" else pending.result()
        rank.say("ended", number)


def writers_of(trainer: int | None) -> list[int]:
    """The writing processes that a trainer started, even if the trainer is dead."""
    found = []
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with contextlib.suppress(OSError):
            words = path.read_bytes().split(b"\0")
            if b"milepost.background.process.server" in b"".join(words) and words[-2] == str(trainer).encode():
                found.append(int(path.parent.name))
    return found


def in_trainer(work: Callable[..., None], library: Library, background: str, folder: Path, moment_s: float) -> list:
    """Run work in a trainer and return its endings. With `moment_s` it is killed then, and its places are examined."""
    folder.mkdir()
    (folder / "file").touch()  # nothing can be saved below it
    with Job(1, work, library, background, folder) as job:
        if moment_s:
            job.await_all("ended")
            time.sleep(moment_s)
            job.kill()
        else:
            job.await_all("returned")
        deadline = time.monotonic() + kit.START_S
        while (left := writers_of(job.processes[0].pid)) and time.monotonic() < deadline:
            time.sleep(0.05)
    for pid in left:
        os.kill(pid, signal.SIGKILL)
    if moment_s:
        ending = kit.step_by_step(library, folder, job.newest("ended"), job.newest("begun"))
        return [f"trainer killed: {ending}", *(["a writing process was left"] if left else [])]
    return [words[1] for words in job.said[0] if words[0] == "ending"]


SCRIPT = """
import sys, torch
state = {"t": torch.ones(3)}
if sys.argv[1] == "dcp":
    import torch.distributed.checkpoint as dcp
    dcp.async_save(state, checkpoint_id=sys.argv[2], no_dist=True)
else:
    import milepost
    milepost.AsyncSaver(background=sys.argv[1]).save(state, sys.argv[2])
"""


def at_exit(kind: str, folder: Path) -> list[str]:
    """How a script ends if its only save fails, and it does not ask for the result."""
    (folder / f"file-{kind}").touch()
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, kind, str(folder / f"file-{kind}" / "a")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    reported = "Error" in done.stderr or "failed" in done.stderr
    return [f"the exit {'reported' if reported else 'did not report'} the unread failure"]


def in_the_background(full: bool, folder: Path) -> FaultRow:
    """22: unread failures, two saves at once, and trainers that are killed."""
    chance, ours, theirs = random.Random(3), Counting(), Counting()
    kinds: list[tuple[Library, str]] = [("milepost", "thread"), ("milepost", "process"), ("dcp", "thread")]
    trials: list[tuple[Any, ...]] = [
        (at_exit, kind, folder) for kind in (("thread", "dcp", "process")[: 3 if full else 1])
    ]
    for library, background in kinds:
        name = f"{library}-{background}"
        if full or background == "thread":
            trials += [(in_trainer, unread_failure, library, background, folder / f"{name}-unread", 0.0)]
            trials += [(in_trainer, two_saves, library, background, folder / f"{name}-two", 0.0)]
            for i in range((20 if background == "thread" else 6) if full else 1):
                place, moment_s = folder / f"{name}-killed-{i}", chance.uniform(0.001, kit.SPAN_S)
                trials.append((in_trainer, keep_async, library, background, place, moment_s))
    for trial, endings in spread(lambda how, *rest: how(*rest), trials, 4):
        (theirs if "dcp" in trial[:3] else ours).counts.update(endings)
    good = frozenset(f"{who} reported the unread failure" for who in ("the next save", "close", "the exit"))
    good |= {"two at once left the second", f"trainer killed: {kit.ALL}", f"trainer killed: {kit.EARLIER}"}
    how = "one process that saves with a thread and with a writing process; DCP with a thread"
    return FaultRow(22, "saves in the background", how, ours.tally, good, theirs.tally)


# A reader


def keep_steps(rank: Rank, folder: Path) -> None:
    """Save step after step until killed. Only the last step is kept."""
    with milepost.Checkpointer(folder, keep_last=1, no_dist=True) as steps:
        for number in itertools.count(1):
            steps.save(state_of(rank, number), number)
            rank.say("ended", number)


def read_meanwhile(job: Job, opens: int, ways: list[Callable[[], dict[str, Any]]], counting: Counting) -> None:
    """Read repeatedly, with each of the ways in turn, what the only rank of a job keeps saving."""
    job.await_all("ended")
    before = 0
    for number in range(opens):
        found = kit.look(ways[number % len(ways)])
        counting.add(found if isinstance(found, str) else "whole" if found >= before else "older than before")
        before = before if isinstance(found, str) else found
        while (words := job.hear(0, 0.0)) is not None:
            if words[0] in ("raised", "died"):
                raise kit.RankFailed(f"the writer ended: {words}")


def a_reader_meanwhile(full: bool, folder: Path) -> FaultRow:
    """25: a reader during overwrites, and while old steps are removed."""
    opens, ours, theirs = 2000 if full else 40, Counting(), Counting()
    place, root, other = folder / "read", folder / "steps", folder / "read-dcp"

    def opened(checkpoint: milepost.Checkpoint) -> dict[str, Any]:
        with checkpoint:
            return checkpoint.state()

    def restored() -> dict[str, Any]:
        found = target()
        steps.restore(found)
        return found

    with Job(1, kit.keep_saving, "milepost", place, False) as job:
        read_meanwhile(job, opens, [lambda: opened(milepost.open(place)), lambda: milepost.load(target(), place)], ours)
    note = f"during overwrites alone: {ours.tally.text}"
    logging.getLogger("milepost").setLevel(logging.ERROR)  # restore logs the steps that it skips
    try:
        with Job(1, keep_steps, root) as job, milepost.Checkpointer(root, no_dist=True) as steps:
            read_meanwhile(job, opens, [lambda: opened(steps.open()), restored], ours)
    finally:
        logging.getLogger("milepost").setLevel(logging.NOTSET)
    with Job(1, kit.keep_saving, "dcp", other, False) as job:
        read_meanwhile(job, opens // 4, [lambda: kit.load_by_dcp(other)], theirs)
    good = frozenset({"whole", "absent", "reported as replaced"})
    how = "as many opens during overwrites as during saves with keep_last=1; every element is checked"
    return FaultRow(25, "a reader during saves and retention", how, ours.tally, good, theirs.tally, note)
