"""Walking through nested states."""

from collections.abc import Callable, MutableMapping
from typing import Any

import torch
from torch.distributed.checkpoint._traverse import print_tensor

from milepost.dcp._engine.lent import lend
from milepost.planning.flatten import OBJ_PATH, PATH_ITEM, get_element, set_element, traverse_state_dict

__all__ = ["OBJ_PATH", "PATH_ITEM", "get_element", "print_tensor", "set_element", "traverse_state_dict"]

STATE_DICT_ITEM = object
CONTAINER_TYPE = MutableMapping[PATH_ITEM, STATE_DICT_ITEM]


def _keep_visiting_tensors(value: Any) -> bool:
    return isinstance(value, torch.Tensor)


def traverse_state_dict_v_2_3(
    state_dict: dict[str, Any],
    visitor: Callable[[OBJ_PATH, Any], None],
    keep_traversing: Callable[[Any], bool] | None = _keep_visiting_tensors,
) -> None:
    """The walk of torch 2.3 and before: containers without tensors are one leaf."""
    traverse_state_dict(state_dict, visitor, keep_traversing, era="2.3")


lend(__name__, "T _print_nested")
