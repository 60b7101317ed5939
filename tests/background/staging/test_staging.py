"""Staging: the copy is exact, memory is kept and bounded, and the caller goes on when it may."""

import os
import threading
import time
from itertools import pairwise

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import DTensor, Replicate
from torch.testing._internal.distributed.fake_pg import FakeStore

from milepost.background.staging import Owned, Stager, copying
from milepost.background.staging.arena import Arena, budget_of, free_bytes
from milepost.background.staging.copying import Copier, Copy
from milepost.comm import Solo
from milepost.core.dtypes import DTYPES
from milepost.core.limits import MIB
from milepost.data.device import Moment, gpus_of
from milepost.saving.describe import describe
from milepost.state.take_apart import PerRank
from milepost.state.values import Codec
from tests.strategies import examples
from tests.tensors import random_tensor

pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32
DTYPE_NAMES = [name for name in DTYPES if hasattr(torch, name)]
BITS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64, 16: torch.complex128}


def raw(tensor):
    plain = tensor.detach().resolve_conj().resolve_neg() if tensor.is_conj() or tensor.is_neg() else tensor.detach()
    return plain.view(BITS[tensor.element_size()]).numpy().tobytes()


def described(state):
    return describe(state, Solo(), Codec(), {})


def flat(it):
    found = {key: local.parts[0].data for key, local in it.tensors.items()}
    return found | {entry.header.name: entry.data for entry in it.private}


def turned(tensor, how):
    """The tensor in another form."""
    match how:
        case "transposed":
            return tensor.t()
        case "strided":
            return tensor[1::2, ::3]
        case "expanded":
            return tensor[:1].expand(5, tensor.shape[1])
        case "conj" if tensor.is_complex():
            return tensor.conj()
        case "neg" if tensor.is_complex():
            return tensor.conj().imag
        case "empty":
            return tensor[:0]
        case "scalar":
            return tensor[0, 0]
    return tensor


FORMS = ["plain", "transposed", "strided", "expanded", "conj", "neg", "empty", "scalar"]


@examples(60)
@given(
    st.lists(st.tuples(st.sampled_from(DTYPE_NAMES), st.sampled_from(FORMS), st.booleans()), max_size=8),
    st.one_of(st.none(), st.integers(0, 3000)),
    st.booleans(),
)
def test_a_copy_is_exact_and_what_has_none_is_live(kinds, limit, shared):
    state = {}
    for i, (dtype, form, private) in enumerate(kinds):
        tensor = turned(random_tensor(dtype, 7, 9, seed=i), form)
        state[str(i)] = PerRank(tensor) if private else tensor
    it = described(state)
    before = {key: raw(data) for key, data in flat(it).items()}
    stager = Stager(shared, limit)
    staging = stager.begin(it, "host", None)
    staging.copy()
    if staging.is_copied():
        staging.release()
    copied = staging.described(staging.release)
    live = copied.live | {entry.header.name for entry in copied.private if entry.live}
    original = flat(it)
    assert {key: raw(data) for key, data in flat(copied).items()} == before
    for key, data in flat(copied).items():
        inside = stager.arena.data.data_ptr() <= data.data_ptr() < stager.arena.data.data_ptr() + stager.arena.capacity
        assert (data is original[key]) == (key in live or data.numel() == 0)
        assert inside == (key not in live and data.numel() > 0)
    assert staging.done.is_set() == staging.at_return.is_set() == (not live) == staging.fits()
    if live:
        copied.released()
        assert staging.done.is_set()
        assert staging.at_return.is_set()
    elif limit is None:
        memory = stager.arena.data
        assert {key: raw(slot.within(memory)) for key, slot in flat(staging.slots()).items()} == before
    stager.free()


@pytest.mark.parametrize("size", [1, 8 * MIB - 4, 8 * MIB, 8 * MIB + 4, 50 * MIB + 8])
def test_large_tensors_are_copied_whole_in_every_form(size):
    count = size // 4 or 1
    whole = random_tensor("int32", count)
    grid = random_tensor("float32", 2 * MIB // 7, 7)
    sources = [whole, grid, grid.t(), grid[1::2], torch.view_as_complex(grid[:, :2].contiguous()).conj()]
    targets = [torch.empty_like(s.resolve_conj(), memory_format=torch.contiguous_format) for s in sources]
    Copier().copy([Copy(s, t) for s, t in zip(sources, targets, strict=True)], Moment(gpus_of(sources)))
    for source, target in zip(sources, targets, strict=True):
        assert target.is_contiguous()
        assert raw(target) == raw(source)


def test_memory_is_kept_while_it_is_enough_and_is_new_when_it_grows():
    for shared in (False, True):
        arena = Arena(shared)
        assert arena.data.numel() == 0
        arena.reserve(0, pinned=False)
        assert (arena.capacity, arena.version) == (0, 0)
        arena.reserve(100, pinned=False)
        assert (arena.capacity, arena.version) == (4096, 1)
        assert arena.data.data_ptr() % 4096 == 0
        for size in (4096, 5, 0):
            arena.reserve(size, pinned=False)
        assert arena.version == 1
        arena.data.fill_(7)
        arena.reserve(4097, pinned=False)
        assert (arena.capacity, arena.version) == (8192, 2)
        assert (arena.handle >= 0) == shared
        if shared:
            assert os.fstat(arena.handle).st_size == arena.capacity
        arena.free()
        assert (arena.capacity, arena.handle, arena.data.numel()) == (0, -1, 0)
        arena.reserve(1, pinned=False)
        assert arena.version == 3, "a process that mapped the old memory must map this one"
        arena.free()


def test_handles_are_closed():
    before = len(os.listdir("/proc/self/fd"))
    arena = Arena(shared=True)
    for size in range(1, 6):
        arena.reserve(size * 3 * MIB, pinned=False)
    arena.free()
    assert len(os.listdir("/proc/self/fd")) == before


def test_the_budget_is_what_was_given_or_a_share_of_what_is_free(monkeypatch):
    assert budget_of(0, 10) == 0
    assert budget_of(123, 1 << 40) == 123
    monkeypatch.setattr("milepost.background.staging.arena.free_bytes", lambda: 1000)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "4")
    assert budget_of(None, 50) == 50 + 200
    monkeypatch.delenv("LOCAL_WORLD_SIZE")
    assert budget_of(None, 0) == 800


def test_what_is_free_is_known_here():
    assert 0 < free_bytes() < 1 << 50


def test_where_memory_cannot_be_had_everything_is_live(monkeypatch, caplog):
    stager = Stager(False, None)
    it = described({"t": torch.ones(5), "u": torch.zeros(0)})
    monkeypatch.setattr(
        "milepost.background.staging.arena.new_pages", lambda size: (_ for _ in ()).throw(OSError("none left"))
    )
    staging = stager.begin(it, "host", None)
    assert staging.fits()
    staging.copy()
    if staging.is_copied():
        staging.release()
    assert not staging.fits()
    assert not staging.done.is_set()
    assert staging.described(staging.release).live == {"t"}
    assert "none left" in caplog.text


def trained():
    model = torch.nn.Linear(4, 3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(0.1))
    model(torch.ones(2, 4)).sum().backward()
    optimizer.step()
    return model, optimizer


def test_an_optimizer_owns_its_parameters_and_what_it_keeps_by_any_name():
    model, optimizer = trained()
    owned = Owned([optimizer])
    for tensor in [*model.parameters(), *(t for kept in optimizer.state.values() for t in kept.values())]:
        assert owned.holds(tensor)
        assert owned.holds(tensor.detach())
    assert owned.holds(model.weight.data[1:, 2]), "a part of it"
    assert owned.holds(model.weight.detach().view(-1)), "another view"
    for tensor in (model.weight.detach().clone(), optimizer.param_groups[0]["lr"], torch.ones(3)):
        assert not owned.holds(tensor)
    assert not Owned([]).holds(model.weight)


def test_an_optimizer_of_dtensors_owns_their_local_parts():
    torch.distributed.init_process_group("fake", store=FakeStore(), rank=0, world_size=1)
    try:
        mesh = torch.distributed.init_device_mesh("cpu", (1,))
        parameter = torch.nn.Parameter(DTensor.from_local(torch.ones(3), mesh, [Replicate()], run_check=False))
        owned = Owned([torch.optim.SGD([parameter], lr=0.1)])
        assert owned.holds(parameter.to_local())
        assert not owned.holds(torch.ones(3))
    finally:
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("way", "with_owned", "limit", "waits_for", "later"),
    [
        ("host", True, None, "copy", 0),
        ("auto", False, None, "copy", 0),
        ("auto", True, None, "part", 2),
        ("overlap", True, None, "part", 2),
        ("overlap", True, 10, "part", 0),
        ("overlap", False, None, "nothing", 3),
        ("overlap", False, 0, "nothing", 0),
    ],
)
def test_the_caller_waits_for_what_may_not_wait(monkeypatch, way, with_owned, limit, waits_for, later):
    """On the CPU. `later`: how many of the three are copied after the caller went on; the optimizer owns two."""
    model, optimizer = trained()
    stager, order = Stager(False, limit), []
    copy = Copier.copy

    def recorded(self, copies, moment, check):
        order.append((len(copies), staging.at_return.is_set()))
        copy(self, copies, moment, check)

    monkeypatch.setattr(Copier, "copy", recorded)
    it = described({"w": model.weight, "b": model.bias, "own": torch.ones(1)})
    staging = stager.begin(it, way, Owned([optimizer]) if with_owned else None)
    assert staging.at_return.is_set() == (waits_for == "nothing")
    staging.copy()
    assert order[0][1] == (waits_for == "nothing")
    assert order[1] == (later, waits_for != "copy"), "by then the caller is gone"
    assert sum(count for count, _ in order) == {None: 3, 10: 1, 0: 0}[limit]
    if staging.is_copied():
        staging.release()
    assert staging.done.is_set() == (limit is None), "what is live is not yet written"
    staging.described(staging.release).released()
    assert staging.done.is_set()


def test_what_is_live_and_not_the_optimizers_keeps_the_caller():
    _, optimizer = trained()
    stager = Stager(False, 0)
    staging = stager.begin(described({"ema": torch.ones(3)}), "overlap", Owned([optimizer]))
    staging.copy()
    if staging.is_copied():
        staging.release()
    assert not staging.at_return.is_set()
    waiting = threading.Thread(target=staging.at_return.wait)
    waiting.start()
    time.sleep(0.02)
    assert waiting.is_alive()
    staging.described(staging.release).released()
    waiting.join(10)
    assert not waiting.is_alive()


def test_batches_of_pieces_copy_what_a_gpu_would_be_asked_to_copy(monkeypatch):
    """What the copies from a GPU are made of, here with tensors of the CPU."""
    monkeypatch.setattr(copying, "_PIECE_BYTES", 4096)
    monkeypatch.setattr(copying, "_BATCH_BYTES", 20_000)
    sources = [
        *(torch.full((7,), float(i)) for i in range(100)),
        torch.randn(70, 50),
        torch.randn(70, 50).t(),
        torch.randn(33, 44, dtype=torch.complex64).conj(),
        torch._neg_view(torch.randn(900)),
        torch.randint(0, 100, (5000,), dtype=torch.uint8).view(torch.float8_e4m3fn),
        torch.randn(3, dtype=torch.complex128).conj(),
        torch.tensor(5.0),
        torch.randn(9, 1, 70)[:, :, ::2],
    ]
    targets = [torch.zeros(source.shape, dtype=source.dtype) for source in sources]
    sizes = []
    for batch in copying._batches([Copy(*pair) for pair in zip(sources, targets, strict=True)]):
        assert all(one.target.nbytes <= 4096 for one in batch)
        sizes.append(len(batch))
        torch._foreach_copy_([one.target for one in batch], [one.source for one in batch], non_blocking=True)
    assert max(sizes) <= copying._BATCH_COPIES
    for source, target in zip(sources, targets, strict=True):
        resolved = source.resolve_conj().resolve_neg().contiguous()
        assert torch.equal(resolved.view(-1).view(torch.uint8), target.view(-1).view(torch.uint8))


def test_copies_on_a_device_share_few_blocks_that_training_does_not_want(monkeypatch):
    monkeypatch.setattr(copying, "_SLAB_BYTES", 4096)
    sources = [random_tensor(dtype, 7, 30, seed=i) for i, dtype in enumerate(DTYPE_NAMES)]
    sources += [torch.tensor(3.5), torch.empty(0, 4), random_tensor("int8", 10_000), random_tensor("float32", 9, 4).T]
    clones = copying.clone_on_devices(sources)
    for source, clone in zip(sources, clones, strict=True):
        assert clone.dtype == source.dtype
        assert clone.shape == source.shape
        assert raw(clone) == raw(source.contiguous())
    blocks = {clone.untyped_storage().data_ptr(): clone.untyped_storage().nbytes() for clone in clones if clone.nbytes}
    assert len(blocks) < len(sources) / 2
    assert sum(blocks.values()) < sum(clone.nbytes for clone in clones) + 512 * len(clones)
    places = sorted((clone.data_ptr(), clone.data_ptr() + clone.nbytes) for clone in clones if clone.nbytes)
    assert all(end <= start for (_, end), (start, _) in pairwise(places))
