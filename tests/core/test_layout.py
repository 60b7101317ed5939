"""Layouts against brute force on numbered tensors, and against torch's own cuts."""

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.distributed.tensor import Replicate, Shard
from torch.distributed.tensor._utils import _compute_local_shape_and_global_offset
from torch.distributed.tensor.placement_types import Placement, _StridedShard

from milepost.core.box import Box
from milepost.core.layout import Boxes, Cut, Grid, Held, Mesh, Piece, Whole, find_gap, stack
from milepost.core.limits import MAX_DIMS, MAX_STRIDE
from milepost.core.ranks import pack_ranks, unpack_ranks
from tests.strategies import (
    boxes_in,
    count_cover,
    examples,
    grids,
    layouts,
    local_of,
    meshes,
    numbered,
    shapes,
    tilings,
)

RANKS = range(40)


def put_together(pieces: tuple[Piece, ...], local_shape: tuple[int, ...], shape: tuple[int, ...]) -> np.ndarray:
    """The local tensor that these pieces of a numbered tensor make; -1 where there is none."""
    local = np.full(local_shape, -1)
    for piece in pieces:
        window = Box(piece.at, piece.box.shape)
        assert (local[window.slices] == -1).all()
        local[window.slices] = numbered(shape)[piece.box.slices]
    return local


def holders_of(grid: Grid, shape: tuple[int, ...]) -> dict[Box, list[int]]:
    """Every box that some rank holds, with all ranks that do, in the order of the mesh."""
    held: dict[Box, list[int]] = {}
    for rank in unpack_ranks(grid.mesh.ranks):
        for piece in grid.pieces(shape, rank):
            if piece.box.elements:
                held.setdefault(piece.box, []).append(rank)
    return held


def placements_of(grid: Grid) -> list[Placement]:
    """The same cuts in torch's words."""
    return [
        Replicate()
        if cut is None
        else Shard(cut.dim)
        if cut.stride == 1
        else _StridedShard(cut.dim, split_factor=cut.stride)
        for cut in grid.cuts
    ]


# ---- grids


@examples(300)
@given(st.data())
def test_pieces_of_a_rank_match_chunking_axis_by_axis(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(shape, RANKS))
    for rank in unpack_ranks(grid.mesh.ranks):
        expected = local_of(numbered(shape), grid, rank)
        assert grid.local_shape(shape, rank) == expected.shape
        assert np.array_equal(put_together(grid.pieces(shape, rank), expected.shape, shape), expected)


@examples(150)
@given(st.data())
def test_a_rank_holds_as_few_pieces_as_its_local_tensor_has_runs(data):
    shape = (data.draw(st.integers(0, 40)),)
    grid = data.draw(grids(shape, RANKS))
    for rank in unpack_ranks(grid.mesh.ranks):
        local = local_of(numbered(shape), grid, rank)
        runs = int((np.diff(local) != 1).sum()) + 1 if len(local) else 0
        assert len(grid.pieces(shape, rank)) == runs


@examples(150)
@given(st.data())
def test_local_shape_is_the_one_torch_computes(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(shape, RANKS))
    for rank in unpack_ranks(grid.mesh.ranks):
        coordinate = grid.mesh.coordinate(rank)
        placements = placements_of(grid)
        local, _ = _compute_local_shape_and_global_offset(shape, grid.mesh.shape, list(coordinate), placements)
        assert grid.local_shape(shape, rank) == local


@examples(150)
@given(st.data())
def test_rank_holds_the_elements_torch_gives_it(data):
    shape = data.draw(shapes(max_size=9))
    grid = data.draw(grids(shape, RANKS))
    for rank in unpack_ranks(grid.mesh.ranks):
        local = torch.from_numpy(numbered(shape))
        for placement, size, i in zip(placements_of(grid), grid.mesh.shape, grid.mesh.coordinate(rank), strict=True):
            if not isinstance(placement, Replicate):
                local = placement._split_tensor(local, size, with_padding=False)[0][i]
        assert np.array_equal(put_together(grid.pieces(shape, rank), tuple(local.shape), shape), local.numpy())


@examples(250)
@given(st.data())
def test_the_boxes_that_meet_a_region_are_found_with_all_their_holders(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(shape, RANKS))
    region = data.draw(boxes_in(shape))
    found = list(grid.overlapping(shape, region))
    expected = {box: ranks for box, ranks in holders_of(grid, shape).items() if box.intersect(region) is not None}
    assert {held.box: list(held.holders) for held in found} == expected
    assert len(found) == len(expected)
    inside = [box for held in found if (box := held.box.intersect(region)) is not None]
    assert np.array_equal(count_cover(inside, shape), count_cover([region], shape))


@examples(150)
@given(st.data())
def test_replicas_are_the_ranks_that_hold_the_same(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(shape, RANKS))
    rows = [tuple(row) for row in grid.replicas().tolist()]
    mesh = np.reshape(unpack_ranks(grid.mesh.ranks), grid.mesh.shape)
    groups: dict[tuple[int, ...], list[int]] = {}
    for place, rank in np.ndenumerate(mesh):
        cutting = tuple(i for i, cut in zip(place, grid.cuts, strict=True) if cut is not None)
        groups.setdefault(cutting, []).append(int(rank))
    assert sorted(rows) == sorted(map(tuple, groups.values()))
    # Readers take a writer from `overlapping`, savers balance with `replicas`: they must agree on the order of turns.
    assert {held.holders for held in grid.overlapping(shape, Box.whole(shape))} <= set(rows)


@examples(30)
@given(st.data())
def test_a_rank_outside_the_mesh_holds_nothing(data):
    shape = data.draw(shapes())
    grid = data.draw(grids(shape, RANKS))
    assert grid.pieces(shape, 40) == ()
    assert grid.local_shape(shape, 40) is None
    assert grid.mesh.coordinate(40) is None


@examples(100)
@given(st.data())
def test_equal_grids_on_disjoint_meshes_stack_to_one(data):
    shape = data.draw(shapes(max_size=8))
    first = data.draw(grids(shape, range(8)))
    ranks = np.asarray(unpack_ranks(first.mesh.ranks))
    copies = [Grid(Mesh.of(first.mesh.shape, tuple(ranks + 8 * i)), first.cuts) for i in range(3)]
    stacked = stack(copies)
    for grid in copies:
        for rank in unpack_ranks(grid.mesh.ranks):
            assert stacked.pieces(shape, rank) == grid.pieces(shape, rank)
    for held in stacked.overlapping(shape, Box.whole(shape)):
        assert {rank % 8 for rank in held.holders} == {rank % 8 for rank in held.holders if rank < 8}
        assert len(held.holders) == 3 * sum(rank < 8 for rank in held.holders)


@examples(100)
@given(st.data())
def test_grids_that_share_a_rank_or_cut_differently_do_not_stack(data):
    one, two = data.draw(grids((6, 6), range(4))), data.draw(grids((6, 6), range(4)))
    mine, theirs = unpack_ranks(one.mesh.ranks), unpack_ranks(two.mesh.ranks)
    alike = one.cuts == two.cuts and one.mesh.shape == two.mesh.shape and not set(mine) & set(theirs)
    assert (stack([one, two]) is not None) == alike


@examples(60)
@given(st.data())
def test_a_grid_refuses_shapes_that_lack_a_dimension_which_it_cuts(data):
    shape = data.draw(shapes(max_dims=4, max_size=5))
    grid = data.draw(grids((5,) * 4, RANKS))
    if any(cut is not None and cut.dim >= len(shape) for cut in grid.cuts):
        with pytest.raises(ValueError):
            grid.check(shape)
    else:
        grid.check(shape)


def test_a_grid_refuses_to_cut_a_tensor_into_millions_of_boxes():
    mesh = Mesh.of((256, 256), range(2**16))
    Grid(mesh, (Cut(0), Cut(1))).check((2048, 2048))
    with pytest.raises(ValueError, match="boxes"):
        Grid(mesh, (Cut(0, 8), Cut(1, 8))).check((2**20, 2**20))


@pytest.mark.parametrize(
    ("shape", "ranks"),
    [((), ()), ((), (0,)), ((2,), (0,)), ((2,), (0, 0)), ((0,), ()), ((-1, -1), (0,)), ((1,) * (MAX_DIMS + 1), (0,))],
)
def test_a_mesh_of_impossible_shape_or_with_a_rank_twice_is_refused(shape, ranks):
    with pytest.raises(ValueError):
        Mesh.of(shape, ranks)


@pytest.mark.parametrize(("dim", "stride"), [(-1, 1), (MAX_DIMS, 1), (0, 0), (0, -2), (0, MAX_STRIDE + 1)])
def test_a_cut_of_impossible_dimension_or_stride_is_refused(dim, stride):
    with pytest.raises(ValueError):
        Cut(dim, stride)


@examples(50)
@given(st.data())
def test_a_grid_needs_one_cut_for_each_axis_of_its_mesh(data):
    mesh = data.draw(meshes(RANKS))
    for count in set(range(5)) - {len(mesh.shape)}:
        with pytest.raises(ValueError):
            Grid(mesh, (None,) * count)


# ---- whole tensors and explicit boxes


@examples(50)
@given(st.data())
def test_only_ranks_of_a_whole_layout_hold_everything(data):
    shape = data.draw(shapes())
    ranks = data.draw(st.lists(st.integers(0, 9), min_size=1, unique=True))
    layout = Whole(",".join(map(str, ranks)))
    for rank in range(10):
        held = [Piece(Box.whole(shape), (0,) * len(shape))] if rank in ranks else []
        assert list(layout.pieces(shape, rank)) == held
    region = data.draw(boxes_in(shape))
    assert [h.holders for h in layout.overlapping(shape, region)] == ([tuple(ranks)] if region.elements else [])
    assert layout.replicas().tolist() == [ranks]


@examples(100)
@given(st.data())
def test_explicit_boxes_are_found_by_rank_and_by_region(data):
    shape = data.draw(shapes(max_size=8))
    boxes = [box for box in data.draw(tilings(shape)) if box.elements]
    owners = [data.draw(st.lists(st.integers(0, 5), min_size=1, unique=True)) for _ in boxes]
    layout = Boxes(tuple(Held(box, pack_ranks(ranks)) for box, ranks in zip(boxes, owners, strict=True)))
    layout.check(shape)
    for rank in range(6):
        mine = [box for box, ranks in zip(boxes, owners, strict=True) if rank in ranks]
        assert [piece.box for piece in layout.pieces(shape, rank)] == mine
        assert all(piece.at == (0,) * len(shape) for piece in layout.pieces(shape, rank))
    region = data.draw(boxes_in(shape))
    found = [held.box.intersect(region) for held in layout.overlapping(shape, region)]
    assert np.array_equal(count_cover(found, shape), count_cover([region], shape))


@examples(150)
@given(st.data())
def test_layout_gives_the_same_boxes_by_rank_and_by_region(data):
    shape = data.draw(shapes(max_size=8))
    layout = data.draw(layouts(shape, range(12)))
    by_region = {(h.box, rank) for h in layout.overlapping(shape, Box.whole(shape)) for rank in h.holders}
    by_rank = {(p.box, rank) for rank in range(12) for p in layout.pieces(shape, rank) if p.box.elements}
    assert by_region == by_rank


@examples(300)
@given(st.data())
def test_boxes_that_do_not_tile_the_tensor_are_recognised(data):
    shape = data.draw(shapes(max_dims=3, max_size=6))
    boxes = data.draw(tilings(shape))
    for _ in range(data.draw(st.integers(0, 2))):
        boxes = data.draw(disturbed(boxes, shape))
    inside = [box for box in boxes if all(b <= n for b, n in zip(box.end, shape, strict=True))]
    counts = count_cover(inside, shape)
    problem = find_gap(boxes, shape)
    if len(inside) < len(boxes):
        assert "leaves the tensor" in problem
    elif (counts > 1).any():
        assert "overlap" in problem or "two boxes" in problem
    elif (counts == 0).any():
        assert problem == f"{(counts == 0).sum()} of {counts.size} elements are held by no rank"
    else:
        assert problem is None


@st.composite
def disturbed(draw, boxes: list[Box], shape: tuple[int, ...]) -> list[Box]:
    """The same boxes with one taken away, doubled, moved or resized."""
    kind = draw(st.sampled_from(["drop", "add", "move", "empty"]))
    if kind == "add" or not boxes:
        return [*boxes, draw(boxes_in(shape, min_size=1))]
    if kind == "empty":
        return [*boxes, draw(boxes_in(shape))]
    i = draw(st.integers(0, len(boxes) - 1))
    rest = boxes[:i] + boxes[i + 1 :]
    if kind == "drop":
        return rest
    step = st.integers(-1, 1)
    offset = tuple(max(0, a + draw(step)) for a in boxes[i].offset)
    return [*rest, Box(offset, tuple(max(0, n + draw(step)) for n in boxes[i].shape))]


def test_a_box_or_a_tensor_without_holders_is_refused():
    with pytest.raises(ValueError):
        Whole("")
    with pytest.raises(ValueError):
        Held(Box((), ()), "")
    with pytest.raises(ValueError, match="held by no rank"):
        Boxes(()).check((2, 2))
