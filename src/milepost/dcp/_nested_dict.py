"""Nested states as flat ones."""

from milepost.dcp._engine.lent import lend
from milepost.planning.flatten import FLATTEN_MAPPING, flatten_state_dict, unflatten_state_dict

__all__ = ["FLATTEN_MAPPING", "flatten_state_dict", "unflatten_state_dict"]

lend(__name__)
