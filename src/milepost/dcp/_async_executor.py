"""What runs the saves of `async_save`, for programs that bring their own or run one themselves."""

from milepost.dcp._engine.executors import SaveExecutor
from milepost.dcp._engine.lent import lend

__all__: list[str] = []

_AsyncCheckpointExecutor = SaveExecutor

lend(__name__)
