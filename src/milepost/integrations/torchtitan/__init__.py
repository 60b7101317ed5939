"""torchtitan: a checkpoint manager for `Trainer.Config.checkpoint` that saves, finds and loads with Milepost.

    checkpoint=CheckpointManager.Config(enable=True, interval=500)         in a config function
    --override.imports milepost.integrations.torchtitan.use_milepost       on the command line, for any config

The state has the layout of torchtitan's own manager: the model's tensors at the top, everything else by its name. So
steps of DCP and of Milepost are read by the same code, and may lie in one folder.
"""

from dataclasses import fields
from typing import Any

try:
    from torchtitan.components.checkpointer.dcp import CheckpointManager as DcpManager
    from torchtitan.config.override import override
except ImportError as error:
    raise ImportError(
        f"milepost.integrations.torchtitan needs torchtitan 0.3 or newer: pip install 'torchtitan>=0.3' ({error})"
    ) from error

from milepost.integrations.torchtitan.manager import CheckpointManager

__all__ = ["CheckpointManager", "use_milepost"]


def use_milepost(config: Any, **changes: Any) -> CheckpointManager.Config:
    """Milepost's configuration in the place of torchtitan's, for `--override.imports`; `changes` are further fields."""
    known = {field.name for field in fields(CheckpointManager.Config)}
    given = {field.name: getattr(config, field.name) for field in fields(config)}
    foreign = sorted(given.keys() - known)
    if foreign:
        raise ValueError(
            f"{type(config).__qualname__} has {', '.join(foreign)}, which Milepost's manager cannot honour"
        )
    return CheckpointManager.Config(**{**given, **changes})


override(target=DcpManager.Config, description="Checkpoints by Milepost")(use_milepost)
