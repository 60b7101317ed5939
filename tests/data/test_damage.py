"""Damage: whatever byte changes, whatever file is cut, swapped or lost, it is noticed. Never wrong data."""

import random
import shutil

import msgspec
import pytest
import torch

import milepost
from milepost import CheckpointDamaged, CheckpointError, UnsafeCheckpoint, UnsupportedFormat
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.limits import BLOCK_BYTES
from milepost.core.manifest import ShardFile, seal
from milepost.core.shardfile import NewEntry, make_header, seal_of, sums_of
from milepost.store import MemoryStore
from milepost.testing import run_ranks

GRID = Grid(Mesh.of((2,), range(2)), (Cut(0),))
WEIGHT = torch.arange(24, dtype=torch.float32).reshape(6, 4)
BIAS = torch.arange(5, dtype=torch.bfloat16)


def small_state(rank, step=1):
    (piece,) = GRID.pieces((6, 4), rank)
    return {
        "weight": milepost.Sharded.on_grid((6, 4), WEIGHT[piece.box.slices] + step, GRID, rank),
        "bias": BIAS + step,
        "step": step,
        "names": ["a", ("b", 2.5)],
        "mine": milepost.PerRank({"rank": rank, "noise": torch.full((3,), rank + step)}),
    }


def save_small(where, step=1):
    run_ranks(2, lambda comm: milepost.save(small_state(comm.rank, step), where, process_group=comm))
    return where


def small_target():
    return {
        "weight": torch.zeros(6, 4),
        "bias": torch.zeros(5, dtype=torch.bfloat16),
        "step": 0,
        "names": None,
        "mine": milepost.PerRank(None, remap=lambda old, rank, world: old),
    }


def is_right(state, step=1):
    mine = state["mine"].value
    return (
        torch.equal(state["weight"], WEIGHT + step)
        and torch.equal(state["bias"], BIAS + step)
        and state["step"] == step
        and state["names"] == ["a", ("b", 2.5)]
        and [m["rank"] for m in mine] == [0, 1]
        and all(m["noise"].tolist() == [rank + step] * 3 for rank, m in enumerate(mine))
    )


def verified(where):
    """Whether the checkpoint opens and every byte is right; damage that shows on opening counts, too."""
    try:
        with milepost.open(where) as checkpoint:
            return checkpoint.verify().ok
    except (CheckpointDamaged, UnsupportedFormat):
        return False


def loads_wrong_data(where):
    """Whether a load gives anything but the right data or an error of Milepost."""
    target = small_target()
    try:
        milepost.load(target, where)
    except CheckpointError:
        return False
    return not is_right(target)


def masks(seed):
    """One random change for each byte, and all changes of a single bit for every 40th."""
    rng = random.Random(seed)

    def of(position):
        return [1 << bit for bit in range(8)] if position % 40 == 0 else [rng.randrange(1, 256)]

    return of


# ---------------------------------------------------------------- every byte


def test_a_whole_checkpoint_verifies_and_loads(tmp_path):
    save_small(tmp_path)
    assert verified(tmp_path)
    target = small_target()
    milepost.load(target, tmp_path)
    assert is_right(target)


@pytest.mark.slow
@pytest.mark.parametrize("number", [0, 1, 2])
def test_a_change_of_any_byte_is_found_and_never_loads_as_other_data(number):
    """Every byte of every file is changed, one at a time: the manifest, headers with their padding, data, tables."""
    store = save_small(MemoryStore())
    name = sorted(store.objects)[number]
    whole = store.objects[name]
    of = masks(number)
    unnoticed, wrong = [], []
    for position in range(len(whole)):
        for mask in of(position):
            changed = bytearray(whole)
            changed[position] ^= mask
            store.objects[name] = bytes(changed)
            if verified(store):
                unnoticed.append((position, mask))
            if loads_wrong_data(store):
                wrong.append((position, mask))
    assert (unnoticed, wrong) == ([], [])


def test_a_change_of_a_byte_on_a_real_disk_is_found(tmp_path):
    save_small(tmp_path)
    rng = random.Random(0)
    unnoticed = []
    for path in sorted(p for p in tmp_path.rglob("*") if p.is_file()):
        whole = path.read_bytes()
        for position in rng.sample(range(len(whole)), 40):
            with path.open("r+b") as file:
                file.seek(position)
                file.write(bytes([whole[position] ^ rng.randrange(1, 256)]))
            if verified(tmp_path) or loads_wrong_data(tmp_path):
                unnoticed.append((path.name, position))
            path.write_bytes(whole)
    assert unnoticed == []
    assert verified(tmp_path)


# ---------------------------------------------------------------- whole files


def shard_names(store):
    return sorted(name for name in store.objects if name.startswith("data/"))


def manifest_name(store):
    return next(name for name in store.objects if name.startswith("manifest-"))


def damaged_files(store):
    """The files that verifying names."""
    with milepost.open(store) as checkpoint:
        return {damage.file for damage in checkpoint.verify().damages}


def assert_found(store, name):
    """Verifying names exactly this file; loading raises and names it, too."""
    assert damaged_files(store) == {name}
    with pytest.raises(CheckpointError, match=name):
        milepost.load(small_target(), store)


def test_a_shard_file_cut_at_any_length_is_found_and_named():
    store = save_small(MemoryStore())
    for name in shard_names(store):
        whole = store.objects[name]
        lengths = {*range(0, len(whole), 61), *range(10), *range(4090, 4100), *range(len(whole) - 20, len(whole))}
        for length in sorted(lengths):
            store.objects[name] = whole[:length]
            assert_found(store, name)
        store.objects[name] = whole
    assert verified(store)


@pytest.mark.parametrize("more", [b"\0", b"x" * 8, bytes(4096), bytes(BLOCK_BYTES)])
def test_a_shard_file_with_something_behind_it_is_found_and_named(more):
    store = save_small(MemoryStore())
    for name in shard_names(store):
        whole = store.objects[name]
        store.objects[name] = whole + more
        assert_found(store, name)
        store.objects[name] = whole


def test_a_shard_file_that_is_lost_is_found_and_named():
    store = save_small(MemoryStore())
    for name in shard_names(store):
        whole = store.objects.pop(name)
        assert_found(store, name)
        store.objects[name] = whole


def test_all_shard_files_that_are_lost_are_named_at_once():
    store = save_small(MemoryStore())
    names = shard_names(store)
    for name in names:
        del store.objects[name]
    assert damaged_files(store) == set(names)


def test_a_manifest_cut_at_any_length_is_found_and_named():
    store = save_small(MemoryStore())
    name = manifest_name(store)
    whole = store.objects[name]
    for length in range(len(whole)):
        store.objects[name] = whole[:length]
        with pytest.raises(CheckpointDamaged, match=name):
            milepost.open(store)
    for more in (b"\n", b" ", b"}", b"\0" * 4096, whole):
        store.objects[name] = whole + more
        with pytest.raises(CheckpointDamaged, match=name):
            milepost.open(store)


def test_a_manifest_that_is_lost_leaves_no_checkpoint():
    store = save_small(MemoryStore())
    del store.objects[manifest_name(store)]
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(store)


def test_files_swapped_between_ranks_are_found_and_named():
    """Both ranks' files have the same size and the same names of entries but for the box."""
    store = MemoryStore()

    def state(rank):
        return {"x": milepost.Sharded.on_grid((8,), torch.arange(4) + rank, GRID_OF_8, rank)}

    run_ranks(2, lambda comm: milepost.save(state(comm.rank), store, process_group=comm))
    one, two = shard_names(store)
    assert len(store.objects[one]) == len(store.objects[two])
    store.objects[one], store.objects[two] = store.objects[two], store.objects[one]
    assert damaged_files(store) == {one, two}
    with pytest.raises(CheckpointDamaged, match=one):
        milepost.load({"x": torch.zeros(8, dtype=torch.int64)}, store)


GRID_OF_8 = Grid(Mesh.of((2,), range(2)), (Cut(0),))


def test_one_ranks_file_in_the_place_of_another_is_found_and_named():
    store = save_small(MemoryStore())
    one, two = shard_names(store)
    store.objects[two] = store.objects[one]
    assert_found(store, two)


def test_a_file_of_another_save_of_the_same_layout_is_found_and_named():
    store, other = save_small(MemoryStore(), step=1), save_small(MemoryStore(), step=2)
    for name, foreign in zip(shard_names(store), shard_names(other), strict=True):
        whole = store.objects[name]
        assert len(whole) == len(other.objects[foreign])
        store.objects[name] = other.objects[foreign]
        assert_found(store, name)
        store.objects[name] = whole


def test_data_of_another_save_is_found_and_named():
    """Only the blocks themselves tell: sizes, header and table are right."""
    store, other = save_small(MemoryStore(), step=1), save_small(MemoryStore(), step=2)
    for name, foreign in zip(shard_names(store), shard_names(other), strict=True):
        whole = store.objects[name]
        store.objects[name] = whole[:4096] + other.objects[foreign][4096:-8] + whole[-8:]
        assert_found(store, name)
        store.objects[name] = whole


def test_the_manifest_of_another_save_is_found(tmp_path):
    """A folder that was copied half way: the newer manifest came, its data did not."""
    save_small(tmp_path / "a", step=1)
    save_small(tmp_path / "b", step=2)
    shutil.copy(tmp_path / "b" / "manifest-00000001.json", tmp_path / "a" / "manifest-00000001.json")
    with milepost.open(tmp_path / "a") as checkpoint:
        assert len(checkpoint.verify().damages) == 2
    with pytest.raises(CheckpointDamaged, match="is missing"):
        milepost.load(small_target(), tmp_path / "a")


def test_an_older_manifest_under_a_newer_name_is_found(tmp_path):
    save_small(tmp_path)
    shutil.copy(tmp_path / "manifest-00000001.json", tmp_path / "manifest-00000002.json")
    with pytest.raises(CheckpointDamaged, match=r"manifest-00000002\.json"):
        milepost.open(tmp_path)


def test_a_damaged_newest_manifest_is_an_error_and_not_an_older_checkpoint(tmp_path):
    save_small(tmp_path, step=1)
    (tmp_path / "manifest-00000002.json").write_bytes(b"{")
    with pytest.raises(CheckpointDamaged, match=r"manifest-00000002\.json"):
        milepost.load(small_target(), tmp_path)


# ---------------------------------------------------------------- blocks


@pytest.fixture
def large(tmp_path):
    """Eight blocks: `a` takes the first five and a half, `b` the rest; blocks 1, 3 and 6 are damaged."""
    count = BLOCK_BYTES // 4
    state = {"a": torch.arange(count * 11 // 2, dtype=torch.float32), "b": torch.arange(count * 5 // 2) % 7}
    state["b"] = state["b"].to(torch.float32)
    milepost.save(state, tmp_path)
    (path,) = tmp_path.glob("data/*/*.safetensors")
    for block in (1, 3, 6):
        flip(path, 4096 + block * BLOCK_BYTES + 12345)
    return tmp_path, path, state


def flip(path, position):
    """Change one bit of a file."""
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)
        file.seek(position)
        file.write(bytes([byte[0] ^ 0x10]))


def test_verifying_reports_every_damaged_block_with_its_file_and_tensor(large):
    folder, path, _ = large
    with milepost.open(folder) as checkpoint:
        report = checkpoint.verify()
    assert not report.ok
    assert [damage.entries for damage in report.damages] == [("a",), ("a",), ("b",)]
    assert {damage.file for damage in report.damages} == {str(path.relative_to(folder))}
    for damage, block in zip(report.damages, (1, 3, 6), strict=True):
        assert f"block {block}" in damage.reason
        assert str(4096 + block * BLOCK_BYTES) in damage.reason
    with pytest.raises(CheckpointDamaged, match="3 damaged places") as caught:
        report.raise_if_damaged()
    assert str(caught.value).count(path.name) >= 3


def test_a_block_that_two_tensors_share_is_reported_with_both(large):
    folder, path, _ = large
    flip(path, 4096 + 5 * BLOCK_BYTES)
    with milepost.open(folder) as checkpoint:
        assert ("a", "b") in [damage.entries for damage in checkpoint.verify().damages]
        with pytest.raises(CheckpointDamaged, match="'b'"):
            checkpoint["b"][:1]


def test_a_read_that_does_not_touch_a_damaged_block_succeeds(large):
    folder, _, state = large
    count = BLOCK_BYTES // 4
    with milepost.open(folder) as checkpoint:
        for start, stop in ((0, count), (2 * count, 3 * count), (4 * count, 5 * count + 100), (count - 1, count)):
            assert torch.equal(checkpoint["a"][start:stop], state["a"][start:stop])
        assert torch.equal(checkpoint["b"][: count // 2], state["b"][: count // 2])


def test_read_of_a_damaged_block_names_tensor_and_file(large):
    folder, path, _ = large
    count = BLOCK_BYTES // 4
    with milepost.open(folder) as checkpoint:
        for key, start, stop in (("a", count, count + 1), ("a", 0, count + 1), ("a", 4 * count - 1, 4 * count)):
            with pytest.raises(CheckpointDamaged) as caught:
                checkpoint[key][start:stop]
            assert repr(key) in str(caught.value)
            assert path.name in str(caught.value)
        with pytest.raises(CheckpointDamaged, match="'b'"):
            checkpoint["b"].read()


def test_a_failed_read_does_not_spoil_the_next_one(large):
    folder, _, state = large
    count = BLOCK_BYTES // 4
    with milepost.open(folder) as checkpoint:
        for _ in range(2):
            with pytest.raises(CheckpointDamaged):
                checkpoint["a"][: 2 * count]
            assert torch.equal(checkpoint["a"][:count], state["a"][:count])


def test_loading_a_part_of_a_state_works_where_only_the_rest_is_damaged(tmp_path):
    state = {"good": torch.arange(1 << 18, dtype=torch.float32), "bad": torch.arange(1 << 18, dtype=torch.float32)}
    milepost.save(state, tmp_path)
    (path,) = tmp_path.glob("data/*/*.safetensors")
    flip(path, path.stat().st_size - 1000)
    target = {"good": torch.zeros(1 << 18)}
    milepost.load(target, tmp_path, allow_unexpected=True)
    assert torch.equal(target["good"], state["good"])
    with pytest.raises(CheckpointDamaged, match="'bad'"):
        milepost.load({"good": torch.zeros(1 << 18), "bad": torch.zeros(1 << 18)}, tmp_path)


@pytest.mark.parametrize("world", [1, 3])
def test_damage_is_raised_on_every_rank_whoever_reads_it(tmp_path, world):
    """The damaged half belongs to the last rank; the first ranks never read it, and raise all the same."""
    count = BLOCK_BYTES // 4
    run_ranks(2, lambda comm: milepost.save({"x": halves(comm.rank, count)}, tmp_path, process_group=comm))
    path = sorted(tmp_path.glob("data/*/*.safetensors"))[1]
    flip(path, 4096 + 8 * count - 10)
    errors = []

    def load(comm):
        grid = Grid(Mesh.of((world,), range(world)), (Cut(0),))
        local = torch.zeros(grid.local_shape((4 * count,), comm.rank))
        try:
            milepost.load(
                {"x": milepost.Sharded.on_grid((4 * count,), local, grid, comm.rank)}, tmp_path, process_group=comm
            )
        except CheckpointDamaged as error:
            errors.append(str(error))

    run_ranks(world, load)
    assert len(errors) == world
    assert all(path.name in error and "'x[" in error for error in errors)


def halves(rank, count):
    return milepost.Sharded.on_grid((4 * count,), torch.arange(2 * count, dtype=torch.float32) + rank, GRID, rank)


def forged(order, **noted):
    """A checkpoint whose only file has entries in this order and these notes, and whose checksums all fit."""
    store = MemoryStore()
    state = {"narrow": torch.ones(1, dtype=torch.int8), "wide": torch.arange(4, dtype=torch.float32)}
    milepost.save(state, store)
    with milepost.open(store) as checkpoint:
        manifest = checkpoint.manifest
    new = [NewEntry(key, str(state[key].dtype).removeprefix("torch."), tuple(state[key].shape)) for key in order]
    notes = {"format": "milepost", "save_id": manifest.save_id, "rank": "0", **noted}
    head, header = make_header(new, notes, manifest.block_bytes)
    data = b"".join(state[key].numpy().tobytes() for key in order)
    table = b"".join(one.to_bytes(8, "little") for one in sums_of([memoryview(data)], manifest.block_bytes))
    file = ShardFile(0, header.size_bytes, header.header_bytes, seal_of(head, table))
    store.objects[manifest.file_name(0)] = head + data + table
    store.objects[manifest_name(store)] = seal(msgspec.structs.replace(manifest, files=(file,)))
    return store


def test_a_forged_file_loads_where_all_of_it_fits():
    with milepost.open(forged(["wide", "narrow"])) as checkpoint:
        assert torch.equal(checkpoint.state()["wide"], torch.arange(4.0))


def test_an_entry_that_is_not_aligned_for_its_type_is_found_and_named():
    with milepost.open(forged(["narrow", "wide"])) as checkpoint, pytest.raises(CheckpointDamaged, match="not aligned"):
        checkpoint.state()


@pytest.mark.parametrize("noted", [{"rank": "1"}, {"save_id": "00000001-0123456789abcdef"}], ids=["rank", "save"])
def test_misplaced_file_with_valid_checksums_is_refused(noted):
    store = forged(["wide", "narrow"], **noted)
    with milepost.open(store) as checkpoint, pytest.raises(CheckpointDamaged, match="belongs to another save or rank"):
        checkpoint.state()


def test_a_table_of_checksums_over_the_limit_is_refused_before_it_is_read(monkeypatch):
    store = forged(["wide", "narrow"])
    monkeypatch.setattr("milepost.data.read.MAX_TABLE_BYTES", 7)
    with milepost.open(store) as checkpoint, pytest.raises(UnsafeCheckpoint, match="a table of 8 bytes, over 7"):
        checkpoint.state()
