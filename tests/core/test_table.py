"""Tables of several ranks, merged, against what the ranks hold one by one."""

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np
import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from milepost.core.box import Box
from milepost.core.layout import Boxes, Cut, Grid, Held, Mesh, Whole
from milepost.core.manifest import PerRankValue, Value
from milepost.core.ranks import pack_ranks, show_ranks, unpack_ranks
from milepost.core.table import LayoutMerger, Table, TensorRow, merge_tables
from milepost.core.tree import Node
from tests.strategies import boxes_in, count_cover, examples, grids, shapes, tilings

KEYS = [f"layers.{i}" for i in range(6)]
RANKS = range(8)


def row(key: str = "x", shape: tuple[int, ...] = (4,), layout: Grid | Boxes | None = None, **other: str) -> TensorRow:
    return TensorRow(key, other.get("dtype", "float32"), shape, other.get("kind", "tensor"), layout)


def table(tensors: Iterable[TensorRow] = (), values: Mapping[str, Any] | None = None, private: tuple[str, ...] = ()):
    rows, values = tuple(tensors), values or {}
    kinds = [(r.key, "tensor") for r in rows] + [(k, "value") for k in values] + [(k, "per_rank") for k in private]
    tree = (Node(0, None, "dict"), *(Node(1, key, kind, key) for key, kind in kinds))
    return Table(rows, tree, tuple(Value(k, v) for k, v in values.items()), private)


def by_digest(tables: dict[int, Table]) -> list[tuple[tuple[int, ...], Table]]:
    """The distinct tables and the ranks that have each, as a save finds them."""
    groups: dict[bytes, list[int]] = {}
    for rank, each in tables.items():
        groups.setdefault(each.digest() + each.values_digest(), []).append(rank)
    return [(tuple(ranks), tables[ranks[0]]) for ranks in groups.values()]


def subsets(items: Iterable[Any]) -> st.SearchStrategy[list[Any]]:
    return st.lists(st.sampled_from(list(items)), unique=True, min_size=1)


# ---- what fits


@examples(200)
@given(st.dictionaries(st.sampled_from(KEYS), subsets(RANKS), min_size=1))
def test_pipeline_stage_tensors_are_whole_on_their_ranks(stages):
    tables = {rank: table(row(key) for key in KEYS if rank in stages.get(key, ())) for rank in RANKS}
    merged = merge_tables(by_digest(tables))
    assert merged.problems == ()
    assert merged.layouts == {key: Whole(pack_ranks(sorted(ranks))) for key, ranks in stages.items()}
    assert sorted(node.key for node in merged.tree[1:]) == sorted(stages)
    assert merged.rows == {key: row(key) for key in stages}


@examples(150)
@given(st.data(), st.integers(2, 4))
def test_grids_on_submeshes_that_cut_alike_become_one_grid_of_replicas(data, copies):
    shape = data.draw(shapes(max_dims=3, max_size=6))
    first = data.draw(grids(shape, range(6)))
    ranks = np.asarray(unpack_ranks(first.mesh.ranks))
    shifts = data.draw(st.permutations([6 * i for i in range(copies)]))
    alone = [Grid(Mesh.of(first.mesh.shape, tuple(ranks + shift)), first.cuts) for shift in shifts]
    tables = {rank: table([row("x", shape, grid)]) for grid in alone for rank in unpack_ranks(grid.mesh.ranks)}
    merged = merge_tables(by_digest(dict(sorted(tables.items()))))
    assert merged.problems == ()
    assert isinstance(merged.layouts["x"], Grid)
    for grid in alone:
        for rank in unpack_ranks(grid.mesh.ranks):
            assert merged.layouts["x"].pieces(shape, rank) == grid.pieces(shape, rank)


@examples(150)
@given(st.data())
def test_boxes_of_all_ranks_make_one_list_with_holders(data):
    shape = data.draw(shapes(max_dims=3, max_size=6))
    owners = {box: data.draw(subsets(RANKS)) for box in data.draw(tilings(shape)) if box.elements}
    own = {rank: [box for box, ranks in owners.items() if rank in ranks] for rank in RANKS}
    tables = {
        rank: table([row("x", shape, Boxes(tuple(Held(box, str(rank)) for box in mine)))])
        for rank, mine in own.items()
        if mine or data.draw(st.booleans())
    }
    assume(tables)
    merged = merge_tables(by_digest(tables))
    assert merged.problems == ()
    found = {held.box: sorted(held.holders) for held in merged.layouts["x"].held}
    assert found == {box: sorted(ranks) for box, ranks in owners.items()}


@examples(150)
@given(st.data())
def test_layouts_of_several_kinds_that_show_the_same_boxes_are_merged(data):
    shape = data.draw(shapes(max_dims=2, max_size=6))
    grid = data.draw(grids(shape, range(4), max_axes=2))
    ranks = unpack_ranks(grid.mesh.ranks)
    tables = {rank: table([row("x", shape, grid)]) for rank in ranks}
    for rank in ranks:  # for each, another rank that holds the same and says so with a list of boxes
        mine = tuple(Held(piece.box, str(rank + 4)) for piece in grid.pieces(shape, rank))
        tables[rank + 4] = table([row("x", shape, Boxes(mine))])
    merged = merge_tables(by_digest(tables))
    assert merged.problems == ()
    for rank in ranks:
        held = {piece.box for piece in grid.pieces(shape, rank) if piece.box.elements}
        assert {piece.box for piece in merged.layouts["x"].pieces(shape, rank)} == held
        assert {piece.box for piece in merged.layouts["x"].pieces(shape, rank + 4)} == held


def test_the_holders_of_many_boxes_take_turns_at_being_first():
    halves = [Box((i, 0), (1, 4)) for i in range(8)]
    tables = {
        rank: table([row("x", (8, 4), Boxes(tuple(Held(box, str(rank)) for box in halves)))]) for rank in range(4)
    }
    merged = merge_tables(by_digest(tables))
    assert [held.holders[0] for held in merged.layouts["x"].held] == [0, 1, 2, 3, 0, 1, 2, 3]


@examples(100)
@given(st.dictionaries(st.sampled_from(KEYS), subsets(RANKS), min_size=1))
def test_rank_private_keys_list_the_ranks_that_have_one(owners):
    tables = {rank: table(private=tuple(key for key in KEYS if rank in owners.get(key, ()))) for rank in RANKS}
    merged = merge_tables(by_digest(tables))
    expected = [PerRankValue(key, pack_ranks(sorted(ranks))) for key, ranks in owners.items()]
    assert sorted(merged.per_rank, key=lambda p: p.key) == sorted(expected, key=lambda p: p.key)


# ---- what does not


VERSIONS = [
    {"dtype": "float32", "shape": (4,)},
    {"dtype": "bfloat16", "shape": (4,)},
    {"dtype": "float32", "shape": (2, 2)},
    {"dtype": "float32", "shape": (4,), "kind": "numpy"},
]


@examples(150)
@given(st.dictionaries(st.sampled_from(KEYS), st.lists(st.integers(0, 3), min_size=8, max_size=8), min_size=1))
def test_conflicting_tensors_are_reported_with_their_ranks(versions):
    tables = {rank: table(row(key=key, **VERSIONS[chosen[rank]]) for key, chosen in versions.items()) for rank in RANKS}
    problems = merge_tables(by_digest(tables)).problems
    contradictory = {key: chosen for key, chosen in versions.items() if len(set(chosen)) > 1}
    assert len(problems) == len(contradictory)
    for key, chosen in contradictory.items():
        (problem,) = (p for p in problems if repr(key) in p)
        for number in set(chosen):
            version = {"kind": "tensor", **VERSIONS[number]}
            ranks = show_ranks(rank for rank in RANKS if chosen[rank] == number)
            assert f"{version['kind']} {version['dtype']} {version['shape']} on {ranks}" in problem


@examples(150)
@given(st.dictionaries(st.sampled_from(KEYS), st.lists(st.integers(0, 2), min_size=8, max_size=8), min_size=1))
def test_differing_values_are_listed_and_the_lowest_rank_wins(chosen):
    tables = {rank: table(values={key: f"v{of[rank]}" for key, of in chosen.items()}) for rank in RANKS}
    merged = merge_tables(by_digest(tables))
    assert {value.key: value.value for value in merged.values} == {key: f"v{of[0]}" for key, of in chosen.items()}
    differing = {key: of for key, of in chosen.items() if len(set(of)) > 1}
    assert len(merged.differing) == len(differing)
    for key, of in differing.items():
        (line,) = (text for text in merged.differing if repr(key) in text)
        for number in set(of):
            assert f'"v{number}" on {show_ranks(rank for rank in RANKS if of[rank] == number)}' in line


@examples(200)
@given(st.data())
def test_boxes_with_holes_or_overlaps_are_a_problem_and_all_others_are_not(data):
    shape = data.draw(shapes(max_dims=2, max_size=5))
    boxes = data.draw(tilings(shape, max_cuts=3))
    change = data.draw(st.sampled_from(["none", "drop", "add"]))
    boxes = boxes[1:] if change == "drop" else [*boxes, data.draw(boxes_in(shape))] if change == "add" else boxes
    distinct = {box for box in boxes if box.elements}
    tables = {
        rank: table([row("x", shape, Boxes(tuple(Held(box, str(rank)) for box in boxes[rank::2])))])
        for rank in range(2)
    }
    problems = merge_tables(by_digest(tables)).problems
    assert (problems == ()) == bool((count_cover(sorted(distinct, key=repr), shape) == 1).all())
    assert all("'x'" in problem for problem in problems)


def test_a_plain_tensor_on_one_rank_and_a_cut_one_on_another_overlap():
    grid = Grid(Mesh.of((2,), range(2)), (Cut(0),))
    tables = {0: table([row(layout=grid)]), 1: table([row(layout=grid)]), 2: table([row()])}
    (problem,) = merge_tables(by_digest(tables)).problems
    assert "'x'" in problem
    assert "overlap" in problem


@examples(100)
@given(st.data())
def test_a_rank_of_the_mesh_that_did_not_save_the_tensor_is_named(data):
    shape = (5, 4)
    grid = data.draw(grids(shape, RANKS))
    ranks = unpack_ranks(grid.mesh.ranks)
    absent = data.draw(st.sampled_from(ranks))
    tables = {rank: table([row("x", shape, grid)] if rank != absent else []) for rank in RANKS}
    problems = merge_tables(by_digest(tables)).problems
    assert len(problems) == (len(ranks) > 1 or absent != ranks[0] or any(rank != absent for rank in RANKS))
    assert f"rank {absent}" in problems[0]


def test_claimed_holder_that_did_not_save_is_reported():
    everyones = Boxes((Held(Box((0,), (2,)), "0"), Held(Box((2,), (2,)), "1")))
    tables = {0: table([row(layout=everyones)]), 1: table()}
    merged = merge_tables(by_digest(tables))
    assert merged.problems, "the half of rank 1 would be in the manifest, and no rank would write it"


def test_a_key_that_is_a_tensor_here_and_a_value_there_is_a_problem():
    tables = {0: table([row("x")]), 1: table(values={"x": 1})}
    (problem,) = merge_tables(by_digest(tables)).problems
    assert "'x'" in problem


def test_problems_of_every_kind_are_reported_in_one_go():
    grid = Grid(Mesh.of((2,), range(2)), (Cut(0),))
    hole = Boxes((Held(Box((0,), (1,)), "0"),))
    tables = {
        0: table([row("type"), row("hole", layout=hole), row("absent", layout=grid)], {"kind": 1}),
        1: table([row("type", dtype="int8"), row("kind")]),
    }
    problems = merge_tables(by_digest(tables)).problems
    assert len(problems) == 4
    assert all(any(f"{key!r}" in problem for problem in problems) for key in ["type", "hole", "absent", "kind"])


def test_one_rank_alone_needs_no_other_to_be_complete():
    assert LayoutMerger().merge([((3,), row())]) == Whole("3")


@examples(100)
@given(st.data())
def test_the_digests_tell_structures_and_values_apart_that_are_not_equal(data):
    rows = st.builds(row, st.sampled_from("ab"), shapes(2, 2), dtype=st.sampled_from(["int8", "int16"]))
    one, two = (table([data.draw(rows)], {"v": data.draw(st.sampled_from([1, 1.0, True, "1"]))}) for _ in range(2))
    assert (one.digest() == two.digest()) == (one.tensors == two.tensors)
    assert (one.values_digest() == two.values_digest()) == (repr(one.values) == repr(two.values))


@pytest.mark.parametrize("count", [0, 1])
def test_an_empty_table_merges_with_others(count):
    merged = merge_tables(by_digest({0: table(), 1: table([row()] * count)}))
    assert merged.problems == ()
    assert len(merged.tensors) == count
