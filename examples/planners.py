"""Five ways to extend a save or load by a planner. Each is a class of a few lines; `python examples/planners.py` runs them all.

On several ranks: `torchrun --nproc-per-node 3 examples/planners.py`.
"""

import tempfile
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

import milepost
from milepost.planning import Metadata, SavePlan, StorageMeta, WriteItem, WriteItemType

# 1. Rename keys: change the state that the default planner sees.


class Prefixed(milepost.planning.DefaultSavePlanner):
    """Saves everything below another name."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        """Put the prefix in front."""
        renamed = {self.prefix + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, storage_meta, is_coordinator)


class Unprefixed(milepost.planning.DefaultLoadPlanner):
    """Loads what `Prefixed` saved into a state without the prefix."""

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self.prefix = prefix

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """Look for the names in the checkpoint, and hand over under those of the state."""
        self.mine = state_dict
        renamed = {self.prefix + key: value for key, value in state_dict.items()}
        super().set_up_planner(renamed, metadata, is_coordinator)

    def load_bytes(self, read_item: milepost.planning.ReadItem, value: Any) -> None:
        """Values are set in the renamed dict; take them over."""
        super().load_bytes(read_item, value)
        for key in self.mine:
            self.mine[key] = self.original_state_dict[self.prefix + key]


# 2. Another precision: the plan and the data say the same.


class Half(milepost.planning.DefaultSavePlanner):
    """Saves floating-point tensors as float16."""

    def create_local_plan(self) -> SavePlan:
        """Plan float16 where a tensor has more."""
        plan = super().create_local_plan()
        return replace(plan, items=[self._halved(item) for item in plan.items])

    @staticmethod
    def _halved(item: WriteItem) -> WriteItem:
        data = item.tensor_data
        if data is None or not data.properties.dtype.is_floating_point:
            return item
        return replace(item, tensor_data=replace(data, properties=replace(data.properties, dtype=torch.float16)))

    def transform_object(self, write_item: WriteItem, object: Any) -> Any:  # noqa: A002
        """Convert when the data is written."""
        found = super().transform_object(write_item, object)
        return found if write_item.tensor_data is None else found.to(write_item.tensor_data.properties.dtype)


# 3. A decision over all ranks: who writes what.


class RoundRobin(milepost.planning.DefaultSavePlanner):
    """Deals replicated tensors out to the ranks of a DDP job, one after the other."""

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Keep each whole tensor in one plan only; sharded ones stay where they are."""
        world, turn = len(all_plans), {}
        for item in all_plans[0].items:
            if item.type is not WriteItemType.SHARD:
                turn[item.index] = len(turn) % world
        dealt = [
            replace(plan, items=[item for item in plan.items if turn.get(item.index, rank) == rank])
            for rank, plan in enumerate(all_plans)
        ]
        return super().create_global_plan(dealt)


# 4. Data of every rank in the metadata of the checkpoint.


class WithNotes(milepost.planning.DefaultSavePlanner):
    """Keeps a note of each rank with the checkpoint: `FileSystemReader(path).read_metadata().planner_data`."""

    def __init__(self, note: dict[str, Any]) -> None:
        super().__init__(flatten_state_dict=False)
        self.note = note

    def create_local_plan(self) -> SavePlan:
        """Send the note along."""
        return replace(super().create_local_plan(), planner_data=self.note)

    def create_global_plan(self, all_plans: list[SavePlan]) -> tuple[list[SavePlan], Metadata]:
        """Bring the notes together."""
        plans, metadata = super().create_global_plan(all_plans)
        return plans, replace(metadata, planner_data=[plan.planner_data for plan in all_plans])


# 5. A model without memory: give it some, only on this rank's device, only for what is there.


class Materialising(milepost.planning.DefaultLoadPlanner):
    """Loads a model that was made on the meta device, and remembers which tensors it gave memory to."""

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        """The default planner gives memory to every tensor that has none."""
        flat = {key: value for key, value in state_dict.items() if isinstance(value, torch.Tensor)}
        self.made = sorted(key for key, value in flat.items() if value.is_meta)
        super().set_up_planner(state_dict, metadata, is_coordinator)


def run(folder: str) -> dict[str, Any]:
    """All five, on every rank of the job; gives what to look at."""
    rank = dist.get_rank() if dist.is_initialized() else 0
    state = {"weight": torch.arange(6.0), "bias": torch.ones(2), "step": 3}
    blank = {"weight": torch.zeros(6), "bias": torch.zeros(2), "step": 0}

    milepost.save(state, f"{folder}/renamed", planner=Prefixed("ema_"))
    renamed = milepost.load(dict(blank), f"{folder}/renamed", planner=Unprefixed("ema_"))

    milepost.save(state, f"{folder}/half", planner=Half())
    half = milepost.open(f"{folder}/half").tensors["weight"].dtype_name

    milepost.save(state, f"{folder}/dealt", planner=RoundRobin())
    writers = len(milepost.open(f"{folder}/dealt").manifest.files)

    milepost.save(state, f"{folder}/notes", planner=WithNotes({"rank": rank, "seen": 100 * rank}))
    notes = milepost.planning.CheckpointReader(f"{folder}/notes").read_metadata().planner_data

    with torch.device("meta"):
        model = torch.nn.Linear(3, 2, bias=False)
    target = dict(model.state_dict())
    milepost.save({"weight": torch.arange(6.0).view(2, 3)}, f"{folder}/model")
    planner = Materialising()
    milepost.load(target, f"{folder}/model", planner=planner)
    model.load_state_dict(target, assign=True)
    return {
        "keys": list(milepost.open(f"{folder}/renamed")),
        "renamed": {key: getattr(value, "tolist", lambda value=value: value)() for key, value in renamed.items()},
        "half": half,
        "writers": writers,
        "notes": notes,
        "made": planner.made,
        "model": model.weight.tolist(),
    }


if __name__ == "__main__":
    if dist.is_torchelastic_launched():
        dist.init_process_group("gloo")
        place = [tempfile.mkdtemp()]
        dist.broadcast_object_list(place)
        found = run(place[0])
    else:
        found = run(tempfile.mkdtemp())
    print("\n".join(f"{name}: {value}" for name, value in found.items()))
