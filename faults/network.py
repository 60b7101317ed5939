"""What a network file system does: it repeats a request whose reply was lost, and forgets files that others removed.

The shim gives both libraries the answers that NFS gives. A repeated request finds its own effect: `link` and an
exclusive `open` say EEXIST, `unlink` and `rename` say ENOENT. A handle on what another machine removed says ESTALE.
"""

import gc
import os
import shutil
import tempfile
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

import milepost
from faults.rows import Counting, FaultRow, Tally
from faults.shim import DCP, MILEPOST, NO_FAULT, Fault, Lab, System, attempt, preloaded, print_rows, read_log, small
from milepost.commit import find

_NUMBERS = (28, 30)
OLDER, NEWEST = 1, 2
_RAISED = 9
_NAMING = ("open", "mkdir", "link", "rename", "unlink", "rmdir")
"""What changes names. A repeated write puts the same bytes at the same place."""
_READS = ("openread", "read", "pread")
Restore = Callable[[Path], int]


def rows(full: bool, folder: Path) -> Iterator[FaultRow]:
    """Rows 28 and 30: with every call, or with some."""
    yield from preloaded("network", _NUMBERS, full, folder)


def repeated(lab: Lab) -> FaultRow:
    """Row 28."""
    tallies = [_repeated(lab, system) for system in (MILEPOST, DCP)]
    how = (
        "a call of a first save or of an overwrite that makes, renames or removes a name is made twice, as NFS does "
        "when a reply is lost; the second answer counts"
    )
    note = '"raised, new loads": the reply was lost, and was taken for a failure.'
    return FaultRow(28, "lost reply", how, tallies[0], frozenset({"succeeded, whole"}), tallies[1], note)


def _repeated(lab: Lab, system: System) -> Tally:
    counting = Counting()
    for first in (True, False):
        calls = lab.record(system, first)
        named = [call for call in calls if call.verb in _NAMING]
        commits = [call for call in named if call.verb in ("link", "rename")]
        for call in named if lab.full else [*named[:: max(1, len(named) // 3)], *commits]:
            counting.add(lab.trial(system, first, Fault("repeat", call.number)))
    return counting.tally


# --- stale handles


def restore_by_milepost(place: Path) -> int:
    """The step that a Checkpointer restores. Raises if it holds another state."""
    target = small(0)
    return _checked(milepost.Checkpointer(place).restore(target, transfer=milepost.Transfer(threads=1)), target)


def restore_by_dcp(place: Path) -> int:
    """The newest step. DCP has nothing that goes on to another one."""
    target = small(0)
    dcp.load(target, storage_reader=dcp.FileSystemReader(place / f"step-{NEWEST:010d}"), no_dist=True)
    return _checked(NEWEST, target)


def _checked(step: int, target: dict[str, Any]) -> int:
    values = [*target["layer"].values(), target["moments"]]
    assert target["step"] == step
    assert all((value == step).all() for value in values)
    return step


def _code(restore: Restore, place: Path) -> int:
    """The exit code of a restore: the step, with 10 added, or `_RAISED`."""
    try:
        return 10 + restore(place)
    except BaseException:  # DCP raises a BaseException
        return _RAISED


def stale(lab: Lab) -> FaultRow:
    """Row 30."""
    find.PATIENCE_S = 0.05  # for a listing that shows what is gone
    tallies = [
        _stale(lab, save, restore) for save, restore in ((_by_milepost, restore_by_milepost), (_by_dcp, restore_by_dcp))
    ]
    how = "ESTALE from a call that opens or reads the newest of two steps: once (the server was restarted), or always"
    note = "Always: the step is gone, and Checkpointer.restore goes on to the older one."
    good = frozenset({"once: newest loaded", "always: older step loaded"})
    return FaultRow(30, "stale handle", how, tallies[0], good, tallies[1], note)


def _by_milepost(step: int, place: Path) -> None:
    milepost.Checkpointer(place, keep_last=2).save(small(step), step)


def _by_dcp(step: int, place: Path) -> None:
    dcp.save(small(step), storage_writer=dcp.FileSystemWriter(place / f"step-{step:010d}"), no_dist=True)


def _stale(lab: Lab, save: Callable[[int, Path], None], restore: Restore) -> Tally:
    place = Path(tempfile.mkdtemp(dir=lab.folder))
    for step in (OLDER, NEWEST):
        save(step, place)
    home, log = place / f"step-{NEWEST:010d}", place / "log"
    assert attempt(lambda: _code(restore, place), home, log=str(log), reads=True) == 10 + NEWEST
    calls = [call for call in read_log(log.read_text()) if call.verb.startswith(_READS)]
    log.unlink()
    counting = Counting()
    for at in range(1, len(calls) + 1, 1 if lab.full else max(1, len(calls) // 5)):
        for do, lasts in (("ESTALE", "once"), ("ESTALE+", "always")):
            code = attempt(lambda: _code(restore, place), home, Fault(do, at), reads=True)
            counting.add(f"{lasts}: {_ending(code)}")
    shutil.rmtree(place)
    return counting.tally


def _ending(code: int) -> str:
    known = {10 + NEWEST: "newest loaded", 10 + OLDER: "older step loaded", _RAISED: "raised", NO_FAULT: "no fault"}
    return known.get(code, f"ended with {code}")


def main() -> None:
    """Print the rows, as JSON."""
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    gc.freeze()
    print_rows((repeated, stale))


if __name__ == "__main__":
    main()
