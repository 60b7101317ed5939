"""Runs of elements and of bytes, against brute force: the data path cuts blocks into them and checks with them."""

import math
from itertools import pairwise

import numpy as np
import xxhash
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.box import boxes_of_run
from milepost.core.shardfile import sums_of
from tests.strategies import examples, numbered, shapes


@examples(400)
@given(st.data())
def test_boxes_of_a_run_are_in_row_major_order_and_few(data):
    shape = data.draw(shapes(max_dims=5, max_size=6))
    start, stop = sorted(data.draw(st.tuples(*[st.integers(0, math.prod(shape))] * 2)))
    boxes = list(boxes_of_run(shape, start, stop))
    spelled = [numbered(shape)[box.slices].ravel() for box in boxes]
    assert np.array_equal(np.concatenate([np.arange(0), *spelled]), np.arange(start, stop))
    assert all(box.elements for box in boxes)
    assert len(boxes) <= max(1, 2 * len(shape))


def test_every_run_of_a_small_tensor_is_spelled():
    shape = (3, 1, 2, 4)
    for start in range(25):
        for stop in range(start, 25):
            spelled = [numbered(shape)[box.slices].ravel() for box in boxes_of_run(shape, start, stop)]
            assert np.concatenate([np.arange(0), *spelled]).tolist() == list(range(start, stop))


@examples(300)
@given(st.data(), st.sampled_from([1, 3, 64, 300, 4096]), st.integers(0, 2**32))
def test_checksums_do_not_depend_on_how_the_bytes_are_cut_into_views(data, block, seed):
    size = data.draw(st.integers(0, 7 * block) | st.sampled_from([block * i for i in range(8)]))
    whole = np.random.default_rng(seed).bytes(size)
    places = st.integers(0, size) | st.integers(0, size // block).map(lambda i: i * block)
    cuts = [0, *sorted(data.draw(st.lists(places, max_size=8))), size]
    views = [memoryview(whole)[a:b] for a, b in pairwise(cuts)]
    assert b"".join(views) == whole
    expected = [xxhash.xxh3_64_intdigest(whole[at : at + block]) for at in range(0, size, block)]
    assert sums_of(views, block) == expected
    assert sums_of([memoryview(whole)], block) == expected
    assert sums_of([view for view in views if len(view)], block) == expected
