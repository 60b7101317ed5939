"""Torch's logging of calls; Milepost writes to the logger "milepost" instead."""

from torch.distributed.checkpoint.logger import _dcp_method_logger, _init_logger  # noqa: F401  # frameworks import them

from milepost.dcp._engine.lent import lend

__all__: list[str] = []

lend(__name__, "_P _T _dcp_logger _get_msg_dict _msg_dict_from_dcp_method_args logger")
