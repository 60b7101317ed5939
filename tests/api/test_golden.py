"""Old checkpoints stay readable: what version 1 wrote is read today, and is exactly what the formulas say."""

import json
import math
from collections import OrderedDict, defaultdict
from itertools import pairwise
from pathlib import Path

import numpy as np
import pytest
import torch
import xxhash
from safetensors.torch import load_file

import milepost
from milepost.core.layout import Cut, Grid, Mesh
from milepost.store import MemoryStore
from milepost.testing import run_ranks
from tests.golden import make
from tests.tensors import check_histogram, check_statistics

GOLDEN = Path(__file__).parents[1] / "golden" / "v1"


def same(one, two):
    """Equal in type, structure, order and every bit. Namedtuples are compared by name and fields."""
    if hasattr(one, "_fields") and hasattr(two, "_fields"):
        return (type(one).__name__, one._fields) == (type(two).__name__, two._fields) and same(tuple(one), tuple(two))
    if type(one) is not type(two):
        return False
    if isinstance(one, torch.Tensor):
        return one.dtype == two.dtype and one.shape == two.shape and raw(one) == raw(two)
    if isinstance(one, (np.ndarray, np.generic)):
        return (one.dtype, one.shape, one.tobytes()) == (two.dtype, two.shape, two.tobytes())
    if isinstance(one, defaultdict) and one.default_factory is not two.default_factory:
        return False
    if isinstance(one, dict):
        return same(list(one.items()), list(two.items()))
    if isinstance(one, (list, tuple)):
        return len(one) == len(two) and all(map(same, one, two))
    if isinstance(one, (float, complex)):
        return repr(one) == repr(two)
    return one == two


def raw(tensor):
    return bytes(tensor.contiguous().reshape(-1).view(torch.uint8).numpy())


def expected():
    return {
        "cut": make.whole_tensors(),
        "plain": make.plain_tensors(),
        "values": make.shared_values(),
        "mine": {rank: make.private_value(rank) for rank in range(make.WORLD)},
    }


def blank(value):
    """A target of the same form with nothing right in it."""
    if isinstance(value, torch.Tensor):
        return torch.zeros_like(value.view(torch.uint8)).view(value.dtype) if value.dim() else torch.zeros_like(value)
    if isinstance(value, np.ndarray):
        return np.zeros_like(value)
    if hasattr(value, "_fields"):
        return type(value)(*map(blank, value))
    if isinstance(value, (OrderedDict, defaultdict)):
        copy = value.copy()
        copy.update({key: blank(item) for key, item in value.items()})
        return copy
    if isinstance(value, dict):
        return {key: blank(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return type(value)(map(blank, value))
    return "to be replaced"


def test_the_golden_checkpoint_is_the_one_that_was_made_once():
    """The seal covers every byte of every file. A change to the golden files has to change this line too."""
    manifest = (GOLDEN / "manifest-00000001.json").read_bytes()
    assert json.loads(manifest)["version"] == 1
    assert json.loads(manifest)["checksum"] == "d311ccee03cc7bb4"
    assert milepost.open(GOLDEN).verify().ok


def test_a_shard_file_in_parts_is_what_the_formula_says():
    place = GOLDEN.with_name("v1-parts")
    with milepost.open(place) as checkpoint:
        assert same(checkpoint.state(), make.parts_state())
        assert checkpoint.verify().ok
    assert json.loads((place / "manifest-00000001.json").read_bytes())["checksum"] == "3efdca7e08388a28"
    names = sorted(path.name for path in place.glob("data/*/*"))
    assert names == [f"00000.safetensors-{i:05d}" for i in range(4)]


def test_a_file_of_an_earlier_save_is_found_and_its_digests_hold():
    place = GOLDEN.with_name("v1-older")
    with milepost.open(place) as checkpoint:
        assert same(checkpoint.state(), make.older_state(2))
        assert checkpoint.verify().ok
        assert [file.age for file in checkpoint.manifest.older] == [1]
    assert json.loads((place / "manifest-00000001.json").read_bytes())["checksum"] == "c9851edd1845f9af"
    store = MemoryStore()
    receipt = milepost.save(make.older_state(3), store, base=place)
    assert receipt.reused_bytes == 0, "nothing can be linked from a folder into memory"
    assert read_digests(place)["frozen"] == digest(make.older_state(2)["frozen"], start=84)


def read_digests(place):
    """The digests of the golden checkpoint's entries, as a reader of the format page would find them."""
    [path] = place.glob("data/*/00000.safetensors")
    data = path.read_bytes()
    [file] = json.loads((place / "manifest-00000001.json").read_bytes())["files"]
    header = json.loads(data[8 : file["header_bytes"]])
    names = [name for name in header if not name.startswith("@") and name != "__metadata__"]
    names += [name for _, _, group in json.loads(header["__metadata__"]["older"]) for name in group]
    assert len(names) == file["digests"]
    end = data[len(data) - 16 * len(names) :]
    return {name: end[16 * i : 16 * i + 16] for i, name in enumerate(names)}


def digest(tensor, start):
    """The digest of a tensor that was written at this offset of a file's data, by the format page."""
    data = bytes(raw(tensor))
    cuts = [0, *range(2**18 - start, len(data), 2**18), len(data)]
    return xxhash.xxh3_128_digest(b"".join(xxhash.xxh3_128_digest(data[a:b]) for a, b in pairwise(cuts)))


def test_every_value_and_tensor_is_what_the_formulas_say():
    with milepost.open(GOLDEN, types=make.TYPES) as checkpoint:
        assert same(checkpoint.state(), expected())
        assert same(checkpoint.metadata, make.METADATA)
        assert checkpoint.world == make.WORLD
        assert checkpoint.generation == 1


@pytest.mark.parametrize("key", ["cut.rows", "cut.strided", "cut.uneven", "cut.few", "plain.dtypes.complex32"])
def test_any_slice_of_a_tensor_is_what_the_formulas_say(key):
    group, name = key.rsplit(".", 1)
    whole = make.whole_tensors()[name] if group == "cut" else make.plain_tensors()["dtypes"][name]
    with milepost.open(GOLDEN) as checkpoint:
        lazy = checkpoint[key]
        for start in range(whole.shape[0] + 1):
            for stop in range(start, whole.shape[0] + 1):
                assert raw(lazy[start:stop]) == raw(whole[start:stop])


def test_it_loads_into_one_process():
    target = {
        "cut": blank(make.whole_tensors()),
        "plain": blank(make.plain_tensors()),
        "values": dict.fromkeys(make.shared_values()),
        "mine": milepost.PerRank(None, remap=lambda old, rank, world: dict(enumerate(old))),
    }
    loaded = milepost.load(target, GOLDEN, types=make.TYPES)
    assert same({**loaded, "mine": loaded["mine"].value}, expected())


def test_it_loads_into_the_ranks_that_saved_it():
    def load(comm):
        state = make.state_of(comm.rank)
        state["cut"] = {name: make.cut_tensor(name, comm.rank, torch.zeros_like) for name in make.whole_tensors()}
        state["mine"] = milepost.PerRank(None)
        milepost.load(state, GOLDEN, types=make.TYPES, process_group=comm)
        for name, tensor in state["cut"].items():
            parts = {part.box.offset: part.data for part in tensor.parts}
            assert same(parts, make.local_parts(name, comm.rank))
        assert same(state["mine"].value, make.private_value(comm.rank))

    run_ranks(make.WORLD, load)


@pytest.mark.parametrize("world", [2, 3, 5])
def test_it_loads_into_other_ranks_cut_in_another_way(world):
    def load(comm):
        target = {}
        for name, whole in make.whole_tensors().items():
            grid = Grid(Mesh.of((world,), range(world)), (Cut(whole.dim() - 1),))
            local = torch.zeros(grid.local_shape(tuple(whole.shape), comm.rank), dtype=whole.dtype)
            target[name] = milepost.Sharded.on_grid(tuple(whole.shape), local, grid, comm.rank)
        milepost.load({"cut": target}, GOLDEN, allow_unexpected=True, process_group=comm)
        for name, whole in make.whole_tensors().items():
            size = math.ceil(whole.shape[-1] / world)
            columns = whole[..., comm.rank * size : (comm.rank + 1) * size]
            assert all(raw(part.data) == raw(columns) for part in target[name].parts)
            assert bool(target[name].parts) == bool(columns.numel())

    run_ranks(world, load)


def test_other_tools_still_read_its_files():
    found = {}
    for path in GOLDEN.glob("data/*/*.safetensors"):
        found |= load_file(path)
    for dtype, tensor in make.plain_tensors()["dtypes"].items():
        assert raw(found[f"plain.dtypes.{dtype}"]) == raw(tensor)
    assert raw(found["cut.tiles[3:5,4:7]"]) == raw(make.whole_tensors()["tiles"][3:5, 4:7])


def test_statistics_times_and_verdict_are_read_as_they_were_recorded():
    place = GOLDEN.with_name("v1-recorded")
    assert json.loads((place / "manifest-00000001.json").read_bytes())["checksum"] == "30a2002597be6be2"
    whole = {name: tensor for name, tensor in make.whole_tensors().items() if name in make.GRIDS}
    with milepost.open(place) as checkpoint:
        assert checkpoint.verify().ok
        assert checkpoint.health == milepost.Health(ok=False, reason="golden")
        assert {"describing", "planning", "writing"} <= {time.phase for time in checkpoint.manifest.timings}
        assert checkpoint.statistics.keys() == {*whole, *make.recorded_tensors()}
        for key, tensor in {**whole, **make.recorded_tensors()}.items():
            check_statistics(checkpoint.statistics[key], tensor)
            check_histogram(checkpoint.statistics[key], tensor)
    with pytest.raises(milepost.CheckpointUnhealthy, match="golden"):
        milepost.load({}, place, allow_unhealthy=False, allow_unexpected=True)
