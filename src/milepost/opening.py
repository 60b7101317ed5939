"""`milepost.open`: without torch, so that looking into a checkpoint takes a moment."""

from collections.abc import Iterable

from milepost.checkpoint import Checkpoint
from milepost.store import Where, store_at
from milepost.values import Codec


def open_checkpoint(where: Where, *, types: Iterable[type] = (), allow_pickle: bool = False) -> Checkpoint:
    """Open the newest checkpoint at `where`: its keys, values and metadata now, its tensors when they are asked for.

    Needs no process group and no GPU, and runs nothing from the checkpoint. Raises CheckpointNotFound, or
    CheckpointDamaged if the manifest is not what was saved. `types` and `allow_pickle` are as for `save`.
    """
    return Checkpoint(store_at(where), Codec(types, allow_pickle))
