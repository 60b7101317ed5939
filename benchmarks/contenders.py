"""What is compared: Milepost, DCP, the raw disk and others, each as functions that save and load a `State`."""

import contextlib
import os
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import raw
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from showing import DCP, DIRECT, MILEPOST, ONCE, RAW, SAFETENSORS, UNSUMMED, UNVERIFIED
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Shard

import milepost

_ALIGN = 64


@dataclass(frozen=True, slots=True)
class Spec:
    """A tensor of the state: its group, key, shape and dtype."""

    group: str
    key: str
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        """The bytes of the whole tensor."""
        return int(np.prod(self.shape)) * self.dtype.itemsize


def large_specs(size_bytes: int) -> list[Spec]:
    """About `size_bytes` of a transformer in training: an embedding and layers in bf16, two fp32 moments each."""
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
    """A state with known contents: plain tensors on a device, or DTensors cut along `dim` over a mesh.

    On the CPU all tensors lie in one block of whole pages (`memory`), which raw transfers as it is. Each tensor still
    has a storage of its own with the usual alignment, so the other contenders see ordinary tensors.
    """

    def __init__(self, specs: list[Spec], mesh: DeviceMesh | None = None, dim: int = 0, device: str = "cpu") -> None:
        # All contents are windows of one block of random bytes, so a comparison needs no second copy of the state.
        largest = max(spec.size_bytes for spec in specs)
        bytes_ = torch.randint(256, (largest + _ALIGN * len(specs),), dtype=torch.uint8, generator=_seeded()).to(device)
        self.value: dict[str, Any] = {"step": 12345}
        self.locals: list[torch.Tensor] = []
        self._expected: list[torch.Tensor] = []
        self._specs = specs
        wholes = [
            bytes_[i * _ALIGN :][: spec.size_bytes].view(spec.dtype).view(spec.shape) for i, spec in enumerate(specs)
        ]
        parts = [_part(whole, mesh, dim) for whole in wholes]
        self.size_bytes = sum(part.nbytes for part in parts)
        self.memory = raw.aligned(sum(_room(part) for part in parts) if device == "cpu" else 0)
        self._used = 0
        for spec, whole, part in zip(specs, wholes, parts, strict=True):
            self._add(spec, whole, part, mesh, dim)

    def _add(self, spec: Spec, whole: torch.Tensor, part: torch.Tensor, mesh: DeviceMesh | None, dim: int) -> None:
        local = self._empty_like(part).copy_(part)
        self._expected.append(part)
        self.locals.append(local)
        value: torch.Tensor = local
        if mesh is not None:
            cut = [Shard(min(dim, whole.dim() - 1))]
            value = DTensor.from_local(local, mesh, cut, run_check=False, shape=whole.shape, stride=whole.stride())
        self.value.setdefault(spec.group, {})[spec.key] = value

    def _empty_like(self, part: torch.Tensor) -> torch.Tensor:
        if part.device.type != "cpu":
            return torch.empty(part.shape, dtype=part.dtype, device=part.device)
        window = self.memory[self._used : self._used + part.nbytes]
        self._used += _room(part)
        return torch.frombuffer(window, dtype=part.dtype).view(part.shape)

    @property
    def flat(self) -> dict[str, torch.Tensor]:
        """All tensors by flat name."""
        groups = [group for group in self.value if group != "step"]
        return {f"{group}.{key}": tensor for group in groups for key, tensor in self.value[group].items()}

    def scribble(self) -> None:
        """Overwrite all contents with zeros."""
        for local in self.locals:
            local.zero_()

    def check(self, who: str) -> None:
        """Raise AssertionError unless every byte has its original value."""
        for spec, local, part in zip(self._specs, self.locals, self._expected, strict=True):
            if not torch.equal(local.view(torch.uint8), part.contiguous().view(torch.uint8)):
                raise AssertionError(f"{who} loaded other data into {spec.key} than was saved")


def _part(whole: torch.Tensor, mesh: DeviceMesh | None, dim: int) -> torch.Tensor:
    return whole if mesh is None else whole.chunk(mesh.size(), min(dim, whole.dim() - 1))[mesh.get_local_rank()]


def _room(part: torch.Tensor) -> int:
    return -(-part.nbytes // _ALIGN) * _ALIGN


def _seeded() -> torch.Generator:
    return torch.Generator().manual_seed(20)


Call = Callable[[State, Path], Any]


@dataclass(frozen=True, slots=True)
class Format:
    """One file format: its writers and its readers.

    Each writer starts with an empty folder and ends when the bytes are durable. The readers read what the first one
    wrote.
    """

    savers: dict[str, Call]
    loaders: dict[str, Call]

    def writes(self) -> Call:
        """The writer of the files that the loaders read."""
        return next(iter(self.savers.values()))


# Milepost and DCP, on any number of ranks


def milepost_format(unverified: bool = False, unsummed: bool = False, once: bool = False) -> Format:
    """Milepost with its defaults; on request also loads that ignore checksums or read once, and saves without any."""
    savers: dict[str, Call] = {MILEPOST: milepost_save}
    if unsummed:
        savers[UNSUMMED] = milepost_save_unsummed
    loaders: dict[str, Call] = {MILEPOST: milepost_load}
    if unverified:
        loaders[UNVERIFIED] = partial(milepost_load, verify=False)
    if once:
        loaders[ONCE] = partial(milepost_load, share_reads=True)
    return Format(savers, loaders)


def milepost_save(state: State, folder: Path) -> None:
    """Milepost's defaults."""
    milepost.save(state.value, folder / "checkpoint")


def milepost_save_unsummed(state: State, folder: Path) -> None:
    """Milepost without checksums: zeros in their place. No load accepts the result."""

    def zeros(views: Sequence[memoryview], block_bytes: int) -> list[int]:
        return [0] * -(-sum(map(len, views)) // block_bytes)

    with patch("milepost.data.write.sums_of", zeros):
        milepost_save(state, folder)


def milepost_load(state: State, folder: Path, **options: Any) -> None:
    """Milepost's defaults: every byte is verified."""
    milepost.load(state.value, folder / "checkpoint", **options)


def dcp_save(state: State, folder: Path) -> None:
    """DCP's defaults: one thread, one file for each rank, synced."""
    dcp.save(state.value, storage_writer=dcp.FileSystemWriter(folder / "checkpoint"))


def dcp_load(state: State, folder: Path) -> None:
    """DCP's defaults."""
    dcp.load(state.value, storage_reader=dcp.FileSystemReader(folder / "checkpoint"))


def dcp_format() -> Format:
    """DCP with its defaults."""
    return Format({DCP: dcp_save}, {DCP: dcp_load})


# The raw disk


def raw_format(direct: bool, preallocate: bool = True) -> Format:
    """One file for each rank with the bytes of its tensors; also past the page cache, if `direct`."""
    savers: dict[str, Call] = {RAW: _raw(partial(raw.write, preallocate=preallocate))}
    loaders: dict[str, Call] = {RAW: _raw(raw.read)}
    if direct:
        savers[DIRECT], loaders[DIRECT] = _raw(raw.write_direct), _raw(raw.read_direct)
    return Format(savers, loaders)


def _raw(call: Callable[[Path, memoryview, int], None]) -> Call:
    def run(state: State, folder: Path) -> None:
        rank = dist.get_rank() if dist.is_initialized() else 0
        call(folder / f"{rank}.bin", state.memory, len(state.memory))

    return run


# Formats for one process. They load into new memory and then copy, as `load_state_dict` does.


def single_formats() -> dict[str, Format | None]:
    """By the module that each needs; None where it is not installed."""
    made = {
        "safetensors": lambda: Format({SAFETENSORS: safetensors_save}, {SAFETENSORS: safetensors_load}),
        "torch_checkpointing": lambda: Format(
            {"torch_checkpointing": torch_checkpointing_save}, {"torch_checkpointing": torch_checkpointing_load}
        ),
        "orbax": lambda: Format({"Orbax": orbax_save}, {"Orbax": orbax_load}),
    }
    formats: dict[str, Format | None] = {"torch": Format({"torch.save": torch_save}, {"torch.load": torch_load})}
    return formats | {name: make() if find_spec(name) else None for name, make in made.items()}


def fault_of(form: Format, folder: Path) -> str | None:
    """Why this format cannot take part, found by saving and loading a small state with it; None if it can."""
    state = State(small_specs(4))
    with tempfile.TemporaryDirectory(dir=folder) as place:
        try:
            form.writes()(state, Path(place))
            for who, load in form.loaders.items():
                state.scribble()
                load(state, Path(place))
                state.check(who)
        except Exception as error:
            return f"{type(error).__name__}: {error}".splitlines()[0][:200]
    return None


def torch_save(state: State, folder: Path) -> None:
    """`torch.save`, then fsync."""
    torch.save(state.value, folder / "all.pt")
    _sync_all(folder)


def torch_load(state: State, folder: Path) -> None:
    """`torch.load` without a memory map."""
    loaded = torch.load(folder / "all.pt", mmap=False, weights_only=True)
    _copy_in(state, {f"{group}.{key}": t for group in loaded.keys() - {"step"} for key, t in loaded[group].items()})


def safetensors_save(state: State, folder: Path) -> None:
    """`safetensors.torch.save_file`, then fsync."""
    from safetensors.torch import save_file

    save_file(state.flat, folder / "all.safetensors")
    _sync_all(folder)


def safetensors_load(state: State, folder: Path) -> None:
    """`safetensors.torch.load_file`: tensors over a memory map; the copy reads the pages."""
    from safetensors.torch import load_file

    _copy_in(state, load_file(folder / "all.safetensors"))


def torch_checkpointing_save(state: State, folder: Path) -> None:
    """Its synchronous saver, through the page cache, then fsync."""
    with contextlib.closing(_torch_checkpointing()) as manager:
        pending = manager.save(str(folder / "checkpoint"), dict(state.value))
        if hasattr(pending, "result"):
            pending.result()
    _sync_all(folder)


def torch_checkpointing_load(state: State, folder: Path) -> None:
    """In place, where supported."""
    with contextlib.closing(_torch_checkpointing()) as manager:
        manager.load(str(folder / "checkpoint"), into=dict(state.value))


def _torch_checkpointing() -> Any:
    from torch_checkpointing import CheckpointManager
    from torch_checkpointing.storage.filesystem import LocalFileSystemStorageConfig

    # By default (0.1.1) it writes lengths past the page cache that ext4 and XFS refuse: OSError 22.
    storage = LocalFileSystemStorageConfig(use_direct_io=False)
    return CheckpointManager(replace(CheckpointManager.Config.with_sync_save(), storage_config=storage))


def orbax_save(state: State, folder: Path) -> None:
    """Its checkpointer for trees, with arrays of bytes (numpy has no bfloat16), then fsync."""
    import orbax.checkpoint as orbax

    with orbax.StandardCheckpointer() as checkpointer:
        tree = {key: tensor.view(torch.uint8).numpy() for key, tensor in state.flat.items()}
        checkpointer.save(tree, (folder / "checkpoint").absolute())
        checkpointer.wait_until_finished()
    _sync_all(folder)


def orbax_load(state: State, folder: Path) -> None:
    """The same tree, into new memory."""
    import orbax.checkpoint as orbax

    with orbax.StandardCheckpointer() as checkpointer:
        tree = checkpointer.restore((folder / "checkpoint").absolute())
    for key, tensor in state.flat.items():
        np.copyto(tensor.view(torch.uint8).numpy(), np.asarray(tree[key]))


def _copy_in(state: State, loaded: dict[str, torch.Tensor]) -> None:
    for key, tensor in state.flat.items():
        tensor.copy_(loaded[key])


def _sync_all(folder: Path) -> None:
    for path in [*folder.rglob("*"), folder]:
        handle = os.open(path, os.O_RDONLY)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
