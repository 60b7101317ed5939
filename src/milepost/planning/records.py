"""The records that planners and storage exchange, with the names and fields that users of DCP know."""

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
    """One box of a tensor: where it starts, and its size in each dimension."""

    offsets: torch.Size
    sizes: torch.Size


@dataclass
class TensorProperties:
    """The properties of a tensor. Only `dtype` is stored; the other fields exist for programs that look at them."""

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
    """A tensor in a checkpoint: its properties, its size, and the boxes that it was cut into."""

    properties: TensorProperties
    size: torch.Size
    chunks: list[ChunkStorageMetadata]


@dataclass
class BytesStorageMetadata:
    """A value in a checkpoint, which is not a tensor."""


STORAGE_TYPES = TensorStorageMetadata | BytesStorageMetadata
STATE_DICT_TYPE = dict[str, Any]


@dataclass
class StorageMeta:
    """What a storage layer says about itself: where it is, and the ids of the save or load."""

    checkpoint_id: str | os.PathLike[str] | None = None
    save_id: str | None = None
    load_id: str | None = None
    modules: list[str] = field(default_factory=list)


@dataclass
class Metadata:
    """The contents of a checkpoint: each key, and the boxes of each tensor.

    `planner_data` belongs to the planner, `storage_data` to the storage.

    >>> _ = milepost.save({"w": torch.ones(2, 3), "step": 7}, "memory://described")
    >>> metadata = milepost.planning.CheckpointReader("memory://described").read_metadata()
    >>> metadata.state_dict_metadata["step"]
    BytesStorageMetadata()
    >>> metadata.state_dict_metadata["w"].chunks
    [ChunkStorageMetadata(offsets=torch.Size([0, 0]), sizes=torch.Size([2, 3]))]
    """

    state_dict_metadata: dict[str, STORAGE_TYPES]
    planner_data: Any = None
    storage_data: Any = None
    storage_meta: StorageMeta | None = None
    version: str | None = None


@dataclass(frozen=True, init=False)
class MetadataIndex:
    """The name of one object of a state, or of the box of a tensor that starts at `offset`.

    `index` hints at the position of the box in the tensor's list of boxes. Comparisons ignore it.

    >>> milepost.planning.MetadataIndex("w", (0, 4), index=1) == milepost.planning.MetadataIndex("w", (0, 4))
    True
    """

    fqn: str
    offset: torch.Size | None = None
    index: int | None = field(default=None, compare=False)

    def __init__(self, fqn: str, offset: Sequence[int] | None = None, index: int | None = None) -> None:
        object.__setattr__(self, "fqn", fqn)
        object.__setattr__(self, "offset", None if offset is None else torch.Size(offset))
        object.__setattr__(self, "index", index)


class WriteItemType(Enum):
    """What a write item is: a whole tensor, a box of a tensor, or bytes."""

    TENSOR = auto()
    SHARD = auto()
    BYTE_IO = auto()


class LoadItemType(Enum):
    """What a read item is: a box of a tensor, or bytes."""

    TENSOR = auto()
    BYTE_IO = auto()


@dataclass(frozen=True)
class BytesIOWriteData:
    """The number of bytes of a write item, where it is known."""

    nbytes: int


@dataclass(frozen=True)
class TensorWriteData:
    """The box that is written, and the properties and size of the whole tensor."""

    chunk: ChunkStorageMetadata
    properties: TensorProperties
    size: torch.Size


@dataclass(frozen=True)
class WriteItem:
    """One thing that a rank writes: a tensor, a box of a tensor, or bytes.

    >>> items = milepost.planning.create_write_items("w", torch.ones(2, 3))
    >>> items[0].index.fqn, items[0].type.name, items[0].tensor_storage_size()
    ('w', 'TENSOR', 24)
    """

    index: MetadataIndex
    type: WriteItemType
    bytes_io_data: BytesIOWriteData | None = None
    tensor_data: TensorWriteData | None = None

    def tensor_storage_size(self) -> int | None:
        """The size of the box in bytes; None for an item that is not a tensor."""
        if self.tensor_data is None:
            return None
        return math.prod(self.tensor_data.chunk.sizes) * self.tensor_data.properties.dtype.itemsize


@dataclass(frozen=True)
class ReadItem:
    """One thing that a rank reads: from a stored box into a box of the target.

    The region has the size `lengths`. It starts at `storage_offsets` inside the stored box and at `dest_offsets` inside
    the box of the target.

    >>> _ = milepost.save({"w": torch.ones(2, 3)}, "memory://read")
    >>> metadata = milepost.planning.CheckpointReader("memory://read").read_metadata()
    >>> saved = metadata.state_dict_metadata["w"]
    >>> [item.lengths for item in milepost.planning.create_read_items("w", saved, torch.zeros(2, 3))]
    [torch.Size([2, 3])]
    """

    type: LoadItemType
    dest_index: MetadataIndex
    dest_offsets: torch.Size
    storage_index: MetadataIndex
    storage_offsets: torch.Size
    lengths: torch.Size


@dataclass(frozen=True)
class SavePlan:
    """What one rank writes. `usable=False` means "the same as in the last save"."""

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
    """What storage reports about one item that it has written."""

    index: MetadataIndex
    size_in_bytes: int
    storage_data: Any = None
