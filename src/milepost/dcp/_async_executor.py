"""The base class of torch's executors, for programs that bring one."""

from torch.distributed.checkpoint._async_executor import _AsyncCheckpointExecutor

__all__ = ["_AsyncCheckpointExecutor"]
