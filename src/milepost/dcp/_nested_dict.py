"""Nested states as flat ones."""

from milepost.planning.flatten import FLATTEN_MAPPING, flatten_state_dict, unflatten_state_dict

__all__ = ["FLATTEN_MAPPING", "flatten_state_dict", "unflatten_state_dict"]
