"""States: what users pass. Rank-private values, stateful objects, and the rules by which a state becomes a tree."""

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any, Generic, Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from milepost.core.leaves import LeafRule
from milepost.core.tree import FACTORIES, Flat, Leaf, Path, Rules, TooDeep, UnknownContainer, flatten, show_path
from milepost.errors import InvalidState
from milepost.state.composite import is_composite, parts_of
from milepost.state.optimizers import OwnerNames, warn_of_numbers
from milepost.state.tensors import is_tensor
from milepost.state.values import Codec
from milepost.state.wrappers import module_state

T = TypeVar("T")
Remap = Callable[[list[Any], int, int], Any]
"""Maps the values of all old ranks to the value of a new one: `remap(old_values, rank, world)`."""


class PerRank(Generic[T]):
    """A value that belongs to one rank: random-number state, a data loader's position. Each rank gets its own back.

    A load sets `value`, or, if that is a stateful object, loads into it. On another number of ranks a load raises
    InvalidState, unless `remap(old_values, rank, world)` says what a new rank gets.

    >>> state = {"todo": milepost.PerRank([3, 1, 2])}
    >>> _ = milepost.save(state, "memory://per-rank")
    >>> state["todo"].value = []
    >>> milepost.load(state, "memory://per-rank")["todo"]
    PerRank([3, 1, 2])
    """

    def __init__(self, value: T, remap: Remap | None = None) -> None:
        self.value = value
        self.remap = remap

    def fits(self, value: Any) -> bool:
        """Whether a rank of a job of the same size takes its own `value` back; where not, `remap` is asked."""
        del value
        return True

    def __repr__(self) -> str:
        return f"PerRank({self.value!r})"


@runtime_checkable
class Stateful(Protocol):
    """An object that gives its state as a dict and takes it back: a module, an optimizer, a scheduler, your own class.

    >>> isinstance(torch.nn.Linear(2, 2), milepost.Stateful)
    True
    """

    def state_dict(self) -> dict[str, Any]:
        """The state, as a dict."""

    def load_state_dict(self, state_dict: dict[str, Any]) -> Any:
        """Take over a state that `state_dict` gave."""


def is_stateful(value: Any) -> bool:
    """Whether `value` is a stateful object (and not a class, or a container that happens to look like one)."""
    # Not isinstance(value, Stateful): that takes thirty times as long, and this runs for every value of a state.
    if isinstance(value, (type, Mapping, list, tuple)):
        return False
    return callable(getattr(value, "state_dict", None)) and callable(getattr(value, "load_state_dict", None))


def _special(value: Any) -> Leaf | None:
    if is_tensor(value):
        return None if is_composite(value) else "tensor"
    return "per_rank" if isinstance(value, PerRank) else None


_KNOWN = f"Use a dict, list, tuple, OrderedDict, Counter, or a defaultdict of {', '.join(FACTORIES)}."
_LEAVES = LeafRule(_special, lambda value: is_stateful(value) or is_composite(value))


def state_dict_of(value: Any, path: Path) -> Any:
    """What stands for an object in a tree: its state dict, without the names of wrappers, or the parts of a tensor."""
    if is_composite(value):
        try:
            return parts_of(value)
        except InvalidState as error:
            raise InvalidState(f"{show_path(path)!r}: {error}") from None
    return module_state(value) if isinstance(value, nn.Module) else value.state_dict()


def opening_by_name(state: Any) -> Callable[[Any, Path], Any]:
    """What stands for an object of this state: as `state_dict_of`, but for optimizers with the names of parameters."""
    names = cache(lambda: OwnerNames(state))

    def opening(value: Any, path: Path) -> Any:
        named = names().of(value) if isinstance(value, torch.optim.Optimizer) else None
        if named is None:
            return state_dict_of(value, path)
        warn_of_numbers(named, path)
        return named.named()

    return opening


def take_apart(
    state: Any, codec: Codec, opening: Callable[[Any, Path], Any] = state_dict_of
) -> tuple[Flat, dict[Path, Any]]:
    """The state as a tree, and what `opening` gave for the stateful objects in it, by path.

    Raises InvalidState for what cannot be part of a state.
    """
    opened: dict[Path, Any] = {}

    def open_stateful(value: Any, path: Path) -> Any:
        if not is_stateful(value) and not is_composite(value):
            return None
        opened[path] = opening(value, path)
        return opened[path]

    try:
        if _LEAVES.kind(state) is not None:
            raise InvalidState(
                f"a state is a dict, a stateful object, or a list of tensors; put this {type(state).__name__} in a dict"
            )
        return flatten(state, Rules(_LEAVES.kind, codec.encode, open_stateful)), opened
    except TooDeep as error:
        raise InvalidState(str(error)) from None
    except UnknownContainer as error:
        raise InvalidState(f"{error}, which would not come back the same. {_KNOWN}") from None
