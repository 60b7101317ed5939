"""Boxes against sets of indices."""

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.box import Box, check_shape, strides_of
from milepost.core.limits import MAX_DIMS, MAX_ELEMENTS
from tests.strategies import boxes_in, count_cover, examples, numbered, shapes


def elements(box: Box, shape: tuple[int, ...]) -> set[int]:
    return set(numbered(shape)[box.slices].ravel().tolist())


@examples(200)
@given(st.data())
def test_two_boxes_meet_in_exactly_the_elements_that_both_hold(data):
    shape = data.draw(shapes(max_size=6))
    one, two = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    both = one.intersect(two)
    assert both == two.intersect(one)
    assert (elements(both, shape) if both else set()) == elements(one, shape) & elements(two, shape)
    assert both is None or both.elements > 0


@examples(200)
@given(st.data())
def test_a_box_contains_another_when_it_holds_all_of_its_elements(data):
    shape = data.draw(shapes(max_size=5))
    outer, inner = data.draw(boxes_in(shape)), data.draw(boxes_in(shape, min_size=1))
    if inner.elements:
        assert outer.contains(inner) == (elements(inner, shape) <= elements(outer, shape))
    assert Box.whole(shape).contains(inner)
    assert not outer.contains(Box((*inner.offset, 0), (*inner.shape, 1)))


@examples(100)
@given(st.data())
def test_a_region_seen_from_the_corner_of_another_holds_the_same_elements(data):
    shape = data.draw(shapes(max_size=6))
    outer, other = data.draw(boxes_in(shape)), data.draw(boxes_in(shape))
    inner = outer.intersect(other)
    if inner is not None:
        seen = numbered(shape)[outer.slices][inner.within(outer).slices]
        assert np.array_equal(seen, numbered(shape)[inner.slices])


@examples(200)
@given(st.data(), st.integers(0, 15))
def test_the_parts_of_a_split_tile_the_box_and_are_nearly_equal(data, parts):
    shape = data.draw(shapes())
    box = data.draw(boxes_in(shape))
    split = box.split(parts)
    assert np.array_equal(count_cover(split, shape), count_cover([box], shape))
    assert len(split) == (min(max(parts, 1), max(box.shape, default=1)) if box.elements else 0)
    assert all(part.elements for part in split)
    for sizes in zip(*(part.shape for part in split), strict=True):
        assert max(sizes) - min(sizes) <= 1


@examples(100)
@given(st.data(), st.integers(2, 12))
def test_split_keeps_parts_contiguous_where_it_can(data, parts):
    shape = (data.draw(st.integers(parts, 20)), *data.draw(shapes(max_dims=2, max_size=5)))
    for part in Box.whole(shape).split(parts):
        held = numbered(shape)[part.slices].ravel()
        assert np.array_equal(held, np.arange(held[0], held[-1] + 1))


@examples(200)
@given(st.data(), st.integers(0, 200))
def test_slabs_spell_the_box_in_row_major_order_and_stay_under_the_limit(data, limit):
    shape = data.draw(shapes(max_size=7))
    box = data.draw(boxes_in(shape))
    slabs = list(box.slabs(limit))
    spelled = [numbered(shape)[slab.slices].ravel() for slab in slabs]
    assert np.array_equal(np.concatenate([*spelled, []]), numbered(shape)[box.slices].ravel())
    assert all(1 <= slab.elements <= max(limit, 1) for slab in slabs)


@examples(100)
@given(shapes(max_size=9))
def test_strides_are_those_of_a_row_major_array(shape):
    if math.prod(shape):
        assert strides_of(shape) == tuple(s // 8 for s in np.empty(shape, dtype=np.int64).strides)


@pytest.mark.parametrize(("offset", "shape"), [((0,), ()), ((), (1,)), ((-1,), (2,)), ((0,), (-1,)), ((0, 0), (1,))])
def test_a_box_of_impossible_numbers_is_refused(offset, shape):
    with pytest.raises(ValueError):
        Box(offset, shape)


@pytest.mark.parametrize("shape", [(1,) * (MAX_DIMS + 1), (-1,), (MAX_ELEMENTS + 1,), (2**31, 2**31), (0, 2**61)])
def test_a_shape_that_no_tensor_has_is_refused(shape):
    with pytest.raises(ValueError):
        check_shape(shape)
