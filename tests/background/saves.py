"""States, stores and teams of ranks for tests of background saves."""

import contextlib
import errno
import os
import threading
import time
from pathlib import Path

import numpy as np
import torch
import xxhash

import milepost
from milepost.comm import BoardComm, MemoryBoard
from milepost.core.dtypes import DTYPES
from milepost.core.limits import BLOCK_BYTES
from milepost.store import LocalStore
from tests.tensors import random_tensor

TIMEOUT_S = 60.0


PROMPT_S = 25.0
"""What ends within this did not wait for a timeout."""


DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]


# ---------------------------------------------------------------- states, and what is left of them


def every_form():
    """Every dtype, in every form that a tensor can have in memory."""
    forms = {}
    for i, dtype in enumerate(DTYPE_NAMES):
        whole = random_tensor(dtype, 30, 20, seed=i)
        forms[dtype] = {
            "plain": whole,
            "tied": whole,
            "same memory": whole.view(20, 30),
            "overlapping": whole[3:20, 2:],
            "transposed": random_tensor(dtype, 30, 20, seed=i).t(),
            "strided": random_tensor(dtype, 20, 4, 30, seed=i)[::3, 1:3, 5::7],
            "expanded": random_tensor(dtype, 1, 20, seed=i).expand(10, 20),
            "empty": whole[:0],
            "scalar": random_tensor(dtype, seed=i),
            "several blocks": random_tensor(dtype, BLOCK_BYTES // DTYPES[dtype].size_bytes + 1, seed=i),
        }
    for dtype in ("complex32", "complex64", "complex128"):
        whole = random_tensor(dtype, 40, 30)
        forms[f"lazy {dtype}"] = {
            "it": whole,
            "conj": whole.conj(),
            "conj.t": whole.conj().t(),
            "neg": whole.conj().imag,
        }
    one = torch.randn(50, dtype=torch.complex64)
    forms["lazy in two ways"] = {"conj": one.conj(), "neg": torch._neg_view(one), "both": torch._neg_view(one.conj())}
    forms["parameter"] = torch.nn.Parameter(torch.randn(30, 40))
    forms["large transposed"] = random_tensor("bfloat16", 500, 700).t()
    return forms


def other_leaves():
    numbers = np.random.default_rng(0).standard_normal((60, 40))
    fixed = np.arange(30)
    fixed.flags.writeable = False
    return {
        "numpy": {
            "plain": numbers.copy(),
            "transposed": numbers.copy().T,
            "backwards": numbers.copy()[::-1],
            "fixed": fixed,
            "scalar": np.array(3.5),
            "empty": np.zeros((0, 3), dtype=np.int16),
            "half": numbers.astype(np.float16),
        },
        "bytes": {"short": b"abc", "long": os.urandom(100_000), "array": bytearray(b"abc")},
        "long array": bytearray(os.urandom(200_000)),
        "values": {
            "list": [1, [2, {"a": (3, [4])}]],
            "dict": {"k": [1.5]},
            "set": {1, 2},
            "tuple": ([1], "x"),
            "none": None,
        },
        "in a list": [torch.randn(3), {"t": torch.randn(2), "n": [1]}, (torch.randn(1), [2])],
        "private": milepost.PerRank(
            {"rng": torch.get_rng_state(), "np": np.arange(5.0), "list": [1, {"b": 2}], "e": torch.ones(0)}
        ),
        "sharded": milepost.Sharded(
            (6, 5), {(0, 0): torch.randn(6, 2), (0, 2): random_tensor("float32", 6, 6)[:, ::2]}
        ),
    }


def spoil(value, seen=None):
    """Change everything that can be changed in place, all the way down."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        storage = value.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in seen:
            seen.add(storage.data_ptr())
            torch.empty(0, dtype=torch.uint8).set_(storage).bitwise_not_()
        if not value.is_inference():
            torch.autograd.graph.increment_version(value)  # as every change in place does that torch sees
    elif isinstance(value, np.ndarray):
        if value.flags.writeable:
            value.fill(0)
    elif isinstance(value, milepost.Sharded):
        spoil([part.data for part in value.parts], seen)
    elif isinstance(value, milepost.PerRank):
        spoil(value.value, seen)
        value.value = None
    elif isinstance(value, bytearray):
        value[:] = bytes(len(value))
    elif isinstance(value, set):
        value.add("late")
    elif isinstance(value, (list, tuple)):
        for item in value:
            spoil(item, seen)
        if isinstance(value, list):
            value.append("late")
    elif isinstance(value, dict):
        for item in list(value.values()):
            spoil(item, seen)
        value["late"] = 1


def content(where):
    """All that a checkpoint says and holds, but for what is different in every save. Checks every byte of it."""
    with milepost.open(where) as checkpoint:
        assert checkpoint.verify().ok
        it = checkpoint.manifest
    files = {
        f.rank: (Path(where) / it.file_name(f.rank)).read_bytes().replace(it.save_id.encode(), b"") for f in it.files
    }
    said = {
        name: getattr(it, name) for name in ("world", "metadata", "layouts", "tensors", "tree", "values", "per_rank")
    }
    return said | {"files": {rank: (len(data), xxhash.xxh3_128_hexdigest(data)) for rank, data in files.items()}}


def saved_now(state, where, comm=None, **options):
    """What a save that waits makes of this state."""
    milepost.save(state, where, process_group=comm, **options)
    return content(where)


def files_in(folder):
    return {str(path.relative_to(folder)): path.read_bytes() for path in Path(folder).rglob("*") if path.is_file()}


# ---------------------------------------------------------------- stores that a process can be given


def come_to(gate):
    """Report that the gate is reached, and wait until it is open."""
    gate.with_suffix(".reached").touch()
    deadline = time.monotonic() + TIMEOUT_S
    while not gate.exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)


class GatedStore(LocalStore):
    """Writes no data before a gate is open. The gate is a file, so that it works between processes."""

    def __init__(self, root, gate):
        super().__init__(root)
        self.gate = Path(gate)

    def writer(self, name, size_bytes, *, direct=True):
        if name.startswith("data/"):
            come_to(self.gate)
        return super().writer(name, size_bytes, direct=direct)

    def wait_reached(self):
        deadline = time.monotonic() + TIMEOUT_S
        while not self.gate.with_suffix(".reached").exists():
            assert time.monotonic() < deadline
            time.sleep(0.01)

    def open_after(self, seconds):
        timer = threading.Timer(seconds, self.gate.touch)
        timer.start()
        return timer


class FailingStore(LocalStore):
    """Has no room at the `at`-th call of a kind: "writer", "write", "commit" (of data), "create" (of the manifest)."""

    def __init__(self, root, call, at=1):
        super().__init__(root)
        self.call, self.left = call, at

    def count(self, call):
        if call == self.call:
            self.left -= 1
            if self.left == 0:
                raise milepost.StorageError("No space left on device", errno=errno.ENOSPC)

    def create(self, name, *data):
        self.count("create")
        super().create(name, *data)

    def writer(self, name, size_bytes, *, direct=True):
        inner = super().writer(name, size_bytes, direct=direct)
        if not name.startswith("data/"):
            return inner
        try:
            self.count("writer")
        except OSError:
            inner.abort()
            raise
        return FailingWriter(self, inner)


class FaultyStore(LocalStore):
    """Has a mistake in it, which shows when data is removed."""

    def delete(self, *names):
        if any(name.startswith("data/") for name in names):
            raise ValueError("no error of a store")
        super().delete(*names)


class FailingWriter:
    def __init__(self, store, inner):
        self.store, self.inner = store, inner

    def __getattr__(self, name):
        return getattr(self.inner, name)

    def write(self, offset, views):
        self.store.count("write")
        self.inner.write(offset, views)

    def commit(self):
        self.store.count("commit")
        self.inner.commit()


class Team:
    """Ranks that are threads, each with a saver of its own."""

    def __init__(self, background, world, **options):
        board = MemoryBoard()
        self.world = world
        self.savers = [
            milepost.AsyncSaver(
                background=background,
                process_group=BoardComm(board, rank, world, TIMEOUT_S),
                timeout_s=TIMEOUT_S,
                **options,
            )
            for rank in range(world)
        ]

    def run(self, work):
        """What `work(saver, rank)` gives on each rank. Fails if it raises on any, or took as long as a timeout."""
        results, raised = [None] * self.world, []

        def run(rank):
            try:
                results[rank] = work(self.savers[rank], rank)
            except Exception as error:
                error.add_note(f"on rank {rank}")
                raised.append(error)

        start = time.monotonic()
        threads = [threading.Thread(target=run, args=(rank,)) for rank in range(self.world)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if raised:
            raise ExceptionGroup("ranks failed", raised)
        assert time.monotonic() - start < PROMPT_S
        return results

    def close(self):
        self.run(lambda saver, _: saver.close())


@contextlib.contextmanager
def limited(saver, staging_bytes):
    """The saver with another budget, and no memory to begin with."""
    stager = saver._engine.stager
    before, stager._limit_bytes = stager._limit_bytes, staging_bytes
    stager.free()
    try:
        yield stager.arena
    finally:
        stager._limit_bytes = before


def shared_state(rank, world, size=40_000):
    """Replicas, shards, private values and plain ones."""
    return {
        "replica": random_tensor("float32", size),
        "replicas": {str(i): random_tensor(name, 50, 7, seed=i) for i, name in enumerate(DTYPE_NAMES)},
        "transposed": random_tensor("float32", size // 100, 70, seed=1).t(),
        "mine": milepost.Sharded((2 * world, 500), {(2 * rank, 0): torch.full((2, 500), float(rank))}),
        "private": milepost.PerRank({"rank": [rank], "t": torch.full((5000 * rank,), rank)}),
        "values": {"list": [1, [2]], "step": 7},
    }


class Net(torch.nn.Module):
    """Tied weights, buffers, and a parameter that is a view of another tensor."""

    def __init__(self, width=32):
        super().__init__()
        self.up = torch.nn.Linear(width, width, bias=False)
        self.down = torch.nn.Linear(width, width)
        self.down.weight = self.up.weight
        self.norm = torch.nn.BatchNorm1d(width)
        self.part = torch.nn.Parameter(torch.randn(4, width)[1:3])

    def forward(self, x):
        return self.norm(self.down(torch.relu(self.up(x)))) * self.part.sum(0)


def trained():
    torch.manual_seed(1)
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.5))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)
    one_step(model, optimizer, scheduler)
    return model, optimizer, scheduler


def one_step(model, optimizer, scheduler):
    model(torch.randn(8, 32)).square().mean().backward()
    optimizer.step()
    scheduler.step()
