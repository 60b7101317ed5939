"""The configuration of the checkpoint manager: torchtitan's fields, a few more, and what is refused."""

from collections.abc import Callable, Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, Literal

from torchtitan.components.checkpointer.base import BaseCheckpointManager

from milepost.comm import TIMEOUT_S
from milepost.core.option_values import check_values
from milepost.errors import InvalidRequest
from milepost.store import store_at
from milepost.store.location import store_to_save

ASYNC_MODES: Mapping[str, dict[str, Any]] = {
    "disabled": {},
    "async": {"background": "thread", "stage": "host"},
    "async_with_pinned_mem": {"background": "process", "stage": "auto"},
}
"""The modes of torchtitan, in the words of `milepost.Checkpointer`."""
# fmt: off
HONOURED = {
    "enable", "folder", "interval", "initial_load_path", "initial_load_model_only", "initial_load_in_hf",
    "initial_load_in_hf_quantized", "last_save_model_only", "last_save_in_hf", "export_dtype", "keep_latest_k",
    "load_step", "exclude_from_loading", "enable_first_step_checkpoint", "create_seed_checkpoint", "load_only",
    "async_mode", "data_on_other_ranks", "timeout_s",
}
# fmt: on
"""The fields that are honoured. A newer torchtitan may have more."""


@dataclass(kw_only=True, slots=True)
class ManagerFields(BaseCheckpointManager.Config):
    """The fields of torchtitan's own configuration, and `data_on_other_ranks` and `timeout_s`."""

    async_mode: Literal["disabled", "async", "async_with_pinned_mem"] = "disabled"
    """How to save: before training goes on, from a thread, or from a process."""

    data_on_other_ranks: Literal["refuse", "restart"] = "refuse"
    """What to do with the positions of data loaders of another number of data-parallel ranks."""

    timeout_s: float = TIMEOUT_S
    """How long ranks wait for each other, in seconds."""

    def __post_init__(self) -> None:
        BaseCheckpointManager.Config.__post_init__(self)
        self.async_mode = self.async_mode.lower()  # type: ignore[assignment]  # as torchtitan reads it
        _one_of("async_mode", self.async_mode, ASYNC_MODES)
        _one_of("data_on_other_ranks", self.data_on_other_ranks, ("refuse", "restart"))
        check_values({"timeout_s": self.timeout_s})
        for field in fields(BaseCheckpointManager.Config):
            usual = field.default if field.default_factory is MISSING else field.default_factory()
            if field.name not in HONOURED and getattr(self, field.name) != usual:
                raise ValueError(f"this version of Milepost does not know checkpoint.{field.name}")
        _check_place("folder", self.folder, store_at if self.load_only else store_to_save)
        _check_place("initial_load_path", self.initial_load_path, store_at)
        if self.create_seed_checkpoint and self.load_only:
            raise ValueError("checkpoint.load_only allows no save, so no seed checkpoint either")
        if self.create_seed_checkpoint and self.last_save_in_hf:
            raise ValueError(
                "a seed checkpoint is loaded as step 0, by its own names: "
                "set checkpoint.last_save_in_hf=False together with create_seed_checkpoint"
            )


def _one_of(name: str, value: Any, known: Iterable[str]) -> None:
    if value not in known:
        raise ValueError(f"checkpoint.{name} is one of {', '.join(known)}, not {value!r}")


def _check_place(name: str, place: str | None, find: Callable[[str], object]) -> None:
    try:
        find(place or ".")
    except InvalidRequest as error:
        raise InvalidRequest(f"checkpoint.{name}: {error}") from None
