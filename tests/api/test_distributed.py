"""Real gloo ranks: everything that a training job passes, saved by N ranks and loaded by M others, exactly."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.distributed.tensor.placement_types import _StridedShard

import milepost
from tests.ranks import spawn


class Net(nn.Module):
    def __init__(self, width: int = 12) -> None:
        super().__init__()
        self.up = nn.Linear(width, 4 * width)
        self.down = nn.Linear(4 * width, width)
        self.norm = nn.LayerNorm(width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.norm(x + self.down(torch.relu(self.up(x))))


def full(value: Any) -> Any:
    return value.full_tensor() if isinstance(value, DTensor) else value


def snapshot(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    found = {f"model.{k}": full(v).detach().clone() for k, v in model.state_dict().items()}
    for i, slots in optimizer.state_dict()["state"].items():
        found.update({f"optim.{i}.{k}": full(v).clone() for k, v in slots.items()})
    return found


def build(world: int, kind: str) -> tuple[nn.Module, torch.optim.Optimizer]:
    torch.manual_seed(world)  # other initial values on another number of ranks: what is equal later was loaded
    model = Net()
    if kind == "tp_fsdp" and world > 1:
        mesh = init_device_mesh("cpu", (world // 2, 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], {"up": ColwiseParallel(), "down": RowwiseParallel()})
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "hsdp" and world > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (2, world // 2), mesh_dim_names=("rep", "shard")))
    elif kind != "plain":
        fully_shard(model, mesh=init_device_mesh("cpu", (world,)))
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def train(rank: int, kind: str, where: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(dist.get_world_size(), kind)
    for step in range(2):
        torch.manual_seed(step)
        model(torch.randn(6, 12)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    milepost.save({"model": model, "optim": optimizer, "step": 2}, where)
    return snapshot(model, optimizer)


def resume(rank: int, kind: str, where: str) -> dict[str, torch.Tensor]:
    model, optimizer = build(dist.get_world_size(), kind)
    state = {"model": model, "optim": optimizer, "step": 0}
    milepost.load(state, where)
    assert state["step"] == 2
    loaded = snapshot(model, optimizer)
    # The optimizer goes on: its new state is really its own.
    model(torch.randn(6, 12)).square().mean().backward()
    optimizer.step()
    return loaded


def assert_same(saved: dict[str, torch.Tensor], loaded: dict[str, torch.Tensor]) -> None:
    assert saved.keys() == loaded.keys()
    for key, tensor in saved.items():
        assert torch.equal(tensor, loaded[key]), key


@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "ranks", "onto"),
    [
        ("fsdp", 4, [("fsdp", 2), ("fsdp", 3), ("tp_fsdp", 4)]),
        ("fsdp", 3, [("hsdp", 4), ("plain", 1)]),
        ("tp_fsdp", 4, [("fsdp", 3), ("tp_fsdp", 2), ("plain", 2)]),
        ("hsdp", 4, [("fsdp", 4), ("plain", 1)]),
        ("plain", 1, [("fsdp", 2), ("tp_fsdp", 4)]),
    ],
)
def test_a_training_job_goes_on_exactly_on_other_ranks_and_meshes(tmp_path, kind, ranks, onto):
    saved = spawn(ranks, train, kind, str(tmp_path))[0]
    for other, count in onto:
        for loaded in spawn(count, resume, other, str(tmp_path)):
            assert_same(saved, loaded)
    assert milepost.open(tmp_path).verify().ok


LAYOUTS = {
    # name: mesh shape, placements
    "strided": ((2, 2), (_StridedShard(0, split_factor=2), Shard(0))),
    "pieces": ((4,), (_StridedShard(0, split_factor=3),)),
    "both dims": ((2, 2), (Shard(0), Shard(1))),
    "twice": ((2, 2), (Shard(1), Shard(1))),
    "replicated": ((2, 2), (Replicate(), Shard(0))),
    "cube": ((2, 1, 2), (Shard(0), Replicate(), Shard(1))),
    "one of three": ((4,), (Shard(1),)),
}


def tensors(world: int) -> dict[str, torch.Tensor]:
    return {
        "odd": torch.arange(7 * 5, dtype=torch.float32).view(7, 5),
        "short": torch.arange(2 * 9, dtype=torch.int64).view(2, 9),
        "even": torch.arange(8 * 4 * 3, dtype=torch.bfloat16).view(8, 4, 3),
        "large": torch.arange(1 << 20, dtype=torch.float32).view(1024, 1024),
    }


def place(name: str) -> dict[str, DTensor]:
    shape, placements = LAYOUTS[name]
    mesh = init_device_mesh("cpu", shape)
    return {k: distribute_tensor(t, mesh, placements, src_data_rank=None) for k, t in tensors(4).items()}


def save_layouts(rank: int, folder: str) -> None:
    for name in LAYOUTS:
        milepost.save(place(name), f"{folder}/{name}")


def load_layouts(rank: int, folder: str) -> None:
    expected = tensors(4)
    for saved in LAYOUTS:
        for name in LAYOUTS:
            target = {
                k: DTensor.from_local(
                    torch.zeros_like(v.to_local()), v.device_mesh, v.placements, shape=v.shape, stride=v.stride()
                )
                for k, v in place(name).items()
            }
            milepost.load(target, f"{folder}/{saved}")
            for key, wanted in place(name).items():
                assert torch.equal(target[key].to_local(), wanted.to_local()), (saved, name, key)
        plain = {k: torch.zeros_like(v) for k, v in expected.items()}
        milepost.load(plain, f"{folder}/{saved}")
        assert all(torch.equal(plain[k], expected[k]) for k in expected), saved


@pytest.mark.slow
def test_dtensors_of_every_layout_load_onto_every_other(tmp_path):
    spawn(4, save_layouts, str(tmp_path))
    spawn(4, load_layouts, str(tmp_path))
    sizes = [f.stat().st_size for f in sorted((tmp_path / "replicated" / "data").rglob("*.safetensors"))]
    assert len(sizes) == 4
    assert max(sizes) < 1.05 * min(sizes), "replicas share the work"
    assert sum(sizes) < 4.3 * (1 << 20), "no byte is written twice"


def uneven_work(rank: int, where: str) -> None:
    """Submeshes, plain tensors that only some ranks have, and tied weights on two pipeline stages."""
    stage = rank // 2
    pair = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))["dp"]
    weight = torch.arange(10.0) + stage
    shared = torch.arange(6.0).view(2, 3)
    state = {
        f"stage{stage}": {"w": distribute_tensor(weight, pair, [Shard(0)], src_data_rank=None)},
        "tied": distribute_tensor(shared, pair, [Shard(0)], src_data_rank=None),
        "everywhere": torch.ones(3),
    }
    if rank == 3:
        state["only here"] = torch.full((4,), 3.0)
    milepost.save(state, where)


@pytest.mark.slow
def test_pipeline_stages_and_submeshes_make_one_checkpoint(tmp_path):
    spawn(4, uneven_work, str(tmp_path))
    with milepost.open(tmp_path) as checkpoint:
        state = checkpoint.state()
        assert checkpoint.verify().ok
    assert list(state) == ["stage0", "tied", "everywhere", "stage1", "only here"]
    assert torch.equal(state["stage1"]["w"], torch.arange(10.0) + 1)
    assert torch.equal(state["tied"], torch.arange(6.0).view(2, 3))
    assert torch.equal(state["only here"], torch.full((4,), 3.0))


def partial_work(rank: int, where: str) -> None:
    mesh = init_device_mesh("cpu", (2,))
    terms = DTensor.from_local(torch.full((3,), float(rank + 1)), mesh, [Partial()])
    with pytest.raises(milepost.InvalidState, match=r"'sum' is a DTensor with the placements .*reduce_partial"):
        milepost.save({"sum": terms}, where)
    milepost.save({"sum": terms}, where, reduce_partial=True)


@pytest.mark.slow
def test_partial_dtensors_are_refused_or_reduced_when_asked(tmp_path):
    spawn(2, partial_work, str(tmp_path))
    assert milepost.open(tmp_path)["sum"].read().tolist() == [3.0, 3.0, 3.0]


def fsdp1_work(rank: int, where: str, onto: str) -> None:
    from torch.distributed._shard.sharded_tensor import init_from_local_shards
    from torch.distributed._shard.sharded_tensor.shard import Shard as LocalShard

    rows = [slice(0, 3), slice(3, 5)][rank]
    data = torch.arange(15.0).view(5, 3)[rows].clone()
    shard = LocalShard.from_tensor_and_offsets(data, [rows.start, 0], rank)
    sharded = init_from_local_shards([shard], 5, 3)
    milepost.save({"w": sharded}, where)
    data.zero_()
    milepost.load({"w": sharded}, where)
    assert torch.equal(data, torch.arange(15.0).view(5, 3)[rows])
    mesh = init_device_mesh("cpu", (2,))
    target = {"w": distribute_tensor(torch.zeros(5, 3), mesh, [Shard(1)], src_data_rank=None)}
    milepost.load(target, where)
    assert torch.equal(target["w"].full_tensor(), torch.arange(15.0).view(5, 3))


@pytest.mark.slow
def test_sharded_tensors_of_fsdp1_are_saved_and_resharded(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        spawn(2, fsdp1_work, str(tmp_path / "a"), str(tmp_path / "b"))


def meta_work(rank: int, where: str) -> None:
    model = build(2, "fsdp")[0]
    milepost.save({"model": model}, where)
    with torch.device("meta"):
        blank = Net()
    fully_shard(blank, mesh=init_device_mesh("cpu", (2,)))
    milepost.load({"model": blank}, where)
    assert_same(
        {k: full(v) for k, v in model.state_dict().items()}, {k: full(v) for k, v in blank.state_dict().items()}
    )
    assert all(not p.is_meta and p.requires_grad for p in blank.parameters())
    blank(torch.randn(2, 12)).sum().backward()


@pytest.mark.slow
def test_a_sharded_model_on_the_meta_device_gets_memory(tmp_path):
    spawn(2, meta_work, str(tmp_path))


def subgroup_work(rank: int, where: str) -> None:
    group = dist.new_group([1, 2])
    if rank in (1, 2):
        mesh = torch.distributed.device_mesh.DeviceMesh("cpu", [1, 2])
        value = DTensor.from_local(torch.full((2,), float(rank)), mesh, [Shard(0)])
        receipt = milepost.save({"v": value}, where, process_group=group)
        assert receipt.world == 2


@pytest.mark.slow
def test_a_subgroup_saves_without_the_others(tmp_path):
    spawn(3, subgroup_work, str(tmp_path))
    assert milepost.open(Path(tmp_path))["v"].read().tolist() == [1.0, 1.0, 2.0, 2.0]
