"""The name of torch's handler for its logging of calls."""

from torch.distributed.checkpoint.logging_handlers import DCP_LOGGER_NAME  # noqa: F401  # frameworks import it

from milepost.dcp._engine.lent import lend

__all__: list[str] = []

lend(__name__, "_log_handlers")
