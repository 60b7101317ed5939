"""Models and optimizers with sharded state: as dicts to save, and filled from a checkpoint that other ranks saved."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_optimizer_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
)
from torch.distributed.tensor import DTensor
from torch.nn import Module
from torch.optim import Optimizer

import milepost
from milepost.comm import TIMEOUT_S
from milepost.integrations.lightning_shared.reading import Keys, SavedParts, Trusted
from milepost.store.spelling import shown

_STATE, _GROUPS, _PARAMS = "state", "param_groups", "params"


def model_state(module: Module) -> dict[str, Any]:
    """The state dict of a module: this rank's shards, where they are, by names without wrappers."""
    return get_model_state_dict(module)


def optimizer_state(module: Module, optimizer: Any) -> dict[str, Any]:
    """The state dict of an optimizer of this module: this rank's shards, by the names of the parameters."""
    return get_optimizer_state_dict(module, bare(optimizer))


def bare(optimizer: Any) -> Optimizer:
    """The optimizer of torch inside one of Lightning's."""
    return optimizer if isinstance(optimizer, Optimizer) else optimizer.optimizer


def part_of_rank(state: Mapping[str, Any], shared: Sequence[str], rank: int) -> dict[str, Any]:
    """What this rank saves of a state. All ranks save `shared`. Of the rest, rank 0's counts, as in Lightning.

    What cannot be taken from one rank is saved by all: sharded tensors, and values that are private to a rank.
    """
    if rank == 0:
        return dict(state)
    return {
        key: value if key in shared else _joint(value)
        for key, value in state.items()
        if key in shared or _is_joint(value)
    }


def _is_joint(value: Any) -> bool:
    if isinstance(value, Mapping):
        return any(map(_is_joint, value.values()))
    if isinstance(value, (list, tuple)):
        return any(map(_is_joint, value))
    if isinstance(value, (DTensor, milepost.PerRank, milepost.Sharded)):
        return True
    return type(value).__name__ == "ShardedTensor"


def _joint(value: Any) -> Any:
    """The part of a value that all ranks save."""
    if not isinstance(value, Mapping):
        return value
    return {key: _joint(inner) for key, inner in value.items() if _is_joint(inner)}


@dataclass(frozen=True, slots=True)
class Filling:
    """How to fill models and optimizers: `strict` as in `load_state_dict`."""

    trusted: Trusted
    strict: bool = True
    timeout_s: float = TIMEOUT_S


def fill(
    saved: SavedParts,
    models: Mapping[Keys, Module],
    optimizers: Mapping[Keys, tuple[Module, Optimizer]],
    how: Filling,
) -> None:
    """Load models, and optimizers of them, from every rank, onto the shards that they have now.

    Raises StateMismatch, before anything is read, with all that does not fit.
    """
    states = {keys: model_state(module) for keys, module in models.items()}
    targets = {keys: _OptimizerTarget.of(saved.optimizers[keys], *pair) for keys, pair in optimizers.items()}
    wrong = [f"the checkpoint has {key!r}, and the model has not" for key in _unexpected(saved, states) if how.strict]
    wrong += chain.from_iterable(target.wrong for target in targets.values())
    if wrong:
        lines = "\n  ".join(wrong[:50])
        raise milepost.StateMismatch(f"{shown(saved.path)} does not fit:\n  {lines}")
    target: dict[Any, Any] = {}
    for keys, state in chain(states.items(), ((keys, each.state) for keys, each in targets.items())):
        _put(target, keys, state)
    milepost.load(
        target,
        saved.path,
        timeout_s=how.timeout_s,
        allow_unexpected=True,
        allow_missing=not how.strict,
        types=how.trusted.types,
        allow_pickle=how.trusted.allow_pickle,
    )
    for keys, module in models.items():
        set_model_state_dict(module, states[keys], options=StateDictOptions(strict=how.strict))
    for keys, (module, optimizer) in optimizers.items():
        targets[keys].apply(module, optimizer)


def _unexpected(saved: SavedParts, states: Mapping[Keys, Mapping[str, Any]]) -> list[str]:
    return [
        ".".join(map(str, (*keys, name)))
        for keys in states
        for name in sorted(saved.models[keys] - states[keys].keys())
    ]


@dataclass(frozen=True, slots=True)
class _OptimizerTarget:
    """The state of an optimizer, under the keys of the checkpoint, and how to put it back.

    `state`: what is loaded. `names`: the name of the parameter for each key. `groups`: the saved ones, by name.
    """

    state: dict[str, Any]
    names: dict[Any, str]
    groups: list[dict[str, Any]]
    wrong: list[str]

    @classmethod
    def of(cls, saved: Mapping[str, Any], module: Module, optimizer: Optimizer) -> "_OptimizerTarget":
        now = optimizer_state(module, optimizer)
        names, wrong = _names(saved, now)
        groups = [{**group, _PARAMS: [names.get(p, p) for p in group[_PARAMS]]} for group in saved[_GROUPS]]
        state: dict[Any, dict[str, Any]] = {}
        for key, kept in saved[_STATE].items() if not wrong else ():
            here = now[_STATE].get(names[key], {})
            wrong += [
                f"{names[key]!r} has {n!r} in the checkpoint's optimizer, not in this one"
                for n in kept
                if n not in here
            ]
            state[key] = {name: here[name] for name in kept if name in here}
        return cls({_STATE: state} if state else {}, names, groups, wrong)

    def apply(self, module: Module, optimizer: Optimizer) -> None:
        """Hand the loaded state to the optimizer."""
        state = {self.names[key]: kept for key, kept in self.state.get(_STATE, {}).items()}
        whole: dict[str, Any] = {_STATE: state, _GROUPS: self.groups}
        # Not strict: a parameter that never had a gradient has no state.
        set_optimizer_state_dict(module, optimizer, whole, options=StateDictOptions(strict=False))


def _names(saved: Mapping[str, Any], now: Mapping[str, Any]) -> tuple[dict[Any, str], list[str]]:
    """The name of the parameter for each key of a saved optimizer, and what is wrong with them.

    Strategies without sharded state save optimizers by number; the order of the parameters tells which is which.
    """
    here = [name for group in now[_GROUPS] for name in group[_PARAMS]]
    there = [key for group in saved[_GROUPS] for key in group[_PARAMS]]
    if len(saved[_GROUPS]) != len(now[_GROUPS]):
        return {}, [f"the optimizer has {len(now[_GROUPS])} groups, and {len(saved[_GROUPS])} in the checkpoint"]
    if there and all(isinstance(key, int) for key in there):
        if len(here) != len(there):
            return {}, [f"the optimizer has {len(here)} parameters, and {len(there)} in the checkpoint"]
        return dict(zip(there, here, strict=True)), []
    differing = sorted(set(here) ^ set(there))
    return {key: key for key in there}, [f"{name!r} is in one of the two optimizers only" for name in differing]


def _put(target: dict[Any, Any], keys: Keys, state: Any) -> None:
    """Put a part where the checkpoint has it. Lists are in the order of their parts."""
    if len(keys) == 1:
        target[keys[0]] = state
    else:
        listed = target.setdefault(keys[0], [])
        assert len(listed) == keys[1], "parts of a list come one after the other"
        listed.append(state)


def device_of(place: Any) -> torch.device:
    """The device that a `map_location` names. Raises InvalidRequest for the other kinds that `torch.load` takes."""
    if not isinstance(place, (str, int, torch.device)):
        raise milepost.InvalidRequest(f"map_location is a device here, such as 'cuda:0', not {place!r}")
    return torch.device(place)
