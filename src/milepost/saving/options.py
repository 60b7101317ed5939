"""How to save: the keywords of a call, and the checked record that they become."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal, TypedDict, Unpack

from milepost.core.agreement import Plans
from milepost.core.limits import KIB
from milepost.core.option_values import check_values
from milepost.core.reuse import CELL_BYTES
from milepost.core.statistics import Recording
from milepost.data.reuse import ReuseRules
from milepost.data.threads import Latch
from milepost.data.transfer import HOST_MEMORY_BYTES, Transfer, Watcher, limited_transfer
from milepost.errors import InvalidRequest
from milepost.saving.base import BaseSource, FixedBase
from milepost.saving.health import HealthRule
from milepost.state.values import Codec
from milepost.store import Location, store_at


class SaveSettings(TypedDict, total=False):
    """The options that all saves of a run may share."""

    overwrite: bool
    """False: refuse to replace a checkpoint. Default: True."""
    on_difference: Literal["error", "warn"]
    """What to do if values or replicas differ between ranks. "warn" keeps the lowest rank's. Default: "error"."""
    compare_replicas: bool
    """False: trust that replicated tensors are equal, which saves hashing them. Default: True."""
    statistics: bool | Literal["histogram"]
    """True: record NaN, Inf, min, max, mean and rms of each tensor; "histogram": that too. Default: False."""
    healthy: bool | HealthRule
    """True: mark a checkpoint with NaN or Inf as unhealthy. Or a rule, which implies `statistics`. Default: False."""
    max_depth: int
    """Incremental saves: data that was written more than this many saves ago is written again. Default: 100."""
    max_waste: float
    """Incremental saves: a file of which more than this share is not used any more is given up. Default: 0.5."""
    reduce_partial: bool
    """True: sum DTensors with `Partial` placements, by a collective on their mesh. Default: refuse them."""
    types: Iterable[type]
    """The enum and dataclass types that occur in the state, and subclasses of Tensor. Default: none."""
    allow_pickle: bool
    """True: pickle values that have no plain form. Default: False."""
    host_memory_bytes: int
    """The most memory that this rank uses beyond the state. Default: 512 MiB."""
    transfer: Transfer | None
    """How many threads move blocks of which size, within `host_memory_bytes`. Default: `Transfer()`."""
    progress: Watcher | None
    """Called on the coordinator with a `Progress` from time to time; `ProgressBar()` draws one. Default: none."""


class SaveKeywords(SaveSettings, total=False):
    """The options of every call that saves. `milepost.save(state, path, **options)`."""

    metadata: Mapping[str, Any] | None
    """A small dict of plain values to keep with the checkpoint; the coordinator's is kept. Default: none."""
    base: Location | BaseSource | None
    """A committed checkpoint: what is equal there is not written again. Default: none."""
    plans: Plans | None
    """One `Plans()` for all saves of a job: a structure that was saved before needs no planning. Default: none."""


SAVE_SETTINGS = frozenset(SaveSettings.__optional_keys__)
SAVE_OPTIONS = frozenset(SaveKeywords.__optional_keys__)
"""The names of the options of a save."""


@dataclass(frozen=True, slots=True)
class SaveOptions:
    """How to save, as `SaveKeywords` explains. `cancelled`: set to stop a save in the background."""

    metadata: Mapping[str, Any]
    codec: Codec
    plans: Plans
    overwrite: bool = True
    on_difference: Literal["error", "warn"] = "error"
    compare_replicas: bool = True
    statistics: Recording = ""
    healthy: bool | HealthRule = False
    reduce_partial: bool = False
    base: BaseSource | None = None
    reuse: ReuseRules = field(default_factory=ReuseRules)
    transfer: Transfer = field(default_factory=Transfer)
    progress: Watcher | None = None
    cancelled: Latch | None = None

    @property
    def share_replicas(self) -> bool:
        """Whether replicas share the work; where they may differ, one of them must write all of a tensor."""
        return self.on_difference == "error"


def make_options(**given: Unpack[SaveKeywords]) -> SaveOptions:
    """The options as callers of `milepost.save` give them. Raises InvalidRequest, naming an option that is wrong."""
    unknown = sorted(given.keys() - SAVE_OPTIONS)
    if unknown:
        known = ", ".join(sorted(SAVE_OPTIONS))
        raise InvalidRequest(f"{', '.join(unknown)}: a save has no such option. Its options are {known}")
    check_values(given)
    plans = given.get("plans")
    if plans is not None and not isinstance(plans, Plans):
        raise InvalidRequest(f"plans is a milepost.Plans, or None, not {plans!r}")
    transfer = limited_transfer(given.get("transfer"), given.get("host_memory_bytes", HOST_MEMORY_BYTES))
    wanted = given.get("healthy", False)
    healthy = wanted if callable(wanted) else bool(wanted)
    return SaveOptions(
        metadata=given.get("metadata") or {},
        codec=Codec(given.get("types", ()), given.get("allow_pickle", False)),
        plans=plans if plans is not None else Plans(),
        overwrite=given.get("overwrite", True),
        on_difference=one_of("on_difference", given.get("on_difference", "error"), ("error", "warn")),
        compare_replicas=given.get("compare_replicas", True),
        statistics=_recording(given.get("statistics", False), healthy),
        healthy=healthy,
        reduce_partial=given.get("reduce_partial", False),
        base=_base(given.get("base"), transfer),
        reuse=ReuseRules(given.get("max_depth", 100), given.get("max_waste", 0.5)),
        transfer=transfer,
        progress=given.get("progress"),
    )


def _base(base: Location | BaseSource | None, transfer: Transfer) -> BaseSource | None:
    if base is None:
        return None
    if transfer.block_bytes < CELL_BYTES:
        raise InvalidRequest(
            f"an incremental save moves blocks of {CELL_BYTES // KIB} KiB at least; give it a larger "
            "host_memory_bytes, or a Transfer with larger block_bytes"
        )
    try:
        return base if isinstance(base, BaseSource) else FixedBase(store_at(base))
    except InvalidRequest as error:
        raise InvalidRequest(f"base: {error}") from None


def _recording(wanted: "bool | str", healthy: "bool | HealthRule") -> Recording:
    if wanted == "histogram":
        return "histogram"
    if wanted or callable(healthy):
        return "numbers"
    return "finite" if healthy else ""


def one_of(name: str, value: Any, known: tuple[str, ...]) -> Any:
    """The value. Raises InvalidRequest if it is not among the known ones."""
    if not isinstance(value, str) or value not in known:
        raise InvalidRequest(f"{name} is one of {', '.join(map(repr, known))}, not {value!r}")
    return value
