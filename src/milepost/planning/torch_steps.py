"""The steps of a writer of Milepost's that torch's own functions call, with torch's records."""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch.distributed as dist
from torch.futures import Future

from milepost.planning.manifest_bridge import Goal
from milepost.planning.records import SavePlan
from milepost.planning.torch_planners import AdaptedSavePlanner
from milepost.planning.torch_records import ours, theirs


@dataclasses.dataclass(slots=True)
class PlannedGoal:
    """What a save aims at, in the plan that torch's planner holds. It notes that it was written to.

    The planner may keep the plan for later saves, and this with it: a goal that was used is one of an earlier save.
    """

    goal: Goal
    used: bool = False


class StepsForTorch:
    """The steps of the writer `inner` with torch's records.

    Torch's planner may keep plans between saves, with the goal of an old save in them. So the coordinator also puts the
    new goal into the job's store, before it sends plans. If two saves to one place run at once, `finish` notices.
    """

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        self._goal: Goal | None = None

    @property
    def path(self) -> str:
        """Where it writes."""
        return str(self.inner.url)

    def prepare_local_plan(self, plan: Any) -> Any:
        """Nothing to add."""
        return plan

    def prepare_global_plan(self, plans: list[Any]) -> list[Any]:
        """Tell each rank under which name to write."""
        prepared = self.inner.prepare_global_plan(ours(plans))
        self._goal = prepared[0].storage_data
        if dist.is_initialized() and self._goal is not None:
            store = _job_store()
            store.set(self._note, f"{self._goal.generation} {self._goal.save_id}")
            store.get(self._note)  # the store answers in order: now it is there, and no rank reads the one before
        wrapped = [dataclasses.replace(plan, storage_data=PlannedGoal(plan.storage_data)) for plan in prepared]
        found: list[Any] = theirs(wrapped)
        return found

    @property
    def _note(self) -> str:
        return f"milepost/goal/{self.path}"

    def write_data(self, plan: Any, planner: Any) -> Future[list[Any]]:
        """Write this rank's shard file."""
        mine: SavePlan = ours(plan)
        planned = mine.storage_data
        if isinstance(planned, PlannedGoal):
            goal = planned.goal
            if planned.used:
                goal = dataclasses.replace(self._goal or self._announced(), rank=goal.rank)
            planned.used = True
            mine = dataclasses.replace(mine, storage_data=goal)
        return then(self.inner.write_data(mine, AdaptedSavePlanner(planner)), theirs)

    def _announced(self) -> Goal:
        """The goal of this save, as the coordinator put it into the job's store."""
        generation, save_id = _job_store().get(self._note).decode().split()
        return Goal(int(generation), save_id, 0)

    def finish(self, metadata: Any, results: list[list[Any]]) -> None:
        """Commit."""
        self.inner.finish(ours(metadata), ours(results))


def then(future: Future[Any], convert: Callable[[Any], Any]) -> Future[Any]:
    """A future of the converted result, which is waited for."""
    done: Future[Any] = Future()
    done.set_result(convert(future.wait()))
    return done


def _job_store() -> Any:
    return dist.distributed_c10d._get_default_store()  # noqa: SLF001
