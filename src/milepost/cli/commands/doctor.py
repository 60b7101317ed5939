"""`milepost doctor`."""

import os
from collections.abc import Iterator

import click

from milepost.cli.blocks import Block, Cell, Style, line
from milepost.cli.command import command as make_command
from milepost.cli.output import print_record
from milepost.cli.places import PLACE
from milepost.cli.session import Session
from milepost.cli.sizes import SIZE
from milepost.cli.statuses import Status
from milepost.cli.stopping import ending_on_sigterm
from milepost.doctor.diagnose import SIZE_BYTES, diagnose
from milepost.doctor.records import CheckState, Diagnosis

_STYLES: dict[CheckState, Style] = {"ok": "good", "warn": "warn", "fail": "bad", "skipped": "dim"}
_WIDEST = len("skipped")


@make_command(Diagnosis)
@click.argument("path", type=PLACE)
@click.option("--size", type=SIZE, default=SIZE_BYTES, help="How much to write to see how fast that is. [256M]")
@click.option("--timeout", type=click.FloatRange(min=1), default=60.0, help="How long ranks wait for each other. [60]")
def command(session: Session, path: str, size: int, timeout: float) -> Status:
    """Check whether a place is fit for checkpoints.

    Can it be written to; is a create exclusive, a sync a sync, a listing current; how fast, how full; what is there
    already. All that is written for that is removed. The exit status is 1 if a check fails.

    Started on all ranks, `torchrun ... -m milepost doctor PATH`, it also says whether they all see the same place.
    """
    with ending_on_sigterm():
        found = _diagnosed(path, size, timeout)
    if found is None:
        return Status.FINE  # another rank tells
    print_record(found, session.json, lambda: _blocks(found))
    return Status.FINE if found.fit else Status.NO


def _diagnosed(path: str, size: int, timeout: float) -> Diagnosis | None:
    world = os.environ.get("WORLD_SIZE", "")
    if "RANK" not in os.environ or not world.isdecimal() or int(world) < 2:
        return diagnose(path, size_bytes=size)
    os.environ.setdefault("TORCH_CPP_LOG_LEVEL", "FATAL")  # else its library prints its stack for a rank that is late
    from milepost.doctor.job import LaunchedRanks  # noqa: PLC0415  # imports torch

    with LaunchedRanks(timeout) as comm:
        return diagnose(path, size_bytes=size, comm=comm)


def _blocks(found: Diagnosis) -> Iterator[Block]:
    width = max(len(check.name) for check in found.checks)
    for check in found.checks:
        state = Cell(f"{check.state:<{_WIDEST}}", _STYLES[check.state])
        yield line(state, "  ", Cell(f"{check.name:<{width}}", "bold"), "  ", check.found)
        if check.advice:
            yield line(" " * (_WIDEST + width + 4), Cell(check.advice, "dim"))
    counts = {state: sum(check.state == state for check in found.checks) for state in ("fail", "warn")}
    told = [f"{counts['fail']} failed"] * bool(counts["fail"]) + [f"{counts['warn']} to know of"] * bool(counts["warn"])
    words = f" ({', '.join(told)})" if told else ""
    verdict = Cell("fit", "good") if found.fit else Cell("not fit", "bad")
    yield line(Cell(found.url, "bold"), ": ", verdict, f" for checkpoints{words}")
