"""Power cuts and full disks: file systems on a loop device that are shut down, and a model of a disk."""

import contextlib
import fcntl
import gc
import logging
import os
import random
import shutil
import struct
import subprocess
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.rows import Counting, FaultRow, Tally
from milepost.testing import CountingStore, Crash, UnsyncedStore, run_ranks

_SHUTDOWN, _NO_FLUSH = 0x8004587D, 2  # FS_IOC_SHUTDOWN, FS_SHUTDOWN_FLAGS_NOLOGFLUSH: like a power cut
_SEED = 20240917
_ERRORS = (Exception, CheckpointException)  # DCP's own is not an Exception
MIB = 1 << 20
_LEAST_XFS_BYTES = 320 * MIB  # a sparse file


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The rows of this module: 6 and 7 for each file system, 9, and 10."""
    with _quietly():
        for kind in ("ext4", "xfs"):
            yield from _power_rows(kind, full, folder)
        yield _model_row(24_000 if full else 1_000)
        yield _full_disk_row(full, folder)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without DCP's warnings about the process group, and Milepost's about files on a disk that is gone."""
    log = logging.getLogger("milepost")
    level = log.level
    try:
        log.setLevel(logging.ERROR)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.setLevel(level)


# Savers, and what is found later.


def state_of(number: int, size_bytes: int = 2 * MIB) -> dict[str, Any]:
    """A state in which every element is the number of the save."""
    return {"a": torch.full((size_bytes // 8,), float(number)), "b": torch.full((size_bytes // 8,), number).int()}


@dataclass(frozen=True, slots=True)
class Saver:
    """How one library saves, and which save it finds: 0 for none, -1 for a mixture. Raises if it cannot load."""

    name: str
    save: Callable[[dict[str, Any], Any], object]
    find: Callable[[Any], int]

    def ending(self, place: Path, old: int = 1, new: int = 2) -> str:
        """The name of what is found."""
        try:
            found = self.find(place)
        except _ERRORS:
            return "unloadable"
        return {new: "new", old: "old", 0: "nothing there"}.get(found, "wrong values")


def _number_in(state: dict[str, Any]) -> int:
    """The save that all elements belong to, or -1."""
    values = {float(value) for tensor in state.values() for value in (tensor.min(), tensor.max())}
    return int(values.pop()) if len(values) == 1 else -1


def _find_milepost(place: Any) -> int:
    try:
        with milepost.open(place) as checkpoint:
            assert checkpoint.verify().ok
            return _number_in(checkpoint.state())
    except milepost.CheckpointNotFound:
        return 0


def _save_dcp(state: dict[str, Any], place: Path) -> None:
    dcp.save(state, storage_writer=dcp.FileSystemWriter(place, overwrite=True), no_dist=True)


def _find_dcp(place: Path) -> int:
    if not place.exists() or not any(place.iterdir()):
        return 0
    reader = dcp.FileSystemReader(place)
    saved = reader.read_metadata().state_dict_metadata
    target = {key: torch.full(tensor.size, -7, dtype=tensor.properties.dtype) for key, tensor in saved.items()}
    dcp.load(target, storage_reader=reader, no_dist=True)
    return _number_in(target)


def _save_on_ranks(state: dict[str, Any], place: Any) -> milepost.LoadReport:
    """Save on four ranks: each holds a quarter of the first tensor, and all hold the second."""

    def work(comm: Any) -> milepost.LoadReport:
        quarter = len(state["a"]) // 4
        own = {(comm.rank * quarter,): state["a"].narrow(0, comm.rank * quarter, quarter)}
        whole = {"a": milepost.Sharded(tuple(state["a"].shape), own), "b": state["b"]}
        return milepost.save(whole, place, process_group=comm)

    return run_ranks(4, work)[0]


MILEPOST = Saver("Milepost", milepost.save, _find_milepost)
ON_RANKS = Saver("Milepost, 4 ranks", _save_on_ranks, _find_milepost)
DCP = Saver("DCP", _save_dcp, _find_dcp)


# Disks.


class NotHere(Exception):
    """This machine cannot run the trial; the message says why."""


def _command(*words: str) -> None:
    try:
        done = subprocess.run(words, capture_output=True, text=True, check=False, timeout=60)
    except FileNotFoundError:
        raise NotHere(f"there is no {words[0]}") from None
    if done.returncode:
        raise NotHere(f"{words[0]}: {done.stderr.strip()}")


class Disk:
    """A small file system on a loop device or in memory, mounted at `path` until the `with` block ends."""

    def __init__(self, folder: Path, kind: str, size_bytes: int) -> None:
        self._home, self._kind, self._size = folder / f"on-{kind}", kind, size_bytes
        self.path, self._image = self._home / "disk", self._home / "image"

    def __enter__(self) -> Self:
        if os.geteuid() != 0:
            raise NotHere("only root may mount")
        self.path.mkdir(parents=True)
        try:
            if self._kind != "tmpfs":
                with self._image.open("wb") as image:
                    image.truncate(self._size)
                options = ["-F", "-m", "0"] if self._kind == "ext4" else ["-f"]
                _command(f"mkfs.{self._kind}", "-q", *options, str(self._image))
            self._mount()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *_error: object) -> None:
        if os.path.ismount(self.path):
            try:
                self._unmount()
            except NotHere:
                _command("umount", "--lazy", str(self.path))  # the loop device is freed with its last open file
        shutil.rmtree(self._home)

    def _mount(self) -> None:
        if self._kind == "tmpfs":
            _command("mount", "-t", "tmpfs", "-o", f"size={self._size}", "none", str(self.path))
        else:
            _command("mount", "-t", self._kind, "-o", "loop", str(self._image), str(self.path))

    def _unmount(self) -> None:
        for wait_s in (0.01, 0.05, 0.2, 1.0):
            with contextlib.suppress(NotHere):
                return _command("umount", str(self.path))
            gc.collect()  # exceptions may hold open files
            time.sleep(wait_s)
        return _command("umount", str(self.path))

    def sync(self) -> None:
        """Flush everything to the disk."""
        _command("sync", "-f", str(self.path))

    def cut_power(self) -> None:
        """Shut the file system down: nothing reaches the disk any more, and dirty pages are lost."""
        handle = os.open(self.path, os.O_RDONLY)
        try:
            fcntl.ioctl(handle, _SHUTDOWN, struct.pack("I", _NO_FLUSH))
        finally:
            os.close(handle)

    def come_back(self) -> None:
        """Mount again what reached the disk."""
        self._unmount()
        self._mount()

    def allow_files(self, more: int) -> None:
        """Limit a file system in memory to this many more files and folders; 0 for no limit."""
        used = os.statvfs(self.path)
        limit = used.f_files - used.f_ffree + more if more else MIB
        _command("mount", "-o", f"remount,size={self._size},nr_inodes={limit}", str(self.path))


# Rows 6 and 7: the power is cut.


def _power_rows(kind: str, full: bool, folder: Path) -> Iterator[FaultRow]:
    how = f"a loop device with {kind}, shut down without flushing and mounted again; the disk itself loses nothing"
    after_trials, during_trials = (40, 100) if full else (4, 4)
    tallies = [Tally({})] * 4
    notes = [
        "every second trial overwrites, with equal shapes: DCP's old metadata then loads the new data",
        "every second trial of Milepost has 4 ranks. If `save` had returned, the old checkpoint counts as lost",
    ]
    with contextlib.ExitStack() as stack:
        try:
            disk = stack.enter_context(Disk(folder, kind, _LEAST_XFS_BYTES))
            disk.cut_power()
            disk.come_back()
        except (NotHere, OSError) as error:
            notes = [f"not run: {error}"] * 2
        else:
            tallies = [_cuts_after(disk, saver, after_trials) for saver in (MILEPOST, DCP)]
            tallies += [_cuts_during(disk, savers, during_trials) for savers in ([MILEPOST, ON_RANKS], [DCP])]
    after, during = f"power cut after `save` returned, {kind}", f"power cut during an overwrite, {kind}"
    yield FaultRow(6, after, how, tallies[0], frozenset({"new"}), tallies[1], notes[0])
    yield FaultRow(7, during, how, tallies[2], frozenset({"old", "new"}), tallies[3], notes[1])


def _cuts_after(disk: Disk, saver: Saver, trials: int) -> Tally:
    """Every second trial overwrites a checkpoint that had reached the disk."""
    counting = Counting()
    for trial in range(trials):
        place = disk.path / f"after-{saver.name}-{trial}"
        if trial % 2:
            saver.save(state_of(1), place)
            disk.sync()
        saver.save(state_of(2), place)
        disk.cut_power()
        disk.come_back()
        ending = saver.ending(place)
        counting.add("new" if ending == "new" else "lost" if ending in ("old", "nothing there") else ending)
        shutil.rmtree(place, ignore_errors=True)
    return counting.tally


def _cuts_during(disk: Disk, savers: list[Saver], trials: int) -> Tally:
    counting, dice = Counting(), random.Random(_SEED)
    took_s = {saver.name: _seconds(saver, disk.path / "timed") for saver in savers}
    for trial in range(trials):
        saver, place = savers[trial % len(savers)], disk.path / f"during-{trial}"
        saver.save(state_of(1, 8 * MIB), place)
        disk.sync()
        returned = threading.Event()
        thread = threading.Thread(target=_try_to_save, args=(saver, place, returned))
        thread.start()
        time.sleep(dice.uniform(0, 1.1 * took_s[saver.name]))
        had_returned = returned.is_set()
        disk.cut_power()
        thread.join()
        disk.come_back()
        ending = saver.ending(place)
        counting.add("lost" if ending == "nothing there" or (had_returned and ending == "old") else ending)
        shutil.rmtree(place, ignore_errors=True)
    return counting.tally


def _seconds(saver: Saver, place: Path) -> float:
    """The seconds that an overwrite takes."""
    saver.save(state_of(1, 8 * MIB), place)
    started = time.perf_counter()
    saver.save(state_of(1, 8 * MIB), place)
    took_s = time.perf_counter() - started
    shutil.rmtree(place)
    return took_s


def _try_to_save(saver: Saver, place: Path, returned: threading.Event) -> None:
    with contextlib.suppress(*_ERRORS):  # the disk is gone
        saver.save(state_of(2, 8 * MIB), place)
        returned.set()


# Row 9: every state that a power cut could leave.


@dataclass(frozen=True, slots=True)
class Attempt:
    """A save: its number, the journal positions of its begin and end, and the generation that it committed, if any.

    A save that died may have committed or not.
    """

    number: int
    began: int
    ended: int
    generation: int = 0
    died: bool = False


class History:
    """Saves into one store, and what may be found after a power cut at any moment."""

    def __init__(self, store: UnsyncedStore | None = None, saves: int = 0) -> None:
        self.store, self.attempts = store or UnsyncedStore(), list[Attempt]()
        for number in range(1, saves + 1):
            self.save(number)

    def save(self, number: int, through: Any = None, save: Callable[..., milepost.Receipt] = milepost.save) -> None:
        """Save, and record the outcome."""
        began, generation, died = len(self.store.journal), 0, False
        try:
            generation = save(state_of(number, 4096), through or self.store).generation
        except milepost.SaveConflict:
            pass
        except Crash:
            died, self.store.dies_at = True, None
        self.attempts.append(Attempt(number, began, len(self.store.journal), generation, died))

    def ending(self, at: int, found: Any) -> str:
        """The name of what a power cut after operation `at` left."""
        done = [a for a in self.attempts if a.generation and a.ended <= at]
        last = max(done, key=lambda a: a.generation, default=Attempt(0, 0, 0))
        under_way = {a.number for a in self.attempts if a.began <= at < a.ended and a.generation > last.generation}
        under_way |= {a.number for a in self.attempts if a.died and a.began <= at and last.began < a.ended}
        try:
            number = _find_milepost(found)
        except Exception:
            return "unloadable"
        if number not in under_way | {last.number}:
            return "lost"
        return "new" if number == max(under_way, default=last.number) else "old"


def _histories() -> Iterator[History]:
    """A first save and overwrites, with and without hard links; races; four ranks; an earlier process that died."""
    yield History(saves=4)
    yield History(UnsyncedStore(hard_links=False), saves=4)
    for moment in ("writer data/", "commit data/", "create manifest-00000002", "delete manifest-00000001"):
        history = History(saves=1)
        history.save(2, _Racing(history, moment))
        yield history
    history = History()
    for number in (1, 2):
        history.save(number, save=_save_on_ranks)
    yield history
    second = History(saves=2).attempts[1]
    for dies_at in range(second.began, second.ended):
        history = History(saves=1)
        history.store.dies_at = dies_at
        history.save(2)
        history.save(3)
        yield history


class _Racing(CountingStore):
    """Makes save number 3 when another save reaches a given call."""

    def __init__(self, history: History, moment: str) -> None:
        super().__init__(history.store)
        self._history, self._moment = history, moment

    def before(self, _number: int, call: str) -> None:
        if call.startswith(self._moment):
            self._moment = "\0"
            self._history.save(3)


def _model_row(count: int) -> FaultRow:
    counting, distinct, repaired = Counting(), 0, 0
    histories = list(_histories())
    for history in histories:
        known: dict[tuple[int, frozenset[tuple[str, bytes]]], str] = {}
        for at, found in history.store.possible_states(count // len(histories), _SEED):
            key = (at, frozenset(found.objects.items()))
            if key not in known:
                known[key] = history.ending(at, found)
                if len(known) % 10 == 0:
                    known[key], repaired = _saved_again(found) or known[key], repaired + 1
            counting.add(known[key])
        distinct += len(known)
    note = (
        f"{distinct} of the states are distinct. In {repaired} of them the next save was tried, and removed leftovers"
    )
    how = f"{len(histories)} histories of saves, races and deaths on a disk that keeps any part of what was not synced"
    return FaultRow(9, "power cut at any system call", how, counting.tally, frozenset({"old", "new"}), None, note)


def _saved_again(found: milepost.store.MemoryStore) -> str | None:
    """What is wrong with the next save after a power cut; None if nothing is."""
    milepost.save(state_of(9, 4096), found)
    save_id = milepost.open(found).manifest.save_id
    clean = all(save_id in name or name.startswith("manifest-") for name in found.objects) and len(found.objects) == 2
    return None if clean and _find_milepost(found) == 9 else "not repaired by the next save"


# Row 10: no room.


def _full_disk_row(full: bool, folder: Path) -> FaultRow:
    good = frozenset({"raised, old loads", "raised, nothing left", "saved, new loads"})
    counts = {MILEPOST.name: Counting(), DCP.name: Counting()}
    notes = ["empty folders do not count as leftovers"]
    for kind in ("tmpfs", "ext4"):
        try:
            with Disk(folder, kind, 24 * MIB) as disk:
                for saver in (MILEPOST, DCP):
                    _fill(disk, kind, saver, counts[saver.name], full)
        except NotHere as error:
            notes.append(f"{kind} not run: {error}")
    how = "tmpfs and ext4 of 24 MiB, from no space to just enough, or no free inode; a first save and an overwrite"
    tallies = [counts[saver.name].tally for saver in (MILEPOST, DCP)]
    return FaultRow(10, "disk full", how, tallies[0], good, tallies[1], "; ".join(notes))


def _fill(disk: Disk, kind: str, saver: Saver, counting: Counting, full: bool) -> None:
    place, size = disk.path / "runs" / "a", 2 * MIB
    rooms = range(size - 8192, size + 28672, 4096) if full else (size, size + 4096, size + 24576)
    for overwrites in (False, True):
        for room in (0, size // 2, *rooms):
            with _prepared(saver, place, overwrites):
                _leave_room(disk, room)
                counting.add(_full_ending(saver, disk.path, place, overwrites))
                (disk.path / "filler").unlink()
        for files in range(1, 8, 1 if full else 2) if kind == "tmpfs" else ():
            with _prepared(saver, place, overwrites):
                disk.allow_files(files)
                counting.add(_full_ending(saver, disk.path, place, overwrites))
                disk.allow_files(0)


@contextlib.contextmanager
def _prepared(saver: Saver, place: Path, overwrites: bool) -> Iterator[None]:
    if overwrites:
        saver.save(state_of(1), place)
    yield
    shutil.rmtree(place.parent, ignore_errors=True)


def _leave_room(disk: Disk, room: int) -> None:
    """Fill the disk until `room` bytes are left."""
    size, step = 0, 16 * MIB
    with (disk.path / "filler").open("wb") as file:
        while step >= 1024:
            try:
                os.posix_fallocate(file.fileno(), size, step)
                size += step
            except OSError:
                step //= 2
        file.truncate(max(0, size - room))
    disk.sync()  # a file system may free space only then


def _files(folder: Path) -> list[Path]:
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _full_ending(saver: Saver, disk: Path, place: Path, overwrites: bool) -> str:
    before = _files(disk)
    try:
        saver.save(state_of(2), place)
    except _ERRORS as error:
        said = str(error)
    else:
        return f"saved, {saver.ending(place)} loads"
    ending = saver.ending(place)
    if ending != ("old" if overwrites else "nothing there"):
        return f"raised, {ending}"
    if _files(disk) != before:
        return "raised, leftovers"
    if "No space left" not in said or str(place) not in said:
        return "raised, unclear error"
    return "raised, old loads" if overwrites else "raised, nothing left"
