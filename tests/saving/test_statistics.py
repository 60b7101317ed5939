"""Statistics of what was saved: of any state, by any ranks, in any way of saving."""

import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost import planning
from milepost.core.layout import Grid
from milepost.core.ranks import unpack_ranks
from milepost.testing import run_ranks
from tests.background.saves import every_form, other_leaves
from tests.ranks import spawn
from tests.strategies import examples, grids, local_of, numbered, shapes, some_of, tilings
from tests.tensors import check_histogram, check_statistics, random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf", "ignore:torch.quantize")  # torch's own
DTYPES = ["bfloat16", "float16", "float32", "float64", "float8_e4m3fn", "int8", "int64", "uint8", "bool", "complex64"]


def check_all(place, *, histogram=False):
    """Each tensor of a checkpoint has statistics, and they are those of what a reader gets. Gives the keys."""
    with milepost.open(place) as checkpoint:
        kept = {t.key for t in checkpoint.manifest.tensors if not t.is_bytes and not t.dtype.startswith("float4")}
        found = checkpoint.statistics
        assert found.keys() == kept
        for key, one in found.items():
            assert one.key == key
            tensor = checkpoint.tensors[key].read()
            check_statistics(one, tensor)
            if histogram:
                check_histogram(one, tensor)
    return kept


def random_state():
    return {"forms": every_form(), **other_leaves(), "scalar": torch.tensor(math.nan), "none": torch.zeros(0, 3)}


@pytest.mark.parametrize("recording", [True, "histogram"])
def test_tensors_of_every_form(tmp_path, recording):
    milepost.save(random_state(), tmp_path, statistics=recording)
    check_all(tmp_path, histogram=recording == "histogram")
    assert milepost.open(tmp_path).health is None
    milepost.save(random_state(), tmp_path)
    assert milepost.open(tmp_path).statistics == {}


@pytest.mark.parametrize("background", ["thread", pytest.param("process", marks=pytest.mark.slow)])
def test_saves_in_the_background_of_a_state_that_changes(tmp_path, background):
    """Copied whole, and so large that a part is written from where it is, while the caller waits."""
    state = {"forms": random_state(), "w": torch.randn(300_000)}
    for name, room in (("whole", None), ("part", 200_000)):
        with milepost.AsyncSaver(background=background, staging_bytes=room) as saver:
            pending = saver.save(state, tmp_path / name, statistics=True)
            state["w"].fill_(math.nan)
            pending.result()
        check_all(tmp_path / name)
        assert milepost.open(tmp_path / name).statistics["w"].nan == 0
        state["w"].normal_()


def test_overlapped_copy_has_statistics_of_what_was_saved(tmp_path):
    model = torch.nn.Linear(300, 300)
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    model(torch.randn(2, 300)).sum().backward()
    with milepost.AsyncSaver(stage="overlap") as saver:
        pending = saver.save({"model": model}, tmp_path, optimizer=optimizer, statistics=True)
        optimizer.step()  # waits for the copy
        pending.result()
    check_all(tmp_path)


def test_memory_maps_composites_and_tied_tensors(tmp_path):
    mapped = np.memmap(tmp_path / "mapped", np.float32, "w+", shape=(1000, 3))
    mapped[:] = np.arange(3000).reshape(1000, 3)
    weight = torch.randn(50)
    state = {
        "mapped": mapped,
        "sparse": torch.eye(4).to_sparse() * math.inf,
        "quantized": torch.quantize_per_tensor(torch.randn(10), 0.1, 3, torch.qint8),
        "tied": [weight, weight],
        "bytes": bytes(100_000),
        "own": milepost.PerRank({"w": torch.full((3,), math.nan)}),
    }
    receipt = milepost.save(state, tmp_path / "a", statistics=True, healthy=True)
    kept = check_all(tmp_path / "a")
    assert {"mapped", "sparse.values", "quantized.values", "tied.0", "tied.1"} <= kept
    assert not any(key.startswith(("bytes", "own")) for key in kept)
    assert "4 infinite in 'sparse.values'" in receipt.health.reason, "of rank-private tensors nothing is known"


def test_stores_with_parts_and_small_memory(tmp_path):
    state = {"w": torch.randn(3_000_001), "b": torch.randn(1001).bfloat16(), "n": [torch.full((3,), 1.0)] * 50}
    store = milepost.store.MemoryStore(traits=milepost.store.Traits(part_bytes=1 << 20, requests=4))
    milepost.save(state, store, statistics="histogram", host_memory_bytes=64 << 10)
    check_all(store, histogram=True)


# ---- ranks


@st.composite
def cuts(draw, shape, world):
    """How a tensor is cut: for each rank the leaf that it passes, given all elements; None where it has none."""
    kind = draw(st.sampled_from(["grid", "grid", "boxes", "whole"]))
    if kind == "grid":
        grid = draw(grids(shape, range(world)))
        return lambda rank, whole: on_grid(whole, grid, rank)
    if kind == "boxes":
        owners = [(box, draw(some_of(range(world)))) for box in draw(tilings(shape)) if box.elements]
        return lambda rank, whole: milepost.Sharded(
            shape, {box.offset: whole[box.slices].clone() for box, ranks in owners if rank in ranks}, whole.dtype
        )
    holders = draw(some_of(range(world)))
    return lambda rank, whole: whole.clone() if rank in holders else None


def on_grid(whole: torch.Tensor, grid: Grid, rank: int):
    if rank not in unpack_ranks(grid.mesh.ranks):
        return None
    elements = local_of(numbered(tuple(whole.shape)), grid, rank)
    return milepost.Sharded.on_grid(tuple(whole.shape), whole.reshape(-1)[torch.from_numpy(elements)], grid, rank)


@examples(120)
@given(st.data(), st.integers(1, 6), st.sampled_from([True, "histogram"]))
def test_random_cuts_over_ranks_count_each_element_once(data, world, recording):
    tensors, leaves = {}, {}
    for key in "abcd":
        shape = data.draw(shapes(max_dims=3, max_size=9))
        dtype = data.draw(st.sampled_from(DTYPES))
        tensors[key] = random_tensor(dtype, *shape, seed=data.draw(st.integers(0, 99)))
        leaves[key] = data.draw(cuts(shape, world))
    store = milepost.store.MemoryStore()

    def work(comm):
        state = {key: leaf(comm.rank, tensors[key]) for key, leaf in leaves.items()}
        state = {key: value for key, value in state.items() if value is not None}
        milepost.save(state, store, process_group=comm, statistics=recording)
        return milepost.open(store).statistics

    found, *others = run_ranks(world, work)
    assert all(other == found for other in others)
    for key, one in found.items():
        check_statistics(one, tensors[key])
        if recording == "histogram":
            check_histogram(one, tensors[key])
    kept = {t.key for t in milepost.open(store).manifest.tensors}
    assert found.keys() == kept


def save_on_rank(rank, folder):
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (2, 2))
    torch.manual_seed(0)
    whole = torch.randn(301, 7)
    whole[300, 6], whole[0, 0] = math.inf, math.nan
    state = {
        "both": distribute_tensor(whole, mesh, [Shard(0), Shard(1)]),
        "replicated": distribute_tensor(whole, mesh, [Shard(0), Replicate()]),
        "plain": whole,
    }
    plans = milepost.Plans()
    for _ in range(2):  # and by the plan of before
        receipt = milepost.save(state, folder, statistics=rank == 0, healthy=rank == 0, plans=plans)
    state["more"] = distribute_tensor(whole, mesh, [Replicate(), Shard(0)])
    receipt = milepost.save(state, folder, statistics=rank == 0, healthy=rank == 0, plans=plans)
    return receipt.health.reason


def test_gloo_ranks_follow_the_coordinator_and_get_one_verdict(tmp_path):
    reasons = spawn(4, save_on_rank, str(tmp_path))
    assert len(set(reasons)) == 1
    assert reasons[0] == "4 NaN and 4 infinite in 'both', 'replicated', 'plain', 'more'"
    assert len(check_all(tmp_path)) == 4


def test_replicas_that_differ_have_the_statistics_of_the_saved_one():
    store = milepost.store.MemoryStore()

    def work(comm):
        state = {"w": torch.full((100,), float(comm.rank)), "even": torch.ones(5)}
        milepost.save(state, store, process_group=comm, statistics=True, on_difference="warn")

    with pytest.warns(RuntimeWarning, match="'w'"):
        run_ranks(3, work)
    check_all(store)
    assert milepost.open(store).statistics["w"].max == 0.0


# ---- planners


class Doubling(planning.DefaultSavePlanner):
    """Changes the data on its way."""

    def transform_object(self, write_item, item):
        return item * 2 if isinstance(item, torch.Tensor) else super().transform_object(write_item, item)


class Watching(planning.DefaultSavePlanner):
    """Needs the plans of all ranks."""

    def create_global_plan(self, plans):
        return super().create_global_plan(plans)


def test_planners_of_local_plans_record_what_they_write(tmp_path):
    state = {"w": torch.randn(100), "layers": [torch.randn(5), torch.randn(6)]}
    milepost.save(state, tmp_path / "a", planner=planning.DefaultSavePlanner(), statistics=True)
    assert check_all(tmp_path / "a") == {"w", "layers.0", "layers.1"}
    milepost.save(state, tmp_path / "b", planner=Doubling(), statistics=True)
    assert check_all(tmp_path / "b")


def test_planners_and_storage_of_global_plans_refuse_statistics(tmp_path):
    for wish in ({"statistics": True}, {"healthy": True}):
        with pytest.raises(milepost.InvalidRequest, match="planner or storage that needs the plans of all ranks"):
            milepost.save({"w": torch.ones(3)}, tmp_path, planner=Watching(), **wish)
    milepost.save({"w": torch.ones(3)}, tmp_path, planner=Watching(), statistics=False)
    milepost.dcp.save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    assert milepost.open(tmp_path).statistics == {}


# ---- what goes wrong


def test_too_large_a_manifest_is_no_reason_to_lose_a_save(tmp_path, monkeypatch):
    """Statistics are left out where there are too many tensors; the verdict stays."""
    monkeypatch.setattr("milepost.core.partial_statistics.MAX_TENSORS", 3)
    state = [torch.ones(2), torch.full((2,), math.nan), torch.ones(2), torch.ones(2)]
    receipt = milepost.save(state, tmp_path, statistics=True, healthy=True)
    assert receipt.health.reason == "2 NaN in '1'"
    assert milepost.open(tmp_path).statistics == {}


@pytest.mark.parametrize(
    "given", [{"statistics": "bins"}, {"statistics": 2}, {"healthy": "yes"}, {"healthy": None}, {"healthy": 1}]
)
def test_wrong_options_are_refused_by_name(tmp_path, given):
    [name] = given
    with pytest.raises(milepost.InvalidRequest, match=name):
        milepost.save({"w": torch.ones(1)}, tmp_path, **given)


def test_a_save_without_statistics_looks_at_nothing(tmp_path, monkeypatch):
    def refuse(*_):
        raise AssertionError("looked")

    monkeypatch.setattr("milepost.data.tally.Tally.add", refuse)
    milepost.save({"w": torch.ones(100)}, tmp_path)
    with pytest.raises(AssertionError, match="looked"):
        milepost.save({"w": torch.ones(100)}, tmp_path, healthy=True)
