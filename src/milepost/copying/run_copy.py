"""A run, from one place to another: its steps one after the other, oldest first.

So a copy that was cut short is a run, and lacks only newer steps. What is there already, whole and equal, is not copied
again. A step that is damaged is left out, and the others are copied.
"""

import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from msgspec import structs

from milepost.copying.checkpoint_copy import (
    CheckpointCopy,
    CopyOptions,
    Found,
    copy_checkpoint,
    open_own,
    what_is_there,
)
from milepost.copying.records import Copied, CopiedStep
from milepost.data.transfer import Meter
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, InvalidRequest, UnsafeCheckpoint
from milepost.inspection.runs import PlaceSummary, StepSummary, place_of_step
from milepost.steps.names import MAX_STEP
from milepost.steps.survey import each
from milepost.store import Store
from milepost.store.base import check_name

_SHOWN = 10


@dataclass(frozen=True, slots=True)
class ChosenSteps:
    """Which steps of a run: those with numbers in these ranges (None: all); or only the newest, whole and healthy."""

    ranges: tuple[range, ...] | None = None
    newest: bool = False

    @property
    def is_all(self) -> bool:
        """Whether nothing was chosen."""
        return self.ranges is None and not self.newest

    def names(self, step: int) -> bool:
        """Whether this very step was named, and not only a range that it is in."""
        return any(len(numbers) == 1 and step in numbers for numbers in self.ranges or ())


def chosen_steps(summary: PlaceSummary, choice: ChosenSteps) -> list[StepSummary]:
    """The steps of a run that a choice means, oldest first.

    Raises CheckpointNotFound for numbers that no step has, and InvalidRequest for steps of other formats.
    """
    found = list(summary.steps)
    if choice.ranges is not None:
        numbers = {step.step for step in found if step.step is not None}
        missing = [_spelled(one) for one in choice.ranges if not any(number in one for number in numbers)]
        if missing:
            raise CheckpointNotFound(f"{summary.url} has no step {_listed(missing)}. See: milepost ls")
        found = [step for step in found if any(step.step in one for one in choice.ranges)]
    if choice.newest:
        found = [step for step in found if step.state == "whole" and step.format == "milepost"][-1:]
        if not found:
            raise CheckpointNotFound(f"{summary.url} has no step of Milepost's format that is whole and healthy")
    if foreign := [step for step in found if step.format != "milepost"]:
        names = _listed(step.name for step in foreign)
        formats = ", ".join(sorted({step.format for step in foreign}))
        raise InvalidRequest(
            f"{names} in {summary.url}: not of Milepost's format but {formats}, which a copy does not change. Convert "
            "them, or say which steps to copy (steps=..., --steps)"
        )
    return found


def _spelled(numbers: range) -> str:
    if len(numbers) == 1:
        return str(numbers.start)
    end = "on" if numbers.stop > MAX_STEP else f"to {numbers.stop - 1}"
    return f"from {numbers.start} {end}"


def copy_run(
    summary: PlaceSummary,
    steps: Sequence[StepSummary],
    places: tuple[Store, Store],
    options: CopyOptions,
    meter: Meter,
    *,
    dry_run: bool,
) -> Copied:
    """Copy these steps of a run from the first place to the second. Raises InvalidRequest before anything is copied.

    What befalls one step and not the store is in its `state`. Errors of the stores are raised: the steps before are
    copied then.
    """
    began = time.monotonic()
    planned = _plan(steps, places, options)
    if not dry_run:
        meter.expect(sum(step.data_bytes or 0 for step in planned if step.state == "planned"))
        planned = [step if step.state != "planned" else _copy(step, places, options, meter) for step in planned]
    copied = sum(step.data_bytes or 0 for step in planned if step.state == "copied")
    if copied:
        meter.finish()
    return Copied(
        source=summary.url,
        target=places[1].url,
        kind="run",
        steps=tuple(planned),
        copied_bytes=copied,
        seconds=round(time.monotonic() - began, 6),
    )


def _plan(steps: Sequence[StepSummary], places: tuple[Store, Store], options: CopyOptions) -> list[CopiedStep]:
    """What there is to do for each step. Raises InvalidRequest if other checkpoints are there and may not go."""
    source, target = places
    planned = each(target, lambda step: _look(step, source, target), steps)
    others = [step.name for step, found in planned if found == "another"]
    if others and not options.overwrite:
        raise InvalidRequest(
            f"{target.url} holds other checkpoints under the names {_listed(others)}; pass overwrite=True "
            "(--overwrite) to replace them, or copy elsewhere. Nothing was copied"
        )
    return [step for step, _ in planned]


def _look(step: StepSummary, source: Store, target: Store) -> tuple[CopiedStep, Found]:
    """What there is to do for one step, and what is in its place."""
    if step.name != ".":
        check_name(step.name)  # a store may list what leads out of it
    place = place_of_step(target, step.name)
    told = CopiedStep(name=step.name, step=step.step, state="planned", url=place.url, data_bytes=step.data_bytes)
    if step.state not in ("whole", "unhealthy"):
        return structs.replace(told, state=step.state, reason=step.reason), "nothing"
    try:
        with open_own(place_of_step(source, step.name)) as files:
            found, count = what_is_there(files, place), len(files.manifest.stored)
    except (CheckpointNotFound, CheckpointDamaged, UnsafeCheckpoint) as error:
        return _left_out(told, error), "nothing"
    return structs.replace(told, state="there" if found == "the same" else "planned", files=count), found


def _copy(step: CopiedStep, places: tuple[Store, Store], options: CopyOptions, meter: Meter) -> CopiedStep:
    source, target = (place_of_step(place, step.name) for place in places)
    try:
        done = copy_checkpoint(source, target, options, meter)
    except (CheckpointNotFound, CheckpointDamaged, UnsafeCheckpoint) as error:
        return _left_out(step, error)
    return told_of(done, step)


def told_of(done: CheckpointCopy, step: CopiedStep) -> CopiedStep:
    """The record of a step, with what came of its copy."""
    return structs.replace(
        step,
        state="copied" if done.made else "there",
        generation=done.generation,
        data_bytes=done.data_bytes,
        files=done.files,
        seconds=round(done.seconds, 6),
    )


def _left_out(step: CopiedStep, error: CheckpointError) -> CopiedStep:
    """The record of a step that could not be copied. One that was removed meanwhile is no damage."""
    if isinstance(error, CheckpointNotFound):
        return structs.replace(step, state="removed", reason="it was removed before it was copied")
    return structs.replace(step, state="damaged", reason=str(error))


def _listed(names: Iterable[object]) -> str:
    texts = [str(name) for name in names]
    more = [f"and {len(texts) - _SHOWN} more"] if len(texts) > _SHOWN else []
    return ", ".join([*texts[:_SHOWN], *more])
