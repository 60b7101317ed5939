"""CRC-32 of bytes that lie one behind the other."""

import zlib

from hypothesis import given
from hypothesis import strategies as st

from milepost.core.crc import combine


@given(st.binary(max_size=300), st.binary(max_size=300))
def test_sum_of_two_runs_follows_from_the_sums_of_each(a, b):
    assert combine(zlib.crc32(a), zlib.crc32(b), len(b)) == zlib.crc32(a + b)
