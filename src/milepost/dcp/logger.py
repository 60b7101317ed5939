"""Torch's logging of calls; Milepost writes to the logger "milepost" instead."""

from torch.distributed.checkpoint.logger import _dcp_method_logger, _init_logger  # noqa: F401  # frameworks import them

__all__: list[str] = []
