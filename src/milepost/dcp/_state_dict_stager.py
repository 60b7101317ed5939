"""Copies of a state: torch's own."""

from torch.distributed.checkpoint._state_dict_stager import StateDictStager

__all__ = ["StateDictStager"]
