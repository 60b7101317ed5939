"""Arrays that cannot be written and long bytes are saved and loaded with bounded memory, and stay what they are."""

import os
import subprocess
import sys
import warnings

import numpy as np
import pytest
import torch

import milepost
from milepost.core.limits import MIB
from milepost.state.host_memory import new_bytes
from milepost.testing import run_ranks

BOUND = """
import resource, sys
import numpy as np, torch, milepost
torch.set_num_threads(1)
MIB = 1 << 20
size = 256 * MIB
def bounded(work, most):
    # A limit of the kernel on private memory: a copy of the whole value is a MemoryError, not a number to compare.
    used = int(next(l for l in open("/proc/self/status") if l.startswith("VmData")).split()[1]) * 1024
    _, hard = resource.getrlimit(resource.RLIMIT_DATA)
    resource.setrlimit(resource.RLIMIT_DATA, (used + most, hard))
    work()
    resource.setrlimit(resource.RLIMIT_DATA, (hard, hard))
warm = np.zeros(100_000)
milepost.save({"a": warm}, "warm", host_memory_bytes=16 * MIB)
milepost.load({"a": warm}, "warm", host_memory_bytes=16 * MIB)
"""
MEMMAP = """
np.memmap("file", dtype=np.float32, mode="w+", shape=(size // 4,))[-1] = 7
state = {"a": np.memmap("file", dtype=np.float32, mode="r", shape=(8, size // 32)), "p": milepost.PerRank(
    np.memmap("file", dtype=np.uint8, mode="r", shape=(size,)))}
bounded(lambda: milepost.save(state, "step", host_memory_bytes=16 * MIB), 128 * MIB)
assert milepost.open("step")["a"][7, -1].item() == 7
"""
BYTES = """
value = bytes(range(256)) * (size // 256)
state = {"b": value}
bounded(lambda: milepost.save(state, "step", host_memory_bytes=16 * MIB), 128 * MIB)
# The result is part of the state; nothing of its size comes on top.
def load():
    assert milepost.load({"b": None}, "step", host_memory_bytes=16 * MIB)["b"] == value
def look():
    assert milepost.open("step")["b"] == value
bounded(load, size + 128 * MIB)
bounded(look, size + 128 * MIB)
milepost.save({"b": bytearray(value)}, "step", host_memory_bytes=16 * MIB)
bounded(load, size + 128 * MIB)
"""


@pytest.mark.slow
@pytest.mark.parametrize("program", [MEMMAP, BYTES], ids=["a memory map", "bytes"])
def test_a_value_of_256_mib_is_not_copied_whole(tmp_path, program):
    done = subprocess.run(
        [sys.executable, "-c", BOUND + program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert done.returncode == 0, done.stderr


def read_only(array):
    array.flags.writeable = False
    return array


ARRAYS = {
    "whole": read_only(np.arange(24.0).reshape(4, 6)),
    "cut": read_only(np.arange(24.0).reshape(4, 6))[::2, 1:5:3],
    "turned": read_only(np.arange(24, dtype=np.int16).reshape(2, 3, 4)).transpose(2, 0, 1),
    "scalar": read_only(np.array(2.5, dtype=np.float16)),
    "empty": read_only(np.zeros((0, 3), dtype=np.uint64)),
    "spread": np.broadcast_to(np.float32(3), (5, 2)),
    "backwards": read_only(np.arange(6))[::-1],
    "from bytes": np.frombuffer(b"0123456789abcdef", dtype=np.uint32),
}


def test_read_only_arrays_are_saved_and_not_touched(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        milepost.save(ARRAYS, tmp_path / "a")
        milepost.async_save({"a": ARRAYS, "own": milepost.PerRank(ARRAYS)}, tmp_path / "b").result()
    for found in (milepost.open(tmp_path / "a").state(), milepost.open(tmp_path / "b").state()["a"]):
        for name, array in ARRAYS.items():
            assert found[name].dtype == array.dtype, name
            assert np.array_equal(found[name], array), name
            assert not array.flags.writeable
            assert found[name].flags.writeable


@pytest.mark.parametrize("kind", ["bytes", "bytearray"])
@pytest.mark.parametrize("size", [0, 1, 2, 100_000])
def test_new_bytes_are_nobody_elses(kind, size):
    before = bytes([255]) * size
    made, memory = new_bytes(size, kind)
    memory.fill_(255)
    assert made == before
    assert type(made).__name__ == kind
    memory.fill_(7)
    assert bytes([255]) * size == before
    assert size == 0 or bytes([0]) == b"\0"


def test_bytes_that_come_back_are_ordinary(tmp_path):
    state = {"b": os.urandom(100_000), "a": bytearray(os.urandom(70_000)), "own": milepost.PerRank(os.urandom(80_000))}
    milepost.save(state, tmp_path)
    target = milepost.load({"b": b"", "a": None, "own": milepost.PerRank(None)}, tmp_path)
    assert target["b"] == state["b"]
    assert hash(target["b"]) == hash(bytes(bytearray(state["b"])))
    assert {target["b"]: 1}[state["b"]] == 1
    assert target["own"].value == state["own"].value
    target["a"].extend(b"more")  # no tensor holds on to it
    opened = milepost.open(tmp_path)
    opened["a"].append(1)
    assert opened["b"] == state["b"]
    state["a"] += b"more"


def test_a_bytearray_may_grow_while_it_is_saved_in_the_background(tmp_path):
    state = {"log": bytearray(b"x" * 100_000)}
    pending = milepost.async_save(state, tmp_path)
    state["log"].extend(b"y")
    pending.result()
    assert milepost.open(tmp_path)["log"] == b"x" * 100_000


def test_ranks_read_long_bytes_once_each():
    store = milepost.store.MemoryStore()
    data = os.urandom(MIB)
    milepost.save({"b": data, "t": torch.ones(3)}, store)
    for state in run_ranks(2, lambda comm: milepost.load({"b": 0, "t": torch.zeros(3)}, store, process_group=comm)):
        assert state["b"] == data


def test_a_memory_map_as_a_target_is_replaced_and_never_written(tmp_path):
    np.arange(50_000.0).tofile(tmp_path / "file")
    mapped = np.memmap(tmp_path / "file", dtype=np.float64, mode="r", shape=(50_000,))
    milepost.save({"a": np.zeros(50_000)}, tmp_path / "step")
    target = milepost.load({"a": mapped}, tmp_path / "step")
    assert not target["a"].any()
    assert mapped[-1] == 49_999
    with pytest.raises(ValueError, match="cannot be read into"):
        milepost.load({"a": mapped}, tmp_path / "step", planner=milepost.planning.DefaultLoadPlanner())
