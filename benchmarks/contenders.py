"""What is compared: Milepost, DCP, the raw disk and safetensors, each as a function that saves or loads a `State`."""

import mmap
import os
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import milepost

PIECE_BYTES = 1 << 20
"""What raw hands to the kernel at a time. Larger calls at round offsets get huge pages for the page cache, and in a virtual
machine that gives free memory back to its host those took up to three times the CPU seconds."""

DIRECT_PIECES = 8
"""What raw direct writes at a time."""

_MOST_VIEWS = 1024  # what one call of pwritev or preadv takes
_PAGE = 4096
_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of the state: where it stands, and what it is."""

    group: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def large_specs(size_bytes: int) -> list[Spec]:
    """About `size_bytes` of a transformer in training: an embedding and layers, bf16 weights and two fp32 moments for each."""
    width = min(2048, int((size_bytes / 240) ** 0.5) // 64 * 64)
    layers = max(1, round(size_bytes / (120 * width * width)) - 1)
    square, wide, tall = (width, width), (4 * width, width), (width, 4 * width)
    shapes = {"q": square, "k": square, "v": square, "o": square, "up": wide, "down": tall, "norm": (width,)}
    weights = {"embedding.weight": (12 * width, width)}
    weights |= {f"layers.{i}.{name}.weight": shape for i in range(layers) for name, shape in shapes.items()}
    specs = []
    for key, shape in weights.items():
        specs.append(Spec("model", key, shape, torch.bfloat16))
        specs.extend(Spec("optimizer", f"{key}.{moment}", shape, torch.float32) for moment in ("m", "v"))
    return specs


def small_specs(count: int) -> list[Spec]:
    """`count` tensors of 4 KB."""
    return [Spec("model", f"blocks.{i}.scale", (1024,), torch.float32) for i in range(count)]


class State:
    """A state with known contents: plain tensors, or DTensors cut along `dim` over a mesh."""

    def __init__(self, specs: list[Spec], mesh: DeviceMesh | None = None, dim: int = 0) -> None:
        # All contents are windows of one block of random bytes: any part of any tensor can be compared at no cost.
        largest = max(spec.size_bytes for spec in specs)
        bytes_ = torch.randint(256, (largest + _ALIGN * len(specs),), dtype=torch.uint8, generator=_seeded())
        self.value: dict[str, Any] = {"step": 12345}
        self.locals: list[torch.Tensor] = []
        self._expected: list[torch.Tensor] = []
        self._specs = specs
        for i, spec in enumerate(specs):
            whole = bytes_[i * _ALIGN :][: spec.size_bytes].view(spec.dtype).view(spec.shape)
            self._add(spec, whole, mesh, min(dim, len(spec.shape) - 1))
        self.size_bytes = sum(local.nbytes for local in self.locals)
        self.pieces = _pieces([memoryview(local.view(-1).view(torch.uint8).numpy()) for local in self.locals])

    def _add(self, spec: Spec, whole: torch.Tensor, mesh: DeviceMesh | None, dim: int) -> None:
        part = whole if mesh is None else whole.chunk(mesh.size(), dim)[mesh.get_local_rank()]
        local = torch.empty(part.shape, dtype=part.dtype).copy_(part)
        self._expected.append(part)
        self.locals.append(local)
        value: torch.Tensor = local
        if mesh is not None:
            value = DTensor.from_local(
                local, mesh, [Shard(dim)], run_check=False, shape=whole.shape, stride=whole.stride()
            )
        self.value.setdefault(spec.group, {})[spec.key] = value

    def scribble(self) -> None:
        """Forget all contents."""
        for local in self.locals:
            local.zero_()

    def check(self, who: str) -> None:
        """Raise AssertionError unless every byte is what it was at first."""
        for spec, local, part in zip(self._specs, self.locals, self._expected, strict=True):
            if not torch.equal(local.view(torch.uint8), part.contiguous().view(torch.uint8)):
                raise AssertionError(f"{who} loaded something else than was saved into {spec.key}")


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(20)


# Each writes into a folder that is there and empty, and is done when the bytes are durable.


def milepost_save(state: State, folder: Path) -> None:
    """Milepost as it comes."""
    milepost.save(state.value, folder / "checkpoint")


def milepost_load(state: State, folder: Path) -> None:
    """Milepost as it comes: every byte verified."""
    milepost.load(state.value, folder / "checkpoint")


def dcp_save(state: State, folder: Path) -> None:
    """DCP's defaults: one thread, one file for each rank, synced."""
    dcp.save(state.value, storage_writer=dcp.FileSystemWriter(folder / "checkpoint"))


def dcp_load(state: State, folder: Path) -> None:
    """DCP's defaults."""
    dcp.load(state.value, storage_reader=dcp.FileSystemReader(folder / "checkpoint"))


def safetensors_save(state: State, folder: Path) -> None:
    """`safetensors.torch.save_file`, then fsync. One process only."""
    from safetensors.torch import save_file

    path = folder / "all.safetensors"
    save_file(
        {f"{group}.{key}": t for group in state.value.keys() - {"step"} for key, t in state.value[group].items()}, path
    )
    handle = os.open(path, os.O_RDONLY)
    os.fsync(handle)
    os.close(handle)


def raw_save(state: State, folder: Path) -> None:
    """The same bytes into one file for each rank with pwritev, then fsync."""
    handle = os.open(_own_file(folder), os.O_CREAT | os.O_WRONLY, 0o666)
    try:
        _transfer(os.pwritev, handle, state.pieces)
        os.fsync(handle)
    finally:
        os.close(handle)


def raw_load(state: State, folder: Path) -> None:
    """What `raw_save` wrote, with preadv straight into place."""
    handle = os.open(_own_file(folder), os.O_RDONLY)
    try:
        _transfer(os.preadv, handle, state.pieces)
    finally:
        os.close(handle)


class DirectSaver:
    """The same bytes past the page cache: copied to aligned buffers, each written by a thread while another is filled."""

    def __init__(self, world: int) -> None:
        self._threads = 2 if world == 1 else 1
        self._size = DIRECT_PIECES * PIECE_BYTES
        self._buffers = [np.frombuffer(mmap.mmap(-1, self._size), dtype=np.uint8) for _ in range(self._threads)]
        for buffer in self._buffers:
            buffer[:] = 1

    @staticmethod
    def works_in(folder: Path) -> bool:
        """Whether this file system has direct I/O."""
        path = folder / "probe"
        try:
            os.close(os.open(path, os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o666))
        except OSError:
            return False
        finally:
            path.unlink(missing_ok=True)
        return True

    def __call__(self, state: State, folder: Path) -> None:
        """Write, cut off the padding of the last page, and fsync."""
        handle = os.open(_own_file(folder), os.O_CREAT | os.O_WRONLY | os.O_DIRECT, 0o666)
        try:
            with ThreadPoolExecutor(self._threads) as pool:
                list(pool.map(lambda i: self._write(handle, state.pieces, i), range(self._threads)))
            os.ftruncate(handle, state.size_bytes)
            os.fsync(handle)
        finally:
            os.close(handle)

    def _write(self, handle: int, pieces: list[list[memoryview]], first: int) -> None:
        buffer = self._buffers[first]
        for i in range(first, -(-len(pieces) // DIRECT_PIECES), self._threads):
            filled = 0
            for view in chain(*pieces[i * DIRECT_PIECES : (i + 1) * DIRECT_PIECES]):
                np.copyto(buffer[filled : filled + len(view)], np.frombuffer(view, dtype=np.uint8))
                filled += len(view)
            padded = memoryview(buffer)[: -(-filled // _PAGE) * _PAGE]
            if os.pwrite(handle, padded, i * self._size) != len(padded):
                raise OSError("a direct write was cut short")


def _own_file(folder: Path) -> Path:
    return folder / f"{dist.get_rank() if dist.is_initialized() else 0}.bin"


def _transfer(call: Any, handle: int, pieces: list[list[memoryview]]) -> None:
    """Hand all pieces to pwritev or preadv, one after the other in the file."""
    position = 0
    for piece in pieces:
        for first in range(0, len(piece), _MOST_VIEWS):
            views = piece[first : first + _MOST_VIEWS]
            wanted = sum(map(len, views))
            if call(handle, views, position) != wanted:
                raise OSError("a transfer was cut short")
            position += wanted


def _pieces(views: list[memoryview]) -> list[list[memoryview]]:
    """All bytes in order, in pieces of PIECE_BYTES."""
    pieces: list[list[memoryview]] = [[]]
    room = PIECE_BYTES
    for view in views:
        start = 0
        while start < len(view):
            if not room:
                pieces.append([])
                room = PIECE_BYTES
            step = min(room, len(view) - start)
            pieces[-1].append(view[start : start + step])
            start, room = start + step, room - step
    return pieces
