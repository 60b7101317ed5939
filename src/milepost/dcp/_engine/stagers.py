"""Copies of a state for saves in the background. They need no accelerator, and use one where there is one."""

import contextlib
import io
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import torch
from torch.distributed.checkpoint._state_dict_stager import StateDictStager

from milepost.background.staging.state_copy import copy_by
from milepost.errors import InvalidRequest

_PLAIN_VALUES = (int, float, complex, str, bytes, bool, type(None), io.BytesIO, torch.dtype, torch.device, torch.Size)


@runtime_checkable
class AsyncStager(Protocol):
    """Makes a copy of a state that later training does not change. `async_save` saves the copy."""

    _synchronize_after_execute: bool = True

    @property
    def should_synchronize_after_execute(self) -> bool:
        """Whether `async_save` calls `synchronize_staging` before it returns."""
        return self._synchronize_after_execute

    def stage(self, state_dict: dict[str, Any]) -> "Future[dict[str, Any]] | dict[str, Any]":
        """The copy, or a future of it. With a future, the caller may change the state only once it is done."""
        del state_dict
        raise InvalidRequest(f"a stager has a method `stage`, and {type(self).__name__} has none")

    def synchronize_staging(self) -> None:
        """Return when the state may be changed."""

    def close(self) -> None:
        """Free the memory of copies."""


@dataclass
class StagingOptions:
    """How a `DefaultStager` copies. What needs an accelerator has no effect where there is none.

    `use_pinned_memory`: copy into pinned memory. `use_shared_memory`: into memory that other processes can map.
    `use_async_staging`: copy in a thread. `use_non_blocking_copy`: copy by a stream of the accelerator.
    """

    use_pinned_memory: bool = True
    use_shared_memory: bool = True
    use_async_staging: bool = True
    use_non_blocking_copy: bool = True


class DefaultStager(AsyncStager):
    """Copies a state into host memory that it keeps for the next copy. Used by one thread at a time."""

    def __init__(self, config: StagingOptions = StagingOptions()) -> None:  # noqa: B008  # DCP's signature
        accelerated = torch.accelerator.is_available()
        self._config = config
        self._copies = StateDictStager(config.use_pinned_memory and accelerated, config.use_shared_memory)
        self._non_blocking = config.use_non_blocking_copy and accelerated
        # Made here: a stream that is made in another thread could be the one that trains.
        self._stream = torch.Stream() if accelerated and config.use_async_staging else None
        self._thread = ThreadPoolExecutor(1, "milepost-staging") if config.use_async_staging else None
        self._staging: Future[dict[str, Any]] | None = None

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> "dict[str, Any] | Future[dict[str, Any]]":
        """The copy; with `use_async_staging`, a future of it."""
        del kwargs
        if self._thread is None:
            return self._copied(state_dict)
        if self._stream is not None:  # what the program has launched so far comes before the copies
            self._stream.wait_stream(torch.accelerator.current_stream())
        self._staging = self._thread.submit(self._copied, state_dict)
        return self._staging

    def _copied(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        with self._stream or contextlib.nullcontext():
            copied = copy_by(self._copies, state_dict, self._non_blocking)
        if self._stream is not None:
            self._stream.synchronize()
        elif self._non_blocking:
            torch.accelerator.synchronize()
        return copied

    def synchronize_staging(self) -> None:
        """Return when the last copy is made. Raises what it raised."""
        if self._staging is not None:
            self._staging.result()

    def close(self) -> None:
        """Free the memory of copies. Waits for a copy that is being made."""
        if self._thread is not None:
            self._thread.shutdown(wait=True)
        self._copies.close()  # type: ignore[no-untyped-call]


class BlockingAsyncStager(AsyncStager):
    """Copies a state into host memory, and returns when that is done.

    `cache_staged_state_dict`: keep the memory for the next copy. `type_check`: raise ValueError for a value that is
    neither a tensor nor a plain value.
    """

    _synchronize_after_execute: bool = False

    def __init__(self, cache_staged_state_dict: bool = False, type_check: bool = False) -> None:
        self.cache_staged_state_dict, self.type_check = cache_staged_state_dict, type_check
        self._cache = _Cache()

    @property
    def state_dict_cache(self) -> dict[str, Any] | None:
        """The last copy, if its memory is kept."""
        return self._cache.state

    def stage(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        """The copy."""
        if self.type_check:
            _check_types(state_dict)
        cache = self._cache if self.cache_staged_state_dict else _Cache()
        try:
            return cache.copied(state_dict)
        finally:
            if cache is not self._cache:
                cache.close()

    def synchronize_staging(self) -> None:
        """Return at once: `stage` has waited."""

    def close(self) -> None:
        """Free the memory of copies."""
        self._cache.close()
        self._cache = _Cache()


class _Cache:
    """The memory of copies. It stays in the process that made it: a storage writer that stages may travel to others."""

    def __init__(self) -> None:
        self.state: dict[str, Any] | None = None
        self._copies = StateDictStager(pin_memory=torch.accelerator.is_available(), share_memory=False)

    def copied(self, state_dict: dict[str, Any]) -> dict[str, Any]:
        self.state = copy_by(self._copies, state_dict)
        return self.state

    def close(self) -> None:
        self._copies.close()  # type: ignore[no-untyped-call]

    def __reduce__(self) -> tuple[Any, ...]:
        return _Cache, ()


def _check_types(value: Any, path: str = "the state") -> None:
    if isinstance(value, dict):
        for key, child in value.items():
            _check_types(child, f"{path}[{key!r}]")
    elif isinstance(value, (list, tuple)):
        for i, child in enumerate(value):
            _check_types(child, f"{path}[{i}]")
    elif not isinstance(value, (torch.Tensor, *_PLAIN_VALUES)):
        raise ValueError(f"Unexpected value type {type(value)} at {path}")  # noqa: TRY004  # as DCP's
