"""States with tensors of every dtype and form, and how to compare them."""

import math
import os
from itertools import pairwise

import numpy as np
import torch

import milepost
from milepost.core.box import Box
from milepost.core.dtypes import DTYPES
from milepost.core.limits import BLOCK_BYTES, MIB
from milepost.core.shardfile import read_header

BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def random_tensor(dtype, *shape, seed=0):
    """Any bits: also those of odd NaNs. Booleans are 0 or 1."""
    kind = DTYPES[dtype]
    high = 2 if dtype == "bool" else 256
    content = np.random.default_rng(seed).integers(0, high, math.prod(shape) * kind.size_bytes, dtype=np.uint8)
    return (
        torch.empty(content.size, dtype=torch.uint8)
        .copy_(torch.from_numpy(content))
        .view(getattr(torch, dtype))
        .reshape(shape)
    )


def bits(tensor):
    """The tensor's own bits; also where it only says that it is a conjugate."""
    if tensor.is_conj() or tensor.is_neg():
        tensor = tensor.resolve_conj().resolve_neg()
    return tensor.view(BITS[tensor.element_size()])


def raw(tensor):
    return bits(tensor.detach()).numpy().tobytes()


def blank(tensor):
    """A contiguous tensor of the same kind, of zeros."""
    return torch.zeros(tensor.numel() * tensor.element_size(), dtype=torch.uint8).view(tensor.dtype).view(tensor.shape)


def assert_same(found, expected):
    assert set(found) == set(expected)
    wrong = [key for key in expected if raw(found[key]) != raw(expected[key])]
    assert wrong == []


DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]


def mixed_state():
    """Every dtype, in every form that a tensor can have in memory."""
    state = {}
    for i, dtype in enumerate(DTYPE_NAMES):
        whole = random_tensor(dtype, 90, 70, seed=i)
        state |= {
            f"{dtype} plain": whole,
            f"{dtype} transposed": random_tensor(dtype, 300, 200, seed=i).t(),
            f"{dtype} strided": random_tensor(dtype, 50, 4, 60, seed=i)[::3, 1:3, 5::7],
            f"{dtype} expanded": random_tensor(dtype, 1, 40, seed=i).expand(30, 40),
            f"{dtype} empty": whole[:0],
            f"{dtype} scalar": whole[3, 4],
            f"{dtype} a column": whole[:, 3:4],
        }
    for dtype in ("complex32", "complex64", "complex128"):
        whole = random_tensor(dtype, 250, 130)
        state |= {f"{dtype} conj": whole.conj(), f"{dtype} conj transposed": whole.conj().t()[3:, ::2]}
        state[f"{dtype} imag of conj"] = whole.conj().imag
        assert state[f"{dtype} conj"].is_conj()
        assert state[f"{dtype} imag of conj"].is_neg()
    for dtype in ("int8", "bfloat16", "float32", "complex128"):
        for size in (BLOCK_BYTES, 4 * MIB):
            for more in (-1, 0, 1):
                count = size // DTYPES[dtype].size_bytes + more
                state[f"{dtype} of {size}{more:+d}"] = random_tensor(dtype, count, seed=more + 1)
    state["large transposed"] = random_tensor("float32", 1100, 1300).t()
    state["large permuted"] = random_tensor("bfloat16", 50, 200, 60).permute(2, 0, 1)
    state["parameter"] = torch.nn.Parameter(torch.randn(300, 400))
    return state


# ---------------------------------------------------------------- stores that record what is read


class Recorder:
    """A store that records which range of which object is asked for, and how."""

    def __init__(self, inner):
        self.inner, self.url = inner, inner.url
        self.asked = []

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def reader(self, name, **expected):
        return RecordingReader(self, name, self.inner.reader(name, **expected))

    @property
    def of_data(self):
        return [(name, *span) for name, *span in self.asked if name.startswith("data/")]

    def bytes_asked(self):
        """How many bytes of the entries were asked for. Fails where any byte of a shard file was asked for twice."""
        total = 0
        for name in {name for name, *_ in self.of_data}:
            spans = sorted((start, stop) for n, start, stop, _ in self.of_data if n == name)
            twice = [(a, b) for a, b in pairwise(spans) if a[1] > b[0]]
            assert twice == [], name
            header = header_of(self.inner, name)
            low, high = header.header_bytes, header.header_bytes + header.data_bytes
            total += sum(stop - start for start, stop in spans if low <= start < high)
        return total


class RecordingReader:
    def __init__(self, store, name, inner):
        self._store, self._name, self._inner = store, name, inner

    def __getattr__(self, name):
        return getattr(self._inner, name)

    def read(self, offset, views):
        self._store.asked.append((self._name, offset, offset + sum(map(len, views)), "warm"))
        self._inner.read(offset, views)

    def read_cold(self, offset, block):
        self._store.asked.append((self._name, offset, offset + len(block), "cold"))
        self._inner.read_cold(offset, block)


def header_of(store, name, block=BLOCK_BYTES):
    reader = store.reader(name)
    length = bytearray(8)
    reader.read(0, [memoryview(length)])
    head = bytearray(8 + int.from_bytes(length, "little"))
    reader.read(0, [memoryview(head)])
    try:
        return read_header(bytes(head), reader.size_bytes, block, spans=True)
    except ValueError:
        return read_header(bytes(head), reader.size_bytes, block)


def cut(whole, world, dim, rank, memory=None):
    """Rank's part of `whole`, cut along `dim`, as a Sharded tensor (of other memory), and the box."""
    edges = [whole.shape[dim] * i // world for i in range(world + 1)]
    box = Box.whole(tuple(whole.shape)).narrow(dim, edges[rank], edges[rank + 1] - edges[rank])
    local = whole[box.slices].clone() if memory is None else memory(whole[box.slices])
    return milepost.Sharded(tuple(whole.shape), {box.offset: local}), box


def flip(path, position):
    with path.open("r+b") as file:
        file.seek(position)
        byte = file.read(1)[0]
        file.seek(position)
        file.write(bytes([byte ^ 0x10]))
        file.flush()
        os.fsync(file.fileno())
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
