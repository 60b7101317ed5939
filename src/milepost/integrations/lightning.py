"""Milepost for Lightning: a `CheckpointIO`, and strategies whose sharded state is saved in one commit.

    Trainer(plugins=[MilepostCheckpointIO()])                one device, DDP
    Trainer(strategy=MilepostModelParallelStrategy())        FSDP2, tensor parallelism
    Trainer(strategy=MilepostFSDPStrategy())                 FSDP1

`milepost.integrations.pytorch_lightning` has the same for the package `pytorch_lightning`.
"""

try:
    from lightning.fabric.plugins import CheckpointIO
    from lightning.fabric.strategies import FSDPStrategy as FabricFSDPStrategy
    from lightning.fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from lightning.pytorch.strategies import FSDPStrategy, ModelParallelStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "milepost.integrations.lightning needs Lightning: pip install lightning. For the package pytorch_lightning, "
        "import milepost.integrations.pytorch_lightning"
    ) from error

from milepost.integrations.lightning_shared.modules import load_from_checkpoint
from milepost.integrations.lightning_shared.plugin import WholeCheckpoints
from milepost.integrations.lightning_shared.reading import newest_checkpoint
from milepost.integrations.lightning_shared.strategies import FabricSavesShards, TrainerSavesShards

__all__ = [
    "MilepostCheckpointIO",
    "MilepostFSDPStrategy",
    "MilepostFabricFSDPStrategy",
    "MilepostFabricModelParallelStrategy",
    "MilepostModelParallelStrategy",
    "load_from_checkpoint",
    "newest_checkpoint",
]


class MilepostCheckpointIO(WholeCheckpoints, CheckpointIO):
    """Checkpoints of strategies whose ranks hold all of the state: one device, DDP. Rank 0 saves, all ranks load.

    `background`: None saves before the call returns. "thread" and "process" save while training goes on, as
    `milepost.AsyncSaver` does; an error is raised by the next save, or at the end of `fit`.
    `save_options`: options of `milepost.save`, such as `{"types": [...]}`. They count for loading, too.
    """


class MilepostModelParallelStrategy(TrainerSavesShards, ModelParallelStrategy):
    """Lightning's ModelParallelStrategy (FSDP2, tensor parallelism), with checkpoints of Milepost.

    Takes the arguments of ModelParallelStrategy, and `background`, `save_timeout_s` and `save_options`: see
    `MilepostCheckpointIO`. State is always saved sharded, whatever `save_distributed_checkpoint` says.
    """


class MilepostFSDPStrategy(TrainerSavesShards, FSDPStrategy):
    """Lightning's FSDPStrategy (FSDP1), with checkpoints of Milepost.

    Takes the arguments of FSDPStrategy, and `background`, `save_timeout_s` and `save_options`: see
    `MilepostCheckpointIO`. State is always saved sharded, whatever `state_dict_type` says.
    """


class MilepostFabricModelParallelStrategy(FabricSavesShards, FabricModelParallelStrategy):
    """Fabric's ModelParallelStrategy, with checkpoints of Milepost. Arguments: see `MilepostModelParallelStrategy`."""


class MilepostFabricFSDPStrategy(FabricSavesShards, FabricFSDPStrategy):
    """Fabric's FSDPStrategy, with checkpoints of Milepost. Arguments: see `MilepostFSDPStrategy`."""
