"""Faults of a network file system, for Milepost and for DCP: replies are lost, calls fail, clients believe old things.

The file system is `netfs`: real mounts, with one client that saves and another one that reads. Every save is over an
older one.
"""

import contextlib
import errno
import itertools
import logging
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import NamedTuple

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.netfs import NetworkFiles, why_not
from faults.rows import Counting, FaultRow, Tally

OLD, NEW = 1, 2
ITEMS = 1 << 14
CHANGES = ("link", "symlink", "create", "mkdir", "rename", "unlink", "rmdir")
CALLS = (*CHANGES, "make", "open", "opendir", "readdir", "flush", "fsync", "fsyncdir", "store")
ERRORS = (errno.EIO, errno.ESTALE, errno.EDQUOT)
BELIEVED_S = 0.2
PAUSE_S = 0.05
REPLACED = "told that it was replaced"
_ERRORS = (Exception, CheckpointException)  # DCP's own is not an Exception
_GOOD = frozenset({"saved, new loads", "raised, old loads", "raised, new loads"})
_BROKEN = "a call fails, or its reply is lost, on a network file system"
_BELIEVED = "loads by a client that believes old things, while another one saves"


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 34 and 35."""
    if why_not():
        for number, fault in ((34, _BROKEN), (35, _BELIEVED)):
            yield FaultRow(number, fault, "", Tally({}), frozenset(), note=why_not() or "")
        return
    yield broken_calls(full, folder)
    yield old_beliefs(full, folder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's warnings that there is no process group, and without logs of what cannot be read or swept."""
    logging.disable(logging.CRITICAL)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        logging.disable(logging.NOTSET)


class Library(NamedTuple):
    """How to save a state, and how to read it back."""

    save: Callable[[dict[str, torch.Tensor], Path], object]
    load: Callable[[dict[str, torch.Tensor], Path], object]


LIBRARIES = {
    "milepost": Library(milepost.save, milepost.load),
    "dcp": Library(
        lambda state, place: dcp.save(state, checkpoint_id=place, no_dist=True),
        lambda state, place: dcp.load(state, checkpoint_id=place, no_dist=True),
    ),
}


def state(number: int) -> dict[str, torch.Tensor]:
    """A state in which every element is this number."""
    return {name: torch.full((ITEMS,), number) for name in ("first", "second")}


def found(library: Library, place: Path) -> str:
    """What a load gives: the number in all elements, "a mixture", or what its error says: REPLACED, or "nothing"."""
    target = state(-1)
    try:
        library.load(target, place)
    except _ERRORS as error:
        return REPLACED if "replaced" in str(error) else "nothing"
    numbers = torch.cat(list(target.values())).unique().tolist()
    return str(numbers[0]) if len(numbers) == 1 else "a mixture"


# --- row 34


@_quietly()
def broken_calls(full: bool, folder: Path) -> FaultRow:
    """Every call of a save is broken in every way, one at a time; few of them if not `full`."""
    tallies = {name: _broken_calls(library, folder / name, full) for name, library in LIBRARIES.items()}
    return FaultRow(
        34,
        _BROKEN,
        "A FUSE file system answers one call of a save with an error, or makes it and answers as NFS answers a "
        "repeated request; with and without hard links. Another client reads. If the save returned, the server then "
        "crashes.",
        tallies["milepost"],
        _GOOD,
        tallies["dcp"],
    )


def _broken_calls(library: Library, folder: Path, full: bool) -> Tally:
    counting = Counting()
    for links in (True, False):
        with NetworkFiles(folder / f"links-{links}", clients=2) as network:
            if not links:
                network.without_links()
            for call in CHANGES:
                _break_each(network, library, call, None, 1, counting)
            for error, call in itertools.product(ERRORS if full else ERRORS[:1], CALLS):
                _break_each(network, library, call, error, 1 if full else 5, counting)
    return counting.tally


def _break_each(
    network: NetworkFiles, library: Library, call: str, error: int | None, each: int, counting: Counting
) -> None:
    """Break the first such call of a save, then another one `each` calls later, until there are no more."""
    for skip in itertools.count(step=each):
        name = Path(f"{call}-{error}-{skip}", "step")
        library.save(state(OLD), network.client / name)
        before = network.hits
        if error is None:
            network.lose_reply(call, skip=skip)
        else:
            network.fail(call, error, skip=skip)
        try:
            library.save(state(NEW), network.client / name)
            ended = "saved"
        except _ERRORS:
            ended = "raised"
        network.heal()
        if network.hits == before:
            return
        counting.add(f"{ended}, {_ending(network, library, network.clients[1] / name, ended)}")


def _ending(network: NetworkFiles, library: Library, place: Path, ended: str) -> str:
    names = {str(OLD): "old loads", str(NEW): "new loads"}
    now = found(library, place)
    if ended == "saved" and now == str(NEW):
        network.crash()
        if found(library, place) != now:
            return "a crash of the server loses it"
    return names.get(now, f"{now} loads")


# --- row 35


@_quietly()
def old_beliefs(full: bool, folder: Path) -> FaultRow:
    """One client saves all the time, another one loads all the time."""
    seconds = 20.0 if full else 1.0
    tallies = {name: _old_beliefs(library, folder / name, seconds) for name, library in LIBRARIES.items()}
    return FaultRow(
        35,
        _BELIEVED,
        f"Two clients of a FUSE file system, which believe what they have seen for {BELIEVED_S} s: names, attributes, "
        f"listings. One saves over one place for {seconds:g} s, the other loads from it.",
        tallies["milepost"],
        frozenset({"whole", REPLACED}),
        tallies["dcp"],
    )


def _old_beliefs(library: Library, folder: Path, seconds: float) -> Tally:
    counting, ended = Counting(), threading.Event()
    with NetworkFiles(folder / "believed", clients=2) as network:
        one, other = (client / "step" for client in network.clients)
        network.believe(attributes_s=BELIEVED_S, names_s=BELIEVED_S, absence_s=BELIEVED_S, listings_s=BELIEVED_S)
        library.save(state(0), one)

        def keep_saving() -> None:
            for number in itertools.count(1):
                if ended.is_set():
                    return
                with contextlib.suppress(*_ERRORS):  # counted by what is read
                    library.save(state(number), one)
                time.sleep(PAUSE_S)

        thread = threading.Thread(target=keep_saving)
        thread.start()
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            now = found(library, other)
            counting.add("whole" if now.isdigit() else now)
        ended.set()
        thread.join()
    return counting.tally
