"""Which path a save with a planner, a storage writer, or both takes. A decision only: it writes nothing.

NoPlanner: neither changes what a save does. It takes the usual path, on which keys are not even spelled.
LocalPlanner: the planner changes what its own rank writes. It takes the usual path, by the local plan of each rank.
GlobalPlanner: the planner or the storage needs the plans of all ranks. It takes the planner protocol.
"""

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeGuard

from milepost.core.option_values import name_ignored
from milepost.errors import InvalidRequest
from milepost.planning.default import DefaultSavePlanner
from milepost.planning.protocol import SavePlanner, StorageWriter
from milepost.planning.storage import CheckpointWriter
from milepost.saving.base import BaseSource
from milepost.saving.options import SaveOptions
from milepost.saving.pipeline import Receipt

_PLANNER_STEPS = ("create_global_plan", "_create_global_plan", "_dedup_save_plans", "finish_plan", "unless_unchanged")
_WRITER_STEPS = ("set_up_storage_writer", "prepare_local_plan", "prepare_global_plan", "write_data", "finish", "abort")


@dataclass(frozen=True, slots=True)
class _UsualPath:
    """Milepost's own storage, and a planner that leaves the global plan alone."""

    writer: CheckpointWriter
    planner: DefaultSavePlanner

    def options(self, given: SaveOptions) -> SaveOptions:
        """The options of the call, with those that the planner and the writer were made with."""
        planner, writer = self.planner, self.writer
        return replace(
            given,
            overwrite=given.overwrite and writer.overwrite,
            metadata=given.metadata or writer.metadata,
            transfer=writer.transfer,
            progress=writer.progress,
            codec=planner.codec,
            plans=planner.agreements if planner.enable_plan_caching else given.plans,
        )

    def note(self, receipt: Receipt) -> Receipt:
        """Write down on the writer what was committed. Returns the receipt."""
        self.writer.generation, self.writer.save_id = receipt.generation, receipt.save_id
        return receipt


@dataclass(frozen=True, slots=True)
class NoPlanner(_UsualPath):
    """The default planner and Milepost's storage: they do what a save does without them."""


@dataclass(frozen=True, slots=True)
class LocalPlanner(_UsualPath):
    """A planner whose local plans suffice. They name the keys and the boxes; no rank collects the plans of all."""


@dataclass(frozen=True, slots=True)
class GlobalPlanner:
    """A planner or a storage writer that needs the global plan."""

    writer: StorageWriter
    planner: SavePlanner


SaveRoute = NoPlanner | LocalPlanner | GlobalPlanner


def route(writer: Any, planner: Any) -> SaveRoute:
    """The path of a save with this writer and this planner (None: the default one).

    Those made for torch's own classes are adapted: the record holds what Milepost's functions can call.
    """
    from milepost.planning.torch_adapters import adapted_save_planner, adapted_writer  # noqa: PLC0415  # slow to import

    own_writer = adapted_writer(writer)
    own_planner = adapted_save_planner(planner, own_writer)
    if own_planner is None:
        own_planner = DefaultSavePlanner()
    if not isinstance(own_planner, DefaultSavePlanner) or not is_local(own_writer, own_planner):
        return GlobalPlanner(own_writer, own_planner)
    if type(own_planner) is DefaultSavePlanner and own_planner.flatten_state_dict:
        return NoPlanner(own_writer, own_planner)
    return LocalPlanner(own_writer, own_planner)


def is_local(writer: StorageWriter, planner: DefaultSavePlanner) -> TypeGuard[CheckpointWriter]:
    """Whether neither a class nor an option changes the plans of other ranks."""
    if not isinstance(writer, CheckpointWriter) or not _keeps(writer, CheckpointWriter, _WRITER_STEPS):
        return False
    default = _keeps(planner, DefaultSavePlanner, _PLANNER_STEPS)
    return default and not planner.dedup_save_to_lowest_rank and not writer.transforms


def _keeps(value: object, base: type, names: tuple[str, ...]) -> bool:
    """Whether the class of a value has these methods as its base has them."""
    return all(getattr(type(value), name) is getattr(base, name) for name in names)


def ignored_by_save(given: Mapping[str, Any], chosen: SaveRoute, *, own_writer: bool) -> InvalidRequest | None:
    """What is wrong with options of a save that this path would ignore; None if none was given.

    `own_writer`: the caller passed a storage writer.
    """
    # What a caller gives as `base` is a place; a `Checkpointer` gives its newest step.
    given = {"incremental" if isinstance(value, BaseSource) else name: value for name, value in given.items()}
    of_planner = {"types", "allow_pickle"}
    of_writer = {"transfer", "host_memory_bytes", "progress"} if own_writer else set()
    of_usual_path = set()
    if isinstance(chosen, GlobalPlanner):
        of_usual_path = {"on_difference", "compare_replicas", "reduce_partial", "statistics", "healthy"}
        of_usual_path |= {"base", "incremental", "max_depth", "max_waste"}
        if not isinstance(chosen.writer, CheckpointWriter):
            of_writer |= {"metadata", "overwrite"}
    return (
        name_ignored(
            given,
            of_planner,
            "a save with a planner or a storage writer takes this from the planner; pass "
            "planner=DefaultSavePlanner(...) with it",
        )
        or name_ignored(
            given, of_writer, "a save with a storage writer takes this from the writer; make the writer with it"
        )
        or name_ignored(
            given, of_usual_path, "a planner or storage that needs the plans of all ranks decides this; leave it out"
        )
    )


def ignored_by_load(given: Mapping[str, Any], *, own_reader: bool) -> InvalidRequest | None:
    """The same for a load with a planner or a storage reader. `own_reader`: the caller passed a reader."""
    of_reader = {"verify", "allow_unhealthy", "transfer", "host_memory_bytes", "progress"} if own_reader else set()
    return name_ignored(
        given,
        {"allow_missing", "allow_unexpected", "convert_dtype", "device", "share_reads", "types", "allow_pickle"},
        "a load with a planner or a storage reader takes this from the planner; pass planner=DefaultLoadPlanner(...) "
        "with what it has (allow_partial_load, types, allow_pickle), or load without a planner",
    ) or name_ignored(
        given, of_reader, "a load with a storage reader takes this from the reader; make the reader with it"
    )
