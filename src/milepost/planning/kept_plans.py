"""The plans that a planner keeps between saves, and the names under which programs look for them.

In DCP, all planners of one class share one set of plans: two models, or two jobs in one process, take each other's.
Here each planner has its own, which go when it goes. The mappings on `SavePlanner` show them under DCP's names.
"""

import dataclasses
import uuid
from collections.abc import Iterator, MutableMapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar
from weakref import WeakValueDictionary

from milepost.planning.records import Metadata, SavePlan, WriteItem

T = TypeVar("T")


class SentPlan:
    """A local plan as it was sent. Its maker may change its items later, so a copy of what decides is taken."""

    def __init__(self, plan: SavePlan) -> None:
        self.plan = plan
        self.decides = fingerprint(plan), plan.planner_data

    def __eq__(self, other: object) -> bool:
        return isinstance(other, SentPlan) and self.decides == other.decides

    __hash__ = None  # type: ignore[assignment]


@dataclass
class KeptPlans:
    """What a planner keeps of its last save: its own plans and, on the coordinator, the plans of all ranks.

    `agreement` names the global plan that they belong to. Plans of different agreements do not go together.
    """

    local: SavePlan | None = None
    final: SavePlan | None = None
    all_plans: list[SavePlan] | None = None
    global_plan: list[SavePlan] | None = None
    metadata: Metadata | None = None
    agreement: str = ""
    _sent: SentPlan | None = None

    def keep_sent(self, sent: SentPlan) -> None:
        """Keep a local plan whose save has reached its final plan."""
        self.local, self._sent = sent.plan, sent

    def has(self, sent: SentPlan) -> bool:
        """Whether this is the local plan that is kept, with the final plan that belongs to it."""
        if self.local is None or self.final is None:
            return False
        if self._sent is None or self._sent.plan is not self.local:  # a program has put another plan there
            self._sent = SentPlan(self.local)
        return self._sent == sent

    def forget_own(self) -> None:
        """Drop this rank's own plans, so that the next local plan is sent whole."""
        self.local = self.final = self._sent = None


_KEPT: "WeakValueDictionary[str, KeptPlans]" = WeakValueDictionary()
"""The plans of all planners that live, by key."""


def new_key(name: str) -> str:
    """A key that no other planner has, here or in another process."""
    return f"{name}-{uuid.uuid4().hex}"


def kept_under(key: str) -> KeptPlans:
    """The plans under a key: those of a planner that has it, else empty ones."""
    return _KEPT.setdefault(key, KeptPlans())


class PlansByKey(MutableMapping[str, T]):
    """One kind of plan of every planner, by the planner's `_cached_plans_key`.

    Removing a plan makes its planner plan anew. Keys of planners that do not keep their plans here work as in a dict.
    """

    def __init__(self, kind: Literal["local", "final", "all_plans", "global_plan", "metadata"]) -> None:
        self._kind = kind
        self._others: dict[str, T] = {}

    def __getitem__(self, key: str) -> T:
        found: T | None = getattr(_KEPT.get(key), self._kind, None)
        return self._others[key] if found is None else found

    def __setitem__(self, key: str, value: T) -> None:
        kept = _KEPT.get(key)
        if kept is None:
            self._others[key] = value
        else:
            setattr(kept, self._kind, value)

    def __delitem__(self, key: str) -> None:
        if getattr(_KEPT.get(key), self._kind, None) is not None:
            setattr(_KEPT[key], self._kind, None)
        else:
            del self._others[key]

    def __iter__(self) -> Iterator[str]:
        own = [key for key, kept in list(_KEPT.items()) if getattr(kept, self._kind) is not None]
        return iter([*own, *self._others])

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return repr(dict(self))


# Plans that did not change


def compare_save_plans(plan: SavePlan, other_plan: SavePlan) -> bool:
    """Whether two plans write the same: the same items, with the same boxes, types and sizes."""
    return plan.usable == other_plan.usable and fingerprint(plan) == fingerprint(other_plan)


def fingerprint(plan: SavePlan) -> tuple[Any, ...]:
    """A copy of everything in a plan that decides what is written: the plan's maker may change its items later."""
    return tuple(
        (item.index.fqn, item.index.offset, item.index.index, item.type.name, item.bytes_io_data, _data(item))
        for item in plan.items
    )


def _data(item: WriteItem) -> tuple[Any, ...] | None:
    data = item.tensor_data
    if data is None:
        return None
    return (tuple(data.chunk.offsets), tuple(data.chunk.sizes), data.properties.dtype, tuple(data.size))


def contains_usable_plan(delta_plans: Sequence[SavePlan]) -> bool:
    """Whether any rank's plan has changed."""
    return any(plan.usable for plan in delta_plans)


def merge_delta_local_plans(cached_plans: Sequence[SavePlan], delta_plans: Sequence[SavePlan]) -> list[SavePlan]:
    """The plans of all ranks: the new plan of a rank where it changed, else its last one."""
    return [new if new.usable else renewed(cached, new) for cached, new in zip(cached_plans, delta_plans, strict=True)]


def renewed(cached: SavePlan, unchanged: SavePlan) -> SavePlan:
    """The last plan, with the storage data of this save: storage may write to another place now."""
    if unchanged.storage_data is None:
        return cached
    return dataclasses.replace(cached, storage_data=unchanged.storage_data)
