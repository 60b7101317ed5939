"""Conversions between checkpoints and files of `torch.save`.

Apart from `format_utils`, which is a program too: Python warns if a program was imported before it runs.
"""

import os

from milepost.comm.base import Solo
from milepost.formats.write.convert import convert


def dcp_to_torch_save(dcp_checkpoint_dir: str | os.PathLike[str], torch_save_path: str | os.PathLike[str]) -> None:
    """Make a file for `torch.load` from a checkpoint, in this process alone."""
    convert(dcp_checkpoint_dir, torch_save_path, "torch", overwrite=True, process_group=Solo())


def torch_save_to_dcp(torch_save_path: str | os.PathLike[str], dcp_checkpoint_dir: str | os.PathLike[str]) -> None:
    """Make a checkpoint from a file of `torch.save`, in this process alone. Nothing in the file is run."""
    convert(torch_save_path, dcp_checkpoint_dir, "milepost", overwrite=True, process_group=Solo())
