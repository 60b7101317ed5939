"""`milepost cp`."""

import re
from collections.abc import Iterator

import click

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, Style, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record, progress_shown, remark
from milepost.cli.places import PLACE
from milepost.cli.session import Session
from milepost.cli.statuses import Status, one_line, worst
from milepost.copying.checkpoint_copy import CopyOptions
from milepost.copying.copy import copy_place, gone_steps
from milepost.copying.records import Copied, CopiedStep, CopyState
from milepost.copying.run_copy import ChosenSteps
from milepost.errors import CheckpointNotFound, InvalidRequest
from milepost.inspection.place import place_at
from milepost.steps.names import MAX_STEP
from milepost.store.location import store_to_save

_SHOWN: dict[CopyState, tuple[str, Style, Status]] = {
    "copied": ("copied", "good", Status.FINE),
    "there": ("there already", "good", Status.FINE),
    "planned": ("to copy", "", Status.FINE),
    "unfinished": ("not finished", "dim", Status.FINE),
    "removed": ("removed meanwhile", "dim", Status.FINE),
    "damaged": ("damaged", "bad", Status.DAMAGED),
    "unreadable": ("unreadable", "warn", Status.STORAGE),
}
_COLUMNS = [Column("STEP", right=True), Column(""), Column("SIZE", right=True), Column("WHY", rank=1)]
_RANGE = re.compile(r"([0-9]{1,10})(?:(-)([0-9]{1,10})?)?")


@make_command(Copied)
@click.argument("source", type=PLACE)
@click.argument("target", type=PLACE)
@click.option("--steps", metavar="STEPS", help="Only these steps of a run: 100,200-300,1000-")
@click.option("--newest", is_flag=True, help="Only the newest step of a run that is whole and healthy.")
@click.option("--overwrite", is_flag=True, help="Replace other checkpoints at TARGET.")
@click.option("--dry-run", is_flag=True, help="Say what would be copied, and copy nothing.")
def command(
    session: Session, source: str, target: str, steps: str | None, newest: bool, overwrite: bool, dry_run: bool
) -> Status:
    """Copy a checkpoint, or the steps of a run.

    Of a run, every step keeps its name in TARGET, and the oldest is copied first. Every byte is verified on its way,
    and each checkpoint at TARGET is whole or absent. What is there already, whole and equal, is not copied again: the
    same command goes on where one was cut short.
    """
    choice = ChosenSteps(None if steps is None else tuple(ranges_of(steps)), newest)
    with progress_shown() as bar:
        done = copy_place(place_at(source), store_to_save(target), choice, CopyOptions(overwrite), bar, dry_run=dry_run)
    print_record(done, session.json, lambda: _blocks(done))
    gone = gone_steps(done, choice)
    if gone:
        remark(one_line(CheckpointNotFound(gone)))
    return worst([*(_SHOWN[step.state][2] for step in done.steps), Status.NOT_FOUND if gone else Status.FINE])


def ranges_of(text: str) -> Iterator[range]:
    """The steps that `100,200-300,1000-` names. Raises InvalidRequest for other text."""
    for part in text.split(","):
        found = _RANGE.fullmatch(part.strip())
        if found is None:
            raise InvalidRequest(f"--steps is like 100,200-300,1000-, not {text!r}")
        start = int(found[1])
        stop = start if found[2] is None else int(found[3]) if found[3] else MAX_STEP
        if stop < start:
            raise InvalidRequest(f"--steps: {part.strip()} ends before it starts")
        yield range(start, stop + 1)


def _blocks(done: Copied) -> Iterator[Block]:
    if done.kind == "run":
        yield TextTable(_COLUMNS, [_row(step) for step in done.steps])
    for step in done.steps if done.kind == "checkpoint" else ():
        word, style, _ = _SHOWN[step.state]
        yield line(Cell(done.target, "bold"), ": ", Cell(word, style), f", {words.size(step.data_bytes)}")
    rate = f" ({words.size(int(done.copied_bytes / done.seconds))}/s)" if done.copied_bytes and done.seconds else ""
    counts = ", ".join(f"{count:,} {word}" for word, count in _counts(done.steps))
    took = f"{words.size(done.copied_bytes)} in {done.seconds:.2f} s{rate}"
    yield line(f"{words.count(len(done.steps), 'step')}: {counts}; {took}" if done.kind == "run" else took)


def _counts(steps: tuple[CopiedStep, ...]) -> Iterator[tuple[str, int]]:
    """How many steps there are of each state that occurs."""
    for state, (word, _, _) in _SHOWN.items():
        count = sum(step.state == state for step in steps)
        if count:
            yield word, count


def _row(step: CopiedStep) -> list[Cell | str]:
    word, style, _ = _SHOWN[step.state]
    number = step.name if step.step is None else str(step.step)
    return [Cell(number, "bold"), Cell(word, style), words.size(step.data_bytes), step.reason]
