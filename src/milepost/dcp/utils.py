"""Looking things up in states, and calls that all ranks make together."""

import contextlib
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeVar

import torch.distributed as dist
from torch.distributed.checkpoint import utils as theirs
from torch.distributed.checkpoint.api import CheckpointException as TheirException
from torch.distributed.checkpoint.utils import (
    _all_gather_keys,  # noqa: F401  # frameworks import these
    _api_bc_check,  # noqa: F401
    _assert_same_keys,  # noqa: F401
    _create_file_view,  # noqa: F401
    _get_failure_dict,  # noqa: F401
    _normalize_device_info,  # noqa: F401
    _profile,  # noqa: F401
    _ReaderView,  # noqa: F401
)

from milepost.dcp._engine.lent import lend
from milepost.dcp.api import WRAPPED_EXCEPTION, CheckpointException, is_wrapped_exception, wrap_exception
from milepost.planning.items import find_shard, find_state_dict_object

__all__ = ["WRAPPED_EXCEPTION", "CheckpointException", "find_state_dict_object", "find_tensor_shard"]

T = TypeVar("T")
R = TypeVar("R")

find_tensor_shard = find_shard
_wrap_exception = wrap_exception
_is_wrapped_exception = is_wrapped_exception


def _find_shard(tensor: Any, index: Any) -> Any:
    """The local shard of a ShardedTensor that starts at `index.offset`."""
    return theirs._find_shard(tensor, index)  # noqa: SLF001


def _element_wise_add(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [i + j for i, j in zip(a, b, strict=False)]


def _element_wise_sub(a: Sequence[int], b: Sequence[int]) -> list[int]:
    return [i - j for i, j in zip(a, b, strict=False)]


@contextlib.contextmanager
def _ours() -> Iterator[None]:
    try:
        yield
    except TheirException as error:
        raise CheckpointException(str(error.args[0]), error.failures) from None


class _DistWrapper(theirs._DistWrapper):  # noqa: SLF001
    """Torch's calls over the ranks of a process group, with errors that are Exceptions."""

    def __init__(self, group: dist.ProcessGroup | None, use_dist: bool, coordinator_rank: int) -> None:
        super().__init__(group, use_dist, coordinator_rank)

    def reduce_scatter(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], list[R]]) -> R:
        """Run on every rank, decide on the coordinator, and give each rank its part."""
        with _ours():
            return super().reduce_scatter(step, map_fun, reduce_fun)

    def all_reduce(self, step: str, map_fun: Callable[[], T], reduce_fun: Callable[[list[T]], R]) -> R:
        """Run on every rank, decide on the coordinator, and give every rank the answer."""
        with _ours():
            return super().all_reduce(step, map_fun, reduce_fun)

    def all_gather(self, step: str, map_fun: Callable[[], T]) -> list[T]:
        """Run on every rank, and give every rank all results."""
        with _ours():
            return super().all_gather(step, map_fun)

    def broadcast(self, step: str, map_fun: Callable[[], T]) -> T:
        """Run on the coordinator, and give every rank the result."""
        with _ours():
            return super().broadcast(step, map_fun)


lend(__name__, "ENABLE_PROFILE")
