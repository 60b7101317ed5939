"""Directories that `torch.distributed.checkpoint` reads: data files of torch.save archives, and a pickled `.metadata`.

The records are torch's own classes. A tensor is cut along its first dimension into chunks of at most 64 MiB, because
torch's reader takes each chunk into memory as a whole.
"""

import io
import pickle
import uuid
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch.distributed.checkpoint.filesystem import CURRENT_DCP_VERSION, _StorageInfo
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)

from milepost.commit.beside import METADATA
from milepost.core.box import Box
from milepost.core.limits import MIB
from milepost.data.late import LateBox
from milepost.formats.write.content import Content, FilePiece
from milepost.formats.write.files import FolderPlan
from milepost.formats.write.torchfile import TensorStub, archive_of
from milepost.formats.write.zip import ArchiveLayout
from milepost.state.tensors import torch_dtype

CHUNK_BYTES = 64 * MIB
_ALIGN = 64


class DcpFile:
    """One data file: `add` appends items, and `content` is the file with all of them."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._archives: list[ArchiveLayout] = []
        self._pieces: list[FilePiece] = []
        self._end = 0

    def add(self, data: TensorStub | bytes) -> _StorageInfo:
        """Append a tensor, or the bytes of a value. The tensor is read when the file is written."""
        start = -(-self._end // _ALIGN) * _ALIGN  # so that elements are aligned in the file, too
        self._pieces.append(FilePiece.at(self._end, bytes(start - self._end)))
        if isinstance(data, bytes):
            self._pieces.append(FilePiece.at(start, data))
            length = len(data)
        else:
            archive = archive_of(data, start)
            self._archives.append(archive)
            self._pieces.extend(archive.pieces)
            length = archive.size_bytes
        self._end = start + length
        return _StorageInfo(self.name, start, length)

    @property
    def content(self) -> Content:
        """The whole file."""
        return Content(self.name, self._end, self._pieces, self._archives)


def bytes_of_value(value: Any) -> bytes:
    """A value as DCP stores it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata_bytes(
    items: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo], mapping: Mapping[str, Any], url: str
) -> bytes:
    """The bytes of `.metadata`: all items, where each piece lies, and how flat keys become a nested state."""
    return pickle.dumps(
        Metadata(
            state_dict_metadata=dict(items),
            planner_data=dict(mapping),
            storage_data=dict(places),
            storage_meta=StorageMeta(checkpoint_id=url, save_id=str(uuid.uuid4())),
            version=CURRENT_DCP_VERSION,
        )
    )


def tensor_record(dtype: str, shape: tuple[int, ...], chunks: Iterable[Box]) -> TensorStorageMetadata:
    """A tensor in `.metadata`."""
    return TensorStorageMetadata(
        properties=TensorProperties(dtype=torch_dtype(dtype)),
        size=torch.Size(shape),
        chunks=[ChunkStorageMetadata(torch.Size(box.offset), torch.Size(box.shape)) for box in chunks],
    )


def chunks_of(dtype: str, shape: tuple[int, ...], chunk_bytes: int = CHUNK_BYTES) -> list[Box]:
    """A tensor cut along its first dimension into chunks of at most this size, and of at least one row."""
    whole = Box.whole(shape)
    if not shape or not whole.elements:
        return [whole]
    row_bytes = whole.elements // shape[0] * torch_dtype(dtype).itemsize
    rows = max(1, chunk_bytes // row_bytes)
    return [whole.narrow(0, start, min(rows, shape[0] - start)) for start in range(0, shape[0], rows)]


def dcp_plan(flat: Mapping[str, Any], mapping: Mapping[str, Any], world: int, url: str) -> FolderPlan:
    """The files for a flat state with `TensorStub`s for tensors: one data file for each rank, of about equal size."""
    items: dict[str, Any] = {}
    pending: list[tuple[MetadataIndex, TensorStub | bytes, int]] = []
    for key, value in flat.items():
        if not isinstance(value, TensorStub):
            items[key] = BytesStorageMetadata()
            data = bytes_of_value(value)
            pending.append((MetadataIndex(key), data, len(data)))
            continue
        assert isinstance(value.data, LateBox)
        boxes = chunks_of(value.dtype, value.shape)
        items[key] = tensor_record(value.dtype, value.shape, boxes)
        for i, box in enumerate(boxes):
            late = value.data._replace(box=box)
            index = MetadataIndex(key, box.offset, i if len(boxes) > 1 else None)
            pending.append((index, TensorStub(value.dtype, box.shape, late), late.size_bytes))
    files, places = _dealt_out(pending, world)
    last = [(METADATA, metadata_bytes(items, places, mapping, url))]
    return FolderPlan([file.content for file in files], last, _owns, [METADATA])


def _owns(name: str) -> bool:
    return name == METADATA or name.endswith(".distcp")


def _dealt_out(
    pending: list[tuple[MetadataIndex, TensorStub | bytes, int]], world: int
) -> tuple[list[DcpFile], dict[MetadataIndex, _StorageInfo]]:
    total, done = max(sum(size for _, _, size in pending), 1), 0
    files: dict[int, DcpFile] = {}
    places = {}
    for index, data, size in pending:
        rank = min(done * world // total, world - 1)
        file = files.setdefault(rank, DcpFile(f"__{rank}_0.distcp"))
        places[index] = file.add(data)
        done += size
    return list(files.values()), places
