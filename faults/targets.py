"""Hostile folders, and states that do not fit: rows 18 and 23 of the table of faults. See `damage.py`."""

import ctypes
import json
import os
import pickle
import random
import shutil
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from copy import deepcopy
from dataclasses import dataclass
from functools import partial
from itertools import combinations
from pathlib import Path
from typing import Any

import torch
import xxhash
from torch.distributed.checkpoint.api import CheckpointException

import milepost
from faults.damage import (
    PAGE_BYTES,
    REFUSALS,
    Copy,
    Load,
    State,
    blank,
    is_same,
    load_dcp,
    save_dcp,
    save_milepost,
    state_of,
    verify,
)
from faults.rows import Counting, FaultRow

PIPE_S = 0.5
"""A reader that still waits at a pipe after this time is stuck."""
IN_ACCESS, IN_OPEN = 0x01, 0x20


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """The rows, in order."""
    yield hostile_folders(full, folder / "hostile-folders")
    yield wrong_targets(full, folder / "wrong-targets")


# ---------------------------------------------------------------- 18: folders that lead elsewhere

Trick = Callable[[Path, Path], None]
"""Makes a good checkpoint hostile. Gets its folder, and a folder outside that no reader may open."""


def hostile_folders(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 18: all cases, always. Milepost meets them in its own format, and in DCP's, which it reads."""
    del full
    ours, theirs = Counting(), Counting()
    own, foreign = (Copy.of(save, state_of(1), folder / save.__name__) for save in (save_milepost, save_dcp))
    others = {copy.root: copy.other(state_of(2)) for copy in (own, foreign)}
    ids = (partial(sent_away, where) for where in ("../../outside", "{outside}"))
    for trick in (*tricks(own), partial(linked, "data"), *ids):
        ours.add(met(own, others[own.root], trick, load, lambda _, where: verify(where)))
    paths = (partial(redirected, where) for where in ("../outside", "{outside}", "sub"))
    for trick in (*tricks(foreign), *paths):
        theirs.add(met(foreign, others[foreign.root], trick, load_dcp))
        if getattr(trick, "func", None) is not hard_linked:  # DCP keeps no checksum that would detect it
            ours.add(met(foreign, others[foreign.root], trick, load))
    how = "`..` or an absolute path in the index; a symbolic link, a hard link, a pipe or a folder in place of a file"
    note = (
        "Milepost: in its own format and in DCP's. The hard link is tried only in its own format, where checksums "
        "detect it: DCP's has none."
    )
    return FaultRow(18, "a folder that leads outside", how, ours.tally, frozenset({"refused"}), theirs.tally, note)


def tricks(copy: Copy) -> list[Trick]:
    """What can be done to the files of any format."""
    each = [partial(trick, name) for trick in (linked, piped, replaced) for name in (copy.index, copy.data[0])]
    return [*each, partial(hard_linked, copy.data[0])]


def linked(name: str, folder: Path, outside: Path) -> None:
    """Move a good file outside, and leave a link to it: a reader that follows it finds what was saved."""
    shutil.move(folder / name, outside / "moved")
    (folder / name).symlink_to(outside / "moved")


def hard_linked(name: str, folder: Path, outside: Path) -> None:
    """Replace a file by a hard link to a file of another step."""
    (folder / name).unlink()
    (folder / name).hardlink_to(outside / Path(name).name)


def piped(name: str, folder: Path, outside: Path) -> None:
    """Replace a file by a pipe without a writer."""
    del outside
    (folder / name).unlink()
    os.mkfifo(folder / name)


def replaced(name: str, folder: Path, outside: Path) -> None:
    """Replace a file by a folder."""
    del outside
    (folder / name).unlink()
    (folder / name).mkdir()


def sent_away(save_id: str, folder: Path, outside: Path) -> None:
    """Seal a manifest whose save id is a path. The id is part of the names of its files."""
    (path,) = folder.glob("manifest-*")
    record = {**json.loads(path.read_bytes()), "save_id": save_id.format(outside=outside)}
    del record["checksum"]
    body = json.dumps(record).encode()[:-1]
    path.write_bytes(body + f',\n"checksum": "{xxhash.xxh3_64_hexdigest(body)}"\n}}\n'.encode())


def redirected(where: str, folder: Path, outside: Path) -> None:
    """Let DCP's metadata name files outside; `sub` is a link to there."""
    (folder / "sub").symlink_to(outside)
    metadata = pickle.loads((folder / ".metadata").read_bytes())
    for info in metadata.storage_data.values():
        info.relative_path = f"{where.format(outside=outside)}/{info.relative_path}"
    (folder / ".metadata").write_bytes(pickle.dumps(metadata))


def met(good: Copy, other: Copy, trick: Trick, *uses: Load) -> str:
    """How the uses of a hostile copy ended: "refused", or the first worse ending."""
    place = good.root.with_name("tried")
    shutil.rmtree(place, ignore_errors=True)
    folder, outside = place / "checkpoint", place / "outside"
    shutil.copytree(good.root, folder)
    outside.mkdir()
    for name in other.data:
        shutil.copy(other.root / name, outside)
    trick(folder, outside)
    return next((ending for ending in (used(use, folder, outside) for use in uses) if ending != "refused"), "refused")


def used(use: Load, folder: Path, outside: Path) -> str:
    """How one use ended: whether it waited at a pipe, opened anything outside, or was refused."""
    refusals = (Exception, CheckpointException) if use is load_dcp else REFUSALS
    pipes = [path for path in folder.rglob("*") if path.is_fifo()]
    with watching(outside) as was_opened, freeing(pipes) as stuck:
        try:
            use(blank(state_of(1)), folder)
            ending = "followed"
        except refusals:
            ending = "refused"
        except Exception as error:
            ending = f"another error: {type(error).__name__}"
        return "followed" if was_opened() else "hung" if stuck else ending


@contextmanager
def watching(folder: Path) -> Iterator[Callable[[], bool]]:
    """Whether anything in a folder was opened in the block, also by C code (inotify)."""
    libc = ctypes.CDLL(None, use_errno=True)
    handle = libc.inotify_init1(os.O_NONBLOCK | os.O_CLOEXEC)
    for path in [path for path, _, _ in os.walk(folder)]:  # list them all first: walking opens folders too
        if libc.inotify_add_watch(handle, path.encode(), IN_OPEN | IN_ACCESS) < 0:
            raise OSError(ctypes.get_errno(), "cannot watch", path)

    def was_opened() -> bool:
        try:
            return bool(os.read(handle, PAGE_BYTES))
        except BlockingIOError:
            return False

    try:
        yield was_opened
    finally:
        os.close(handle)


@contextmanager
def freeing(pipes: list[Path]) -> Iterator[list[Path]]:
    """Release a reader that waits at a pipe for long, and record the pipe."""
    stuck: list[Path] = []
    done = threading.Event()

    def free() -> None:
        while not done.wait(PIPE_S):
            for pipe in pipes:
                with suppress(OSError):  # no reader waits
                    handle = os.open(pipe, os.O_WRONLY | os.O_NONBLOCK)
                    stuck.append(pipe)  # before the reader continues
                    os.close(handle)

    thread = threading.Thread(target=free)
    thread.start()
    try:
        yield stuck
    finally:
        done.set()
        thread.join()


# ---------------------------------------------------------------- 23: targets that do not fit

LOST = None
"""Stands for a key that the target does not have."""
FITTING: State = {
    "weight": torch.arange(16, dtype=torch.float32).reshape(4, 4),
    "half": torch.arange(6, dtype=torch.bfloat16),
    "count": torch.arange(3),
    "step": 7,
    "layers": [torch.ones(2), torch.ones(3)],
    "optimizer": {"moment": torch.ones(5), "rate": 0.5},
}


@dataclass(frozen=True, slots=True)
class Misfit:
    """One mistake in a target: the value of a key, and what the error must say."""

    key: str
    value: Any
    says: tuple[str, ...]


def of_dtype(key: str, dtype: torch.dtype) -> Misfit:
    """The target has another dtype."""
    saved, wanted = (str(one).removeprefix("torch.") for one in (FITTING[key].dtype, dtype))
    says = f"'{key}': saved as {saved} and the target is {wanted}"
    return Misfit(key, torch.zeros(FITTING[key].shape, dtype=dtype), (says,))


def of_shape(key: str, *shape: int) -> Misfit:
    """The target has another shape."""
    says = f"'{key}': saved as {tuple(FITTING[key].shape)} and the target is {shape}"
    return Misfit(key, torch.zeros(shape, dtype=FITTING[key].dtype), (says,))


MISFITS = (
    of_shape("weight", 4, 1),
    of_dtype("weight", torch.float16),
    of_dtype("weight", torch.float64),
    of_dtype("weight", torch.int32),
    of_dtype("half", torch.float32),
    of_dtype("half", torch.float16),
    of_dtype("count", torch.int32),
    of_dtype("count", torch.bool),
    of_shape("weight", 16),
    of_shape("weight", 2, 8),
    of_shape("weight", 4, 4, 1),
    of_shape("half", 7),
    of_shape("count"),
    Misfit("step", torch.zeros(()), ("'step': saved as a value and the target is a tensor",)),
    Misfit("half", 0, ("'half': saved as a tensor and the target is a int",)),
    Misfit("half", b"bytes", ("'half': saved as a tensor and the target is a bytes",)),
    Misfit("weight", {"inner": torch.zeros(4, 4)}, ("'weight'", "'weight.inner'")),
    Misfit("optimizer", torch.zeros(5), ("'optimizer'", "'optimizer.moment'", "'optimizer.rate'")),
    Misfit("layers", [torch.zeros(2), torch.zeros(3), torch.zeros(4)], ("'layers.2'",)),
    Misfit("layers", [torch.zeros(2)], ("'layers.1'",)),
    Misfit("count", LOST, ("'count'",)),
    Misfit("optimizer", {"moment": torch.zeros(5)}, ("'optimizer.rate'",)),
    Misfit("Step", 0, ("'Step'",)),
    Misfit("more", torch.zeros(1), ("'more'",)),
)


def wrong_targets(full: bool, folder: Path, load: Load = milepost.load) -> FaultRow:
    """Row 23: always all cases. Each mistake alone, some in pairs, and the first of each key at once."""
    del full
    ours, theirs = Counting(), Counting()
    milepost.save(FITTING, folder / "milepost")
    save_dcp(FITTING, folder / "dcp")
    pairs = [pair for pair in combinations(MISFITS, 2) if pair[0].key != pair[1].key]
    cases = [*((misfit,) for misfit in MISFITS), *random.Random(23).sample(pairs, 20)]
    for misfits in (*cases, tuple({misfit.key: misfit for misfit in reversed(MISFITS)}.values())):
        ours.add(told(misfits, folder / "milepost", load))
        theirs.add(told(misfits, folder / "dcp", load_dcp))
    how = "a wrong dtype, shape, kind or key, alone, in pairs and all at once; all named in one error, nothing changed"
    note = "Not tried: a value (not a tensor) of another Python type in the target. Both replace it by what was saved."
    return FaultRow(23, "a target that does not fit", how, ours.tally, frozenset({"all named"}), theirs.tally, note)


def told(misfits: tuple[Misfit, ...], folder: Path, load: Load) -> str:
    """How loading into a target that does not fit ended. From DCP any error is enough."""
    wrong = {misfit.key: misfit.value for misfit in misfits}
    target = {key: value for key, value in {**blank(FITTING), **deepcopy(wrong)}.items() if value is not LOST}
    before = deepcopy(target)
    try:
        load(target, folder)
    except (Exception, CheckpointException) as error:
        if not is_same(target, before):
            return "target changed before the error"
        if load is load_dcp:
            return "an error"
        if not isinstance(error, milepost.StateMismatch):
            return f"another error: {type(error).__name__}"
        named = all(words in str(error) for misfit in misfits for words in misfit.says)
        return "all named" if named else "named in part"
    return "silent"
