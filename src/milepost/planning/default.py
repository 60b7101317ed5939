"""The planners that are used by default. They are made to be extended: most extensions override one method."""

import dataclasses
import io
import os
import uuid
from collections.abc import Collection, Iterable
from typing import Any, ClassVar

import torch

from milepost.core.agreement import Plans
from milepost.errors import InvalidRequest
from milepost.planning.flatten import FLATTEN_MAPPING, Era, flatten_state_dict, set_element
from milepost.planning.global_plan import (
    conflicts,
    create_default_global_load_plan,
    create_default_global_save_plan,
    create_default_local_load_plan,
    create_default_local_save_plan,
    dedup_save_plans,
    merged_planner_data,
    validate_global_plan,
)
from milepost.planning.items import check_writable, describer_of_job, find_state_dict_object, init_state_dict
from milepost.planning.kept_plans import (
    KeptPlans,
    SentPlan,
    compare_save_plans,
    contains_usable_plan,
    kept_under,
    merge_delta_local_plans,
    new_key,
    renewed,
)
from milepost.planning.protocol import LoadPlanner, SavePlanner
from milepost.planning.records import (
    STATE_DICT_TYPE,
    STORAGE_TYPES,
    LoadPlan,
    Metadata,
    MetadataIndex,
    ReadItem,
    SavePlan,
    StorageMeta,
    TensorStorageMetadata,
    WriteItem,
    WriteItemType,
)
from milepost.planning.value_bytes import ValueIO, pack_value, unpack_value
from milepost.state.tensors import Describer, dtype_name, is_sharded_tensor, new_tensor
from milepost.state.values import Codec

_SHOWN_CHARACTERS = 2000
_NO_METADATA = "a load planner needs the metadata of the checkpoint"


class DefaultSavePlanner(SavePlanner):
    """Plans to write every tensor and every value of a nested state once.

    To change what is written, override `set_up_planner` (rename keys), `create_local_plan`, `create_global_plan` (move
    work between ranks), `lookup_object` or `transform_object` (change the precision).

    >>> class WithoutOptimizer(milepost.planning.DefaultSavePlanner):
    ...     def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
    ...         super().set_up_planner({"model": state_dict["model"]}, storage_meta, is_coordinator)
    >>> state = {"model": {"w": torch.ones(2)}, "optim": {"lr": 0.1}}
    >>> _ = milepost.save(state, "memory://model-only", planner=WithoutOptimizer())
    >>> list(milepost.open("memory://model-only"))
    ['model.w']

    `flatten_state_dict`: open nested dicts and lists. Else each top-level object that is not a tensor is one value.
    `flatten_sharded_tensors`: unwrap a ShardedTensor whose only local shard is itself a ShardedTensor.
    `dedup_save_to_lowest_rank`: the lowest rank writes what several ranks hold, not the rank with the least to write.
    `enable_plan_caching`: ranks whose plan did not change since this planner's last save send nothing.
    `types`, `allow_pickle`: as for `milepost.save`, for values.

    `agreements` is what the ranks agreed on in earlier saves by local plans, for `enable_plan_caching`. A planner keeps
    the plans of saves by the global plan, and shows them under DCP's names (`SavePlanner._cached_save_plan` and others)
    by its `_cached_plans_key`. No other planner uses them, unless it is given the same key.
    """

    validate: "ClassVar[staticmethod[[list[SavePlan], Metadata], list[str]]]" = staticmethod(validate_global_plan)
    """Finds what is wrong with a global plan. A program may replace it, here or on a subclass."""

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        dedup_replicated_tensors: bool | None = None,
        dedup_save_to_lowest_rank: bool = False,
        enable_plan_caching: bool = False,
        *,
        types: Iterable[type] = (),
        allow_pickle: bool = False,
    ) -> None:
        del dedup_replicated_tensors  # has no effect, as in DCP
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.dedup_save_to_lowest_rank = dedup_save_to_lowest_rank
        self.enable_plan_caching = enable_plan_caching
        self.codec = Codec(types, allow_pickle)
        self.agreements = Plans()
        self.mappings: FLATTEN_MAPPING = {}
        self.state_dict: STATE_DICT_TYPE = {}
        self.is_coordinator = False
        self._describer: Describer | None = None
        self.plan: SavePlan | None = None
        self.global_plan: list[SavePlan] = []
        self.metadata: Metadata | None = None
        self._pending: SentPlan | None = None
        self._sent_whole = False
        self._cached_plans_key = new_key(type(self).__name__)

    @property
    def _cached_plans_key(self) -> str:
        """The key of this planner's plans. Set the same on two planners, and they share what they keep."""
        return self._key

    @_cached_plans_key.setter
    def _cached_plans_key(self, key: str) -> None:
        self._key = key
        self._kept: KeptPlans = kept_under(key)

    @property
    def _enable_plan_caching(self) -> bool:
        """DCP's name of `enable_plan_caching`."""
        return self.enable_plan_caching

    @_enable_plan_caching.setter
    def _enable_plan_caching(self, enable: bool) -> None:
        self.enable_plan_caching = enable

    def __getstate__(self) -> dict[str, Any]:
        state = {name: value for name, value in self.__dict__.items() if name not in ("_kept", "_describer")}
        return {**state, "_process": os.getpid()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        # Sent to another process, it finds the plans that it left there. A copy in this process is another planner.
        is_copy = state.pop("_process") == os.getpid()
        self.__dict__.update(state)
        self._describer = None
        self._cached_plans_key = new_key(type(self).__name__) if is_copy else self._key

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Flatten the state."""
        del storage_meta
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict)
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict, self.is_coordinator = state_dict, is_coordinator
        self._describer = describer_of_job()
        if self._pending is not None:
            # A save that did not reach finish_plan on this rank leaves nothing to reuse: the coordinator may remember
            # more of it than this rank does.
            self._kept.forget_own()
        self._pending, self._sent_whole = None, False

    def create_local_plan(self) -> SavePlan:
        """One item for each value, and one for each box of each tensor."""
        plan = create_default_local_save_plan(self.state_dict, self.is_coordinator)
        if self.flatten_state_dict:
            plan = dataclasses.replace(plan, planner_data=self.mappings)
        self.plan = plan
        # A subclass may change the plan after this returns. The sender then asks whether the changed plan is new.
        overridden = type(self).create_local_plan is not DefaultSavePlanner.create_local_plan
        return plan if overridden else self.unless_unchanged(plan)

    def unless_unchanged(self, plan: SavePlan) -> SavePlan:
        """The plan to send. With caching, an empty one if nothing changed since the last save."""
        if not self.enable_plan_caching or not plan.usable:
            return plan
        if self._pending is None or self._pending.plan is not plan:
            self._pending = SentPlan(plan)
        self._sent_whole = not self._kept.has(self._pending)
        return plan if self._sent_whole else SavePlan([], usable=False)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Remove duplicates, describe what is left, and check it. Raises ValueError with all that is wrong.

        With caching, a plan that is as in the last save is empty: see `whole_plans`.
        """
        kept = self._kept
        unchanged = [rank for rank, plan in enumerate(all_plans) if not plan.usable]
        if unchanged and not self.remembers(len(all_plans)):
            raise InvalidRequest(
                f"ranks {unchanged} say that their plans are those of an earlier save, but the coordinator's planner "
                "has no plans of it. Give every rank a new planner, or none."
            )
        if not self.enable_plan_caching:
            self.global_plan, self.metadata = self._create_global_plan(all_plans)
            return self.global_plan, self.metadata
        merged = merge_delta_local_plans(kept.all_plans or (), all_plans) if unchanged else list(all_plans)
        if kept.metadata is not None and kept.global_plan and not contains_usable_plan(all_plans):
            plans, metadata = kept.global_plan, kept.metadata
        else:
            plans, metadata = self._create_global_plan(merged)
        last = kept.global_plan or []
        last = last if len(last) == len(plans) else [_NOTHING] * len(plans)
        kept.all_plans, kept.global_plan, kept.metadata = merged, plans, metadata
        kept.agreement = uuid.uuid4().hex
        self.global_plan, self.metadata = plans, dataclasses.replace(metadata)  # a copy: storage adds its data to it
        # A subclass may change the plans after this returns: then a rank that sent its plan gets its final one here.
        overridden = type(self).create_global_plan is not DefaultSavePlanner.create_global_plan
        sent = [
            plan if (overridden and new.usable) or not compare_save_plans(plan, old) else _unchanged(new)
            for plan, new, old in zip(plans, all_plans, last, strict=True)
        ]
        return sent, self.metadata

    def whole_plans(self, plans: list[SavePlan], all_plans: list[SavePlan]) -> list[SavePlan]:
        """The plans to hand out: a rank that sent its own plan gets all of its final one, for it may have kept none.

        `plans`: what `create_global_plan` returned for `all_plans`.
        """
        return [
            self.global_plan[rank] if new.usable and not plan.usable else plan
            for rank, (plan, new) in enumerate(zip(plans, all_plans, strict=True))
        ]

    @property
    def agreement(self) -> str:
        """The name of the global plan that this planner's kept plans belong to; empty if there are none."""
        return self._kept.agreement

    @agreement.setter
    def agreement(self, agreement: str) -> None:
        self._kept.agreement = agreement

    def remembers(self, ranks: int) -> bool:
        """Whether this planner keeps the plans of as many ranks."""
        return len(self._kept.all_plans or ()) == ranks

    def forget_plans(self) -> None:
        """Drop what this planner keeps, so that the next save plans everything anew."""
        self._kept.forget_own()
        self._kept.all_plans = self._kept.global_plan = self._kept.metadata = None
        self._kept.agreement, self._pending = "", None

    def _create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        _refuse(conflicts(all_plans))  # before deduplication takes one of two for a copy of the other
        plans, metadata = create_default_global_save_plan(self._dedup_save_plans(all_plans))
        if self.flatten_state_dict:
            metadata = dataclasses.replace(metadata, planner_data=merged_planner_data(all_plans))
        _refuse(self.validate(plans, metadata))
        return plans, metadata

    def _dedup_save_plans(self, all_plans: list[SavePlan]) -> list[SavePlan]:
        """Choose who writes what several ranks hold. Programs for DCP override it."""
        return dedup_save_plans(all_plans, self.dedup_save_to_lowest_rank)

    def finish_plan(self, new_plan: SavePlan) -> SavePlan:
        """The final plan. With caching, the one of the last save if nothing changed."""
        self.plan = self._finished(new_plan) if self.enable_plan_caching else new_plan
        return self.plan

    def _finished(self, new_plan: SavePlan) -> SavePlan:
        kept = self._kept
        if not new_plan.usable:
            if kept.final is None or self._sent_whole:
                raise InvalidRequest(
                    "the coordinator asked this rank to use its last plan again, and it has none that is sure to be "
                    "the same. Pass what `create_global_plan` returns through `whole_plans`, or give every rank a new "
                    "planner."
                )
            new_plan = renewed(kept.final, new_plan)
        kept.final = new_plan
        if self._pending is not None:
            kept.keep_sent(self._pending)
        self._pending, self._sent_whole = None, False
        return new_plan

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor | io.BytesIO:
        """The data of an item: `transform_object` of what `lookup_object` finds."""
        found: torch.Tensor | io.BytesIO = self.transform_object(write_item, self.lookup_object(write_item.index))
        return found

    def lookup_object(self, index: MetadataIndex) -> Any:
        """What an index names in the flat state: a value, or this rank's memory of a tensor or of a box."""
        return find_state_dict_object(self.state_dict, index, self._describer)

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """A tensor unchanged; any other object as bytes."""
        if write_item.type is WriteItemType.BYTE_IO:
            return pack_value(object, self.codec, write_item.index.fqn)
        return object


_NOTHING = SavePlan([], usable=False)


def _unchanged(plan: SavePlan) -> SavePlan:
    return SavePlan([], storage_data=plan.storage_data, usable=False)


def _refuse(errors: list[str]) -> None:
    if errors:
        shown = "; ".join(errors)
        cut = "... (truncated)" if len(shown) > _SHOWN_CHARACTERS else ""
        raise ValueError(f"Failed to validate global plan: {shown[:_SHOWN_CHARACTERS]}{cut}")


class DefaultLoadPlanner(LoadPlanner):
    """Fills a nested state in place, box by box.

    To change what is read, override `set_up_planner` (rename keys), `lookup_tensor` or `transform_tensor`.

    `flatten_state_dict`, `flatten_sharded_tensors`, `types`, `allow_pickle`: as for `DefaultSavePlanner`.
    `allow_partial_load`: leave what the checkpoint lacks unchanged, instead of raising RuntimeError.

    >>> _ = milepost.save({"w": torch.ones(2)}, "memory://partial")
    >>> state = {"w": torch.zeros(2), "new": torch.zeros(1)}
    >>> planner = milepost.planning.DefaultLoadPlanner(allow_partial_load=True)
    >>> _ = milepost.load(state, "memory://partial", planner=planner)
    >>> state
    {'w': tensor([1., 1.]), 'new': tensor([0.])}
    """

    def __init__(
        self,
        flatten_state_dict: bool = True,
        flatten_sharded_tensors: bool = True,
        allow_partial_load: bool = False,
        *,
        types: Iterable[type] = (),
        allow_pickle: bool = False,
    ) -> None:
        self.flatten_state_dict = flatten_state_dict
        self.flatten_sharded_tensors = flatten_sharded_tensors
        self.allow_partial_load = allow_partial_load
        self.codec = Codec(types, allow_pickle)
        self.original_state_dict: STATE_DICT_TYPE = {}
        self.mappings: FLATTEN_MAPPING = {}
        self.state_dict: STATE_DICT_TYPE = {}
        self.metadata: Metadata | None = None
        self.is_coordinator = False
        self._describer: Describer | None = None

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Give memory to tensors on the meta device, and flatten the state."""
        init_state_dict(state_dict)
        self._describer = describer_of_job()
        self.original_state_dict, self.metadata, self.is_coordinator = state_dict, metadata, is_coordinator
        self._flatten("now")

    def _flatten(self, era: Era) -> None:
        state_dict = self.original_state_dict
        if self.flatten_state_dict:
            state_dict, self.mappings = flatten_state_dict(state_dict, era)
        if self.flatten_sharded_tensors:
            state_dict = flatten_sharded_tensors(state_dict)
        self.state_dict = state_dict

    def create_local_plan(self) -> LoadPlan:
        """The reads, found by the overlap of boxes. Keys that older versions spelled in other ways are found too."""
        if self.metadata is None:
            raise InvalidRequest(_NO_METADATA)
        if self.flatten_state_dict:
            self._flatten_as_saved(set(self.metadata.state_dict_metadata))
        return create_default_local_load_plan(self.state_dict, self.metadata, not self.allow_partial_load)

    def _flatten_as_saved(self, saved: set[str]) -> None:
        """If today's spelling of keys does not fit, use the one that most of the checkpoint's keys have."""
        if set(self.state_dict) <= saved:
            return
        flat = {era: set(flatten_state_dict(self.original_state_dict, era)[0]) for era in _ERAS}
        best = max(_ERAS, key=lambda era: (flat[era] <= saved, len(flat[era] & saved) - len(flat[era] - saved)))
        # A subclass that changed the flat state changed today's spelling: then that stays.
        if best != "now" and set(self.state_dict) == flat["now"]:
            self._flatten(best)

    def create_global_plan(self, global_plan: list[LoadPlan]) -> list[LoadPlan]:
        """The same plans."""
        return create_default_global_load_plan(global_plan)

    def finish_plan(self, new_plan: LoadPlan) -> LoadPlan:
        """The same plan."""
        return new_plan

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        """Decode a value, and set it at its place in the state."""
        fqn = read_item.dest_index.fqn
        raw = isinstance(self.state_dict.get(fqn), io.BytesIO) and not isinstance(value, ValueIO)
        decoded = io.BytesIO(value.getvalue()) if raw else unpack_value(value, self.codec, fqn)
        self.state_dict[fqn] = decoded
        if self.flatten_state_dict:
            set_element(self.original_state_dict, self.mappings[fqn], decoded)
        elif self.original_state_dict is not self.state_dict:
            self.original_state_dict[fqn] = decoded

    def resolve_tensor(self, read_item: ReadItem) -> torch.Tensor:
        """The memory of the item's box."""
        return self.transform_tensor(read_item, self.lookup_tensor(read_item.dest_index))

    def commit_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> None:
        """Do nothing: the data is in the state's own memory already."""

    def lookup_tensor(self, index: MetadataIndex) -> torch.Tensor:
        """The memory of a tensor or of a box, on this rank."""
        check_writable(self.state_dict.get(index.fqn), index.fqn)
        found: torch.Tensor = find_state_dict_object(self.state_dict, index, self._describer)
        return found

    def transform_tensor(self, read_item: ReadItem, tensor: torch.Tensor) -> torch.Tensor:
        """The part of a tensor that an item fills."""
        for dim, (start, length) in enumerate(zip(read_item.dest_offsets, read_item.lengths, strict=False)):
            tensor = tensor.narrow(dim, start, length)
        return tensor


_ERAS: tuple[Era, ...] = ("now", "milepost", "2.4", "2.3")


class EmptyStateDictLoadPlanner(DefaultLoadPlanner):
    """Fills an empty dict with the state of a checkpoint, on the CPU.

    `keys` selects keys, or all keys below a name; the other arguments are those of `DefaultLoadPlanner`. Raises
    RuntimeError for `keys` that select nothing, unless `allow_partial_load` is set.

    >>> _ = milepost.save({"model": {"w": torch.ones(2)}, "step": 7}, "memory://whole")
    >>> state = {}
    >>> planner = milepost.planning.EmptyStateDictLoadPlanner(keys={"model"})
    >>> _ = milepost.load(state, "memory://whole", planner=planner)
    >>> state
    {'model': {'w': tensor([1., 1.])}}
    """

    def __init__(self, keys: Collection[str] | None = None, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.keys = None if keys is None else {keys} if isinstance(keys, str) else set(keys)

    def set_up_planner(
        self, state_dict: STATE_DICT_TYPE, metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Make an empty tensor or slot for each selected key."""
        if state_dict:
            raise InvalidRequest("this planner fills an empty dict")
        if metadata is None:
            raise InvalidRequest(_NO_METADATA)
        paths = metadata.planner_data if self.flatten_state_dict and isinstance(metadata.planner_data, dict) else {}
        slots = {key: _empty(key, saved) for key, saved in self._selected(metadata).items()}
        # The metadata's own spelling, even where today's would differ.
        self.mappings = {key: tuple(paths.get(key, ())) or (key,) for key in slots}
        for key, slot in slots.items():
            set_element(state_dict, self.mappings[key], slot)
        self.original_state_dict, self.state_dict = state_dict, slots
        self.metadata, self.is_coordinator = metadata, is_coordinator

    def _selected(self, metadata: Metadata) -> dict[str, STORAGE_TYPES]:
        known = metadata.state_dict_metadata
        if self.keys is None:
            return dict(known)
        chosen = {key: self.keys & set(_names_above(key)) for key in known}
        missing = sorted(self.keys.difference(*chosen.values()))
        if missing and not self.allow_partial_load:
            raise RuntimeError(f"Missing key in checkpoint state_dict: {', '.join(missing)}.")
        return {key: saved for key, saved in known.items() if chosen[key]}


def _names_above(key: str) -> list[str]:
    """The key itself, and the name of every container above it."""
    steps = key.split(".")
    return [".".join(steps[: n + 1]) for n in range(len(steps))]


def _empty(key: str, saved: STORAGE_TYPES) -> torch.Tensor | None:
    if not isinstance(saved, TensorStorageMetadata):
        return None
    return new_tensor(dtype_name(saved.properties.dtype, key), tuple(saved.size))


def flatten_sharded_tensors(state_dict: STATE_DICT_TYPE) -> STATE_DICT_TYPE:
    """The state, with each ShardedTensor that only wraps another sharded tensor replaced by the inner one.

    FSDP1 over tensor parallelism makes such tensors: one local shard, which is itself a ShardedTensor.
    """
    return {key: _unwrapped(value) for key, value in state_dict.items()}


def _unwrapped(value: Any) -> Any:
    if not is_sharded_tensor(value) or len(value.local_shards()) != 1:
        return value
    from torch.distributed.checkpoint._sharded_tensor_utils import (  # noqa: PLC0415
        _flatten_sharded_tensors,
    )

    return _flatten_sharded_tensors({"it": value})["it"]
