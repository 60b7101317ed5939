"""Nested state dicts as flat ones, with the keys that users of DCP know: names joined by dots.

A path has a string for each step into a mapping and a number for each step into a list. Keys of a mapping that are not
strings become strings. `set_element` and `get_element` find such keys by their text, so `{0: ...}` gets its values back
under 0 and not under "0".
"""

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, MutableMapping
from typing import Any, Literal

import numpy as np
import torch

from milepost.core.strict_int import number_of
from milepost.state.tensors import Sharded

PATH_ITEM = str | int
OBJ_PATH = tuple[PATH_ITEM, ...]
FLATTEN_MAPPING = dict[str, OBJ_PATH]
Era = Literal["now", "milepost", "2.4", "2.3"]
"""Whose rules decide which containers are opened.

"now": mappings, and lists and tuples that hold tensors, arrays, `Sharded` or mappings; a Counter without tensors is one
value. "milepost": saves of Milepost without a planner; as "now", but lists and tuples without tensors at any depth stay
closed. "2.4": torch from 2.4 on; as "now", but tuples and lists of arrays or `Sharded` stay closed, and each Counter is
opened. "2.3": older versions of torch; as "2.4", but mappings without tensors stay closed too.
"""

Visitor = Callable[[OBJ_PATH, Any], None]


_MAX_LIST = 2**24  # a longer list in a path comes from damaged or forged metadata


def _is_torch_tensor(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def _is_any_tensor(value: Any) -> bool:
    return isinstance(value, (torch.Tensor, np.ndarray, Sharded))


def flatten_state_dict(state_dict: Mapping[Any, Any], era: Era = "now") -> tuple[dict[str, Any], FLATTEN_MAPPING]:
    """The state as one flat dict, and for each of its keys the path to where it stood.

    Raises ValueError where two paths give the same key. `era`: whose rules decide which containers are opened.

    >>> milepost.planning.flatten_state_dict({"model": {"w": 1.5}, "sizes": [2, 3]})
    ({'model.w': 1.5, 'sizes': [2, 3]}, {'model.w': ('model', 'w'), 'sizes': ('sizes',)})
    """
    flat: dict[str, Any] = {}
    paths: FLATTEN_MAPPING = {}

    def visit(path: OBJ_PATH, value: Any) -> None:
        key = ".".join(map(str, path))
        if key in flat:
            raise ValueError(f"duplicated flatten key {key}: {paths[key]} and {path} are spelled alike")
        flat[key], paths[key] = value, path

    traverse_state_dict(state_dict, visit, _is_torch_tensor if era[0] == "2" else _is_any_tensor, era=era)
    return flat, paths


def unflatten_state_dict(state_dict: Mapping[str, Any], mapping: FLATTEN_MAPPING) -> dict[str, Any]:
    """The nested state of a flat one. `mapping` has the path of each key, as `flatten_state_dict` returns it.

    >>> milepost.planning.unflatten_state_dict({"model.w": 1.5}, {"model.w": ("model", "w")})
    {'model': {'w': 1.5}}
    """
    nested: dict[str, Any] = {}
    for key, value in state_dict.items():
        set_element(nested, mapping[key], value)
    return nested


def traverse_state_dict(
    state_dict: Mapping[Any, Any],
    visitor: Visitor,
    keep_traversing: Callable[[Any], bool] | None = _is_torch_tensor,
    *,
    era: Era = "now",
) -> None:
    """Call the visitor with the path and value of each leaf.

    A list or tuple is one leaf, unless it holds mappings or something that `keep_traversing` accepts.
    """
    sequences = (list,) if era[0] == "2" else (list, tuple)

    def opens(value: Any) -> bool:
        """Whether the walk enters this value."""
        if isinstance(value, Mapping):
            always = era == "2.4" or (era != "2.3" and not isinstance(value, Counter))
            return always or any(wanted(item) for item in value.values())
        return isinstance(value, sequences) and any(wanted(item) for item in value)

    def wanted(item: Any) -> bool:
        if era == "milepost" and isinstance(item, Mapping):
            return any(wanted(inner) for inner in item.values())
        return opens(item) or (keep_traversing is not None and keep_traversing(item))

    def walk(path: OBJ_PATH, value: Any) -> None:
        if not opens(value):
            visitor(path, value)
        elif isinstance(value, Mapping):
            for key, child in value.items():
                walk((*path, str(key)), child)
        else:
            for i, child in enumerate(value):
                walk((*path, i), child)

    for key, value in state_dict.items():
        walk((str(key),), value)


def set_element(root_dict: MutableMapping[Any, Any], path: OBJ_PATH, value: Any) -> None:
    """Set the value at `path`. Missing dicts and lists are made; tuples on the way are replaced.

    Raises KeyError where an object on the way cannot hold the rest of the path.
    """
    _set(root_dict, path, value)


def _set(container: Any, path: OBJ_PATH, value: Any) -> Any:
    """The container with `value` at `path`: the same object, unless it is a tuple."""
    step, rest = path[0], path[1:]
    if isinstance(container, Mapping):
        step = _key_in(container, step)
        known: Any = container.get(step)
    else:
        if not isinstance(container, (list, tuple)) or not isinstance(step, int) or not 0 <= step < _MAX_LIST:
            raise KeyError(f"a {type(container).__name__} cannot hold {step!r}, the rest of a path")
        if isinstance(container, tuple):
            return tuple_like(container, _set(list(container), path, value))
        container.extend([None] * (step + 1 - len(container)))
        known = container[step]
    if rest:
        if known is None:
            known = {} if isinstance(rest[0], str) else []
        value = _set(known, rest, value)
    container[step] = value
    return container


def tuple_like(model: tuple[Any, ...], items: Iterable[Any]) -> tuple[Any, ...]:
    """A tuple of these items, of the same named tuple type as the model where it has one."""
    make: Callable[[Iterable[Any]], tuple[Any, ...]] = getattr(type(model), "_make", tuple)
    return make(items)


def get_element(root_dict: Mapping[Any, Any], path: OBJ_PATH, default_value: Any = None) -> Any:
    """The value at `path`, or the default if there is none."""
    found: Any = root_dict
    for step in path:
        if isinstance(found, Mapping):
            key = _key_in(found, step)
            if key not in found:
                return default_value
            found = found[key]
        elif isinstance(found, (list, tuple)) and isinstance(step, int) and 0 <= step < len(found):
            found = found[step]
        else:
            return default_value
    return found


def _key_in(container: Mapping[Any, Any], step: PATH_ITEM) -> Any:
    """The key of a mapping whose text is the given step of a path."""
    if step in container:
        return step
    # Numbers first: an optimizer's state has thousands of them.
    number = number_of(step) if isinstance(step, str) else None
    if number is not None and number in container:
        return number
    return next((key for key in container if not isinstance(key, str) and str(key) == str(step)), step)
