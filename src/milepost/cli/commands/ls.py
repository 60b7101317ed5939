"""`milepost ls`."""

from collections.abc import Iterator

import click

from milepost.cli import words
from milepost.cli.blocks import Block, Cell, Column, Style, TextTable, line
from milepost.cli.command import command as make_command
from milepost.cli.output import is_terminal, print_record
from milepost.cli.places import PLACE, advising
from milepost.cli.session import Session
from milepost.cli.statuses import Status
from milepost.errors import CheckpointNotFound
from milepost.inspection.place import place_at
from milepost.inspection.runs import PlaceSummary, StepState, StepSummary, look_at

STYLES: dict[StepState, Style] = {
    "whole": "good",
    "unhealthy": "warn",
    "unfinished": "dim",
    "removed": "dim",
    "unreadable": "warn",
    "damaged": "bad",
}
_STATUSES: dict[StepState, Status] = {"damaged": Status.DAMAGED, "unreadable": Status.STORAGE}
_COLUMNS = [
    Column("STEP", right=True),
    Column("STATE"),
    Column("SIZE", right=True),
    Column("NEW", right=True, rank=2),
    Column("AGE", right=True, rank=1),
    Column("RANKS", right=True, rank=4),
    Column("FORMAT", rank=5),
    Column("METRICS", rank=2),
    Column("KEPT", rank=3),
    Column("VERIFIED", rank=6),
]


@make_command(PlaceSummary)
@click.argument("path", type=PLACE)
def command(session: Session, path: str) -> Status:
    """List the steps of a run, or one checkpoint.

    PATH is a run, which is a folder or URL with a checkpoint in each of its folders; or it is one checkpoint. Manifests
    and names are looked at, and no data is read: "whole" means that all files are there and have the right size. SIZE
    is all that a step needs. Where steps share data, NEW is what each of them wrote itself. The exit status is 4 or 5
    if PATH is one checkpoint that is damaged or cannot be read; a run is listed, whatever is in it.
    """
    place = place_at(path)
    summary = look_at(place)
    with advising(place):
        if summary.kind == "nothing":
            raise CheckpointNotFound(summary.reason)
    print_record(summary, session.json, lambda: _blocks(summary))
    return _STATUSES.get(summary.steps[0].state, Status.FINE) if summary.kind == "checkpoint" else Status.FINE


def _blocks(summary: PlaceSummary) -> Iterator[Block]:
    name = Column("NAME", rank=7 if all(step.step is not None for step in summary.steps) else 0)
    yield TextTable([*_COLUMNS, name], [_row(step, summary) for step in summary.steps])
    for step in summary.steps:
        if step.reason:
            yield line(f"{_name(step)}: ", Cell(step.reason, STYLES[step.state]))
    if summary.kind == "run" and is_terminal():
        newest = f"the newest that is whole is {summary.newest}" if summary.newest else "none of them is whole"
        total = words.size(summary.file_bytes)
        yield line("")
        yield line(Cell(f"{words.count(len(summary.steps), 'step')}, {total}; {newest}", "dim"))


def _name(step: StepSummary) -> str:
    return step.name if step.name != "." else step.url.rstrip("/").rpartition("/")[2]


def _row(step: StepSummary, summary: PlaceSummary) -> list[Cell | str]:
    metrics = ", ".join(f"{name} {words.number(value)}" for name, value in step.metrics.items())
    foreign = any(one.format != "milepost" for one in summary.steps)
    shares = any(one.new_bytes != one.data_bytes for one in summary.steps if one.new_bytes is not None)
    return [
        Cell("" if step.step is None else str(step.step), "bold"),
        Cell(step.state, STYLES[step.state]),
        words.size(step.file_bytes),
        words.size(step.new_bytes) if shares else "",
        words.age(step.age_s),
        "" if step.ranks is None else str(step.ranks),
        step.format if foreign else "",
        metrics,
        ", ".join(step.kept),
        (step.verified or "")[:10],
        _name(step) if step.step is None or not step.name.startswith("step-") else "",
    ]
