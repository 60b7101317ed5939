"""Plans against counting: who writes each element, and where a reader finds it."""

import math
from collections import Counter

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.box import Box
from milepost.core.division import PlannedRead, PlannedWrite, extra_bytes, read_plan, share_out, written_by
from milepost.core.dtypes import DTYPES
from milepost.core.layout import Cut, Grid, Layout, Mesh, Whole
from milepost.core.limits import MIB
from milepost.core.manifest import Manifest, Tensor, new_manifest
from milepost.core.ranks import pack_ranks
from milepost.core.table import TensorRow
from tests.strategies import boxes_in, count_cover, examples, layouts, shapes

Planned = tuple[tuple[Tensor, ...], tuple[Layout, ...]]


def row(key: str, shape: tuple[int, ...], dtype: str = "float32") -> TensorRow:
    return TensorRow(key, dtype, shape, "tensor", None)


@st.composite
def planned(draw: st.DrawFn, world: int) -> Planned:
    """Some tensors with layouts of every kind, as a save plans them, or with any other parts and turns."""
    drawn = [draw(shapes(max_dims=3, max_size=8)) for _ in range(draw(st.integers(1, 3)))]
    by_key = {f"{i}": draw(layouts(shape, range(world))) for i, shape in enumerate(drawn)}
    rows = [row(f"{i}", shape) for i, shape in enumerate(drawn)]
    tensors, found = share_out(rows, by_key, world, share_replicas=draw(st.booleans()))
    if draw(st.booleans()):
        many = st.integers(1, 9)
        tensors = tuple(
            Tensor(t.key, t.dtype, t.shape, t.layout, parts=draw(many), turn=draw(many) - 1) for t in tensors
        )
    return tensors, found


def items_of(rank: int, plan: Planned) -> list[PlannedWrite]:
    tensors, found = plan
    return [item for tensor in tensors for item in written_by(tensor, found[tensor.layout], rank)]


def manifest_of(world: int, plan: Planned) -> Manifest:
    tensors, found = plan
    empty: dict[str, tuple[()]] = {"tree": (), "values": (), "per_rank": (), "files": ()}
    return new_manifest(1, "00000001-00000000", "", "", world, metadata={}, layouts=found, tensors=tensors, **empty)


def bytes_of(item: PlannedWrite) -> int:
    return item.box.elements * DTYPES[item.dtype].size_bytes


@examples(200)
@given(st.data(), st.integers(1, 8))
def test_every_element_is_written_exactly_once(data, world):
    plan = data.draw(planned(world))
    items = [item for rank in range(world) for item in items_of(rank, plan)]
    for tensor in plan[0]:
        written = [item.box for item in items if item.key == tensor.key]
        assert (count_cover(written, tensor.shape) == 1).all()


@examples(120)
@given(st.data(), st.integers(1, 8))
def test_rank_writes_only_what_it_holds_under_unique_names(data, world):
    tensors, found = plan = data.draw(planned(world))
    for rank in range(world):
        items = items_of(rank, plan)
        assert len({item.name for item in items}) == len(items)
        for tensor in tensors:
            pieces = [piece.box for piece in found[tensor.layout].pieces(tensor.shape, rank)]
            mine = [item for item in items if item.key == tensor.key]
            assert all(any(box.contains(item.box) for box in pieces) for item in mine)


@examples(200)
@given(st.data(), st.integers(1, 8))
def test_reader_finds_every_element_of_a_region_once(data, world):
    plan = data.draw(planned(world))
    manifest = manifest_of(world, plan)
    tensor = data.draw(st.sampled_from(plan[0]))
    region = data.draw(boxes_in(tensor.shape))
    reads = read_plan(manifest, tensor, region)
    assert np.array_equal(count_cover([item.box for item in reads], tensor.shape), count_cover([region], tensor.shape))
    written = {
        (rank, item.name): item.box for rank in range(world) for item in items_of(rank, plan) if item.key == tensor.key
    }
    for item in reads:
        assert written[item.rank, item.name] == item.source
        assert item.source.contains(item.box)


@examples(100)
@given(st.data(), st.integers(1, 8))
def test_large_tensors_of_every_layout_are_written_exactly_once(data, world):
    shape = data.draw(st.sampled_from([(64, 48, 40), (7, 20000), (140000,), (3, 5, 4, 2, 1100)]))
    layout = data.draw(layouts(shape, range(world)))
    plan = share_out([row("x", shape, "complex128")], {"x": layout}, world)
    written = [item.box for rank in range(world) for item in items_of(rank, plan)]
    assert (count_cover(written, shape) == 1).all()


@examples(100)
@given(st.data(), st.integers(1, 16), st.integers(1, 300))
def test_replicas_write_a_large_tensor_in_nearly_equal_parts(data, copies, rows):
    ranks = data.draw(st.lists(st.integers(0, 30), min_size=copies, max_size=copies, unique=True))
    shape = (copies * rows, MIB // 4)
    plan = share_out([row("x", shape)], {"x": Whole(pack_ranks(ranks))}, 31)
    written = [sum(map(bytes_of, items_of(rank, plan))) for rank in range(31)]
    assert {rank for rank in range(31) if written[rank]} == set(ranks)
    assert all(written[rank] == rows * MIB for rank in ranks)


@examples(100)
@given(st.data(), st.integers(2, 8), st.integers(1, 4))
def test_every_rank_of_the_mesh_writes_an_equal_share(data, copies, shards):
    axes = data.draw(st.permutations([(copies, None), (shards, Cut(0))]))
    mesh = Mesh.of(tuple(size for size, _ in axes), tuple(data.draw(st.permutations(range(copies * shards)))))
    grid = Grid(mesh, tuple(cut for _, cut in axes))
    shape = (shards * copies * 2, MIB // 4)
    plan = share_out([row("x", shape)], {"x": grid}, copies * shards)
    assert all(sum(map(bytes_of, items_of(rank, plan))) == 2 * MIB for rank in range(copies * shards))


@examples(100)
@given(st.integers(2, 16), st.integers(1, 2 * MIB - 1))
def test_a_small_replicated_tensor_stays_in_one_piece(copies, size):
    plan = share_out([row("x", (size,), "uint8")], {"x": Whole(f"0-{copies - 1}")}, copies)
    items = [item for rank in range(copies) for item in items_of(rank, plan)]
    assert [item.box for item in items] == [Box.whole((size,))]


@st.composite
def many_rows(draw: st.DrawFn) -> list[TensorRow]:
    """A model of many tensors, of a few bytes up to many MiB, each divisible by 8 in both dimensions."""
    sizes = draw(st.lists(st.tuples(st.integers(1, 400), st.integers(1, 60)), min_size=1, max_size=60))
    return [row(f"{i}", (8 * a, 8 * b)) for i, (a, b) in enumerate(sizes)]


@examples(100)
@given(st.data(), many_rows())
def test_all_ranks_write_about_the_same(data, rows):
    mesh = Mesh.of((2, 4), range(8))
    flat = Mesh.of((8,), range(8))
    kinds: list[Layout] = [
        Whole("0-7"),
        Grid(flat, (Cut(0),)),
        Grid(flat, (None,)),
        Grid(mesh, (None, Cut(0))),
        Grid(mesh, (Cut(1), None)),
        Grid(mesh, (Cut(0, 4), Cut(0))),
    ]
    chosen = data.draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=6, unique=True))
    plan = share_out(rows, {r.key: data.draw(st.sampled_from(chosen)) for r in rows}, 8)
    items = [items_of(rank, plan) for rank in range(8)]
    load = [sum(map(bytes_of, mine)) for mine in items]
    largest = max(bytes_of(item) for mine in items for item in mine)
    # Within a layout replicas end at most one part apart; layouts that group the ranks differently add up.
    assert max(load) <= sum(load) / 8 + largest * len(chosen)


@examples(50)
@given(many_rows())
def test_tensors_of_pipeline_stages_are_balanced_within_each_stage(rows):
    stages = [Whole("0-3"), Whole("4-5"), Whole("6,7,8")]
    plan = share_out(rows, {r.key: stages[i % 3] for i, r in enumerate(rows)}, 9)
    items = [items_of(rank, plan) for rank in range(9)]
    for ranks in ([0, 1, 2, 3], [4, 5], [6, 7, 8]):
        load = [sum(map(bytes_of, items[rank])) for rank in ranks]
        largest = max((bytes_of(item) for rank in ranks for item in items[rank]), default=0)
        assert max(load) <= sum(load) / len(load) + largest


@examples(50)
@given(many_rows())
def test_without_sharing_the_lowest_holder_writes_all_in_one_piece(rows):
    tensors, found = share_out(rows, {r.key: Whole("3,1,2") for r in rows}, 4, share_replicas=False)
    writers = Counter(rank for rank in range(4) for _ in items_of(rank, (tensors, found)))
    assert writers == {1: len(rows)}


@examples(50)
@given(many_rows(), st.randoms(use_true_random=False))
def test_shares_do_not_depend_on_the_order_of_tensors(rows, random):
    by_key: dict[str, Layout] = {r.key: Whole("0-3") for r in rows}
    shuffled = random.sample(rows, len(rows))
    one, two = share_out(rows, by_key, 4)[0], share_out(shuffled, by_key, 4)[0]
    assert {t.key: t for t in one} == {t.key: t for t in two}
    assert [t.key for t in two] == [r.key for r in shuffled]


def test_a_plan_names_each_layout_once_however_many_tensors_share_it():
    rows = [row(f"{i}", (8, 8)) for i in range(1000)]
    grid = Grid(Mesh.of((4,), range(4)), (Cut(0),))
    tensors, found = share_out(rows, {r.key: (grid if int(r.key) % 2 else Whole("0-3")) for r in rows}, 4)
    assert len(found) == 2
    assert all(found[t.layout] == (grid if int(t.key) % 2 else Whole("0-3")) for t in tensors)
    assert math.prod(tensors[0].shape) == 64


@pytest.mark.parametrize(
    ("shape", "box", "extra"),
    [
        ((1024, 256), Box((0, 0), (1024, 256)), 0),
        ((1024, 256), Box((0, 0), (512, 256)), 0),  # whole blocks
        ((1024, 256), Box((1, 0), (511, 256)), 1024),  # the rest of the first block
        ((1024, 256), Box((0, 0), (1024, 64)), 1024 * 192 * 4),  # gaps between rows
        ((4, 1 << 20), Box((0, 0), (4, 1 << 18)), 0),  # gaps that are too wide to be read
        ((10, 16), Box((3, 0), (2, 16)), 8 * 64),  # an entry as short as a block
    ],
)
def test_extra_bytes_are_gaps_and_the_rest_of_blocks(shape, box, extra):
    read = PlannedRead("w", 0, "w", Box.whole(shape), box)
    assert extra_bytes(read, 4) == extra
