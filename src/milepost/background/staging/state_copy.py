"""A copy of a whole state dict, for planners and storage that need one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions
from torch.utils._pytree import tree_map_only

from milepost.core.versions import set_versions, versions_of
from milepost.planning.stateful_dict import expand_stateful


def copied_state(state: Any) -> dict[str, Any]:
    """A copy of a state dict in new host memory, with stateful objects expanded."""
    stager = DefaultStager(StagingOptions(False, False, False, False))
    try:
        expanded = expand_stateful(state)
        # Torch's stager copies the memory behind a conjugate, and forgets that it is one.
        plain = tree_map_only(torch.Tensor, _resolved, expanded)
        copied: Any = stager.stage(plain)
        _copy_versions(expanded, copied)
        return dict(copied)
    finally:
        stager.close()


def _copy_versions(state: Any, copied: Any) -> None:
    """Note the versions of modules in the copies of their state dicts, which torch's stager leaves out."""
    if not isinstance(state, Mapping):
        return
    set_versions(copied, versions_of(state))
    for key, value in state.items():
        _copy_versions(value, copied[key])


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
