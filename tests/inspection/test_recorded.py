"""Statistics that were recorded, and those that are computed from the data: they say the same."""

import math

import pytest
import torch
import torch.distributed.checkpoint as dcp

import milepost
from milepost.checkpoint import files_at
from milepost.errors import CheckpointDamaged, InvalidRequest
from milepost.inspection.recorded import numbers_at, numbers_of
from milepost.store import LocalStore, MemoryStore
from milepost.testing import run_ranks
from tests.steps.numbered import flip
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled:UserWarning")
DTYPES = ["float32", "bfloat16", "float16", "float8_e4m3fn", "int64", "uint8", "bool", "complex64", "float64"]


def whole_state():
    state = {dtype: random_tensor(dtype, 90_000, seed=1) for dtype in DTYPES}
    state["odd"] = torch.tensor([1.0, math.nan, -math.inf, 3.0])
    return state | {
        "empty": torch.zeros(0),
        "small": [torch.full((i,), float(i)) for i in range(1, 40)],
        "raw": b"x" * 200_000,
    }


def save(place, world=3, **options):
    """The state on some ranks, with its tensors cut among them; and a tensor of each rank, which has no statistics."""
    whole = whole_state()

    def cut(tensor, rank):
        if tensor.numel() < 1000:
            return tensor
        size = tensor.numel() // world
        return milepost.Sharded(tuple(tensor.shape), {(rank * size,): tensor[rank * size :][:size]}, tensor.dtype)

    def work(comm):
        state = {key: cut(value, comm.rank) if torch.is_tensor(value) else value for key, value in whole.items()}
        milepost.save({**state, "own": milepost.PerRank(torch.ones(9))}, place, process_group=comm, **options)

    run_ranks(world, work)


def told(found):
    """What is exact, and what depends on the order in which numbers are added."""
    exact = {row.key: (row.count, row.nan, row.inf, row.min, row.max, row.histogram) for row in found.tensors}
    return exact, [number for row in found.tensors if row.rms is not None for number in (row.mean, row.rms)]


@pytest.mark.parametrize("keys", ["*", "[bof]*"])
def test_computed_statistics_are_those_that_a_save_records(keys):
    with_them, without = MemoryStore(), MemoryStore()
    save(with_them, statistics=True)
    save(without)
    recorded, nothing = numbers_of(files_at(with_them), keys), numbers_of(files_at(without), keys)
    computed = numbers_of(files_at(without), keys, compute=True)
    assert (recorded.source, nothing.source, computed.source) == ("recorded", "none", "computed")
    assert nothing.missing == len(recorded.tensors) == len(computed.tensors) > 0
    assert told(recorded)[0] == told(computed)[0]
    assert told(recorded)[1] == pytest.approx(told(computed)[1], rel=1e-9)
    finite = [row.is_finite for row in computed.tensors]
    assert computed.not_finite == finite.count(False) > 1
    assert finite == sorted(finite)


def test_one_tensor_is_computed_with_a_histogram():
    with_them, without = MemoryStore(), MemoryStore()
    save(with_them, statistics="histogram")
    save(without, world=2)
    for key in ("bfloat16", "odd", "empty", "small.7"):
        recorded, computed = numbers_at(files_at(with_them), key), numbers_at(files_at(without), key, compute=True)
        assert told(recorded)[0] == told(computed)[0]
        assert recorded.tensors[0].histogram or key == "empty"
    for key, why in (("raw", "bytes"), ("own", "no tensor"), ("nothing", "not there")):
        with pytest.raises(InvalidRequest, match=why):
            numbers_at(files_at(without), key)


def test_statistics_of_other_formats_are_computed(tmp_path):
    state = {"w": torch.arange(3_000_000.0), "b": torch.tensor([1.0, math.inf])}
    dcp.save(state, checkpoint_id=tmp_path / "dcp", no_dist=True)
    torch.save(state, tmp_path / "file.pt")
    for name in ("dcp", "file.pt"):
        found = numbers_of(files_at(LocalStore(tmp_path / name)), compute=True)
        assert [(row.key, row.inf, row.max) for row in found.tensors] == [("b", 1, 1.0), ("w", 0, 2_999_999.0)]


def test_tied_tensors_have_the_statistics_of_one():
    shared = torch.ones(10)
    milepost.save({"a": shared, "b": shared}, "memory://tied-statistics", statistics=True)
    files = files_at(milepost.store.store_at("memory://tied-statistics"))
    found = numbers_of(files, "b")
    assert (found.tied, [row.key for row in found.tensors]) == (1, ["a"])
    assert numbers_at(files, "b").tensors == found.tensors


def test_damaged_data_is_not_counted(tmp_path):
    milepost.save({"w": torch.ones(100_000)}, tmp_path / "a")
    flip(next((tmp_path / "a").rglob("*.safetensors")))
    for compute in (numbers_of, lambda files, **options: numbers_at(files, "w", **options)):
        with pytest.raises(CheckpointDamaged, match="'w'"):
            compute(files_at(LocalStore(tmp_path / "a")), compute=True)
