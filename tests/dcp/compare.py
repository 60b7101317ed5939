"""Programs of both libraries, compared."""

import torch
from torch.distributed.tensor import DTensor

from tests.dcp.programs import OURS, THEIRS, run


def plain(value):
    if isinstance(value, dict):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, DTensor):
        value = value.full_tensor()
    return (str(value.dtype), value.tolist()) if isinstance(value, torch.Tensor) else value


def both(program, tmp_path):
    """What a program gives in one process: the same with both modules."""
    ours, theirs = (run(program, name, tmp_path) for name in (OURS, THEIRS))
    assert ours == theirs
    return ours
