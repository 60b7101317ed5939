"""Storage by fsspec: Milepost's format on the file systems that fsspec knows. Needs fsspec."""

import io
import os
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

from milepost.data.transforms import StreamTransformExtension
from milepost.dcp._engine.lent import lend
from milepost.dcp.filesystem import FileSystemBase, FileSystemReader, FileSystemWriter, SerializationFormat
from milepost.errors import InvalidRequest
from milepost.store.fsspec_store import fsspec_module, store_by_fsspec

__all__ = ["FsspecReader", "FsspecWriter"]


class FileSystem(FileSystemBase):
    """The calls that storage makes on a file system, by fsspec. `init_path` connects it."""

    def __init__(self) -> None:
        self.fs: Any = None

    def _connected(self) -> Any:
        if self.fs is None:
            raise InvalidRequest("this file system is not connected: call init_path first")
        return self.fs

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Iterator[io.IOBase]:
        """A file, open in this mode. A file that was being written is removed if the block raises."""
        name = os.fspath(path)
        try:
            with self._connected().open(name, mode) as stream:
                yield stream
        except BaseException:
            if set(mode) & set("wax+"):
                with suppress(Exception):
                    self.rm_file(name)
            raise

    def concat_path(self, path: str | os.PathLike[str], suffix: str) -> str:
        """The path of a name in a folder."""
        return os.path.join(path, suffix)

    def init_path(self, path: str | os.PathLike[str], **kwargs: Any) -> str | os.PathLike[str]:
        """Connect to the file system of this path or URL."""
        self.fs, _ = fsspec_module().core.url_to_fs(os.fspath(path), **kwargs)
        return path

    def rename(self, path: str | os.PathLike[str], new_path: str | os.PathLike[str]) -> None:
        """Give a file another name."""
        self._connected().rename(os.fspath(path), os.fspath(new_path))

    def mkdir(self, path: str | os.PathLike[str]) -> None:
        """Make a folder, with those above it."""
        self._connected().makedirs(os.fspath(path), exist_ok=True)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether fsspec has a file system for this path or URL. Raises ImportError if that needs another package."""
        if isinstance(checkpoint_id, Path) or os.fspath(checkpoint_id).startswith(("http://", "https://")):
            return False
        try:
            fsspec_module().core.url_to_fs(os.fspath(checkpoint_id))
        except (ValueError, TypeError, InvalidRequest):  # not known to fsspec, or there is no fsspec
            return False
        return True

    def exists(self, path: str | os.PathLike[str]) -> bool:
        """Whether there is a file of this name."""
        return bool(self._connected().exists(os.fspath(path)))

    def rm_file(self, path: str | os.PathLike[str]) -> None:
        """Remove a file."""
        self._connected().rm(os.fspath(path))

    def ls(self, path: str | os.PathLike[str]) -> list[str]:
        """The paths in a folder."""
        return list(self._connected().ls(os.fspath(path), detail=False))


class _AtFsspec:
    """Storage at a path or URL of fsspec."""

    def _connect(self, path: str | os.PathLike[str], options: dict[str, Any]) -> None:
        self._options = options
        self.fs = FileSystem()
        self.path = path
        with suppress(ImportError):  # fsspec's own client for an object store is not needed
            self.fs.init_path(path, **options)

    def reset(self, checkpoint_id: Any = None) -> None:
        """Begin a new save or load."""
        store = store_by_fsspec(checkpoint_id, **self._options) if checkpoint_id else None
        super().reset(store)  # type: ignore[misc]  # of the writer or the reader
        if checkpoint_id:
            self.path = checkpoint_id

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: Any) -> bool:
        """Whether fsspec has a file system for this path or URL."""
        return FileSystem.validate_checkpoint_id(checkpoint_id)


class FsspecWriter(_AtFsspec, FileSystemWriter):
    """Writes Milepost's format to a path or URL of fsspec; `kwargs` are the options of the file system.

    A local path or `file://` URL keeps all promises of Milepost. Elsewhere a checkpoint appears when its manifest is
    put there, whole or not at all, as far as the file system puts objects whole. Each shard file is gathered on the
    local disk first (in the folder of `tempfile`). The options about files have no effect, as in `FileSystemWriter`.
    """

    def __init__(
        self,
        path: str | os.PathLike[str],
        single_file_per_rank: bool = True,
        sync_files: bool = True,
        thread_count: int = 1,
        per_thread_copy_ahead: int = 10_000_000,
        overwrite: bool = True,
        _extensions: Sequence[StreamTransformExtension] | None = None,
        serialization_format: SerializationFormat = SerializationFormat.TORCH_SAVE,
        **kwargs: Any,
    ) -> None:
        super().__init__(
            store_by_fsspec(path, **kwargs),
            single_file_per_rank,
            sync_files,
            thread_count,
            per_thread_copy_ahead,
            overwrite=overwrite,
            _extensions=_extensions,
            serialization_format=serialization_format,
        )
        self._connect(path, kwargs)


class FsspecReader(_AtFsspec, FileSystemReader):
    """Reads Milepost's format, every byte verified, from a path or URL of fsspec."""

    def __init__(self, path: str | os.PathLike[str], **kwargs: Any) -> None:
        super().__init__(store_by_fsspec(path, **kwargs))
        self._connect(path, kwargs)


lend(__name__)
