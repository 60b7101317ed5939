"""What a load asks of its store: each byte once, only the blocks that it needs, in few requests."""

import gc
import os

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

import milepost
from milepost import Transfer
from milepost.core.division import read_plan
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.data.pieces import placement_of
from milepost.data.place import place_all
from milepost.data.read import Files
from milepost.store import LocalStore, MemoryStore
from milepost.testing import run_ranks
from tests.data.states import Recorder, assert_same, blank, cut, header_of, random_tensor, raw
from tests.strategies import boxes_in, examples

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


def shards(store):
    return sorted(name for name in store.list("data/"))


def reload(where, wholes, world, dim, transfer=None, verify=True):
    """Load into `world` ranks cut along `dim`, check every byte, and give each rank's recorder."""

    def load(comm):
        store = Recorder(where)
        parts = {key: cut(whole, world, dim, comm.rank, blank) for key, whole in wholes.items()}
        milepost.load(
            {key: part for key, (part, _) in parts.items()},
            store,
            process_group=comm,
            transfer=transfer or Transfer(2, MIB),
            verify=verify,
        )
        for key, (part, box) in parts.items():
            assert raw(part.parts[0].data) == raw(wholes[key][box.slices])
        return store

    return run_ranks(world, load)


def save_cut(where, wholes, world, dim):
    run_ranks(
        world,
        lambda comm: milepost.save(
            {key: cut(whole, world, dim, comm.rank)[0] for key, whole in wholes.items()}, where, process_group=comm
        ),
    )
    return where


def wholes():
    return {
        "a": random_tensor("float32", 1001, 777),
        "b": random_tensor("bfloat16", 640, 512, seed=1),
        "c": random_tensor("int8", 8, 3, seed=2),
    }


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize("block", [BLOCK_BYTES, 4 * MIB])
def test_a_load_of_the_same_layout_asks_for_each_byte_once(tmp_path, state, block, verify):
    store = Recorder(LocalStore(tmp_path))
    milepost.save(state, store)
    target = {key: blank(tensor) for key, tensor in state.items()}
    milepost.load(target, store, transfer=Transfer(3, block), verify=verify)
    (name,) = shards(store)
    assert store.bytes_asked() == header_of(store.inner, name).data_bytes
    assert sum(stop - start for _, start, stop, _ in store.of_data) == (tmp_path / name).stat().st_size


def test_tensors_that_lie_side_by_side_are_read_together():
    store = Recorder(MemoryStore())
    state = {f"t{i}": random_tensor("float32", BLOCK_BYTES // 4, seed=i) for i in range(100)}
    milepost.save(state, store)
    target = {key: blank(tensor) for key, tensor in state.items()}
    milepost.load(target, store)
    assert_same(target, state)
    assert store.bytes_asked() == 100 * BLOCK_BYTES
    assert len(store.of_data) < 18, "about one for each span of 512 KiB"


@pytest.mark.slow
@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), [(2, 4), (4, 2), (3, 2), (3, 3)])
def test_contiguous_cuts_ask_for_the_blocks_that_they_need_and_no_more(saved, loaded, verify):
    store = save_cut(MemoryStore(), wholes(), saved, 0)
    for rank, recorder in enumerate(reload(store, wholes(), loaded, 0, verify=verify)):
        assert recorder.bytes_asked() <= needed_blocks(store, wholes(), saved, loaded, rank)


def needed_blocks(store, tensors, saved, loaded, rank):
    """The bytes of all blocks that hold anything of what `rank` needs, by brute force."""
    touched = set()
    for key, whole in tensors.items():
        _, mine = cut(whole, loaded, 0, rank)
        for source, name in enumerate(shards(store)):
            _, held = cut(whole, saved, 0, source)
            both = mine.intersect(held)
            if both is not None:
                row = whole[0].numel() * whole.element_size()
                entries = header_of(store, name).entries
                at = next(e.data_offsets[0] for n, e in entries.items() if n.startswith(key + "["))
                start = at + (both.offset[0] - held.offset[0]) * row
                touched.update(
                    (name, i) for i in range(start // BLOCK_BYTES, -(-(start + both.shape[0] * row) // BLOCK_BYTES))
                )
    return len(touched) * BLOCK_BYTES


@pytest.mark.parametrize("verify", [True, False])
@pytest.mark.parametrize(("saved", "loaded"), [((4, 0), (4, 1)), ((2, 1), (3, 0)), ((2, 0), (4, 1)), ((3, 1), (2, 1))])
def test_rows_become_columns_in_few_requests_without_rereading(saved, loaded, verify):
    store = save_cut(MemoryStore(), wholes(), *saved)
    size = sum(len(store.objects[name]) for name in shards(store))
    for recorder in reload(store, wholes(), *loaded, verify=verify):
        assert 0 < recorder.bytes_asked() <= size
        assert len(recorder.of_data) <= 12 * saved[0], "a thousand rows in a few requests"


@pytest.mark.parametrize("verify", [True, False])
def test_wide_gaps_are_not_read_through(verify):
    whole = random_tensor("float32", 6, MIB)
    store = MemoryStore()
    milepost.save({"t": whole}, store)

    def load(comm):
        recorder, left = Recorder(store), comm.rank == 0
        columns = slice(70_000, 70_000 + 16 * KIB) if left else slice(0, 70_000)
        rest = slice(70_000 + 16 * KIB, MIB)
        parts = {(0, columns.start): torch.zeros(6, columns.stop - columns.start)}
        if not left:
            parts[0, rest.start] = torch.zeros(6, rest.stop - rest.start)
        milepost.load({"t": milepost.Sharded((6, MIB), parts)}, recorder, process_group=comm, verify=verify)
        assert all(raw(part) == raw(whole[:, at : at + part.shape[1]]) for (_, at), part in parts.items())
        return recorder.bytes_asked()

    narrow, wide = run_ranks(2, load)
    assert 6 * 64 * KIB <= narrow <= 6 * (64 + 2 * 64) * KIB
    assert wide <= 6 * 4 * MIB


INDICES = [np.s_[:, 2:3], np.s_[1:3, :, 1:2, 5:50], np.s_[:, 1:4, 0, -10:], np.s_[:, :, :, :7], np.s_[0:3, 1:2, 1, 9]]


@pytest.mark.parametrize("index", INDICES, ids=str)
def test_wide_gaps_in_any_dimension_are_not_read_through(index):
    """Rows of 512 KiB: what lies between is further apart than is worth reading, so just the blocks are asked for."""
    whole = random_tensor("int16", 3, 4, 2, 256 * KIB)
    recorder = Recorder(MemoryStore())
    milepost.save({"t": whole}, recorder)
    with milepost.open(recorder) as checkpoint:
        assert raw(checkpoint["t"][index]) == raw(whole[index])
    numbers = np.arange(whole.numel(), dtype=np.int32).reshape(whole.shape)[index]
    assert recorder.bytes_asked() == BLOCK_BYTES * len(np.unique(numbers * 2 // BLOCK_BYTES))


@examples(40)
@given(st.data())
def test_targets_that_want_the_same_bytes_all_get_them_from_one_read(data):
    """Any boxes of one tensor, overlapping or not, into contiguous or strided memory, in one call."""
    shape = data.draw(st.sampled_from([(700, 300), (5, 90_000), (40, 50, 100), (200_000,)]))
    whole, store = random_tensor("float32", *shape), Recorder(MemoryStore())
    milepost.save({"t": whole}, store)
    boxes = [data.draw(boxes_in(shape, min_size=1)) for _ in range(data.draw(st.integers(1, 4)))]
    boxes += boxes[:1]
    transfer = Transfer(data.draw(st.integers(1, 3)), data.draw(st.sampled_from([1, 2, 7])) * BLOCK_BYTES)
    with milepost.open(store) as checkpoint:
        manifest = checkpoint.manifest
    (tensor,) = manifest.tensors
    placements, targets = [], []
    for box in boxes:
        memory = blank(whole[box.slices].mT.contiguous()).mT if data.draw(st.booleans()) and len(shape) > 1 else None
        memory = blank(whole[box.slices]) if memory is None else memory
        targets.append(memory)
        placements += [
            placement_of(i, "float32", memory[i.box.within(box).slices]) for i in read_plan(manifest, tensor, box)
        ]
    store.asked.clear()
    files = Files(store, manifest)
    place_all(files, placements, transfer, verify=data.draw(st.booleans()))
    files.close()
    for box, target in zip(boxes, targets, strict=True):
        assert raw(target) == raw(whole[box.slices])
    store.bytes_asked()


def test_a_lazy_tensor_gives_the_same_region_again_and_again(tmp_path):
    whole = random_tensor("float32", 900, 400)
    milepost.save({"t": whole}, tmp_path)
    with milepost.open(tmp_path) as checkpoint:
        lazy = checkpoint["t"]
        for index in [np.s_[:], np.s_[100:300], np.s_[200:400], np.s_[:, 7:9], np.s_[::3, 5], np.s_[899, 399]]:
            assert raw(lazy[index]) == raw(whole[index]) == raw(lazy[index])


@pytest.mark.parametrize("most", [1, 2])
def test_more_files_than_may_be_open_are_read_and_closed(tmp_path, monkeypatch, most):
    monkeypatch.setattr("milepost.data.read.MAX_OPEN", most)
    save_cut(LocalStore(tmp_path), wholes(), 5, 0)
    gc.collect()
    handles = len(os.listdir("/proc/self/fd"))
    recorder = Recorder(LocalStore(tmp_path))
    target = {key: blank(whole) for key, whole in wholes().items()}
    milepost.load(target, recorder, transfer=Transfer(4, BLOCK_BYTES))
    assert_same(target, wholes())
    assert len({name for name, *_ in recorder.of_data}) == 5
    recorder.bytes_asked()
    del recorder
    assert len(os.listdir("/proc/self/fd")) == handles


def test_rank_private_tensors_that_share_a_block_are_read_together():
    store = Recorder(MemoryStore())
    milepost.save({"mine": milepost.PerRank({f"t{i}": torch.full((50,), i) for i in range(100)})}, store)
    target = {"mine": milepost.PerRank(None)}
    milepost.load(target, store)
    assert all(torch.equal(target["mine"].value[f"t{i}"], torch.full((50,), i)) for i in range(100))
    # The header, the table, the record that lists them, and the one block that holds all.
    assert len(store.of_data) == 4
