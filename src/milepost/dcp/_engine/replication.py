"""A copy of each rank's state on another rank, in its memory and in a file there."""

import contextlib
import io
import os
import pickle
import tempfile
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.tensor import DTensor
from torch.utils._pytree import TreeSpec, tree_flatten, tree_unflatten

from milepost.background.staging.state_copy import copied_state
from milepost.dcp._engine.stagers import AsyncStager
from milepost.errors import InvalidState, RanksMissing
from milepost.state.tensors import is_sharded_tensor

_HEADER_SIZE, _HEADER, _TENSOR = 1, 2, 3
"""Tags of messages. The tensors follow each other, so one tag suffices for all."""


@dataclass(frozen=True)
class _Dense:
    """A tensor on its way: its bytes follow, in row-major order."""

    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _OnMesh:
    """A DTensor on its way."""

    local: _Dense
    spec: Any


@dataclass(frozen=True)
class _InShards:
    """A ShardedTensor on its way: its local shards."""

    shards: tuple[_Dense, ...]
    offsets: tuple[tuple[int, ...], ...]
    whole: Any


@dataclass(frozen=True)
class _Skeleton:
    """The state without its tensors."""

    tree: TreeSpec
    leaves: tuple[Any, ...]


class ReplicationStager(AsyncStager):
    """Sends each rank's state to a partner, half of the group away, which keeps it in memory and in a file.

    `pg`: the ranks; each of them calls `stage`. `timeout`: the longest wait for a partner, each time. `device`: where
    tensors must be for `pg` to send them. `storage_dir`: the folder of the file; None makes one for temporary files.
    There is one file for each rank: a new replica replaces it, atomically and durably.
    """

    _synchronize_after_execute: bool = False

    def __init__(
        self,
        pg: dist.ProcessGroup,
        timeout: timedelta = timedelta(minutes=30),
        device: torch.device = torch.device("cpu"),  # noqa: B008  # DCP's signature
        storage_dir: str | None = None,
    ) -> None:
        self._pg, self._timeout, self._device = pg, timeout, device
        self._storage_dir = storage_dir if storage_dir is not None else tempfile.mkdtemp(prefix="replication_stager_")
        os.makedirs(self._storage_dir, exist_ok=True)

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The state of the rank whose replica this one keeps: half of the group before this rank.

        Its DTensors hold that rank's part, so this rank must not save it: `async_save` calls `stage_to_save`.
        Raises InvalidState for what cannot be sent, and RanksMissing if the partner does not answer.
        """
        if not dist.is_initialized() or self._pg.size() == 1:
            return state_dict
        rank, size = self._pg.rank(), self._pg.size()
        to, source = (rank + size // 2) % size, (rank - size // 2) % size
        header, tensors = _taken_apart(state_dict)
        received: list[dict[str, Any]] = []
        # The message of each rank has its round, in order of rank: so no two wait for each other.
        for sender in sorted((rank, source)):
            if sender == rank:
                self._send(header, tensors, to)
            else:
                received.append(self._receive(source))
        self._persist_state_dict(received[0], rank, source)
        return received[0]

    def stage_to_save(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """Replicate, and give a copy of this rank's own state."""
        copied = copied_state(state_dict)
        self.stage(copied)
        return copied

    def _send(self, header: _Skeleton, tensors: list[torch.Tensor], to: int) -> None:
        packed = torch.frombuffer(bytearray(pickle.dumps(header)), dtype=torch.uint8)
        self._exchange(self._pg.send, torch.tensor([len(packed)], dtype=torch.int64, device="cpu"), to, _HEADER_SIZE)
        self._exchange(self._pg.send, packed, to, _HEADER)
        for tensor in tensors:
            flat = tensor.detach().resolve_conj().resolve_neg().contiguous().reshape(-1)
            if len(flat):
                self._exchange(self._pg.send, flat.view(torch.uint8), to, _TENSOR)

    def _receive(self, source: int) -> dict[str, Any]:
        length = int(
            self._exchange(self._pg.recv, torch.zeros(1, dtype=torch.int64, device="cpu"), source, _HEADER_SIZE).item()
        )
        packed = self._exchange(self._pg.recv, torch.empty(length, dtype=torch.uint8, device="cpu"), source, _HEADER)
        header: _Skeleton = pickle.loads(packed.numpy().tobytes())  # noqa: S301  # from a rank of this job
        state: dict[str, Any] = tree_unflatten([self._leaf(leaf, source) for leaf in header.leaves], header.tree)
        return state

    def _leaf(self, leaf: Any, source: int) -> Any:
        if isinstance(leaf, _Dense):
            return self._dense(leaf, source)
        if isinstance(leaf, _OnMesh):
            return DTensor(self._dense(leaf.local, source), leaf.spec, requires_grad=False)  # type: ignore[no-untyped-call]
        if isinstance(leaf, _InShards):
            placement = f"rank:{self._pg.rank()}/cpu"
            shards = [
                Shard(self._dense(dense, source), ShardMetadata(list(offset), list(dense.shape), placement))
                for dense, offset in zip(leaf.shards, leaf.offsets, strict=True)
            ]
            make: Any = ShardedTensor._init_from_local_shards_and_global_metadata  # noqa: SLF001
            return make(shards, leaf.whole)
        return leaf

    def _dense(self, dense: _Dense, source: int) -> torch.Tensor:
        made = torch.empty(dense.shape, dtype=dense.dtype, device="cpu")
        if made.numel():
            flat = made.reshape(-1).view(torch.uint8)
            flat.copy_(self._exchange(self._pg.recv, flat, source, _TENSOR))
        return made

    def _exchange(self, function: Any, data: torch.Tensor, other: int, tag: int) -> torch.Tensor:
        """Send or receive, and give the tensor on the host. Raises RanksMissing if the other rank does not answer."""
        there = data.to(self._device)
        try:
            function([there], other, tag).wait(self._timeout)
        except (RuntimeError, dist.DistError) as error:
            raise RanksMissing(
                f"rank {other}, with which rank {self._pg.rank()} exchanges replicas, does not answer: {error}. Every "
                "rank of the group calls `stage`; did one of them fail before?"
            ) from error
        return there.cpu()

    def _persist_state_dict(self, state_dict: dict[str, Any], current_rank: int, partner_rank: int) -> None:
        """Write the replica to its file, in place of an older one: atomic and durable."""
        path = Path(self._get_persisted_path(current_rank, partner_rank))
        temporary = path.with_name(path.name + ".tmp")
        try:
            with temporary.open("wb") as file:
                torch.save(state_dict, file)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
            # The folder too: without this, a power cut can undo the rename.
            folder = os.open(path.parent, os.O_RDONLY)
            try:
                os.fsync(folder)
            finally:
                os.close(folder)
        except Exception as error:
            with contextlib.suppress(OSError):
                temporary.unlink()
            raise RuntimeError(f"Failed to persist state_dict from rank {partner_rank} at {path}: {error}") from error

    def _get_persisted_path(self, current_rank: int, partner_rank: int) -> str:
        """The file in which this rank keeps the replica of its partner."""
        return os.path.join(self._storage_dir, f"rank_{current_rank}_replica_partner_{partner_rank}.pt")

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        """Leave the files: they are there to be found after a failure."""


def _taken_apart(state: dict[str, Any]) -> tuple[_Skeleton, list[torch.Tensor]]:
    """The state without its tensors, and the tensors. Raises InvalidState for values that cannot be pickled."""
    leaves, tree = tree_flatten(state)
    tensors: list[torch.Tensor] = []

    def dense(tensor: torch.Tensor) -> _Dense:
        tensors.append(tensor)
        return _Dense(tensor.dtype, tuple(tensor.shape))

    def taken(leaf: Any) -> Any:
        if isinstance(leaf, DTensor):
            return _OnMesh(dense(leaf._local_tensor), leaf._spec)  # noqa: SLF001
        if is_sharded_tensor(leaf):
            shards = leaf.local_shards()
            offsets = tuple(tuple(shard.metadata.shard_offsets) for shard in shards)
            return _InShards(tuple(dense(shard.tensor) for shard in shards), offsets, leaf.metadata())
        if isinstance(leaf, io.BytesIO):
            return io.BytesIO(leaf.getvalue())
        return dense(leaf) if isinstance(leaf, torch.Tensor) else leaf

    header = _Skeleton(tree, tuple(taken(leaf) for leaf in leaves))
    try:
        pickle.dumps(header)
    except Exception as error:
        raise InvalidState(f"the state holds a value that cannot be sent to another rank: {error}") from error
    return header, tensors
