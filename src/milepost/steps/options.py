"""The options of a `Checkpointer` and of its calls."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from milepost.core.option_values import check_values
from milepost.errors import InvalidRequest
from milepost.loading.options import LOAD_OPTIONS, LoadKeywords
from milepost.planning.protocol import SavePlanner
from milepost.planning.route import ignored_by_save, route
from milepost.planning.storage import CheckpointWriter
from milepost.saving.health import HealthCheck, HealthRule
from milepost.saving.options import SAVE_SETTINGS, SaveKeywords, SaveSettings
from milepost.steps.names import StepNames
from milepost.steps.shelf import METRICS, Shelf
from milepost.store import AtGeneration, Location, Store, Within, store_at


@dataclass(frozen=True, slots=True)
class NewestStep:
    """The base of incremental saves: the newest step under a root. `trusted`: one of these steps; None: any."""

    root: Store
    names: StepNames
    trusted: frozenset[int] | None = None

    def find(self) -> str | None:
        """The name of its folder. None if nothing was saved yet."""
        return Shelf(self.root, self.names).newest_own(self.trusted)

    def at(self, name: str) -> Store:
        """The store of a step."""
        return Within(self.root, name)


class RunKeywords(SaveSettings, LoadKeywords, total=False):
    """The options of `Checkpointer`: those of every save and load."""


@dataclass(frozen=True, slots=True)
class _RuleAtStep:
    """A rule for healthy checkpoints, told which step it judges."""

    rule: HealthRule
    step: int
    metrics: Mapping[str, float]

    def __call__(self, check: HealthCheck) -> bool | str:
        return self.rule(replace(check, step=self.step, metrics=self.metrics))


def at_step(given: SaveKeywords, step: int) -> None:
    """Tell a rule for healthy checkpoints, if there is one among the options, which step and metrics it judges."""
    rule = given.get("healthy", False)
    if callable(rule):
        given["healthy"] = _RuleAtStep(rule, step, (given.get("metadata") or {}).get(METRICS, {}))


def check_options(given: Iterable[str]) -> None:
    """Raise InvalidRequest for an option that neither saves nor loads have."""
    known = SAVE_SETTINGS | LOAD_OPTIONS
    unknown = sorted(set(given) - known)
    if unknown:
        hint = ". A planner either saves or loads: pass save_planner or load_planner" if "planner" in unknown else ""
        raise InvalidRequest(
            f"{', '.join(unknown)}: no option of every save or load. There are {', '.join(sorted(known))}{hint}"
        )


def unknown_options(options: Mapping[str, Any], known: frozenset[str], call: str) -> InvalidRequest | None:
    """What is wrong with options that a call does not have, for all ranks to hear."""
    unknown = sorted(options.keys() - known)
    if not unknown:
        return None
    return InvalidRequest(
        f"{', '.join(unknown)}: {call} has no such option. Its options are {', '.join(sorted(known))}"
    )


def wrong_values(given: Mapping[str, Any]) -> InvalidRequest | None:
    """What is wrong with the values of options, for all ranks to hear."""
    try:
        check_values(given)
    except InvalidRequest as error:
        return error
    return None


def wrong_save(options: Mapping[str, Any], metadata: object, incremental: object) -> InvalidRequest | None:
    """What is wrong with the options of one save, for all ranks to hear. `incremental`: None where it was not given."""
    given = {"metadata": metadata} | ({} if incremental is None else {"incremental": incremental})
    return unknown_options(options, SAVE_SETTINGS, "a save") or wrong_values(given)


def only(names: frozenset[str], options: Mapping[str, Any]) -> Any:
    """The options of these names."""
    return {name: value for name, value in options.items() if name in names}


def refuse_planner(root: Store, planner: SavePlanner) -> None:
    """Raise InvalidRequest for a planner whose saves cannot be incremental."""
    wrong = ignored_by_save({"incremental": True}, route(CheckpointWriter(root), planner), own_writer=False)
    if wrong is not None:
        raise wrong


def root_at(path: Location) -> Store:
    """The store of a run. Raises InvalidRequest for a place of one checkpoint."""
    root = store_at(path)
    if isinstance(root, AtGeneration):
        raise InvalidRequest(f"{root.url}: a generation belongs to one checkpoint; load that step by itself instead")
    return root
