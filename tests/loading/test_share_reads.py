"""Reading once for all replicas, on real ranks: what each rank reads, what it gets, and what happens when one fails."""

import os
import pathlib
import time

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost.errors import CheckpointDamaged, CheckpointError, RanksMissing
from milepost.loading import share_reads
from milepost.loading.rank_match import RankMatch
from milepost.loading.share_reads import agree_to_share
from milepost.loading.way import choose_way
from milepost.store import MemoryStore
from milepost.testing import CountingStore
from tests.loading.reading import Reading
from tests.ranks import spawn, spawn_outcomes

MIB = 1 << 20


def whole():
    """Tensors of all sizes and kinds, the same on every rank: about 46 MiB."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(10, MIB),
        "odd": torch.randn(257, 1021).to(torch.bfloat16),
        "turned": torch.randn(300, 500).t(),
        "small": [torch.randn(i + 1) for i in range(50)],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
        "complex": torch.randn(40, 5, dtype=torch.complex64),
        "bits": torch.randint(0, 2, (1000,)).bool(),
        "long": bytes(range(256)) * 1000,
    }


def blank(state):
    return torch.utils._pytree.tree_map(lambda x: torch.zeros_like(x) if isinstance(x, torch.Tensor) else b"", state)


def same(a, b):
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, (list, dict)):
        return all(
            same(x, y)
            for x, y in zip(
                a.values() if isinstance(a, dict) else a, b.values() if isinstance(b, dict) else b, strict=True
            )
        )
    return a == b


def load_plain(rank, where, share):
    state, store = whole(), Reading(where)
    target = blank(state)
    target["turned"] = torch.zeros(500, 300)[:, :].t().contiguous().t()  # strided on all ranks, and not alike
    target["large"] = torch.zeros(10, 2 * MIB)[:, ::2] if rank == 1 else target["large"]
    milepost.load(target, store, share_reads=share)
    assert same(state, target)
    return store.bytes_read


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_replicas_read_each_byte_once_in_all_and_get_all_of_them(tmp_path):
    milepost.save(whole(), tmp_path)
    size = sum(f.size_bytes for f in milepost.open(tmp_path).manifest.files)
    apart = spawn(3, load_plain, tmp_path, False)
    assert all(read > 0.95 * size for read in apart)
    once = spawn(3, load_plain, tmp_path, True)
    assert sum(once) < 1.1 * size, "blocks at the edges of shares, and each rank's look at header and table"
    assert max(once) < 1.3 * min(once), "and all ranks read about the same"
    assert spawn(3, load_plain, tmp_path, None) == apart, "on one machine, into main memory, each reads for itself"


def on_mesh(rank, where, share):
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("copies", "shards"))
    flat = init_device_mesh("cpu", (4,))
    torch.manual_seed(1)
    full = {"a": torch.randn(64, 32 * 1024), "b": torch.randn(33, 7), "c": torch.randn(8, 1000), "d": torch.randn(5, 5)}
    cuts = {"a": (mesh, [Replicate(), Shard(0)]), "b": (mesh, [Shard(1), Replicate()]), "c": (flat, [Replicate()])}

    def state(make):
        return {k: distribute_tensor(make(v), *cuts[k]) if k in cuts else make(v) for k, v in full.items()}

    if share is None:
        milepost.save(state(torch.clone), where)
        return None
    store, target = Reading(where), state(torch.zeros_like)
    milepost.load(target, store, share_reads=share)
    for key, value in target.items():
        got = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(got, full[key]), key
    return store.bytes_read


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_ranks_of_a_mesh_share_along_the_axis_that_copies(tmp_path):
    spawn(4, on_mesh, tmp_path, None)
    apart, once = spawn(4, on_mesh, tmp_path, False), spawn(4, on_mesh, tmp_path, True)
    assert 0.4 < sum(once) / sum(apart) < 0.6


def load_damaged(rank, where):
    start = time.monotonic()
    with pytest.raises(CheckpointDamaged, match=r"(?s)rank \d.*'large'"):
        milepost.load(blank(whole()), where, share_reads=True)
    assert time.monotonic() - start < 30
    dist.barrier()  # the group still works: no collective was left half done


def load_with_trouble(rank, where):
    def fail(units, message):
        raise RuntimeError("no room here")

    if rank == 1:
        share_reads._unpack = fail
    with pytest.raises(CheckpointError, match=r"(?s)rank 1.*no room here"):
        milepost.load(blank(whole()), where, share_reads=True)
    dist.barrier()


def load_while_one_sends_nothing(rank, where):
    if rank == 1:
        dist.broadcast = lambda *_, **__: time.sleep(4)
        milepost_fails = pytest.raises(CheckpointError)
    else:
        milepost_fails = pytest.raises(RanksMissing, match=r"rank 1 .*sending")
    start = time.monotonic()
    with milepost_fails:
        milepost.load(blank(whole()), where, share_reads=True, timeout_s=1)
    assert rank == 1 or time.monotonic() - start < 3.5


def load_while_the_coordinator_cannot_send(rank, where):
    def fail(*_, **__):
        raise RuntimeError("the network is gone")

    if rank == 0:
        dist.broadcast = fail
    with pytest.raises(CheckpointError, match=r"(?s)rank 0.*the network is gone") as caught:
        milepost.load(blank(whole()), where, share_reads=True, timeout_s=3)
    assert not isinstance(caught.value, RanksMissing)


def load_while_one_dies(rank, where):
    broadcast, sent = dist.broadcast, []

    def die(*arguments, **options):
        sent.append(arguments)
        if len(sent) > 2:
            os._exit(1)
        return broadcast(*arguments, **options)

    if rank == 1:
        dist.broadcast = die
    with pytest.raises(RanksMissing, match=r"rank 1 .*sending"):
        milepost.load(blank(whole()), where, share_reads=True, timeout_s=4)
    return "told"


def load_while_a_thread_uses_the_group(rank, where):
    broadcast = dist.broadcast

    class Mixed:
        """What another thread's collective on one rank does to ours: something else arrives."""

        def __init__(self, message, work):
            self.message, self.work = message, work

        def wait(self, timeout):
            self.work.wait(timeout)
            self.message[-1] ^= 1

    if rank == 1:
        dist.broadcast = lambda message, **options: Mixed(message, broadcast(message, **options))
    with pytest.raises(CheckpointError, match=r"(?s)not what arrived.*share_reads=False"):
        milepost.load(blank(whole()), where, share_reads=True)
    dist.broadcast = broadcast
    target = blank(whole())
    milepost.load(target, where, share_reads=True)
    assert same(whole(), target), "the same call works"


def load_in_little_memory(rank, where):
    mesh = init_device_mesh("cpu", (2, 1), mesh_dim_names=("copies", "one"))
    memory = torch.zeros(5, 2, MIB)
    target = {"plain": memory[:, 0], "mesh": distribute_tensor(torch.zeros(5, MIB), mesh, [Replicate(), Shard(0)])}
    used = []
    for share in (False, True):
        dist.barrier()
        pathlib.Path("/proc/self/clear_refs").write_text("5")  # forget the peak
        before = peak_bytes()
        milepost.load(target, where, share_reads=share, host_memory_bytes=MIB)
        used.append(peak_bytes() - before)
        assert target["plain"].sum() == 5 * MIB == target["mesh"].to_local().sum()
        memory.zero_()
    return used


def peak_bytes():
    lines = pathlib.Path("/proc/self/status").read_text().splitlines()
    return 1024 * int(next(line for line in lines if line.startswith("VmHWM")).split()[1])


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_exchange_keeps_to_the_memory_of_the_call(tmp_path):
    milepost.save({"plain": torch.ones(5, MIB), "mesh": torch.ones(5, MIB)}, tmp_path)
    for apart, once in spawn(2, load_in_little_memory, tmp_path):
        assert once < apart + 4 * MIB


def load_different(rank, where):
    target = blank(whole())
    if rank == 2:
        del target["odd"], target["small"]
    milepost.load(target, where, share_reads=True)
    expected = {key: value for key, value in whole().items() if key in target}
    assert same(expected, target)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_shared_read_error_reaches_all_ranks(tmp_path):
    milepost.save(whole(), tmp_path)
    spawn(3, load_with_trouble, tmp_path)
    spawn(3, load_while_a_thread_uses_the_group, tmp_path)
    spawn(3, load_while_one_sends_nothing, tmp_path)
    assert spawn_outcomes(3, load_while_one_dies, tmp_path) == [(True, "told"), None, (True, "told")]
    spawn(3, load_different, tmp_path)
    (path,) = tmp_path.glob("data/*/*.safetensors")
    with path.open("r+b") as file:
        file.seek(20 * MIB)
        byte = file.read(1)
        file.seek(20 * MIB)
        file.write(bytes([byte[0] ^ 1]))
    spawn(3, load_damaged, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(120)
def test_waiting_ranks_hear_why_no_message_comes(tmp_path):
    milepost.save(whole(), tmp_path)
    spawn(3, load_while_the_coordinator_cannot_send, tmp_path)


def test_sharing_is_agreed_on_only_where_every_member_has_the_same_plan():
    assert agree_to_share([{"0-1 g": b"x"}, {"0-1 g": b"x"}, {}])
    assert agree_to_share([{"0-1 g": b"x", "0,2 h": b"z"}, {"0-1 g": b"x"}, {"0,2 h": b"z"}])
    assert not agree_to_share([{"0-1 g": b"x"}, {"0-1 g": b"y"}])
    assert not agree_to_share([{"0-1 g": b"x"}, {}])
    assert agree_to_share([{}, {}])


@pytest.mark.parametrize(
    ("wish", "bytes_each", "on_device", "hosts", "shared"),
    [
        (None, 100 * MIB, False, 1, False),  # main memory of one machine: the page cache does it
        (None, 100 * MIB, False, 2, True),
        (None, 100 * MIB, True, 1, True),
        (None, MIB, True, 2, False),  # too little
        (True, MIB, False, 1, True),
        (True, 0, False, 1, False),
        (False, 100 * MIB, True, 2, False),
    ],
)
def test_replicas_share_where_it_pays_or_as_the_caller_wishes(wish, bytes_each, on_device, hosts, shared):
    found = [RankMatch((), {}, {}, {}, b"", bytes_each, bytes_each, on_device, bytes([i % hosts])) for i in range(4)]
    assert choose_way(found, wish) == ("replicas" if shared else "apart")


class Opened(CountingStore):
    """A store that notes which manifests are read."""

    def __init__(self, inner):
        super().__init__(inner)
        self.manifests = []

    def before(self, number, call):
        if "manifest-" in call and call.startswith("reader"):
            self.manifests.append(call)


def test_a_large_manifest_is_read_once_by_the_rank_that_finds_it():
    state = {f"key {i} {'x' * 100}": torch.full((2,), float(i)) for i in range(1000)}
    store = Opened(MemoryStore())
    milepost.save(state, store)
    assert store.inner.reader("manifest-00000001.json").size_bytes > 64 << 10

    store.manifests.clear()
    target = {key: torch.zeros(2) for key in state}
    milepost.load(target, store)
    assert store.manifests.count("reader manifest-00000001.json") == 1
    assert all(torch.equal(target[key], state[key]) for key in state)
