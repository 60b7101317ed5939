"""`milepost verify`."""

import sys
from collections.abc import Iterator

import click
import msgspec

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Style, line
from milepost.cli.command import command as make_command
from milepost.cli.escape import shown
from milepost.cli.output import print_record, progress_shown, remark, write
from milepost.cli.places import PLACE, advised
from milepost.cli.session import Session
from milepost.cli.statuses import Status, worst
from milepost.errors import CheckpointError
from milepost.inspection.place import place_at
from milepost.inspection.verification import (
    DamagedBox,
    DamagedPlace,
    VerifiedCheckpoint,
    VerifiedState,
    VerifyReport,
    checkpoints_at,
    unverified,
    verify_one,
)
from milepost.store import Store
from milepost.store.read_only import refuse_read_only

_STATES: dict[VerifiedState, tuple[Style, Status]] = {
    "whole": ("good", Status.FINE),
    "missing": ("warn", Status.NOT_FOUND),
    "damaged": ("bad", Status.DAMAGED),
    "unreadable": ("warn", Status.STORAGE),
    "removed": ("dim", Status.FINE),
}
_SHOWN = 100
"""How many damaged places of one checkpoint are shown as text."""


@make_command(VerifyReport)
@click.argument("paths", nargs=-1, required=True, type=PLACE)
@click.option("--record", is_flag=True, help="Note beside each whole checkpoint that it was verified now, for ls.")
def command(session: Session, paths: tuple[str, ...], record: bool) -> Status:
    """Read every byte, and name what is damaged.

    Of a run, all steps are read, but not those that were never finished or are removed meanwhile. Names each damaged
    block by its file, tensor and box. The exit status is 4 if anything is damaged, 3 if there is no checkpoint, 5 if
    one cannot be read.
    """
    roots = [place_at(path) for path in paths]
    for root in roots if record else ():
        refuse_read_only(root)  # now, and not after an hour of reading
    found = []
    for one in (one for root in roots for one in _verified_at(root, record)):
        found.append(one)
        if not session.json:
            for block in _blocks(one):
                write(block, sys.stdout)
            sys.stdout.flush()  # a long run tells as it goes
    if session.json:
        print_record(VerifyReport(tuple(found)), True, lambda: ())
    unwritten = [one.not_recorded for one in found if one.not_recorded]
    for why in unwritten:
        remark(f"not noted: {why}")
    if record and any(one.state == "whole" and one.recorded is None and not one.not_recorded for one in found):
        remark("not noted where another library saved: it has no place for that")
    return worst([*(_STATES[one.state][1] for one in found), *[Status.STORAGE] * bool(unwritten)])


def _verified_at(root: Store, record: bool) -> Iterator[VerifiedCheckpoint]:
    """What is found at one of the places that were named: a checkpoint, or each step of a run."""
    try:
        places = checkpoints_at(root)
    except CheckpointError as error:
        yield unverified(root, error)
        return
    for place in places:
        with progress_shown() as bar:
            one = verify_one(place, bar, record=record)
        if one.state == "missing" and place is root:
            one = msgspec.structs.replace(one, reason=advised(one.reason, place))
        elif one.state == "missing":
            one = msgspec.structs.replace(one, state="removed")
        yield one


def _blocks(one: VerifiedCheckpoint) -> Iterator[Block]:
    state = Cell(f"{one.state:<11}", _STATES[one.state][0])
    if one.reason:
        yield line(state, one.url, ": ", one.reason)
        return
    rate = f", {words.size(int(one.bytes_read / one.seconds))}/s" if one.seconds and one.bytes_read else ""
    files = f"{words.count(one.files, 'file')}, {words.size(one.bytes_read)} in {one.seconds:.2f} s{rate}"
    yield line(state, one.url, Cell(f": {files}", "dim"))
    for place in one.damages[:_SHOWN]:
        yield line("  ", Cell(place.file, "bad"), f": {_reason(one.url, place)}")
        for box in place.boxes:
            yield line("    ", _box_words(box))
    if more := len(one.damages) - _SHOWN:
        yield from [line(f"  and {words.count(more, 'more damaged place', 'more damaged places')}")] if more > 0 else []


def _reason(url: str, place: DamagedPlace) -> str:
    """What is wrong, without the names that stand beside it."""
    reason = place.reason.partition("; they hold ")[0]
    for where in (f"{url}/{place.file}", url):  # the place of one file is that file
        reason = reason.replace(f": {where}: ", ": ").removeprefix(f"{where}: ").removeprefix(f"{where} ")
    return reason


def _box_words(box: DamagedBox) -> str:
    if box.offset is None or box.shape is None:
        return shown(box.key) if box.used else f"{shown(box.key)} of an earlier save, which is not used here"
    ranges = ", ".join(f"{start}:{start + size}" for start, size in zip(box.offset, box.shape, strict=True))
    return f"{shown(box.key)}[{ranges}]"
