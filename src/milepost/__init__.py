"""Milepost: distributed checkpoints for PyTorch. Atomic, durable, verified, safe.

    milepost.save(state, "runs/a/step-100")     on every rank, or in one process
    milepost.load(state, "runs/a/step-100")     in place, onto whatever mesh `state` lives on
    milepost.open("runs/a/step-100")            lazy: no process group, no GPU

`import milepost` does not import torch; the functions that need it do.
"""

import importlib
from typing import TYPE_CHECKING

from milepost.checkpoint import Checkpoint, LazyTensor, Verification
from milepost.core.agreement import Plans
from milepost.errors import (
    AlreadyExists,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    InvalidState,
    RanksDisagree,
    RanksMissing,
    SaveConflict,
    StateMismatch,
    StorageError,
    UnsafeCheckpoint,
    UnsupportedFormat,
)
from milepost.opening import open_checkpoint as open
from milepost.report import Report
from milepost.store import LocalStore, MemoryStore, Store
from milepost.transfer import Progress, Transfer
from milepost.version import __version__

if TYPE_CHECKING:
    from milepost.api import explain, load, save
    from milepost.bar import ProgressBar
    from milepost.saving import Receipt
    from milepost.state import PerRank, Stateful
    from milepost.tensors import Sharded

__all__ = [
    "AlreadyExists",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "InvalidRequest",
    "InvalidState",
    "LazyTensor",
    "LocalStore",
    "MemoryStore",
    "PerRank",
    "Plans",
    "Progress",
    "ProgressBar",
    "RanksDisagree",
    "RanksMissing",
    "Receipt",
    "Report",
    "SaveConflict",
    "Sharded",
    "StateMismatch",
    "Stateful",
    "StorageError",
    "Store",
    "Transfer",
    "UnsafeCheckpoint",
    "UnsupportedFormat",
    "Verification",
    "__version__",
    "explain",
    "load",
    "open",
    "save",
]

_WHEN_USED = {
    "ProgressBar": "milepost.bar",
    "explain": "milepost.api",
    "load": "milepost.api",
    "save": "milepost.api",
    "Receipt": "milepost.saving",
    "PerRank": "milepost.state",
    "Stateful": "milepost.state",
    "Sharded": "milepost.tensors",
}


def __getattr__(name: str) -> object:
    """Import what needs torch (or rich) when it is first used."""
    if name in _WHEN_USED:
        return getattr(importlib.import_module(_WHEN_USED[name]), name)
    raise AttributeError(f"module 'milepost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
