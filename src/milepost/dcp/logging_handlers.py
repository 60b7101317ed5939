"""The name of torch's handler for its logging of calls."""

from torch.distributed.checkpoint.logging_handlers import DCP_LOGGER_NAME  # noqa: F401  # frameworks import it

__all__: list[str] = []
