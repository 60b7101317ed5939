"""The last step of a load: verified bytes go into tensors."""

from collections import defaultdict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch

from milepost.core.box import Box, strides_of
from milepost.core.dtypes import DTYPES
from milepost.core.plan import ReadItem
from milepost.read import WINDOW_BYTES, Files, VerifiedFile
from milepost.tensors import torch_dtype


@dataclass(frozen=True, slots=True)
class Placement:
    """A planned read, the saved dtype, and the memory that takes the result."""

    item: ReadItem
    dtype: str
    target: torch.Tensor


@dataclass(frozen=True, slots=True)
class _Step:
    """A slab of a read: a byte range of the file, and what of it goes where."""

    start: int
    stop: int
    box: Box
    placement: Placement


def place_all(files: Files, placements: Iterable[Placement]) -> int:
    """Read everything, file by file and front to back, into its targets. Gives the number of bytes asked for."""
    by_rank: dict[int, list[Placement]] = defaultdict(list)
    for placement in placements:
        by_rank[placement.item.rank].append(placement)
    total = 0
    for rank in sorted(by_rank):
        file = files.of(rank)
        steps = sorted((s for p in by_rank[rank] for s in _steps(file, p)), key=lambda s: (s.start, s.stop))
        file.expect((s.start, s.stop) for s in steps)
        for step in steps:
            _place(file, step)
            total += step.box.elements * DTYPES[step.placement.dtype].size_bytes
    return total


def _steps(file: VerifiedFile, placement: Placement) -> Iterator[_Step]:
    """The read cut into slabs whose byte range fits a window."""
    item, kind = placement.item, DTYPES[placement.dtype]
    entry = file.entry(item, placement.dtype)
    strides = strides_of(item.source.shape)
    inner = item.box.within(item.source)
    for slab in _fitting(inner, strides, WINDOW_BYTES // kind.size_bytes):
        first = sum(a * s for a, s in zip(slab.offset, strides, strict=True))
        last = sum((a - 1) * s for a, s in zip(slab.end, strides, strict=True))
        start = entry.data_offsets[0] + first * kind.size_bytes
        stop = entry.data_offsets[0] + (last + 1) * kind.size_bytes
        yield _Step(start, stop, slab, placement)


def _fitting(box: Box, strides: tuple[int, ...], limit: int) -> Iterator[Box]:
    """Slabs of `box`, each spanning at most `limit` elements of the array that it lies in (or a single element)."""
    if not box.elements:
        return
    span = sum((n - 1) * s for n, s in zip(box.shape, strides, strict=True)) + 1
    if span <= limit or box.elements == 1:
        yield box
        return
    dim = next(d for d, n in enumerate(box.shape) if n > 1)
    step = max(1, limit // strides[dim])
    for start in range(0, box.shape[dim], step):
        part = box.narrow(dim, start, min(step, box.shape[dim] - start))
        yield from _fitting(part, strides, limit)


def _place(file: VerifiedFile, step: _Step) -> None:
    item = step.placement.item
    target = step.placement.target[step.box.within(item.box.within(item.source)).slices]
    flat = _as_tensor(file.data(step.start, step.stop), step.placement.dtype, target.device)
    target.copy_(flat.as_strided(step.box.shape, strides_of(item.source.shape)))


def _as_tensor(data: memoryview, dtype: str, device: torch.device) -> torch.Tensor:
    """The bytes as a flat tensor of `dtype`; copied only where they are not aligned for it."""
    flat = torch.frombuffer(data, dtype=torch.uint8)
    if dtype == "complex32":
        flat = flat.to(device)  # as bytes: torch warns when it makes a complex32 tensor
    if flat.data_ptr() % DTYPES[dtype].size_bytes:
        flat = flat.clone()
    return flat.view(torch_dtype(dtype))
