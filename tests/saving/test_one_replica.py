"""Replicas that differ, with `on_difference="warn"`: one of them is saved, whole, and the warning says whose."""

import itertools
import re
import warnings

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

import milepost
import milepost.dcp as dcp
from milepost.core.layout import Boxes, Grid
from milepost.core.ranks import unpack_ranks
from milepost.testing import TensorRow, run_ranks, simulate_save
from tests.ranks import spawn
from tests.strategies import examples, layouts, shapes

SAVED = re.compile(r"that of rank (\d+) was saved")


def signed(rank, shape):
    """A tensor whose every element says who holds it."""
    return torch.full(tuple(shape), float(rank))


def leaf(layout, shape, rank):
    """What `rank` passes for a tensor of this layout, filled with its number; None if it has no part of it."""
    if isinstance(layout, Grid):
        local = layout.local_shape(shape, rank)
        return None if local is None else milepost.Sharded.on_grid(shape, signed(rank, local), layout, rank)
    if isinstance(layout, Boxes):
        held = layout.held_by(shape, rank)
        parts = {h.box.offset: signed(rank, h.box.shape) for h in held}
        return milepost.Sharded(shape, parts) if parts else None
    return signed(rank, shape) if rank in unpack_ranks(layout.ranks) else None


def check_one_replica(layout, shape, whose):
    """`whose` has, for each element, the rank whose value was saved: one replica, that of the lowest rank."""
    if isinstance(layout, Grid):
        lowest = layout.mesh.coordinate(min(unpack_ranks(layout.mesh.ranks)))
        for rank in np.unique(whose).tolist():
            where = layout.mesh.coordinate(int(rank))
            differing = [axis for axis, (a, b) in enumerate(zip(where, lowest, strict=True)) if a != b]
            assert all(layout.cuts[axis] is not None for axis in differing), "of another replica"
        return
    if not isinstance(layout, Boxes):
        assert (whose == min(unpack_ranks(layout.ranks))).all()
        return
    held = [h for h in layout.held if h.box.elements]
    everywhere = set.intersection(*(set(h.holders) for h in held)) if held else set()
    if everywhere:
        assert (whose == min(everywhere)).all(), "one rank holds all of it"
    for h in held:
        (writer,) = np.unique(whose[h.box.slices]).tolist()
        bigger = {r: sum(o.box.elements for o in held if r in o.holders) for r in h.holders}
        assert writer == min(h.holders, key=lambda rank: (-bigger[rank], rank))


@examples(60)
@given(st.data(), st.integers(2, 6))
def test_one_replica_is_saved_for_any_layout(data, world):
    cases = []
    for _ in range(2):
        shape = data.draw(shapes(max_dims=2, max_size=6))
        cases.append((data.draw(layouts(shape, range(world))), shape))
    store = milepost.store.MemoryStore()

    def work(comm):
        state = {str(i): leaf(layout, shape, comm.rank) for i, (layout, shape) in enumerate(cases)}
        state = {key: value for key, value in state.items() if value is not None}
        milepost.save(state, store, process_group=comm, on_difference="warn")

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        run_ranks(world, work)
    checkpoint = milepost.open(store)
    for i, (layout, shape) in enumerate(cases):
        if str(i) in checkpoint:
            check_one_replica(layout, shape, checkpoint[str(i)].read().numpy())


def test_parts_of_one_rank_make_no_mixture_with_those_of_another():
    store = milepost.store.MemoryStore()

    def work(comm):
        halves = {(0,): signed(comm.rank, (2,)), (2,): signed(comm.rank, (2,))}
        state = {
            "both": milepost.Sharded((4,), halves),  # all ranks hold both halves
            "more": milepost.Sharded((4,), halves if comm.rank else {(0,): signed(0, (2,))}),  # rank 0 holds one
        }
        milepost.save(state, store, process_group=comm, on_difference="warn")

    with pytest.warns(RuntimeWarning) as caught:
        run_ranks(3, work)
    saved = milepost.open(store)
    assert saved["both"].read().tolist() == [0.0] * 4
    assert saved["more"].read().tolist() == [1.0] * 4, "rank 1 is the lowest that holds all of it"
    lines = str(caught[0].message).splitlines()
    assert {SAVED.search(line)[1] for line in lines if "'both" in line} == {"0"}
    assert {SAVED.search(line)[1] for line in lines if "'more" in line} == {"1"}


def test_replicas_still_share_the_writing_where_they_must_be_equal():
    save = simulate_save(4, [TensorRow("w", "float32", (1 << 20,), "tensor", None)])
    assert {save.bytes_written(rank) for rank in range(4)} == {1 << 20}


class Renaming(milepost.planning.DefaultSavePlanner):
    def set_up_planner(self, state_dict, storage_meta=None, is_coordinator=False):
        super().set_up_planner({f"new.{k}": v for k, v in state_dict.items()}, storage_meta, is_coordinator)


MESHES = {"swapped": ([1, 0, 3, 2], (Replicate(),)), "hsdp": ([[0, 3], [1, 2]], (Replicate(), Shard(0)))}
WAYS = ("plain", "thread", "process", "planner", "dcp", "dcp async")


def diverged(rank):
    """Tensors that should be equal where they are replicas, and hold the rank's number instead."""
    state = {"ddp": signed(rank, (3,)), "n": rank}
    for name, (ranks, placements) in MESHES.items():
        mesh = DeviceMesh("cpu", torch.tensor(ranks))
        local = signed(rank, (2 if name == "hsdp" else 4,))
        state[name] = DTensor.from_local(local, mesh, placements, run_check=False)
    return state


def save_each_way(rank, folder):
    state, told = diverged(rank), {}
    savers = {
        "plain": lambda at: milepost.save(state, at, on_difference="warn"),
        "thread": lambda at: milepost.async_save(state, at, on_difference="warn").result(30),
        "process": lambda at: milepost.async_save(state, at, background="process", on_difference="warn").result(60),
        "planner": lambda at: milepost.save(state, at, planner=Renaming(), on_difference="warn"),
        "dcp": lambda at: dcp.save(state, checkpoint_id=at),
        "dcp async": lambda at: dcp.async_save(state, checkpoint_id=at).result(30),
    }
    for way in WAYS:
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            savers[way](folder / way)
        told[way] = [str(w.message) for w in seen if "equal" in str(w.message)]
    milepost.close_async()
    dist.barrier()
    return told


@pytest.mark.slow
def test_one_replica_is_saved_by_every_kind_of_save(tmp_path):
    told, *others = spawn(4, save_each_way, tmp_path)
    assert not any(itertools.chain(*(o[way] for o in others for way in WAYS))), "the coordinator tells"
    for way in WAYS:
        saved = milepost.open(tmp_path / way)
        prefix = "new." if way == "planner" else ""
        values = {name: saved[prefix + name].read().tolist() for name in ("ddp", *MESHES)}
        assert values == {"ddp": [0] * 3, "swapped": [0] * 4, "hsdp": [0, 0, 3, 3]}, way
        assert saved[prefix + "n"] == 0
        if way in ("plain", "planner", "dcp"):
            (text,) = told[way]
            assert f"'{prefix}swapped': rank 0 differ from rank 1" in text
            assert [int(rank) for rank in SAVED.findall(text)] == [0, 0, 0, 3]
