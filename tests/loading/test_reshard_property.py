"""The whole library on random states: whatever N ranks save, M ranks with other cuts load, byte for byte.

Each example has three tensors, and each tensor a cut of its own on both sides: 400 examples are 1,200 pairs of layouts.
"""

import math
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pytest
import torch
from hypothesis import event, example, given
from hypothesis import strategies as st

import milepost
from milepost.comm import Comm
from milepost.core.box import Box, Shape
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Cut, Grid, Mesh
from milepost.core.ranks import unpack_ranks
from milepost.testing import run_ranks
from tests.strategies import boxes_in, examples, grids, local_of, numbered, shapes, some_of, tilings

Bytes = npt.NDArray[np.uint8]
pytestmark = pytest.mark.filterwarnings("ignore:ComplexHalf")  # torch's own, the first time that it meets complex32


# ---- tensors as bytes: every dtype alike, and every bit counts


def random_bytes(shape: Shape, dtype: str, seed: int) -> Bytes:
    """Random content for a tensor: an array with one more dimension, the bytes of each element."""
    size = (*shape, DTYPES[dtype].size_bytes)
    return np.random.default_rng(seed).integers(0, 2 if dtype == "bool" else 256, size, dtype=np.uint8)


def to_tensor(content: Bytes, dtype: str, transposed: bool) -> torch.Tensor:
    """A tensor with this content; transposed ones lie in memory with their dimensions in reverse."""
    dims = tuple(range(content.ndim - 1))
    stored = content.transpose((*reversed(dims), -1)) if transposed else content
    flat = torch.from_numpy(np.array(stored, order="C").reshape(-1)).view(getattr(torch, dtype))
    made = flat.reshape(stored.shape[:-1])
    return made.permute(tuple(reversed(dims))) if transposed else made


def to_bytes(tensor: torch.Tensor, transposed: bool = False) -> Bytes:
    """The content of a tensor that `to_tensor` made."""
    dims = tuple(reversed(range(tensor.ndim)))
    stored = tensor.permute(dims) if transposed else tensor
    raw = stored.reshape(-1).view(torch.uint8).numpy().reshape(*stored.shape, tensor.element_size())
    return raw.transpose((*dims, -1)) if transposed else raw


def take(content: Bytes, elements: npt.NDArray[np.int64]) -> Bytes:
    """The elements of these numbers."""
    return content.reshape(math.prod(content.shape[:-1]), content.shape[-1])[elements]


# ---- cuts: for each rank that has the key, the leaf it passes


@dataclass(frozen=True)
class Cutting:
    """How one tensor is cut over some ranks: for each its boxes, or a grid, or (neither) the whole."""

    grids: dict[int, Grid]
    boxes: dict[int, list[Box]]
    whole: tuple[int, ...] = ()
    transposed: bool = False

    def elements(self, rank: int, shape: Shape) -> list[npt.NDArray[np.int64]] | None:
        """The numbers of the elements in each local tensor of this rank; None if it does not have the key."""
        whole = numbered(shape)
        if rank in self.grids:
            local = local_of(whole, self.grids[rank], rank)
            return [whole.reshape(-1)[:0] if local is None else local]
        if rank in self.boxes:
            return [whole[box.slices] for box in self.boxes[rank]]
        return [whole] if rank in self.whole else None

    def leaf(self, rank: int, shape: Shape, dtype: str, locals_: list[torch.Tensor]) -> Any:
        """What the rank passes to `save` or `load`, around these local tensors."""
        if rank in self.grids:
            return milepost.Sharded.on_grid(shape, locals_[0], self.grids[rank], rank)
        if rank in self.boxes:
            parts = {box.offset: local for box, local in zip(self.boxes[rank], locals_, strict=True)}
            return milepost.Sharded(shape, parts, getattr(torch, dtype))
        return locals_[0]


@st.composite
def whole_cuts(draw: st.DrawFn, shape: Shape, world: int) -> Cutting:
    return Cutting({}, {}, tuple(draw(some_of(range(world)))), draw(st.booleans()))


@st.composite
def grid_cuts(draw: st.DrawFn, shape: Shape, world: int) -> Cutting:
    """One grid; ranks outside its mesh have nothing, and some of them say so."""
    grid = draw(grids(shape, range(world)))
    outside = set(range(world)) - set(unpack_ranks(grid.mesh.ranks))
    telling = outside if draw(st.booleans()) else set()
    return Cutting(dict.fromkeys({*unpack_ranks(grid.mesh.ranks), *telling}, grid), {}, (), draw(st.booleans()))


@st.composite
def stacked_cuts(draw: st.DrawFn, shape: Shape, world: int) -> Cutting:
    """Several grids that cut alike, each on ranks of its own: replicas of which each knows only itself."""
    copies = draw(st.integers(1, world))
    first = draw(grids(shape, range(world // copies)))
    ranks = np.asarray(unpack_ranks(first.mesh.ranks))
    stacked = [Grid(Mesh.of(first.mesh.shape, tuple(ranks + i * (world // copies))), first.cuts) for i in range(copies)]
    return Cutting({rank: grid for grid in stacked for rank in unpack_ranks(grid.mesh.ranks)}, {})


@st.composite
def tiled_cuts(draw: st.DrawFn, shape: Shape, world: int) -> Cutting:
    """Irregular boxes that tile the tensor; each is held by one rank or several."""
    owners = [(box, draw(some_of(range(world)))) for box in draw(tilings(shape)) if box.elements]
    boxes = {rank: [box for box, ranks in owners if rank in ranks] for rank in range(world)}
    return Cutting({}, boxes, (), draw(st.booleans()))


@st.composite
def any_boxes(draw: st.DrawFn, shape: Shape, world: int) -> Cutting:
    """Whatever boxes a reader wants, on each rank others; they may overlap and leave holes."""
    wanted = st.lists(boxes_in(shape), max_size=3, unique_by=lambda box: box.offset)
    return Cutting({}, {rank: draw(wanted) for rank in range(world)}, (), draw(st.booleans()))


SAVED = st.sampled_from([grid_cuts, grid_cuts, whole_cuts, stacked_cuts, tiled_cuts])
LOADED = st.sampled_from([grid_cuts, grid_cuts, whole_cuts, tiled_cuts, any_boxes])
DTYPE = st.sampled_from(list(DTYPES))
SHAPE = shapes(max_dims=3, max_size=9)
SEED = st.integers(0, 2**32)


@dataclass(frozen=True)
class Case:
    """One tensor: its content, and how it is cut before and after."""

    key: str
    dtype: str
    shape: Shape
    seed: int
    saved: Cutting
    loaded: Cutting

    @cached_property
    def content(self) -> Bytes:
        return random_bytes(self.shape, self.dtype, self.seed)


@st.composite
def cases(draw: st.DrawFn, key: str, savers: int, loaders: int, shape: Shape | None = None) -> Case:
    shape = draw(SHAPE) if shape is None else shape
    saved, loaded = draw(SAVED)(shape, savers), draw(LOADED)(shape, loaders)
    return Case(key, draw(DTYPE), shape, draw(SEED), draw(saved), draw(loaded))


def save(store: milepost.Store, comm: Comm, drawn: list[Case]) -> None:
    state: dict[str, Any] = {"step": 7}
    for case in drawn:
        held = case.saved.elements(comm.rank, case.shape)
        if held is not None:
            tensors = [to_tensor(take(case.content, e), case.dtype, case.saved.transposed) for e in held]
            state[case.key] = case.saved.leaf(comm.rank, case.shape, case.dtype, tensors)
    milepost.save(state, store, process_group=comm)


def load(store: milepost.Store, comm: Comm, drawn: list[Case]) -> None:
    """Load on one rank, and compare every local tensor with what brute force puts there."""
    state: dict[str, Any] = {"step": 0}
    made: list[tuple[Case, list[npt.NDArray[np.int64]], list[torch.Tensor]]] = []
    for case in drawn:
        wanted = case.loaded.elements(comm.rank, case.shape)
        if wanted is not None:
            other = [random_bytes(e.shape, case.dtype, 1) for e in wanted]
            tensors = [to_tensor(o, case.dtype, case.loaded.transposed) for o in other]
            state[case.key] = case.loaded.leaf(comm.rank, case.shape, case.dtype, tensors)
            made.append((case, wanted, tensors))
    milepost.load(state, store, process_group=comm)
    assert state["step"] == 7
    for case, wanted, tensors in made:
        for elements, tensor in zip(wanted, tensors, strict=True):
            assert np.array_equal(to_bytes(tensor, case.loaded.transposed), take(case.content, elements)), case


@examples(400)
@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_what_any_ranks_save_any_other_ranks_load_byte_for_byte(data, savers, loaders):
    drawn = [data.draw(cases(key, savers, loaders)) for key in "abc"]
    store = milepost.store.MemoryStore()
    run_ranks(savers, lambda comm: save(store, comm, drawn))
    run_ranks(loaders, lambda comm: load(store, comm, drawn))
    event(f"{savers} -> {loaders}")


@st.composite
def indices(draw: st.DrawFn, shape: Shape) -> Any:
    """Any index that a lazy tensor takes."""

    def one(length: int) -> Any:
        if length and draw(st.booleans()):
            return draw(st.integers(-length, length - 1))
        bound = st.none() | st.integers(-length - 2, length + 2)
        return slice(draw(bound), draw(bound), draw(st.none() | st.integers(1, 4)))

    head = draw(st.integers(0, len(shape)))
    tail = draw(st.integers(head, len(shape)))
    parts = [one(length) for length in shape[:head]]
    if draw(st.booleans()):
        parts += [..., *(one(length) for length in shape[tail:])]
    return parts[0] if len(parts) == 1 and draw(st.booleans()) else tuple(parts)


@examples(150)
@given(st.data(), st.integers(1, 6))
def test_open_checkpoint_reads_any_slice_alone(data, savers):
    drawn = [data.draw(cases(key, savers, 1)) for key in "ab"]
    store = milepost.store.MemoryStore()
    run_ranks(savers, lambda comm: save(store, comm, drawn))
    with milepost.open(store) as checkpoint:
        assert set(checkpoint) == {"a", "b", "step"}
        for case in drawn:
            lazy = checkpoint[case.key]
            assert (lazy.shape, lazy.dtype_name) == (case.shape, case.dtype)
            assert np.array_equal(to_bytes(lazy.read()), case.content)
            index = data.draw(indices(case.shape))
            expected = take(case.content, numbered(case.shape)[index])
            assert np.array_equal(to_bytes(contiguous(lazy[index])), expected), index
        assert checkpoint.verify().ok


def contiguous(tensor: torch.Tensor) -> torch.Tensor:
    """A copy in order, made of bytes: torch cannot copy every dtype."""
    raw = torch.empty(0, dtype=torch.uint8).set_(tensor.untyped_storage()).numpy()
    size = tensor.element_size()
    at = np.zeros((), dtype=np.int64) + tensor.storage_offset()
    for n, stride in zip(tensor.shape, tensor.stride(), strict=True):
        at = at[..., None] + np.arange(n) * stride
    return to_tensor(raw.reshape(-1, size)[at], str(tensor.dtype).removeprefix("torch."), transposed=False)


@examples(40)
@given(st.data(), st.integers(1, 4))
def test_no_byte_is_written_twice_whatever_the_replicas(data, savers):
    drawn = [data.draw(cases(key, savers, 1)) for key in "ab"]
    store = milepost.store.MemoryStore()
    run_ranks(savers, lambda comm: save(store, comm, drawn))
    with milepost.open(store) as checkpoint:
        written = sum(file.size_bytes - file.header_bytes for file in checkpoint.manifest.files)
        tables = 8 * len(checkpoint.manifest.files)  # one checksum for each: the files are smaller than a block
    assert written == sum(case.content.size for case in drawn) + (tables if written else 0)


@examples(8)
@given(st.data(), st.integers(1, 6), st.integers(1, 6))
def test_tensors_of_many_blocks_come_back_byte_for_byte(data, savers, loaders):
    shape = data.draw(st.sampled_from([(600, 1100), (5, 7, 20000), (700_001,)]))
    drawn = [data.draw(cases(key, savers, loaders, shape)) for key in "ab"]
    store = milepost.store.MemoryStore()
    run_ranks(savers, lambda comm: save(store, comm, drawn))
    run_ranks(loaders, lambda comm: load(store, comm, drawn))


@examples(150)
@given(st.data(), SHAPE, st.sampled_from([torch.uint8, torch.bfloat16, torch.float32, torch.complex64]))
def test_a_tensor_is_saved_and_loaded_whatever_its_strides(data, shape, dtype):
    steps = [data.draw(st.integers(0, 3)) for _ in shape]
    order = data.draw(st.permutations(range(len(shape))))
    strides = [steps[d] * (10 ** order[d]) for d in range(len(shape))]
    content = torch.arange(3 * 1112).to(dtype).as_strided(shape, strides, data.draw(st.integers(0, 2)))
    store = milepost.store.MemoryStore()
    milepost.save({"x": content.conj() if data.draw(st.booleans()) else content}, store)
    room = torch.zeros([3 * n for n in shape], dtype=dtype)
    target = room[
        tuple(slice(None, n * step, step) if step else slice(n) for n, step in zip(shape, steps, strict=True))
    ]
    milepost.load({"x": target}, store)
    assert torch.equal(target, milepost.open(store)["x"].read())
    assert torch.equal(target.real, content.real)
    assert torch.count_nonzero(room) == torch.count_nonzero(target)


# ---- keys


NASTY = [
    "a",
    "a.b",
    "b",
    "",
    ".",
    "\\",
    "a\\.b",
    "0",
    0,
    "<int 0>",
    None,
    "None",
    True,
    (0, "x"),
    "a[0:2]",
    "@checksums",
]
NASTY += ["__metadata__", "@private", "@@x", "a/b", "../up", "{}", "{x}", "ä\n\x00", 1.5, -1, 10**30]


NESTED = st.recursive(
    st.integers(0, 9), lambda inner: st.dictionaries(st.sampled_from(NASTY), inner, max_size=3), max_leaves=4
)


@examples(100)
@given(st.dictionaries(st.sampled_from(NASTY), NESTED, max_size=6))
@example({"": 5})
@example({"a.b": 5, "a": {"b": 5}, "a\\.b": 5})
def test_state_with_any_keys_comes_back_in_place(shape):
    state = filled(shape, iter(range(1, 100)))
    store = milepost.store.MemoryStore()
    milepost.save(state, store)
    assert same(milepost.open(store).state(), state)
    target = filled(shape, iter([0] * 100))
    milepost.load(target, store)
    assert same(target, state)
    assert len(set(milepost.open(store))) == len(milepost.open(store))


def filled(shape: Any, numbers: Any) -> Any:
    """A state of this shape whose leaves are numbered in turn: values, and tensors of several sizes."""
    if isinstance(shape, dict):
        return {key: filled(inner, numbers) for key, inner in shape.items()}
    return next(numbers) if shape < 3 else torch.full((shape - 3,), next(numbers))


def same(one: Any, two: Any) -> bool:
    if isinstance(one, dict):
        keys = [[(type(key), key) for key in each] for each in (one, two)]
        return keys[0] == keys[1] and all(same(one[key], two[key]) for key in one)
    return type(one) is type(two) and (torch.equal(one, two) if isinstance(one, torch.Tensor) else one == two)


@pytest.mark.parametrize(("one", "two"), [("a.b", ("a", "b")), (0, "0"), (None, "None")])
def test_loading_a_part_of_a_state_never_takes_the_tensor_of_another_path(one, two):
    """Where two paths read alike, a target that has only one of them must get its own tensor, or an error."""
    outer, inner = two if isinstance(two, tuple) else (two, None)
    first, second = torch.full((2,), 1.0), torch.full((2,), 2.0)
    store = milepost.store.MemoryStore()
    milepost.save({one: first, outer: second if inner is None else {inner: second}}, store)
    target = {one: torch.zeros(2)}
    try:
        milepost.load(target, store, allow_unexpected=True)
    except milepost.StateMismatch:
        return
    assert torch.equal(target[one], first)


def test_a_key_that_json_cannot_carry_comes_back_or_is_refused_as_such():
    state = {"\ud800": torch.ones(2)}
    store = milepost.store.MemoryStore()
    try:
        milepost.save(state, store)
    except milepost.InvalidState:
        return
    assert same(milepost.open(store).state(), state)


def test_paths_that_read_alike_are_kept_apart_or_refused():
    store = milepost.store.MemoryStore()

    def work(comm: Comm) -> None:
        state = {"a": {"b": torch.ones(2)}} if comm.rank else {"a.b": torch.ones(2)}
        milepost.save(state, store, process_group=comm)

    try:
        run_ranks(2, work)
    except (milepost.RanksDisagree, milepost.InvalidState):
        return
    assert set(milepost.open(store).state()) == {"a.b", "a"}


# ---- replicas


def test_ranks_that_list_equal_boxes_in_another_order_hold_equal_replicas():
    one, two = torch.zeros(2), torch.ones(2)
    store = milepost.store.MemoryStore()

    def work(comm: Comm) -> None:
        parts = {(0,): one, (2,): two} if comm.rank else {(2,): two, (0,): one}
        milepost.save({"x": milepost.Sharded((4,), parts)}, store, process_group=comm)

    run_ranks(2, work)
    assert milepost.open(store)["x"].read().tolist() == [0, 0, 1, 1]


@examples(40)
@given(st.data(), st.integers(2, 5))
def test_replica_differing_in_one_bit_fails_the_save_by_key(data, world):
    shape = data.draw(shapes(max_dims=2, max_size=6).filter(math.prod))
    cuts = tuple(data.draw(st.none() | st.builds(Cut, st.integers(0, len(shape) - 1))) if shape else None for _ in "xy")
    grid = Grid(Mesh.of((world, 2), tuple(data.draw(st.permutations(range(2 * world))))), (None, cuts[1]))
    content = random_bytes(shape, "int16", 3)
    liar = data.draw(st.integers(0, 2 * world - 1))
    if not local_of(numbered(shape), grid, liar).size:
        return
    store = milepost.store.MemoryStore()

    def work(comm: Comm) -> None:
        mine = take(content, local_of(numbered(shape), grid, comm.rank))
        if comm.rank == liar:
            mine = mine.copy()
            mine.reshape(-1)[-1] ^= 1
        leaf = milepost.Sharded.on_grid(shape, to_tensor(mine, "int16", transposed=False), grid, comm.rank)
        milepost.save({"fine": torch.ones(3), "odd.one": leaf}, store, process_group=comm)

    with pytest.raises(milepost.RanksDisagree, match=r"odd\.one") as caught:
        run_ranks(2 * world, work)
    assert f"rank {liar}" in str(caught.value)
    assert "fine" not in str(caught.value)
    with pytest.raises(milepost.CheckpointNotFound):
        milepost.open(store)
