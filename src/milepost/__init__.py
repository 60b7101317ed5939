"""Milepost: distributed checkpoints for PyTorch. Atomic, durable, verified, safe.

    milepost.save(state, "runs/a/step-100")     on every rank, or in one process
    milepost.load(state, "runs/a/step-100")     in place, onto whatever mesh `state` lives on
    milepost.open("runs/a/step-100")            lazy: no process group, no GPU

`import milepost` does not import torch; the functions that need it do.
"""

import importlib
from typing import TYPE_CHECKING

from milepost.checkpoint import Checkpoint, LazyTensor, Verification
from milepost.checkpoint import open_checkpoint as open
from milepost.core.agreement import Plans
from milepost.data.transfer import Progress, Transfer
from milepost.errors import (
    AlreadyExists,
    CheckpointDamaged,
    CheckpointError,
    CheckpointNotFound,
    InvalidRequest,
    InvalidState,
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
from milepost.loading.report import Report
from milepost.store import LocalStore, MemoryStore, Store
from milepost.version import __version__

if TYPE_CHECKING:
    from milepost.api import explain, load, save
    from milepost.background import PendingSave
    from milepost.background.async_saving import AsyncSaver, async_save, close_async, prewarm
    from milepost.data.progress_bar import ProgressBar
    from milepost.data.transforms import (
        Extension,
        ExtensionRegistry,
        StreamTransformExtension,
        ZStandard,
        register_extension,
    )
    from milepost.formats.write.convert import convert
    from milepost.formats.write.export import export_safetensors
    from milepost.planning import (
        BytesIOWriteData,
        BytesStorageMetadata,
        ChunkStorageMetadata,
        DefaultLoadPlanner,
        DefaultSavePlanner,
        EmptyStateDictLoadPlanner,
        LoadItemType,
        LoadPlan,
        LoadPlanner,
        Metadata,
        MetadataIndex,
        ReadItem,
        SavePlan,
        SavePlanner,
        StorageMeta,
        StorageReader,
        StorageWriter,
        TensorProperties,
        TensorStorageMetadata,
        TensorWriteData,
        WriteItem,
        WriteItemType,
        WriteResult,
    )
    from milepost.planning.storage import (
        FileSystemReader,
        FileSystemWriter,
    )
    from milepost.saving.pipeline import Receipt
    from milepost.state.take_apart import PerRank, Stateful
    from milepost.state.tensors import Sharded
    from milepost.steps.checkpointer import Checkpointer, StorageCheckpointer
    from milepost.steps.preemption import PreemptionGuard

__all__ = [
    "AlreadyExists",
    "AsyncSaver",
    "BytesIOWriteData",
    "BytesStorageMetadata",
    "Checkpoint",
    "CheckpointDamaged",
    "CheckpointError",
    "CheckpointNotFound",
    "Checkpointer",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "EmptyStateDictLoadPlanner",
    "Extension",
    "ExtensionRegistry",
    "FileSystemReader",
    "FileSystemWriter",
    "InvalidRequest",
    "InvalidState",
    "LazyTensor",
    "LoadItemType",
    "LoadPlan",
    "LoadPlanner",
    "LocalStore",
    "MemoryStore",
    "Metadata",
    "MetadataIndex",
    "NotDurable",
    "PendingSave",
    "PerRank",
    "Plans",
    "PreemptionGuard",
    "Progress",
    "ProgressBar",
    "RanksDisagree",
    "RanksMissing",
    "ReadItem",
    "Receipt",
    "Report",
    "SaveCancelled",
    "SaveConflict",
    "SaveInFlight",
    "SavePlan",
    "SavePlanner",
    "Sharded",
    "StateMismatch",
    "Stateful",
    "StorageCheckpointer",
    "StorageError",
    "StorageMeta",
    "StorageReader",
    "StorageWriter",
    "Store",
    "StreamTransformExtension",
    "TensorProperties",
    "TensorStorageMetadata",
    "TensorWriteData",
    "Transfer",
    "UnsafeCheckpoint",
    "UnsupportedFormat",
    "Verification",
    "WriteItem",
    "WriteItemType",
    "WriteResult",
    "WriterDied",
    "ZStandard",
    "__version__",
    "async_save",
    "close_async",
    "convert",
    "explain",
    "export_safetensors",
    "load",
    "open",
    "prewarm",
    "register_extension",
    "save",
]

_WHEN_USED = {
    "AsyncSaver": "milepost.background.async_saving",
    "async_save": "milepost.background.async_saving",
    "close_async": "milepost.background.async_saving",
    "prewarm": "milepost.background.async_saving",
    "PendingSave": "milepost.background",
    "PreemptionGuard": "milepost.steps.preemption",
    "convert": "milepost.formats.write.convert",
    "export_safetensors": "milepost.formats.write.export",
    "register_extension": "milepost.data.transforms",
    "ZStandard": "milepost.data.transforms",
    "StreamTransformExtension": "milepost.data.transforms",
    "ExtensionRegistry": "milepost.data.transforms",
    "Extension": "milepost.data.transforms",
    "Checkpointer": "milepost.steps.checkpointer",
    "StorageCheckpointer": "milepost.steps.checkpointer",
    "FileSystemWriter": "milepost.planning.storage",
    "FileSystemReader": "milepost.planning.storage",
    "WriteResult": "milepost.planning",
    "WriteItemType": "milepost.planning",
    "WriteItem": "milepost.planning",
    "TensorWriteData": "milepost.planning",
    "TensorStorageMetadata": "milepost.planning",
    "TensorProperties": "milepost.planning",
    "StorageWriter": "milepost.planning",
    "StorageReader": "milepost.planning",
    "StorageMeta": "milepost.planning",
    "SavePlanner": "milepost.planning",
    "SavePlan": "milepost.planning",
    "ReadItem": "milepost.planning",
    "MetadataIndex": "milepost.planning",
    "Metadata": "milepost.planning",
    "LoadPlanner": "milepost.planning",
    "LoadPlan": "milepost.planning",
    "LoadItemType": "milepost.planning",
    "EmptyStateDictLoadPlanner": "milepost.planning",
    "DefaultSavePlanner": "milepost.planning",
    "DefaultLoadPlanner": "milepost.planning",
    "ChunkStorageMetadata": "milepost.planning",
    "BytesStorageMetadata": "milepost.planning",
    "BytesIOWriteData": "milepost.planning",
    "ProgressBar": "milepost.data.progress_bar",
    "explain": "milepost.api",
    "load": "milepost.api",
    "save": "milepost.api",
    "Receipt": "milepost.saving.pipeline",
    "PerRank": "milepost.state.take_apart",
    "Stateful": "milepost.state.take_apart",
    "Sharded": "milepost.state.tensors",
}


def __getattr__(name: str) -> object:
    """Import what needs torch (or rich) when it is first used."""
    if name in _WHEN_USED:
        return getattr(importlib.import_module(_WHEN_USED[name]), name)
    raise AttributeError(f"module 'milepost' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
