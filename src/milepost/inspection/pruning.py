"""Which steps of a run a rule keeps and which it removes; and removing them."""

from collections.abc import Collection, Iterable, Mapping
from typing import NamedTuple

import msgspec

from milepost.errors import CheckpointNotFound, InvalidRequest
from milepost.inspection.runs import PlaceSummary, StepSummary, look_with_files, why_kept
from milepost.inspection.usage import StepFiles, room_of
from milepost.steps.names import OWN_NAMES, StepNames
from milepost.steps.retention import Rule
from milepost.steps.shelf import Shelf
from milepost.store import Location, store_at
from milepost.store.read_only import refuse_read_only


class PrunedStep(msgspec.Struct, frozen=True):
    """One step: whether it stays, and why."""

    step: int
    name: str
    keep: bool
    why: tuple[str, ...] = ()
    file_bytes: int | None = None


class Pruning(msgspec.Struct, frozen=True, kw_only=True):
    """What pruning does to a run. `done`: False for a plan, which removed nothing.

    `steps`: those that the rule is about. `removed`: the steps that were removed, or would be. `unfinished`: those of
    saves that never finished, whose data was removed, or would be. `cut_short`: those that were being removed when
    something ended that, and whose data goes now. `left`: the steps that should be removed, and could not be.
    `freed_bytes`: what that frees on the disk, as far as known. `shared_bytes`: what the removed steps have in files
    that others need, too, and that stays.
    """

    url: str
    done: bool
    steps: tuple[PrunedStep, ...]
    removed: tuple[int, ...]
    unfinished: tuple[int, ...]
    cut_short: tuple[int, ...]
    freed_bytes: int
    shared_bytes: int = 0
    left: tuple[int, ...] = ()


class PruningPlan(NamedTuple):
    """What would be removed, and the files of all steps, by the names of these."""

    pruning: Pruning
    files: Mapping[str, StepFiles]


def plan_pruning(path: Location, rule: Rule, *, unfinished: bool = False, names: str = OWN_NAMES) -> PruningPlan:
    """What `prune` would do. Removes nothing.

    Raises CheckpointNotFound, InvalidRequest for a place that holds no steps of such names, and for a metric that no
    step has: that would keep nothing but the newest.
    """
    patterns = StepNames(names)
    summary, files = look_with_files(path)
    known = {number: step for step in summary.steps if (number := patterns.own.step(step.name)) is not None}
    if summary.kind == "nothing":
        raise CheckpointNotFound(summary.reason)
    if not known:
        raise InvalidRequest(
            f"{summary.url} holds no steps with names like {patterns.own.name(100)}, and only those are removed"
        )
    _refuse_unknown_metric(summary, known.values(), rule)
    doomed = set(Shelf(store_at(path), patterns).doomed(rule))
    kept = why_kept(rule, [step for step in known.values() if step.format == "milepost"], patterns)
    steps = [
        PrunedStep(number, step.name, number not in doomed, _why(step, kept.get(step.name, ())), step.file_bytes)
        for number, step in sorted(known.items())
        if step.state not in ("unfinished", "removed")
    ]
    freed, shared = _room_won(files, [step for step in steps if not step.keep])
    pruning = Pruning(
        url=summary.url,
        done=False,
        steps=tuple(steps),
        removed=tuple(sorted(doomed)),
        unfinished=tuple(n for n, step in sorted(known.items()) if step.state == "unfinished" and unfinished),
        cut_short=tuple(n for n, step in sorted(known.items()) if step.state == "removed" and not step.used_by),
        freed_bytes=freed,
        shared_bytes=shared,
    )
    return PruningPlan(pruning, files)


def _room_won(files: Mapping[str, StepFiles], gone: Collection[PrunedStep]) -> tuple[int, int]:
    """The bytes that a removal frees, and those that stay because other steps need them."""
    names = {step.name for step in gone}
    freed = room_of(files.values()) - room_of(one for name, one in files.items() if name not in names)
    needed = room_of(one for name, one in files.items() if name in names)
    return freed, needed - freed


def _refuse_unknown_metric(summary: PlaceSummary, steps: Iterable[StepSummary], rule: Rule) -> None:
    found = sorted({name for step in steps for name in step.metrics})
    if rule.keep_best and rule.best not in found:
        has = f"they have {', '.join(map(repr, found[:10]))}" if found else "they have none"
        raise InvalidRequest(f"no step of {summary.url} has the metric {rule.best!r}; {has}")


def _why(step: StepSummary, kept: tuple[str, ...]) -> tuple[str, ...]:
    if step.format != "milepost":
        return ("of another format",)
    return kept or (("not whole, so it does not count",) if step.state in ("damaged", "unreadable") else ())


def prune(
    path: Location, rule: Rule, plan: PruningPlan | None = None, *, unfinished: bool = False, names: str = OWN_NAMES
) -> Pruning:
    """Remove what the rule does not keep, as a `Checkpointer` with this rule would. Gives what was removed.

    Each step ceases to exist at once, and then its data goes. Nothing is removed unless the newest step that remains is
    whole. `plan`: what `plan_pruning` gave a moment ago. `unfinished`: also remove the data of saves that never
    finished; no save may be under way.
    """
    store = store_at(path)
    refuse_read_only(store)
    planned, files = plan or plan_pruning(store, rule, unfinished=unfinished, names=names)
    shelf = Shelf(store, StepNames(names))
    removed = shelf.prune(rule)
    swept = shelf.remove_unfinished() if unfinished else []
    # Another job may have removed the others.
    left = [step for step in planned.removed if step not in removed and shelf.is_there(step)]
    freed, shared = _room_won(files, [step for step in planned.steps if step.step in removed])
    places = {step: shelf.place(step) for step in planned.cut_short}
    return msgspec.structs.replace(
        planned,
        done=True,
        removed=tuple(removed),
        unfinished=tuple(swept),
        cut_short=tuple(step for step, place in places.items() if next(iter(place.list("data/")), None) is None),
        left=tuple(left),
        freed_bytes=freed,
        shared_bytes=shared,
    )
