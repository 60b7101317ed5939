"""Tensors of every kind as layouts and local parts: plain, DTensor, ShardedTensor, numpy, long bytes, `Sharded`."""

from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, TypeGuard

import msgspec
import numpy as np
import torch
import torch.distributed as dist
from torch._guards import detect_fake_mode
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parameter import is_lazy
from torch.utils import _python_dispatch

from milepost.comm import Comm
from milepost.core.box import Box, Shape
from milepost.core.dtypes import DTYPES, size_bytes
from milepost.core.layout import Boxes, Cut, Grid, Held, Mesh, Piece
from milepost.core.limits import MAX_DIMS
from milepost.core.manifest import Tensor, TensorKind
from milepost.errors import InvalidRequest, InvalidState, UnsafeCheckpoint
from milepost.state.host_memory import new_bytes, tensor_of_bytes, tensor_over
from milepost.state.self_described import is_self_described, own_shards
from milepost.state.unpinned import unpin

unpin()
_TYPES: dict[str, torch.dtype] = {name: getattr(torch, name) for name in DTYPES if hasattr(torch, name)}
_NAMES = {dtype: name for name, dtype in _TYPES.items()}
_PLAIN = (torch.Tensor, torch.nn.Parameter)
Memory = tuple[Any, ...]
"""What two tensors have in common exactly when they are one tensor under two names. Also on the meta device."""
LONG_BYTES = 64 * 1024
"""Longer `bytes` go into the shard file like a tensor; shorter ones into the manifest."""


class Part(msgspec.Struct, frozen=True, gc=False):
    """A box of the whole tensor, and the memory of this rank that holds it (in a save by a planner, what makes it)."""

    box: Box
    data: torch.Tensor


class LocalTensor(msgspec.Struct, frozen=True, gc=False):
    """What this rank holds of one tensor. `layout` is None for a plain tensor."""

    dtype: str
    shape: Shape
    kind: TensorKind
    layout: Grid | Boxes | None
    parts: tuple[Part, ...]


class Sharers(NamedTuple):
    """The ranks that hold the same boxes as this one, in the order of a process group that can send them."""

    ranks: tuple[int, ...]
    name: str
    group: dist.ProcessGroup


class Sharded:
    """A tensor of which this rank holds some boxes, for programs that cut tensors without DTensor.

    `parts` maps the offset of each box in the whole tensor to the tensor that holds it. Ranks that give the same box
    hold replicas of it. Together the ranks must cover the tensor exactly once. A load writes into the same tensors.
    Raises InvalidRequest if the parts differ in dtype or leave the tensor. `dtype` is needed where there is no part.

    >>> whole = torch.arange(12.0).view(4, 3)
    >>> state = {"w": milepost.Sharded((4, 3), {(0, 0): whole[:2], (2, 0): whole[2:]})}
    >>> _ = milepost.save(state, "memory://cut")
    >>> milepost.open("memory://cut")["w"][3]
    tensor([ 9., 10., 11.])
    """

    def __init__(self, shape: Shape, parts: Mapping[Shape, torch.Tensor], dtype: torch.dtype | None = None) -> None:
        kinds = {part.dtype for part in parts.values()} | ({dtype} if dtype is not None else set())
        if len(kinds) != 1:
            raise InvalidRequest(
                f"the parts of a Sharded tensor have one dtype (pass it where there is no part), not {kinds}"
            )
        self.shape = tuple(shape)
        self.dtype: torch.dtype = kinds.pop()
        self.layout: Grid | None = None
        self.parts = tuple(Part(Box(tuple(at), tuple(part.shape)), part) for at, part in parts.items())
        whole = Box.whole(self.shape)
        for part in self.parts:
            if not whole.contains(part.box):
                raise InvalidRequest(f"box {part.box.text} leaves the tensor of shape {self.shape}")

    @classmethod
    def on_grid(cls, shape: Shape, local: torch.Tensor, grid: Grid, rank: int) -> "Sharded":
        """The tensor whose cut is `grid`; `local` is what `rank` holds of it, its pieces side by side."""
        expected = grid.local_shape(tuple(shape), rank)
        if expected is not None and tuple(local.shape) != expected:
            raise InvalidRequest(f"rank {rank} holds {expected} of this grid, not {tuple(local.shape)}")
        result = cls(shape, {}, local.dtype)
        result.layout = grid
        result.parts = _grid_parts(grid.pieces(tuple(shape), rank), local)
        return result


def is_sharded_tensor(value: Any) -> bool:
    """Whether this is FSDP1's ShardedTensor."""
    return isinstance(value, torch.Tensor) and hasattr(value, "local_shards") and hasattr(value, "metadata")


def is_tensor(value: Any) -> TypeGuard[Any]:
    """Whether a leaf goes into the shard files."""
    if isinstance(value, (torch.Tensor, np.ndarray, Sharded)):
        return True
    return isinstance(value, (bytes, bytearray)) and len(value) > LONG_BYTES


class Describer:
    """Turns leaves into `LocalTensor`s for the ranks of one save or load."""

    def __init__(self, comm: Comm, reduce_partial: bool = False) -> None:
        self._comm, self._reduce_partial = comm, reduce_partial
        self._meshes: dict[DeviceMesh, Mesh] = {}
        self._cuts: dict[tuple[int, tuple[Placement, ...], Shape], _Local] = {}

    def describe(self, value: Any, key: str) -> LocalTensor:
        """What this rank holds of `value`. Raises InvalidState, naming the key, for tensors that cannot be saved."""
        if type(value) in _PLAIN:
            return _plain(check_plain(value, key), "tensor", key)
        shards = own_shards(value, key)
        if shards is not None:
            parts = {box.offset: check_plain(data, key) for box, data in shards}
            value = Sharded(tuple(value.shape), parts, None if parts else value.dtype)
        return self._describe_other(value, key)

    def _describe_other(self, value: Any, key: str) -> LocalTensor:
        if isinstance(value, DTensor):
            return self._dtensor(value, key)
        if isinstance(value, Sharded):
            layout = value.layout or Boxes(tuple(Held(p.box, str(self._comm.rank)) for p in value.parts))
            return LocalTensor(dtype_name(value.dtype, key), value.shape, "tensor", layout, value.parts)
        if isinstance(value, torch.Tensor):
            if is_sharded_tensor(value):
                return self._sharded_tensor(value, key)
            return _plain(check_plain(value, key), "tensor", key)
        if isinstance(value, np.ndarray):
            return _plain(from_numpy(value, key), "numpy", key)
        kind: TensorKind = "bytes" if isinstance(value, bytes) else "bytearray"
        # A bytearray is copied: while a tensor shares its memory, the caller could not append to it.
        return _plain(tensor_of_bytes(bytes(value)), kind, key)

    def is_alone(self, local: LocalTensor) -> bool:
        """Whether no other rank holds any of what this one does."""
        if isinstance(local.layout, Grid):
            return not local.layout.copies
        return self._comm.size == 1 or local.layout is not None

    @property
    def shares(self) -> bool:
        """Whether there is a way to send tensors to other ranks."""
        return self._comm.group is not None

    def sharers(self, value: Any, local: LocalTensor) -> Sharers | None:
        """The ranks that hold the same as this one and can be sent it; None where there are none."""
        if self.is_alone(local) or not local.parts:
            return None
        group = self._comm.group
        if isinstance(value, DTensor):
            axes = [a for a, p in enumerate(value.placements) if isinstance(p, Replicate)]
            axis = max(axes, key=value.device_mesh.size)
            group = value.device_mesh.get_group(axis)
        elif local.layout is not None:
            return None
        if group is None or not can_send(group, local.parts[0].data.device.type):
            return None
        ranks = [self._comm.index_of(rank) for rank in dist.get_process_group_ranks(group)]
        found = tuple(rank for rank in ranks if rank is not None)
        return Sharers(found, group.group_name, group) if len(found) == len(ranks) else None

    def _dtensor(self, value: DTensor, key: str) -> LocalTensor:
        if any(isinstance(p, Partial) for p in value.placements):
            if not self._reduce_partial:
                raise InvalidState(
                    f"{key!r} is a DTensor with the placements {value.placements}: its ranks hold terms of a sum, not "
                    "values. Reduce it first (redistribute), or pass reduce_partial=True."
                )
            whole = [Replicate() if isinstance(p, Partial) else p for p in value.placements]
            value = value.redistribute(placements=whole)
        shape = tuple(value.shape)
        local = _local(value)
        cut = self._cut_of(value.device_mesh, value.placements, shape, key)
        if cut.local_shape is not None and tuple(local.shape) != cut.local_shape:
            raise InvalidState(
                f"{key!r} has the local shape {tuple(local.shape)}, but {value.placements} of {shape} on a mesh of "
                f"{tuple(value.device_mesh.shape)} gives {cut.local_shape} on rank {self._comm.rank}"
            )
        parts = _grid_parts(cut.pieces, check_plain(local, key))
        return LocalTensor(dtype_name(value.dtype, key), shape, "tensor", cut.grid, parts)

    def _cut_of(self, mesh: DeviceMesh, placements: tuple[Placement, ...], shape: Shape, key: str) -> "_Local":
        """How tensors of this shape are cut. Worked out once for all that are alike, of which a model has many."""
        # The mesh by identity: it hashes slowly, and is kept alive here.
        known = self._cuts.get((id(mesh), placements, shape))
        if known is None:
            grid = Grid(self._mesh(mesh, key), tuple(_cut(p, key) for p in placements))
            grid.check(shape)
            known = _Local(grid, grid.local_shape(shape, self._comm.rank), grid.pieces(shape, self._comm.rank))
            self._cuts[id(mesh), placements, shape] = known
        return known

    def _mesh(self, mesh: DeviceMesh, key: str) -> Mesh:
        if mesh not in self._meshes:
            ranks = [self._comm.index_of(int(rank)) for rank in mesh.mesh.flatten().tolist()]
            if any(rank is None for rank in ranks):
                raise InvalidState(f"{key!r} lives on ranks that do not take part in this call: {mesh}")
            self._meshes[mesh] = Mesh.of(tuple(mesh.mesh.shape), tuple(r for r in ranks if r is not None))
        return self._meshes[mesh]

    def _sharded_tensor(self, value: Any, key: str) -> LocalTensor:
        """FSDP1's ShardedTensor: its metadata lists every box and the rank that holds it."""
        held = []
        for shard in value.metadata().shards_metadata:
            rank = self._comm.index_of(shard.placement.rank())
            if rank is None:
                raise InvalidState(f"{key!r} has a shard on rank {shard.placement.rank()}, which does not take part")
            held.append(Held(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)), str(rank)))
        parts = tuple(
            Part(Box(tuple(s.metadata.shard_offsets), tuple(s.metadata.shard_sizes)), check_plain(s.tensor, key))
            for s in value.local_shards()
        )
        return LocalTensor(dtype_name(value.dtype, key), tuple(value.size()), "tensor", Boxes(tuple(held)), parts)


def can_send(group: dist.ProcessGroup, device: str) -> bool:
    """Whether tensors on this kind of device can be sent in the group: NCCL sends none that are on the CPU."""
    return f"{device}:" in dist.distributed_c10d.get_backend_config(group)


def _local(value: DTensor) -> torch.Tensor:
    """The local part, without its graph, once a collective that makes it has ended."""
    with torch.no_grad():
        local: torch.Tensor = value.to_local()
    return local.wait() if hasattr(local, "wait") else local


def memory_of(value: Any) -> Memory | None:
    """The memory of this rank's part of a tensor; None for other objects, and for tensors made of several."""
    # Not `_local`, which takes ten times as long: only the identity of the memory counts.
    data = value._local_tensor if isinstance(value, DTensor) else value  # noqa: SLF001
    if type(data) not in _PLAIN and (is_self_described(data) or not _is_dense(data)):
        return None
    if data.layout is not torch.strided or data.is_nested:
        return None
    # The storage by identity: on the meta device none has an address.
    storage = data.untyped_storage()._cdata  # noqa: SLF001
    return storage, data.storage_offset(), data.shape, data.stride(), data.dtype, data.is_conj(), data.is_neg()


def _is_dense(value: Any) -> bool:
    """Whether this is one tensor with a shape, of whatever class."""
    if not isinstance(value, torch.Tensor) or is_lazy(value) or is_sharded_tensor(value):
        return False
    return not _is_wrapper(value)


def _plain(data: torch.Tensor, kind: TensorKind, key: str) -> LocalTensor:
    shape = tuple(data.shape)
    return LocalTensor(dtype_name(data.dtype, key), shape, kind, None, (Part(Box.whole(shape), data),))


class _Local(NamedTuple):
    """What this rank holds of tensors that are cut alike."""

    grid: Grid
    local_shape: Shape | None
    pieces: tuple[Piece, ...]


def _grid_parts(pieces: tuple[Piece, ...], local: torch.Tensor) -> tuple[Part, ...]:
    if len(pieces) == 1:
        return (Part(pieces[0].box, local),)
    parts = []
    for piece in pieces:
        window = tuple(slice(at, at + n) for at, n in zip(piece.at, piece.box.shape, strict=True))
        parts.append(Part(piece.box, local[window]))
    return tuple(parts)


def _cut(placement: Placement, key: str) -> Cut | None:
    if isinstance(placement, Replicate):
        return None
    # The strided shard is private in torch and not a Shard in every version; what it has is a dim and a factor.
    dim, stride = getattr(placement, "dim", None), getattr(placement, "split_factor", 1)
    if dim is None or not (isinstance(placement, Shard) or hasattr(placement, "split_factor")):
        raise InvalidState(f"{key!r} has the placement {placement}, which Milepost does not know")
    return Cut(int(dim), int(stride))


def check_plain(value: torch.Tensor, key: str) -> torch.Tensor:
    """The tensor without its graph. Raises InvalidState for sparse, nested, quantized, wrapped and lazy tensors."""
    if type(value) not in _PLAIN and is_lazy(value):
        raise InvalidState(f"{key!r} has no shape yet; run its module once first.")
    if type(value).__name__ == "MaskedTensor":
        raise InvalidState(f"{key!r} is a MaskedTensor; save its get_data() and its get_mask().")
    if _inside_torch(value):
        raise InvalidState(f"{key!r} is a tensor inside of torch.func or of a compiler; save after that has returned.")
    value = value.detach() if value.requires_grad or type(value) is not torch.Tensor else value
    what = None
    if value.layout is not torch.strided:
        what = f"has the layout {value.layout}; save its indices and values, or pass it without a planner"
    elif value.is_quantized:
        what = f"is quantized ({value.dtype}); save its int_repr() and its scales"
    elif value.is_nested:
        what = "is nested; make it with layout=torch.jagged, or save its values and offsets"
    elif type(value) is not torch.Tensor and _is_wrapper(value):
        what = f"is a {type(value).__name__}, a tensor made of other tensors; save those, or pass it without a planner"
    elif value.ndim > MAX_DIMS:
        what = f"has {value.ndim} dimensions, and {MAX_DIMS} is the most; reshape it"
    if what:
        raise InvalidState(f"{key!r} {what}.")
    return value


def _inside_torch(value: torch.Tensor) -> bool:
    """Whether this only stands for a tensor while torch transforms a function."""
    functorch = torch._C._functorch  # noqa: SLF001  # no public name says it
    return bool(
        functorch.is_functorch_wrapped_tensor(value)
        or torch._is_functional_tensor(value)  # noqa: SLF001
        or type(value).__name__ == "FunctionalTensor"
    )


def check_data(local: LocalTensor, key: str) -> LocalTensor:
    """What a rank holds, if there are bytes in it. Raises InvalidState where a tensor only looks like one."""
    for part in local.parts:
        if not _has_memory(part.data):
            raise InvalidState(
                f"{key!r} has no data to save: it is on the meta device, or fake, or its memory was freed (as FSDP "
                "does with parameters that it has not gathered)."
            )
    return local


def why_not_filled(data: torch.Tensor) -> str | None:
    """Why a load cannot fill a tensor where it is; None where it can. On the meta device it gets memory later."""
    if not data.is_meta and not _has_memory(data):
        return "the target's memory was freed"
    if not _lies_apart(data):
        return f"elements of the target share memory (strides {tuple(data.stride())}); load into its clone()"
    return None


def _has_memory(data: torch.Tensor) -> bool:
    """Whether all elements lie in the tensor's memory. Reading beyond it would crash the process."""
    count = data.numel()
    if count == 0:
        return True
    try:
        storage = data.untyped_storage()
    except (RuntimeError, NotImplementedError):  # tensors inside of torch.func
        return False
    if not data.is_contiguous():
        count = 1 + sum((n - 1) * step for n, step in zip(data.shape, data.stride(), strict=True))
    on_meta = data.is_meta if type(data) is torch.Tensor else storage.device.type == "meta"  # a fake one says it is not
    return not on_meta and (data.storage_offset() + count) * data.itemsize <= storage.nbytes()


def _lies_apart(data: torch.Tensor) -> bool:
    """Whether no two elements lie in one place: each dimension steps over all that the finer ones reach.

    Strides that interlock in other ways may keep elements apart too. Such tensors do not occur, and are refused.
    """
    if data.numel() == 0 or data.is_contiguous():
        return True
    reach = 0
    for step, n in sorted((step, n) for step, n in zip(data.stride(), data.shape, strict=True) if n > 1):
        if step <= reach:
            return False
        reach += (n - 1) * step
    return True


def _is_wrapper(value: object) -> bool:
    return bool(_python_dispatch.is_traceable_wrapper_subclass(value))


def from_numpy(value: "np.ndarray[Any, Any]", key: str) -> torch.Tensor:
    """The array as a tensor; they share memory where torch allows it."""
    if value.dtype.name not in DTYPES or not value.dtype.isnative or value.dtype.isbuiltin != 1:
        raise InvalidState(f"{key!r} is a numpy array of {value.dtype}, which cannot be saved; convert it first")
    if isinstance(value, np.ma.MaskedArray):
        raise InvalidState(f"{key!r} is a masked array; save its data and its mask")
    if any(stride < 0 for stride in value.strides):  # torch knows no steps backwards
        value = value.copy()
    return tensor_over(value)


def dtype_name(dtype: torch.dtype, key: str) -> str:
    """Torch's name of a dtype. Raises InvalidState for dtypes that cannot be saved."""
    name = _NAMES.get(dtype)
    if name is None:
        raise InvalidState(f"{key!r} has the dtype {dtype}, which cannot be saved. Save its bytes: view(torch.uint8)")
    return name


def dtype_of(value: Any) -> str | None:
    """The name of the dtype of a tensor or array; None for one that cannot be saved."""
    return value.dtype.name if isinstance(value, np.ndarray) else _NAMES.get(value.dtype)


def torch_dtype(name: str) -> torch.dtype:
    """The dtype of this name. Raises InvalidState where this torch does not have it."""
    found = _TYPES.get(name)
    if found is None:
        raise InvalidState(f"this version of torch ({torch.__version__}) has no dtype {name!r}")
    return found


def refuse_fake_mode() -> None:
    """Raise InvalidRequest where new tensors would be fake: they would hold nothing of what is read into them."""
    if detect_fake_mode() is not None:
        raise InvalidRequest(
            "a FakeTensorMode is active, under which tensors have no data. Leave the mode to save, load or read."
        )


@torch.inference_mode(mode=False)  # tensors that were made in inference mode cannot be trained
def new_tensor(dtype: str, shape: Shape) -> torch.Tensor:
    """New memory on the CPU, not set to anything. Raises UnsafeCheckpoint where there is not enough."""
    refuse_fake_mode()
    try:
        # By way of bytes: asking for complex32 directly makes torch warn.
        return (
            torch.empty(size_bytes(dtype, shape), dtype=torch.uint8, device="cpu")
            .view(torch_dtype(dtype))
            .reshape(shape)
        )
    except (RuntimeError, MemoryError) as error:
        raise UnsafeCheckpoint(
            f"a tensor of {dtype} {shape} takes {size_bytes(dtype, shape):,} bytes, which cannot be had: {error}"
        ) from None


def new_saved(tensor: Tensor) -> tuple[Any, torch.Tensor]:
    """A new object of the kind that was saved, not set to anything, and the memory of it to read into."""
    if tensor.is_bytes:
        return new_bytes(tensor.size_bytes, tensor.kind)
    memory = new_tensor(tensor.dtype, tensor.shape)
    return (memory.numpy() if tensor.kind == "numpy" else memory), memory


def find_part(local: LocalTensor, box: Box) -> torch.Tensor:
    """The memory that holds `box`, which lies inside one of this rank's parts."""
    for part in local.parts:
        if part.box == box:
            return part.data
        if part.box.contains(box):
            return part.data[box.within(part.box).slices]
    raise AssertionError(f"box {box.text} is not held by this rank")


def bytes_of(data: torch.Tensor, at_once_bytes: int) -> Iterator[memoryview]:
    """The tensor's bytes in row-major order, at most `at_once_bytes` at a time. Copies only what is not contiguous."""
    if data.numel() == 0:
        return
    if data.device.type == "cpu" and data.is_contiguous() and not data.is_conj() and not data.is_neg():
        flat = _raw(data)
        for start in range(0, len(flat), at_once_bytes):
            yield flat[start : start + at_once_bytes]
        return
    for slab in Box.whole(tuple(data.shape)).slabs(max(at_once_bytes // data.element_size(), 1)):
        yield _raw(data[slab.slices].resolve_conj().resolve_neg().contiguous())


def _raw(data: torch.Tensor) -> memoryview:
    # As bytes before they travel: torch warns when it makes a complex32 tensor.
    # One run of memory, whatever its strides say: those of dimensions of size 1 mean nothing.
    flat = data.as_strided((data.numel(),), (1,))
    array: Any = flat.view(torch.uint8).to("cpu").numpy()
    return memoryview(array)


def materialise(value: Any, dtype: str, shape: Shape, device: torch.device | str | None) -> Any:
    """New memory for a target that has none (on the meta device), cut like the target. Its contents are not set."""
    kind = torch_dtype(dtype)
    if isinstance(value, DTensor):
        where = device or torch.device(value.device_mesh.device_type)
        local = torch.empty_like(_local(value), dtype=kind, device=where)
        made: torch.Tensor = DTensor.from_local(
            local, value.device_mesh, value.placements, run_check=False, shape=value.shape, stride=value.stride()
        )
    elif type(value) in _PLAIN and tuple(value.shape) == shape:
        made = torch.empty_like(value.detach(), dtype=kind, device=device or "cpu")  # in its order (channels last)
    else:
        made = torch.empty(shape, dtype=kind, device=device or "cpu")
    if isinstance(value, torch.nn.Parameter):
        return torch.nn.Parameter(made, requires_grad=value.requires_grad)
    return made
