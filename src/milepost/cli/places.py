"""Places on the command line: how they are completed, and which checkpoint is meant where a run is named."""

import contextlib
import os
from collections.abc import Iterator
from typing import Any

import click

from milepost.checkpoint import Checkpoint, open_checkpoint
from milepost.cli.output import remark
from milepost.commit.find import told_if_gone
from milepost.errors import CheckpointNotFound
from milepost.inspection.place import place_at
from milepost.inspection.runs import newest_step
from milepost.store import AtGeneration, LocalStore, Store


class PlaceType(click.Path):
    """A path or URL. Shells complete it as a path; whether there is something is not click's affair."""

    def convert(self, value: Any, param: click.Parameter | None, ctx: click.Context | None) -> Any:
        """The text as it is."""
        del param, ctx
        return value


PLACE = PlaceType()


@contextlib.contextmanager
def opened(path: str) -> Iterator[Checkpoint]:
    """The checkpoint at this place, as `one_at` chooses it. Raises CheckpointNotFound, and says where to look.

    Also for one that is removed meanwhile.
    """
    place = one_at(path)
    with advising(place):
        checkpoint = open_checkpoint(place)
    with checkpoint, told_if_gone(place, checkpoint.generation, "read"):
        yield checkpoint


@contextlib.contextmanager
def advising(*places: Store) -> Iterator[None]:
    """Inside, an error about one of these places, where there is no checkpoint, also says where to look."""
    try:
        yield
    except CheckpointNotFound as error:
        meant = next((place for place in places if place.url in str(error)), places[0])
        raise CheckpointNotFound(advised(str(error), meant)) from error


def one_at(path: str, *, or_unhealthy: bool = True) -> Store:
    """The place of one checkpoint: where a run is named, that of its newest step that is whole, which a remark says.

    `or_unhealthy`: of a run without a healthy step, the newest unhealthy one. `path@3` is generation 3 of a place. What
    is there is not opened yet.
    """
    place = place_at(path)
    found = newest_step(place, or_unhealthy=or_unhealthy)
    if found is None:
        return place
    step, name = found.summary, found.place.url.rpartition("/")[2]
    if step.state == "unhealthy":
        remark(f"{place.url} is a run without a healthy step; this is {name}, its newest unhealthy one: {step.reason}")
        return found.place
    newer = f" that is whole; {found.passed[0].name} is {found.passed[0].state}" if found.passed else ""
    remark(f"{place.url} is a run; {name} is its newest step{newer}")
    return found.place


def advised(text: str, place: Store) -> str:
    """Why there is no checkpoint, with what to do."""
    advice = _where_to_look(place)
    return f"{text.removesuffix('.')}.{advice}" if advice else text


def _where_to_look(place: Store) -> str:
    place = place.inner if isinstance(place, AtGeneration) else place
    if not isinstance(place, LocalStore):
        return " Is the path right?"
    above = os.path.dirname(place.url)
    while above and not os.path.isdir(above):
        above = os.path.dirname(above)
    missing = "" if os.path.lexists(place.root) else " There is no such file or folder."
    return f"{missing} To see what there is: milepost ls {above}" if above not in ("", "/") else missing
