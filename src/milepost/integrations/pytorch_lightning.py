"""The classes of `milepost.integrations.lightning` for the package `pytorch_lightning`, under the same names."""

from types import new_class
from typing import Any

try:
    from lightning_fabric.plugins import CheckpointIO
    from lightning_fabric.strategies import FSDPStrategy as FabricFSDPStrategy
    from lightning_fabric.strategies import ModelParallelStrategy as FabricModelParallelStrategy
    from pytorch_lightning.strategies import FSDPStrategy, ModelParallelStrategy
except ModuleNotFoundError as error:
    raise ModuleNotFoundError(
        "milepost.integrations.pytorch_lightning needs pytorch_lightning: pip install pytorch-lightning. For the "
        "package lightning, import milepost.integrations.lightning"
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


def _made(name: str, *bases: type) -> Any:
    """A class of this module. Made by a call, because the other module has the same names for the other package."""
    body = {"__module__": __name__, "__doc__": f"See `milepost.integrations.lightning.{name}`."}
    return new_class(name, bases, exec_body=lambda names: names.update(body))


MilepostCheckpointIO = _made("MilepostCheckpointIO", WholeCheckpoints, CheckpointIO)
MilepostModelParallelStrategy = _made("MilepostModelParallelStrategy", TrainerSavesShards, ModelParallelStrategy)
MilepostFSDPStrategy = _made("MilepostFSDPStrategy", TrainerSavesShards, FSDPStrategy)
MilepostFabricModelParallelStrategy = _made(
    "MilepostFabricModelParallelStrategy", FabricSavesShards, FabricModelParallelStrategy
)
MilepostFabricFSDPStrategy = _made("MilepostFabricFSDPStrategy", FabricSavesShards, FabricFSDPStrategy)
