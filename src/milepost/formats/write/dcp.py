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

from milepost.core.box import Box
from milepost.core.limits import MIB
from milepost.data.late import LateBox
from milepost.data.transfer import Meter, Transfer
from milepost.data.write import committed
from milepost.formats.write.content import Content, FilePiece, write_range
from milepost.formats.write.files import FolderPlan
from milepost.formats.write.torchfile import TensorStub, archive_of
from milepost.formats.write.zip import ArchiveLayout, endings
from milepost.state.tensors import torch_dtype
from milepost.store import Store

METADATA = ".metadata"
CHUNK_BYTES = 64 * MIB
_ALIGN = 64


class DcpFile:
    """One data file. `add` says where an item will lie; `write` writes all of them, in one pass, and makes it durable."""

    def __init__(self, name: str) -> None:
        self.name = name
        self._archives: list[ArchiveLayout] = []
        self._pieces: list[FilePiece] = []
        self._end = 0

    def add(self, data: "torch.Tensor | TensorStub | bytes") -> _StorageInfo:
        """Put a tensor, or the bytes of a value, behind what is there. The tensor is not copied, and read by `write`."""
        start = -(-self._end // _ALIGN) * _ALIGN  # so that elements are aligned in the file, too
        self._pieces.append(FilePiece(self._end, start - self._end, bytes(start - self._end)))
        if isinstance(data, bytes):
            self._pieces.append(FilePiece(start, len(data), data))
            length = len(data)
        else:
            stored = data if isinstance(data, TensorStub) else TensorStub.of(data, self.name)
            archive = archive_of(stored, start)
            self._archives.append(archive)
            self._pieces.extend(archive.pieces)
            length = archive.size_bytes
        self._end = start + length
        return _StorageInfo(self.name, start, length)

    @property
    def content(self) -> Content:
        """All of it."""
        return Content(self.name, self._end, self._pieces, self._archives)

    def write(self, store: Store, transfer: Transfer | None = None, meter: Meter | None = None) -> None:
        """Write the file into a store. On any error nothing of it remains."""
        transfer, meter = transfer or Transfer(), meter or Meter("save", store.url)
        with committed(store.writer(self.name, self._end, direct=transfer.direct)) as writer:
            content = self.content
            sums = write_range(writer, content, 0, self._end, transfer, meter)
            for at, data in endings(content, sums):
                writer.write(at, [data])


def bytes_of_value(value: Any) -> bytes:
    """A value as DCP stores it."""
    buffer = io.BytesIO()
    torch.save(value, buffer)
    return buffer.getvalue()


def metadata_bytes(
    items: Mapping[str, Any], places: Mapping[MetadataIndex, _StorageInfo], mapping: Mapping[str, Any], url: str
) -> bytes:
    """The bytes of `.metadata`: what there is, where each piece lies, and how flat keys become a nested state."""
    return pickle.dumps(
        Metadata(
            state_dict_metadata=dict(items),
            planner_data=dict(mapping),
            storage_data=dict(places),
            storage_meta=StorageMeta(checkpoint_id=url, save_id=str(uuid.uuid4())),
            version=CURRENT_DCP_VERSION,
        )
    )


def write_metadata(store: Store, data: bytes) -> None:
    """Make a directory of data files count: whole and durable or not at all. An older `.metadata` is removed first."""
    store.delete(METADATA)
    store.create(METADATA, data)


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
    """The files for a flat state, whose tensors are `TensorStub` stand-ins; one data file for each rank, about equally large."""
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
