"""Copies of a state: torch's own."""

from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from milepost.dcp._engine.lent import lend

__all__ = ["StateDictStager"]

lend(__name__, "dispatch_table")
