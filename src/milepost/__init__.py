"""Milepost: distributed checkpoints for PyTorch. Atomic, durable, verified, safe.

    milepost.save(state, "runs/a/step-100")     on every rank, or in one process
    milepost.load(state, "runs/a/step-100")     in place, onto whatever mesh `state` lives on
    milepost.open("runs/a/step-100")            lazy: no process group, no GPU

`import milepost` does not import torch; the functions that need it do.
"""

import importlib
from typing import TYPE_CHECKING

from milepost.errors import (
    AlreadyExists,
    AmbiguousCheckpoint,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    CheckpointUnhealthy,
    InvalidRequest,
    InvalidState,
    NoReply,
    NotDurable,
    RanksDisagree,
    RanksMissing,
    SaveCancelled,
    SaveConflict,
    SaveInFlight,
    StateMismatch,
    StorageError,
    UnsafeCheckpoint,
    UnsupportedFormat,
    WriterDied,
)
from milepost.version import __version__

if TYPE_CHECKING:
    from milepost.api import async_save, close_async, explain, load, prewarm, save
    from milepost.background.pending import PendingSave
    from milepost.background.saver import AsyncSaver
    from milepost.checkpoint import Checkpoint, LazyTensor, Verification
    from milepost.checkpoint import open_checkpoint as open
    from milepost.comm.base import Solo
    from milepost.copying.copy import copy
    from milepost.core.agreement import Plans
    from milepost.core.statistics import Health, TensorStatistics
    from milepost.data.progress_bar import ProgressBar
    from milepost.data.transfer import Progress, Transfer
    from milepost.formats.write.convert import convert
    from milepost.formats.write.export import export_safetensors
    from milepost.inspection.diff import Difference, diff
    from milepost.loading.report import LoadReport
    from milepost.saving.health import HealthCheck
    from milepost.saving.pipeline import Receipt
    from milepost.state.take_apart import PerRank, Stateful
    from milepost.state.tensors import Sharded
    from milepost.steps.checkpointer import Checkpointer
    from milepost.steps.preemption import PreemptionGuard
    from milepost.steps.storage_checkpointer import StorageCheckpointer
    from milepost.store import Store

__all__ = [
    "AlreadyExists",
    "AmbiguousCheckpoint",
    "AsyncSaver",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "CheckpointUnhealthy",
    "Checkpointer",
    "Difference",
    "Health",
    "HealthCheck",
    "InvalidRequest",
    "InvalidState",
    "LazyTensor",
    "LoadReport",
    "NoReply",
    "NotDurable",
    "PendingSave",
    "PerRank",
    "Plans",
    "PreemptionGuard",
    "Progress",
    "ProgressBar",
    "RanksDisagree",
    "RanksMissing",
    "Receipt",
    "SaveCancelled",
    "SaveConflict",
    "SaveInFlight",
    "Sharded",
    "Solo",
    "StateMismatch",
    "Stateful",
    "StorageCheckpointer",
    "StorageError",
    "Store",
    "TensorStatistics",
    "Transfer",
    "UnsafeCheckpoint",
    "UnsupportedFormat",
    "Verification",
    "WriterDied",
    "__version__",
    "async_save",
    "close_async",
    "convert",
    "copy",
    "diff",
    "explain",
    "export_safetensors",
    "load",
    "open",
    "prewarm",
    "save",
]

_WHEN_USED = {
    "Checkpoint": "milepost.checkpoint",
    "LazyTensor": "milepost.checkpoint",
    "LoadReport": "milepost.loading.report",
    "Plans": "milepost.core.agreement",
    "Progress": "milepost.data.transfer",
    "Solo": "milepost.comm.base",
    "Store": "milepost.store",
    "Transfer": "milepost.data.transfer",
    "Verification": "milepost.checkpoint",
    "AsyncSaver": "milepost.background.saver",
    "PendingSave": "milepost.background.pending",
    "async_save": "milepost.api",
    "close_async": "milepost.api",
    "prewarm": "milepost.api",
    "PreemptionGuard": "milepost.steps.preemption",
    "convert": "milepost.formats.write.convert",
    "copy": "milepost.copying.copy",
    "export_safetensors": "milepost.formats.write.export",
    "Difference": "milepost.inspection.diff",
    "diff": "milepost.inspection.diff",
    "Checkpointer": "milepost.steps.checkpointer",
    "StorageCheckpointer": "milepost.steps.storage_checkpointer",
    "ProgressBar": "milepost.data.progress_bar",
    "explain": "milepost.api",
    "load": "milepost.api",
    "save": "milepost.api",
    "Health": "milepost.core.statistics",
    "HealthCheck": "milepost.saving.health",
    "TensorStatistics": "milepost.core.statistics",
    "Receipt": "milepost.saving.pipeline",
    "PerRank": "milepost.state.take_apart",
    "Stateful": "milepost.state.take_apart",
    "Sharded": "milepost.state.tensors",
}


_MODULES = ("dcp", "events", "planning", "store", "testing")


def __getattr__(name: str) -> object:
    """Import things when they are first used: some need torch, and the command line starts in a moment."""
    if name == "open":
        return importlib.import_module("milepost.checkpoint").open_checkpoint
    if name in _WHEN_USED:
        return getattr(importlib.import_module(_WHEN_USED[name]), name)
    if name in _MODULES:
        return importlib.import_module(f"milepost.{name}")
    raise AttributeError(f"module 'milepost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted([*__all__, *_MODULES])
