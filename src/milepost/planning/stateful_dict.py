"""The dict that planners work on: stateful objects are replaced by their state dicts, and filled afterwards."""

from collections.abc import Callable, Mapping
from functools import cache, partial
from typing import Any

from milepost.errors import InvalidRequest
from milepost.planning.protocol_run import MakeState
from milepost.state.take_apart import is_stateful


def expand_stateful(state: Any) -> dict[str, Any]:
    """The state with each stateful object replaced by its state dict. Raises InvalidRequest if it is not a dict."""
    if not isinstance(state, Mapping):
        raise InvalidRequest(f"planners work on a dict; put this {type(state).__name__} into one")
    dicts = {key: state[key].state_dict() for key in _stateful_keys(state)}
    return {key: dicts.get(key, value) for key, value in state.items()}


def expand_to_fill(state: dict[str, Any]) -> tuple[MakeState, Callable[[], None]]:
    """A function that gives the expanded state, and one that puts it back into `state` once it is filled."""
    expanded = cache(partial(expand_stateful, state))

    def put_back() -> None:
        filled, stateful = expanded(), _stateful_keys(state)
        for key in stateful:
            state[key].load_state_dict(filled[key])
        for key, value in filled.items():  # one by one: a subclass of dict may have its own way to set an item
            if key not in stateful:
                state[key] = value  # noqa: PERF403

    return expanded, put_back


def _stateful_keys(state: Mapping[str, Any]) -> list[str]:
    """The keys of stateful objects, in the same order on every rank: their methods may be collectives."""
    return sorted((key for key, value in state.items() if is_stateful(value)), key=str)
