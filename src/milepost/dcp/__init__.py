"""The modules of torch.distributed.checkpoint with Milepost behind them: `import milepost.dcp as dcp`.

Thin names for what is elsewhere in Milepost, or torch's own where they work with any storage.
docs/how-to/from-dcp.md lists what differs.
"""

from importlib import import_module

from milepost.dcp._engine.install import Installation, install, uninstall
from milepost.dcp.api import CheckpointException
from milepost.dcp.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from milepost.dcp.filesystem import FileSystemReader, FileSystemWriter
from milepost.dcp.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from milepost.dcp.metadata import BytesStorageMetadata, ChunkStorageMetadata, Metadata, TensorStorageMetadata
from milepost.dcp.optimizer import load_sharded_optimizer_state_dict
from milepost.dcp.planner import LoadPlan, LoadPlanner, ReadItem, SavePlan, SavePlanner, WriteItem
from milepost.dcp.quantized_hf_storage import QuantizedHuggingFaceStorageReader
from milepost.dcp.state_dict_loader import load, load_state_dict
from milepost.dcp.state_dict_saver import AsyncCheckpointerType, async_save, save, save_state_dict
from milepost.dcp.storage import StorageReader, StorageWriter
from milepost.planning.torch_adapters import MilepostReader, MilepostWriter

__all__ = [
    "AsyncCheckpointerType",
    "BytesStorageMetadata",
    "CheckpointException",
    "ChunkStorageMetadata",
    "DefaultLoadPlanner",
    "DefaultSavePlanner",
    "FileSystemReader",
    "FileSystemWriter",
    "HuggingFaceStorageReader",
    "HuggingFaceStorageWriter",
    "Installation",
    "LoadPlan",
    "LoadPlanner",
    "Metadata",
    "MilepostReader",
    "MilepostWriter",
    "QuantizedHuggingFaceStorageReader",
    "ReadItem",
    "SavePlan",
    "SavePlanner",
    "StorageReader",
    "StorageWriter",
    "TensorStorageMetadata",
    "WriteItem",
    "async_save",
    "install",
    "load",
    "load_sharded_optimizer_state_dict",
    "load_state_dict",
    "save",
    "save_state_dict",
    "uninstall",
]

# As in torch: these are attributes once the package is imported.
for _name in (
    *("_async_executor", "_async_process_executor", "_async_thread_executor", "_consolidate_hf_safetensors"),
    *("_dedup_save_plans", "_extension", "_nested_dict", "_sharded_tensor_utils", "_state_dict_stager", "_traverse"),
    *("_version", "logger", "logging_handlers", "planner_helpers", "resharding", "staging", "stateful", "utils"),
):
    import_module(f"milepost.dcp.{_name}")
