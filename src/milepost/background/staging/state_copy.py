"""A copy of a whole state dict, for planners and storage that need one."""

from collections.abc import Mapping
from typing import Any

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager
from torch.utils._pytree import tree_map_only

from milepost.core.versions import set_versions, versions_of
from milepost.planning.stateful_dict import expand_stateful


def copied_state(state: Any) -> dict[str, Any]:
    """A copy of a state dict in new host memory, with stateful objects expanded."""
    stager = StateDictStager(pin_memory=False, share_memory=False)
    try:
        return copy_by(stager, expand_stateful(state))
    finally:
        stager.close()  # type: ignore[no-untyped-call]


def copy_by(stager: StateDictStager, state: Any, non_blocking: bool = False) -> dict[str, Any]:
    """A copy of a state dict in host memory of torch's stager, which keeps it for the next copy of the same tensors."""
    # Torch's stager copies the memory behind a conjugate, and forgets that it is one.
    plain = tree_map_only(torch.Tensor, _resolved, state)
    copied: Any = stager.stage(plain, non_blocking=non_blocking)
    _copy_versions(state, copied)
    return dict(copied)


def _copy_versions(state: Any, copied: Any) -> None:
    """Note the versions of modules in the copies of their state dicts, which torch's stager leaves out."""
    if not isinstance(state, Mapping):
        return
    set_versions(copied, versions_of(state))
    for key, value in state.items():
        _copy_versions(value, copied[key])


def _resolved(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor
