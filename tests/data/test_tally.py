"""Statistics of bytes: whatever lies where in a file, and however it is cut into blocks and views."""

import math
import threading

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from milepost.core.dtypes import DTYPES
from milepost.core.manifest import Tensor
from milepost.core.partial_statistics import summarise
from milepost.core.shardfile import file_order
from milepost.data.tally import TalliedEntry, Tally
from tests.strategies import examples
from tests.tensors import check_histogram, check_statistics, random_tensor

NAMES = [name for name in DTYPES if name != "float4_e2m1fn_x2"]
WORDS = 1 << 10


def tallied(tensors, *, recording="histogram", cut=WORDS, threads=1, shift=0):
    """The statistics of these tensors as they would lie in a file, in blocks and views of these sizes."""
    order = sorted(tensors, key=lambda key: file_order(*described(tensors[key])))
    data, spans = bytearray(), []
    for key in order:
        spans.append(TalliedEntry(len(data), described(tensors[key])[0], list(tensors).index(key)))
        data += tensors[key].reshape(-1).view(torch.uint8).numpy().tobytes()
    room = memoryview(bytearray(len(data) + shift))[shift:]  # memory that is not aligned
    room[:] = data
    tally = Tally(recording)
    tally.begin(spans, len(data))
    starts = list(range(0, len(data), cut))

    def work():
        while starts:
            at = starts.pop()
            block = room[at : at + cut]
            middle = min(len(block), 64 * (1 + at // cut % 3))
            tally.add(at, [view for view in (block[:middle], block[middle:]) if len(view)])

    workers = [threading.Thread(target=work) for _ in range(threads)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    rows = [Tensor(key, described(t)[0], tuple(t.shape), 0) for key, t in tensors.items()]
    packed = tally.result().named(list(tensors)).pack(1)
    return summarise([packed], rows, recorded=recording != "finite")


def described(tensor):
    return str(tensor.dtype).removeprefix("torch."), tensor.numel() * tensor.element_size()


@examples(200)
@given(st.data(), st.sampled_from([256, WORDS, 1 << 16]), st.integers(0, 3))
def test_random_bits_of_all_dtypes_in_one_file(data, cut, shift):
    tensors = {}
    for number in range(data.draw(st.integers(1, 12))):
        name = data.draw(st.sampled_from(NAMES))
        count = data.draw(st.sampled_from([0, 1, 2, 3, 7, 100, 1000]))
        tensors[f"{number}"] = random_tensor(name, count, seed=data.draw(st.integers(0, 99)))
    found = tallied(tensors, cut=cut, shift=shift).statistics
    assert [one.key for one in found] == list(tensors)
    for one in found:
        check_statistics(one, tensors[one.key])
        check_histogram(one, tensors[one.key])


@pytest.mark.parametrize("name", NAMES)
def test_long_tensors_of_each_dtype(name):
    """Longer than a piece that is converted at once, of an odd length, and with something short at both ends."""
    count = (1 << 18) + (1 << 17) + 11
    tensors = {"before": torch.full((3,), 7.0), "after": torch.full((5,), -7.0)}
    for key in ("a", "b"):  # the second one begins in the middle of a piece
        tensors[key] = random_tensor(name, count, seed=ord(key))
    if tensors["a"].is_floating_point() and name != "float8_e8m0fnu":
        tensors["c"] = torch.randn(count, dtype=torch.float32).to(tensors["a"].dtype)
    found = {one.key: one for one in tallied(tensors, recording="numbers", cut=4 << 20, threads=3).statistics}
    for key, tensor in tensors.items():
        check_statistics(found[key], tensor)


VALUES = {
    "zeros": [0.0, -0.0],
    "all NaN": [math.nan] * 3,
    "both infinities": [math.inf, -math.inf],
    "negative only": [-1.0, -2.5, -1.5],
    "positive only": [1.0, 2.5, 1.5],
    "NaN among huge ones": [math.nan, 1e300, -1e300, 1e300],
    "huge": [1.7e308, 1.7e308, -1.7e308],
    "tiny": [5e-324, -5e-324, 1e-310],
    "tiny beside zero": [0.0] * 4 + [1e-200],
    "float32's ends": [3.4028234e38, -1.4e-45, 1.2e-38],
    "float16's ends": [65504.0, 6e-8, -6e-8],
    "all equal": [0.1] * 20000,
    "huge beside tiny": [1e-300, 1e300, 1e-300],
}


@pytest.mark.parametrize("values", VALUES.values(), ids=list(VALUES))
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16, torch.float8_e5m2])
@pytest.mark.parametrize("times", [1, 10_000])
def test_values_at_the_ends_of_floating_types(values, dtype, times):
    """In short tensors, and in long ones, which are looked at in another way."""
    tensor = torch.tensor(values, dtype=torch.float64).repeat(times if len(values) < 99 else 1).to(dtype)
    tensors = {"other": torch.ones(3, dtype=dtype), "x": tensor}
    check_histogram(tallied(tensors, cut=4 << 20).statistics[1], tensor)
    summary = tallied(tensors, cut=4 << 20, recording="numbers")
    check_statistics(summary.statistics[1], tensor)
    bad = int(tensor.isnan().sum()), int(tensor.isinf().sum()) if dtype.is_floating_point else 0
    assert (summary.nan, summary.inf) == bad
    assert summary.keys == (("x",) if sum(bad) else ())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("sign", [1, -1])
def test_extremes_of_numbers_of_one_sign(dtype, sign):
    """In the middle of a long tensor: its ends may be looked at in another way."""
    tensor = torch.full((30_000,), 2.0 * sign, dtype=dtype)
    tensor[15_000], tensor[15_001] = 1.5 * sign, 3.0 * sign
    check_statistics(tallied({"x": tensor}, cut=4 << 20, recording="numbers").statistics[0], tensor)


@pytest.mark.parametrize("parts", [(0.0, 1e-200), (1e200, 0.0, 1e-200), (1e-200, 1e200), (math.nan, 1e200, math.inf)])
def test_pieces_of_one_tensor_of_different_sizes_of_numbers(parts):
    tensor = torch.cat([torch.full((9000,), part, dtype=torch.float64) for part in parts])
    [found] = tallied({"x": tensor}, cut=1 << 16).statistics
    check_statistics(found, tensor)


@pytest.mark.parametrize("values", [[2**63 - 1, -(2**63)], [-(2**63)] * 9, [2**63 - 1] * 20_000, [0, 1, -1]])
def test_integers_at_the_ends_of_int64(values):
    tensor = torch.tensor(values, dtype=torch.int64)
    [found] = tallied({"x": tensor}).statistics
    check_statistics(found, tensor)
    assert found.rms <= 2.0**63


@examples(60)
@given(st.data())
def test_finite_only_finds_the_same_counts_and_nothing_else(data):
    tensors = {}
    for number in range(data.draw(st.integers(1, 8))):
        name = data.draw(st.sampled_from(NAMES))
        tensors[f"{number}"] = random_tensor(name, data.draw(st.sampled_from([1, 50, 9000])), seed=number)
    whole, brief = tallied(tensors), tallied(tensors, recording="finite")
    assert (brief.nan, brief.inf, brief.keys) == (whole.nan, whole.inf, whole.keys)
    assert brief.statistics == ()


def test_sums_do_not_depend_on_threads():
    tensors = {str(i): torch.randn(3000 + 7000 * i) for i in range(20)}
    once = tallied(tensors, cut=1 << 16)
    assert all(tallied(tensors, cut=1 << 16, threads=4) == once for _ in range(3))


def test_what_has_no_numbers_of_its_own_is_left_out():
    rows = [
        Tensor("x", "float32", (4,), 0),
        Tensor("tied", "float32", (4,), 0, same_as="x"),
        Tensor("bytes", "uint8", (16,), 0, kind="bytes"),
        Tensor("packed", "float4_e2m1fn_x2", (16,), 0),
        Tensor("zipped", "float32", (4,), 0, transforms=("stream.zstd/1",)),
    ]
    tally = Tally()
    tally.begin([TalliedEntry(0, "float32", 0)], 16)
    tally.add(0, [memoryview(np.arange(4, dtype=np.float32)).cast("B")])
    packed = tally.result().named([row.key for row in rows]).pack(1)
    assert [one.key for one in summarise([packed], rows, recorded=True).statistics] == ["x"]
