"""What stands under torch's names while Milepost is installed: Milepost's functions and storage, with torch's records.

Each is an object of its own, so that `uninstall` can tell a name that was imported from torch from one that was
imported from Milepost. They are pickled by their names in this module.
"""

import functools
import os
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

from torch.distributed.checkpoint.filesystem import SerializationFormat
from torch.distributed.checkpoint.staging import BlockingAsyncStager

from milepost.data.transforms import ExtensionRegistry, StreamTransformExtension
from milepost.dcp import state_dict_loader, state_dict_saver
from milepost.dcp._engine import conversions
from milepost.dcp._engine.fixed_storage import FixedStorage
from milepost.dcp._storage_utils import reset_to
from milepost.dcp.filesystem import FileSystemReader, FileSystemWriter
from milepost.planning.torch_adapters import MilepostReader, MilepostWriter
from milepost.store import Location

F = TypeVar("F", bound=Callable[..., Any])


def _as(name: str, function: F) -> F:
    @functools.wraps(function)
    def installed(*args: Any, **kwargs: Any) -> Any:
        return function(*args, **kwargs)

    installed.__module__, installed.__name__, installed.__qualname__ = __name__, name, name
    return installed  # type: ignore[return-value]


save = _as("save", state_dict_saver.save)
async_save = _as("async_save", state_dict_saver.async_save)
save_state_dict = _as("save_state_dict", state_dict_saver.save_state_dict)
save_state_dict_inside = _as("save_state_dict_inside", state_dict_saver._save_state_dict)  # noqa: SLF001
load = _as("load", state_dict_loader.load)
load_state_dict = _as("load_state_dict", state_dict_loader.load_state_dict)
load_state_dict_inside = _as("load_state_dict_inside", state_dict_loader._load_state_dict)  # noqa: SLF001
load_from_keys = _as("load_from_keys", state_dict_loader._load_state_dict_from_keys)  # noqa: SLF001
dcp_to_torch_save = _as("dcp_to_torch_save", conversions.dcp_to_torch_save)
torch_save_to_dcp = _as("torch_save_to_dcp", conversions.torch_save_to_dcp)


class InstalledCheckpointer(FixedStorage):
    """`_Checkpointer` of torch, with Milepost behind it."""


class InstalledWriter(MilepostWriter, BlockingAsyncStager):
    """`FileSystemWriter` of torch, with Milepost's format: takes torch's options and records, and is a stager too."""

    inner: FileSystemWriter

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
        BlockingAsyncStager.__init__(self, cache_staged_state_dict=cache_staged_state_dict)
        self._goal = None
        self.inner = FileSystemWriter(
            path,
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            cache_staged_state_dict,
            overwrite,
            _extensions,
            serialization_format,
            **options,
        )

    @property
    def path(self) -> Any:
        """Where it writes, as a Path."""
        return self.inner.path

    def __getattr__(self, name: str) -> Any:
        if name == "inner":  # not made yet: a copy, or a pickle that is being read
            raise AttributeError(name)
        return getattr(self.inner, name)


class InstalledReader(MilepostReader):
    """`FileSystemReader` of torch, which reads Milepost's format, DCP's and the others: gives torch's records."""

    def __init__(self, path: Location, _extension_registry: ExtensionRegistry | None = None, **options: Any) -> None:
        self._inner = FileSystemReader(path, _extension_registry, **options)

    @property
    def path(self) -> Any:
        """Where it reads, as a Path."""
        return self._inner.path  # type: ignore[attr-defined]

    def __getattr__(self, name: str) -> Any:
        if name == "_inner":
            raise AttributeError(name)
        return getattr(self._inner, name)


def storage_setup(storage: Any, checkpoint_id: str | os.PathLike[str] | None, reader: bool = False) -> Any:
    """The storage that torch's own functions use, where they are still held by someone."""
    given = reset_to(storage, checkpoint_id)
    if given is not None:
        return given
    assert checkpoint_id is not None, "reset_to raises"
    return InstalledReader(checkpoint_id) if reader else InstalledWriter(checkpoint_id)
