"""Sharded optimizer states of FSDP1: torch's own function, with readers of this package too."""

from typing import Any

from torch.distributed.checkpoint import optimizer as theirs

from milepost.dcp._engine.lent import lend
from milepost.planning.protocol import LoadPlanner, StorageReader
from milepost.planning.storage import CheckpointReader
from milepost.planning.torch_adapters import MilepostReader

__all__ = ["load_sharded_optimizer_state_dict"]


def load_sharded_optimizer_state_dict(
    model_state_dict: dict[str, Any],
    optimizer_key: str,
    storage_reader: StorageReader,
    planner: LoadPlanner | None = None,
) -> dict[str, Any]:
    """The optimizer's part of a checkpoint, as ShardedTensors cut like the model's. `planner` is one of torch's."""
    reader: Any = storage_reader
    if isinstance(reader, CheckpointReader):
        reader = MilepostReader(reader.store)
    for_torch: Any = planner
    found: dict[str, Any] = theirs.load_sharded_optimizer_state_dict(model_state_dict, optimizer_key, reader, for_torch)
    return found


lend(
    __name__,
    "STATE_DICT_2D_LAYOUT _ReaderWithOffset _alloc_tensor _create_colwise_spec _gen_rank_device "
    "_get_device_module _get_state_dict_2d_layout _is_nested_tensor",
)
