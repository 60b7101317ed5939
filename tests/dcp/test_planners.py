"""Planners written for DCP: the examples of its documentation, and further ones."""

from dataclasses import replace
from itertools import zip_longest

import torch

import milepost.dcp
from milepost.planning.route import is_local
from tests.dcp.compare import both, plain
from tests.dcp.programs import run_both
from tests.ranks import spawn

# The examples of torch's documentation, as they stand there, with what it leaves undefined


def rename(dcp, rank, folder):
    class SaveRenamed(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta, is_coordinator):
            # prefix all keys with `foo_``
            super().set_up_planner({"foo_" + k: v for k, v in state_dict.items()}, storage_meta, is_coordinator)

    class LoadRenamed(dcp.DefaultLoadPlanner):
        def set_up_planner(self, state_dict, metadata, is_coordinator):
            self.original_state_dict = state_dict
            state_dict = {"foo_" + k: v for k, v in state_dict.items()}

            if self.flatten_sharded_tensors:
                state_dict = dcp._sharded_tensor_utils._flatten_sharded_tensors(state_dict)

            if self.flatten_state_dict:
                state_dict, self.mappings = dcp._nested_dict.flatten_state_dict(state_dict)

            self.state_dict = state_dict
            self.metadata = metadata
            self.is_coordinator = is_coordinator

        def load_bytes(self, read_item, value):
            # Remove the "foo_" prefix
            self.original_state_dict[read_item.dest_index.fqn[4:]] = torch.load(value, weights_only=False)

    metadata = dcp.save({"w": torch.arange(3.0), "n": (1, "x")}, checkpoint_id=folder, planner=SaveRenamed())
    target = {"w": torch.zeros(3), "n": None}
    dcp.load(target, checkpoint_id=folder, planner=LoadRenamed())
    return sorted(metadata.state_dict_metadata), plain(target)


def test_the_example_that_renames(tmp_path):
    assert both(rename, tmp_path) == (["foo_n", "foo_w"], {"w": ("torch.float32", [0, 1, 2]), "n": (1, "x")})


def fp16(dcp, rank, folder):
    class FP16Planner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            for p in plan.items:  # torch's example says `for p in plan`, which no version of it can do
                if p.tensor_data is not None:
                    p.tensor_data.properties.dtype = torch.float16
            return plan

        def resolve_data(self, write_item):
            item = super().resolve_data(write_item)
            return item if write_item.type == dcp.planner.WriteItemType.BYTE_IO else item.to(torch.float16)

    metadata = dcp.save({"w": torch.arange(3.0) / 3, "n": 1}, checkpoint_id=folder, planner=FP16Planner())
    target = {"w": torch.zeros(3), "n": 0}
    dcp.load(target, checkpoint_id=folder)
    return str(metadata.state_dict_metadata["w"].properties.dtype), plain(target)


def test_the_example_that_saves_in_half_precision(tmp_path):
    dtype, found = both(fp16, tmp_path)
    assert dtype == "torch.float16"
    assert found["w"][1][1] == torch.tensor(1 / 3, dtype=torch.float16).item()


def balanced(dcp, rank, folder):
    shares = []

    class DDPLoadBalancingPlanner(dcp.DefaultSavePlanner):
        # This uses the default local plan behavior of having all non-sharded writes in rank 0
        # This sample doesn't handle ShardedTensors
        def create_global_plan(self, all_plans):
            iters = [iter(all_plans[0].items)] * len(all_plans)
            items_per_rank = [
                [item for item in items if item is not None] for items in zip(*zip_longest(*iters), strict=True)
            ]
            all_plans = [replace(plan, items=items) for plan, items in zip(all_plans, items_per_rank, strict=True)]
            return super().create_global_plan(all_plans)

        def finish_plan(self, new_plan):
            shares.append([item.index.fqn for item in new_plan.items])
            return super().finish_plan(new_plan)

    state = {f"w{i}": torch.full((i + 1,), float(i)) for i in range(5)}
    dcp.save(state, checkpoint_id=folder, planner=DDPLoadBalancingPlanner())
    target = {k: torch.zeros_like(v) for k, v in state.items()}
    dcp.load(target, checkpoint_id=folder)
    return shares, plain(target)


def test_the_example_that_moves_work_between_ranks(tmp_path):
    outcomes = spawn(2, run_both, balanced, tmp_path)
    assert [ours for ours, _ in outcomes] == [theirs for _, theirs in outcomes]
    assert [ours[0] for ours, _ in outcomes] == [[["w0", "w2", "w4"]], [["w1", "w3"]]]


def extra_data(dcp, rank, folder):
    class SaveExtraDataPlanner(dcp.DefaultSavePlanner):
        def create_local_plan(self):
            plan = super().create_local_plan()
            return replace(plan, planner_data="per-rank-data")

        def create_global_plan(self, all_plans):
            global_plan, metadata = super().create_global_plan(all_plans)
            merged_data = [p.planner_data for p in global_plan]
            metadata = replace(metadata, planner_data=merged_data)
            return global_plan, metadata

    planner = SaveExtraDataPlanner(flatten_state_dict=False)
    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, planner=planner)
    return dcp.FileSystemReader(folder).read_metadata().planner_data


def test_the_example_that_keeps_data_of_its_own(tmp_path):
    assert both(extra_data, tmp_path) == ["per-rank-data"]


def materialise(dcp, rank, folder):
    class MetaModelMaterialize(dcp.DefaultLoadPlanner):  # torch's example says DefaultSavePlanner
        def resolve_tensor(self, read_item):
            tensor = super().resolve_tensor(read_item)
            return torch.empty_like(tensor, device="cpu")

        def commit_tensor(self, read_item, tensor):
            self.state_dict[read_item.dest_index.fqn] = tensor

    dcp.save({"w": torch.arange(3.0)}, checkpoint_id=folder)
    planner = MetaModelMaterialize(flatten_state_dict=False, flatten_sharded_tensors=False)
    target = {"w": torch.zeros(3)}
    dcp.load(target, checkpoint_id=folder, planner=planner)
    return plain(planner.state_dict)


def test_the_example_that_makes_its_own_tensors(tmp_path):
    assert both(materialise, tmp_path) == {"w": ("torch.float32", [0.0, 1.0, 2.0])}


# Further planners


def partial(dcp, rank, folder):
    dcp.save({"a": {"w": torch.ones(2), "n": 3}, "b": torch.ones(3)}, checkpoint_id=folder)
    some = {"a": {"n": 0}}
    dcp.load(some, checkpoint_id=folder)
    more = {"b": torch.zeros(3), "new": torch.full((2,), 7.0), "other": "kept"}
    dcp.load(more, checkpoint_id=folder, planner=dcp.DefaultLoadPlanner(allow_partial_load=True))
    keys = dcp.state_dict_loader._load_state_dict_from_keys("a", checkpoint_id=folder)
    everything = dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=folder)
    return plain(some), plain(more), plain(keys), plain(everything)


def test_parts_of_a_checkpoint_are_loaded(tmp_path):
    some, more, keys, everything = both(partial, tmp_path)
    assert some == {"a": {"n": 3}}
    assert more["new"] == ("torch.float32", [7.0, 7.0])
    assert keys == {"a": everything["a"]}


def caching(dcp, rank, folder):
    found = []
    planner = dcp.DefaultSavePlanner(enable_plan_caching=True)
    for number, state in enumerate(
        [{"w": torch.ones(2)}, {"w": torch.zeros(2)}, {"w": torch.ones(3), "v": torch.ones(1)}]
    ):
        dcp.save(state, checkpoint_id=folder / str(number), planner=planner)
        target = {k: torch.full_like(v, 9.0) for k, v in state.items()}
        dcp.load(target, checkpoint_id=folder / str(number))
        found.append(plain(target))
    return found


def test_cached_plans_notice_a_change(tmp_path):
    for ours, theirs in spawn(2, run_both, caching, tmp_path):
        assert ours == theirs


def torchs_caching(dcp, rank, folder):
    """Torch's planner, which caches, with our `save`."""
    import torch.distributed.checkpoint as torch_dcp

    dcp.DefaultSavePlanner = torch_dcp.DefaultSavePlanner
    return caching(dcp, rank, folder)


def test_cached_plans_of_torchs_planner_go_to_the_new_place(tmp_path):
    outcomes = spawn(2, run_both, torchs_caching, tmp_path)
    assert all(ours == theirs for ours, theirs in outcomes)


def old_style(dcp, rank, folder):
    class Old(dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, is_coordinator):
            super().set_up_planner(state_dict, None, is_coordinator)

    dcp.save({"w": torch.ones(2)}, checkpoint_id=folder, planner=Old())
    return plain(dcp.state_dict_loader._load_state_dict_from_keys(checkpoint_id=folder))


def test_the_usual_planner_and_writer_need_no_global_plan(tmp_path):
    class Renaming(milepost.dcp.DefaultSavePlanner):
        def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
            super().set_up_planner({f"x_{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)

        def finish_plan(self, new_plan):
            return super().finish_plan(new_plan)

    assert is_local(milepost.dcp.FileSystemWriter(tmp_path), milepost.dcp.DefaultSavePlanner())
    assert not is_local(milepost.dcp.FileSystemWriter(tmp_path), Renaming())


def test_planners_that_do_not_know_of_storage_meta_work(tmp_path):
    assert both(old_style, tmp_path) == {"w": ("torch.float32", [1.0, 1.0])}
