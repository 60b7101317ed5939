"""Checksums of spans: whole spans are checked by one call, and damage is named by its block all the same."""

import random

import pytest

import milepost
from milepost import CheckpointDamaged, Transfer
from milepost.core.limits import BLOCK_BYTES, KIB, MIB
from milepost.core.shardfile import SPAN_BLOCKS
from milepost.data.read import VerifiedFile
from milepost.store import MemoryStore
from tests.data.states import assert_same, blank, random_tensor

SPAN = SPAN_BLOCKS * BLOCK_BYTES
STATE = {"a": random_tensor("float32", 700, 777), "b": random_tensor("bfloat16", 640, 511, seed=1)}


def target():
    return {key: blank(tensor) for key, tensor in STATE.items()}


@pytest.fixture
def by_block(monkeypatch):
    """The starts of what is checked block by block."""
    seen, check = [], VerifiedFile._damaged_blocks
    monkeypatch.setattr(
        VerifiedFile, "_damaged_blocks", lambda self, start, views: seen.append(start) or check(self, start, views)
    )
    return seen


@pytest.mark.parametrize("transfer", [Transfer(), Transfer(2, MIB + BLOCK_BYTES), Transfer(3, SPAN)])
def test_whole_file_is_checked_by_spans_alone(by_block, transfer):
    store = MemoryStore()
    milepost.save(STATE, store, transfer=transfer)
    [file] = milepost.open(store).manifest.files
    assert file.spans
    found = target()
    milepost.load(found, store)
    assert_same(found, STATE)
    assert by_block == []


def test_ends_of_a_range_are_checked_by_blocks(by_block):
    store = MemoryStore()
    milepost.save(STATE, store)
    assert_same({"a": milepost.open(store)["a"][100:600]}, {"a": STATE["a"][100:600]})
    assert len(by_block) == 2


@pytest.mark.parametrize("budget", [BLOCK_BYTES, 256 * KIB])
def test_save_without_room_for_a_span_has_none(budget, by_block):
    store = MemoryStore()
    milepost.save(STATE, store, host_memory_bytes=budget)
    assert not milepost.open(store).manifest.files[0].spans
    found = target()
    milepost.load(found, store)
    assert_same(found, STATE)
    assert by_block == []  # each block counts as a span


@pytest.mark.parametrize("seed", range(12))
def test_damage_inside_a_span_is_named_by_its_block(seed):
    store, numbers = MemoryStore(), random.Random(seed)
    milepost.save(STATE, store)
    [name] = [name for name in store.list("") if name.endswith("safetensors")]
    [file] = milepost.open(store).manifest.files
    data = bytearray(store.objects[name])
    size = sum(tensor.nbytes for tensor in STATE.values())
    blocks = sorted(numbers.sample(range(-(-size // BLOCK_BYTES)), 3))
    for block in blocks:
        at = file.header_bytes + min(block * BLOCK_BYTES + numbers.randrange(BLOCK_BYTES), size - 1)
        data[at] ^= 1 << numbers.randrange(8)
    store.objects[name] = bytes(data)
    damages = milepost.open(store).verify().damages
    assert [int(damage.reason.split()[1].rstrip(":")) for damage in damages] == blocks
    with pytest.raises(CheckpointDamaged, match="bytes"):
        milepost.load(target(), store)
