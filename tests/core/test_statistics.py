"""Statistics over ranks: sums of rows, how many rows are sent, and records that cannot be true."""

import math

import msgspec
import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.core import partial_statistics
from milepost.core.manifest import Tensor
from milepost.core.partial_statistics import PartialStatistics, new_bins, new_rows, summarise
from milepost.core.statistics import TensorStatistics, bin_range, check_statistics
from milepost.data.tally import TalliedEntry, Tally
from tests.strategies import examples
from tests.tensors import check_histogram
from tests.tensors import check_statistics as check_numbers

KEYS = ["a", "b", "ä\ud800", ""]


def of_rank(parts):
    """What a rank sends that holds these parts of tensors, each an array of float64."""
    tally = Tally("histogram")
    data = b"".join(part.tobytes() for _, part in parts)
    starts = np.cumsum([0, *(part.nbytes for _, part in parts)]).tolist()
    entries = zip(starts, (KEYS.index(key) for key, _ in parts), strict=False)
    tally.begin([TalliedEntry(start, "float64", number) for start, number in entries], len(data))
    if data:
        tally.add(0, [memoryview(data)])
    return tally.result().named(KEYS).pack(8)


numbers = st.floats(width=64) | st.sampled_from([0.0, 1.0, math.nan, math.inf, 1e300, 1e-300, 5e-324])


@examples(150)
@given(st.lists(st.lists(st.tuples(st.sampled_from(KEYS), st.lists(numbers, max_size=6)), max_size=4), min_size=1))
def test_parts_of_all_ranks_add_up(ranks):
    whole = {key: [x for rank in ranks for k, part in rank for x in part if k == key] for key in KEYS}
    rows = [Tensor(key, "float64", (len(found),), 0) for key, found in whole.items()]
    packed = [of_rank([(key, np.array(part, np.float64)) for key, part in rank]) for rank in ranks]
    summary = summarise(packed, rows, recorded=True)
    for found in summary.statistics:
        tensor = torch.tensor(whole[found.key], dtype=torch.float64)
        check_numbers(found, tensor)
        check_histogram(found, tensor)
    check_statistics(summary.statistics, {row.key: row for row in rows})
    flat = [x for found in whole.values() for x in found]
    assert (summary.nan, summary.inf) == (sum(map(math.isnan, flat)), sum(map(math.isinf, flat)))
    assert set(summary.keys) == {key for key, found in whole.items() if not all(map(math.isfinite, found))}


def test_beyond_the_limits_only_totals_are_sent(monkeypatch):
    bad = new_rows([0, 1], nan=[0, 3], inf=[0, 1])
    many = PartialStatistics.sum_of([bad], [new_bins(0, [1100, 1101], [5, 6])]).named(["fine", "odd"])
    tensors = [Tensor("fine", "float32", (11,), 0), Tensor("odd", "float32", (4,), 0)]

    def found(rows, bins):
        monkeypatch.setattr(partial_statistics, "MAX_ROWS", rows)
        monkeypatch.setattr(partial_statistics, "MAX_BINS", bins)
        return summarise([many.pack(1)], tensors, recorded=True)

    assert found(rows=2, bins=2).statistics[0].histogram == ((1100, 5), (1101, 6))
    assert found(rows=2, bins=1).statistics[0].histogram == ()
    few = found(rows=1, bins=2)
    assert few.statistics == ()
    assert (few.nan, few.inf, few.keys) == (3, 1, ("odd",))
    monkeypatch.setattr(partial_statistics, "MAX_TENSORS", 1)
    assert found(rows=2, bins=2).statistics == ()


def test_a_rank_names_few_of_many_bad_tensors():
    keys = [f"layer.{i}" for i in range(1000)]
    rows = new_rows(range(1000), nan=[1] * 1000)
    packed = PartialStatistics.sum_of([rows], []).named(keys).pack(10**6)
    assert len(packed) < 500, "totals only, where there are a million ranks"
    summary = summarise([packed], [Tensor(key, "float32", (1,), 0) for key in keys], recorded=True)
    assert summary.nan == 1000
    assert 0 < len(summary.keys) <= 16


@pytest.mark.parametrize("number", [1100, 1101, -1100, 26, 2123, 0])
def test_bins_have_the_range_that_they_say(number):
    low, high = bin_range(number)
    assert low <= high
    assert (low, high) == tuple(-x for x in reversed(bin_range(-number)))
    assert high == 2 * low or number <= 0 or high == math.inf


GOOD = TensorStatistics("w", 10, 1, 1, -2.0, 4.0, 0.5, 2.0, ((-1101, 3), (0, 4), (1102, 1)))
TENSORS = {"w": Tensor("w", "float32", (10,), 0), "b": Tensor("b", "uint8", (10,), 0, kind="bytes")}
FALSE = {
    "bytes": {"key": "b"},
    "another key": {"key": "v"},
    "too many": {"count": 11},
    "too few": {"count": 9},
    "less than no NaN": {"nan": -1},
    "more NaN than numbers": {"nan": 10},
    "extremes the wrong way round": {"min": 5.0},
    "a mean outside": {"mean": 4.1},
    "an rms outside": {"rms": 4.1},
    "a negative rms": {"rms": -1.0},
    "a missing mean": {"mean": None},
    "none of finite numbers": {"min": None, "max": None, "mean": None, "rms": None, "histogram": ()},
    "numbers where none is finite": {"nan": 9, "histogram": ()},
    "a bin in no order": {"histogram": ((0, 4), (-1101, 3), (1102, 1))},
    "a bin twice": {"histogram": ((0, 4), (0, 4))},
    "an empty bin": {"histogram": ((-1101, 3), (0, 5), (1102, 0))},
    "a bin beyond float64": {"histogram": ((2124, 8),)},
    "a bin below float64": {"histogram": ((25, 8),)},
    "a bin of many digits": {"histogram": ((10**30, 8),)},
    "bins of too few": {"histogram": ((0, 7),)},
}


@pytest.mark.parametrize("changed", FALSE.values(), ids=list(FALSE))
def test_statistics_that_cannot_be_true_are_refused(changed):
    check_statistics([GOOD], TENSORS)
    with pytest.raises(ValueError, match="statistics"):
        check_statistics([msgspec.structs.replace(GOOD, **changed)], TENSORS)


def test_statistics_of_a_tensor_stand_once():
    with pytest.raises(ValueError, match="twice"):
        check_statistics([GOOD, GOOD], TENSORS)
