"""Sending states between the processes of running jobs: torch's own. No checkpoint and no storage is involved."""

from torch.distributed.checkpoint._pg_transport import PGTransport

from milepost.dcp._engine.lent import lend

__all__ = ["PGTransport"]

lend(
    __name__,
    "KeyPath T _DTensorMeta _ShardedTensorMeta _StateDictMeta _TensorMeta _cast_tensor _prepare_state_dict "
    "_prepare_tensor _timeit logger",
)
