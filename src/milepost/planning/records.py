"""The records that planners and storage exchange. Names and fields are those that users of DCP know."""

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Any

import torch

_FORMATS = {"contiguous": torch.contiguous_format, "channels_last": torch.channels_last}
_FORMATS |= {"channels_last_3d": torch.channels_last_3d, "preserve": torch.preserve_format}


@dataclass
class ChunkStorageMetadata:
    """One box of a tensor."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass
class TensorProperties:
    """What a tensor is made of. Only `dtype` is stored; the rest is here for programs that look at it."""

    dtype: torch.dtype = field(default_factory=torch.get_default_dtype)
    layout: torch.layout = torch.strided
    requires_grad: bool = False
    memory_format: torch.memory_format = torch.contiguous_format
    pin_memory: bool = False

    @staticmethod
    def create_from_tensor(tensor: torch.Tensor) -> "TensorProperties":
        """The properties of this tensor."""
        return TensorProperties(
            tensor.dtype, tensor.layout, tensor.requires_grad, torch.contiguous_format, tensor.is_pinned()
        )

    def __getstate__(self) -> tuple[Any, ...]:
        # Torch cannot pickle a memory format.
        name = next(name for name, known in _FORMATS.items() if known == self.memory_format)
        return self.dtype, self.layout, self.requires_grad, name, self.pin_memory

    def __setstate__(self, state: tuple[Any, ...]) -> None:
        self.dtype, self.layout, self.requires_grad, name, self.pin_memory = state
        self.memory_format = _FORMATS[name]


@dataclass
class TensorStorageMetadata:
    """A tensor in a checkpoint, and the boxes that it was cut into."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """Something in a checkpoint that is not a tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata
STATE_DICT_TYPE = dict[str, Any]


@dataclass
class StorageMeta:
    """What a storage layer says of itself: where it is, and the ids of the save or load."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """All that a checkpoint holds, with each tensor's boxes; `planner_data` and `storage_data` belong to those two."""

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None


@dataclass(frozen=True, init=False)
class MetadataIndex:
    """Names one object of a state, or the box of a tensor that starts at `offset`.

    `index` is a hint where in the list of boxes that one stands; it takes no part in comparisons.
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(default=None, compare=False)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)


class WriteItemType(Enum):
    """What a write item holds: a whole tensor, a part of one, or bytes."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """What a read item brings: a box of a tensor, or bytes."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """How many bytes there are, where that is known."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """The box that is written, and the tensor that it is a part of."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """One thing to write."""

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """How many bytes the box takes; None for what is not a tensor."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One thing to read: a box of `lengths` at `storage_offsets` inside a stored box, to `dest_offsets` inside the target."""

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes. `usable=False` stands for "the same as in the last save"."""

    items: list[WriteItem]
    storage_data: Any = None
    planner_data: Any = None
    usable: bool = True


@dataclass
class LoadPlan:
    """What one rank reads."""

    items: list[ReadItem]
    storage_data: Any = None
    planner_data: Any = None


@dataclass(frozen=True)
class WriteResult:
    """What storage says of one item that it has written."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any = None
