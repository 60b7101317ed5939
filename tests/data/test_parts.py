"""Shard files in parts: what an object store gets, what is read from it, and what other tools make of it."""

import shutil
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open

import milepost
from milepost import Transfer
from milepost.commit.find import find, parse
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.core.manifest import ShardFile, seal
from milepost.core.shardfile import FileParts, data_bytes_of, table_rows
from milepost.data import read
from milepost.data.parts import open_parts
from milepost.store import LocalStore, MemoryStore, Traits
from milepost.testing import CountingStore, Crash, CrashingStore, ReplyLosingStore, run_ranks
from tests.data.states import Recorder
from tests.strategies import examples

CLOUD = Traits(part_bytes=2 * BLOCK_BYTES, range_bytes=BLOCK_BYTES, requests=4, is_current=True)


def cloud():
    return MemoryStore(traits=CLOUD)


def state(seed=0, elements=200_000):
    source = torch.Generator().manual_seed(seed)  # not torch's own: ranks are threads here
    return {
        "large": torch.randn(elements, generator=source),
        "strided": torch.randn(300, 200, generator=source).t(),
        "small": {str(i): torch.randn(33, generator=source) for i in range(50)},
        "step": seed,
    }


def blank(value):
    return {
        key: blank(one) if isinstance(one, dict) else torch.full_like(one, -1) if torch.is_tensor(one) else None
        for key, one in value.items()
    }


def assert_equal(left, right):
    assert left["step"] == right["step"]
    assert torch.equal(left["large"], right["large"])
    assert torch.equal(left["strided"], right["strided"])
    for name, tensor in right["small"].items():
        assert torch.equal(left["small"][name], tensor)


def manifest_at(store):
    return parse(store.url, *find(store))


# --- how a file is cut


@examples(300)
@given(st.integers(1, 50 * BLOCK_BYTES), st.integers(1, 60), st.integers(2, 30), st.integers(0, 9), st.booleans())
def test_parts_cover_a_file_once_and_cut_no_block(data_bytes, blocks, pages, digests, spans):
    header = pages * 4096
    size = header + data_bytes + 8 * table_rows(data_bytes, BLOCK_BYTES, digests, spans=spans)
    assert data_bytes_of(size, header, BLOCK_BYTES, digests, spans=spans) == data_bytes
    parts = FileParts("f", header, data_bytes, size, blocks * BLOCK_BYTES if blocks * BLOCK_BYTES < data_bytes else 0)
    found = list(parts)
    assert [found[0].start, found[-1].stop] == [0, size]
    assert all(one.stop == other.start for one, other in pairwise(found))
    assert len({part.name for part in found}) == len(parts) == len(found)
    for index, part in enumerate(found):
        assert parts.at(part.start) == parts.at(part.stop - 1) == index
        assert len(found) == 1 or index == 0 or (part.start - header) % BLOCK_BYTES == 0 or index == len(found) - 1


def test_a_read_behind_the_end_of_the_parts_is_an_error():
    store, parts = cloud(), FileParts("file", 8, 3 * BLOCK_BYTES, 8 + 3 * BLOCK_BYTES + 24, BLOCK_BYTES)
    for part in parts:
        store.create(part.name, bytes(part.size_bytes))
    reader = open_parts(store, parts)
    for offset in (parts.size_bytes - 1, parts.size_bytes, parts.size_bytes + 5):
        with pytest.raises(milepost.StorageError, match=r"memory://.*file ends before byte"):
            reader.read(offset, [memoryview(bytearray(2))])


@pytest.mark.parametrize("part_bytes", [-BLOCK_BYTES, 1, BLOCK_BYTES + 1, 1 << 40])
def test_a_manifest_with_impossible_parts_is_refused(part_bytes):
    store = cloud()
    milepost.save(state(), store)
    manifest = manifest_at(store)
    file = manifest.files[0]
    wrong = ShardFile(file.rank, file.size_bytes, file.header_bytes, file.checksum, part_bytes)
    with pytest.raises(ValueError, match="cannot have parts"):
        seal(type(manifest)(**{**{n: getattr(manifest, n) for n in manifest.__struct_fields__}, "files": (wrong,)}))


# --- saving and loading


def test_a_save_in_parts_is_loaded_exactly_and_verified():
    store, saved = CountingStore(cloud()), state(7)
    milepost.save(saved, store)
    objects = store.inner.objects
    data = [name for name in objects if name.startswith("data/")]
    assert len(data) > 5
    assert max(len(objects[name]) for name in data) <= CLOUD.part_bytes + 64 * 1024
    target = blank(saved)
    milepost.load(target, store)
    assert_equal(target, saved)
    with milepost.open(store) as checkpoint:
        assert checkpoint.verify().ok
        assert torch.equal(checkpoint["large"][1000:1010], saved["large"][1000:1010])


def test_a_short_file_is_one_object_under_its_plain_name():
    store = cloud()
    milepost.save({"w": torch.ones(100)}, store)
    assert [name.rpartition("/")[2] for name in store.objects if name.startswith("data/")] == ["00000.safetensors"]
    recorder = Recorder(store)
    milepost.load({"w": torch.zeros(100)}, recorder)
    assert len(recorder.of_data) == 1, "one request gives header, data and table"


def test_a_plain_copy_is_a_checkpoint_and_cat_makes_safetensors(tmp_path):
    store, saved = cloud(), state(3)
    milepost.save(saved, store)
    for name, data in store.objects.items():
        (tmp_path / "copy" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "copy" / name).write_bytes(data)
    target = blank(saved)
    milepost.load(target, tmp_path / "copy")
    assert_equal(target, saved)
    milepost.load(blank(saved), tmp_path / "copy", transfer=Transfer(direct=False))
    parts = sorted((tmp_path / "copy").glob("data/*/*"))
    (tmp_path / "whole.safetensors").write_bytes(b"".join(part.read_bytes() for part in parts))
    with safe_open(tmp_path / "whole.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("large"), saved["large"])
    assert milepost.open(tmp_path / "copy").verify().ok
    shutil.copytree(tmp_path / "copy", tmp_path / "again")
    milepost.save(saved, tmp_path / "again")  # a save on a disk replaces it by files in one piece
    assert len(list((tmp_path / "again").glob("data/*/*"))) == 1


def test_every_rank_writes_parts_and_another_number_of_ranks_loads_them():
    store, saved = cloud(), state(5)
    run_ranks(4, lambda comm: milepost.save({**saved, "own": milepost.PerRank(comm.rank)}, store, process_group=comm))
    manifest = manifest_at(store)
    assert any(file.part_bytes for file in manifest.files)

    def load(comm):
        target = blank(saved)
        milepost.load(target, store, process_group=comm, allow_unexpected=True)
        assert_equal(target, saved)

    run_ranks(3, load)


def test_ranges_are_read_once_and_no_more_than_is_needed(monkeypatch):
    store, saved = cloud(), {"large": torch.randn(1_000_000)}
    milepost.save(saved, store)
    monkeypatch.setattr(read, "_WARM_BYTES", 1)
    recorder = Recorder(store)
    target = {"large": torch.zeros(1_000_000)}
    milepost.load(target, recorder)
    assert torch.equal(target["large"], saved["large"])
    asked = [(name, start, stop) for name, start, stop, _ in recorder.of_data]
    assert len(asked) == len(set(asked)) == -(-4_000_000 // BLOCK_BYTES) + 2, "one for each range, header and table"
    assert sum(stop - start for _, start, stop in asked) == sum(map(len, store.objects.values())) - len(
        store.objects["manifest-00000001.json"]
    )


# --- damage


@pytest.mark.parametrize("harm", ["missing", "shorter", "longer", "changed", "swapped"])
@pytest.mark.parametrize("kept_in", ["memory", "folder"])
def test_damage_in_any_part_is_named(harm, kept_in, tmp_path):
    store, saved = cloud(), state(1)
    milepost.save(saved, store)
    names = sorted(name for name in store.objects if name.startswith("data/"))
    for index, name in enumerate(names):
        objects = dict(store.objects)
        data = objects.pop(name)
        other = objects[names[(index + 1) % (len(names) - 1)]]
        middle = len(data) // 2
        changed = {
            "shorter": data[:-1],
            "longer": data + b"x",
            "changed": data[:middle] + bytes([data[middle] ^ 1]) + data[middle + 1 :],
            "swapped": other[: len(data)].ljust(len(data), b"\0"),
        }
        if harm != "missing":
            objects[name] = changed[harm]
        damaged = MemoryStore(traits=CLOUD)
        damaged.objects = objects
        if kept_in == "folder":
            damaged = LocalStore(tmp_path / str(index))
            for one, content in objects.items():
                damaged.create(one, content)
        with pytest.raises(milepost.CheckpointDamaged, match=r"00000\.safetensors"):
            milepost.load(blank(saved), damaged)
        with milepost.open(damaged) as checkpoint:
            assert not checkpoint.verify().ok


class FlippingReader:
    def __init__(self, store, name, inner):
        self.store, self.name, self.inner = store, name, inner
        self.size_bytes = inner.size_bytes

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def read(self, offset, views):
        self.inner.read(offset, views)
        if self.store.always or (self.name, offset) not in self.store.flipped:
            self.store.flipped.add((self.name, offset))
            views[-1][-1] ^= 4


class FlippingStore(CountingStore):
    """Bytes arrive with a flipped bit: the first time that they are asked for, or always."""

    def __init__(self, inner, always=False):
        super().__init__(inner)
        self.flipped, self.always = set(), always

    def reader(self, name, **expected):
        return FlippingReader(self, name, super().reader(name, **expected))


@pytest.mark.parametrize("elements", [1000, 200_000])
def test_what_changed_on_its_way_is_read_once_more(elements):
    saved, store = state(4, elements), cloud()
    milepost.save(saved, store)
    target, flipping = blank(saved), FlippingStore(store)
    milepost.load(target, flipping)
    assert_equal(target, saved)
    assert {name.partition("/")[0] for name, _ in flipping.flipped} == {"data", "manifest-00000001.json"}
    with milepost.open(FlippingStore(store)) as checkpoint:
        assert checkpoint.verify().ok, "a byte that changed on its way is no damage"
    with pytest.raises(milepost.CheckpointDamaged):
        milepost.load(target, FlippingStore(store, always=True))


# --- failures


def test_a_crash_at_any_request_leaves_old_or_new_and_the_next_save_sweeps():
    calls = CountingStore(cloud())
    milepost.save(state(1), calls)
    base = calls.calls
    for at in range(1, 4 * base):
        store = cloud()
        milepost.save(state(1), store)
        try:
            milepost.save(state(2), CrashingStore(store, at))
            finished = True
        except Crash:
            finished = False
        target = blank(state())
        milepost.load(target, store)
        assert_equal(target, state(target["step"]))
        milepost.save(state(3), store)
        ids = {name.split("/")[1] for name in store.objects if name.startswith("data/")}
        assert len(ids) == 1, "nothing is left of the dead save"
        if finished:
            break
    assert finished


@pytest.mark.parametrize("repeats", [True, False])
def test_lost_replies_to_parts_cost_nothing_or_the_save(repeats):
    store = cloud()
    milepost.save(state(1), store)
    losing = ReplyLosingStore(store, ["create"], repeats=repeats)
    if repeats:
        milepost.save(state(2), losing)
    else:
        with pytest.raises(milepost.StorageError, match="no reply"):
            milepost.save(state(2), losing)
    target = blank(state())
    milepost.load(target, store)
    assert_equal(target, state(2 if repeats else 1))
    assert len({name.split("/")[1] for name in store.objects if name.startswith("data/")}) == 1


def test_a_part_of_another_size_under_our_name_is_an_error():
    class Squatter(CountingStore):
        def create(self, name, *data):
            if name.endswith("-00001"):
                self.inner.objects[name] = b"not ours"
            super().create(name, *data)

    with pytest.raises(milepost.AlreadyExists):
        milepost.save(state(1), Squatter(cloud()))


def test_ranks_with_a_new_structure_write_again_under_another_id():
    store, team = cloud(), [milepost.Plans() for _ in range(2)]

    def job(number, extra):
        def save(comm):
            more = {"extra": torch.ones(3)} if extra and comm.rank == 1 else {}
            return milepost.save({**state(number), **more}, store, process_group=comm, plans=team[comm.rank])

        return run_ranks(2, save)

    job(1, extra=False)
    first, second = job(2, extra=True)
    assert first == second
    assert manifest_at(store).save_id == first.save_id
    assert {name.split("/")[1] for name in store.objects if name.startswith("data/")} == {first.save_id}
    target = blank(state())
    milepost.load(target, store, allow_unexpected=True)
    assert_equal(target, state(2))


# --- how much at once


@pytest.mark.parametrize(
    ("memory", "transfer", "part", "writers", "range_", "readers"),
    [
        (512 * MIB, Transfer(), 64 * MIB, 8, 8 * MIB, 16),
        (128 * MIB, Transfer(), 64 * MIB, 2, 8 * MIB, 5),
        (16 * MIB, Transfer(), 16 * MIB, 1, 5 * MIB + 5 * BLOCK_BYTES, 1),
        (BLOCK_BYTES, Transfer(), BLOCK_BYTES, 1, BLOCK_BYTES, 1),
        (512 * MIB, Transfer(2, MIB), MIB, 2, MIB, 2),
        (512 * MIB, Transfer(32), 64 * MIB, 8, 8 * MIB, 21),
    ],
)
def test_requests_in_flight_keep_to_the_memory(memory, transfer, part, writers, range_, readers):
    traits = Traits(part_bytes=64 * MIB, range_bytes=8 * MIB, requests=16)
    limited = transfer.within(memory)
    assert limited.to_write(Traits(), 1 << 40) == limited.to_read(Traits()) == limited
    write, read_ = limited.to_write(traits, 1 << 40), limited.to_read(traits)
    assert (write.block_bytes, write.threads) == (part, writers)
    assert (read_.block_bytes, read_.threads) == (range_, readers)


@examples(200)
@given(st.integers(1, 1 << 36))
def test_little_data_goes_out_in_a_few_more_parts(data_bytes):
    traits = Traits(part_bytes=64 * MIB, range_bytes=8 * MIB, requests=16)
    part_bytes = Transfer().to_write(traits, data_bytes).block_bytes
    parts, least = -(-data_bytes // part_bytes), -(-data_bytes // (64 * MIB))
    assert part_bytes % BLOCK_BYTES == 0
    assert least <= parts <= least + 2
    assert parts == least or data_bytes // parts >= 8 * MIB - BLOCK_BYTES
    assert parts == least or parts <= 8
    assert not 16 * MIB <= data_bytes <= 64 * MIB or parts > 1
