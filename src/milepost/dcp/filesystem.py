"""Milepost's format on a file system, with the options and attributes of DCP's reader and writer."""

import contextlib
import io
import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import (
    FileSystem,
    FileSystemBase,
    SerializationFormat,
    _generate_uuid,  # noqa: F401  # frameworks import these
    _item_size,  # noqa: F401
    _metadata_fn,  # noqa: F401
    _OverlappingCpuLoader,  # noqa: F401
    _SerialCpuLoader,  # noqa: F401
    _StorageInfo,  # noqa: F401
    _StoragePrefix,  # noqa: F401
    _TensorLoader,  # noqa: F401
)
from torch.distributed.checkpoint.filesystem import _split_by_size_and_type as _their_split
from torch.distributed.checkpoint.filesystem import _write_item as _their_write_item
from torch.futures import Future

from milepost.core.manifest import VERSION
from milepost.data.transfer import Transfer
from milepost.data.transforms import ExtensionRegistry, StreamTransformExtension
from milepost.dcp._engine.lent import lend
from milepost.dcp._engine.stagers import BlockingAsyncStager
from milepost.errors import CheckpointError
from milepost.planning import storage
from milepost.planning.default import DefaultLoadPlanner
from milepost.planning.protocol import LoadPlanner
from milepost.planning.records import LoadPlan, ReadItem, WriteItem, WriteResult
from milepost.planning.torch_records import ours, theirs
from milepost.planning.value_bytes import ValueIO
from milepost.state.values import Codec
from milepost.store import Location
from milepost.store.spelling import spelled

__all__ = ["FileSystem", "FileSystemBase", "FileSystemReader", "FileSystemWriter", "SerializationFormat"]

DEFAULT_SUFFIX = ".safetensors"
CURRENT_DCP_VERSION = str(VERSION)


def _path(where: Location) -> Any:
    """A path as a Path, as DCP has it; a URL as a string; anything else as it is."""
    if not isinstance(where, (str, bytes, os.PathLike)):
        return where
    text = spelled(where)
    return text if "://" in text else Path(text)


class FileSystemWriter(storage.CheckpointWriter, BlockingAsyncStager):
    """Writes Milepost's format. Takes DCP's options; those about files have no effect. A stager too, as DCP's is."""

    def __init__(
        self,
        path: Location,
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        cache_staged_state_dict: bool = False,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **options: Any,
    ) -> None:
        storage.CheckpointWriter.__init__(
            self,
            path,
            overwrite=overwrite,
            transforms=_extensions or (),
            **{"transfer": Transfer(threads=max(thread_count, 4)), **options},
        )
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self.path = _path(path)
        self.single_file_per_rank, self.sync_files, self.thread_count = single_file_per_rank, sync_files, thread_count
        self.per_thread_copy_ahead, self.serialization_format = per_thread_copy_ahead, serialization_format

    @property
    def checkpoint_id(self) -> Any:
        """Where it writes."""
        return self.path

    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Begin a new save."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.path = _path(checkpoint_id)


class FileSystemReader(storage.CheckpointReader):
    """Reads Milepost's format, every byte verified."""

    def __init__(self, path: Location, _extension_registry: ExtensionRegistry | None = None, **options: Any) -> None:
        super().__init__(path, registry=_extension_registry, **options)
        self.path = _path(path)

    @property
    def checkpoint_id(self) -> Any:
        """Where it reads."""
        return self.path

    def reset(self, checkpoint_id: Location | None = None) -> None:
        """Begin a new load."""
        super().reset(checkpoint_id)
        if checkpoint_id:
            self.path = _path(checkpoint_id)

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read all items."""
        if type(planner).load_bytes is DefaultLoadPlanner.load_bytes:
            return super().read_data(plan, planner)
        with_pickles: Any = _WithPickles(planner)
        return super().read_data(plan, with_pickles)


class _WithPickles:
    """A planner whose own `load_bytes` may call `torch.load`, as DCP's documentation shows it."""

    def __init__(self, inner: LoadPlanner) -> None:
        self._inner = inner

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        with contextlib.suppress(CheckpointError):  # of a type that only the planner knows
            value = _TorchValueIO(value.encoded) if isinstance(value, ValueIO) else value
        self._inner.load_bytes(read_item, value)


class _TorchValueIO(ValueIO):
    """The bytes that `torch.save` would have written, which also knows the value as the manifest spells it."""

    def __init__(self, encoded: Any) -> None:
        super().__init__(encoded)
        self.truncate(0)
        torch.save(Codec().decode(encoded, "a value"), self)
        self.seek(0)


def _split_by_size_and_type(bins: int, items: list[WriteItem]) -> list[list[WriteItem]]:
    split: list[list[WriteItem]] = ours(_their_split(bins, theirs(items)))
    return split


def _write_item(
    transforms: Any,
    stream: Any,
    data: io.BytesIO | torch.Tensor,
    write_item: WriteItem,
    storage_key: str,
    serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
) -> WriteResult:
    """Append an item to a stream as torch's writer does, for storage that is made of its parts."""
    written = _their_write_item(transforms, stream, data, theirs(write_item), storage_key, serialization_format)
    result: WriteResult = ours(written)
    return result


lend(
    __name__,
    "_FileSystemWriter _StorageReaderTransforms _StorageWriterTransforms _get_device_module _write_files_from_queue",
)
