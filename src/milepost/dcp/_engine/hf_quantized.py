"""Reads quantized tensors of Hugging Face folders, and gives their values.

Two kinds are known, by the names of their scales:

* `x.weight` with `x.weight_scale_inv`: square blocks of a matrix share a scale (DeepSeek). Value times scale.
* `x_blocks` with `x_scales`: MXFP4 (gpt-oss). The last two dimensions are groups and bytes. A byte holds two numbers
  of 4 bits, the low one first; a group has one scale, the exponent of a power of two plus 127.
"""

import math
from pathlib import Path
from typing import Any

import torch

from milepost.dcp._engine.hf_read import HuggingFaceStorageReader, read_weight_map, slices_of
from milepost.errors import CheckpointDamaged, CheckpointNotFound, InvalidRequest
from milepost.formats.read.names import INDEX
from milepost.planning.records import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    ReadItem,
    TensorProperties,
    TensorStorageMetadata,
)

_SCALE, _SCALES, _BLOCKS = ".weight_scale_inv", "_scales", "_blocks"
_FP4 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
"""The numbers of 3 bits; the fourth is the sign."""
_EXPONENT_BIAS = 127
_AT_ONCE = 1 << 24


class QuantizedHuggingFaceStorageReader(HuggingFaceStorageReader):
    """Reads a folder in which tensors with scales are quantized; the planner sees them as they are without.

    `target_dtype`: the type in which values are computed and described. `block_size`: the side of the blocks that share
    a scale. A quantized tensor is whole in one file, and an index says which file has its scales.
    """

    def __init__(
        self, path: str, thread_count: int = 1, target_dtype: torch.dtype = torch.float32, block_size: int = 128
    ) -> None:
        super().__init__(path, thread_count)
        if block_size < 1:
            raise InvalidRequest(f"block_size is {block_size}; blocks have at least one row and column")
        self.target_dtype, self.block_size = target_dtype, block_size
        self._weight_scale_mapping: dict[str, str] = {}
        self._weight_map: dict[str, str] = {}
        self._tensor_full_shapes: dict[str, torch.Size] = {}

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        """What the files hold, with quantized tensors as their values."""
        metadata = super().read_metadata(*args, **kwargs)
        self._load_quantization_metadata()
        for fqn, saved in metadata.state_dict_metadata.items():
            if not isinstance(saved, TensorStorageMetadata):
                continue
            self._tensor_full_shapes[fqn] = saved.size
            if self._is_tensor_quantized(fqn):
                metadata.state_dict_metadata[fqn] = self._as_values(fqn, saved, metadata.storage_data)
        return metadata

    def _as_values(
        self, fqn: str, saved: TensorStorageMetadata, stored: dict[MetadataIndex, Any]
    ) -> TensorStorageMetadata:
        size = saved.size
        if fqn.endswith(_BLOCKS):
            if len(size) < 2:
                raise CheckpointDamaged(f"{fqn!r} in {self.path} has no groups: its shape is {tuple(size)}")
            self._tensor_full_shapes[f"{fqn}_quantized"] = size
            size = torch.Size([*size[:-2], 2 * size[-2] * size[-1]])
            self._tensor_full_shapes[fqn] = size
        if len(saved.chunks) > 1:
            raise CheckpointDamaged(
                f"the quantized tensor {fqn!r} in {self.path} is cut into {len(saved.chunks)} parts"
            )
        chunk = ChunkStorageMetadata(torch.Size([0] * len(size)), size)
        stored[MetadataIndex(fqn, chunk.offsets)] = stored.pop(MetadataIndex(fqn, saved.chunks[0].offsets))
        return TensorStorageMetadata(TensorProperties(self.target_dtype), size, [chunk])

    def _load_quantization_metadata(self) -> None:
        """Read the index, which says where scales are."""
        index = Path(self.path) / INDEX
        if not index.exists():
            raise CheckpointNotFound(f"{self.path} has no {INDEX}, which says where the scales are")
        self._build_weight_scale_mapping(read_weight_map(index))

    def _build_weight_scale_mapping(self, weight_map: dict[str, str]) -> None:
        """Find the scale of each quantized tensor."""
        self._weight_map, self._weight_scale_mapping = weight_map, {}
        for name in weight_map:
            for ending, weight in ((_SCALE, ".weight"), (_SCALES, _BLOCKS)):
                other = name.removesuffix(ending) + weight
                if name.endswith(ending) and other in weight_map:
                    self._weight_scale_mapping[other] = name

    def _is_tensor_quantized(self, tensor_fqn: str) -> bool:
        """Whether a tensor has a scale."""
        return not tensor_fqn.endswith((_SCALE, _SCALES)) and tensor_fqn in self._weight_scale_mapping

    def _read_item(self, f: Any, req: ReadItem) -> torch.Tensor:
        if self._is_tensor_quantized(req.storage_index.fqn):
            return self._read_quantized_tensor_with_block_alignment(req, f)
        return super()._read_item(f, req)

    def _read_quantized_tensor_with_block_alignment(self, req: ReadItem, safetensor_file: Any) -> torch.Tensor:
        """The values of the part that an item reads."""
        fqn = req.storage_index.fqn
        scale = self._scale(fqn, safetensor_file)
        if fqn.endswith(_BLOCKS):
            return self._read_groups(fqn, req, safetensor_file, scale)
        shape = self._tensor_full_shapes.get(fqn, torch.Size())
        if len(shape) != 2:
            raise CheckpointDamaged(f"{fqn!r} in {self.path} has blocks with scales, and the shape {tuple(shape)}")
        weight = safetensor_file.get_slice(fqn)[slices_of(req)]
        return self._dequantize_tensor(weight, scale, shape, self._get_slice_to_block_mapping(req))

    def _scale(self, fqn: str, safetensor_file: Any) -> torch.Tensor:
        """All scales of a tensor, from its own file or from another."""
        name = self._weight_scale_mapping[fqn]
        file = self._weight_map.get(name)
        if file is None:
            raise CheckpointDamaged(f"the index of {self.path} names no file for {name!r}")
        if file == self._weight_map.get(fqn):
            found: torch.Tensor = safetensor_file.get_tensor(name)
            return found
        with self._open(Path(self.path) / file) as opened:
            elsewhere: torch.Tensor = opened.get_tensor(name)
            return elsewhere

    def _read_groups(self, fqn: str, req: ReadItem, safetensor_file: Any, scales: torch.Tensor) -> torch.Tensor:
        """The groups that hold the values of an item, and those values of them."""
        per_group = 2 * self._tensor_full_shapes[f"{fqn}_quantized"][-1]
        first, count = req.storage_offsets[-1], req.lengths[-1]
        group, end = first // per_group, -(-(first + count) // per_group)
        outer = slices_of(req)[:-1]
        blocks = safetensor_file.get_slice(fqn)[(*outer, slice(group, end), slice(None))]
        return self._dequantize_tensor_mxfp4(blocks, scales, req, group, first - group * per_group)

    def _dequantize_tensor_mxfp4(
        self,
        blocks: torch.Tensor,
        scales: torch.Tensor,
        req: ReadItem,
        group_start: int,
        offset_in_first_group: int,
    ) -> torch.Tensor:
        """The values of groups: `blocks` are those read, `scales` those of the whole tensor."""
        groups = blocks.shape[-2]
        if blocks.dtype != torch.uint8 or scales.dtype not in (torch.uint8, torch.float8_e8m0fnu):
            raise CheckpointDamaged(
                f"{self.path}: the blocks and scales of {req.storage_index.fqn!r} are {blocks.dtype} and "
                f"{scales.dtype}; those of MXFP4 are bytes"
            )
        scales = scales.view(torch.uint8)  # an exponent, also where its type says so
        here = scales[(*slices_of(req)[:-1], slice(group_start, group_start + groups))]
        if here.shape != blocks.shape[:-1]:
            raise CheckpointDamaged(
                f"{self.path}: blocks of shape {tuple(blocks.shape)} of {req.storage_index.fqn!r} have scales of shape "
                f"{tuple(here.shape)}"
            )
        table = torch.tensor([*_FP4, *(-value for value in _FP4)], dtype=self.target_dtype, device="cpu")
        rows = blocks.reshape(math.prod(blocks.shape[:-1]), blocks.shape[-1])
        exponents = here.reshape(-1, 1).to(torch.int32) - _EXPONENT_BIAS
        values = torch.empty(rows.shape[0], 2 * rows.shape[1], dtype=self.target_dtype, device="cpu")
        at_once = max(_AT_ONCE // max(rows.shape[1], 1), 1)
        for start in range(0, rows.shape[0], at_once):
            part = slice(start, start + at_once)
            bits = rows[part].to(torch.int64)
            both = torch.stack((table[bits & 15], table[bits >> 4]), dim=-1)
            values[part] = torch.ldexp(both.flatten(1), exponents[part])
        whole = values.reshape(*blocks.shape[:-2], -1)
        return whole[..., offset_in_first_group : offset_in_first_group + req.lengths[-1]]

    def _get_slice_to_block_mapping(self, req: ReadItem) -> tuple[tuple[int, int], tuple[int, int], slice, slice]:
        """The blocks (first, end) of rows and of columns that an item touches, and its rows and columns."""
        rows, columns = slices_of(req)
        first, second = ((part.start // self.block_size, -(-part.stop // self.block_size)) for part in (rows, columns))
        return first, second, rows, columns

    def _dequantize_tensor(
        self,
        weight: torch.Tensor,
        scale_inv: torch.Tensor,
        full_tensor_shape: torch.Size,
        slice_info: tuple[tuple[int, int], tuple[int, int], slice, slice],
    ) -> torch.Tensor:
        """The values of a part of a matrix: each element times the scale of its block."""
        wanted = tuple(-(-length // self.block_size) for length in full_tensor_shape)
        if tuple(scale_inv.shape) != wanted:
            raise CheckpointDamaged(
                f"{self.path}: a matrix of {tuple(full_tensor_shape)} has {tuple(scale_inv.shape)} scales, and blocks "
                f"of {self.block_size} need {wanted}; is block_size right?"
            )
        *_, rows, columns = slice_info
        down, across = (_numbers(part) // self.block_size for part in (rows, columns))
        values = torch.empty(weight.shape, dtype=self.target_dtype, device="cpu")
        at_once = max(_AT_ONCE // max(weight.shape[1], 1), 1)
        for start in range(0, weight.shape[0], at_once):
            part = slice(start, start + at_once)
            scales = scale_inv[down[part]][:, across].to(torch.float32)
            values[part] = (weight[part].to(torch.float32) * scales).to(self.target_dtype)
        return values


def _numbers(part: slice) -> torch.Tensor:
    return torch.arange(part.start, part.stop, dtype=torch.int64, device="cpu")
