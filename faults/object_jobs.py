"""Jobs that save to an object store: ranks are killed at random moments, and eight writers race for one place."""

import itertools
import os
import random
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint._fsspec_filesystem import FsspecReader, FsspecWriter

import milepost
from faults.kills import ELEMENTS, TENSORS, Job, Rank, look, state_of, target
from faults.object_lab import DCP, ERRORS, MILEPOST, Library, ObjectLab, Place, why_not, why_not_dcp
from faults.rows import Counting, FaultRow, Tally
from faults.servers.object_server import BUCKET
from milepost.comm import Solo

WORLD = 4
WRITERS = 8
SPAN_S = {"milepost": 0.5, "dcp": 2.0}
"""A kill comes at a random moment of this span, in which there are a few saves."""
ONE_WINNER = "one winner each generation, the newest there"
TITLES = {
    44: "object store: eight writers race for one place",
    45: "object store: ranks are killed",
}


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 44 and 45."""
    if why_not():
        for number, title in TITLES.items():
            yield FaultRow(number, title, "", Tally({}), frozenset(), note=why_not() or "")
        return
    with ObjectLab(folder) as lab:
        yield races(lab, full)
        yield killed(lab, full)


def save_to(name: str, state: dict[str, Any], place: Place, *, alone: bool) -> int:
    """Save by this library; the generation that Milepost gives it."""
    if name == "milepost":
        return milepost.save(state, place.url, process_group=Solo() if alone else None).generation
    writer = FsspecWriter(f"s3://{BUCKET}/{place.prefix}", **place.fsspec)
    dcp.save(state, storage_writer=writer, no_dist=alone)
    return 0


def found_at(name: str, place: Place) -> int | str:
    """The number that loads from a place; or "mixed", "absent", "unloadable"."""
    if name == "milepost":
        return look(lambda: milepost.load(target(), place.url))

    def load() -> dict[str, Any]:
        found = target()
        reader = FsspecReader(f"s3://{BUCKET}/{place.prefix}", **place.fsspec)
        dcp.load(found, storage_reader=reader, no_dist=True)
        return found

    return look(load)


# --- row 44


def race(rank: Rank, name: str, places: list[Place], environment: dict[str, str]) -> None:
    """Save to each place at the same time as the others."""
    os.environ.update(environment)
    for number, place in enumerate(places):
        mine = number * rank.world + rank.rank + 1
        state = {"n": mine, **{f"t{i}": torch.full((ELEMENTS,), float(mine)) for i in range(TENSORS)}}
        dist.barrier()
        try:
            rank.say("saved", mine, number, save_to(name, state, place, alone=True))
        except milepost.SaveConflict:
            rank.say("conflict", mine, number)
        except ERRORS as error:
            rank.say("error", mine, number, type(error).__name__)
        dist.barrier()


def races(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 44."""
    missing, rounds = why_not_dcp(), 12 if full else 1
    ours, note = race_tally(lab, rounds, MILEPOST)
    theirs = None if missing else race_tally(lab, rounds, DCP)[0]
    good, how = frozenset({ONE_WINNER}), f"{WRITERS} processes save to one new place at once"
    return FaultRow(44, TITLES[44], how, ours, good, theirs, f"{note}. {missing or ''}".strip())


def race_tally(lab: ObjectLab, rounds: int, library: Library) -> tuple[Tally, str]:
    """How the rounds ended, and how many saves succeeded."""
    places = [lab.places(timeout_s=20.0)[1] for _ in range(rounds)]
    with Job(WRITERS, race, library.name, places, lab.server.environment) as job:
        job.await_all("returned", 30.0 * (rounds + 2))
        said = [words for one in job.said for words in one if words[0] != "returned"]
    counting = Counting()
    for number, place in enumerate(places):
        counting.add(_race_ending(lab, library, place, [words for words in said if words[2] == number]))
    kinds = [words[0] for words in said]
    return counting.tally, f"{kinds.count('saved')} saves won a generation, {kinds.count('conflict')} got SaveConflict"


def _race_ending(lab: ObjectLab, library: Library, place: Place, said: list[tuple[Any, ...]]) -> str:
    found = found_at(library.name, place)
    if isinstance(found, str):
        return f"{found} in the end"
    if errors := [words[3] for words in said if words[0] == "error"]:
        return f"whole in the end, but a writer failed with {errors[0]}"
    if library.name == "dcp":
        return "whole in the end, losers not told"
    saved = [words for words in said if words[0] == "saved"]
    if len({words[3] for words in saved}) != len(saved):
        return "two winners of one generation"
    if max(saved, key=lambda words: words[3])[1] != found:
        return "the newest lost"
    return ONE_WINNER + lab.left_by_the_next(library, place)


# --- row 45


def keep_saving(rank: Rank, name: str, place: Place, environment: dict[str, str]) -> None:
    """Save new states to one place until killed."""
    os.environ.update(environment)
    for number in itertools.count(1):
        state = state_of(rank, number)
        rank.say("begun", number)
        save_to(name, state, place, alone=False)
        rank.say("ended", number)


def killed(lab: ObjectLab, full: bool) -> FaultRow:
    """Row 45."""
    missing = why_not_dcp()
    ours = kill_tally(lab, MILEPOST, 40 if full else 1)
    theirs = None if missing else kill_tally(lab, DCP, 12 if full else 1)
    how = (
        f"SIGKILL of one rank or of all {WORLD} ranks at a random moment, while they save to one place again and again"
    )
    note = missing or "Then another job saves; nothing else is left."
    return FaultRow(45, TITLES[45], how, ours, frozenset({"old", "new"}), theirs, note)


def kill_tally(lab: ObjectLab, library: Library, count: int) -> Tally:
    """How so many trials end."""
    chance, counting = random.Random(45), Counting()
    for number in range(count):
        _, place = lab.places()
        with Job(WORLD, keep_saving, library.name, place, lab.server.environment) as job:
            job.await_all("ended")
            time.sleep(chance.uniform(0.0, SPAN_S[library.name]))
            if number % 2:
                job.kill(chance.randrange(WORLD))
                time.sleep(0.1)  # the others go on, or fail
            job.kill()
            ended, begun = job.newest("ended"), job.newest("begun")
        counting.add(_kill_ending(lab, library, place, ended, begun))
    return counting.tally


def _kill_ending(lab: ObjectLab, library: Library, place: Place, ended: int, begun: int) -> str:
    found = found_at(library.name, place)
    if isinstance(found, str):
        return "unloadable" if found == "absent" else found
    if not ended <= found <= begun:
        return "lost"
    left = lab.left_by_the_next(library, place) if library.name == "milepost" else ""
    lab.server.remove(place.prefix)
    return ("old" if found == ended else "new") + left
