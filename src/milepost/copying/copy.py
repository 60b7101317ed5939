"""`milepost.copy`: a checkpoint or a run, from any kind of place to any that can be written."""

from collections.abc import Iterable

from msgspec import structs

from milepost.commit.beside import indices_beside, names_at
from milepost.commit.find import generations_in
from milepost.commit.nesting import refuse_file, refuse_run, relation
from milepost.copying.checkpoint_copy import (
    CopyOptions,
    copy_checkpoint,
    open_own,
    refuse_another,
    what_is_there,
)
from milepost.copying.records import Copied, CopiedStep
from milepost.copying.run_copy import ChosenSteps, chosen_steps, copy_run, told_of
from milepost.core.option_values import check_values, items_of
from milepost.data.transfer import HOST_MEMORY_BYTES, Meter, Transfer, Watcher, limited_transfer
from milepost.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest, StorageError
from milepost.inspection.runs import PlaceSummary, look_at
from milepost.store import Location, Store, store_at
from milepost.store.location import store_to_save

_LOOKS = 4
"""How often the newest step is looked for, where it is removed before it is copied."""
_SHOWN = 10


def copy(
    source: Location,
    target: Location,
    *,
    steps: Iterable[int] | None = None,
    newest: bool = False,
    overwrite: bool = False,
    host_memory_bytes: int = HOST_MEMORY_BYTES,
    transfer: Transfer | None = None,
    progress: Watcher | None = None,
) -> Copied:
    """Copy a checkpoint to `target`, or the steps of a run into it, under their names. From one process.

    Returns once everything survives power loss, and says what became of each step. Every byte is checked on its way,
    and each checkpoint is committed as a save is: until then nothing at `target` looks whole. What is there already,
    whole and equal, is not copied again, so the same call goes on where one was cut short. Of a run the oldest step is
    copied first.

    `steps`: the numbers of the steps to copy. `newest=True`: only the newest step that is whole and healthy; the next
    one, where it is removed before it is copied.
    `overwrite=True`: replace another checkpoint at `target`. `host_memory_bytes`, `transfer`, `progress`: as for
    `save`.

    Raises InvalidRequest for a wrong argument, for another checkpoint at `target`, and for one of another format, which
    `convert` reads; CheckpointNotFound, StorageError, and SaveConflict if another job wrote to `target` meanwhile.
    Raises CheckpointDamaged, naming file, tensor and box, for bytes that are not what was saved. Of a run, the other
    steps are copied before it does. A step that is removed meanwhile is left out; it is CheckpointNotFound if `steps`
    names it, or if nothing else was chosen.

    >>> _ = milepost.save({"w": torch.ones(3)}, "memory://original")
    >>> done = milepost.copy("memory://original", "memory://copy")
    >>> done.steps[0].state, done.copied_bytes
    ('copied', 12)
    """
    check_values({"newest": newest, "overwrite": overwrite, "progress": progress})
    limited_transfer(transfer, host_memory_bytes)
    ranges = None if steps is None else tuple(map(_one_step, items_of("steps", steps)))
    options = CopyOptions(overwrite, host_memory_bytes, transfer)
    choice = ChosenSteps(ranges, newest)
    done = copy_place(store_at(source), store_to_save(target), choice, options, progress)
    _raise_if_left_out(done)
    if gone := gone_steps(done, choice):
        raise CheckpointNotFound(gone)
    return done


def _one_step(number: object) -> range:
    if not isinstance(number, int) or isinstance(number, bool) or number < 0:
        raise InvalidRequest(f"steps are whole numbers from 0 on, not {number!r}")
    return range(number, number + 1)


def _raise_if_left_out(done: Copied) -> None:
    """Raise the error of steps that could not be copied. `gone_steps` has those that were removed meanwhile."""
    lost = [step for step in done.steps if step.state in ("damaged", "unreadable")]
    if lost:
        lines = "\n  ".join(f"{step.name}: {step.reason}" for step in lost)
        kind = CheckpointDamaged if any(step.state == "damaged" for step in lost) else StorageError
        rest = len(done.steps) - len(lost)
        raise kind(f"{len(lost)} of {len(done.steps)} steps of {done.source} were not copied, {rest} were:\n  {lines}")


def copy_place(
    source: Store,
    target: Store,
    choice: ChosenSteps,
    options: CopyOptions,
    progress: Watcher | None = None,
    *,
    dry_run: bool = False,
) -> Copied:
    """Like `copy`; what befell single steps of a run is in the record. `dry_run`: only say what would be copied."""
    refuse_itself(source, target)
    refuse_file(target, "copy elsewhere")
    meter = Meter("copy", target.url, progress)
    for left in reversed(range(_LOOKS)):
        summary = look_at(source)
        if summary.kind == "nothing":
            raise CheckpointNotFound(summary.reason)
        if summary.kind == "checkpoint":
            break
        steps = chosen_steps(summary, choice)
        if all(step.name != "." for step in steps):
            _refuse_checkpoint(target)
        done = copy_run(summary, steps, (source, target), options, meter, dry_run=dry_run)
        if not choice.newest or not left or done.steps[0].state != "removed":
            return done
    if not choice.is_all:
        raise InvalidRequest(f"{summary.url} is one checkpoint, not a run: it has no steps to choose from")
    refuse_run(target, "copy")
    return _copy_one(summary, (source, target), options, meter, dry_run=dry_run)


def gone_steps(done: Copied, choice: ChosenSteps) -> str:
    """Which steps were to be copied and are no checkpoints, or none any more; empty if that is as it should be.

    A run loses old steps while it is copied. But somebody who names a step wants it, and who copies nothing is told.
    """
    gone = [step for step in done.steps if step.state in ("removed", "unfinished")]
    if len(gone) < len(done.steps):
        gone = [step for step in gone if step.step is not None and choice.names(step.step)]
    if not gone:
        return ""
    lines = "\n  ".join(f"{step.name}: {step.reason}" for step in gone[:_SHOWN])
    others = len(done.steps) - len(gone)
    return f"{len(gone)} of {len(done.steps)} steps of {done.source} were not copied, {others} were:\n  {lines}"


def _copy_one(
    summary: PlaceSummary, places: tuple[Store, Store], options: CopyOptions, meter: Meter, *, dry_run: bool
) -> Copied:
    source, target = places
    [seen] = summary.steps
    step = CopiedStep(name=seen.name, step=seen.step, state="planned", url=target.url, data_bytes=seen.data_bytes)
    if dry_run:
        with open_own(source) as files:
            found = what_is_there(files, target)
        if found == "the same":
            step = structs.replace(step, state="there")
        else:
            refuse_another(found, target, options)
    else:
        meter.expect(seen.data_bytes or 0)
        done = copy_checkpoint(source, target, options, meter)
        step = told_of(done, step)
        if done.made:
            meter.finish()
    return Copied(
        source=summary.url,
        target=target.url,
        kind="checkpoint",
        steps=(step,),
        copied_bytes=(step.data_bytes or 0) if step.state == "copied" else 0,
        seconds=step.seconds,
    )


def refuse_itself(source: Store, target: Store) -> None:
    """Raise InvalidRequest for a copy of a place to itself, or into itself."""
    found = relation(source, target)
    if found:
        where = "to itself" if found == "same" else "into itself"
        raise InvalidRequest(f"{source.url} cannot be copied {where}: {target.url}")


def _refuse_checkpoint(target: Store) -> None:
    """Raise InvalidRequest where a run would be copied into a checkpoint."""
    if generations_in(target, names_at(target)) or indices_beside(target):
        raise InvalidRequest(f"{target.url} is a checkpoint, and a run is copied into a folder of checkpoints")
