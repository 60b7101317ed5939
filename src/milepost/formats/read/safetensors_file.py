"""One safetensors file, read on demand, with the methods of the handle that `safetensors.safe_open` gives.

The storage of `milepost.dcp` opens files by that function where the safetensors library is installed, and by this one
where it is not.
"""

import os
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import torch

from milepost.core.dtypes import size_bytes
from milepost.core.shardfile import Entry
from milepost.data.memory import view_of
from milepost.errors import CheckpointNotFound, InvalidRequest
from milepost.formats.read.huggingface import parse_head, read_head, type_of
from milepost.state.tensors import new_tensor
from milepost.store import LocalStore


class SafetensorsFile:
    """A file that is open for reading. Raises CheckpointNotFound, and CheckpointDamaged where it is not whole."""

    def __init__(self, filename: str | os.PathLike[str]) -> None:
        path = Path(filename).resolve()  # the caller named this file, so a link is followed
        if not path.is_file():
            raise CheckpointNotFound(f"there is no file {filename}")
        store = LocalStore(path.parent)
        head, file_bytes = read_head(store, path.name)
        self._path, self._start = str(path), len(head)
        self._entries, self._notes, _ = parse_head(head, file_bytes, self._path)
        self._reader = store.reader(path.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._reader.close()

    def keys(self) -> list[str]:
        """The names of all tensors."""
        return sorted(self._entries)

    def metadata(self) -> dict[str, str]:
        """The notes of the file."""
        return self._notes

    def get_tensor(self, name: str) -> torch.Tensor:
        """A whole tensor."""
        whole: torch.Tensor = self.get_slice(name)[...]
        return whole

    def get_slice(self, name: str) -> "FileSlice":
        """A tensor of which parts are read."""
        if name not in self._entries:
            raise InvalidRequest(f"{self._path} holds no tensor {name[:200]!r}")
        return FileSlice(self, name, self._entries[name])

    def rows(self, name: str, entry: Entry, start: int, stop: int) -> torch.Tensor:
        """Rows start..stop of a tensor, which lie together in the file."""
        dtype, shape = type_of(entry, f"{name[:200]!r} in {self._path}")
        wanted = (stop - start, *shape[1:]) if shape else ()
        data = new_tensor(dtype, wanted)
        if data.numel():
            row_bytes = size_bytes(dtype, shape[1:]) if shape else 0
            self._reader.read(self._start + entry.data_offsets[0] + start * row_bytes, [view_of(data)])
        return data


class FileSlice:
    """A tensor in a file: its description, and its elements by `[...]`. Only rows that are asked for are read."""

    def __init__(self, file: SafetensorsFile, name: str, entry: Entry) -> None:
        self._file, self._name, self._entry = file, name, entry

    def get_shape(self) -> list[int]:
        """The shape, as the file has it."""
        return list(self._entry.shape)

    def get_dtype(self) -> str:
        """The type, as safetensors spells it."""
        return self._entry.dtype

    def __getitem__(self, inside: Any) -> torch.Tensor:
        parts = inside if isinstance(inside, tuple) else (inside,)
        shape = type_of(self._entry, self._name)[1]
        if not shape or not parts or not isinstance(parts[0], slice):
            return self._file.rows(self._name, self._entry, 0, shape[0] if shape else 1)[inside]
        start, stop, step = parts[0].indices(shape[0])
        if step != 1:
            return self._file.rows(self._name, self._entry, 0, shape[0])[inside]
        found = self._file.rows(self._name, self._entry, start, max(start, stop))
        return found[(slice(None), *parts[1:])]
