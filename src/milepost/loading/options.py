"""How to load: the keywords of a call, and the checked record that they become."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import TypedDict, Unpack

import torch

from milepost.core.dtypes import Convert
from milepost.core.option_values import check_values
from milepost.data.transfer import HOST_MEMORY_BYTES, Transfer, Watcher, limited_transfer
from milepost.errors import InvalidRequest
from milepost.state.values import Codec


class ExplainKeywords(TypedDict, total=False):
    """The options of `milepost.explain`."""

    types: Iterable[type]
    """The enum and dataclass types that occur in the state, and subclasses of Tensor. Default: none."""


class LoadKeywords(ExplainKeywords, total=False):
    """The options of every call that loads. `milepost.load(state, path, **options)`."""

    allow_missing: bool
    """True: leave what the checkpoint lacks as it is. Default: False."""
    allow_unexpected: bool
    """True: ignore what the state lacks. Default: False."""
    convert_dtype: Convert
    """True: convert between floating types, and between integers, where every value fits. "lossy": convert between any
    types. Default: False."""
    device: torch.device | str | None
    """Where tensors on the meta device get their memory. Default: the device of their mesh, else the CPU."""
    allow_unhealthy: bool
    """False: raise CheckpointUnhealthy if a rule found the checkpoint unhealthy when it was saved. Default: True."""
    allow_pickle: bool
    """True: unpickle values that were saved with `allow_pickle=True`. Pickles run code. Default: False."""
    verify: bool
    """False: do not check the data; the manifest and the headers are checked all the same. Default: True."""
    share_reads: bool | None
    """Whether each byte is read once, and sent to the ranks that want it. Default: where that is faster."""
    host_memory_bytes: int
    """The most memory that this rank uses beyond the state. Default: 512 MiB."""
    transfer: Transfer | None
    """How many threads move blocks of which size, within `host_memory_bytes`. Default: `Transfer()`."""
    progress: Watcher | None
    """Called on the coordinator with a `Progress` from time to time; `ProgressBar()` draws one. Default: none."""


LOAD_OPTIONS = frozenset(LoadKeywords.__optional_keys__)
"""The names of the options of a load."""
EXPLAIN_OPTIONS = frozenset(ExplainKeywords.__optional_keys__)
"""The names of the options of `explain`."""


@dataclass(frozen=True, slots=True)
class LoadOptions:
    """How to load, as `LoadKeywords` explains."""

    codec: Codec
    allow_missing: bool = False
    allow_unexpected: bool = False
    convert_dtype: Convert = False
    device: torch.device | str | None = None
    allow_unhealthy: bool = True
    verify: bool = True
    share_reads: bool | None = None
    transfer: Transfer = field(default_factory=Transfer)
    progress: Watcher | None = None


def make_load_options(**given: Unpack[LoadKeywords]) -> LoadOptions:
    """The options as callers of `milepost.load` give them. Raises InvalidRequest, naming an option that is wrong."""
    _check_known(frozenset(given), LOAD_OPTIONS, "a load")
    check_values(given)
    return LoadOptions(
        codec=Codec(given.get("types", ()), given.get("allow_pickle", False)),
        allow_missing=given.get("allow_missing", False),
        allow_unexpected=given.get("allow_unexpected", False),
        convert_dtype=given.get("convert_dtype", False),
        device=_checked_device(given.get("device")),
        allow_unhealthy=given.get("allow_unhealthy", True),
        verify=given.get("verify", True),
        share_reads=given.get("share_reads"),
        transfer=limited_transfer(given.get("transfer"), given.get("host_memory_bytes", HOST_MEMORY_BYTES)),
        progress=given.get("progress"),
    )


def make_explain_options(**given: Unpack[ExplainKeywords]) -> LoadOptions:
    """The options as callers of `milepost.explain` give them. Raises InvalidRequest, naming an option that is wrong."""
    _check_known(frozenset(given), EXPLAIN_OPTIONS, "an explanation")
    return LoadOptions(Codec(given.get("types", ())), convert_dtype="lossy")


def _check_known(given: frozenset[str], known: frozenset[str], call: str) -> None:
    unknown = sorted(given - known)
    if unknown:
        listed = ", ".join(sorted(known))
        raise InvalidRequest(f"{', '.join(unknown)}: {call} has no such option. Its options are {listed}")


def _checked_device(device: torch.device | str | None) -> torch.device | str | None:
    if device is not None:
        try:
            torch.device(device)
        except (RuntimeError, TypeError) as error:
            raise InvalidRequest(f"device is a torch.device or its name, not {device!r}: {error}") from None
    return device
