"""A copy of a whole state dict, for planners and storage that need one."""

from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map_only

from milepost.planning.stateful_dict import expand_stateful


def copied_state(state: Any) -> dict[str, Any]:
    """A copy of a state dict in new host memory, with stateful objects expanded."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        # Torch's stager copies the memory behind a conjugate, and forgets that it is one.
        plain = tree_map_only(torch.Tensor, _resolved, expand_stateful(state))
        copied: Any = stager.stage(plain)
        return dict(copied)
    finally:
        stager.close()


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
