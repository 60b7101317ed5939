"""Which step a restore takes: the newest that is whole and healthy. The coordinator chooses for all ranks."""

from collections.abc import Mapping
from dataclasses import dataclass, field

import msgspec

from milepost.comm import Announcement, Call, Comm, broadcast, mark_told
from milepost.core.wire import Wire
from milepost.errors import CheckpointDamaged, CheckpointError, CheckpointNotFound, CheckpointUnhealthy
from milepost.steps.shelf import Shelf


class RestoreChoice(msgspec.Struct, frozen=True, array_like=True):
    """The step that all ranks restore (None: there is none), its folder, and whether they read all of it first."""

    step: int | None
    folder: str
    verify_first: bool


@dataclass(frozen=True, slots=True)
class SkippedSteps:
    """The steps that a restore has passed over, and why. The same on every rank."""

    damaged: dict[int, str] = field(default_factory=dict)
    unhealthy: dict[int, str] = field(default_factory=dict)


_ANOTHER = {"CheckpointDamaged", "CheckpointNotFound", "CheckpointUnhealthy"}
"""The errors after which a restore goes on to an older step."""
_NOTHING = RestoreChoice(None, "", verify_first=False)
_CHOOSING = Announcement("choosing", Wire(RestoreChoice))


def choose(comm: Comm, shelf: Shelf, step: int | None, skipped: SkippedSteps, verify_first: bool) -> RestoreChoice:
    """The coordinator's choice, on every rank: the newest step that was not tried yet."""

    def choose_here() -> RestoreChoice:
        if step is not None:
            if not shelf.is_there(step):
                shown = ", ".join(map(str, shelf.steps()[-10:])) or "none"
                raise CheckpointNotFound(
                    f"there is no step {step} at {shelf.root.url}. The newest that there are: {shown}"
                )
            return RestoreChoice(step, shelf.folder_of(step), verify_first)
        found = shelf.untried({*skipped.damaged, *skipped.unhealthy})
        return _NOTHING if found is None else RestoreChoice(*found, verify_first)

    return broadcast(comm, Call("restoring from", shelf.root.url), _CHOOSING, choose_here)


def newest_healthy(shelf: Shelf) -> int | None:
    """The newest step that no rule found unhealthy. Looks at the manifests, from the newest on."""
    passed: set[int] = set()
    while (found := shelf.untried(passed)) is not None:
        health = shelf.health_at(found[1])
        if health is None or health.ok:
            return found[0]
        passed.add(found[0])
    return None


def nothing_left(url: str, skipped: SkippedSteps, default: int | None) -> int:
    """What a restore does without a step: gives the default if nothing was ever saved, else raises. On every rank."""
    if skipped.unhealthy:
        raise mark_told(
            CheckpointUnhealthy(
                f"no step at {url} is healthy and whole:\n  {_listed({**skipped.damaged, **skipped.unhealthy})}\n"
                "Load one of them with `restore(state, step=...)`, or start again at another place."
            )
        )
    if skipped.damaged:
        raise mark_told(
            CheckpointDamaged(
                f"no step at {url} is whole, and the state may be partly filled:\n  {_listed(skipped.damaged)}\n"
                "Restore these files from a backup, or start again at another place."
            )
        )
    if default is None:
        text = f"nothing was saved at {url} yet. Pass `default` to get a step instead"
        raise mark_told(CheckpointNotFound(text))
    return default


def _listed(reasons: Mapping[int, str]) -> str:
    return "\n  ".join(f"step {step}: {reasons[step]}" for step in sorted(reasons, reverse=True))


def allows_another(error: CheckpointError) -> bool:
    """Whether all that went wrong, on all ranks, is that this checkpoint is damaged or gone. The same on every rank."""
    kinds = {failure.kind for failure in error.failures.values()} or {type(error).__name__}
    return kinds <= _ANOTHER


def is_unhealthy(error: CheckpointError) -> bool:
    """Whether all that went wrong is that a rule found this checkpoint unhealthy. The same on every rank."""
    kinds = {failure.kind for failure in error.failures.values()} or {type(error).__name__}
    return kinds == {CheckpointUnhealthy.__name__}
