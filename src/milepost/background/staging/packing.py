"""Packing: where each tensor of a state goes in staging memory: in the order of the file that is written from there."""

from collections.abc import Callable
from typing import Any, NamedTuple

import msgspec
import torch

from milepost.core.box import Shape
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.shardfile import file_order
from milepost.data.late import ready
from milepost.data.write import EntryToWrite
from milepost.saving.describe import Described
from milepost.state.tensors import LocalTensor, Part, torch_dtype


class Slot(msgspec.Struct, frozen=True, gc=False):
    """A place in staging memory, and what lies there."""

    offset: int
    dtype: str
    shape: Shape

    @property
    def size_bytes(self) -> int:
        """How long it is."""
        return size_bytes(self.dtype, self.shape)

    def within(self, memory: torch.Tensor) -> torch.Tensor:
        """The tensor that lies there."""
        piece = memory[self.offset : self.offset + self.size_bytes]
        return piece.view(torch_dtype(self.dtype)).view(self.shape)


class Packed(NamedTuple):
    """What of a state goes where. Tensors that are the same memory have one slot; what did not fit has none.

    `slots` is by the identity of the data that it is for, which the description keeps.
    """

    sources: list[tuple[torch.Tensor, Slot]]
    slots: dict[int, Slot]
    left_out: list[torch.Tensor]
    size_bytes: int


def pack(described: Described, limit_bytes: int, begin: int = 0) -> Packed:
    """Give slots from `begin` on to all that a rank holds, as far as they fit into `limit_bytes`."""
    held: list[tuple[torch.Tensor, str, Shape]] = [
        (part.data, local.dtype, part.box.shape) for local in described.tensors.values() for part in local.parts
    ]
    held += [(ready(entry.data), entry.header.dtype, tuple(entry.header.shape)) for entry in described.private]
    # As the writer orders its file, so that what is written in one run lies here in one run.
    held.sort(key=lambda one: file_order(one[1], size_bytes(one[1], one[2])))
    known: dict[Any, Slot] = {}
    slots: dict[int, Slot] = {}
    sources: list[tuple[torch.Tensor, Slot]] = []
    left_out: list[torch.Tensor] = []
    end = begin
    for data, dtype, shape in held:
        size = size_bytes(dtype, shape)
        identity = _identity(data)
        if size == 0 or identity in known:
            if identity in known:
                slots[id(data)] = known[identity]
            continue
        start = -(-end // DTYPES[dtype].size_bytes) * DTYPES[dtype].size_bytes
        if start + size > limit_bytes:
            left_out.append(data)
            continue
        slot = Slot(start, dtype, shape)
        known[identity] = slots[id(data)] = slot
        sources.append((data, slot))
        end = start + size
    return Packed(sources, slots, left_out, end if sources else 0)


def _identity(data: torch.Tensor) -> Any:
    """Equal for tensors that are the same elements of the same memory: tied weights are copied once."""
    lazily = data.is_conj(), data.is_neg()
    return data.data_ptr(), data.dtype, data.shape, data.stride(), data.device, lazily


def in_place_of(described: Described, change: Callable[[torch.Tensor, str, Shape], Any]) -> Described:
    """The same description with other data: `change` gives what replaces a tensor. It is called once for each part."""
    tensors = {key: _changed(local, change) for key, local in described.tensors.items()}
    private = [
        EntryToWrite(entry.header, change(ready(entry.data), entry.header.dtype, tuple(entry.header.shape)), entry.live)
        for entry in described.private
    ]
    return Described(described.table, described.digest, tensors, private, described.metadata)


def _changed(local: LocalTensor, change: Callable[[torch.Tensor, str, Shape], Any]) -> LocalTensor:
    parts = tuple(Part(part.box, change(part.data, local.dtype, part.box.shape)) for part in local.parts)
    return LocalTensor(local.dtype, local.shape, local.kind, local.layout, parts)
