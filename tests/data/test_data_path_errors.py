"""Damage and errors on the data path: found on every route, in any thread, and reported."""

import errno
import os
import re
import threading

import pytest
import torch

import milepost
from milepost import CheckpointDamaged, StorageError, Transfer
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.store import LocalStore
from milepost.testing import CountingStore
from tests.data.states import Recorder, assert_same, blank, flip, header_of, random_tensor, raw

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


ROUTES = {
    "in place": (False, lambda t: blank(t)),
    "through a block": (False, lambda t: blank(t.t().contiguous()).t()),
    "cold": (True, lambda t: blank(t)),
    "cold, strided": (True, lambda t: blank(t.t().contiguous()).t()),
}


@pytest.fixture
def damaged(tmp_path):
    """A checkpoint of nine blocks, and a way to damage and repair one."""
    state = {"large": random_tensor("float32", 350, 390), "small": random_tensor("int16", 100, 110)}
    milepost.save(state, tmp_path)
    (path,) = tmp_path.glob("data/*/*")
    return state, path, header_of(LocalStore(tmp_path), str(path.relative_to(tmp_path)))


@pytest.mark.parametrize("route", ROUTES)
def test_changed_byte_is_found_on_every_route(tmp_path, damaged, route):
    state, path, header = damaged
    direct, make_target = ROUTES[route]
    kinds, can_be_cold = set(), False
    for block in range(-(-header.data_bytes // BLOCK_BYTES)):
        at = min(block * BLOCK_BYTES + 12_345, header.data_bytes - 1)
        flip(path, header.header_bytes + at)
        key = next(k for k, e in header.entries.items() if e.data_offsets[0] <= at < e.data_offsets[1])
        can_be_cold |= LocalStore(path.parent).reader(path.name).is_cold(header.header_bytes, header.data_bytes)
        store = Recorder(LocalStore(tmp_path))
        target = {k: make_target(t) for k, t in state.items()}
        with pytest.raises(CheckpointDamaged, match=rf"00000.safetensors: bytes .*'{key}'"):
            milepost.load(target, store, transfer=Transfer(2, BLOCK_BYTES, direct))
        flip(path, header.header_bytes + at)
        flip(path, header.header_bytes + at)
        milepost.load(target, store, transfer=Transfer(2, BLOCK_BYTES, direct), verify=False)
        kinds |= {kind for *_, kind in store.of_data}
        changed = bytearray(raw(state[key]))
        changed[at - header.entries[key].data_offsets[0]] ^= 0x10
        assert raw(target[key]) == bytes(changed)
        flip(path, header.header_bytes + at)
    milepost.load(target, tmp_path)
    assert_same(target, state)
    assert ("cold" in kinds) == (direct and can_be_cold)


def test_changed_byte_is_found_by_a_strided_read_of_its_block(tmp_path, damaged):
    state, path, header = damaged
    at = header.entries["large"].data_offsets[0] + 4 * (300 * 390 + 200)
    flip(path, header.header_bytes + at)
    with milepost.open(tmp_path) as checkpoint:
        assert raw(checkpoint["large"][:100, 200:210]) == raw(state["large"][:100, 200:210])
        with pytest.raises(CheckpointDamaged, match="'large'"):
            checkpoint["large"][:, 200:210]
        with pytest.raises(CheckpointDamaged, match="'large'"):
            checkpoint["large"][:, 5]  # another column: the damage lies between what it reads


@pytest.mark.parametrize("part", ["header", "padding", "table"])
def test_a_damaged_header_or_table_is_an_error_also_without_verification(tmp_path, damaged, part):
    state, path, header = damaged
    at = {"header": 20, "padding": header.header_bytes - 5, "table": header.header_bytes + header.data_bytes + 3}[part]
    flip(path, at)
    for verify in (True, False):
        with pytest.raises(CheckpointDamaged, match="header or table"):
            milepost.load({k: blank(t) for k, t in state.items()}, tmp_path, verify=verify)


@pytest.mark.parametrize("more", [-1, 1, 10 * MIB])
def test_file_of_wrong_length_fails_without_verification(tmp_path, damaged, more):
    state, path, header = damaged
    os.truncate(path, header.size_bytes + more)
    for verify in (True, False):
        with pytest.raises(CheckpointDamaged, match=f"has {header.size_bytes + more} bytes"):
            milepost.load({k: blank(t) for k, t in state.items()}, tmp_path, verify=verify)


# ---------------------------------------------------------------- errors of one thread of several


class FailingWrites(CountingStore):
    """Raises at the n-th write of data, in whatever thread that is."""

    def __init__(self, inner, at, error):
        super().__init__(inner)
        self.at, self.error, self.writes = at, error, 0
        self._counting = threading.Lock()

    def before(self, number, call):
        if call.startswith("write "):
            with self._counting:
                self.writes += 1
                mine = self.writes
            if mine == self.at:
                raise self.error


def files_in(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


ERRORS = [StorageError("no room", errno=errno.ENOSPC), OSError(errno.EIO, "broken"), RuntimeError("a bug")]
ERRORS += [KeyboardInterrupt(), MemoryError("none left")]


@pytest.mark.parametrize("error", ERRORS, ids=lambda e: type(e).__name__)
@pytest.mark.parametrize("at", [1, 2, 4, 6, 9, 10])
def test_writer_thread_error_leaves_the_folder_unchanged(tmp_path, at, error):
    old, new = {"t": torch.zeros(5)}, {"t": random_tensor("float32", 8 * BLOCK_BYTES // 4)}
    milepost.save(old, tmp_path)
    before = files_in(tmp_path)
    store = FailingWrites(LocalStore(tmp_path), at, error)
    expected = StorageError if isinstance(error, OSError) else type(error)
    with pytest.raises(expected, match=re.escape(str(error)) or None):
        milepost.save(new, store, transfer=Transfer(3, BLOCK_BYTES))
    assert store.writes >= at
    assert [thread for thread in threading.enumerate() if thread.name == "milepost"] == []
    assert files_in(tmp_path) == before
    assert raw(milepost.load({"t": torch.ones(5)}, tmp_path)["t"]) == raw(old["t"])
    milepost.save(new, tmp_path)
    assert raw(milepost.load({"t": blank(new["t"])}, tmp_path)["t"]) == raw(new["t"])


@pytest.mark.parametrize("error", [RuntimeError("a bug"), KeyboardInterrupt()], ids=lambda e: type(e).__name__)
def test_no_empty_folder_stays_after_an_error(tmp_path, error):
    with pytest.raises(type(error)):
        milepost.save({"t": torch.ones(9)}, FailingWrites(LocalStore(tmp_path), 2, error))
    milepost.save({"t": torch.ones(9)}, tmp_path)
    assert len(list((tmp_path / "data").iterdir())) == 1


def test_as_many_writes_as_blocks_and_a_header_and_a_table_are_made(tmp_path):
    """So the numbers above mean what they should: the first is the header, the tenth the table."""
    store = FailingWrites(LocalStore(tmp_path), 0, None)
    milepost.save({"t": random_tensor("float32", 8 * BLOCK_BYTES // 4)}, store, transfer=Transfer(3, BLOCK_BYTES))
    assert store.writes == 10


def test_an_error_of_a_reading_thread_fails_the_load(tmp_path, monkeypatch):
    state = {"t": random_tensor("float32", 8 * BLOCK_BYTES // 4)}
    milepost.save(state, tmp_path)
    preadv, calls = os.preadv, []

    def fail(handle, views, offset):
        calls.append(offset)
        if len(calls) == 6:
            raise OSError(errno.EIO, "broken")
        return preadv(handle, views, offset)

    monkeypatch.setattr(os, "preadv", fail)
    with pytest.raises(StorageError, match=r"cannot read .*safetensors: broken") as caught:
        milepost.load({"t": blank(state["t"])}, tmp_path, transfer=Transfer(3, BLOCK_BYTES))
    assert caught.value.errno == errno.EIO
    assert [thread for thread in threading.enumerate() if thread.name == "milepost"] == []
