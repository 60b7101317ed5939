"""Reading once, however tensors are cut, on real ranks: what each rank reads, what it gets, and who fails."""

import os
import signal
import time

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

import milepost
from milepost import Sharded
from milepost.errors import CheckpointDamaged, CheckpointError, RanksMissing, StateMismatch
from milepost.loading import pipeline, swap_boxes
from milepost.loading.rank_match import RankMatch
from milepost.loading.way import choose_way
from milepost.store import Traits
from tests.loading.reading import Reading
from tests.ranks import spawn, spawn_outcomes

MIB = 1 << 20


def whole():
    """Tensors of many kinds: about 36 MiB."""
    torch.manual_seed(0)
    return {
        "large": torch.randn(2048, 2048),
        "half": torch.randn(1024, 4096).to(torch.bfloat16),
        "deep": torch.randn(6, 50, 33, 20),
        "odd": torch.randn(257, 1021).to(torch.float16),
        "row": torch.randn(100_003),
        "complex": torch.randn(40, 50, dtype=torch.complex64),
        "bits": torch.randint(0, 2, (1000, 7)).bool(),
        "small": [torch.randn(i + 1) for i in range(30)],
        "scalar": torch.tensor(3.5),
        "empty": torch.empty(0, 4),
    }


def cut(state, mesh, placements, make=torch.clone):
    """The state on a mesh: each tensor is cut along its last dimensions first, if `placements` say so."""

    def on_mesh(value):
        fitting = [p if not isinstance(p, Shard) or p.dim < value.ndim else Replicate() for p in placements]
        return distribute_tensor(make(value), mesh, fitting)

    return torch.utils._pytree.tree_map(on_mesh, state)


def check(target):
    flat, _ = torch.utils._pytree.tree_flatten(whole())
    got, _ = torch.utils._pytree.tree_flatten(target, is_leaf=lambda leaf: isinstance(leaf, DTensor))
    for one, other in zip(flat, got, strict=True):
        assert torch.equal(one, other.full_tensor() if isinstance(other, DTensor) else other)


def save(rank, where, shape, placements):
    milepost.save(cut(whole(), init_device_mesh("cpu", shape), placements), where)


class ReadingParts(Reading):
    """A folder that is used as an object store: files are written in parts, and nothing is linked."""

    traits = Traits(part_bytes=MIB, range_bytes=MIB // 4, requests=4, is_current=True)


def load(rank, where, shape, placements, share, kind=Reading, **options):
    target, store = cut(whole(), init_device_mesh("cpu", shape), placements, torch.zeros_like), kind(where)
    milepost.load(target, store, share_reads=share, **options)
    check(target)
    return store.bytes_read


@pytest.mark.slow
@pytest.mark.timeout(180)
@pytest.mark.parametrize(
    ("before", "after"),
    [
        (((4,), [Shard(0)]), ((4,), [Shard(1)])),
        (((2, 2), [Shard(0), Shard(1)]), ((3,), [Shard(1)])),
        (((3,), [Shard(0)]), ((2, 2), [Replicate(), Shard(1)])),
    ],
    ids=["rows to columns", "two axes to columns", "rows to copies of columns"],
)
def test_each_byte_is_read_once_by_whatever_cut(tmp_path, before, after):
    spawn(len(torch.empty(before[0]).flatten()), save, tmp_path, *before)
    size = sum(f.size_bytes for f in milepost.open(tmp_path).manifest.files)
    world = len(torch.empty(after[0]).flatten())
    assert sum(spawn(world, load, tmp_path, *after, None)) > 1.8 * size, "on one machine, each reads for itself"
    once = spawn(world, load, tmp_path, *after, True)
    assert sum(once) < 1.05 * size
    assert max(once) < 1.2 * size / world, "all ranks read about the same"


def save_twice(rank, kind, first, second):
    """A step, and a second one that shares with it what did not change: all but one tensor on two of the ranks."""
    state = cut(whole(), init_device_mesh("cpu", (4,)), [Shard(0)])
    if rank > 1:
        state["large"].to_local().zero_()
    milepost.save(state, kind(first), base=kind(first.parent / "none"))
    state = cut(whole(), init_device_mesh("cpu", (4,)), [Shard(0)])
    return milepost.save(state, kind(second), base=kind(first)).reused_bytes


@pytest.mark.slow
@pytest.mark.timeout(120)
@pytest.mark.parametrize("kind", [Reading, ReadingParts])
def test_a_step_that_shares_data_with_an_earlier_one_is_read_once(tmp_path, kind):
    first, second = tmp_path / "step-1", tmp_path / "step-2"
    reused = spawn(4, save_twice, kind, first, second)[0]
    manifest = milepost.open(second).manifest
    assert reused == sum(file.used_bytes for file in manifest.older) > manifest.data_bytes // 2
    assert all(bool(file.part_bytes) == (kind is ReadingParts) for file in manifest.stored if file.size_bytes > 2 * MIB)
    once = spawn(4, load, second, (4,), [Shard(1)], True, kind)
    assert sum(once) < 1.05 * manifest.data_bytes
    assert max(once) < 1.2 * manifest.data_bytes / 4, "all ranks read about the same"


def load_in_rounds(rank, where):
    place_all, used = pipeline.place_all, []

    def counted(*arguments, transfer, **options):
        used.append(transfer.limit_bytes)
        place_all(*arguments, transfer=transfer, **options)

    pipeline.place_all = counted
    read = load(rank, where, (3,), [Shard(1)], True, host_memory_bytes=2 * MIB, verify=rank != 1)
    pipeline.place_all = place_all
    assert len(used) > 2
    assert max(used) <= MIB // 2, "three quarters of the memory are for the swap"
    dist.barrier()
    return read


def load_stages(rank, where):
    """Ranks that want different tensors, cut in different ways, and convert some of them."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("stage", "dp"))["dp"]
    full = whole()
    mine = ["large", "deep", "row", "scalar"] if rank < 2 else ["half", "odd", "complex", "bits", "empty", "scalar"]
    target = {key: torch.zeros_like(full[key]) for key in mine}
    for key in ("large", "half"):
        if key in target:
            target[key] = distribute_tensor(target[key].to(torch.float32), mesh, [Shard(1)])
    if rank == 0:
        target["row"] = Sharded((100_003,), {(0,): torch.zeros(80_000), (40_000,): torch.zeros(60_003)})  # they overlap
    if rank == 2:
        target["odd"] = torch.zeros(1021, 257, dtype=torch.float32).t()
    store = Reading(where)
    milepost.load(target, store, share_reads=True, allow_unexpected=True, convert_dtype=True)
    for part in target.pop("row").parts if rank == 0 else ():
        assert torch.equal(part.data, full["row"][part.box.slices])
    for key, value in target.items():
        got = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(got, full[key].to(got.dtype)), key
    return store.bytes_read


def load_own_columns(rank, where):
    """Ranks that cut the tensors themselves: each describes its own boxes only."""

    def columns(tensor):
        width = -(-tensor.shape[-1] // 4) if tensor.ndim else 1
        start = min(rank * width, tensor.shape[-1]) if tensor.ndim else 0
        part = tensor[..., start : start + width] if tensor.ndim else tensor
        place = (*(0 for _ in tensor.shape[1:]), start) if tensor.ndim else ()
        return Sharded(tuple(tensor.shape), {place: torch.zeros_like(part)}), part

    full = {key: one for key, one in whole().items() if key != "small"}
    cut_up = {key: columns(one) for key, one in full.items()}
    store = Reading(where)
    target = {key: sharded for key, (sharded, _) in cut_up.items()}
    milepost.load(target, store, share_reads=True, allow_unexpected=True)
    for key, (sharded, part) in cut_up.items():
        assert all(torch.equal(one.data, part) for one in sharded.parts), key
    return store.bytes_read


def load_damaged(rank, where):
    start = time.monotonic()
    with pytest.raises(CheckpointDamaged, match=r"(?s)rank \d.*large") as caught:
        load(rank, where, (3,), [Shard(1)], True)
    assert "not what arrived" not in str(caught.value)
    assert time.monotonic() - start < 30
    dist.barrier()  # the group still works: no collective was left half done


def load_what_does_not_fit(rank, where):
    mesh = init_device_mesh("cpu", (3,))
    target = {"w": distribute_tensor(torch.zeros(64, 3000, dtype=torch.float16), mesh, [Shard(1)]), "bytes": b""}
    with pytest.raises(StateMismatch, match=r"(?s)'w' .*cannot hold the value 100000.0 at index \(5, 2500\)"):
        milepost.load(target, where, share_reads=True, convert_dtype=True)
    target["w"], reports = distribute_tensor(torch.zeros(64, 3000), mesh, [Shard(1)]), []
    milepost.load(target, where, share_reads=True, progress=reports.append)
    assert [one.total_bytes for one in reports[-1:]] == [64 * 1000 * 4 + 100_000] * (rank == 0), (
        "what is read apart too"
    )
    report = milepost.explain({"w": target["w"]}, where / "other")
    assert report.fits(), report
    assert report.extra_bytes == 0, "a file of another format is not swapped: replicas may still share their reads"


def load_with_trouble_between_rounds(rank, where):
    """Errors and Ctrl-C in the planning of rank 1: the others get all rounds, and hear of it at the end."""

    def interrupt(*_):
        raise KeyboardInterrupt("on purpose")

    def press_ctrl_c():
        os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.05)  # the thread that waits for signals wakes up

    def fail_for_want_of_memory():
        raise MemoryError("on purpose")

    def trouble(owner, name, at, cause, expected):
        original, calls = getattr(owner, name), []

        def work(*arguments):
            calls.append(name)
            found = original(*arguments)
            if rank == 1 and len(calls) == at:
                cause()
            return found

        setattr(owner, name, work)
        with pytest.raises(expected if rank == 1 else CheckpointError, match="on purpose"):
            load(rank, where, (3,), [Shard(1)], True, host_memory_bytes=2 * MIB, timeout_s=40)
        setattr(owner, name, original)
        dist.barrier()

    signal.signal(signal.SIGINT, interrupt)
    for owner, name, at in ((swap_boxes.BoxSwap, "_prepare", 2), (swap_boxes._Inbox, "take", 3)):
        trouble(owner, name, at, fail_for_want_of_memory, CheckpointError)
        trouble(owner, name, at, press_ctrl_c, KeyboardInterrupt)
        trouble(owner, name, at, interrupt, KeyboardInterrupt)
    load(rank, where, (3,), [Shard(1)], True)


def load_while_one_fails(rank, where):
    """Whatever ends the work of rank 1 between two rounds, all make the rounds, and the same call works then."""

    def fails_in(owner, name, error, at, counts=lambda *_: True):
        original, calls = getattr(owner, name), []

        def work(*arguments, **options):
            calls.extend([name] * counts(*arguments))
            if rank == 1 and len(calls) == at:
                raise error("on purpose")
            return original(*arguments, **options)

        setattr(owner, name, work)
        expected = error if rank == 1 and error is KeyboardInterrupt else CheckpointError
        with pytest.raises(expected, match="on purpose"):
            load(rank, where, (3,), [Shard(1)], True, host_memory_bytes=2 * MIB)
        setattr(owner, name, original)
        load(rank, where, (3,), [Shard(1)], True)

    fails_in(swap_boxes, "copy_box", TypeError, 20)
    fails_in(swap_boxes, "copy_box", KeyboardInterrupt, 20)
    fails_in(swap_boxes, "placement_of", KeyboardInterrupt, 200)
    fails_in(pipeline, "place_all", KeyboardInterrupt, 4)
    fails_in(torch, "empty", MemoryError, 1, lambda size, *_: isinstance(size, int) and size > MIB // 4)


def load_while_one_dies(rank, where):
    send, sent = dist.all_to_all_single, []

    def die(*arguments, **options):
        sent.append(arguments)
        if len(sent) > 2:
            os._exit(1)
        return send(*arguments, **options)

    if rank == 1:
        dist.all_to_all_single = die
    with pytest.raises(RanksMissing, match=r"rank 1 .*swapping"):
        load(rank, where, (3,), [Shard(1)], True, host_memory_bytes=2 * MIB, timeout_s=4)
    return "told"


def load_while_one_sends_nothing(rank, where):
    pauses = [6.0]
    if rank == 1:
        dist.all_to_all_single = lambda *_, **__: time.sleep(pauses.pop() if pauses else 0)
    start = time.monotonic()
    with pytest.raises(CheckpointError):
        load(rank, where, (3,), [Shard(1)], True, timeout_s=1)
    assert rank == 1 or time.monotonic() - start < 5.5


def load_while_a_thread_uses_the_group(rank, where):
    send = dist.all_to_all_single

    class Mixed:
        """What another thread's collective on one rank does to ours: something else arrives."""

        def __init__(self, memory, work):
            self.memory, self.work = memory, work

        def wait(self, timeout):
            self.work.wait(timeout)
            self.memory[-20] ^= 1

    if rank == 1:
        dist.all_to_all_single = lambda memory, *rest, **options: Mixed(memory, send(memory, *rest, **options))
    with pytest.raises(CheckpointError, match=r"(?s)rank 1.*not what arrived.*share_reads=False"):
        load(rank, where, (3,), [Shard(1)], True)
    dist.all_to_all_single = send
    load(rank, where, (3,), [Shard(1)], True)


@pytest.mark.slow
@pytest.mark.timeout(180)
def test_trouble_between_rounds_leaves_no_rank_waiting(tmp_path):
    spawn(2, save, tmp_path, (2,), [Shard(0)])
    spawn(3, load_with_trouble_between_rounds, tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(240)
def test_swap_error_reaches_all_ranks_and_the_same_call_works(tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    spawn(2, save, folder, (2,), [Shard(0)])
    size = sum(f.size_bytes for f in milepost.open(folder).manifest.files)
    assert sum(spawn(3, load_in_rounds, folder)) < 1.25 * size, "in little memory, blocks at edges are read twice"
    assert sum(spawn(4, load_stages, folder)) < 1.1 * size, "all of it is wanted by some rank"
    assert sum(spawn(4, load_own_columns, folder)) < 1.1 * size
    spawn(3, load_while_a_thread_uses_the_group, folder)
    spawn(3, load_while_one_fails, folder)
    spawn(3, load_while_one_sends_nothing, folder)
    assert spawn_outcomes(3, load_while_one_dies, folder) == [(True, "told"), None, (True, "told")]
    wide = torch.zeros(64, 3000)
    wide[5, 2500] = 1e5
    milepost.save({"w": wide, "bytes": bytes(100_000)}, other)
    (other / "other").mkdir()
    save_file({"w": wide}, other / "other/model.safetensors")
    spawn(3, load_what_does_not_fit, other)
    path = min(folder.glob("data/*/*.safetensors"))
    with path.open("r+b") as file:
        file.seek(5 * MIB)
        byte = file.read(1)
        file.seek(5 * MIB)
        file.write(bytes([byte[0] ^ 1]))
    spawn(3, load_damaged, folder)


def test_wishes_of_all_ranks_may_differ_while_they_take_little():
    def offers(table_bytes, different=True):
        return [swap_boxes._Offer(bytes([i * different]), table_bytes, ("cpu",), "", MIB) for i in range(200)]

    assert len(swap_boxes._judge(offers(1000)).groups) == 200
    assert not swap_boxes._judge(offers(MIB)).groups
    assert len(swap_boxes._judge(offers(64 * MIB, different=False)).groups) == 1, "then no table is sent"


@pytest.mark.parametrize(
    ("wish", "extra", "shared", "hosts", "on_device", "way"),
    [
        (None, 90, 0, 2, False, "swap"),
        (None, 90, 100, 2, False, "swap"),
        (None, 90, 0, 1, False, "apart"),  # main memory of one machine: the page cache does it
        (None, 90, 0, 2, True, "apart"),  # not measured through the memory of devices
        (None, 90, 100, 2, True, "replicas"),
        (True, 90, 100, 2, True, "swap"),
        (None, 4, 100, 2, False, "replicas"),
        (None, 4, 0, 2, False, "apart"),
        (True, 4, 0, 1, False, "apart"),
        (True, 90, 0, 1, False, "swap"),
        (False, 90, 100, 2, True, "apart"),
    ],
)
def test_ranks_swap_where_much_would_be_read_for_others(wish, extra, shared, hosts, on_device, way):
    found = [
        RankMatch((), {}, {}, {}, b"", 100 * MIB, shared * MIB, on_device, bytes([i % hosts]), {}, extra * MIB)
        for i in range(4)
    ]
    assert choose_way(found, wish) == way
