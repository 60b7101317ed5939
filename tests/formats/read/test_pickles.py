"""The reader of pickles returns the same plain data as Python's, and runs nothing. The attacks are in `attacks/`."""

import collections
import contextlib
import itertools
import pickle
import zlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.crc import combine
from milepost.errors import UnsafeCheckpoint
from milepost.formats.read.crc import RangeSum, Sums
from milepost.formats.read.pickle_machine import BadPickle, Maker, Opaque
from milepost.formats.read.pickles import load

NAMES = st.text(max_size=5) | st.integers() | st.booleans() | st.none() | st.tuples(st.integers(), st.text(max_size=2))
PLAIN = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text() | st.binary(),
    lambda inner: (
        st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.tuples() | st.dictionaries(NAMES, inner, max_size=4)
    ),
    max_leaves=30,
)


def find(module, name):
    if (module, name) == ("_codecs", "encode"):
        return Maker(name, lambda text, _: text.encode("latin1"))
    if (module, name) == ("__builtin__", "bytes"):
        return Maker(name, bytes)
    return Opaque(f"{module}.{name}")


@given(PLAIN, st.sampled_from([2, 3, 4, 5]))
def test_plain_data_is_what_pickle_makes_of_it(value, protocol):
    found = load(pickle.dumps(value, protocol), find)
    assert found == value
    assert repr(found) == repr(value)


@given(st.binary(max_size=60))
def test_any_bytes_end_in_our_errors(data):
    for head in (b"", b"\x80\2}", b"\x80\4](K\1K\2"):
        with contextlib.suppress(BadPickle, UnsafeCheckpoint):
            load(head + data + b".", find)


@given(PLAIN, st.data())
def test_changed_pickles_end_in_our_errors(value, data):
    good = bytearray(pickle.dumps(value, 4))
    good[data.draw(st.integers(0, len(good) - 1))] = data.draw(st.integers(0, 255))
    with contextlib.suppress(BadPickle, UnsafeCheckpoint):
        load(good, find)


def test_shared_objects_stay_shared():
    inner = [1]
    found = load(pickle.dumps({"a": inner, "b": inner}), find)
    assert found["a"] is found["b"]


class Evil:
    def __init__(self, path):
        self.path = path

    def __reduce__(self):
        return (open, (str(self.path), "w"), {"x": 1}, iter([1]), iter([(1, 2)]))


@pytest.mark.parametrize("protocol", [2, 4, 5])
def test_unknown_objects_stay_opaque_and_make_nothing(tmp_path, protocol):
    data = pickle.dumps({"evil": Evil(tmp_path / "canary"), "good": 1, "counter": collections.Counter("aab")}, protocol)
    found = load(data, find)
    assert found["good"] == 1
    assert isinstance(found["evil"], Opaque)
    assert not (tmp_path / "canary").exists()


@given(st.binary(max_size=300), st.lists(st.integers(0, 300), max_size=6), st.randoms())
def test_sums_of_pieces_in_any_order_are_the_sum_of_the_whole(data, cuts, random):
    edges = sorted({0, len(data), *(min(cut, len(data)) for cut in cuts)})
    parts = list(itertools.pairwise(edges))
    whole = 0
    for a, b in parts:
        whole = combine(whole, zlib.crc32(data[a:b]), b - a)
    assert whole == zlib.crc32(data)
    random.shuffle(parts)
    for crc, right in ((zlib.crc32(data), True), (zlib.crc32(data) ^ 1, False)):
        sums = Sums()
        sums.add(RangeSum(1000, 1000 + len(data), crc, "it"))
        damaged = [one for a, b in parts for one in sums.damaged(1000 + a, [memoryview(bytearray(data[a:b]))])]
        assert len(damaged) == (0 if right or not data else 1)
