"""`milepost prune`."""

import sys
from collections.abc import Iterator
from typing import Literal

import click

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record, remark, write
from milepost.cli.places import PLACE, advising
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.errors import InvalidRequest
from milepost.inspection.pruning import PrunedStep, Pruning, plan_pruning, prune
from milepost.steps.names import OWN_NAMES
from milepost.steps.retention import Rule
from milepost.store import store_at
from milepost.store.read_only import refuse_read_only

_COLUMNS = [Column("STEP", right=True), Column(""), Column("SIZE", right=True), Column("WHY")]
_COUNT = click.IntRange(min=1)


@make_command(Pruning)
@click.argument("path", type=PLACE)
@click.option("--keep-last", type=_COUNT, metavar="N", help="Keep the newest N steps.")
@click.option("--keep-every", type=_COUNT, metavar="N", help="Keep the steps that N divides.")
@click.option("--keep-best", type=_COUNT, metavar="N", help="Keep the best N by the metric --best.")
@click.option("--best", metavar="METRIC", help="The name of the metric for --keep-best.")
@click.option("--mode", type=click.Choice(["min", "max"]), help="Whether a low (the default) or a high one is best.")
@click.option("--unfinished", is_flag=True, help="Also remove data of saves that never finished. No job may be saving.")
@click.option("--names", metavar="PATTERN", default=OWN_NAMES, help="The names of steps, if not step-{step:010}.")
@click.option("--dry-run", is_flag=True, help="Say what would be removed, and remove nothing.")
@click.option("--yes", is_flag=True, help="Do not ask before removing.")
def command(
    session: Session,
    path: str,
    keep_last: int | None,
    keep_every: int | None,
    keep_best: int | None,
    best: str | None,
    mode: Literal["min", "max"] | None,
    unfinished: bool,
    names: str,
    dry_run: bool,
    yes: bool,
) -> Status:
    """Remove old steps of a run.

    The rules are those of milepost.Checkpointer, and a step that any of them keeps stays. The newest step always stays,
    and nothing is removed unless it is whole. Steps of other names and formats are not touched. On a terminal it asks
    first; elsewhere it needs --yes or --dry-run.
    """
    if (keep_best is None) != (best is None) or (mode is not None and best is None):
        raise InvalidRequest(
            "--keep-best needs the name of a metric, and --best and --mode need --keep-best: --keep-best 2 --best loss"
        )
    rule = Rule(keep_last, keep_every, keep_best, best, mode or "min")
    if not rule.is_set and not unfinished:
        raise InvalidRequest("say what to keep: --keep-last 3, for example; or --unfinished")
    if not dry_run and not yes and not sys.stdin.isatty():
        raise InvalidRequest("there is no terminal to ask on; pass --yes to remove, or --dry-run to look")
    place = store_at(path)
    if not dry_run:
        refuse_read_only(place)  # before a look that may take a while
    with advising(place):
        planned = plan_pruning(place, rule, unfinished=unfinished, names=names)
    plan = planned.pruning
    if dry_run:
        print_record(plan, session.json, lambda: _blocks(plan))
        return Status.FINE
    if not yes and (plan.removed or plan.unfinished or plan.cut_short):
        for block in _blocks(plan):
            write(block, sys.stderr)
        if not click.confirm("Remove these?", default=False, err=True):
            remark("nothing was removed")
            return Status.NO
    done = prune(place, rule, planned, unfinished=unfinished, names=names)
    print_record(done, session.json, lambda: _blocks(done))
    if done.left:
        remark(f"could not be removed: {', '.join(map(str, done.left))}. Find out why, and run it again")
        return Status.STORAGE
    return Status.FINE


def _blocks(pruning: Pruning) -> Iterator[Block]:
    yield TextTable(_COLUMNS, [_row(step, pruning) for step in pruning.steps])
    word = "removed" if pruning.done else "would remove"
    for number in pruning.unfinished:
        yield line(f"{word} what is left of step {number}, whose save never finished")
    for number in pruning.cut_short:
        yield line(f"{word} what is left of step {number}, whose removal was cut short")
    freed = words.size(pruning.freed_bytes)
    yield line(f"{word} {words.count(len(pruning.removed), 'step')}, {freed}; {_staying(pruning)} stay")
    if pruning.shared_bytes:
        yield line(f"{words.size(pruning.shared_bytes)} more stays: other steps share it")


def _staying(pruning: Pruning) -> str:
    return f"{sum(step.step not in pruning.removed for step in pruning.steps):,}"


def _row(step: PrunedStep, pruning: Pruning) -> list[Cell | str]:
    if step.step in pruning.removed:
        verb = Cell("removed" if pruning.done else "remove", "bad")
    else:
        verb = Cell("left", "warn") if step.step in pruning.left else Cell("keep", "good")
    why = "could not be removed" if step.step in pruning.left else ", ".join(step.why)
    return [Cell(str(step.step), "bold"), verb, words.size(step.file_bytes), why]
