"""Checkpoints and files of `torch.save`: one made from the other.

python -m milepost.dcp.format_utils torch_to_dcp model.pt checkpoint
python -m milepost.dcp.format_utils dcp_to_torch checkpoint model.pt
"""

import argparse
import sys
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.checkpoint.format_utils import BroadcastingTorchSaveReader

from milepost.dcp._engine.conversions import dcp_to_torch_save, torch_save_to_dcp
from milepost.dcp._engine.lent import lend
from milepost.errors import CheckpointError
from milepost.planning.default import DefaultLoadPlanner
from milepost.planning.items import create_chunk_list
from milepost.planning.records import Metadata, TensorProperties, TensorStorageMetadata

__all__ = ["BroadcastingTorchSaveReader", "DynamicMetaLoadPlanner", "dcp_to_torch_save", "torch_save_to_dcp"]


class DynamicMetaLoadPlanner(DefaultLoadPlanner):
    """A planner that takes the state for the metadata, for files that have none (`BroadcastingTorchSaveReader`)."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Describe the state, which must hold nothing but tensors."""
        super().set_up_planner(state_dict, metadata, is_coordinator)
        other = [key for key, value in self.state_dict.items() if not isinstance(value, torch.Tensor)]
        if other:
            raise RuntimeError(
                f"Non-tensor value identified at {', '.join(other)}. "
                f"{type(self).__name__} only supports loading Tensors."
            )
        self.metadata = Metadata(
            {
                key: TensorStorageMetadata(TensorProperties(value.dtype), value.size(), create_chunk_list(value))
                for key, value in self.state_dict.items()
            }
        )


lend(__name__)

_MODES = {"torch_to_dcp": torch_save_to_dcp, "dcp_to_torch": dcp_to_torch_save}


def main(arguments: Sequence[str] | None = None) -> int:
    """Convert as the command line says. The exit status: 0 done, 1 it could not be done, 2 wrong arguments."""
    parser = argparse.ArgumentParser(prog="python -m milepost.dcp.format_utils", description="Convert a checkpoint.")
    parser.add_argument("mode", choices=list(_MODES), help="torch_to_dcp makes a checkpoint, dcp_to_torch a file")
    parser.add_argument("src", help="what is there: a file of torch.save, or a checkpoint")
    parser.add_argument("dst", help="what is made from it; what stands there already is replaced")
    given = parser.parse_args(arguments)
    print(f"Converting checkpoint from {given.src} to {given.dst} using method: '{given.mode}'")  # noqa: T201
    try:
        _MODES[given.mode](given.src, given.dst)
    except CheckpointError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)  # noqa: T201
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
