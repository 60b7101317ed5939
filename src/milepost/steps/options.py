"""The options of a `Checkpointer` and of its calls."""

from collections.abc import Iterable, Mapping
from typing import Any

from milepost.core.option_values import check_values
from milepost.errors import InvalidRequest
from milepost.loading.options import LOAD_OPTIONS, LoadKeywords
from milepost.saving.options import SAVE_SETTINGS, SaveSettings


class RunKeywords(SaveSettings, LoadKeywords, total=False):
    """The options of `Checkpointer`: those of every save and load."""


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


def only(names: frozenset[str], options: Mapping[str, Any]) -> Any:
    """The options of these names."""
    return {name: value for name, value in options.items() if name in names}
