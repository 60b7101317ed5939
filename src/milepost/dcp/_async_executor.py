"""The base class of torch's executors, for programs that bring one."""

from torch.distributed.checkpoint._async_executor import _AsyncCheckpointExecutor

from milepost.dcp._engine.lent import lend

__all__ = ["_AsyncCheckpointExecutor"]

lend(__name__)
