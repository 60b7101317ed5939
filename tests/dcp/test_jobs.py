"""Training jobs that were written for DCP run with only the import changed, and do the same as with torch's."""

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from tests.dcp.programs import run_both, run_ours
from tests.ranks import spawn


class Net(nn.Module):
    def __init__(self, width=12):
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x):
        return self.norm(x + self.down(torch.relu(self.up(x))))


def whole(state):
    """A nested state with whole tensors, for comparisons."""
    if isinstance(state, dict):
        return {key: whole(value) for key, value in state.items()}
    if isinstance(state, DTensor):
        return state.full_tensor().detach().clone().tolist()
    return state.detach().clone().tolist() if isinstance(state, torch.Tensor) else state


def step(model, optimizer):
    torch.manual_seed(7)
    optimizer.zero_grad()
    model(torch.randn(4, 12)).square().mean().backward()
    optimizer.step()


def new_fsdp(seed):
    torch.manual_seed(seed)
    model = Net()
    for layer in (model.up, model.down):
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def fsdp_saves(dcp, rank, folder):
    model, optimizer = new_fsdp(1)
    for _ in range(2):
        step(model, optimizer)
    model_state, optim_state = dcp.state_dict.get_state_dict(model, optimizer)
    dcp.save({"model": model_state, "optim": optim_state, "step": 2}, checkpoint_id=folder / "job")
    return whole({"model": model_state, "optim": optim_state["state"]})


def fsdp_resumes(dcp, rank, folder):
    model, optimizer = new_fsdp(2)
    model_state, optim_state = dcp.state_dict.get_state_dict(model, optimizer)
    state = {"model": model_state, "optim": optim_state, "step": 0}
    dcp.load(state, checkpoint_id=folder / "job")
    dcp.state_dict.set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
    found = whole(
        {"model": model.state_dict(), "optim": dcp.state_dict.get_optimizer_state_dict(model, optimizer)["state"]}
    )
    step(model, optimizer)
    return state["step"], found, whole(model.state_dict())


@pytest.mark.slow
@pytest.mark.parametrize("world", [1, 3])
def test_fsdp2_resumes_on_another_number_of_ranks(tmp_path, world):
    saved = spawn(2, run_both, fsdp_saves, tmp_path)
    resumed = spawn(world, run_both, fsdp_resumes, tmp_path)
    for ours, theirs in resumed:
        assert ours == theirs, "the next step too"
        assert ours[:2] == (2, saved[0][0])


class AppState:
    """As torch's tutorial has it, without a base class: duck typing decides."""

    def __init__(self, dcp, model, optimizer=None):
        self.dcp, self.model, self.optimizer = dcp, model, optimizer
        self.loaded = 0

    def state_dict(self):
        model, optim = self.dcp.state_dict.get_state_dict(self.model, self.optimizer)
        return {"model": model, "optim": optim}

    def load_state_dict(self, state_dict):
        self.loaded += 1
        self.dcp.state_dict.set_state_dict(
            self.model, self.optimizer, model_state_dict=state_dict["model"], optim_state_dict=state_dict["optim"]
        )


def stateful(dcp, rank, folder):
    model, optimizer = new_fsdp(1)
    step(model, optimizer)
    dcp.save({"app": AppState(dcp, model, optimizer)}, checkpoint_id=folder / "app")
    expected = whole(model.state_dict())
    other, other_optimizer = new_fsdp(5)
    app = AppState(dcp, other, other_optimizer)
    dcp.load({"app": app}, checkpoint_id=folder / "app")
    assert app.loaded == 1
    assert whole(other.state_dict()) == expected
    return expected


@pytest.mark.slow
def test_the_app_state_of_the_tutorial_is_saved_and_loaded(tmp_path):
    for ours, theirs in spawn(2, run_both, stateful, tmp_path):
        assert ours == theirs


def ddp(dcp, rank, folder):
    torch.manual_seed(1)
    model = DistributedDataParallel(Net())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    step(model, optimizer)
    metadata = dcp.save({"model": model.state_dict(), "optim": optimizer.state_dict()}, checkpoint_id=folder / "ddp")
    torch.manual_seed(9)
    other = DistributedDataParallel(Net())
    state = {"model": other.state_dict()}
    dcp.load(state, checkpoint_id=folder / "ddp")
    other.load_state_dict(state["model"])
    assert whole(other.state_dict()) == whole(model.state_dict())
    return sorted(metadata.state_dict_metadata), whole(other.state_dict())


@pytest.mark.slow
def test_ddp_saves_and_loads(tmp_path):
    for ours, theirs in spawn(2, run_both, ddp, tmp_path):
        assert ours == theirs


def new_tp(seed):
    torch.manual_seed(seed)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    return parallelize_module(Net(), mesh, {"up": ColwiseParallel(), "down": RowwiseParallel()})


def tp_saves(dcp, rank, folder):
    model = new_tp(1)
    dcp.save({"model": model.state_dict()}, storage_writer=dcp.FileSystemWriter(folder / "tp", thread_count=2))
    return whole(model.state_dict())


def tp_loads(dcp, rank, folder):
    model = new_tp(2)
    state = model.state_dict()
    dcp.load({"model": state}, storage_reader=dcp.FileSystemReader(folder / "tp"))
    model.load_state_dict(state)
    return whole(model.state_dict())


@pytest.mark.slow
def test_tensor_parallel_modules_are_resharded(tmp_path):
    saved = spawn(2, run_both, tp_saves, tmp_path)
    for ours, theirs in spawn(3, run_both, tp_loads, tmp_path):
        assert ours == theirs == saved[0][0]


def stages(dcp, rank, folder):
    """Pipeline stages: other keys on each rank; a value that differs; a stateful object on one rank only."""
    state = {f"stage{rank}": {"w": torch.full((3,), float(rank))}, "who": rank, "same": "x"}
    dcp.save(state, checkpoint_id=folder / "stages")
    target = {f"stage{1 - rank}": {"w": torch.zeros(3)}, "who": -1, "same": ""}
    dcp.load(target, checkpoint_id=folder / "stages")
    return whole(target)


@pytest.mark.slow
def test_ranks_may_have_other_keys_and_of_differing_values_one_is_kept(tmp_path):
    outcomes = spawn(2, run_both, stages, tmp_path)
    for rank, results in enumerate(outcomes):
        for found in results:
            assert found.pop("who") in (0, 1)
            assert found == {f"stage{1 - rank}": {"w": [1.0 - rank] * 3}, "same": "x"}


def layouts(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    value = torch.arange(30.0).view(5, 6)
    saved = {"w": distribute_tensor(value, mesh, [Shard(0)]), "r": distribute_tensor(value, mesh, [Replicate()])}
    metadata = dcp.save(saved, checkpoint_id=folder / "cut", storage_writer=dcp.FileSystemWriter(folder / "elsewhere"))
    target = {"w": distribute_tensor(torch.zeros(5, 6), mesh, [Shard(1)]), "r": torch.zeros(5, 6)}
    dcp.load(target, checkpoint_id=folder / "cut")
    chunks = [(tuple(c.offsets), tuple(c.sizes)) for c in metadata.state_dict_metadata["w"].chunks]
    return whole(target), chunks, (folder / "elsewhere").exists() and any((folder / "elsewhere").iterdir())


@pytest.mark.slow
def test_shards_load_into_other_shards_and_every_rank_gets_the_metadata(tmp_path):
    for ours, theirs in spawn(2, run_both, layouts, tmp_path):
        assert ours == theirs
        assert ours[1] == [((0, 0), (3, 6)), ((3, 0), (2, 6))]


def groups(dcp, rank, folder):
    """Two groups save at the same time, each to its own place; then one rank alone."""
    pairs = [dist.new_group([0, 1]), dist.new_group([2, 3])]
    mine = pairs[rank // 2]
    place = folder / f"pair{rank // 2}"
    dcp.save({"rank": torch.tensor([rank // 2])}, checkpoint_id=place, process_group=mine)
    target = {"rank": torch.tensor([-1])}
    dcp.load(target, checkpoint_id=place, process_group=mine)
    alone = {"rank": torch.tensor([rank])}
    dcp.save(alone, checkpoint_id=folder / f"alone{rank}", no_dist=True)
    dcp.load(alone, checkpoint_id=folder / f"alone{rank}", no_dist=True)
    return whole(target), whole(alone)


@pytest.mark.slow
def test_groups_and_single_ranks_save_by_themselves(tmp_path):
    for rank, (ours, theirs) in enumerate(spawn(4, run_both, groups, tmp_path)):
        assert ours == theirs == ({"rank": [rank // 2]}, {"rank": [rank]})


def coordinator(dcp, rank, folder):
    seen = []

    class Planner(dcp.DefaultSavePlanner):
        def create_global_plan(self, all_plans):
            seen.append((self.is_coordinator, len(all_plans)))
            return super().create_global_plan(all_plans)

    state = {"w": torch.full((4,), 1.0)}
    writer, reader = dcp.FileSystemWriter(folder / "old"), dcp.FileSystemReader(folder / "old")
    dcp.save_state_dict(state, writer, coordinator_rank=1, planner=Planner())
    target = {"w": torch.zeros(4)}
    dcp.load_state_dict(target, reader, coordinator_rank=1)
    return seen, whole(target)


def test_the_older_functions_let_another_rank_decide(tmp_path):
    outcomes = spawn(2, run_both, coordinator, tmp_path)
    assert (
        [o[0] for o in outcomes]
        == [o[1] for o in outcomes]
        == [([], {"w": [1.0] * 4}), ([(True, 2)], {"w": [1.0] * 4})]
    )


def checkpointer(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    kept = dcp._checkpointer._Checkpointer(
        dcp.FileSystemWriter(folder), dcp.FileSystemReader(folder), coordinator_rank=1
    )
    for number in range(2):
        kept.save({"w": distribute_tensor(torch.full((4,), float(number)), mesh, [Shard(0)]), "n": number})
    target = {"w": distribute_tensor(torch.zeros(4), mesh, [Shard(0)]), "n": -1}
    kept.load(target)
    kept.async_save({"n": 5}).result()
    again = {"n": 0}
    kept.load(again)
    return whole(target), again


@pytest.mark.slow
def test_a_checkpointer_saves_and_loads_again_and_again(tmp_path):
    """Torch's own raises TypeError in its `save`."""
    assert spawn(2, run_ours, checkpointer, tmp_path) == [({"w": [1.0] * 4, "n": 1}, {"n": 5})] * 2


def broadcasting(dcp, rank, folder):
    file = folder / "model.pt"
    if rank == 0:
        torch.save({"w": torch.arange(6.0), "deep": {"b": torch.ones(2)}}, file)
    dist.barrier()
    mesh = init_device_mesh("cpu", (2,))
    target = {"w": distribute_tensor(torch.zeros(6), mesh, [Shard(0)]), "deep": {"b": torch.zeros(2)}}
    formats = dcp.format_utils
    # The file has whole tensors, and torch's reader wants them so.
    target["w"] = torch.zeros(6)
    dcp.load(
        target,
        storage_reader=formats.BroadcastingTorchSaveReader(),
        planner=formats.DynamicMetaLoadPlanner(),
        checkpoint_id=file,
    )
    return whole(target)


@pytest.mark.slow
def test_a_torch_save_file_is_read_by_one_rank_and_sent_to_all(tmp_path):
    for ours, theirs in spawn(2, run_both, broadcasting, tmp_path):
        assert ours == theirs == {"w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "deep": {"b": [1.0, 1.0]}}


def sharded_optimizer(dcp, rank, folder):
    """FSDP1's way: optimizer states come back as ShardedTensors."""
    state = {
        "model": {"w": torch.ones(4, 2)},
        "optim": {"state": {"w": {"exp_avg": torch.arange(8.0).view(4, 2), "n": 3}}},
    }
    dcp.save(state, checkpoint_id=folder)
    found = dcp.load_sharded_optimizer_state_dict({"w": torch.ones(4, 2)}, "optim", dcp.FileSystemReader(folder))
    slots = found["optim"]["state"]["w"]
    return slots["n"], [shard.tensor.tolist() for shard in slots["exp_avg"].local_shards()]


def test_sharded_optimizer_states_are_loaded(tmp_path):
    outcomes = spawn(2, run_both, sharded_optimizer, tmp_path)
    assert [ours for ours, _ in outcomes] == [theirs for _, theirs in outcomes]
    assert [ours for ours, _ in outcomes] == [(3, [[[0.0, 1.0], [2.0, 3.0]]]), (3, [[[4.0, 5.0], [6.0, 7.0]]])]


def hybrid(dcp, rank, folder):
    """Replicas of shards, saved by one of the replicas only, as torch's documentation says for HYBRID_SHARD."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicas", "shards"))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Replicate(), Shard(0)]), "n": 1}
    shards = mesh["shards"].get_group()
    if rank < 2:
        dcp.save(state, checkpoint_id=folder, process_group=shards)
    dist.barrier()
    target = {"w": distribute_tensor(torch.zeros(6), mesh, [Replicate(), Shard(0)]), "n": 0}
    dcp.load(target, checkpoint_id=folder)
    return whole(target)


@pytest.mark.slow
def test_one_of_several_replicas_saves_for_all(tmp_path):
    for ours, theirs in spawn(4, run_both, hybrid, tmp_path):
        assert ours == theirs == {"w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "n": 1}


def cut_alone(dcp, rank, folder):
    mesh = init_device_mesh("cpu", (2,))
    state = {"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "n": rank}
    try:
        dcp.save(state, checkpoint_id=folder / str(rank), no_dist=True)
    except dcp.CheckpointException as error:
        return str(error).splitlines()[-1]


@pytest.mark.slow
def test_a_rank_alone_cannot_save_a_part_of_a_tensor(tmp_path):
    """A checkpoint of Milepost holds whole tensors."""
    for text in spawn(2, run_ours, cut_alone, tmp_path):
        assert "'w'" in text


def fsdp1(dcp, rank, folder):
    """ShardedTensors of FSDP1."""
    from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType

    def made(seed):
        torch.manual_seed(seed)
        return FullyShardedDataParallel(Net(), device_id=torch.device("cpu"))

    def shards(state):
        return {k: [s.tensor.tolist() for s in v.local_shards()] for k, v in state.items()}

    model, other = made(1), made(2)
    with FullyShardedDataParallel.state_dict_type(model, StateDictType.SHARDED_STATE_DICT):
        saved = model.state_dict()
        dcp.save({"model": saved}, checkpoint_id=folder)
    with FullyShardedDataParallel.state_dict_type(other, StateDictType.SHARDED_STATE_DICT):
        state = {"model": other.state_dict()}
        dcp.load(state, checkpoint_id=folder)
        other.load_state_dict(state["model"])
        assert shards(other.state_dict()) == shards(saved)
    return shards(saved)


@pytest.mark.slow
def test_fsdp1_saves_and_loads(tmp_path):
    for ours, theirs in spawn(2, run_both, fsdp1, tmp_path):
        assert ours == theirs


def meta(dcp, rank, folder):
    """A state without memory gets it from the load."""
    mesh = init_device_mesh("cpu", (2,))
    dcp.save({"w": distribute_tensor(torch.arange(6.0), mesh, [Shard(0)]), "b": torch.ones(2)}, checkpoint_id=folder)
    empty = DTensor.from_local(torch.empty(3, device="meta"), mesh, [Shard(0)], run_check=False)
    target = {"w": empty, "b": torch.empty(2, device="meta")}
    dcp.load(target, checkpoint_id=folder)
    return whole(target)


@pytest.mark.slow
def test_tensors_on_the_meta_device_get_memory(tmp_path):
    for ours, theirs in spawn(2, run_both, meta, tmp_path):
        assert ours == theirs == {"w": [0.0, 1.0, 2.0, 3.0, 4.0, 5.0], "b": [1.0, 1.0]}
