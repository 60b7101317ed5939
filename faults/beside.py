"""One folder, two libraries: Milepost and DCP save to the same place in turn, as programs with fixed names do."""

import itertools
import logging
import shutil
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.rows import Counting, FaultRow

Turn = str
"""Who saves: "m" for Milepost, "d" for DCP."""


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Row 33."""
    logs = [logging.getLogger("milepost"), logging.root]
    levels = [log.level for log in logs]
    try:
        for log in logs:
            log.setLevel(logging.CRITICAL)
        with warnings.catch_warnings(action="ignore"):
            yield both_saved(full, folder)
    finally:
        for log, level in zip(logs, levels, strict=True):
            log.setLevel(level)


def state_of(number: int) -> dict[str, torch.Tensor]:
    """A state full of this number."""
    return {"weight": torch.full((64, 8), float(number)), "step": torch.tensor(number)}


def save_by_milepost(number: int, place: Path) -> None:
    """Save with Milepost."""
    milepost.save(state_of(number), place)


def save_by_dcp(number: int, place: Path) -> None:
    """Save with DCP."""
    dcp.save(state_of(number), storage_writer=dcp.FileSystemWriter(place, sync_files=False), no_dist=True)


def load_by_milepost(place: Path) -> set[float]:
    """The numbers that Milepost finds."""
    target = state_of(0)
    milepost.load(target, place)
    return {float(x) for value in target.values() for x in value.unique()}


def load_by_dcp(place: Path) -> set[float]:
    """The numbers that DCP finds."""
    target = state_of(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(place), no_dist=True)
    return {float(x) for value in target.values() for x in value.unique()}


def ending(load: Callable[[Path], set[float]], newest: int, place: Path) -> str:
    """What a load gives: the newest state, an older one, or an error."""
    try:
        found = load(place)
    except (Exception, CheckpointException):
        return "refused"
    return "newest" if found == {float(newest)} else "older, silently" if len(found) == 1 else "mixed"


def both_saved(full: bool, folder: Path, save: Callable[[int, Path], None] = save_by_milepost) -> FaultRow:
    """Row 33: every order of saves up to a length, after each of which both libraries load.

    DCP's count has the folders to which DCP saved last, and Milepost's the others. So each answers for what its own
    save leaves for both readers.
    """
    ours, theirs = Counting(), Counting()
    for length in range(2, 6 if full else 4):
        for turns in itertools.product("md", repeat=length):
            if len(set(turns)) < 2:
                continue
            place = folder / "".join(turns)
            for number, turn in enumerate(turns, 1):
                (save if turn == "m" else save_by_dcp)(number, place)
            counting = ours if turns[-1] == "m" else theirs
            counting.add(f"Milepost: {ending(load_by_milepost, length, place)}")
            counting.add(f"DCP: {ending(load_by_dcp, length, place)}")
            shutil.rmtree(place)
    how = (
        "both libraries save to one folder, in every order, and then both load; the column is that of the library "
        "that saved last"
    )
    note = '"refused": an error that says so, or that there is no checkpoint.'
    good = frozenset({"Milepost: newest", "Milepost: refused", "DCP: newest", "DCP: refused"})
    return FaultRow(33, "Milepost and DCP in one folder", how, ours.tally, good, theirs.tally, note)
