"""Faults by SIGKILL, and by other jobs at the same place: what is there afterwards, for Milepost and for DCP.

Every trial has its own ranks, forked by a server that has imported torch. None of them outlives the trial. Each rank
saves states in which every element is the number of the save, and reports each save that it begins and ends. So a
mixture of two saves can be detected.
"""

import ctypes
import itertools
import logging
import multiprocessing
import os
import pickle
import random
import re
import shutil
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, Literal, Self

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Shard

import milepost
from faults.rows import Counting, FaultRow, Tally
from milepost.comm import Solo

Library = Literal["milepost", "dcp"]
WORLD = 4
TENSORS, ELEMENTS = 8, 16 << 10
START_S = 60.0
SPAN_S = 0.15
"""A kill comes at a random moment of this span, in which there are several saves."""
DEADLINE_S = 2.0
HANG_S = 2 * DEADLINE_S + 2.0
"""A rank that has not ended by then hangs. Waiting for a dead coordinator takes up to twice the deadline."""
# The compiler too: the first DTensor imports it, which would take each rank seconds.
PRELOAD = ["milepost.api", "torch.distributed.checkpoint", "torch.distributed.tensor", "torch._dynamo"]
ALL, EARLIER = "all whole", "earlier ones whole, the last recognised as unfinished"
_DIE_WITH_PARENT = 1  # PR_SET_PDEATHSIG
_QUIETLY = threading.Lock()  # filters for warnings apply to all threads
_REPLACED = re.compile("replaced|removed|changes too fast")


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The faults of this module."""
    yield all_killed(full, folder, new_places=False)
    yield one_rank_killed(full, folder)
    yield all_killed(full, folder, new_places=True)
    yield two_jobs(full, folder)


# Ranks


class RankFailed(Exception):
    """A rank ended before the trial began."""


class Rank:
    """What the work of a rank gets: its rank, and a way to report to the trial."""

    def __init__(self, rank: int, world: int, wire: Connection) -> None:
        self.rank, self.world, self._wire = rank, world, wire
        self.mesh: DeviceMesh | None = init_device_mesh("cpu", (world,)) if world > 1 else None

    def say(self, *words: Any) -> None:
        """Report to the trial at once: the report arrives even if this process is killed right after."""
        self._wire.send_bytes(pickle.dumps(words))


class Job:
    """Ranks that run `work(rank, *args)`. `with Job(...) as job`: none of them outlives the block."""

    def __init__(self, world: int, work: Callable[..., None], *args: Any) -> None:
        context = multiprocessing.get_context("forkserver")
        context.set_forkserver_preload(PRELOAD)
        self.world = world
        # The store lives in this process, as in a job with a launcher: it outlives any rank.
        self._store = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False) if world > 1 else None
        port = self._store.port if self._store else 0
        pipes = [context.Pipe(duplex=False) for _ in range(world)]
        self._wires = [here for here, _ in pipes]
        self.said: list[list[tuple[Any, ...]]] = [[] for _ in range(world)]
        self.processes = [
            context.Process(target=_run, args=(rank, world, port, there, work, args), daemon=True)
            for rank, (_, there) in enumerate(pipes)
        ]
        for process, (_, there) in zip(self.processes, pipes, strict=True):
            process.start()
            there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.kill()
        for wire in self._wires:
            wire.close()

    def hear(self, rank: int, within_s: float) -> tuple[Any, ...] | None:
        """The next report of a rank, ("died",) after the last one; None if it is silent until the timeout."""
        try:
            if not self._wires[rank].poll(max(within_s, 0.0)):
                return None
            words = pickle.loads(self._wires[rank].recv_bytes())
        except (EOFError, OSError):
            return ("died",)
        self.said[rank].append(words)
        return words

    def await_all(self, word: str, within_s: float = START_S) -> None:
        """Return when every rank has reported this word. Raises RankFailed if a rank ended before."""
        deadline = time.monotonic() + within_s
        for rank in range(self.world):
            while (words := self.hear(rank, deadline - time.monotonic())) is None or words[0] != word:
                if words is None or words[0] in ("raised", "died"):
                    raise RankFailed(f"rank {rank}: {words or 'silent'}")

    def last_words(self, rank: int, deadline: float) -> tuple[Any, ...] | None:
        """How a rank ends: ("raised", kind, text), ("returned",) or ("died",); None if it does not in time."""
        while (words := self.hear(rank, deadline - time.monotonic())) is not None:
            if words[0] in ("raised", "returned", "died"):
                return words
        return None

    def kill(self, *ranks: int) -> None:
        """Send SIGKILL to these ranks (default: all) at once. Reports sent before are kept."""
        chosen = ranks or range(self.world)
        for rank in chosen:
            self.processes[rank].kill()
        for rank in chosen:
            self.processes[rank].join()
            self.last_words(rank, 0.0)

    def newest(self, word: str) -> int:
        """The highest number that a rank reported with this word."""
        return max((words[1] for said in self.said for words in said if words[0] == word), default=0)


def _run(rank: int, world: int, port: int, wire: Connection, work: Callable[..., None], args: tuple[Any, ...]) -> None:
    ctypes.CDLL(None).prctl(_DIE_WITH_PARENT, int(signal.SIGKILL))
    os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
    warnings.simplefilter("ignore")
    logging.disable(logging.CRITICAL)
    torch.set_num_threads(1)
    if world > 1:
        os.environ["GLOO_SOCKET_IFNAME"] = "lo"
        store = dist.TCPStore("127.0.0.1", port, is_master=False)
        dist.init_process_group("gloo", store=store, rank=rank, world_size=world)
    here = Rank(rank, world, wire)
    try:
        work(here, *args)
        here.say("returned")
    except BaseException as error:
        here.say("raised", type(error).__name__, str(error))
    os._exit(0)  # other ranks may have failed, so there is no collective end


def spread(work: Callable[..., Any], trials: list[tuple[Any, ...]], at_once: int) -> Iterator[tuple[Any, Any]]:
    """Each trial with the result of `work(*trial)`, in order. `at_once` trials run at a time."""
    with ThreadPoolExecutor(at_once) as pool:
        futures = [pool.submit(work, *trial) for trial in trials]
        try:
            for trial, future in zip(trials, futures, strict=True):
                yield trial, future.result()
        finally:
            pool.shutdown(cancel_futures=True)


# States


def state_of(rank: Rank, number: int) -> dict[str, Any]:
    """Tensors of 64 KB in which every element is `number`. On several ranks, half of them are sharded."""
    found: dict[str, Any] = {"n": number}
    for i in range(TENSORS):
        if rank.mesh is not None and i % 2:
            local = torch.full((ELEMENTS // rank.world,), float(number))
            found[f"t{i}"] = DTensor.from_local(local, rank.mesh, [Shard(0)], run_check=False)
        else:
            found[f"t{i}"] = torch.full((ELEMENTS,), float(number))
    return found


def target() -> dict[str, Any]:
    """A state of one process to load into."""
    return {"n": 0, **{f"t{i}": torch.zeros(ELEMENTS) for i in range(TENSORS)}}


def load_by_dcp(where: Path) -> dict[str, Any]:
    """What DCP loads in one process."""
    found = target()
    with _QUIETLY, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp.load(found, checkpoint_id=str(where), no_dist=True)
    return found


def look(load: Callable[[], dict[str, Any]]) -> int | str:
    """The number that every loaded element has; or "mixed", "absent", "reported as replaced", "unloadable"."""
    try:
        found = load()
    except (Exception, CheckpointException) as error:
        if isinstance(error, milepost.CheckpointError) and _REPLACED.search(str(error)):
            return "reported as replaced"
        return "absent" if isinstance(error, milepost.CheckpointNotFound) else "unloadable"
    tensors = [value for value in found.values() if isinstance(value, torch.Tensor)]
    whole = len(tensors) == TENSORS and all(bool((tensor == found["n"]).all()) for tensor in tensors)
    return found["n"] if whole else "mixed"


def found_at(library: Library, where: Path) -> int | str:
    """What a library finds at a place; see `look`."""
    if library == "milepost":
        return look(lambda: milepost.load(target(), where))
    return look(lambda: load_by_dcp(where)) if (where / ".metadata").exists() else "absent"


def old_or_new(library: Library, where: Path, ended: int, begun: int) -> str:
    """The state of a place after the saves up to `begun` began, and those up to `ended` ended."""
    found = found_at(library, where)
    if isinstance(found, str):
        return "unloadable" if found == "absent" else found
    if not ended <= found <= begun:
        return "lost"
    return "old" if found == ended else "new"


# Ranks that are killed


def keep_saving(rank: Rank, library: Library, folder: Path, new_places: bool) -> None:
    """Save new states until killed, all to one place or each to its own."""
    plans = milepost.Plans()
    for number in itertools.count(1):
        where = folder / str(number) if new_places else folder
        state = state_of(rank, number)
        rank.say("begun", number)
        if library == "dcp":
            dcp.save(state, checkpoint_id=str(where), no_dist=rank.world == 1)
        else:
            # The first save takes longer. Later ones take turns: with kept plans, and without.
            known, timeout_s = plans if number % 4 < 2 else None, START_S if number == 1 else DEADLINE_S
            milepost.save(state, where, plans=known, timeout_s=timeout_s)
        rank.say("ended", number)


def kill_all(library: Library, world: int, folder: Path, moment_s: float, new_places: bool) -> tuple[int, int]:
    """Kill all ranks at some moment after the first save. Returns the newest save that ended, and that began."""
    with Job(world, keep_saving, library, folder, new_places) as job:
        job.await_all("ended")
        time.sleep(moment_s)
        job.kill()
        return job.newest("ended"), job.newest("begun")


def kill_trials(
    library: Library, count: int, folder: Path, new_places: bool, ending: Callable[[Library, Path, int, int], str]
) -> tuple[Tally, int]:
    """How `count` trials end, half of them with one rank; and how many were killed within a save."""
    chance, counting, within, trials = random.Random(1), Counting(), 0, []
    for i in range(count):
        where, moment_s = folder / f"{library}-{i}", chance.uniform(0.0, SPAN_S)
        trials.append((library, (1, WORLD)[i % 2], where, moment_s, new_places))
    for (_, _, where, _, _), (ended, begun) in spread(kill_all, trials, 3):
        counting.add(ending(library, where, ended, begun))
        within += begun > ended
        shutil.rmtree(where)
    return counting.tally, within


def step_by_step(library: Library, folder: Path, ended: int, begun: int) -> str:
    """The state of separate places: those of saves that ended, and the place of the last one."""
    if any(found_at(library, folder / str(number)) != number for number in range(1, ended + 1)):
        return "an earlier one lost"
    found = {found_at(library, folder / str(number)) for number in range(ended + 1, begun + 1)} - {"absent"}
    if not found <= set(range(ended + 1, begun + 1)):
        return "the last half there"
    return ALL if found or begun == ended else EARLIER


def all_killed(full: bool, folder: Path, new_places: bool) -> FaultRow:
    """1 and 3: SIGKILL of all ranks while they overwrite a checkpoint, or save to new places."""
    count = (60 if new_places else 200) if full else 2
    number, where, ending, good = 1, "an overwrite", old_or_new, {"old", "new"}
    if new_places:
        number, where, ending, good = 3, "saves into new places", step_by_step, {ALL, EARLIER}
    ours, within = kill_trials("milepost", count, folder, new_places, ending)
    theirs, theirs_within = kill_trials("dcp", count, folder, new_places, ending)
    note = f"within a save: {within} of Milepost's kills, {theirs_within} of DCP's"
    fault, how = f"all ranks killed during {where}", "at a random moment, 1 and 4 ranks"
    return FaultRow(number, fault, how, ours, frozenset(good), theirs, note)


def names(text: str, rank: int) -> bool:
    """Whether an error names a rank, in Milepost's words or in DCP's."""
    return re.search(rf"\branks?(?::dict_keys\(\[| )(?:[\d, -]*\b)?{rank}\b", text) is not None


def kill_one(library: Library, victim: int, folder: Path, moment_s: float, lanes: threading.Semaphore) -> tuple:
    """Kill one rank and let the others end. Returns what `kill_all` returns, and how the others ended."""
    lanes.acquire()  # only while ranks are busy: any number of jobs can wait at once
    with Job(WORLD, keep_saving, library, folder, False) as job:
        try:
            job.await_all("ended")
            time.sleep(moment_s)
            job.kill(victim)
        finally:
            lanes.release()
        deadline = time.monotonic() + HANG_S
        ends = [job.last_words(rank, deadline) for rank in range(WORLD) if rank != victim]
        named = all(end and end[0] == "raised" and names(end[2], victim) for end in ends)
        others = "name the rank" if named else "do not name the rank" if all(ends) else "hang"
        return job.newest("ended"), job.newest("begun"), f"others {others}"


def one_rank_killed(full: bool, folder: Path) -> FaultRow:
    """2: SIGKILL of one of four ranks."""
    chance, lanes = random.Random(2), threading.Semaphore(2)
    counting = {"milepost": Counting(), "dcp": Counting()}
    victims = [i % WORLD for i in range(100)] if full else [1, 2]
    trials = [
        (library, victim, folder / f"{library}-one-{i}", chance.uniform(0.0, SPAN_S), lanes)
        for i, victim in enumerate(victims)
        for library in counting
    ]
    for (library, _, where, _, _), (ended, begun, others) in spread(kill_one, trials, 10):
        counting[library].add(f"{old_or_new(library, where, ended, begun)}, {others}")
        shutil.rmtree(where)
    good = frozenset({"old, others name the rank", "new, others name the rank"})
    how = f"at a random moment of an overwrite, with timeout_s={DEADLINE_S}"
    note = f"A rank that still runs after {HANG_S:.0f} s hangs."
    return FaultRow(2, "one of 4 ranks killed", how, counting["milepost"].tally, good, counting["dcp"].tally, note)


# Other jobs at the same place


def save_at_once(rank: Rank, library: Library, folder: Path, rounds: int) -> None:
    """One job: save three times to the place of each round, at the same time as the other jobs."""
    for number in range(rounds):
        where = folder / str(number)
        dist.barrier()
        for again in range(3):
            mine = (number * 3 + again) * rank.world + rank.rank + 1
            state = {"n": mine, **{f"t{i}": torch.full((ELEMENTS,), float(mine)) for i in range(TENSORS)}}
            try:
                if library == "dcp":
                    dcp.save(state, checkpoint_id=str(where), no_dist=True)
                generation = milepost.save(state, where, process_group=Solo()).generation if library != "dcp" else 0
                rank.say("saved", mine, number, generation)
            except milepost.SaveConflict:
                rank.say("conflict", mine, number)
            except (Exception, CheckpointException) as error:
                rank.say("error", mine, number, f"{type(error).__name__}: {error}")


def round_ending(library: Library, where: Path, said: list[tuple[Any, ...]]) -> str:
    """How one round ended, from the reports of all writers."""
    errors, saved = ([s for s in said if s[0] == word] for word in ("error", "saved"))
    found = found_at(library, where)
    if isinstance(found, str):
        return f"{found} in the end"
    if errors:
        return f"whole in the end, but a writer failed with {errors[0][3].split(':')[0]}"
    if library == "dcp":
        return "whole in the end, losers not told"
    if len({s[3] for s in saved}) != len(saved):
        return "two winners of one generation"
    newest = max(saved, key=lambda s: s[3])
    return "one winner each generation, the newest there" if newest[1] == found else "the newest lost"


def two_jobs(full: bool, folder: Path) -> FaultRow:
    """24: jobs that save to one place at once."""
    rounds, tallies, note = 20 if full else 2, {}, ""
    for library in ("milepost", "dcp"):
        counting, where = Counting(), folder / f"{library}-at-once"
        with Job(8, save_at_once, library, where, rounds) as job:
            job.await_all("returned")
            said = [words for one in job.said for words in one if words[0] != "returned"]
        for number in range(rounds):
            counting.add(round_ending(library, where / str(number), [s for s in said if s[2] == number]))
        if library == "milepost":
            kinds = [words[0] for words in said]
            note = f"{kinds.count('saved')} saves won a generation, {kinds.count('conflict')} got SaveConflict"
        shutil.rmtree(where)
        tallies[library] = counting.tally
    how, good = "8 writers save 3 times each, at once", frozenset({"one winner each generation, the newest there"})
    return FaultRow(24, "jobs that save to one place at once", how, tallies["milepost"], good, tallies["dcp"], note)
