"""Optimizers under the names of their parameters.

An optimizer numbers its parameters. Where the modules that own them stand in the same state, its entries get their
names instead, which are the keys of the modules' own entries. In a checkpoint an optimizer then reads

    state         {name: what the optimizer keeps for this parameter}
    param_groups  {name of the first parameter: {option: value, ..., "params": {name: None}}}

Names of different ranks (pipeline stages, experts) stand side by side, and equal ones are the same parameter. Below
"params" a tied parameter has all its names; the value of the others is the first, under which its state stands. A
parameter that no module owns keeps its number.
"""

import contextlib
import warnings
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

import torch
from torch import nn

from milepost.core.limits import MAX_DEPTH
from milepost.core.tree import Path, children, exact_path, show_path
from milepost.errors import InvalidState
from milepost.state.wrappers import fsdp_class, parameters_of, plain_keys_of, sharded_states

T = TypeVar("T")
_SHOWN = 5
_NOT_OPTIONS = ("params", "param_names")
"""What a group holds of its parameters."""


@dataclass(frozen=True, slots=True)
class Member:
    """A parameter of an optimizer. `id`: its number, or what else the optimizer's state dict calls it.

    `names`: all its names in the state, none where no module owns it. `short`: its names within its module, where no
    other parameter of this optimizer has the same one; `unique`: where none of any optimizer of the state has it.
    """

    id: Hashable
    names: tuple[str, ...] = ()
    short: tuple[str, ...] = ()
    unique: tuple[str, ...] = ()

    @property
    def name(self) -> Hashable:
        """What its entries are saved under."""
        return self.names[0] if self.names else self.id


Groups = tuple[tuple[Member, ...], ...]


@dataclass(frozen=True, slots=True)
class NamedOptimizer:
    """An optimizer with the names of its parameters, by groups.

    `state_dict`: as the optimizer gives it, with the ids of the members. `like` gives a tensor that is cut as the state
    of a parameter, by its id. `feed` takes such a state dict back, with the ids of parameters whose type has changed.
    """

    optimizer: torch.optim.Optimizer
    groups: Groups
    state_dict: Mapping[str, Any]
    like: Callable[[Hashable], Any]
    feed: Callable[[dict[str, Any], AbstractSet[Hashable]], None]

    def named(self) -> dict[str, Any]:
        """The state dict with names in place of ids."""
        return by_name(self.state_dict, self.groups)


def by_name(state_dict: Mapping[str, Any], groups: Groups) -> dict[str, Any]:
    """A state dict of an optimizer, keyed by the names of its parameters. Pure."""
    names = {member.id: member.name for group in groups for member in group}
    named: dict[Hashable, Any] = {}
    for i, (group, members) in enumerate(zip(state_dict["param_groups"], groups, strict=True)):
        held: dict[Hashable, Any] = {}
        for member in members:
            held[member.name] = None
            held.update(dict.fromkeys(member.names[1:], member.name))
        named[group_key(members, i)] = {**options_of(group), "params": held}
    state = {names.get(key, key): kept for key, kept in state_dict["state"].items()}
    return {**state_dict, "state": state, "param_groups": named}


def group_key(members: Sequence[Member], number: int) -> Hashable:
    """What a group is called: by the first of its parameters that has a name, or by its number."""
    return next((member.names[0] for member in members if member.names), number)


def options_of(group: Mapping[str, Any]) -> dict[str, Any]:
    """The options of a group, without what it holds of its parameters."""
    return {name: value for name, value in group.items() if name not in _NOT_OPTIONS}


class OwnerNames:
    """The parameters that the modules of a state own, with their names."""

    def __init__(self, state: Any) -> None:
        self._modules = list(_found_in(state, (), nn.Module))
        optimizers = [one for _, one in _found_in(state, (), torch.optim.Optimizer)]
        trained = {id(parameter) for optimizer in optimizers for parameter in _parameters(optimizer)}
        self._paths: dict[int, list[tuple[int, Path]]] = {}
        self._parameters: dict[int, torch.Tensor] = {}  # which keeps their ids from being used again
        texts: dict[str, set[int]] = {}
        for number, (path, module) in enumerate(self._modules):
            for name, parameter in parameters_of(module):
                self._parameters[id(parameter)] = parameter
                self._paths.setdefault(id(parameter), []).append((number, (*path, name)))
                texts.setdefault(show_path((*path, name)), set()).add(id(parameter))
        self._ambiguous = {text for text, ids in texts.items() if len(ids) > 1}
        self._repeated = self._repeated_in(trained)

    def of(self, optimizer: torch.optim.Optimizer) -> NamedOptimizer | None:
        """The optimizer with names. None for one whose parameters have none, or that has a state dict of its own."""
        if not _is_plain(optimizer):
            return None
        held = list(_parameters(optimizer))
        owners = {self._paths[id(p)][0][0] for p in held if id(p) in self._paths}
        if not owners and (held or not self._modules):
            return None  # one without parameters (of a stage that has none) has the form that other ranks give
        fsdp = fsdp_class()
        sharded = [i for i in owners if fsdp and any(isinstance(m, fsdp) for m in self._modules[i][1].modules())]
        if sharded:
            return _of_fsdp(optimizer, *self._modules[sharded[0]]) if len(owners) == 1 else None
        return self._of_plain(optimizer)

    def _of_plain(self, optimizer: torch.optim.Optimizer) -> NamedOptimizer | None:
        state_dict = optimizer.state_dict()
        if not _is_usual(state_dict, optimizer):
            return None
        repeated = self._repeated_in({id(parameter) for parameter in _parameters(optimizer)})
        parameters: dict[Hashable, torch.Tensor] = {}
        groups = []
        for described, group in zip(state_dict["param_groups"], optimizer.param_groups, strict=True):
            members = dict(zip(described["params"], group["params"], strict=True))
            parameters.update(members)
            groups.append(tuple(self._member(number, parameter, repeated) for number, parameter in members.items()))
        return NamedOptimizer(optimizer, tuple(groups), state_dict, parameters.get, partial(_feed, optimizer))

    def _repeated_in(self, parameters: AbstractSet[int]) -> set[str]:
        """The names within modules that several of these parameters have."""
        ids: dict[str, set[int]] = {}
        for one in parameters:
            for _, path in self._paths.get(one, ()):
                ids.setdefault(str(path[-1]), set()).add(one)
        return {name for name, held in ids.items() if len(held) > 1}

    def _member(self, number: Hashable, parameter: torch.Tensor, repeated: AbstractSet[str]) -> Member:
        found = self._paths.get(id(parameter), [])
        names = dict.fromkeys(self._text(path) for _, path in found)
        short = tuple(dict.fromkeys(str(path[-1]) for _, path in found if str(path[-1]) not in repeated))
        return Member(number, tuple(names), short, tuple(name for name in short if name not in self._repeated))

    def _text(self, path: Path) -> str:
        text = show_path(path)
        return exact_path(path) if text in self._ambiguous else text


def warn_of_numbers(named: NamedOptimizer, path: Path) -> None:
    """Warn of parameters that are kept by number, beside others that have names."""
    left = [member.id for group in named.groups for member in group if not member.names]
    if left:
        more = f" and {len(left) - _SHOWN} more" if len(left) > _SHOWN else ""
        warnings.warn(
            f"{show_path(path)!r}: no module in this state owns the parameters {', '.join(map(str, left[:_SHOWN]))}"
            f"{more} of the optimizer, so they are saved by number, and load only into an optimizer that numbers them "
            "alike. Put their modules into the state.",
            RuntimeWarning,
            stacklevel=5,
        )


def _found_in(value: Any, path: Path, kind: type[T]) -> Iterator[tuple[Path, T]]:
    """The objects of a class in the containers of a state."""
    if isinstance(value, kind):
        yield path, value
    elif isinstance(value, (Mapping, list, tuple)) and len(path) <= MAX_DEPTH:
        for key, child in children(value):
            if isinstance(child, (kind, Mapping, list, tuple)):
                yield from _found_in(child, (*path, key), kind)


def _parameters(optimizer: torch.optim.Optimizer) -> Iterator[torch.Tensor]:
    return (parameter for group in optimizer.param_groups for parameter in group["params"])


def _is_plain(optimizer: torch.optim.Optimizer) -> bool:
    """Whether torch's own code makes the state dict and takes it back: any other has a form of its own."""
    kind, base = type(optimizer), torch.optim.Optimizer
    own = {"state_dict", "load_state_dict"} & set(vars(optimizer))
    return not own and kind.state_dict is base.state_dict and kind.load_state_dict is base.load_state_dict


def _is_usual(state_dict: Any, optimizer: torch.optim.Optimizer) -> bool:
    """Whether a state dict has the form that torch gives it: hooks of the optimizer may have changed it."""
    if not isinstance(state_dict, dict) or not isinstance(state_dict.get("state"), dict):
        return False
    groups = state_dict.get("param_groups")
    if not isinstance(groups, list) or len(groups) != len(optimizer.param_groups):
        return False
    pairs = zip(groups, optimizer.param_groups, strict=True)
    return all(isinstance(g, dict) and len(g.get("params", ())) == len(own["params"]) for g, own in pairs)


def _feed(optimizer: torch.optim.Optimizer, wanted: dict[str, Any], changed: AbstractSet[Hashable]) -> None:
    """`load_state_dict`, which turns all state of a parameter into the parameter's type: that would lose what is exact.

    State is kept in the type that it has in `wanted`, except that of `changed` parameters: theirs has to follow them.
    """
    optimizer.load_state_dict(wanted)
    for described, group in zip(wanted["param_groups"], optimizer.param_groups, strict=True):
        for number, parameter in zip(described["params"], group["params"], strict=True):
            if number not in changed and parameter in optimizer.state and number in wanted["state"]:
                optimizer.state[parameter] = _exact(
                    optimizer.state[parameter], wanted["state"][number], parameter.dtype
                )


def _exact(loaded: Any, given: Any, cast: torch.dtype) -> Any:
    """What an optimizer made of what it was given, with tensors that it cast to a type as they were given."""
    if isinstance(loaded, dict) and isinstance(given, Mapping):
        loaded.update((k, _exact(v, given[k], cast)) for k, v in loaded.items() if k in given and k != "step")
    elif type(loaded) in (list, tuple) and isinstance(given, (list, tuple)) and len(loaded) == len(given):
        return type(loaded)(_exact(one, other, cast) for one, other in zip(loaded, given, strict=True))
    elif isinstance(loaded, torch.Tensor) and isinstance(given, torch.Tensor) and given.dtype != loaded.dtype == cast:
        return given.to(loaded.device)
    return loaded


def _of_fsdp(optimizer: torch.optim.Optimizer, path: Path, module: nn.Module) -> NamedOptimizer:
    """The optimizer of an FSDP1 model. Its parameters are parts of flat ones; FSDP gives the state of each original.

    A collective on the ranks of the model, as is its state dict.
    """
    fsdp: Any = fsdp_class()
    try:
        with sharded_states(module), _quietly():
            state_dict = fsdp.optim_state_dict(module, optimizer)
    except (RuntimeError, KeyError, ValueError, AssertionError) as error:
        raise InvalidState(
            f"FSDP does not give the state of an optimizer of {show_path(path)!r}: {error} One optimizer must hold all "
            "parameters of an FSDP unit."
        ) from error
    names = [name for group in state_dict["param_groups"] for name in group["params"]]
    plain = plain_keys_of(module, names)
    groups = tuple(
        tuple(Member(name, (show_path((*path, plain[name])),), *[(plain[name],)] * 2) for name in group["params"])
        for group in state_dict["param_groups"]
    )
    shards: dict[Hashable, Any] = {}

    def like(name: Hashable) -> Any:
        if not shards:
            with sharded_states(module), _quietly():
                shards.update(module.state_dict())
        return shards.get(name)

    def feed(wanted: dict[str, Any], changed: AbstractSet[Hashable]) -> None:
        del changed
        with sharded_states(module), _quietly():
            optimizer.load_state_dict(fsdp.optim_state_dict_to_load(module, optimizer, wanted))

    return NamedOptimizer(optimizer, groups, state_dict, like, feed)


@contextlib.contextmanager
def _quietly() -> Iterator[None]:
    """Without torch's advice to use other functions than those of FSDP1: the user does not call them."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)
        yield
